//! What waits in the queue, whose it is, and who has waited the longest.

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::{COUNTED, QUEUED_LOOKED_AT, within};
use crate::{
    Store,
    errors::StoreError,
    quota::{self, Limits, Usage},
};

/// How many owners are told of by each measure.
const OWNERS: i64 = 5;

/// The parts of the queue, each counted up to [`COUNTED`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Counts {
    /// Runs that workers hold.
    pub claimed: i64,
    /// Runs that wait for a worker, those that were put off included.
    pub queued: i64,
    /// Of those, the ones that a worker may take now.
    pub due: i64,
    /// Runs that the engine waits for elsewhere; `None` if counting them took too long.
    pub parked: Option<i64>,
    /// Parked runs whose timer should have woken them over a minute ago.
    pub late_timers: i64,
}

/// Counts the queue, of one owner or all.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn counts(store: &Store, owner: Option<&str>) -> Result<Option<Counts>, StoreError> {
    let parked = within(store, async |tx| {
        let row = sqlx::query_file!("src/status/sql/parked.sql", owner, COUNTED).fetch_one(tx).await?;
        Ok(row.parked)
    })
    .await?;
    within(store, async |tx| {
        let row = sqlx::query_file!("src/status/sql/queue.sql", owner, COUNTED).fetch_one(tx).await?;
        let (claimed, queued, due) = (row.claimed, row.queued, row.due);
        Ok(Counts { claimed, queued, due, parked, late_timers: row.late_timers })
    })
    .await
}

/// What an owner has in the queue.
#[derive(Debug, Clone, PartialEq)]
pub struct OwnerLoad {
    /// The owner; empty where clients don't name themselves.
    pub owner: String,
    /// Its queued runs.
    pub queued: i64,
    /// Those of them that are due.
    pub due: i64,
    /// Its runs that workers hold.
    pub held: i64,
    /// Since when its oldest due run waits.
    pub due_since: Option<DateTime<Utc>>,
    /// Its limits.
    pub limits: Limits,
    /// Starts that its rate allows now, if it has one.
    pub bucket: Option<f64>,
}

/// An owner's limits and what it uses.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn owner(store: &Store, owner: &str) -> Result<Option<(Limits, Usage)>, StoreError> {
    within(store, async |tx| quota::read_with(tx, owner).await).await
}

/// The run of an owner that has been due the longest.
#[derive(Debug, Clone, PartialEq)]
pub struct Waiting {
    /// Whose run.
    pub session: Uuid,
    /// The agent that it asks for.
    pub agent: String,
    /// The agent's revision that it asks for.
    pub revision: String,
    /// The agent's current revision: a worker that has it takes the run too.
    pub current: Option<String>,
    /// Since when it is due.
    pub since: DateTime<Utc>,
    /// How many workers died over it.
    pub takeovers: i32,
    /// Its owner.
    pub owner: OwnerLoad,
}

/// Who fills the queue and who waits in it. Of the first [`QUEUED_LOOKED_AT`] queued runs.
#[derive(Debug, Clone, PartialEq)]
pub struct Queue {
    /// Queued runs of all owners.
    pub queued: i64,
    /// Owners that have some.
    pub owners: i64,
    /// The owners with the most.
    pub largest: Vec<OwnerLoad>,
    /// The oldest due runs, one an owner, those that waited longest first; owners with limits of their own are
    /// looked for apart, so that they don't hide others.
    pub waiting: Vec<Waiting>,
}

/// Looks at the queue by owner.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn queue(store: &Store, owner: Option<&str>) -> Result<Option<Queue>, StoreError> {
    within(store, async |tx| {
        let rows = sqlx::query_file!("src/status/sql/owners.sql", owner, QUEUED_LOOKED_AT, OWNERS)
            .fetch_all(&mut *tx)
            .await?;
        let (queued, owners) = rows.first().map_or((0, 0), |row| (row.total, row.owners));
        let (mut largest, mut longest) = (Vec::new(), Vec::new());
        for row in rows {
            let load = OwnerLoad {
                owner: row.owner,
                queued: row.queued,
                due: row.due,
                held: row.held,
                due_since: row.due_since,
                limits: Limits {
                    max_running: row.max_running,
                    runs_per_minute: row.runs_per_minute,
                    max_queued: row.max_queued,
                },
                bucket: row.bucket,
            };
            if row.longest {
                longest.push(load.clone());
            }
            if row.largest {
                largest.push(load);
            }
        }
        let names: Vec<String> = longest.iter().map(|load| load.owner.clone()).collect();
        let rows = sqlx::query_file!("src/status/sql/waiting.sql", &names).fetch_all(&mut *tx).await?;
        let waiting = rows.into_iter().filter_map(|row| {
            Some(Waiting {
                session: row.session,
                agent: row.agent,
                revision: row.revision,
                current: row.current,
                since: row.since,
                takeovers: row.takeovers,
                owner: longest.iter().find(|load| load.owner == row.owner)?.clone(),
            })
        });
        Ok(Queue { queued, owners, largest, waiting: waiting.collect() })
    })
    .await
}

/// Due runs that no live worker has an agent for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unserved {
    /// The agent that they ask for, as `slug@revision`.
    pub agent: String,
    /// How many.
    pub runs: i64,
    /// Since when the oldest is due.
    pub since: DateTime<Utc>,
}

/// Agents that due runs ask for in vain, of the first [`COUNTED`] due runs.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn unserved(store: &Store, owner: Option<&str>) -> Result<Option<Vec<Unserved>>, StoreError> {
    within(store, async |tx| {
        let rows = sqlx::query_file!("src/status/sql/unserved.sql", owner, COUNTED).fetch_all(tx).await?;
        let rows = rows.into_iter().map(|row| Unserved {
            agent: format!("{}@{}", row.agent, row.revision),
            runs: row.runs,
            since: row.since,
        });
        Ok(rows.collect())
    })
    .await
}
