//! The nodes of the chaos and their database, under the faults that befall them.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use anyhow::{Context, Result, ensure};
use holdfast_store::embedded::StopMode;
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    time::{Instant, MissedTickBehavior, interval},
};
use tokio_postgres::Client as Postgres;

use super::{
    Size,
    client::Addresses,
    dice::Dice,
    fault::{BETWEEN_FAULTS, Fault},
    ground::Ground,
    post::{LOGS_VARIABLE, Post, Remains, Role},
    spells::{Spell, Spells},
    stage,
};
use crate::{
    wire::Weather,
    world::{Node, Signal, World},
};

/// Seconds of a lease.
const LEASE_TTL: u64 = 2;
/// How long a node stands still, or its wire: longer than a lease.
const STILL: Duration = Duration::from_millis(3_300);
/// How long a slow wire stays slow.
const SLOW: Duration = Duration::from_secs(4);
/// How long the server has no connections left.
const FULL: Duration = Duration::from_millis(1_500);

/// Nodes over one database.
pub(super) struct Fleet {
    world: World,
    ground: Ground,
    record: PathBuf,
    posts: Vec<Post>,
    addresses: Addresses,
    spells: Spells,
    /// Nodes that were told to leave.
    leaving: Vec<Node>,
    remains: Remains,
}

impl Fleet {
    /// Workers and API nodes as many as wanted, and a scheduler.
    ///
    /// # Errors
    /// If one of them doesn't start.
    pub(super) async fn start(size: Size) -> Result<Self> {
        let ground = Ground::start().await?;
        let (model, agent, record) = stage::set().await?;
        let mut world = World::new("", model, agent);
        world.lease_ttl = LEASE_TTL;
        let mut posts = Vec::new();
        let roles = [(Role::Api, size.apis), (Role::Scheduler, 1), (Role::Worker, size.workers)];
        for (role, count) in roles {
            for _ in 0..count {
                posts.push(Post::fill(role, &world, &ground).await?);
            }
        }
        let (addresses, spells) = (Arc::default(), Spells::none());
        let (leaving, remains) = (Vec::new(), Remains::default());
        let fleet = Self { world, ground, record, posts, addresses, spells, leaving, remains };
        fleet.tell_addresses();
        Ok(fleet)
    }

    /// A connection to the database that no fault but the server's end befalls.
    ///
    /// # Errors
    /// As the server has it.
    pub(super) async fn admin(&self) -> Result<Postgres> {
        self.ground.connect().await
    }

    /// Where the API nodes listen; changes as they come and go.
    pub(super) fn addresses(&self) -> Addresses {
        Arc::clone(&self.addresses)
    }

    fn tell_addresses(&self) {
        let apis = self.posts.iter().filter(|post| post.role == Role::Api);
        let now: Vec<String> = apis.map(|post| post.address.clone()).collect();
        *self.addresses.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = now;
    }

    /// How often each call was started in a worker, by its idempotency key.
    pub(super) fn effects(&self) -> BTreeMap<String, usize> {
        self.world.agent.effects()
    }

    /// The messages of the requests that the model was sent, in order.
    ///
    /// # Errors
    /// If the record can't be read.
    pub(super) async fn requests(&self) -> Result<Vec<serde_json::Value>> {
        let mut lines = BufReader::new(tokio::fs::File::open(&self.record).await?).lines();
        let mut requests = Vec::new();
        while let Some(line) = lines.next_line().await? {
            let mut entry: serde_json::Value = serde_json::from_str(&line)?;
            requests.push(serde_json::json!({"messages": entry["body"]["messages"].take()}));
        }
        Ok(requests)
    }

    /// Lets faults befall the nodes for `duration`, and until every kind did. Returns how many there
    /// were of each.
    ///
    /// # Errors
    /// If a node can't be started or signalled, or the server doesn't come back.
    pub(super) async fn trouble(
        &mut self,
        dice: &mut Dice,
        duration: Duration,
    ) -> Result<BTreeMap<Fault, usize>> {
        let (until, mut counts) = (Instant::now() + duration, BTreeMap::new());
        let mut tick = interval(BETWEEN_FAULTS);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut deck = Fault::round(dice);
        let mut rounds = 0;
        while Instant::now() < until || rounds < 1 {
            tick.tick().await;
            self.reap()?;
            let Some(fault) = deck.pop() else {
                deck = Fault::round(dice);
                rounds += 1;
                continue;
            };
            self.strike(fault, dice).await.with_context(|| format!("{fault:?}"))?;
            *counts.entry(fault).or_insert(0) += 1;
        }
        Ok(counts)
    }

