//! Agents that nodes have loaded: each revision once, the one that was recorded last being current.

use chrono::{DateTime, Utc};
use holdfast_engine::waking::{WakeClass, Waking};

use crate::{Store, errors::StoreError};

/// An agent as it is recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentRow {
    /// Its name.
    pub slug: String,
    /// Hash of what it was made from.
    pub revision: String,
    /// `file` or `database`.
    pub source: String,
    /// What clients are shown of it, as JSON.
    pub descriptor: String,
    /// When it was recorded.
    pub recorded_at: DateTime<Utc>,
}

/// An agent to record.
#[derive(Debug, Clone, Copy)]
pub struct Record<'a> {
    /// Its name.
    pub slug: &'a str,
    /// Hash of what it was made from.
    pub revision: &'a str,
    /// What clients are shown of it, as JSON.
    pub descriptor: &'a str,
    /// Which mail starts a run of its sessions.
    pub waking: &'a Waking,
}

/// Records an agent and makes its revision the current one. Sessions adopt it with their next run;
/// runs under way go on with the revision that they have while a worker has it.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn record(store: &Store, agent: &Record<'_>) -> Result<(), StoreError> {
    let Record { slug, revision, descriptor, waking } = *agent;
    let wake_on: Vec<String> =
        waking.wake_on.iter().copied().map(WakeClass::word).map(str::to_owned).collect();
    let mut tx = store.read().begin().await?;
    sqlx::query!("SELECT pg_advisory_xact_lock(hashtextextended($1, 7401))", slug).execute(&mut *tx).await?;
    sqlx::query!(
        "UPDATE agents SET current = false WHERE slug = $1 AND current AND revision <> $2",
        slug,
        revision
    )
    .execute(&mut *tx)
    .await?;
    sqlx::query!(
        "INSERT INTO agents (slug, revision, current, source, descriptor, wake_on, resume_on_any_mail)
         VALUES ($1, $2, true, 'file', $3, $4, $5)
         ON CONFLICT (slug, revision) DO UPDATE SET current = true, descriptor = excluded.descriptor, recorded_at = now(),
             wake_on = excluded.wake_on, resume_on_any_mail = excluded.resume_on_any_mail",
        slug,
        revision,
        descriptor,
        &wake_on,
        waking.resume_on_any_mail
    )
    .execute(&mut *tx)
    .await?;
    tx.commit().await?;
    Ok(())
}

/// The current revision of every agent, by slug.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn list(store: &Store) -> Result<Vec<AgentRow>, StoreError> {
    let rows = sqlx::query_as!(
        AgentRow,
        "SELECT slug, revision, source, descriptor, recorded_at FROM agents WHERE current ORDER BY slug"
    )
    .fetch_all(store.read())
    .await?;
    Ok(rows)
}

/// The current revision of one agent.
///
/// # Errors
/// [`StoreError::UnknownAgent`].
pub async fn get(store: &Store, slug: &str) -> Result<AgentRow, StoreError> {
    sqlx::query_as!(
        AgentRow,
        "SELECT slug, revision, source, descriptor, recorded_at FROM agents WHERE current AND slug = $1",
        slug
    )
    .fetch_optional(store.read())
    .await?
    .ok_or_else(|| StoreError::UnknownAgent(slug.to_owned()))
}
