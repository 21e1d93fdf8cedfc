//! Deferred calls that wait for somebody outside.

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::{COUNTED, within};
use crate::{Store, errors::StoreError};

/// How many groups and calls are told of.
const SHOWN: i64 = 5;

/// Open calls that wait for the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// The agent.
    pub agent: String,
    /// The tool.
    pub tool: String,
    /// Why the agent's rule defers it.
    pub reason: String,
    /// How many.
    pub open: i64,
    /// How many of them are past their deadline.
    pub overdue: i64,
    /// Since when the oldest is open.
    pub oldest: DateTime<Utc>,
    /// The next deadline.
    pub next_deadline: Option<DateTime<Utc>>,
}

/// An open call that has waited long.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OldestCall {
    /// Whose call.
    pub session: Uuid,
    /// The session's owner.
    pub owner: String,
    /// The agent.
    pub agent: String,
    /// The tool.
    pub tool: String,
    /// Why the agent's rule defers it.
    pub reason: String,
    /// Since when it is open.
    pub since: DateTime<Utc>,
    /// Its deadline.
    pub expires_at: Option<DateTime<Utc>>,
}

/// Deferred calls that nobody has completed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Deferred {
    /// How many, up to [`COUNTED`].
    pub open: i64,
    /// Those past their deadline, which a scheduler ends within a second.
    pub overdue: i64,
    /// Since when the first of these is overdue.
    pub overdue_since: Option<DateTime<Utc>>,
    /// By agent, tool and reason, the group with the oldest call first; of the first [`COUNTED`] calls.
    pub groups: Vec<Group>,
    /// The oldest calls, one an owner, of up to 10,000 owners.
    pub oldest: Vec<OldestCall>,
}

/// Looks at open deferred calls, of one owner or all.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn deferred(store: &Store, owner: Option<&str>) -> Result<Option<Deferred>, StoreError> {
    within(store, async |tx| {
        let row =
            sqlx::query_file!("src/status/sql/deferred.sql", owner, COUNTED).fetch_one(&mut *tx).await?;
        let groups = sqlx::query_file_as!(Group, "src/status/sql/deferred_groups.sql", owner, COUNTED, SHOWN)
            .fetch_all(&mut *tx)
            .await?;
        let oldest = sqlx::query_file_as!(OldestCall, "src/status/sql/deferred_oldest.sql", owner, SHOWN)
            .fetch_all(&mut *tx)
            .await?;
        let (open, overdue, overdue_since) = (row.open, row.overdue, row.overdue_since);
        Ok(Deferred { open, overdue, overdue_since, groups, oldest })
    })
    .await
}
