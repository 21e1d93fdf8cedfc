//! What owners may use: limits on their runs, read and set by admins, kept at the claim and at the door.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use sqlx::PgConnection;
use tokio::time::Instant;

use crate::{Store, errors::StoreError, sql};

/// How many runs of an owner without a limit of its own may be queued.
pub const DEFAULT_MAX_QUEUED: i32 = 100_000;

/// How long a node goes by its last count of an owner's queue.
const COUNT_EVERY: Duration = Duration::from_millis(500);

/// Owners whose counts a node keeps; beyond, those that are too old to go by are dropped.
const MAX_COUNTS: usize = 10_000;

/// How far usage is counted.
const MAX_USAGE: i64 = 100_000;

/// An owner's limits; `None` is none, or the default where there is one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    /// Runs that workers hold at the same time.
    pub max_running: Option<i32>,
    /// Runs that start within a minute; a minute's worth may start at once after a silence.
    pub runs_per_minute: Option<i32>,
    /// Runs that wait; [`DEFAULT_MAX_QUEUED`] if it isn't set.
    pub max_queued: Option<i32>,
}

/// What an owner uses now, each counted up to 100,000.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Runs that workers hold.
    pub running: i64,
    /// Runs that wait for a worker.
    pub queued: i64,
}

/// An owner's limits and what it uses.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn read(store: &Store, owner: &str) -> Result<(Limits, Usage), StoreError> {
    let mut connection = store.read().acquire().await?;
    Ok(read_with(&mut connection, owner).await?)
}

/// As [`read`], on a connection of the caller's.
pub(crate) async fn read_with(
    connection: &mut PgConnection,
    owner: &str,
) -> Result<(Limits, Usage), sqlx::Error> {
    let limits = sqlx::query_as!(
        Limits,
        "SELECT max_running, runs_per_minute, max_queued FROM owner_limits WHERE owner = $1",
        owner
    )
    .fetch_optional(&mut *connection)
    .await?;
    let usage = sqlx::query_as!(
        Usage,
        r#"SELECT (SELECT count(*) FROM (SELECT 1 FROM runs WHERE owner = $1 AND state = 'claimed' LIMIT $2) r) AS "running!",
                  (SELECT count(*) FROM (SELECT 1 FROM runs WHERE owner = $1 AND state = 'queued' LIMIT $2) q) AS "queued!""#,
        owner,
        MAX_USAGE
    )
    .fetch_one(&mut *connection)
    .await?;
    Ok((limits.unwrap_or_default(), usage))
}

/// Sets all of an owner's limits; those that are `None` fall away. What runs goes on. A rate begins with a
/// full bucket.
///
/// # Errors
/// [`StoreError`] as the database has it; a negative limit is refused by its constraint.
pub async fn set(store: &Store, owner: &str, limits: Limits) -> Result<(), StoreError> {
    sqlx::query!(
        "INSERT INTO owner_limits (owner, max_running, runs_per_minute, max_queued, bucket)
         VALUES ($1, $2, $3, $4, coalesce($3, 0))
         ON CONFLICT (owner) DO UPDATE SET
             max_running = excluded.max_running, runs_per_minute = excluded.runs_per_minute,
             max_queued = excluded.max_queued, updated_at = now(), filled_at = now(),
             bucket = CASE WHEN owner_limits.runs_per_minute IS NULL THEN excluded.bucket
                           ELSE least(excluded.bucket, owner_limits.bucket
                                + extract(epoch FROM greatest(now() - owner_limits.filled_at, interval '0'))::float8
                                * owner_limits.runs_per_minute / 60) END",
        owner,
        limits.max_running,
        limits.runs_per_minute,
        limits.max_queued
    )
    .execute(store.read())
    .await?;
    store.backlog.forget(owner);
    Ok(())
}

/// Lets a request through that asks for a run of an owner, unless too many wait already. What it then queues
/// is to be told to [`Backlog::queued`].
///
/// # Errors
/// [`StoreError::Backlog`].
pub(crate) async fn admit(store: &Store, owner: &str) -> Result<(), StoreError> {
    if let Some(admitted) = store.backlog.admit(owner, Instant::now()) {
        return admitted;
    }
    let client = store.client().await?;
    let statement = client.prepare_cached(sql::COUNT_QUEUED).await?;
    let row = client.query_one(&statement, &[&owner, &DEFAULT_MAX_QUEUED]).await?;
    store.backlog.counted(owner, row.try_get("max_queued")?, row.try_get("queued")?)
}

/// What a node knows of its owners' queues. Cheap to clone; all clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Backlog(Arc<Mutex<HashMap<String, Count>>>);

#[derive(Debug)]
struct Count {
    at: Instant,
    limit: i64,
    /// What was counted, and what was accepted here since.
    queued: i64,
}

impl Count {
    fn admit(&self) -> Result<(), StoreError> {
        if self.queued >= self.limit { Err(StoreError::Backlog { limit: self.limit }) } else { Ok(()) }
    }
}

impl Backlog {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Count>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Decides by the last count; `None` if that is too old. Only the first who meets an old count counts
    /// anew; meanwhile the others go by the old one.
    fn admit(&self, owner: &str, now: Instant) -> Option<Result<(), StoreError>> {
        let mut counts = self.lock();
        let count = counts.get_mut(owner)?;
        if now.duration_since(count.at) >= COUNT_EVERY {
            count.at = now;
            return None;
        }
        Some(count.admit())
    }

    fn counted(&self, owner: &str, limit: i64, queued: i64) -> Result<(), StoreError> {
        let now = Instant::now();
        let mut counts = self.lock();
        if counts.len() >= MAX_COUNTS {
            counts.retain(|_, count| now.duration_since(count.at) < COUNT_EVERY);
        }
        let count = Count { at: now, limit, queued };
        let admitted = count.admit();
        if counts.len() < MAX_COUNTS {
            counts.insert(owner.to_owned(), count);
        }
        admitted
    }

    /// A run of this owner was queued here.
    pub(crate) fn queued(&self, owner: &str) {
        if let Some(count) = self.lock().get_mut(owner) {
            count.queued += 1;
        }
    }

    fn forget(&self, owner: &str) {
        self.lock().remove(owner);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_goes_by_its_last_count_and_what_it_accepted_since() {
        let backlog = Backlog::default();
        let now = Instant::now();
        assert!(backlog.admit("a", now).is_none(), "nothing is known yet");
        assert!(backlog.counted("a", 3, 1).is_ok());
        backlog.queued("a");
        assert!(matches!(backlog.admit("a", now), Some(Ok(()))));
        assert!(matches!(backlog.admit("a", now), Some(Ok(()))), "what queues nothing counts nothing");
        backlog.queued("a");
        assert!(matches!(backlog.admit("a", now), Some(Err(StoreError::Backlog { limit: 3 }))));
        assert!(backlog.admit("b", now).is_none());
        let later = Instant::now() + COUNT_EVERY;
        assert!(backlog.admit("a", later).is_none(), "one counts anew");
        assert!(backlog.admit("a", later).is_some(), "the others go by the old count");
        assert!(backlog.counted("a", 3, 0).is_ok());
        backlog.forget("a");
        assert!(backlog.admit("a", later).is_none());
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let backlog = Backlog::default();
        for owner in 0..MAX_COUNTS + 5 {
            assert!(backlog.counted(&owner.to_string(), 1, 0).is_ok());
        }
        assert_eq!(backlog.lock().len(), MAX_COUNTS);
    }
}
