//! The demo's servers: processes of this same program.

use std::{
    io,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::{
    fs::File,
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    process::{Child, ChildStderr, Command},
    sync::oneshot,
    time::timeout,
};

use super::stage::Stage;
use crate::failure::Failure;

/// How long a server may take to start.
const START: Duration = Duration::from_secs(60);
/// How long it may take to stop when it is asked to.
const STOP: Duration = Duration::from_secs(20);

/// A server process. Dropping it kills it.
#[derive(Debug)]
pub(super) struct Server {
    pub(super) name: &'static str,
    child: Child,
    /// Where it listens, if it does.
    bind: Option<String>,
}

impl Server {
    /// Starts a server of a role and waits until it says that it has started.
    pub(super) async fn start(
        stage: &Stage,
        database_url: &str,
        name: &'static str,
        role: &str,
    ) -> Result<Self, Failure> {
        let failed = |error: io::Error| Failure::Failed(format!("{name}: {error}"));
        let mut command = Command::new(std::env::current_exe().map_err(failed)?);
        command.arg(role).arg("--agent-file").arg(stage.agent_file());
        match role {
            "api" => command.args(["--bind", "127.0.0.1:0"]),
            _ => command.arg("--api-keys").arg(stage.keys_file()),
        };
        for (variable, _) in std::env::vars_os() {
            // Settings of the person who watches aren't the demo's.
            let text = variable.to_string_lossy();
            if text.starts_with("HOLDFAST_") || text == "DATABASE_URL" || text == "RUST_LOG" {
                command.env_remove(&variable);
            }
        }
        // In the environment, as a command line can be read by everybody on the machine.
        command.env("HOLDFAST_DATABASE_URL", database_url);
        command.current_dir(stage.workspace()).kill_on_drop(true);
        // A group of its own, so that Ctrl-C reaches the demo alone, which then stops it in order.
        command.process_group(0).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(failed)?;
        let log = stage.logs().join(format!("{name}.log"));
        let (started, starting) = oneshot::channel();
        if let Some(stderr) = child.stderr.take() {
            let file = File::create(&log).await.map_err(failed)?;
            tokio::spawn(keep_log(stderr, file, started));
        }
        match timeout(START, starting).await {
            Ok(Ok(line)) => {
                let bind = line["bind"].as_str().map(str::to_owned);
                Ok(Self { name, child, bind })
            }
            Ok(Err(_)) => {
                Err(Failure::Failed(format!("{name} ended before it had started: {}", last_line(&log))))
            }
            Err(_) => Err(Failure::Failed(format!("{name} didn't start in time; see {}", log.display()))),
        }
    }

    /// The base URL of an API node.
    pub(super) fn url(&self) -> String {
        format!("http://{}", self.bind.as_deref().unwrap_or_default())
    }

    /// The process's id, while it runs.
    pub(super) fn pid(&self) -> u32 {
        self.child.id().unwrap_or_default()
    }

    /// Kills it as a crash would: SIGKILL.
    pub(super) async fn kill(mut self) -> Result<(), Failure> {
        self.child.kill().await.map_err(|error| Failure::Failed(format!("killing {}: {error}", self.name)))
    }

    /// Asks it to stop, and waits.
    pub(super) async fn stop(mut self) {
        let pid = self.child.id().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
        if let Some(pid) = pid {
            // It may have ended by itself.
            let _ = kill_process(pid, Signal::TERM);
        }
        if timeout(STOP, self.child.wait()).await.is_err() {
            let _ = self.child.kill().await;
        }
    }
}

/// Copies what a server says to its log file, and passes on the line that says that it has started.
async fn keep_log(stderr: ChildStderr, mut file: File, started: oneshot::Sender<Value>) {
    let mut started = Some(started);
    let mut lines = BufReader::new(stderr).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        // A full disk must not block the server on a full pipe.
        let _ = file.write_all(format!("{line}\n").as_bytes()).await;
        let _ = file.flush().await;
        if started.is_some()
            && let Ok(value) = serde_json::from_str::<Value>(&line)
            && value["kind"] == "server.started"
            && let Some(started) = started.take()
        {
            let _ = started.send(value);
        }
    }
}

fn last_line(log: &Path) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let last = text.lines().last().unwrap_or("it said nothing");
    let value: Value = serde_json::from_str(last).unwrap_or_default();
    value["error"].as_str().unwrap_or(last).to_owned()
}

/// How a person calls this program.
pub(super) fn program() -> String {
    let exe = std::env::current_exe().unwrap_or_else(|_| PathBuf::from("holdfast"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|dir| dir.join("holdfast")).find(|file| file.is_file());
    let same = found.and_then(|file| file.canonicalize().ok()) == exe.canonicalize().ok();
    if same { "holdfast".to_owned() } else { exe.display().to_string() }
}
