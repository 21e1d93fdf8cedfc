//! A place for a node: whoever fills it, it has one role and one wire to the database.

use std::{path::PathBuf, sync::Arc};

use anyhow::Result;
use tokio::time::Instant;

use super::ground::Ground;
use crate::{
    wire::Wire,
    world::{Node, PANIC, PATIENCE, World},
};

/// What a node does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Worker,
    Api,
    Scheduler,
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Self::Worker => "worker",
            Self::Api => "api",
            Self::Scheduler => "scheduler",
        }
    }
}

/// What only a fault of Holdfast's own makes a node say.
const ALARMS: [&str; 3] = ["\"run.broken\"", PANIC, "couldn't store that the run failed"];
/// How long a node that is told to leave may take, in seconds.
const GRACE: &str = "3";

/// The variable that names a directory in which the logs of all nodes, and the requests that the model was
/// sent, are left behind.
pub(super) const LOGS_VARIABLE: &str = "HOLDFAST_CHAOS_LOGS";

/// What nodes that are gone have left: the alarms among what they said.
#[derive(Debug, Default)]
pub(super) struct Remains {
    pub(super) alarms: Vec<String>,
    nodes: usize,
}

impl Remains {
    /// Looks through what a node said, and keeps it where somebody wants to read it.
    pub(super) fn take(&mut self, node: &Node) {
        let text = node.log_text();
        let said = text.lines().filter(|line| ALARMS.iter().any(|alarm| line.contains(alarm)));
        self.alarms.extend(said.map(|line| format!("a node said: {line}")));
        self.nodes += 1;
        if let Some(dir) = std::env::var_os(LOGS_VARIABLE).map(PathBuf::from) {
            let _ = std::fs::write(dir.join(format!("node-{}.log", self.nodes)), text);
        }
    }
}

/// A place for a node.
pub(super) struct Post {
    pub(super) role: Role,
    pub(super) wire: Arc<Wire>,
    pub(super) node: Node,
    /// Where it listens.
    pub(super) address: String,
    url: String,
}

impl Post {
    /// Fills a new place.
    ///
    /// # Errors
    /// If the node doesn't start.
    pub(super) async fn fill(role: Role, world: &World, ground: &Ground) -> Result<Self> {
        let wire = Arc::new(Wire::to(ground.address()).await?);
        let url = ground.url_by(wire.address())?;
        let (node, address) = start(role, world, &url).await?;
        Ok(Self { role, wire, node, address, url })
    }

    /// Starts another node in this place. Returns the one that was there, still at work.
    ///
    /// # Errors
    /// If it doesn't start.
    pub(super) async fn replace(&mut self, world: &World) -> Result<Node> {
        let (node, address) = start(self.role, world, &self.url).await?;
        self.address = address;
        Ok(std::mem::replace(&mut self.node, node))
    }

    /// Kills the node, and starts another one in its place.
    ///
    /// # Errors
    /// If that can't be done.
    pub(super) async fn kill(&mut self, world: &World, remains: &mut Remains) -> Result<()> {
        self.complain(remains)?;
        self.node.kill().await?;
        let old = self.replace(world).await?;
        remains.take(&old);
        Ok(())
    }

    /// Says so if the node has ended by itself.
    ///
    /// # Errors
    /// If the system can't say.
    pub(super) fn complain(&mut self, remains: &mut Remains) -> Result<()> {
        if self.node.has_ended()? {
            remains.alarms.push(format!("a {} ended by itself: {}", self.role.name(), self.node.log_text()));
        }
        Ok(())
    }
}

/// Starts a node as a supervisor does: one that can't begin because the database is away is started again.
async fn start(role: Role, world: &World, url: &str) -> Result<(Node, String)> {
    let more: &[&str] = if role == Role::Worker { &["--shutdown-grace", GRACE] } else { &[] };
    let until = Instant::now() + PATIENCE;
    loop {
        match world.node_over(url, role.name(), more, &[]).await {
            Err(error) if Instant::now() >= until => return Err(error),
            Err(_) => {}
            started => return started,
        }
    }
}