    async fn strike(&mut self, fault: Fault, dice: &mut Dice) -> Result<()> {
        if fault.needs_connection() {
            self.spells.lift(|spell| matches!(spell, Spell::Full(_)));
        }
        match fault {
            Fault::KillWorker => self.kill(Role::Worker, dice).await,
            Fault::KillApi => self.kill(Role::Api, dice).await,
            Fault::KillScheduler => self.kill(Role::Scheduler, dice).await,
            Fault::FreezeWorker => self.freeze(Role::Worker, dice),
            Fault::FreezeApi => self.freeze(Role::Api, dice),
            Fault::FreezeScheduler => self.freeze(Role::Scheduler, dice),
            Fault::DrainWorker => self.drain(Role::Worker, dice).await,
            Fault::DrainApi => self.drain(Role::Api, dice).await,
            Fault::EndConnections => self.ground.end_connections(4, false).await,
            Fault::EndAllConnections => self.ground.end_connections(i64::MAX, false).await,
            Fault::EndListeners => self.ground.end_connections(i64::MAX, true).await,
            Fault::CutWire => {
                let at = dice.below(self.posts.len());
                self.posts[at].wire.cut_all();
                Ok(())
            }
            Fault::SlowWire => {
                let delay = Duration::from_millis(20) + dice.up_to(Duration::from_millis(150));
                self.weather(Weather::Slow(delay), SLOW, dice);
                Ok(())
            }
            Fault::StallWire => {
                self.weather(Weather::Stalled, STILL, dice);
                Ok(())
            }
            Fault::FillServer => {
                let taken = self.ground.fill().await?;
                self.spells.cast(FULL, Spell::Full(taken));
                Ok(())
            }
            Fault::RestartFast => self.ground.restart(StopMode::Fast).await,
            Fault::RestartImmediate => self.ground.restart(StopMode::Immediate).await,
        }
    }

    /// A place of this role at which nothing holds, or any.
    fn pick(&self, role: Role, dice: &mut Dice) -> Result<usize> {
        let all: Vec<usize> = (0..self.posts.len()).filter(|at| self.posts[*at].role == role).collect();
        let moving: Vec<usize> = all.iter().copied().filter(|at| !self.spells.is_frozen(*at)).collect();
        let places = if moving.is_empty() { &all } else { &moving };
        dice.pick(places).copied().context("no node of this role")
    }

    async fn kill(&mut self, role: Role, dice: &mut Dice) -> Result<()> {
        let at = self.pick(role, dice)?;
        self.posts[at].kill(&self.world, &mut self.remains).await?;
        self.tell_addresses();
        Ok(())
    }

    /// Lets a node stand still; the one of its role that did so before goes on.
    fn freeze(&mut self, role: Role, dice: &mut Dice) -> Result<()> {
        let posts = &self.posts;
        self.spells.lift(|spell| matches!(spell, Spell::Frozen(at, _) if posts[*at].role == role));
        let at = self.pick(role, dice)?;
        let pid = self.posts[at].node.process()?;
        self.posts[at].node.signal(Signal::STOP)?;
        self.spells.cast(STILL, Spell::Frozen(at, pid));
        Ok(())
    }

    /// Tells a node to leave once another one has taken its place.
    async fn drain(&mut self, role: Role, dice: &mut Dice) -> Result<()> {
        let at = self.pick(role, dice)?;
        self.posts[at].complain(&mut self.remains)?;
        let old = self.posts[at].replace(&self.world).await?;
        self.tell_addresses();
        old.signal(Signal::TERM)?;
        self.leaving.push(old);
        Ok(())
    }

    fn weather(&mut self, weather: Weather, lasts: Duration, dice: &mut Dice) {
        let at = dice.below(self.posts.len());
        self.posts[at].wire.set(weather);
        self.spells.cast(lasts, Spell::Weather(Arc::clone(&self.posts[at].wire)));
    }

    /// Takes leave of nodes that have left.
    fn reap(&mut self) -> Result<()> {
        let mut left = Vec::new();
        for mut node in std::mem::take(&mut self.leaving) {
            if node.has_ended()? { left.push(node) } else { self.leaving.push(node) }
        }
        for mut node in left {
            self.bury(&mut node)?;
        }
        Ok(())
    }

    fn bury(&mut self, node: &mut Node) -> Result<()> {
        if let Some(status) = node.status()?.filter(|status| !status.success()) {
            let log = node.log_text();
            self.remains.alarms.push(format!("a node that was told to leave ended with {status}: {log}"));
        }
        self.remains.take(node);
        Ok(())
    }

    /// Ends every spell, and waits for the nodes that leave.
    ///
    /// # Errors
    /// If one of them doesn't end by itself.
    pub(super) async fn calm(&mut self) -> Result<()> {
        self.spells.lift(|_| true);
        for mut node in std::mem::take(&mut self.leaving) {
            node.ended().await?;
            self.bury(&mut node)?;
        }
        Ok(())
    }

    /// What nodes said that only a fault of Holdfast's own makes them say, and nodes that ended by
    /// themselves.
    ///
    /// # Errors
    /// If the system can't say whether a node has ended.
    pub(super) fn alarms(&mut self) -> Result<Vec<String>> {
        ensure!(self.leaving.is_empty(), "it isn't calm yet");
        for post in &mut self.posts {
            post.complain(&mut self.remains)?;
            self.remains.take(&post.node);
        }
        Ok(std::mem::take(&mut self.remains.alarms))
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        if let Some(dir) = std::env::var_os(LOGS_VARIABLE).map(PathBuf::from) {
            for post in &self.posts {
                self.remains.take(&post.node);
            }
            let _ = std::fs::copy(&self.record, dir.join("requests.jsonl"));
        }
        let _ = std::fs::remove_file(&self.record);
    }
}
