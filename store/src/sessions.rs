//! What clients read of sessions: one, many, and whether their runs go on.

use chrono::{DateTime, Utc};
use holdfast_engine::ids::SessionId;
use tokio_postgres::Row;
use uuid::Uuid;

use crate::{Store, errors::StoreError, sql};

/// A session's row as views show it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionRow {
    /// Its id.
    pub id: Uuid,
    /// Its owner; empty where clients don't name themselves.
    pub owner: String,
    /// Its agent's slug.
    pub agent: String,
    /// The revision that its last run used.
    pub agent_revision: String,
    /// The session it belongs to.
    pub parent_id: Option<Uuid>,
    /// The session it was forked from.
    pub forked_from: Option<Uuid>,
    /// What it is doing.
    pub status: String,
    /// Why, where that needs words.
    pub status_detail: Option<String>,
    /// Its version.
    pub version: i64,
    /// Revision of its parameters.
    pub settings_rev: i64,
    /// Labels, a JSON object.
    pub labels: String,
    /// How many turns it has.
    pub turns: i64,
    /// Number of its newest event.
    pub event_seq: i64,
    /// When it was created.
    pub created_at: DateTime<Utc>,
    /// When it last changed.
    pub updated_at: DateTime<Utc>,
    /// Whether a run is under way that goes further than folding mail.
    pub active: bool,
    /// What a parked run waits for.
    pub parked_on: Option<String>,
    /// When a parked run wakes by itself.
    pub wakes_at: Option<DateTime<Utc>>,
}

/// A session of a caller.
///
/// # Errors
/// [`StoreError::UnknownSession`], also for another owner's and a deleted one.
pub async fn get(store: &Store, owner: Option<&str>, id: SessionId) -> Result<SessionRow, StoreError> {
    let client = store.client().await?;
    let statement = client.prepare_cached(sql::VIEW_SESSION).await?;
    let row = client.query_opt(&statement, &[&id.0, &owner]).await?.ok_or(StoreError::UnknownSession)?;
    session_row(&row)
}

pub(crate) fn session_row(row: &Row) -> Result<SessionRow, StoreError> {
    Ok(SessionRow {
        id: row.try_get("id")?,
        owner: row.try_get("owner")?,
        agent: row.try_get("agent")?,
        agent_revision: row.try_get("agent_revision")?,
        parent_id: row.try_get("parent_id")?,
        forked_from: row.try_get("forked_from")?,
        status: row.try_get("status")?,
        status_detail: row.try_get("status_detail")?,
        version: row.try_get("version")?,
        settings_rev: row.try_get("settings_rev")?,
        labels: row.try_get("labels")?,
        turns: row.try_get("turns")?,
        event_seq: row.try_get("event_seq")?,
        created_at: row.try_get("created_at")?,
        updated_at: row.try_get("updated_at")?,
        active: row.try_get("active")?,
        parked_on: row.try_get("parked_on")?,
        wakes_at: row.try_get("wakes_at")?,
    })
}

/// Which sessions a listing shows.
#[derive(Debug, Clone, Default)]
pub struct Filter {
    /// Of this owner; `None` for all.
    pub owner: Option<String>,
    /// Of this agent.
    pub agent: Option<String>,
    /// In one of these statuses.
    pub statuses: Option<Vec<String>>,
    /// Children of this session.
    pub parent: Option<Uuid>,
    /// Children as well as roots.
    pub tree: bool,
    /// With this label, as JSON text of one pair without braces: `"key":"value"`.
    pub label: Option<String>,
    /// Whose id, agent, detail or labels contain this.
    pub text: Option<String>,
    /// Created before this time.
    pub before: Option<DateTime<Utc>>,
    /// After this row in the listing's order: its creation time and id.
    pub after: Option<(DateTime<Utc>, Uuid)>,
    /// How many at most.
    pub limit: i64,
}

