//! Hints to other processes through NOTIFY.
//!
//! NOTIFY takes a database-wide lock at commit, so it never stands in a working transaction: whoever has
//! changed something leaves a hint here after its commit, and one task sends all that has gathered, in one
//! statement on a connection of its own: at once after a silence or for workers, else a little later, so
//! that a busy process sends few. A hint that is lost delays its receiver until the next scan and does
//! nothing else.

mod queue;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};
use tokio_postgres::{Client, Statement};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::AbortOnDropHandle;

use crate::connect::{Backoff, ConnectError, Session, Target};
use queue::{Batch, Queue};
pub use queue::{Channel, MAX_BYTES, MAX_ITEMS, MAX_PAYLOAD};

/// Bound on one statement; past it the connection counts as dead.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);
/// Silence between two statements that wake no worker.
const GAP: Duration = Duration::from_millis(10);
/// Bound on the last hints when a notifier is closed.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

const SEND: &str = "SELECT pg_notify(hint.channel, hint.payload) \
                    FROM unnest($1::text[], $2::text[]) AS hint (channel, payload)";

/// What a notifier has done since its start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NotifierStats {
    /// Items taken into the queue.
    pub accepted: u64,
    /// Items left out because the same one was waiting.
    pub deduplicated: u64,
    /// Items never sent: too long or malformed, pushed out of a full queue, or deltas met by an outage.
    pub dropped: u64,
    /// Items sent.
    pub sent: u64,
    /// Payloads that carried them.
    pub payloads: u64,
    /// Statements that carried the payloads.
    pub batches: u64,
    /// Connections opened, the first included.
    pub connections: u64,
    /// Items waiting now.
    pub waiting: u64,
    /// Whether the connection stands now.
    pub connected: bool,
}

/// Sends hints. Cheap to clone; the task ends when the last clone is dropped or [`Notifier::close`] is
/// called.
#[derive(Debug, Clone)]
pub struct Notifier {
    shared: Arc<Shared>,
    life: Arc<Life>,
}

#[derive(Debug)]
struct Life {
    stop: CancellationToken,
    task: Mutex<Option<JoinHandle<()>>>,
    _stop_on_drop: DropGuard,
}

#[derive(Debug)]
struct Shared {
    queue: Mutex<Queue>,
    /// Wakes the task; keeps one permit, so a hint between its look and its wait is seen.
    wake: Notify,
    /// How many accepted items have left the queue for good.
    settled: watch::Sender<u64>,
}

impl Notifier {
    /// Starts the sending task on the current runtime; it connects in the background and for ever again.
    /// `url` must lead to the server directly. The session is named `holdfast-<role>-notify`.
    ///
    /// # Errors
    /// [`ConnectError::Url`] and [`ConnectError::Tls`].
    pub fn start(url: &str, role: &str) -> Result<Notifier, ConnectError> {
        let target = Target::parse(url, &format!("{role}-notify"), Session::Bounded)?;
        let shared = Arc::new(Shared {
            queue: Mutex::new(Queue::default()),
            wake: Notify::new(),
            settled: watch::channel(0).0,
        });
        let stop = CancellationToken::new();
        let (work, stopped) = (Arc::clone(&shared), stop.clone());
        let task = tokio::spawn(async move {
            // Dropping the future between its awaits loses hints at worst.
            stopped.run_until_cancelled(run(target, work)).await;
        });
        let life = Life { _stop_on_drop: stop.clone().drop_guard(), stop, task: Mutex::new(Some(task)) };
        Ok(Notifier { shared, life: Arc::new(life) })
    }

    /// Leaves a hint; never blocks and never fails. For [`Channel::Runs`] and [`Channel::Events`] the item
    /// is a key without commas, and one that waits already isn't repeated. For [`Channel::Deltas`] it is
    /// one JSON value, and each is sent, in order.
    pub fn send(&self, channel: Channel, item: String) {
        let mut queue = self.shared.queue();
        let idle = queue.len() == 0;
        queue.push(channel, item);
        let wakes = idle || queue.urgent();
        self.shared.publish(&queue);
        drop(queue);
        // Else the task is awake, or will be when its pause is over.
        if wakes {
            self.shared.wake.notify_one();
        }
    }

