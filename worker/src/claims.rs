//! The queue as apalis sees it: a backend over the table of runs. A notification is a hint; the scan
//! is the truth. It never holds more leases than there are free slots.

use std::{
    collections::VecDeque,
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use apalis_core::{
    backend::{Backend, BackendConfig, finalize::Ephemeral},
    task::{
        Task,
        builder::TaskBuilder,
        task_id::{RandomId, TaskId},
    },
    worker::context::WorkerContext,
};
use futures::{FutureExt, Stream, StreamExt, stream};
use holdfast_engine::ids::SessionId;
use holdfast_store::{
    StoreError, claim,
    listen::{Heard, Listener, Subscription},
    notify::Channel,
};
use tokio::{
    sync::OwnedSemaphorePermit,
    time::{Duration, Instant},
};
use tokio_util::sync::CancellationToken;

use crate::{
    SCAN_EVERY, Shared,
    held::{Held, Slot},
    metrics,
};

/// How many runs one claim takes at the most, so that a burst spreads over workers.
const CLAIM_BATCH: usize = 64;

/// A look at all of the queue takes no more than this part of a worker's time: where an old snapshot keeps dead entries
/// in the queue's indexes, passing over them takes longer and longer.
const WHOLE_LOOK_SHARE: u32 = 50;

/// The longest pause between looks at all of the queue, however long they take.
const WHOLE_LOOK_AT_LEAST_EVERY: Duration = Duration::from_secs(10);

/// Pauses between claims while the database is away.
const BACKOFF: [Duration; 5] = [
    Duration::from_millis(100),
    Duration::from_millis(250),
    Duration::from_millis(500),
    Duration::from_secs(1),
    Duration::from_secs(2),
];

/// A lease on its way to the task that drives it. apalis wants tasks that can be cloned, which a
/// lease can't: whoever takes it first has it.
#[derive(Clone)]
pub(crate) struct Claimed(Arc<std::sync::Mutex<Option<Slot>>>);

impl Claimed {
    fn new(slot: Slot) -> Self {
        Self(Arc::new(std::sync::Mutex::new(Some(slot))))
    }

    /// The lease, once.
    pub(crate) fn take(&self) -> Option<Slot> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take()
    }
}

/// The stream of leases.
pub(crate) struct Claims {
    leases: Pin<Box<dyn Stream<Item = Claimed> + Send>>,
}

impl Claims {
    /// Claims until `shutdown`.
    pub(crate) fn new(shared: Arc<Shared>, listener: Listener, shutdown: CancellationToken) -> Self {
        let claimer = Claimer {
            shared,
            hints: listener.subscribe(),
            shutdown,
            ready: VecDeque::new(),
            failures: 0,
            drained: false,
            hinted: Vec::new(),
            whole_look_at: None,
            first: true,
        };
        let leases = stream::unfold(claimer, |mut claimer| async move {
            let slot = claimer.next().await?;
            Some((Claimed::new(slot), claimer))
        });
        Self { leases: leases.boxed() }
    }
}

struct Claimer {
    shared: Arc<Shared>,
    hints: Subscription,
    shutdown: CancellationToken,
    ready: VecDeque<Slot>,
    failures: usize,
    /// Whether the last claim left nothing: the next one waits for news.
    drained: bool,
    /// Sessions whose runs hints have named since the last claim.
    hinted: Vec<SessionId>,
    /// When all of the queue is looked at next, expired leases included; at once if nothing is known of it.
    whole_look_at: Option<Instant>,
    /// Whether the last hints that were followed led to runs, and not to where another worker had been first.
    first: bool,
}

