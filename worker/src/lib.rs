//! Workers: they claim runs, carry out what the engine decides and store every step.
//!
//! A worker holds leases in a number of slots. Each lease is driven by one task ([`drive`]): load,
//! decide, effect, decide, commit. One heartbeat renews all leases; a lease that can't be renewed
//! stops its task at once.

pub mod alone;
mod calls;
pub mod cause;
mod claims;
mod clock;
mod drive;
mod heartbeat;
mod held;
mod lease;
mod metrics;
pub mod model;
mod progress;
mod request;
mod roster;
mod system;
mod trace;
mod wrap;

use std::{sync::Arc, time::Duration};

use apalis::prelude::{ParallelizeExt, WorkerBuilder};
use holdfast_engine::ids::WorkerId;
use holdfast_store::{
    Store, StoreError, claim::Rotation, group::Committer, listen::Listener, loader::Loader, workers,
};
use holdfast_tools::LoadedAgent;
use tokio::sync::{Notify, Semaphore};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use uuid::Uuid;

use crate::{
    alone::{Alone, Places},
    claims::Claims,
    held::Held,
    model::{ApiKeys, HttpModelClient, ModelClient, ModelError},
    progress::Teller,
    roster::Roster,
};

/// How often a worker looks for due runs when nothing wakes it.
pub const SCAN_EVERY: Duration = Duration::from_millis(500);

/// How often a worker renews what the register says of it.
const REGISTER_EVERY: Duration = Duration::from_secs(5);

/// Every how many renewals a worker looks for runs that nobody can take: it reads the whole queue.
const UNSERVED_EVERY: u64 = 12;

/// How often the files of executable tools are looked at.
const TOOLS_EVERY: Duration = Duration::from_secs(2);

/// How long effects under way may take to end once the grace is over: as long as killing a process
/// group does, and giving its lease back.
const ENDING: Duration = Duration::from_secs(5);

/// Workers that died over a run before it is given up as poison.
pub const MAX_TAKEOVERS: i32 = 5;

/// What a worker is told at its start.
#[derive(Debug)]
pub struct Config {
    /// Runs that it holds at once.
    pub slots: usize,
    /// How long a lease lasts without a heartbeat.
    pub lease_ttl: Duration,
    /// How long steps may go on after the order to shut down.
    pub shutdown_grace: Duration,
    /// Whether models stream their text, which clients see as `text.delta`.
    pub stream_tokens: bool,
    /// What it offers to isolated calls.
    pub labels: Vec<String>,
    /// The agents that it has.
    pub agents: Vec<LoadedAgent>,
    /// Keys of model APIs.
    pub keys: ApiKeys,
    /// How a process for a run under suspicion is started; without, such a run is driven as any other.
    pub alone: Option<Alone>,
}

/// Why a worker can't go on.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The model client can't be set up.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The loop that takes leases has ended by itself.
    #[error("the claim loop ended: {0}")]
    Claims(String),
}

/// How many calls of the system toolbox read other sessions at once.
const READINGS: usize = 2;

/// What all tasks of a worker share.
pub(crate) struct Shared {
    pub(crate) id: WorkerId,
    pub(crate) store: Store,
    pub(crate) committer: Committer,
    pub(crate) loader: Loader,
    pub(crate) teller: Teller,
    pub(crate) roster: Roster,
    pub(crate) keys: ApiKeys,
    pub(crate) model: Arc<dyn ModelClient>,
    pub(crate) held: Held,
    pub(crate) rotation: Rotation,
    pub(crate) slots: Arc<Semaphore>,
    /// Told when a run of a throttled owner ends here: its next one may begin.
    pub(crate) freed: Notify,
    pub(crate) slot_count: usize,
    /// Of those who read other sessions: each may hold tens of MiB for a while.
    pub(crate) readings: Semaphore,
    pub(crate) lease_ttl: Duration,
    pub(crate) stream_tokens: bool,
    pub(crate) labels: Vec<String>,
    /// Cancelled when no new effect may begin.
    pub(crate) draining: CancellationToken,
    /// Cancelled when effects under way have to end.
    pub(crate) ending: CancellationToken,
    /// The tasks that drive leases.
    pub(crate) drives: TaskTracker,
    /// Processes for runs under suspicion.
    pub(crate) alone: Option<Places>,
}

impl Shared {
    fn new(store: Store, config: Config, model: Arc<dyn ModelClient>, shutdown: &CancellationToken) -> Self {
        let slots = config.slots.max(1);
        Self {
            id: WorkerId(Uuid::now_v7()),
            committer: Committer::start(store.clone()),
            loader: Loader::start(&store),
            teller: Teller::start(store.clone()),
            store,
            roster: Roster::new(config.agents),
            keys: config.keys,
            model,
            held: Held::default(),
            rotation: Rotation::default(),
            slots: Arc::new(Semaphore::new(slots)),
            freed: Notify::new(),
            slot_count: slots,
            readings: Semaphore::new(READINGS),
            lease_ttl: config.lease_ttl,
            stream_tokens: config.stream_tokens,
            labels: config.labels,
            draining: shutdown.child_token(),
            ending: CancellationToken::new(),
            drives: TaskTracker::new(),
            alone: config.alone.map(Places::new),
        }
    }
}

