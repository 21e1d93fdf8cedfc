//! Runs under suspicion: one that two workers have died over is driven in a process of its own, so that it
//! takes nobody with it, and so that the next death is known to be its own (docs/adr/0009-poison.md).
//!
//! The parent holds the lease until the child says that it renews it, and then only waits. The child's
//! standard input is the bond between them: the order comes in by it, and its end, whether the parent closes
//! it or dies, tells the child to leave as SIGTERM tells a worker.

use std::{ffi::OsString, fmt, path::PathBuf, process::Stdio, sync::Arc, time::Duration};

use holdfast_store::{
    Store,
    claim::{self, Lease},
    listen::Listener,
};
use holdfast_tools::{MARKS_VARIABLE, end_marked, marks_for_child};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    process::{Child, ChildStdout, Command},
    sync::Semaphore,
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use crate::{
    Config, ENDING, MAX_TAKEOVERS, Shared, WorkerError, drain,
    held::{Held, Slot},
    lease, metrics, trace,
};

/// Workers that died over a run before it is driven alone.
pub const SUSPECT_TAKEOVERS: i32 = 2;

/// Processes for runs under suspicion that a worker has at once.
pub const ALONE_AT_ONCE: usize = 4;

/// How long a run waits when all of them are taken.
const NO_PLACE: Duration = Duration::from_secs(1);

/// How long a run waits that has ended its process.
const AFTER_DEATH: Duration = Duration::from_secs(1);

/// The line that a child prints when it renews the lease itself.
pub const HELD: &str = "held";

/// How often a worker looks whether a child still renews its lease, in parts of a TTL.
const LOOKS: u32 = 3;

/// Pause before a child tries again to renew a lease whose row is locked, or while the database is away.
const AGAIN: Duration = Duration::from_millis(100);

/// How a worker starts a process that drives one run: the program gets one line on standard input, an
/// [`Order`] as JSON.
#[derive(Clone)]
pub struct Alone {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// What its environment has beside the worker's own.
    pub environment: Vec<(String, String)>,
    /// What it is told of its node; may hold secrets.
    pub node: Value,
}

impl fmt::Debug for Alone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Alone").field("program", &self.program).finish_non_exhaustive()
    }
}

/// What a process that drives one run is told.
#[derive(Serialize, Deserialize)]
pub struct Order {
    /// What [`Alone::node`] says.
    pub node: Value,
    /// The run, held by the worker that sends the order.
    pub lease: Lease,
    /// The revision of its agent that the worker has: a file may have changed since it was read.
    pub revision: String,
}

/// How long the process of a run may take after it was told to leave, so that it is gone when its worker's own
/// grace is over: it still has to end its tools then.
pub fn grace_alone(grace: Duration) -> Duration {
    grace.saturating_sub(ENDING)
}

/// The places of a worker for runs under suspicion.
pub(crate) struct Places {
    how: Alone,
    free: Semaphore,
}

impl Places {
    pub(crate) fn new(how: Alone) -> Self {
        Self { how, free: Semaphore::new(ALONE_AT_ONCE) }
    }
}

/// Where a run is to be driven: in a process of its own if it is under suspicion and this worker can start one.
pub(crate) fn places<'a>(shared: &'a Shared, lease: &Lease) -> Option<&'a Places> {
    let suspect = (SUSPECT_TAKEOVERS..MAX_TAKEOVERS).contains(&lease.takeovers);
    shared.alone.as_ref().filter(|_| suspect)
}

/// Has a run driven by a process of its own and waits for that to end. Returns the run if that couldn't begin:
/// then it is driven as any other, lest it never is.
pub(crate) async fn send(shared: &Shared, places: &Places, mut slot: Slot) -> Option<Slot> {
    let Ok(_place) = places.free.try_acquire() else {
        slot.put_off(NO_PLACE);
        return None;
    };
    let (session, epoch) = (slot.lease.session, slot.lease.epoch);
    let marks = marks_for_child();
    let mut child = match start(&places.how, &marks) {
        Ok(child) => child,
        Err(error) => {
            tracing::error!(kind = "run.not_alone", session_id = %session, %error, "no process can be started for a run under suspicion");
            return Some(slot);
        }
    };
    let (mut bond, says) = (child.stdin.take(), child.stdout.take());
    let revision = shared.roster.of(&slot.lease).map(|member| member.agent().revision.clone());
    let order = Order {
        node: places.how.node.clone(),
        lease: slot.lease.clone(),
        revision: revision.unwrap_or_default(),
    };
    if let (Some(pipe), Ok(mut line)) = (&mut bond, serde_json::to_string(&order)) {
        line.push('\n');
        // A child that is gone is seen below.
        let _ = pipe.write_all(line.as_bytes()).await;
    }
    let begins = tokio::select! {
        biased;
        held = says_held(says) => held,
        () = slot.lost() => false,
        // It may have begun just now: it is told to leave, and waited for.
        () = shared.draining.cancelled() => true,
        // Until it says that it holds the lease, this worker renews it: somebody has to lose patience.
        () = tokio::time::sleep(shared.lease_ttl) => false,
    };
    if !begins {
        let _ = child.kill().await;
        end_marked(&marks).await;
        tracing::error!(kind = "run.not_alone", session_id = %session, run_epoch = epoch, "the process for a run under suspicion did not begin");
        return Some(slot);
    }
    tracing::info!(kind = "run.alone", session_id = %session, run_epoch = epoch, pid = child.id(), takeovers = slot.lease.takeovers);
    slot.hand_over();
    let ended = tokio::select! {
        status = child.wait() => Ended::Exited(status),
        () = not_renewed(shared, &slot) => Ended::Stuck,
        () = shared.draining.cancelled() => {
            drop(bond.take());
            tokio::select! {
                status = child.wait() => Ended::Exited(status),
                () = shared.ending.cancelled() => Ended::Late,
            }
        }
    };
    let died = match ended {
        Ended::Exited(Ok(status)) if status.success() => None,
        Ended::Exited(status) => {
            Some(status.map_or_else(|error| error.to_string(), |status| status.to_string()))
        }
        Ended::Stuck => {
            let _ = child.kill().await;
            Some("it didn't renew its lease".to_owned())
        }
        // The worker has to go, and the child had its time.
        Ended::Late => {
            let _ = child.kill().await;
            None
        }
    };
    // Its tools may have outlived it, and whoever claims the run next starts some of them again.
    end_marked(&marks).await;
    match died {
        Some(ended) => {
            metrics::died_alone();
            tracing::error!(kind = "run.died_alone", session_id = %session, run_epoch = epoch, ended, "a run ended the process that it had for itself");
            release(shared, &slot, AFTER_DEATH, true).await;
        }
        None if shared.draining.is_cancelled() => release(shared, &slot, Duration::ZERO, false).await,
        None => {}
    }
    None
}

