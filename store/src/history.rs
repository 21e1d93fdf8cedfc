//! Turns, mail and deferred calls as clients read them.

use chrono::{DateTime, Utc};
use holdfast_engine::{
    ids::{MailId, SessionId, Token},
    mail::{Envelope, Priority, Settled},
    turn::Turn,
    waits::Waits,
};
use tokio_postgres::Row;
use uuid::Uuid;

use crate::{
    Store,
    errors::StoreError,
    load::{stored_turn, turn},
    snapshot::aside_rows,
    sql,
    transaction::parameters,
};

/// Bytes of stored turns or letters that one page reads at most; what is larger than that alone, and the
/// turn after it, still come whole.
pub const PAGE_BYTES: i64 = 64 * 1024 * 1024;

/// Turns of a session, newest first: those below `below`, at most `limit`, and no more than the first two
/// that come to more than [`PAGE_BYTES`].
///
/// # Errors
/// [`StoreError::Corrupt`] if this build can't read one.
pub async fn newest_turns(
    store: &Store,
    id: SessionId,
    below: i64,
    limit: i64,
) -> Result<Vec<Turn>, StoreError> {
    let of_turns = parameters![id.0, below, limit, PAGE_BYTES, None::<String>];
    aside_rows(store, sql::VIEW_TURNS, of_turns).await?.iter().map(turn).collect()
}

/// Turns of a session, oldest first: those from position `from`, at most `limit`, and no more than the first
/// two that come to more than [`PAGE_BYTES`].
///
/// # Errors
/// [`StoreError::Corrupt`] if this build can't read one.
pub async fn turns_from(
    store: &Store,
    id: SessionId,
    from: i64,
    limit: i64,
) -> Result<Vec<Turn>, StoreError> {
    let rows = sqlx::query!(
        r#"SELECT position AS "position!", id AS "id!", tag AS "tag!", format AS "format!", body AS "body!",
                  at AS "at!"
           FROM (SELECT *, row_number() OVER so_far AS number, sum(octet_length(body)) OVER so_far AS bytes
                 FROM (SELECT * FROM turns WHERE session_id = $1 AND position >= $2
                       ORDER BY position LIMIT $3) AS asked
                 WINDOW so_far AS (ORDER BY position ROWS UNBOUNDED PRECEDING)) AS counted
           WHERE number <= 2 OR bytes <= $4 ORDER BY position"#,
        id.0,
        from,
        limit,
        PAGE_BYTES
    )
    .fetch_all(store.read())
    .await?;
    rows.iter()
        .map(|row| stored_turn(row.id, row.position, &row.tag, row.format, &row.body, row.at))
        .collect()
}

/// Mail of a session in order, at most `limit`, and no more than the first letter that comes to more than
/// [`PAGE_BYTES`]; only those above number `after`, and with `unread` those that the model hasn't been told yet.
///
/// # Errors
/// [`StoreError::Corrupt`] if this build can't read one.
pub async fn mail(
    store: &Store,
    id: SessionId,
    after: i64,
    unread: bool,
    limit: i64,
) -> Result<Vec<Envelope>, StoreError> {
    let rows = sqlx::query!(
        r#"SELECT id AS "id!", seq AS "seq!", sender AS "sender!", priority AS "priority!", hops AS "hops!",
                  body AS "body!", sent_at AS "sent_at!"
           FROM (SELECT *, row_number() OVER so_far AS number, sum(octet_length(body)) OVER so_far AS bytes
                 FROM (SELECT m.* FROM mail m JOIN sessions s ON s.id = m.session_id
                       WHERE m.session_id = $1 AND m.seq > $2
                         AND (NOT $3 OR m.seq > s.mail_cursor OR m.seq = ANY(s.mail_left))
                       ORDER BY m.seq LIMIT $4) AS asked
                 WINDOW so_far AS (ORDER BY seq ROWS UNBOUNDED PRECEDING)) AS counted
           WHERE number = 1 OR bytes <= $5 ORDER BY seq"#,
        id.0,
        after,
        unread,
        limit,
        PAGE_BYTES
    )
    .fetch_all(store.read())
    .await?;
    rows.into_iter()
        .map(|row| {
            Ok(Envelope {
                id: MailId(row.id),
                seq: row.seq,
                from: serde_json::from_str(&row.sender)?,
                priority: if row.priority == "high" { Priority::High } else { Priority::Normal },
                hops: u32::try_from(row.hops).unwrap_or_default(),
                sent_at: row.sent_at,
                body: serde_json::from_str(&row.body)?,
            })
        })
        .collect()
}

/// Number in the mailbox of a letter with this id.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn mail_number(store: &Store, id: SessionId, letter: MailId) -> Result<Option<i64>, StoreError> {
    let seq = sqlx::query_scalar!("SELECT seq FROM mail WHERE session_id = $1 AND id = $2", id.0, letter.0)
        .fetch_optional(store.read())
        .await?;
    Ok(seq)
}

/// A call that the model hasn't been told the end of: open, or ended after the newest user turn.
#[derive(Debug, Clone, PartialEq)]
pub struct UntoldCall {
    /// The engine's id of the call.
    pub id: Uuid,
    /// The provider's id of the call.
    pub provider_id: String,
    /// The tool.
    pub name: String,
    /// Its state.
    pub state: String,
    /// How it ended, where it has.
    pub settled: Option<Settled>,
    /// What it waits for, or waited for.
    pub waits: Option<Waits>,
}