impl Claimer {
    async fn next(&mut self) -> Option<Slot> {
        loop {
            if let Some(slot) = self.ready.pop_front() {
                return Some(slot);
            }
            if self.shutdown.is_cancelled() {
                return None;
            }
            if std::mem::take(&mut self.drained) {
                self.wait(SCAN_EVERY).await;
            }
            let pause = match self.claim().await {
                Ok(true) => {
                    self.failures = 0;
                    continue;
                }
                Ok(false) => {
                    self.failures = 0;
                    self.drained = true;
                    continue;
                }
                Err(error) => {
                    let pause = BACKOFF[self.failures.min(BACKOFF.len() - 1)];
                    self.failures += 1;
                    if error.is_unavailable() {
                        tracing::debug!(%error, delay_ms = pause.as_millis(), "runs can't be claimed");
                    } else {
                        tracing::warn!(kind = "worker.claim_failed", %error, delay_ms = pause.as_millis(), "runs can't be claimed");
                    }
                    pause
                }
            };
            self.wait(pause).await;
        }
    }

    /// Waits for a slot, then claims as many runs as there are slots. Returns whether there may be more to claim.
    async fn claim(&mut self) -> Result<bool, StoreError> {
        let shared = Arc::clone(&self.shared);
        let permit = tokio::select! {
            () = self.shutdown.cancelled() => return Ok(true),
            permit = Arc::clone(&shared.slots).acquire_owned() => permit,
        };
        // The semaphore is never closed.
        let Ok(first) = permit else { return Ok(false) };
        let mut permits = vec![first];
        while permits.len() < CLAIM_BATCH
            && let Ok(permit) = Arc::clone(&shared.slots).try_acquire_owned()
        {
            permits.push(permit);
        }
        // Hints that have gathered are answered by this one claim.
        while let Some(heard) = self.hints.recv().now_or_never().flatten() {
            self.take_hint(&heard);
        }
        let began = Instant::now();
        let whole = self.whole_look_at.is_none_or(|at| began >= at);
        if whole {
            self.whole_look_at = Some(began + SCAN_EVERY);
        }
        let hinted = std::mem::take(&mut self.hinted);
        // Only where the last look left nothing, so that whoever waits longer isn't overtaken, and where all
        // that were hinted at can be taken, so that none is left for the next look.
        let by_hint = !whole && !self.shared.rotation.left_some() && hinted.len() <= permits.len();
        let hinted = if by_hint { hinted } else { Vec::new() };
        // In a task of its own: a claim that is on the wire when this stream is dropped still hands its
        // leases to slots, which give them back.
        let claiming =
            shared.drives.spawn(take_leases(Arc::clone(&shared), permits, whole, (hinted, self.first)));
        match claiming.await {
            Ok(taken) => {
                let (slots, first) = taken?;
                self.ready.extend(slots);
                self.first = first.unwrap_or(self.first);
            }
            Err(error) => tracing::error!(%error, "a claim panicked"),
        }
        if whole {
            self.whole_look_at = Some(began + pause_of_whole_looks(began.elapsed()));
        }
        Ok(self.shared.rotation.left_some() && !self.ready.is_empty())
    }

    /// Keeps what a hint names; returns whether there may be something to claim.
    fn take_hint(&mut self, heard: &Heard) -> bool {
        match heard {
            Heard::Item { channel: Channel::Runs, item } => {
                match item.parse() {
                    // Its mail wakes the run that goes on here: the commit that ends it sees what was stored before
                    // it began, and what was stored later brings a hint of its own.
                    Ok(session) if self.shared.held.keeps(session) => return false,
                    Ok(session) if self.hinted.contains(&session) => {}
                    // One more than a claim takes says that there are too many to go by.
                    Ok(session) if self.hinted.len() <= CLAIM_BATCH => self.hinted.push(session),
                    _ => {}
                }
                true
            }
            Heard::Resync => {
                self.whole_look_at = None;
                true
            }
            Heard::Item { .. } => false,
        }
    }

    /// Waits for a hint, at most for `pause`.
    async fn wait(&mut self, pause: Duration) {
        let until = Instant::now() + pause;
        loop {
            tokio::select! {
                () = self.shutdown.cancelled() => return,
                () = tokio::time::sleep_until(until) => return,
                () = self.shared.freed.notified(), if self.failures == 0 => return,
                heard = self.hints.recv() => match heard {
                    Some(heard) => {
                        if self.take_hint(&heard) && self.failures == 0 {
                            return;
                        }
                    }
                    None => {
                        tokio::time::sleep_until(until).await;
                        return;
                    }
                }
            }
        }
    }
}

