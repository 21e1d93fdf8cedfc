//! What may go: what retiring, forgetting and purging have before them.

use chrono::{DateTime, Days, Utc};

use super::{COUNTED, within};
use crate::{Store, errors::StoreError};

/// How many sessions are looked at for closed ones, the oldest first.
pub const SESSIONS_LOOKED_AT: i64 = 20_000;

/// How old things get.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ages {
    /// Days for which events can be replayed.
    pub events: u64,
    /// Days for which a closed session rests before it is retired.
    pub sessions: i32,
    /// Days for which archives are kept.
    pub archives: i32,
}

/// Closed sessions, of the first [`SESSIONS_LOOKED_AT`] sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Closed {
    /// Roots that have rested for long enough; one whose children haven't stays.
    pub closed: i64,
    /// How many sessions were looked at.
    pub looked: i64,
}

/// Partitions of events that are older than they are kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OldEvents {
    /// How many partitions.
    pub partitions: i64,
    /// About how many events.
    pub events: i64,
    /// The room that they take.
    pub bytes: i64,
    /// The oldest partition's name.
    pub oldest: Option<String>,
}

/// What was deleted or has aged, each counted up to [`COUNTED`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rest {
    /// Deleted sessions whose rows are still there.
    pub deleted: i64,
    /// When the first of them was deleted.
    pub deleted_since: Option<DateTime<Utc>>,
    /// Archives.
    pub archives: i64,
    /// Those of them that are older than they are kept.
    pub old_archives: i64,
    /// Idempotency keys that should have been forgotten an hour ago.
    pub old_keys: i64,
}

/// What may go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Retention {
    /// What was deleted or has aged.
    pub rest: Option<Rest>,
    /// Sessions that could be retired.
    pub closed: Option<Closed>,
    /// Events that could be dropped; none are told of for a single owner.
    pub events: Option<OldEvents>,
}

/// Looks at what may go, of one owner or all.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn retention(store: &Store, owner: Option<&str>, ages: Ages) -> Result<Retention, StoreError> {
    let rest = within(store, async |tx| {
        let row = sqlx::query_file_as!(Rest, "src/status/sql/retention.sql", owner, COUNTED, ages.archives)
            .fetch_one(tx)
            .await?;
        Ok(row)
    })
    .await?;
    let closed = within(store, async |tx| {
        let row = sqlx::query_file_as!(
            Closed,
            "src/status/sql/closed_sessions.sql",
            owner,
            SESSIONS_LOOKED_AT,
            ages.sessions
        )
        .fetch_one(tx)
        .await?;
        Ok(row)
    })
    .await?;
    let oldest = Utc::now().date_naive().checked_sub_days(Days::new(ages.events)).unwrap_or_default();
    let limit = format!("events_{}", oldest.format("%Y%m%d"));
    let events = within(store, async |tx| {
        let row =
            sqlx::query_file_as!(OldEvents, "src/status/sql/old_events.sql", limit).fetch_one(tx).await?;
        Ok(row)
    })
    .await?;
    Ok(Retention { rest, closed, events })
}
