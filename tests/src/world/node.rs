//! A node as a process of the real binary.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Stdio,
    sync::{Arc, Mutex},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, Command},
    sync::watch,
};

use super::PATIENCE;

/// The binary under test: beside this test's own, where the test command builds it.
///
/// # Errors
/// If it isn't there.
pub fn binary() -> Result<PathBuf> {
    let me = std::env::current_exe()?;
    let path = me
        .ancestors()
        .map(|dir| dir.join("holdfast"))
        .find(|path| path.is_file())
        .context("the holdfast binary is not built; tests/run builds it")?;
    Ok(path)
}

/// The binary of the previous release, which the test command builds from the commit that
/// `tests/previous-release` names.
///
/// # Errors
/// If it isn't there.
pub fn previous_binary() -> Result<PathBuf> {
    let me = std::env::current_exe()?;
    let path = me
        .ancestors()
        .map(|dir| dir.join("previous/holdfast"))
        .find(|path| path.is_file())
        .context("the previous release is not built; tests/build-previous builds it")?;
    Ok(path)
}

/// How long is waited for the log of a process that has ended.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// A node of Holdfast: one process.
pub struct Node {
    child: Child,
    pid: u32,
    log: Arc<Mutex<Vec<String>>>,
    bound: watch::Receiver<Option<String>>,
}

impl Node {
    /// Starts a node; its log is kept.
    ///
    /// # Errors
    /// If the binary can't be run.
    pub fn start(role: &str, arguments: &[String], environment: &[(String, String)]) -> Result<Self> {
        Self::start_from(&binary()?, role, arguments, environment)
    }

    /// As [`Node::start`], from another binary.
    ///
    /// # Errors
    /// If it can't be run.
    pub fn start_from(
        binary: &Path,
        role: &str,
        arguments: &[String],
        environment: &[(String, String)],
    ) -> Result<Self> {
        let mut command = Command::new(binary);
        command.arg(role).args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        command.envs(environment.iter().cloned()).env_remove("DATABASE_URL").kill_on_drop(true);
        let mut child = command.spawn()?;
        let pid = child.id().context("the node ended at once")?;
        let stderr = child.stderr.take().context("no log")?;
        let log = Arc::new(Mutex::new(Vec::new()));
        let (sender, bound) = watch::channel(None);
        let lines = Arc::clone(&log);
        let _reading = tokio::spawn(async move {
            let mut reader = BufReader::new(stderr).lines();
            while let Ok(Some(line)) = reader.next_line().await {
                let started = serde_json::from_str::<Value>(&line)
                    .ok()
                    .filter(|entry| entry["kind"] == "server.started");
                // Kept first, so that whoever learns of the start finds the line.
                if let Ok(mut lines) = lines.lock() {
                    lines.push(line);
                }
                if let Some(entry) = started {
                    sender.send_replace(Some(entry["bind"].as_str().unwrap_or_default().to_owned()));
                }
            }
        });
        Ok(Self { child, pid, log, bound })
    }

    /// Waits until the node has started. Returns where it listens.
    ///
    /// # Errors
    /// If it ends before, or takes too long; the error shows its log.
    pub async fn started(&mut self) -> Result<String> {
        let mut bound = self.bound.clone();
        let waiting = tokio::time::timeout(PATIENCE, bound.wait_for(Option::is_some));
        match waiting.await {
            Ok(Ok(bind)) => Ok(bind.clone().unwrap_or_default()),
            _ => bail!("the node did not start: {}", self.log_text()),
        }
    }

    /// Its log so far.
    pub fn log_text(&self) -> String {
        self.log.lock().map(|lines| lines.join("\n")).unwrap_or_default()
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The most memory that it has had resident so far, in bytes, as Linux has it.
    ///
    /// # Errors
    /// If it has ended.
    pub fn peak_memory(&self) -> Result<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("no VmHWM")?;
        let kib: u64 = line.trim().trim_end_matches("kB").trim().parse()?;
        Ok(kib * 1024)
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// If there is no such process any more.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill_process(self.process()?, signal)?)
    }

    /// Its process.
    ///
    /// # Errors
    /// Never, where processes have ids.
    pub fn process(&self) -> Result<Pid> {
        i32::try_from(self.pid).ok().and_then(Pid::from_raw).context("no process id")
    }

    /// Kills it with SIGKILL and waits for its end.
    ///
    /// # Errors
    /// If it can't be killed.
    pub async fn kill(&mut self) -> Result<()> {
        self.child.kill().await.context("SIGKILL")
    }

    /// Waits for its end by itself, and for its log.
    ///
    /// # Errors
    /// If it takes too long.
    pub async fn ended(&mut self) -> Result<std::process::ExitStatus> {
        let status =
            tokio::time::timeout(PATIENCE, self.child.wait()).await.context("the node doesn't end")??;
        let mut bound = self.bound.clone();
        let read = async { while bound.changed().await.is_ok() {} };
        // Somebody whom it has started may hold the pipe open.
        let _ = tokio::time::timeout(LAST_WORDS, read).await;
        Ok(status)
    }

    /// Whether it has ended.
    ///
    /// # Errors
    /// If the system can't say.
    pub fn has_ended(&mut self) -> Result<bool> {
        Ok(self.status()?.is_some())
    }

    /// How it has ended, if it has.
    ///
    /// # Errors
    /// If the system can't say.
    pub fn status(&mut self) -> Result<Option<std::process::ExitStatus>> {
        Ok(self.child.try_wait()?)
    }
}
