//! Deliveries that were given up: seen, sent again, discarded, and removed in the end.

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::deliver::id;
use crate::{Store, errors::StoreError};

/// Days for which dead letters stay.
pub const DEAD_DAYS: i32 = 30;

/// A delivery that was given up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeadLetter {
    /// Which endpoint.
    pub endpoint: String,
    /// Whose event.
    pub session_id: Uuid,
    /// Its number in the session's stream.
    pub seq: i64,
    /// What kind of event.
    pub kind: String,
    /// When it happened.
    pub at: DateTime<Utc>,
    /// How many attempts there were.
    pub attempts: i32,
    /// When it was given up.
    pub given_up: DateTime<Utc>,
    /// How the last attempt failed.
    pub cause: String,
}

impl DeadLetter {
    /// The event's name, as its receivers were told it.
    pub fn id(&self) -> String {
        id(self.session_id, self.seq)
    }
}

/// Which dead letters are meant.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Which {
    /// Those of one endpoint.
    pub endpoint: Option<String>,
    /// That of one event, by its session and number.
    pub event: Option<(Uuid, i64)>,
}

impl Which {
    fn session(&self) -> Option<Uuid> {
        self.event.map(|(session, _)| session)
    }

    fn seq(&self) -> Option<i64> {
        self.event.map(|(_, seq)| seq)
    }
}

/// Dead letters, at most `limit`.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn dead(store: &Store, limit: i64) -> Result<Vec<DeadLetter>, StoreError> {
    let rows = sqlx::query_as!(
        DeadLetter,
        r#"SELECT d.endpoint AS "endpoint!", d.session_id AS "session_id!", d.seq AS "seq!", d.kind AS "kind!", d.at AS "at!",
                  d.attempts AS "attempts!", d.due_at AS "given_up!", coalesce(d.last_error, '') AS "cause!"
           FROM webhook_endpoints w CROSS JOIN LATERAL (
               SELECT * FROM webhook_deliveries d WHERE d.endpoint = w.name AND d.state = 'dead'
               ORDER BY d.due_at DESC LIMIT $1) d
           WHERE w.withdrawn_at IS NULL ORDER BY d.due_at DESC LIMIT $1"#,
        limit
    )
    .fetch_all(store.read())
    .await?;
    Ok(rows)
}

/// Lays dead letters up again, at most `limit`, as if they were new. Returns how many.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn retry(store: &Store, which: &Which, limit: i64) -> Result<u64, StoreError> {
    let done = sqlx::query!(
        "UPDATE webhook_deliveries SET state = 'pending', attempts = 0, queued_at = now(), failing_since = NULL, due_at = now()
         WHERE (session_id, endpoint, seq) IN (
             SELECT session_id, endpoint, seq FROM webhook_deliveries
             WHERE state = 'dead' AND ($1::text IS NULL OR endpoint = $1) AND ($2::uuid IS NULL OR session_id = $2)
               AND ($3::bigint IS NULL OR seq = $3)
             LIMIT $4 FOR UPDATE SKIP LOCKED)",
        which.endpoint.as_deref(),
        which.session(),
        which.seq(),
        limit
    )
    .execute(store.read())
    .await?;
    Ok(done.rows_affected())
}

/// Removes dead letters, at most `limit`. Returns how many.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn discard(store: &Store, which: &Which, limit: i64) -> Result<u64, StoreError> {
    let done = sqlx::query!(
        "DELETE FROM webhook_deliveries WHERE (session_id, endpoint, seq) IN (
             SELECT session_id, endpoint, seq FROM webhook_deliveries
             WHERE state = 'dead' AND ($1::text IS NULL OR endpoint = $1) AND ($2::uuid IS NULL OR session_id = $2)
               AND ($3::bigint IS NULL OR seq = $3)
             LIMIT $4 FOR UPDATE SKIP LOCKED)",
        which.endpoint.as_deref(),
        which.session(),
        which.seq(),
        limit
    )
    .execute(store.read())
    .await?;
    Ok(done.rows_affected())
}

/// Enables endpoints that their receivers disabled: one, or all. Returns how many.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn enable(store: &Store, endpoint: Option<&str>) -> Result<u64, StoreError> {
    let done = sqlx::query!(
        "UPDATE webhook_endpoints SET disabled_at = NULL WHERE disabled_at IS NOT NULL AND ($1::text IS NULL OR name = $1)",
        endpoint
    )
    .execute(store.read())
    .await?;
    Ok(done.rows_affected())
}

/// Removes dead letters that are older than [`DEAD_DAYS`] and what withdrawn endpoints leave, up to `limit` rows of an
/// endpoint, and brings forward what a clock that was set back has left in the future. Returns how many rows it
/// touched; until it is 0 there may be more.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn forget(store: &Store, limit: i64) -> Result<u64, StoreError> {
    let old = sqlx::query!(
        "DELETE FROM webhook_deliveries d USING (
             SELECT r.session_id, r.endpoint, r.seq FROM webhook_endpoints w CROSS JOIN LATERAL (
                 SELECT session_id, endpoint, seq FROM webhook_deliveries
                 WHERE endpoint = w.name AND state = 'dead' AND due_at < now() - make_interval(days => $1)
                 ORDER BY due_at LIMIT $2) r) old
         WHERE d.session_id = old.session_id AND d.endpoint = old.endpoint AND d.seq = old.seq",
        DEAD_DAYS,
        limit
    );
    let withdrawn = sqlx::query!(
        "DELETE FROM webhook_deliveries d USING (
             SELECT r.session_id, r.endpoint, r.seq FROM webhook_endpoints w CROSS JOIN LATERAL (
                 SELECT session_id, endpoint, seq FROM webhook_deliveries WHERE endpoint = w.name LIMIT $1) r
             WHERE w.withdrawn_at IS NOT NULL) old
         WHERE d.session_id = old.session_id AND d.endpoint = old.endpoint AND d.seq = old.seq",
        limit
    );
    let ahead = sqlx::query!(
        "UPDATE webhook_deliveries d SET due_at = now() FROM (
             SELECT r.session_id, r.endpoint, r.seq FROM webhook_endpoints w CROSS JOIN LATERAL (
                 SELECT session_id, endpoint, seq FROM webhook_deliveries
                 WHERE endpoint = w.name AND state = 'pending' AND due_at > now() + interval '61 minutes'
                 ORDER BY due_at LIMIT $1) r) late
         WHERE d.session_id = late.session_id AND d.endpoint = late.endpoint AND d.seq = late.seq",
        limit
    );
    let mut touched = 0;
    for statement in [old, withdrawn, ahead] {
        touched += statement.execute(store.read()).await?.rows_affected();
    }
    let gone = sqlx::query!(
        "DELETE FROM webhook_endpoints w WHERE w.withdrawn_at IS NOT NULL
           AND NOT EXISTS (SELECT 1 FROM webhook_deliveries d WHERE d.endpoint = w.name)"
    );
    touched += gone.execute(store.read()).await?.rows_affected();
    Ok(touched)
}
