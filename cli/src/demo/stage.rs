//! The files that the demo plays with: those of `docs/examples/inventory`, beside a database of its own.

use std::{
    fs, io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};

use crate::{failure::Failure, settings};

/// The script of the model.
pub(super) const MODEL: &str = include_str!("../../../docs/examples/inventory/model.json");
const AGENT: &str = include_str!("../../../docs/examples/inventory/agent.json");
const TOOLS: [(&str, &str); 3] = [
    ("fetch_local", include_str!("../../../docs/examples/inventory/tools/fetch_local")),
    ("fetch_remote_a", include_str!("../../../docs/examples/inventory/tools/fetch_remote_a")),
    ("fetch_remote_b", include_str!("../../../docs/examples/inventory/tools/fetch_remote_b")),
];

/// The agent's slug.
pub(super) const SLUG: &str = "inventory";
/// What is asked.
pub(super) const QUESTION: &str = "How many M8 bolts do we have?";
/// The deferred tools, with what the outside answers for each.
pub(super) const OUTSIDE: [(&str, &str); 2] =
    [("bash_fetch_remote_a", "75 pieces"), ("bash_fetch_remote_b", "40 pieces")];
/// The only right answer.
pub(super) const ANSWER: &str = "In stock: here 120 pieces, in Lyon 75 pieces, in Oslo 40 pieces.";

/// The demo's directory.
#[derive(Debug)]
pub(super) struct Stage {
    /// Home of the database, and of everything else.
    pub(super) home: PathBuf,
    workspace: PathBuf,
}

impl Stage {
    /// Writes the files for a model at `model_url`.
    pub(super) fn set(home: &Path, model_url: &str) -> Result<Self, Failure> {
        let failed = |error: io::Error| Failure::Failed(format!("{}: {error}", home.display()));
        let home = std::path::absolute(home).map_err(failed)?;
        let stage = Self { workspace: home.join("workspace"), home: home.clone() };
        stage.write(model_url).map_err(failed)?;
        Ok(stage)
    }

    fn write(&self, model_url: &str) -> io::Result<()> {
        let tools = self.workspace.join("tools");
        fs::create_dir_all(&tools)?;
        fs::create_dir_all(self.logs())?;
        for (name, text) in TOOLS {
            // Replaced as a whole: an old server might be running the old one.
            let fresh = self.workspace.join(format!("{name}.new"));
            fs::write(&fresh, text)?;
            fs::set_permissions(&fresh, fs::Permissions::from_mode(0o755))?;
            fs::rename(&fresh, tools.join(name))?;
        }
        let mut agent: Value = serde_json::from_str(AGENT)?;
        agent["modelUrl"] = json!(model_url);
        fs::write(self.agent_file(), format!("{agent:#}\n"))?;
        fs::write(self.keys_file(), "{}\n")?;
        // Ends the search for settings: a file further up is none of the demo's business.
        fs::write(self.workspace.join(settings::FILE), "")
    }

    /// Where servers run.
    pub(super) fn workspace(&self) -> &Path {
        &self.workspace
    }

    pub(super) fn agent_file(&self) -> PathBuf {
        self.workspace.join("agent.json")
    }

    pub(super) fn keys_file(&self) -> PathBuf {
        self.workspace.join("secret-keys")
    }

    pub(super) fn logs(&self) -> PathBuf {
        self.home.join("logs")
    }

    /// How often the worker's tool ran for a session.
    pub(super) fn local_runs(&self, session: &str) -> usize {
        let noted = fs::read_to_string(self.workspace.join("fetch_local.log")).unwrap_or_default();
        noted.lines().filter(|line| line.starts_with(session)).count()
    }
}

#[cfg(test)]
mod tests {
    use holdfast_tools::load_agent;

    use super::*;
    use crate::scripted_model::Script;

    #[tokio::test]
    async fn the_stage_holds_an_agent_that_loads_without_a_warning() {
        let dir = tempfile::tempdir().expect("a directory");
        let stage = Stage::set(dir.path(), "http://127.0.0.1:1/v1").expect("set");
        let loaded = load_agent(&stage.agent_file()).await.expect("loads");
        assert_eq!(loaded.warnings, Vec::<String>::new());
        assert_eq!(loaded.agent.slug, SLUG);
        assert_eq!(loaded.agent.target.base_url, "http://127.0.0.1:1/v1");
        let tags: Vec<_> = loaded
            .agent
            .tools()
            .iter()
            .map(|tool| (tool.name.as_str(), loaded.agent.policy.of_tool(&tool.name).disposition.tag()))
            .collect();
        let [a, b] = OUTSIDE.map(|(tool, _)| (tool, "defer"));
        assert_eq!(tags, [("bash_fetch_local", "runSync"), a, b]);
        assert_eq!(stage.local_runs("any"), 0);
    }

    #[test]
    fn the_script_is_one() {
        assert!(Script::parse(MODEL).is_ok());
    }
}
