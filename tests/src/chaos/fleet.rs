//! The nodes of the chaos, and what befalls them.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Arc, Mutex},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_postgres::Client as Postgres;

use super::{client::Addresses, dice::Dice, stage};
use crate::world::{Node, Signal, World};

/// Seconds of a lease.
const LEASE_TTL: u64 = 2;
/// How long a worker stands still: longer than a lease.
const FROZEN: Duration = Duration::from_millis(3_300);
/// How long a worker that is told to leave may take.
const GRACE: &str = "3";
/// Between two faults.
const BETWEEN_FAULTS: Duration = Duration::from_millis(700);
/// What only a fault of Holdfast's own makes a node say.
const ALARMS: [&str; 3] = ["\"run.broken\"", "panicked at", "couldn't store that the run failed"];

/// The variable that names a directory in which the logs of all nodes, and the requests that the model was
/// sent, are left behind.
const LOGS_VARIABLE: &str = "HOLDFAST_CHAOS_LOGS";

/// What may befall the nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// A worker is killed and another one started.
    KillWorker,
    /// An API node is killed and another one started.
    KillApi,
    /// A worker stands still for longer than its leases last.
    FreezeWorker,
    /// A worker is told to leave, and another one started.
    DrainWorker,
    /// Some connections to the database are ended by the server.
    BreakConnections,
    /// All of them are.
    BreakAllConnections,
}

/// One round of faults: every kind befalls the nodes, the likelier ones more often.
const ROUND: [Fault; 8] = [
    Fault::KillWorker,
    Fault::KillWorker,
    Fault::KillApi,
    Fault::FreezeWorker,
    Fault::DrainWorker,
    Fault::BreakConnections,
    Fault::BreakConnections,
    Fault::BreakAllConnections,
];

struct Worker {
    node: Node,
    frozen_until: Option<Instant>,
}

/// Nodes over one database.
pub(super) struct Fleet {
    world: World,
    record: PathBuf,
    workers: Vec<Worker>,
    apis: Vec<Node>,
    addresses: Addresses,
    scheduler: Node,
    /// Workers that were told to leave.
    leaving: Vec<Node>,
    alarms: Vec<String>,
    /// What nodes said that are gone.
    logs: Vec<String>,
}

impl Fleet {
    /// Three workers, two API nodes and a scheduler.
    ///
    /// # Errors
    /// If one of them doesn't start.
    pub(super) async fn start(database_url: &str) -> Result<Self> {
        let (model, agent, record) = stage::set().await?;
        let mut world = World::new(database_url, model, agent);
        world.lease_ttl = LEASE_TTL;
        let (mut apis, mut addresses) = (Vec::new(), Vec::new());
        for _ in 0..2 {
            let (node, address) = world.node("api", &[], &[]).await?;
            apis.push(node);
            addresses.push(address);
        }
        let (scheduler, _) = world.node("scheduler", &[], &[]).await?;
        let addresses = Arc::new(Mutex::new(addresses));
        let (workers, leaving, alarms, logs) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let mut fleet = Self { world, record, workers, apis, addresses, scheduler, leaving, alarms, logs };
        for _ in 0..3 {
            let node = fleet.worker().await?;
            fleet.workers.push(Worker { node, frozen_until: None });
        }
        Ok(fleet)
    }

    /// Where the API nodes listen; changes as they come and go.
    pub(super) fn addresses(&self) -> Addresses {
        Arc::clone(&self.addresses)
    }

    /// How often each call was started in a worker, by its idempotency key.
    pub(super) fn effects(&self) -> BTreeMap<String, usize> {
        self.world.agent.effects()
    }

    /// Bodies of the requests that the model was sent, in order.
    ///
    /// # Errors
    /// If the record can't be read.
    pub(super) async fn requests(&self) -> Result<Vec<serde_json::Value>> {
        let text = tokio::fs::read_to_string(&self.record).await?;
        text.lines().map(|line| Ok(serde_json::from_str::<serde_json::Value>(line)?["body"].take())).collect()
    }

    async fn worker(&self) -> Result<Node> {
        Ok(self.world.node("worker", &["--shutdown-grace", GRACE], &[]).await?.0)
    }

    /// Lets faults befall the nodes for `duration`, and until every kind did. Returns how many there
    /// were of each.
    ///
    /// # Errors
    /// If a node can't be started or signalled.
    pub(super) async fn trouble(
        &mut self,
        dice: &mut Dice,
        duration: Duration,
        admin: &Postgres,
    ) -> Result<BTreeMap<Fault, usize>> {
        let (until, mut counts) = (Instant::now() + duration, BTreeMap::new());
        let mut tick = interval(BETWEEN_FAULTS);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut deck: Vec<Fault> = Vec::new();
        let mut rounds = 0;
        while Instant::now() < until || rounds < 2 {
            tick.tick().await;
            self.thaw(Instant::now())?;
            let Some(fault) = deck.pop() else {
                deck.extend(ROUND);
                dice.shuffle(&mut deck);
                rounds += 1;
                continue;
            };
            self.strike(fault, dice, admin).await.with_context(|| format!("{fault:?}"))?;
            *counts.entry(fault).or_insert(0) += 1;
        }
        Ok(counts)
    }