/// From the beginning of one look at all of the queue to the next.
fn pause_of_whole_looks(took: Duration) -> Duration {
    (took * WHOLE_LOOK_SHARE).clamp(SCAN_EVERY, WHOLE_LOOK_AT_LEAST_EVERY)
}

/// Claims as many runs as there are permits, and takes them into memory. Says also whether all that were `hinted` at
/// could be had, if any were; their sessions are read along with `along`.
async fn take_leases(
    shared: Arc<Shared>,
    permits: Vec<OwnedSemaphorePermit>,
    whole: bool,
    (hinted, along): (Vec<SessionId>, bool),
) -> Result<(Vec<Slot>, Option<bool>), StoreError> {
    let asked_at = Instant::now();
    shared.store.at("claim.before").await;
    let (agents, free, ttl) = (shared.roster.names(), permits.len(), shared.lease_ttl);
    let mut leases = Vec::new();
    let mut first = None;
    if !hinted.is_empty() {
        let store = &shared.store;
        leases = claim::claim_hinted(store, shared.id, free, ttl, &agents, &hinted, along).await?;
        first = Some(leases.len() == hinted.len());
    }
    // A run that was hinted at and isn't there was taken by somebody else, or is a throttled owner's.
    if leases.len() < hinted.len().max(1) && leases.len() < free {
        let (free, rotation) = (free - leases.len(), &shared.rotation);
        match claim::claim(&shared.store, shared.id, free, ttl, &agents, whole, rotation).await {
            Ok(more) => leases.extend(more.into_iter().map(|lease| (lease, None))),
            // What was claimed already has to be known to its holder.
            Err(error) if leases.is_empty() => return Err(error),
            Err(_) => {}
        }
    }
    shared.store.at("claim.done").await;
    let taken: Vec<String> = leases
        .iter()
        .filter(|(lease, _)| lease.taken_over)
        .map(|(lease, _)| lease.session.to_string())
        .collect();
    if !taken.is_empty() {
        metrics::taken_over(taken.len());
        tracing::warn!(kind = "sessions.taken_over", session_ids = taken.join(","), worker_id = %shared.id, "their workers' leases had expired");
    }
    metrics::claimed(leases.len(), asked_at.elapsed());
    let slots = leases.into_iter().zip(permits);
    Ok((slots.map(|(lease, permit)| Held::take(&shared, lease, asked_at, permit)).collect(), first))
}

impl Backend for Claims {
    type Task = Task<Claimed>;
    type Error = Infallible;

    fn poll_ready(&mut self, _: &mut Context<'_>, _: &WorkerContext) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn poll_next(
        &mut self,
        cx: &mut Context<'_>,
        _: &WorkerContext,
    ) -> Poll<Option<Result<Self::Task, Self::Error>>> {
        let task = |lease| TaskBuilder::new(lease).task_id(TaskId::from_string(RandomId::default())).build();
        self.leases.as_mut().poll_next(cx).map(|lease| lease.map(|lease| Ok(task(lease))))
    }

    fn poll_close(&mut self, _: &mut Context<'_>, _: &WorkerContext) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }
}

impl BackendConfig for Claims {
    type Args = Claimed;
    type Id = RandomId;
    type Kind = Ephemeral;
    type Config = ();
    type Layer = apalis::prelude::Identity;

    fn config(&self) -> &Self::Config {
        &()
    }

    fn middleware(&mut self, _: &mut WorkerContext) -> Self::Layer {
        apalis::prelude::Identity::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_looks_that_take_long_are_rarer() {
        let pause = |millis| pause_of_whole_looks(Duration::from_millis(millis)).as_millis();
        assert_eq!(
            [pause(1), pause(10), pause(60), pause(200), pause(60_000)],
            [500, 500, 3_000, 10_000, 10_000]
        );
    }
}
