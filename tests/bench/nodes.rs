//! Nodes of Holdfast in processes of their own: this program started again as the `holdfast` command, so
//! that what is measured is never another build's. What nodes warn of goes to standard error.

use std::{
    ffi::OsString,
    io::{Read as _, Write as _},
    path::{Path, PathBuf},
    process::{ExitCode, Stdio},
};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::{Child, Command},
};

use crate::{model::Model, rig::Rig};

/// The first argument of such a process.
pub(crate) const ROLE: &str = "holdfast";

/// The slug of the agent that nodes serve.
pub(crate) const AGENT: &str = "served";

/// A node. Dropping it kills it.
pub(crate) struct Node {
    /// Where its API listens; empty without one.
    pub(crate) url: String,
    /// Its process.
    pub(crate) pid: u32,
    _child: Child,
}

/// Writes the file of [`AGENT`], which defers whatever the model calls.
pub(crate) fn agent_file(rig: &Rig, model: &Model) -> Result<PathBuf> {
    written(rig, model, &json!({"tag": "defer", "reason": "somebody decides"}))
}

/// Writes the file of [`AGENT`], which has no tool: whatever the model calls fails, and the model is asked on.
pub(crate) fn looping_agent_file(rig: &Rig, model: &Model) -> Result<PathBuf> {
    written(rig, model, &json!({"tag": "runSync"}))
}

fn written(rig: &Rig, model: &Model, default: &Value) -> Result<PathBuf> {
    let path = rig.dir().join("served.json");
    let agent = json!({
        "slug": AGENT, "flavor": "OpenAI", "modelUrl": model.url, "modelName": "bench",
        "toolCallPolicyConfig": {"default": default}
    });
    std::fs::write(&path, agent.to_string())?;
    Ok(path)
}

impl Node {
    /// Starts a node of a role and waits until it is ready.
    pub(crate) async fn start(rig: &Rig, agent: &Path, role: &str, more: &[&str]) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args([ROLE, role, "--threads", "1", "--database-url", &rig.url, "--agent-file"])
            .arg(agent)
            .args(if role == "api" { &["--bind", "127.0.0.1:0"][..] } else { &[] })
            .args(more)
            .current_dir(rig.dir())
            .env_remove("DATABASE_URL")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let pid = child.id().context("a node ended at once")?;
        let mut log = BufReader::new(child.stderr.take().context("no log")?).lines();
        let url = loop {
            let line = log.next_line().await?.context("a node ended at its start")?;
            let entry = pass_on(&line);
            if entry["kind"] == "server.started" {
                break entry["bind"].as_str().map_or_else(String::new, |bind| format!("http://{bind}"));
            }
        };
        tokio::spawn(async move {
            while let Ok(Some(line)) = log.next_line().await {
                pass_on(&line);
            }
        });
        Ok(Self { url, pid, _child: child })
    }
}

/// Reads a line of a node's log and shows it if it isn't just news.
fn pass_on(line: &str) -> Value {
    let entry: Value = serde_json::from_str(line).unwrap_or_default();
    if entry["level"] != "info" {
        let _ = writeln!(std::io::stderr(), "{line}");
    }
    entry
}

/// The work of such a process: one command line, until its standard input is closed.
pub(crate) fn main(arguments: &[String]) -> ExitCode {
    std::thread::spawn(|| {
        let _ = std::io::stdin().read(&mut [0]);
        std::process::exit(0);
    });
    // Before anything can open a TLS connection. An error would mean that a provider is there already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let program = std::iter::once(OsString::from(ROLE));
    holdfast_cli::run(program.chain(arguments.iter().map(OsString::from)))
}