    async fn strike(&mut self, fault: Fault, dice: &mut Dice, admin: &Postgres) -> Result<()> {
        // One worker at most stands still at a time, so there is always another.
        let moving: Vec<usize> =
            (0..self.workers.len()).filter(|at| self.workers[*at].frozen_until.is_none()).collect();
        let at = *dice.pick(&moving).context("every worker stands still")?;
        match fault {
            Fault::KillWorker => {
                self.workers[at].node.kill().await?;
                let new = self.worker().await?;
                let old = std::mem::replace(&mut self.workers[at].node, new);
                self.retire(&old);
            }
            Fault::DrainWorker => {
                self.workers[at].node.signal(Signal::TERM)?;
                let new = self.worker().await?;
                self.leaving.push(std::mem::replace(&mut self.workers[at].node, new));
            }
            Fault::FreezeWorker => {
                self.thaw(Instant::now() + FROZEN)?;
                self.workers[at].node.signal(Signal::STOP)?;
                self.workers[at].frozen_until = Some(Instant::now() + FROZEN);
            }
            Fault::KillApi => {
                let at = dice.below(self.apis.len());
                self.apis[at].kill().await?;
                let (new, address) = self.world.node("api", &[], &[]).await?;
                let old = std::mem::replace(&mut self.apis[at], new);
                self.retire(&old);
                if let Ok(mut addresses) = self.addresses.lock() {
                    addresses[at] = address;
                }
            }
            Fault::BreakConnections => break_connections(admin, 4).await?,
            Fault::BreakAllConnections => break_connections(admin, i64::MAX).await?,
        }
        Ok(())
    }

    /// Lets workers go on whose time has come by `now`.
    fn thaw(&mut self, now: Instant) -> Result<()> {
        for worker in &mut self.workers {
            if worker.frozen_until.is_some_and(|until| until <= now) {
                worker.node.signal(Signal::CONT)?;
                worker.frozen_until = None;
            }
        }
        Ok(())
    }

    /// Lets every worker go on that stands still, and waits for those that leave.
    ///
    /// # Errors
    /// If one of them doesn't end by itself, in order.
    pub(super) async fn calm(&mut self) -> Result<()> {
        self.thaw(Instant::now() + FROZEN)?;
        for mut node in std::mem::take(&mut self.leaving) {
            let status = node.ended().await?;
            ensure!(status.success(), "a worker that left ended with {status}: {}", node.log_text());
            self.retire(&node);
        }
        Ok(())
    }

    fn retire(&mut self, node: &Node) {
        let text = node.log_text();
        let alarms = text.lines().filter(|line| ALARMS.iter().any(|alarm| line.contains(alarm)));
        self.alarms.extend(alarms.map(str::to_owned));
        self.logs.push(text);
    }

    /// What nodes said that only a fault of Holdfast's own makes them say, and nodes that ended by
    /// themselves.
    ///
    /// # Errors
    /// If the system can't say whether a node has ended.
    pub(super) fn alarms(&mut self) -> Result<Vec<String>> {
        let mut alarms = std::mem::take(&mut self.alarms);
        let workers = self.workers.iter_mut().map(|worker| &mut worker.node);
        for node in workers.chain(&mut self.apis).chain([&mut self.scheduler]) {
            if node.has_ended()? {
                alarms.push(format!("a node ended by itself: {}", node.log_text()));
            }
            let text = node.log_text();
            let said = text.lines().filter(|line| ALARMS.iter().any(|alarm| line.contains(alarm)));
            alarms.extend(said.map(str::to_owned));
        }
        Ok(alarms)
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        if let Some(dir) = std::env::var_os(LOGS_VARIABLE).map(PathBuf::from) {
            let workers = self.workers.iter().map(|worker| &worker.node);
            let nodes = workers.chain(&self.apis).chain(&self.leaving).chain([&self.scheduler]);
            let logs = self.logs.iter().cloned().chain(nodes.map(Node::log_text));
            for (number, log) in logs.enumerate() {
                let _ = std::fs::write(dir.join(format!("node-{number}.log")), log);
            }
            let _ = std::fs::copy(&self.record, dir.join("requests.jsonl"));
        }
        let _ = std::fs::remove_file(&self.record);
    }
}

async fn break_connections(admin: &Postgres, most: i64) -> Result<()> {
    let sql = "SELECT pg_terminate_backend(pid) FROM (
                   SELECT pid FROM pg_stat_activity
                   WHERE application_name LIKE 'holdfast-%' AND datname = current_database()
                   ORDER BY random() LIMIT $1) AS chosen";
    admin.query(sql, &[&most]).await?;
    Ok(())
}
