//! The register of worker processes: who is there, and what they can do.

use chrono::{DateTime, Utc};
use holdfast_engine::ids::WorkerId;
use uuid::Uuid;

use crate::{Store, errors::StoreError, outage};

/// A worker process as it is registered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerRow {
    /// Its incarnation.
    pub id: Uuid,
    /// The host it runs on.
    pub host: String,
    /// How many runs it may hold.
    pub slots: i32,
    /// How many it holds.
    pub held: i32,
    /// What it offers to isolated calls.
    pub labels: Vec<String>,
    /// The agents that it has, as `slug@revision`.
    pub agents: Vec<String>,
    /// When it started.
    pub started_at: DateTime<Utc>,
    /// When it was last heard of.
    pub seen_at: DateTime<Utc>,
}

/// Registers a worker, or renews what is known of it.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn register(
    store: &Store,
    id: WorkerId,
    host: &str,
    slots: i32,
    held: i32,
    labels: &[String],
    agents: &[String],
) -> Result<(), StoreError> {
    sqlx::query!(
        "INSERT INTO workers (id, host, slots, held, labels, agents) VALUES ($1, $2, $3, $4, $5, $6)
         ON CONFLICT (id) DO UPDATE SET held = excluded.held, agents = excluded.agents, seen_at = now()",
        id.0,
        host,
        slots,
        held,
        labels,
        agents
    )
    .execute(store.read())
    .await?;
    outage::worked();
    Ok(())
}

/// Takes a worker out of the register.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn leave(store: &Store, id: WorkerId) -> Result<(), StoreError> {
    sqlx::query!("DELETE FROM workers WHERE id = $1", id.0).execute(store.read()).await?;
    Ok(())
}

/// All registered workers, newest first.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn list(store: &Store) -> Result<Vec<WorkerRow>, StoreError> {
    let rows = sqlx::query_as!(
        WorkerRow,
        "SELECT id, host, slots, held, labels, agents, started_at, seen_at FROM workers ORDER BY started_at DESC"
    )
    .fetch_all(store.read())
    .await?;
    Ok(rows)
}

/// Due runs that no registered worker has an agent for, by the `slug@revision` that they ask for.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn unserved(store: &Store) -> Result<Vec<(String, i64)>, StoreError> {
    let rows = sqlx::query!(
        r#"SELECT r.agent || '@' || r.agent_revision AS "agent!", count(*) AS "runs!"
           FROM runs r
           WHERE r.state = 'queued' AND r.available_at <= now() AND NOT EXISTS (
               SELECT 1 FROM workers w WHERE w.seen_at > now() - interval '1 minute' AND (
                   r.agent || '@' || r.agent_revision = ANY(w.agents)
                   OR EXISTS (SELECT 1 FROM agents a WHERE a.slug = r.agent AND a.current AND a.slug || '@' || a.revision = ANY(w.agents))))
           GROUP BY 1 ORDER BY 2 DESC LIMIT 100"#
    )
    .fetch_all(store.read())
    .await?;
    Ok(rows.into_iter().map(|row| (row.agent, row.runs)).collect())
}
