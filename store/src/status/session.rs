//! One session, explained: where it stands and what it waits for. Never what was said in it.

use chrono::{DateTime, Utc};
use holdfast_engine::ids::SessionId;
use uuid::Uuid;

use super::within;
use crate::{Store, errors::StoreError};

/// How many of its newest events are told of.
const EVENTS: i64 = 10;

/// A session's run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OneRun {
    /// `queued`, `claimed` or `parked`.
    pub state: String,
    /// How far it goes.
    pub mode: String,
    /// The agent's revision that it asks for.
    pub revision: String,
    /// When it is due; `None` if only news wakes it.
    pub available_at: Option<DateTime<Utc>>,
    /// Who holds it.
    pub worker: Option<Uuid>,
    /// Until when.
    pub lease_until: Option<DateTime<Utc>>,
    /// The lease's epoch.
    pub epoch: i64,
    /// How many workers died over it; at 5 it is ended.
    pub takeovers: i32,
    /// What it is parked on.
    pub parked_on: Option<String>,
    /// Since when there is the run.
    pub since: DateTime<Utc>,
}

/// A call of the session that isn't over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OneCall {
    /// Its id.
    pub id: Uuid,
    /// The tool.
    pub tool: String,
    /// `ready`, `running` or `deferred`.
    pub state: String,
    /// Whether it may run twice.
    pub idempotent: bool,
    /// How often it was started.
    pub attempt: i32,
    /// Since when it is in this state.
    pub since: DateTime<Utc>,
    /// Its deadline.
    pub expires_at: Option<DateTime<Utc>>,
    /// Why the agent's rule defers it.
    pub reason: Option<String>,
}

/// An event of the session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Happened {
    /// Its number.
    pub seq: i64,
    /// Its kind.
    pub kind: String,
    /// When.
    pub at: DateTime<Utc>,
}

/// A session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OneSession {
    /// Its owner.
    pub owner: String,
    /// Its agent.
    pub agent: String,
    /// The agent's current revision.
    pub current: Option<String>,
    /// Its status.
    pub status: String,
    /// Why. It may quote what a model provider answered.
    pub detail: Option<String>,
    /// `none`, `step` or `paused`.
    pub hold: String,
    /// Its version.
    pub version: i64,
    /// How many turns it has.
    pub turns: i64,
    /// How much mail hasn't been considered.
    pub unread: i64,
    /// The session it belongs to.
    pub parent: Option<Uuid>,
    /// When it was created.
    pub created_at: DateTime<Utc>,
    /// When it last changed.
    pub updated_at: DateTime<Utc>,
    /// When it was deleted.
    pub deleted_at: Option<DateTime<Utc>>,
    /// Its run.
    pub run: Option<OneRun>,
    /// Calls that aren't over, at most 50.
    pub calls: Vec<OneCall>,
    /// Its newest events, the newest first.
    pub events: Vec<Happened>,
    /// The database's time of this reading.
    pub now: DateTime<Utc>,
}

/// Looks at one session; `None` inside if there is none of this id.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn session(store: &Store, id: SessionId) -> Result<Option<Option<OneSession>>, StoreError> {
    within(store, async |tx| {
        let now = sqlx::query_scalar!(r#"SELECT now() AS "now!""#).fetch_one(&mut *tx).await?;
        let row = sqlx::query_file!("src/status/sql/session.sql", id.0).fetch_optional(&mut *tx).await?;
        let Some(row) = row else { return Ok(None) };
        let calls = sqlx::query_file_as!(OneCall, "src/status/sql/session_calls.sql", id.0)
            .fetch_all(&mut *tx)
            .await?;
        let events = sqlx::query_file_as!(Happened, "src/status/sql/session_events.sql", id.0, EVENTS)
            .fetch_all(&mut *tx)
            .await?;
        let run = match (row.run_state, row.mode, row.revision, row.run_since) {
            (Some(state), Some(mode), Some(revision), Some(since)) => Some(OneRun {
                state,
                mode,
                revision,
                available_at: row.available_at,
                worker: row.worker,
                lease_until: row.lease_until,
                epoch: row.epoch.unwrap_or(0),
                takeovers: row.takeovers.unwrap_or(0),
                parked_on: row.parked_on,
                since,
            }),
            _ => None,
        };
        Ok(Some(OneSession {
            owner: row.owner,
            agent: row.agent,
            current: row.current,
            status: row.status,
            detail: row.detail,
            hold: row.hold,
            version: row.version,
            turns: row.turns,
            unread: row.unread,
            parent: row.parent,
            created_at: row.created_at,
            updated_at: row.updated_at,
            deleted_at: row.deleted_at,
            run,
            calls,
            events,
            now,
        }))
    })
    .await
}