/// Runs a worker until `shutdown`, then lets steps finish within the grace, gives its leases back
/// and leaves.
///
/// # Errors
/// [`WorkerError`]; never because the database is away.
pub async fn run(
    store: Store,
    listener: Listener,
    config: Config,
    shutdown: CancellationToken,
) -> Result<(), WorkerError> {
    let client = HttpModelClient::new()?;
    run_with(store, listener, config, Arc::new(client), shutdown).await
}

/// As [`run`], with a model client of the caller's.
///
/// # Errors
/// As [`run`].
pub async fn run_with(
    store: Store,
    listener: Listener,
    config: Config,
    model: Arc<dyn ModelClient>,
    shutdown: CancellationToken,
) -> Result<(), WorkerError> {
    let grace = config.shutdown_grace;
    let shared = Arc::new(Shared::new(store, config, model, &shutdown));
    let slots = shared.slot_count;
    let models: Vec<String> = shared.roster.all().map(|member| member.agent().target.model.clone()).collect();
    metrics::begin(slots, shared.lease_ttl, models.iter().map(String::as_str));
    let background = TaskTracker::new();
    let stop_background = CancellationToken::new();
    background.spawn(heartbeat::run(Arc::clone(&shared), listener.clone(), stop_background.clone()));
    background.spawn(keep_registered(Arc::clone(&shared), stop_background.clone()));
    for agent in shared.roster.all() {
        agent.toolbox.clone().watch(TOOLS_EVERY, stop_background.clone());
    }

    let claims = Claims::new(Arc::clone(&shared), listener, shutdown.clone());
    let name = format!("holdfast-{}", shared.id);
    let leases = WorkerBuilder::new(name).backend(claims).parallelize(tokio::spawn).build(lease::execute);
    let stop = shutdown.clone();
    let taking = leases.run_until(async move {
        stop.cancelled().await;
        Ok::<(), std::io::Error>(())
    });
    let ended = tokio::select! {
        ended = taking => ended.err().map_or_else(|| "no more leases".to_owned(), |error| error.to_string()),
        () = shutdown.cancelled() => String::new(),
    };
    drain(&shared, grace).await;
    stop_background.cancel();
    background.close();
    let leaving = async {
        background.wait().await;
        workers::leave(&shared.store, shared.id).await
    };
    match tokio::time::timeout(ENDING, leaving).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "couldn't leave the register of workers"),
        Err(_) => tracing::debug!("the database doesn't let this worker leave the register"),
    }
    metrics::end(slots);
    if shutdown.is_cancelled() { Ok(()) } else { Err(WorkerError::Claims(ended)) }
}

/// Lets steps finish within the grace, then ends effects under way. Every task gives its lease back
/// when it ends; what is left then is given back here.
async fn drain(shared: &Arc<Shared>, grace: Duration) {
    shared.draining.cancel();
    shared.drives.close();
    if tokio::time::timeout(grace, shared.drives.wait()).await.is_err() {
        shared.ending.cancel();
        if tokio::time::timeout(ENDING, shared.drives.wait()).await.is_err() {
            tracing::warn!("some runs did not end; their leases are given back");
        }
    }
    let left = shared.held.list();
    let releasing = holdfast_store::claim::release(&shared.store, &left, Duration::ZERO, false);
    match tokio::time::timeout(ENDING, releasing).await {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => {
            tracing::warn!(%error, leases = left.len(), "couldn't give leases back; they expire")
        }
        Err(_) => tracing::warn!(leases = left.len(), "couldn't give leases back in time; they expire"),
    }
}

async fn keep_registered(shared: Arc<Shared>, stop: CancellationToken) {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned();
    let mut tick = tokio::time::interval(REGISTER_EVERY);
    let mut unserved = Vec::new();
    for turn in 0_u64.. {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = tick.tick() => {}
        }
        let look = turn % UNSERVED_EVERY == 0;
        match register(&shared, &host, look.then_some(&mut unserved)).await {
            Ok(()) => {}
            Err(error) if error.is_unavailable() => {}
            Err(error) => tracing::warn!(%error, "couldn't renew the register of workers"),
        }
    }
}

async fn register(
    shared: &Shared,
    host: &str,
    unserved: Option<&mut Vec<(String, i64)>>,
) -> Result<(), StoreError> {
    let slots = i32::try_from(shared.slot_count).unwrap_or(i32::MAX);
    let held = i32::try_from(shared.held.list().len()).unwrap_or(i32::MAX);
    let agents = shared.roster.names();
    workers::register(&shared.store, shared.id, host, slots, held, &shared.labels, &agents).await?;
    let Some(known) = unserved else { return Ok(()) };
    let now = workers::unserved(&shared.store).await?;
    if now != *known {
        for (agent, runs) in &now {
            tracing::warn!(
                kind = "runs.unserved",
                agent,
                runs,
                "no worker has the agent that these runs ask for"
            );
        }
        *known = now;
    }
    Ok(())
}
