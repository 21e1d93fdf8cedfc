//! The agents that a worker has.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use holdfast_engine::agent::Agent;
use holdfast_store::claim::Lease;
use holdfast_tools::{LoadedAgent, Toolbox};

/// An agent as runs use it: its rules, and the tools that may have changed since.
#[derive(Clone)]
pub(crate) struct Member {
    agent: Arc<Agent>,
    pub(crate) toolbox: Arc<Toolbox>,
    /// The agent as it was last asked for, with the edition of its tools.
    ready: Arc<Mutex<Option<Ready>>>,
}

/// An agent with the edition of the tools that it was made with.
type Ready = (u64, Arc<Agent>);

impl Member {
    /// The agent with the tools that its toolbox offers now.
    pub(crate) fn agent(&self) -> Arc<Agent> {
        // Read before the tools: a change in between makes the next caller look again.
        let edition = self.toolbox.edition();
        let mut ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner);
        match &*ready {
            Some((known, agent)) if *known == edition => Arc::clone(agent),
            _ => {
                let agent = Arc::new(Agent { tools: self.toolbox.specs(), ..(*self.agent).clone() });
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
            (agent.slug.clone(), Member { agent, toolbox: loaded.toolbox, ready: Arc::default() })
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
