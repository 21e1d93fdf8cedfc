//! What a session's agent may read of other sessions: which there are, what was said in them, and how much it is.
//!
//! All of it is bounded: [`RESULTS_MAX`] sessions a listing, [`COUNTED`] where sessions are counted; a search
//! looks at the newest [`SEARCHED_TURNS`] turns of each of the newest [`SEARCHED_SESSIONS`] sessions, and at no more
//! than [`SEARCHED_BYTES`] of stored text; a reading gives [`READ_TURNS`] turns, [`READ_TEXT`] bytes of text, of which
//! a turn has [`TURN_TEXT`]. A statement takes two seconds at most.

use chrono::{DateTime, Utc};
use holdfast_engine::{
    ids::SessionId,
    scope::{IntrospectionScope, Relation},
};
use serde::Serialize;
use uuid::Uuid;

mod condense;
mod read;
mod search;

pub use read::{READ_TEXT, READ_TURNS, Reading, TURN_TEXT, read};
pub use search::{Found, Match, QUERY_LIMIT, SEARCHED_BYTES, SEARCHED_SESSIONS, SEARCHED_TURNS, search};

use crate::{
    Store,
    errors::StoreError,
    kin::{LEVELS, LOOKED_AT},
    status::within,
};

/// How many sessions a listing or a search gives unless it says otherwise.
pub const RESULTS: i64 = 50;

/// How many it may give.
pub const RESULTS_MAX: i64 = 500;

/// How far an owner's sessions are counted, relatives apart; of descendants, too, so many are looked at.
pub const COUNTED: i64 = LOOKED_AT;

/// Who reads, and how far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reader<'a> {
    /// The owner of the session and of all that it may read.
    pub owner: &'a str,
    /// The session that reads.
    pub session: SessionId,
    /// What its agent may read.
    pub scope: IntrospectionScope,
}

/// Why nothing was read.
#[derive(Debug, thiserror::Error)]
pub enum IntrospectError {
    /// There is no such session, or it is another owner's, or deleted.
    #[error("there is no such session")]
    UnknownSession,
    /// The session is out of reach.
    #[error("that session is outside the scope {scope}", scope = .0.word())]
    NotPermitted(IntrospectionScope),
    /// What is asked for makes no sense.
    #[error("{0}")]
    BadRequest(String),
    /// It takes the database more than two seconds.
    #[error("this takes too long; ask for less")]
    TooLong,
    /// What the database says.
    #[error(transparent)]
    Store(StoreError),
}

impl IntrospectError {
    /// A word for it that doesn't change.
    pub fn code(&self) -> &'static str {
        match self {
            Self::UnknownSession => "unknown_session",
            Self::NotPermitted(_) => "not_permitted",
            Self::BadRequest(_) => "bad_request",
            Self::TooLong => "too_long",
            Self::Store(error) if error.is_unavailable() => "unavailable",
            Self::Store(_) => "internal",
        }
    }
}

impl From<StoreError> for IntrospectError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::UnknownSession => Self::UnknownSession,
            error => Self::Store(error),
        }
    }
}

/// A session in a listing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Entry {
    /// The session.
    pub session_id: Uuid,
    /// The same: a session is one conversation.
    pub conversation_id: Uuid,
    /// Its agent's slug.
    pub agent: String,
    /// When it last changed.
    pub modification_time: DateTime<Utc>,
    /// How many turns it has.
    pub turn_count: i64,
    /// Whether it stands above the reader.
    pub is_parent: bool,
    /// Whether it stands below the reader.
    pub is_child: bool,
    /// Whether a worker holds its run.
    pub is_locked: bool,
    /// What it is doing.
    pub status: String,
}

/// The newest sessions that a reader may read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Listing {
    /// The sessions, newest first.
    pub sessions: Vec<Entry>,
    /// How many there are, counted to [`COUNTED`].
    pub total_accessible: i64,
}

/// How much a reader may read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Stats {
    /// How many sessions, counted to [`COUNTED`].
    pub total_sessions: i64,
    /// How many turns they have together.
    pub total_turns_across_all_sessions: i64,
    /// How far it may read.
    pub scope: IntrospectionScope,
    /// What there is to know of these numbers.
    pub note: String,
}

fn results(asked: Option<i64>) -> Result<i64, IntrospectError> {
    match asked.unwrap_or(RESULTS) {
        limit @ 1..=RESULTS_MAX => Ok(limit),
        _ => Err(IntrospectError::BadRequest(format!("1 to {RESULTS_MAX} results can be asked for"))),
    }
}

