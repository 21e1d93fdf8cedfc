//! From the feed to the deliveries of an endpoint.

use uuid::Uuid;

use crate::{Store, errors::StoreError};

/// Events that one step looks at.
pub const PAGE: i64 = 2_000;

/// Deliveries that wait for an endpoint at the most, and a page more: beyond it the place in the feed waits, and
/// the events themselves are what is kept.
pub const MOST_PENDING: i64 = 10_000;

/// What one step did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Queued {
    /// Events that were looked at; 0 if there are no new ones, somebody else is at it, or enough is waiting.
    pub read: i64,
    /// Those that are to be sent.
    pub queued: i64,
    /// Whether the place belonged to another numbering of transactions and begins anew, at now.
    pub renewed: bool,
}

/// Moves an endpoint's place in the feed by a page, and lays up the events of its kinds in the same transaction: each
/// once, however many schedulers do it. Like the feed it reads below the oldest transaction that may still write.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn queue(store: &Store, name: &str) -> Result<Queued, StoreError> {
    let mut tx = store.read().begin().await?;
    let place = sqlx::query!(
        r#"SELECT agent, kinds, feed, (xid::text)::bigint AS "xid!", session_id, seq FROM webhook_endpoints
           WHERE name = $1 AND disabled_at IS NULL AND withdrawn_at IS NULL FOR UPDATE SKIP LOCKED"#,
        name
    )
    .fetch_optional(&mut *tx)
    .await?;
    let Some(place) = place else {
        tx.rollback().await?;
        return Ok(Queued::default());
    };
    let now = sqlx::query!(
        r#"SELECT (SELECT feed FROM feeds ORDER BY created_at DESC LIMIT 1) AS "feed!",
                  (SELECT count(*) FROM (SELECT 1 FROM webhook_deliveries
                   WHERE endpoint = $1 AND state = 'pending' ORDER BY due_at LIMIT $2) p) AS "pending!""#,
        name,
        MOST_PENDING
    )
    .fetch_one(&mut *tx)
    .await?;
    if now.feed != place.feed {
        sqlx::query!(
            "UPDATE webhook_endpoints SET feed = $2, xid = pg_snapshot_xmin(pg_current_snapshot()), session_id = $3, seq = 0
             WHERE name = $1",
            name,
            now.feed,
            Uuid::nil()
        )
        .execute(&mut *tx)
        .await?;
        tx.commit().await?;
        return Ok(Queued { renewed: true, ..Queued::default() });
    }
    if now.pending >= MOST_PENDING {
        tx.rollback().await?;
        return Ok(Queued::default());
    }
    // A statement of its own behind the lock: its snapshot sees what the last holder of the lock did.
    let done = sqlx::query!(
        r#"WITH page AS MATERIALIZED (
               SELECT session_id, seq, owner, kind, body, at, xid FROM events
               WHERE (xid, session_id, seq) > ($2::bigint::text::xid8, $3, $4)
                 AND xid < pg_snapshot_xmin(pg_current_snapshot())
               ORDER BY events.xid, session_id, seq LIMIT $5
           ), queued AS (
               INSERT INTO webhook_deliveries (session_id, seq, endpoint, owner, agent, kind, body, at)
               SELECT p.session_id, p.seq, $1, p.owner, s.agent, p.kind, p.body, p.at
               FROM page p JOIN sessions s ON s.id = p.session_id
               WHERE p.kind = ANY($6) AND ($7::text IS NULL OR s.agent = $7) AND s.deleted_at IS NULL
               ON CONFLICT DO NOTHING RETURNING 1
           ), moved AS (
               UPDATE webhook_endpoints w SET xid = last.xid, session_id = last.session_id, seq = last.seq
               FROM (SELECT xid, session_id, seq FROM page
                     ORDER BY page.xid DESC, session_id DESC, seq DESC LIMIT 1) last
               WHERE w.name = $1 RETURNING 1
           )
           SELECT (SELECT count(*) FROM page) AS "read!", (SELECT count(*) FROM queued) AS "queued!""#,
        name,
        place.xid,
        place.session_id,
        place.seq,
        PAGE,
        &place.kinds,
        place.agent
    )
    .fetch_one(&mut *tx)
    .await?;
    tx.commit().await?;
    Ok(Queued { read: done.read, queued: done.queued, renewed: false })
}
