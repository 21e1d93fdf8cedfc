//! Schedulers that send webhooks, over the canonical world.

use std::{fs, path::PathBuf, process::Stdio, time::Duration};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::{
    cluster::{Database, fresh_database},
    receiver::Message,
    world::{Node, PATIENCE, World, binary},
};

/// A secret that is going.
pub const OLD: &str = "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3";
/// The secret that replaces it.
pub const NEW: &str = "whsec_YWJjZGVmZ2hpamtsbW5vcHFyc3R1dnd4";
/// The secret `other`, of another receiver.
pub const STRANGER: &str = "whsec_c3RyYW5nZXJzdHJhbmdlcnN0cmFuZ2Vy";

/// A world whose schedulers have secrets.
pub struct Hooked {
    /// The database.
    pub database: Database,
    /// The nodes' world.
    pub world: World,
    dir: tempfile::TempDir,
}

impl Hooked {
    /// A world without nodes.
    ///
    /// # Errors
    /// If it can't be made.
    pub async fn new() -> Result<Self> {
        let database = fresh_database().await;
        let world = World::canonical(database.url(), false).await?;
        let dir = tempfile::tempdir()?;
        let secrets = json!({"default": [OLD, NEW], "other": STRANGER});
        fs::write(dir.path().join("secrets.json"), secrets.to_string())?;
        Ok(Self { database, world, dir })
    }

    /// The file of secrets: `default` has two.
    pub fn secrets(&self) -> PathBuf {
        self.dir.path().join("secrets.json")
    }

    /// Gives the agent a webhook of its own.
    ///
    /// # Errors
    /// If its file can't be written.
    pub fn agent_hook(&self, hook: &Value) -> Result<()> {
        let path = self.world.agent.agent_path();
        let mut config: Value = serde_json::from_str(&fs::read_to_string(&path)?)?;
        config["webhook"] = hook.clone();
        Ok(fs::write(path, config.to_string())?)
    }

    /// A scheduler with the secrets and, where it is given, a server-wide endpoint.
    ///
    /// # Errors
    /// If it doesn't start.
    pub async fn scheduler(&self, url: Option<&str>, more: &[&str]) -> Result<Node> {
        let file = self.secrets().display().to_string();
        let mut flags = vec!["--webhook-secret-file", &file, "--metrics-bind", "127.0.0.1:0"];
        flags.extend(url.iter().flat_map(|url| ["--webhook-url", url]));
        flags.extend(more);
        Ok(self.world.node("scheduler", &flags, &[]).await?.0)
    }

    /// An API node and a worker.
    ///
    /// # Errors
    /// If they don't start.
    pub async fn nodes(&self) -> Result<(Vec<Node>, String)> {
        let (api, address) = self.world.node("api", &[], &[]).await?;
        let (worker, _) = self.world.node("worker", &[], &[]).await?;
        Ok((vec![api, worker], address))
    }

    /// A count of the database.
    ///
    /// # Errors
    /// If there is none.
    pub async fn count(&self, sql: &str) -> Result<i64> {
        Ok(self.database.connect().await.query_one(sql, &[]).await?.try_get(0)?)
    }

    /// Waits until a count is as wanted.
    ///
    /// # Errors
    /// If that takes too long.
    pub async fn until_count(&self, sql: &str, wanted: i64) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        let mut pause = tokio::time::interval(Duration::from_millis(50));
        loop {
            pause.tick().await;
            let count = self.count(sql).await?;
            if count == wanted {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "{sql}: {count} instead of {wanted}");
        }
    }

    /// Runs `holdfast webhooks`.
    ///
    /// # Errors
    /// If it fails.
    pub async fn command(&self, arguments: &[&str]) -> Result<String> {
        let mut command = tokio::process::Command::new(binary()?);
        command.arg("webhooks").args(arguments).args(["--database-url", self.database.url()]);
        let output = command.stdin(Stdio::null()).kill_on_drop(true).output().await?;
        ensure!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Completes the two deferred calls that a webhook tells of.
    ///
    /// # Errors
    /// If one is refused.
    pub async fn complete(&self, api: &str, told: &Message) -> Result<()> {
        for call in told.body["calls"].as_array().context("calls")? {
            let token = call["continuation_token"].as_str().context("a token")?;
            self.world.complete(api, token, "done", false).await?;
        }
        Ok(())
    }
}

/// Counts deliveries that wait or were given up.
pub const LEFT: &str = "SELECT count(*) FROM webhook_deliveries";
/// Counts endpoints.
pub const PLACED: &str = "SELECT count(*) FROM webhook_endpoints";

/// Nothing that a receiver and its sender alone may know stands in a text.
///
/// # Errors
/// If something does.
pub fn hides(text: &str, url: &str) -> Result<()> {
    let bare = |secret: &str| secret.trim_start_matches("whsec_").to_owned();
    let texts = ["0123456789abcdef01234567", "abcdefghijklmnopqrstuvwx"].map(str::to_owned);
    for hidden in [bare(OLD), bare(NEW), bare(STRANGER), url.to_owned(), "webhook-signature".to_owned()]
        .iter()
        .chain(&texts)
    {
        ensure!(!text.contains(hidden.as_str()), "{hidden} stands in: {text}");
    }
    Ok(())
}
