//! An agent's files.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use anyhow::Result;
use serde_json::{Value, json};

/// An agent's files in a directory of their own.
pub struct AgentFiles {
    dir: tempfile::TempDir,
}

impl AgentFiles {
    /// The agent of the canonical flow: `bash_fetch_local` runs in the worker and notes each start in
    /// `effects.log`; `fetch_remote_*` is deferred. `idempotent` is what a rule says of the former.
    ///
    /// # Errors
    /// If files can't be written.
    pub fn canonical(model_url: &str, idempotent: bool) -> Result<Self> {
        let files = Self { dir: tempfile::tempdir()? };
        fs::create_dir(files.dir.path().join("tools"))?;
        files.tool(
            "fetch-local",
            &json!({"slug": "fetch_local", "description": "Fetches local data.", "args": [
                {"name": "what", "description": "what to fetch", "type": "string", "backing_type": "string", "arity": "single", "mode": "positional"}]}),
            &format!("echo \"$HOLDFAST_IDEMPOTENCY_KEY\" >> '{}'\necho \"got $2\"", files.effects_path().display()),
        )?;
        files.agent(&json!({
            "slug": "canonical", "flavor": "OpenAIv1", "modelUrl": model_url, "modelName": "scripted",
            "systemPrompt": ["You fetch things."], "toolDirectory": "tools",
            "toolCallPolicyConfig": {"default": {"tag": "runSync"}, "rules": [
                {"tool": "fetch_remote_*", "disposition": {"tag": "defer", "reason": "external worker"}},
                {"tool": "bash_fetch_local", "disposition": {"tag": "runSync"}, "idempotent": idempotent}]}
        }))?;
        Ok(files)
    }

    /// The agent that a directory holds.
    pub fn in_dir(dir: tempfile::TempDir) -> Self {
        Self { dir }
    }

    /// An agent with these tools, each a name and a shell script that is run with `run …`.
    ///
    /// # Errors
    /// If files can't be written.
    pub fn with_tools(config: &Value, tools: &[(&str, Value, &str)]) -> Result<Self> {
        let files = Self { dir: tempfile::tempdir()? };
        fs::create_dir(files.dir.path().join("tools"))?;
        for (name, described, script) in tools {
            files.tool(name, described, script)?;
        }
        files.agent(config)?;
        Ok(files)
    }

    fn tool(&self, name: &str, described: &Value, run: &str) -> Result<()> {
        let path = self.dir.path().join("tools").join(name);
        let script = format!(
            "#!/bin/bash\nif [ \"$1\" = describe ]; then\ncat <<'DESCRIBED'\n{described}\nDESCRIBED\nexit 0\nfi\n{run}\n"
        );
        fs::write(&path, script)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        Ok(())
    }

    fn agent(&self, config: &Value) -> Result<()> {
        fs::write(self.dir.path().join("agent.json"), config.to_string())?;
        Ok(())
    }

    /// The agent file.
    pub fn agent_path(&self) -> PathBuf {
        self.dir.path().join("agent.json")
    }

    /// Where tools note that they were started.
    pub fn effects_path(&self) -> PathBuf {
        self.dir.path().join("effects.log")
    }

    /// How often each call was started, by its idempotency key.
    pub fn effects(&self) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for line in fs::read_to_string(self.effects_path()).unwrap_or_default().lines() {
            *counts.entry(line.to_owned()).or_insert(0) += 1;
        }
        counts
    }

    /// The directory of it all.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }
}
