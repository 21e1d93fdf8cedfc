//! Who works: workers, the leases that they hold, and what the runs under way are doing.

use chrono::{DateTime, TimeDelta, Utc};
use uuid::Uuid;

use super::{COUNTED, within};
use crate::{Store, agents::AgentRow, errors::StoreError};

/// For how long a worker counts as alive after it was last heard of, in seconds: it registers each five.
pub const LIVE_WITHIN: i64 = 60;

/// How many runs are looked at to say what a deploy would interrupt.
const RUNS_LOOKED_AT: i64 = 10_000;

/// A registered worker process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Worker {
    /// Its incarnation.
    pub id: Uuid,
    /// The host it runs on.
    pub host: String,
    /// How many runs it may hold.
    pub slots: i32,
    /// How many it holds, as it said itself.
    pub held: i32,
    /// What it offers to isolated calls.
    pub labels: Vec<String>,
    /// The agents that it has, as `slug@revision`.
    pub agents: Vec<String>,
    /// When it started.
    pub started_at: DateTime<Utc>,
    /// When it was last heard of.
    pub seen_at: DateTime<Utc>,
    /// The database's time of this reading.
    pub now: DateTime<Utc>,
}

impl Worker {
    /// For how long it has been silent.
    pub fn silence(&self) -> TimeDelta {
        (self.now - self.seen_at).max(TimeDelta::zero())
    }

    /// Whether it was heard of within [`LIVE_WITHIN`].
    pub fn is_live(&self) -> bool {
        self.silence().num_seconds() < LIVE_WITHIN
    }

    /// Whether it takes runs that ask for a revision of an agent.
    pub fn serves(&self, agent: &str, revision: &str, current: Option<&str>) -> bool {
        let has = |revision: &str| self.agents.iter().any(|one| *one == format!("{agent}@{revision}"));
        has(revision) || current.is_some_and(has)
    }
}

/// Registered workers, newest first, up to 1,000.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn workers(store: &Store) -> Result<Option<Vec<Worker>>, StoreError> {
    within(store, async |tx| {
        let rows = sqlx::query_as!(
            Worker,
            r#"SELECT id, host, slots, held, labels, agents, started_at, seen_at, now() AS "now!"
               FROM workers ORDER BY started_at DESC LIMIT 1000"#
        )
        .fetch_all(tx)
        .await?;
        Ok(rows)
    })
    .await
}

/// The current revision of every agent, by slug, up to 1,000.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn agents(store: &Store) -> Result<Option<Vec<AgentRow>>, StoreError> {
    within(store, async |tx| {
        let rows = sqlx::query_as!(
            AgentRow,
            "SELECT slug, revision, source, descriptor, recorded_at FROM agents WHERE current ORDER BY slug LIMIT 1000"
        )
        .fetch_all(tx)
        .await?;
        Ok(rows)
    })
    .await
}

/// The leases of a worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// Who holds them.
    pub worker: Uuid,
    /// How many.
    pub held: i64,
    /// How many of them have ended and wait to be taken over.
    pub expired: i64,
    /// When the first of them ends, or has ended.
    pub soonest: DateTime<Utc>,
    /// How many of the runs were taken over from others before.
    pub taken_over: i64,
}

/// A run under way that outlived workers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TakenOver {
    /// Whose run.
    pub session: Uuid,
    /// Its owner.
    pub owner: String,
    /// Its agent.
    pub agent: String,
    /// How many workers died over it; at 5 it is ended.
    pub takeovers: i32,
    /// Who holds it.
    pub worker: Uuid,
    /// Since when there is the run.
    pub since: DateTime<Utc>,
}

/// All leases, up to [`COUNTED`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leases {
    /// By worker, those with expired ones first.
    pub workers: Vec<Held>,
    /// Runs under way that outlived workers, at most 10.
    pub taken_over: Vec<TakenOver>,
    /// The database's time of this reading.
    pub now: DateTime<Utc>,
}

/// Looks at the leases, of one owner's runs or all.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn leases(store: &Store, owner: Option<&str>) -> Result<Option<Leases>, StoreError> {
    within(store, async |tx| {
        let now = sqlx::query_scalar!(r#"SELECT now() AS "now!""#).fetch_one(&mut *tx).await?;
        let workers = sqlx::query_file_as!(Held, "src/status/sql/leases.sql", owner, COUNTED)
            .fetch_all(&mut *tx)
            .await?;
        let taken_over = sqlx::query_file_as!(TakenOver, "src/status/sql/takeovers.sql", owner, COUNTED)
            .fetch_all(&mut *tx)
            .await?;
        Ok(Leases { workers, taken_over, now })
    })
    .await
}

/// What a run under way is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum StepKind {
    /// A tool that no rule calls idempotent runs: cut off, it is never run again.
    ToolOnce,
    /// An idempotent tool runs: cut off, it runs again.
    ToolAgain,
    /// A model is asked, or the run is between two steps: cut off, it is asked, and paid, again.
    ModelRequest,
}

/// Runs under way that do the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// What they do.
    pub kind: StepKind,
    /// The tool; of model requests the agent.
    pub name: String,
    /// How many runs.
    pub runs: i64,
    /// Since when the oldest does it.
    pub since: DateTime<Utc>,
}

/// What the runs under way are doing, of up to 10,000 of them.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn steps(store: &Store, owner: Option<&str>) -> Result<Option<Vec<Step>>, StoreError> {
    within(store, async |tx| {
        let rows = sqlx::query_file!("src/status/sql/steps.sql", owner, RUNS_LOOKED_AT).fetch_all(tx).await?;
        let steps = rows.into_iter().map(|row| Step {
            kind: match row.kind.as_str() {
                "tool_once" => StepKind::ToolOnce,
                "tool_again" => StepKind::ToolAgain,
                _ => StepKind::ModelRequest,
            },
            name: row.name,
            runs: row.runs,
            since: row.since,
        });
        let mut steps: Vec<Step> = steps.collect();
        steps.sort_by_key(|step| (step.kind, -step.runs));
        Ok(steps)
    })
    .await
}