    /// Waits until every hint left before this call was sent or dropped. While the server is away this
    /// takes until it is back.
    pub async fn flush(&self) {
        let wanted = self.shared.queue().stats.accepted;
        let mut settled = self.shared.settled.subscribe();
        // The sender lives in `shared`, so the wait can't fail.
        let _ = settled.wait_for(|settled| *settled >= wanted).await;
    }

    /// What has been done so far.
    pub fn stats(&self) -> NotifierStats {
        let queue = self.shared.queue();
        NotifierStats { waiting: u64::try_from(queue.len()).unwrap_or(u64::MAX), ..queue.stats }
    }

    /// Sends what waits, for at most two seconds, and ends the task. Later hints go nowhere.
    pub async fn close(&self) {
        if timeout(CLOSE_TIMEOUT, self.flush()).await.is_err() {
            tracing::debug!("hints were left unsent at the end");
        }
        self.life.stop.cancel();
        let task = self.life.task.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(task) = task {
            let _ = task.await;
        }
    }
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn publish(&self, queue: &Queue) {
        let settled = queue.settled();
        self.settled.send_if_modified(|old| std::mem::replace(old, settled) != settled);
    }

    /// Changes the queue and tells those who flush.
    fn with<T>(&self, change: impl FnOnce(&mut Queue) -> T) -> T {
        let mut queue = self.queue();
        let result = change(&mut queue);
        self.publish(&queue);
        result
    }
}

async fn run(target: Target, shared: Arc<Shared>) {
    let mut backoff = Backoff::new();
    loop {
        let ended = serve(&target, &shared, &mut backoff).await;
        let connected = shared.with(|queue| std::mem::replace(&mut queue.stats.connected, false));
        match ended {
            Ok(()) => tracing::info!("the notifier's connection was closed; reconnecting"),
            Err(error) if connected => {
                tracing::warn!(%error, "the notifier lost its connection; reconnecting")
            }
            Err(error) => tracing::debug!(%error, "the notifier can't connect; trying again"),
        }
        tokio::time::sleep(backoff.step()).await;
    }
}

/// Sends until the connection is lost; `Ok` if that happened while nothing was being sent.
async fn serve(target: &Target, shared: &Shared, backoff: &mut Backoff) -> Result<(), ConnectError> {
    let (client, connection) = target.open().await?;
    let mut driver = AbortOnDropHandle::new(tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "the notifier's connection ended");
        }
    }));
    // A hint that the server loses with itself is a hint lost; nobody waits for its flush.
    within(client.batch_execute("SET synchronous_commit = off")).await?;
    let statement = within(client.prepare(SEND)).await?;
    shared.with(|queue| {
        // A delta from before an outage has been overtaken by the turn that it was part of.
        if queue.stats.connections > 0 {
            queue.drop_deltas();
        }
        queue.stats.connections += 1;
        queue.stats.connected = true;
    });
    let mut next = Instant::now();
    loop {
        while shared.queue().len() > 0 && !shared.queue().urgent() && Instant::now() < next {
            tokio::select! {
                () = tokio::time::sleep_until(next) => {}
                () = shared.wake.notified() => {}
                _ = &mut driver => return Ok(()),
            }
        }
        if let Some(batch) = shared.with(Queue::take) {
            next = Instant::now() + GAP;
            match deliver(&client, &statement, &batch).await {
                Ok(()) => {
                    backoff.reset();
                    shared.with(|queue| queue.sent(&batch));
                }
                Err(error) => {
                    shared.with(|queue| queue.take_back(batch));
                    return Err(error);
                }
            }
            continue;
        }
        tokio::select! {
            () = shared.wake.notified() => {}
            _ = &mut driver => return Ok(()),
        }
    }
}

async fn deliver(client: &Client, statement: &Statement, batch: &Batch) -> Result<(), ConnectError> {
    let (channels, payloads): (Vec<&str>, Vec<&str>) =
        batch.payloads.iter().map(|(channel, payload)| (channel.name(), payload.as_str())).unzip();
    within(client.execute(statement, &[&channels, &payloads])).await?;
    Ok(())
}

async fn within<T>(call: impl Future<Output = Result<T, tokio_postgres::Error>>) -> Result<T, ConnectError> {
    match timeout(SEND_TIMEOUT, call).await {
        Ok(done) => Ok(done?),
        Err(_) => Err(ConnectError::Slow { what: "a notification", limit: SEND_TIMEOUT }),
    }
}
