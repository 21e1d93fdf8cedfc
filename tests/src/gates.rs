//! Holding a call where a race is decided: at a named point, or behind a row's lock.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use holdfast_engine::ids::SessionId;
use holdfast_store::gate::Gate;
use tokio::{
    sync::Semaphore,
    time::{interval, timeout},
};
use tokio_postgres::Client;

use crate::cluster::Database;

/// How long anything that has to happen may take.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// A point at which the first call that passes is held.
#[derive(Debug, Clone)]
pub struct Stopper {
    reached: Arc<Semaphore>,
    go: Arc<Semaphore>,
}

impl Stopper {
    /// A gate that holds the first call at `point`, and the handle that lets it go.
    pub fn at(point: &'static str) -> (Gate, Stopper) {
        let stopper = Self { reached: Arc::new(Semaphore::new(0)), go: Arc::new(Semaphore::new(0)) };
        let (shared, met) = (stopper.clone(), Arc::new(AtomicBool::new(false)));
        let gate = Gate::new(move |passing| {
            let (shared, met) = (shared.clone(), Arc::clone(&met));
            Box::pin(async move {
                if passing == point && !met.swap(true, Ordering::SeqCst) {
                    shared.reached.add_permits(1);
                    // Closing is the signal.
                    let _ = shared.go.acquire().await;
                }
            })
        });
        (gate, stopper)
    }

    /// Waits until a call is held.
    ///
    /// # Panics
    /// If none comes.
    pub async fn reached(&self) {
        let met = timeout(PATIENCE, self.reached.acquire()).await;
        met.expect("a call reaches the point").expect("never closed").forget();
    }

    /// Lets the call go on, and whoever comes later.
    pub fn release(&self) {
        self.go.close();
    }
}

/// A session's row, locked by nobody's transaction in particular: everybody queues behind it, and is
/// let in by order of arrival.
#[derive(Debug)]
pub struct Barrier {
    holder: Client,
    watcher: Client,
}

impl Barrier {
    /// Locks a session's row.
    ///
    /// # Panics
    /// If the database refuses.
    pub async fn on(database: &Database, session: SessionId) -> Self {
        let (holder, watcher) = (database.connect().await, database.connect().await);
        holder.batch_execute("BEGIN").await.expect("a transaction");
        holder
            .execute("SELECT 1 FROM sessions WHERE id = $1 FOR NO KEY UPDATE", &[&session.0])
            .await
            .expect("the session's row");
        Self { holder, watcher }
    }

    /// Waits until as many calls as `count` queue for locks in this database.
    ///
    /// # Panics
    /// If they don't come.
    pub async fn queued(&self, count: i64) {
        until_queued(&self.watcher, count).await;
    }

    /// Lets the queue in.
    ///
    /// # Panics
    /// If the database refuses.
    pub async fn open(self) {
        self.holder.batch_execute("COMMIT").await.expect("the lock is given back");
    }
}

/// Waits until `count` connections of this database wait for locks.
///
/// # Panics
/// If they don't come to.
pub async fn until_queued(watcher: &Client, count: i64) {
    const WAITING: &str = "SELECT count(*) FROM pg_stat_activity \
                           WHERE datname = current_database() AND wait_event_type = 'Lock'";
    let all = async {
        let mut tick = interval(Duration::from_millis(5));
        loop {
            tick.tick().await;
            let waiting: i64 = watcher.query_one(WAITING, &[]).await.expect("an answer").get(0);
            if waiting >= count {
                break;
            }
        }
    };
    timeout(PATIENCE, all).await.expect("the calls queue for the lock");
}