/// The sessions that a reader may read, newest first; `limit` of them, [`RESULTS`] unless given.
///
/// # Errors
/// [`IntrospectError`].
pub async fn list(
    store: &Store,
    reader: &Reader<'_>,
    limit: Option<i64>,
) -> Result<Listing, IntrospectError> {
    let (sessions, total_accessible) = within_reach(store, reader, results(limit)?).await?;
    Ok(Listing { sessions, total_accessible })
}

/// How many sessions a reader may read, and how many turns they have.
///
/// # Errors
/// [`IntrospectError`].
pub async fn stats(store: &Store, reader: &Reader<'_>) -> Result<Stats, IntrospectError> {
    let (sessions, total) = within_reach(store, reader, i64::MAX).await?;
    let note = match total < COUNTED {
        true => "Turns of users and of models together.".to_owned(),
        false => format!("There may be more: only {COUNTED} sessions are counted."),
    };
    Ok(Stats {
        total_sessions: total,
        total_turns_across_all_sessions: sessions.iter().map(|session| session.turn_count).sum(),
        scope: reader.scope,
        note,
    })
}

/// The sessions that a reader may read, newest first, and how many there are. Lineages and children are walked by
/// key; of all sessions of an owner the newest are taken, in the order of an index.
async fn within_reach(
    store: &Store,
    reader: &Reader<'_>,
    limit: i64,
) -> Result<(Vec<Entry>, i64), IntrospectError> {
    let scope = reader.scope;
    let (above, own) = (scope.allows(Relation::Ancestor), scope.allows(Relation::Own));
    let (below, all) = (scope.allows(Relation::Descendant), scope.allows(Relation::Peer));
    let rows = within(store, async |connection| {
        sqlx::query!(
            r#"WITH RECURSIVE above (id, parent_id, depth) AS (
                   SELECT s.id, s.parent_id, 0 FROM sessions s WHERE s.id = $1 AND s.owner = $2 AND s.deleted_at IS NULL
                   UNION ALL
                   SELECT s.id, s.parent_id, a.depth + 1 FROM above a JOIN sessions s ON s.id = a.parent_id
                   WHERE a.depth < $3
               ), below (id, depth) AS (
                   SELECT a.id, 0 FROM above a WHERE a.depth = 0
                   UNION ALL
                   SELECT s.id, b.depth + 1 FROM below b JOIN sessions s ON s.parent_id = b.id
                   WHERE s.deleted_at IS NULL AND b.depth < $3
               ), kin (id, parent, child) AS (
                   SELECT id, true, false FROM above WHERE depth > 0 AND $4
                   UNION ALL
                   SELECT id, false, false FROM above WHERE depth = 0 AND $5
                   UNION ALL
                   (SELECT id, false, true FROM below WHERE depth > 0 AND $6 LIMIT $8)
               ), near (id) AS (
                   SELECT id FROM kin
                   UNION
                   (SELECT s.id FROM sessions s
                    WHERE $7 AND s.owner = $2 AND s.deleted_at IS NULL AND EXISTS (SELECT 1 FROM above)
                    ORDER BY s.created_at DESC, s.id DESC LIMIT $8)
               )
               SELECT s.id AS "id!", s.agent AS "agent!", s.updated_at AS "updated_at!", s.turns AS "turns!",
                      s.status AS "status!", coalesce(k.parent, false) AS "parent!",
                      coalesce(k.child, false) AS "child!", coalesce(r.state = 'claimed', false) AS "locked!",
                      count(*) OVER () AS "total!"
               FROM near n JOIN sessions s ON s.id = n.id AND s.deleted_at IS NULL
               LEFT JOIN kin k ON k.id = n.id LEFT JOIN runs r ON r.session_id = n.id
               ORDER BY s.created_at DESC, s.id DESC LIMIT $9"#,
            reader.session.0,
            reader.owner,
            LEVELS,
            above,
            own,
            below,
            all,
            COUNTED,
            limit
        )
        .fetch_all(connection)
        .await
    })
    .await?
    .ok_or(IntrospectError::TooLong)?;
    let total = rows.first().map_or(0, |row| row.total);
    let entry = rows.into_iter().map(|row| Entry {
        session_id: row.id,
        conversation_id: row.id,
        agent: row.agent,
        modification_time: row.updated_at,
        turn_count: row.turns,
        is_parent: row.parent,
        is_child: row.child,
        is_locked: row.locked,
        status: row.status,
    });
    Ok((entry.collect(), total.min(COUNTED)))
}