/// The calls of a session that the model hasn't been told the end of, in the order in which they were
/// asked for.
///
/// # Errors
/// [`StoreError::Corrupt`] if this build can't read one.
pub async fn untold_calls(store: &Store, id: SessionId) -> Result<Vec<UntoldCall>, StoreError> {
    let of_session = parameters![id.0, None::<String>];
    aside_rows(store, sql::VIEW_CALLS, of_session).await?.iter().map(untold_call).collect()
}

pub(crate) fn untold_call(row: &Row) -> Result<UntoldCall, StoreError> {
    let json = |column: &str| row.try_get::<_, Option<&str>>(column);
    Ok(UntoldCall {
        id: row.try_get("id")?,
        provider_id: row.try_get("provider_id")?,
        name: row.try_get("name")?,
        state: row.try_get("state")?,
        settled: json("settled")?.map(serde_json::from_str).transpose()?,
        waits: json("waits")?.map(serde_json::from_str).transpose()?,
    })
}

/// A deferred call as external programs see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeferredCall {
    /// Its token.
    pub token: Uuid,
    /// Its session.
    pub session_id: Uuid,
    /// The session's agent.
    pub agent: String,
    /// The engine's id of the call.
    pub call_id: Uuid,
    /// The provider's id of the call.
    pub provider_id: String,
    /// The tool.
    pub tool: String,
    /// The arguments as the model wrote them.
    pub arguments: String,
    /// Why it was deferred.
    pub reason: String,
    /// `open`, `completed`, `failed`, `approved`, `cancelled` or `expired`.
    pub state: String,
    /// Whether it may be let run instead of being completed.
    pub approval: bool,
    /// When it was deferred.
    pub created_at: DateTime<Utc>,
    /// When it expires.
    pub expires_at: Option<DateTime<Utc>>,
}

/// The open deferred calls of a session, in the order in which they were asked for.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn pending(store: &Store, id: SessionId) -> Result<Vec<DeferredCall>, StoreError> {
    let of_session = parameters![id.0, None::<String>];
    aside_rows(store, sql::VIEW_PENDING, of_session).await?.iter().map(deferred_call).collect()
}

pub(crate) fn deferred_call(row: &Row) -> Result<DeferredCall, StoreError> {
    Ok(DeferredCall {
        token: row.try_get("token")?,
        session_id: row.try_get("session_id")?,
        agent: row.try_get("agent")?,
        call_id: row.try_get("call_id")?,
        provider_id: row.try_get("provider_id")?,
        tool: row.try_get("tool")?,
        arguments: row.try_get("arguments")?,
        reason: row.try_get("reason")?,
        state: row.try_get("state")?,
        approval: row.try_get("approval")?,
        created_at: row.try_get("created_at")?,
        expires_at: row.try_get("expires_at")?,
    })
}

/// The deferred calls of a session with these engine ids, in whatever state they are.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn deferred_calls(
    store: &Store,
    id: SessionId,
    calls: &[Uuid],
) -> Result<Vec<DeferredCall>, StoreError> {
    let rows = sqlx::query_as!(
        DeferredCall,
        "SELECT token, session_id, agent, call_id, provider_id, tool, arguments, reason, state, approval, created_at, expires_at
         FROM continuations WHERE session_id = $1 AND call_id = ANY($2) ORDER BY created_at, token",
        id.0,
        calls
    )
    .fetch_all(store.read())
    .await?;
    Ok(rows)
}

/// Open deferred calls across an owner's sessions, oldest first.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn pending_across(
    store: &Store,
    owner: &str,
    tool: Option<&str>,
    agent: Option<&str>,
    limit: i64,
) -> Result<Vec<DeferredCall>, StoreError> {
    let rows = sqlx::query_as!(
        DeferredCall,
        "SELECT c.token, c.session_id, c.agent, c.call_id, c.provider_id, c.tool, c.arguments, c.reason, c.state, c.approval, c.created_at, c.expires_at
         FROM continuations c JOIN sessions s ON s.id = c.session_id
         WHERE c.owner = $1 AND c.state = 'open' AND (c.expires_at IS NULL OR c.expires_at > now())
           AND ($2::text IS NULL OR c.tool = $2) AND ($3::text IS NULL OR c.agent = $3) AND s.deleted_at IS NULL
         ORDER BY c.created_at, c.token LIMIT $4",
        owner,
        tool,
        agent,
        limit
    )
    .fetch_all(store.read())
    .await?;
    Ok(rows)
}

/// A deferred call by its token.
///
/// # Errors
/// [`StoreError::UnknownToken`], also for another owner's and a deleted session's.
pub async fn by_token(store: &Store, owner: &str, token: Token) -> Result<DeferredCall, StoreError> {
    sqlx::query_as!(
        DeferredCall,
        r#"SELECT c.token, c.session_id, c.agent, c.call_id, c.provider_id, c.tool, c.arguments, c.reason,
                  CASE WHEN c.state = 'open' AND c.expires_at <= now() THEN 'expired' ELSE c.state END AS "state!",
                  c.approval, c.created_at, c.expires_at
           FROM continuations c JOIN sessions s ON s.id = c.session_id
           WHERE c.token = $1 AND c.owner = $2 AND s.deleted_at IS NULL"#,
        token.0,
        owner
    )
    .fetch_optional(store.read())
    .await?
    .ok_or(StoreError::UnknownToken)
}