/// Sessions, newest first.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn list(store: &Store, filter: &Filter) -> Result<Vec<SessionRow>, StoreError> {
    let (after_at, after_id) = filter.after.unzip();
    let rows = sqlx::query_as!(
        SessionRow,
        r#"SELECT s.id, s.owner, s.agent, s.agent_revision, s.parent_id, s.forked_from, s.status, s.status_detail, s.version,
                  s.settings_rev, s.labels, s.turns, s.event_seq, s.created_at, s.updated_at,
                  coalesce(r.mode <> 'none', false) AS "active!", r.parked_on AS "parked_on?",
                  CASE WHEN r.state = 'parked' AND isfinite(r.available_at) THEN r.available_at END AS "wakes_at?"
           FROM sessions s LEFT JOIN runs r ON r.session_id = s.id
           WHERE s.deleted_at IS NULL
             AND ($1::text IS NULL OR s.owner = $1)
             AND ($2::text IS NULL OR s.agent = $2)
             AND ($3::text[] IS NULL OR s.status = ANY($3))
             AND ($4::uuid IS NULL OR s.parent_id = $4)
             AND ($4::uuid IS NOT NULL OR $5 OR s.parent_id IS NULL)
             AND ($6::text IS NULL OR strpos(s.labels, $6) > 0)
             AND ($7::text IS NULL OR strpos(lower(s.id::text || ' ' || s.agent || ' ' || coalesce(s.status_detail, '') || ' ' || s.labels), lower($7)) > 0)
             AND ($8::timestamptz IS NULL OR s.created_at < $8)
             AND ($9::timestamptz IS NULL OR (s.created_at, s.id) < ($9, $10::uuid))
           ORDER BY s.created_at DESC, s.id DESC
           LIMIT $11"#,
        filter.owner,
        filter.agent,
        filter.statuses.as_deref(),
        filter.parent,
        filter.tree,
        filter.label,
        filter.text,
        filter.before,
        after_at,
        after_id,
        filter.limit
    )
    .fetch_all(store.read())
    .await?;
    Ok(rows)
}

/// Sessions by their ids, in any order; deleted ones too, as long as their rows are there.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn rows(store: &Store, ids: &[Uuid]) -> Result<Vec<SessionRow>, StoreError> {
    let rows = sqlx::query_as!(
        SessionRow,
        r#"SELECT s.id AS "id!", s.owner AS "owner!", s.agent AS "agent!", s.agent_revision AS "agent_revision!", s.parent_id, s.forked_from,
                  s.status AS "status!", s.status_detail, s.version AS "version!", s.settings_rev AS "settings_rev!", s.labels AS "labels!",
                  s.turns AS "turns!", s.event_seq AS "event_seq!", s.created_at AS "created_at!", s.updated_at AS "updated_at!",
                  coalesce(r.mode <> 'none', false) AS "active!", r.parked_on AS "parked_on?",
                  CASE WHEN r.state = 'parked' AND isfinite(r.available_at) THEN r.available_at END AS "wakes_at?"
           FROM sessions s LEFT JOIN runs r ON r.session_id = s.id WHERE s.id = ANY($1)"#,
        ids
    )
    .fetch_all(store.read())
    .await?;
    Ok(rows)
}

/// Where a session's stream and run stand: what waiting clients are woken by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pulse {
    /// The session.
    pub id: Uuid,
    /// Number of its newest event.
    pub event_seq: i64,
    /// Whether a run is under way that goes further than folding mail.
    pub active: bool,
    /// Whether mail of any kind is still being worked on.
    pub busy: bool,
    /// Whether the session is deleted.
    pub deleted: bool,
    /// When a parked run wakes by itself.
    pub wakes_at: Option<DateTime<Utc>>,
}

/// The pulses of sessions, in one statement for all that a node serves.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn pulses(store: &Store, ids: &[Uuid]) -> Result<Vec<Pulse>, StoreError> {
    let rows = sqlx::query_as!(
        Pulse,
        r#"SELECT s.id AS "id!", s.event_seq AS "event_seq!", coalesce(r.mode <> 'none', false) AS "active!", r.session_id IS NOT NULL AS "busy!",
                  s.deleted_at IS NOT NULL AS "deleted!",
                  CASE WHEN r.state = 'parked' AND isfinite(r.available_at) THEN r.available_at END AS "wakes_at?"
           FROM sessions s LEFT JOIN runs r ON r.session_id = s.id WHERE s.id = ANY($1)"#,
        ids
    )
    .fetch_all(store.read())
    .await?;
    Ok(rows)
}

/// How many sessions and runs there are, for health and metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Census {
    /// Sessions whose run is held by a worker.
    pub claimed: i64,
    /// Runs that are due and wait for a worker.
    pub queued: i64,
    /// Runs that the engine waits for elsewhere.
    pub parked: i64,
    /// Open deferred calls.
    pub open_continuations: i64,
    /// Microseconds that the oldest due run has waited.
    pub oldest_due_micros: i64,
}

/// Counts the queue.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn census(store: &Store) -> Result<Census, StoreError> {
    let row = sqlx::query_as!(
        Census,
        r#"SELECT count(*) FILTER (WHERE state = 'claimed') AS "claimed!",
                  count(*) FILTER (WHERE state = 'queued') AS "queued!",
                  count(*) FILTER (WHERE state = 'parked') AS "parked!",
                  (SELECT count(*) FROM continuations WHERE state = 'open') AS "open_continuations!",
                  coalesce((extract(epoch FROM now() - min(available_at) FILTER (WHERE state = 'queued' AND available_at <= now())) * 1000000)::bigint, 0) AS "oldest_due_micros!"
           FROM runs"#
    )
    .fetch_one(store.read())
    .await?;
    Ok(row)
}
