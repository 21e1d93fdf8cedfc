//! The agents that a worker has.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use holdfast_engine::agent::Agent;
use holdfast_store::claim::Lease;
use holdfast_tools::{LoadedAgent, Toolbox, offered};

/// An agent as runs use it: its rules, and the tools that may have changed since.
#[derive(Clone)]
pub(crate) struct Member {
    agent: Arc<Agent>,
    pub(crate) toolbox: Arc<Toolbox>,
    /// Where the agent file is.
    pub(crate) dir: PathBuf,
    /// The agent as it was last asked for, with the edition of its tools.
    ready: Arc<Mutex<Option<Ready>>>,
}

/// An agent with the edition of the tools that it was made with.
type Ready = (u64, Arc<Agent>);

impl Member {
    /// The agent with the tools that its toolbox offers now, and those that the engine carries out.
    pub(crate) fn agent(&self) -> Arc<Agent> {
        // Read before the tools: a change in between makes the next caller look again.
        let edition = self.toolbox.edition();
        let mut ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner);
        match &*ready {
            Some((known, agent)) if *known == edition => Arc::clone(agent),
            _ => {
                let mut agent = (*self.agent).clone();
                agent.offer_tools(offered(&self.toolbox, &self.agent.builtins));
                let agent = Arc::new(agent);
                *ready = Some((edition, Arc::clone(&agent)));
                agent
            }
        }
    }
}

/// All of them, by slug. A process has one revision of each.
pub(crate) struct Roster(HashMap<String, Member>);

impl Roster {
    pub(crate) fn new(agents: Vec<LoadedAgent>) -> Self {
        let member = |loaded: LoadedAgent| {
            let agent = Arc::new(loaded.agent);
            let dir = loaded.path.parent().unwrap_or(Path::new("/")).to_owned();
            (agent.slug.clone(), Member { agent, toolbox: loaded.toolbox, dir, ready: Arc::default() })
        };
        Self(agents.into_iter().map(member).collect())
    }

    /// What a claim asks for, as `slug@revision`.
    pub(crate) fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self
            .0
            .values()
            .map(|member| format!("{}@{}", member.agent.slug, member.agent.revision))
            .collect();
        names.sort_unstable();
        names
    }

    /// The agent of a lease. A claim asks only for agents that are here.
    pub(crate) fn of(&self, lease: &Lease) -> Option<&Member> {
        self.0.get(&lease.agent)
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Member> {
        self.0.values()
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt as _, path::Path};

    use holdfast_tools::load_agents;
    use serde_json::json;

    use super::*;

    fn tool(path: &Path, slug: &str) {
        let about = json!({"slug": slug, "description": "does it", "args": []});
        fs::write(path, format!("#!/bin/sh\necho '{about}'\n")).expect("written");
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("made executable");
    }

    #[tokio::test]
    async fn tools_of_the_engine_stay_while_programs_come_and_go() {
        let dir = tempfile::tempdir().expect("a directory");
        let put = |name: &str, slug: &str, helpers: serde_json::Value| {
            let config = json!({"slug": slug, "flavor": "OpenAIv1", "modelUrl": "http://m", "modelName": "x",
                "toolDirectory": "tools", "extraAgents": helpers});
            fs::write(dir.path().join(name), config.to_string()).expect("written");
        };
        put("a.json", "caller", json!([{"slug": "helper", "path": "b.json"}]));
        put("b.json", "helper", json!([]));
        let tools = dir.path().join("tools");
        fs::create_dir(&tools).expect("created");
        tool(&tools.join("one"), "one");
        let loaded = load_agents(&[dir.path().join("a.json")], &[]).await.expect("loads");
        let roster = Roster::new(loaded);
        let slugs: Vec<String> =
            roster.names().iter().filter_map(|name| name.split('@').next().map(str::to_owned)).collect();
        assert_eq!(slugs, ["caller", "helper"], "what a claim asks for");
        let caller = roster.all().find(|member| member.agent.slug == "caller").expect("it was loaded");
        let offered = || {
            let agent = caller.agent();
            assert!(agent.builtin("prompt_agent_helper").is_some());
            agent.tools().iter().map(|tool| tool.name.clone()).collect::<Vec<_>>()
        };
        assert_eq!(offered(), ["bash_one", "prompt_agent_helper"]);
        tool(&tools.join("two"), "two");
        caller.toolbox.refresh().await;
        assert_eq!(offered(), ["bash_one", "bash_two", "prompt_agent_helper"]);
        for name in ["one", "two"] {
            fs::remove_file(tools.join(name)).expect("removed");
        }
        caller.toolbox.refresh().await;
        assert_eq!(offered(), ["prompt_agent_helper"]);
    }
}