/// How the process of a run ended.
enum Ended {
    Exited(std::io::Result<std::process::ExitStatus>),
    /// It lives, and let its lease end: a run that can freeze its process is as bad as one that kills it.
    Stuck,
    /// It was still at work when the worker had to go.
    Late,
}

/// Waits until the lease that a child renews has ended, or is somebody else's.
async fn not_renewed(shared: &Shared, slot: &Slot) {
    loop {
        tokio::time::sleep(shared.lease_ttl / LOOKS).await;
        match claim::stands(&shared.store, slot.lease.session, slot.lease.epoch).await {
            // A run that has just ended has no lease either: then the child ends as well.
            Ok(false) => {
                tokio::time::sleep(shared.lease_ttl).await;
                return;
            }
            Ok(true) => {}
            Err(error) => tracing::debug!(%error, "can't see whether the lease is renewed"),
        }
    }
}

async fn says_held(says: Option<ChildStdout>) -> bool {
    let mut line = String::new();
    if let Some(says) = says {
        let _ = BufReader::new(says).read_line(&mut line).await;
    }
    line.trim_end() == HELD
}

/// Gives the child's lease back, if it has left one.
async fn release(shared: &Shared, slot: &Slot, delay: Duration, died: bool) {
    let name = (slot.lease.session, slot.lease.epoch);
    if let Err(error) = claim::release(&shared.store, &[name], delay, died).await {
        tracing::warn!(%error, session_id = %name.0, "couldn't give a lease back; it expires");
    }
}

fn start(how: &Alone, marks: &str) -> std::io::Result<Child> {
    let mut command = Command::new(&how.program);
    command.args(&how.arguments).envs(how.environment.iter().map(|(name, value)| (name, value)));
    command.env(MARKS_VARIABLE, marks);
    // Seen among processes as what it was started as.
    #[cfg(unix)]
    command.arg0(std::env::args_os().next().unwrap_or_else(|| how.program.clone().into()));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true).spawn()
}

/// Drives one run that another worker has claimed, until it stops or `shutdown`. `held` is called when this
/// process renews the lease itself, and then says [`HELD`] on standard output.
///
/// # Errors
/// As [`crate::run`].
pub async fn run_alone(
    store: Store,
    listener: Listener,
    config: Config,
    lease: Lease,
    held: impl FnOnce(),
    shutdown: CancellationToken,
) -> Result<(), WorkerError> {
    let grace = config.shutdown_grace;
    let model = Arc::new(crate::model::HttpModelClient::new()?);
    let shared = Arc::new(Shared::new(store, Config { slots: 1, ..config }, model, &shutdown));
    let Some(asked_at) = shutdown.run_until_cancelled(renewed(&shared, &lease)).await.flatten() else {
        return Ok(());
    };
    // The semaphore is never closed.
    let Ok(permit) = Arc::clone(&shared.slots).acquire_owned().await else { return Ok(()) };
    let span = trace::run(&shared, &lease);
    let slot = Held::take(&shared, (lease, None), asked_at, permit);
    let stop = CancellationToken::new();
    let beating = tokio::spawn(crate::heartbeat::run(Arc::clone(&shared), listener, stop.clone()));
    held();
    let driving = {
        let shared = Arc::clone(&shared);
        shared.drives.spawn({
            let shared = Arc::clone(&shared);
            async move { lease::run(&shared, slot).instrument(span).await }
        })
    };
    tokio::select! {
        // A panic is known to whoever dropped the slot.
        _ = driving => {}
        () = shutdown.cancelled() => {}
    }
    drain(&shared, grace).await;
    stop.cancel();
    let _ = beating.await;
    Ok(())
}

/// Renews the lease; when that was asked for, or nothing if it is gone.
async fn renewed(shared: &Shared, lease: &Lease) -> Option<Instant> {
    let until = Instant::now() + shared.lease_ttl;
    while Instant::now() < until {
        let asked_at = Instant::now();
        let name = [(lease.session, lease.epoch)];
        match claim::heartbeat(&shared.store, &name, shared.lease_ttl).await {
            Ok(beats) if beats.is_empty() => return None,
            Ok(beats) if beats.iter().any(|beat| beat.renewed) => return Some(asked_at),
            Ok(_) => {}
            Err(error) => {
                tracing::debug!(%error, "the lease can't be renewed")
            }
        }
        tokio::time::sleep(AGAIN).await;
    }
    None
}
