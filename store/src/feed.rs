//! Events as they are read: a session's stream by its dense numbers, the feed across sessions below
//! the oldest transaction that may still write.

use chrono::{DateTime, Utc};
use holdfast_engine::ids::SessionId;
use uuid::Uuid;

use crate::{Store, errors::StoreError};

/// An event as it is stored; what it refers to is rendered by whoever shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventRow {
    /// Whose event.
    pub session_id: Uuid,
    /// Its number in the session's stream.
    pub seq: i64,
    /// What kind it is.
    pub kind: String,
    /// References and small values, a JSON object.
    pub body: String,
    /// When it happened.
    pub at: DateTime<Utc>,
    /// The transaction that wrote it: its place in the feed.
    pub xid: i64,
}

/// The events of a session after number `after`, in order, at most `limit`.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn after(
    store: &Store,
    id: SessionId,
    after: i64,
    limit: i64,
) -> Result<Vec<EventRow>, StoreError> {
    let rows = sqlx::query_as!(
        EventRow,
        r#"SELECT session_id, seq, kind, body, at, (xid::text)::bigint AS "xid!"
           FROM events WHERE session_id = $1 AND seq > $2 ORDER BY seq LIMIT $3"#,
        id.0,
        after,
        limit
    )
    .fetch_all(store.read())
    .await?;
    Ok(rows)
}

/// A place in the feed across sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Which numbering of transactions it belongs to.
    pub feed: Uuid,
    /// The transaction.
    pub xid: i64,
    /// The session.
    pub session: Uuid,
    /// The event's number in the session.
    pub seq: i64,
}

/// The feed's identity and the place below which nothing can appear any more.
///
/// # Errors
/// [`StoreError::Corrupt`] before the first migration has named the feed.
pub async fn now(store: &Store) -> Result<Place, StoreError> {
    let row = sqlx::query!(
        r#"SELECT feed AS "feed!", (pg_snapshot_xmin(pg_current_snapshot())::text)::bigint AS "xmin!"
           FROM feeds ORDER BY created_at DESC LIMIT 1"#
    )
    .fetch_optional(store.read())
    .await?
    .ok_or_else(|| StoreError::Corrupt("the event feed has no identity: run migrate".to_owned()))?;
    Ok(Place { feed: row.feed, xid: row.xmin, session: Uuid::nil(), seq: 0 })
}

/// The events of all sessions, or of an owner's, after a place, at most `limit`.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn across(
    store: &Store,
    owner: Option<&str>,
    place: Place,
    limit: i64,
) -> Result<Vec<EventRow>, StoreError> {
    let rows = sqlx::query_as!(
        EventRow,
        r#"SELECT session_id, seq, kind, body, at, (xid::text)::bigint AS "xid!"
           FROM events
           WHERE (xid, session_id, seq) > ($2::bigint::text::xid8, $3, $4)
             AND xid < pg_snapshot_xmin(pg_current_snapshot())
             AND ($1::text IS NULL OR owner = $1)
           ORDER BY events.xid, session_id, seq LIMIT $5"#,
        owner,
        place.xid,
        place.session,
        place.seq,
        limit
    )
    .fetch_all(store.read())
    .await?;
    Ok(rows)
}

/// Whether the feed of all sessions, or of an owner's, still holds what came right after a place: its
/// event itself is there. Another owner's event is as good as none.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn reaches(store: &Store, owner: Option<&str>, place: Place) -> Result<bool, StoreError> {
    let row = sqlx::query!(
        r#"SELECT EXISTS (
               SELECT 1 FROM events
               WHERE session_id = $2 AND seq = $3 AND xid = $4::bigint::text::xid8
                 AND ($1::text IS NULL OR owner = $1)) AS "there!""#,
        owner,
        place.session,
        place.seq,
        place.xid
    )
    .fetch_one(store.read())
    .await?;
    Ok(row.there)
}

/// Names the feed after the cluster's numbering of transactions, anew if that isn't the one that the
/// feed was named for (a dump restored elsewhere, a logical upgrade).
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn renew(store: &Store) -> Result<(), StoreError> {
    let fresh = Uuid::now_v7();
    sqlx::query!(
        "INSERT INTO feeds (feed, system_identifier, timeline_xid, database)
         SELECT $1, c.system_identifier, pg_current_xact_id(), d.oid
         FROM pg_control_system() c, pg_database d
         WHERE d.datname = current_database() AND NOT EXISTS (
             SELECT 1 FROM feeds f WHERE f.system_identifier = c.system_identifier AND f.database = d.oid
               AND f.created_at = (SELECT max(created_at) FROM feeds))",
        fresh
    )
    .execute(store.read())
    .await?;
    Ok(())
}
