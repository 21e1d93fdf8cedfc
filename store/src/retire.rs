//! Ageing: closed sessions are archived and deleted, and what was deleted is removed, however much it is, in
//! statements of a bounded number of rows.

use uuid::Uuid;

use crate::{
    Store, delete,
    errors::StoreError,
    letters::{lock_own, lock_runs},
    retry::against_rivals,
    sql,
    transaction::{Transaction, Writes},
};
use holdfast_engine::ids::SessionId;

/// Sessions that one look for closed ones reads.
const WINDOW: i64 = 2_000;

/// Rows that one statement removes.
const ROWS: i64 = 5_000;

/// What retires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terms {
    /// Days for which a tree of sessions has rested.
    pub after_days: i32,
    /// Whether a document of each is kept.
    pub archive: bool,
}

/// What one look did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Swept {
    /// Sessions that were retired.
    pub sessions: u64,
    /// Whether it came to the last session; the next look begins with the first.
    pub whole: bool,
}

/// Looks at the sessions after `place`, in the order of their ids, and retires the trees among them that are
/// closed: nothing runs, no deferred call is open, no mail is unread, and nothing has changed for as long as
/// the terms say. Sessions that are paused stay. `place` moves along.
///
/// # Errors
/// [`StoreError::Unavailable`], also of a tree that takes the server too long; the next look begins behind
/// it. Any other tree that can't be retired is logged and passed over.
pub async fn retire(store: &Store, terms: Terms, place: &mut Uuid) -> Result<Swept, StoreError> {
    let rows = sqlx::query!(
        r#"SELECT id, (parent_id IS NULL AND deleted_at IS NULL AND status IN ('ready', 'idle', 'failed')
                       AND updated_at < now() - make_interval(days => $3)) AS "rests!"
           FROM sessions WHERE id > $1 ORDER BY id LIMIT $2"#,
        *place,
        WINDOW,
        terms.after_days
    )
    .fetch_all(store.read())
    .await?;
    let mut sessions = 0;
    for row in rows.iter().filter(|row| row.rests) {
        let id = SessionId(row.id);
        *place = row.id;
        match against_rivals(|| retire_once(store, terms, id)).await {
            Ok(tree) => {
                sessions += tree.len() as u64;
                tree.into_iter().for_each(|session| store.announce(session, false));
            }
            Err(StoreError::UnknownSession) => {}
            Err(error) if error.is_unavailable() => return Err(error),
            Err(error) => tracing::error!(%error, session_id = %id, "a session can't be retired"),
        }
    }
    let whole = i64::try_from(rows.len()).is_ok_and(|count| count < WINDOW);
    *place = rows.last().filter(|_| !whole).map_or_else(Uuid::nil, |row| row.id);
    Ok(Swept { sessions, whole })
}

async fn retire_once(store: &Store, terms: Terms, id: SessionId) -> Result<Vec<SessionId>, StoreError> {
    let tx = Transaction::begun(store.client().await?).await?;
    lock_own(&tx, id, None).await?;
    let tree = delete::lock_tree(&tx, id).await?;
    lock_runs(&tx, &tree).await?;
    let ids: Vec<Uuid> = tree.iter().map(|session| session.0).collect();
    let closed = tx.query_one(sql::TREE_IS_CLOSED, &[&ids, &terms.after_days]).await?;
    if closed.try_get::<_, Option<bool>>("closed")? != Some(true) {
        tx.rollback().await?;
        return Ok(Vec::new());
    }
    if terms.archive {
        for id in &ids {
            tx.execute(sql::ARCHIVE_SESSION, &[id]).await?;
        }
    }
    let mut writes = Writes::default();
    delete::mark(&tx, &mut writes, &ids).await?;
    tx.commit(writes).await?;
    Ok(tree)
}

/// Removes rows of sessions that were deleted more than `grace_seconds` ago: up to 5,000 of each kind, and
/// the sessions that have none left. Returns how many rows went, sessions included; until it is 0 there may
/// be more.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn purge_deleted(store: &Store, grace_seconds: f64, limit: i64) -> Result<u64, StoreError> {
    let doomed: Vec<Uuid> = sqlx::query_scalar!(
        "SELECT id FROM sessions WHERE deleted_at < now() - make_interval(secs => $1) ORDER BY deleted_at LIMIT $2",
        grace_seconds,
        limit
    )
    .fetch_all(store.read())
    .await?;
    if doomed.is_empty() {
        return Ok(0);
    }
    let turns = sqlx::query!(
        "DELETE FROM turns WHERE ctid = ANY(ARRAY(SELECT ctid FROM turns WHERE session_id = ANY($1) LIMIT $2))",
        &doomed,
        ROWS
    );
    let calls = sqlx::query!(
        "DELETE FROM tool_calls WHERE ctid = ANY(ARRAY(SELECT ctid FROM tool_calls WHERE session_id = ANY($1) LIMIT $2))",
        &doomed,
        ROWS
    );
    let mail = sqlx::query!(
        "DELETE FROM mail WHERE ctid = ANY(ARRAY(SELECT ctid FROM mail WHERE session_id = ANY($1) LIMIT $2))",
        &doomed,
        ROWS
    );
    let continuations = sqlx::query!(
        "DELETE FROM continuations WHERE token = ANY(ARRAY(SELECT token FROM continuations WHERE session_id = ANY($1) LIMIT $2))",
        &doomed,
        ROWS
    );
    let webhooks = sqlx::query!(
        "DELETE FROM webhook_deliveries WHERE (session_id, endpoint, seq) IN (
             SELECT session_id, endpoint, seq FROM webhook_deliveries WHERE session_id = ANY($1) LIMIT $2)",
        &doomed,
        ROWS
    );
    // Places of rows differ by partition; numbers within a session don't. What says that the session was
    // deleted stays for those who read on.
    let events = sqlx::query!(
        "DELETE FROM events e USING (
             SELECT session_id, seq FROM events WHERE session_id = ANY($1) AND kind <> 'session.deleted' LIMIT $2) old
         WHERE e.session_id = old.session_id AND e.seq = old.seq",
        &doomed,
        ROWS
    );
    let mut gone = 0;
    for statement in [turns, calls, mail, continuations, webhooks, events] {
        gone += statement.execute(store.read()).await?.rows_affected();
    }
    // Nothing is added to a deleted session. Another scheduler may have taken the very rows that these
    // statements chose, so a session goes only when none is left.
    let sessions = sqlx::query!(
        "DELETE FROM sessions s WHERE s.id = ANY($1)
           AND NOT EXISTS (SELECT 1 FROM turns WHERE session_id = s.id)
           AND NOT EXISTS (SELECT 1 FROM tool_calls WHERE session_id = s.id)
           AND NOT EXISTS (SELECT 1 FROM mail WHERE session_id = s.id)
           AND NOT EXISTS (SELECT 1 FROM continuations WHERE session_id = s.id)
           AND NOT EXISTS (SELECT 1 FROM events WHERE session_id = s.id AND kind <> 'session.deleted')",
        &doomed
    );
    gone += sessions.execute(store.read()).await?.rows_affected();
    Ok(gone)
}

/// Removes archives that are older than so many days. Returns how many.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn forget_archives(store: &Store, days: i32, limit: i64) -> Result<u64, StoreError> {
    let done = sqlx::query!(
        "DELETE FROM archives WHERE session_id = ANY(ARRAY(
             SELECT session_id FROM archives WHERE archived_at < now() - make_interval(days => $1)
             ORDER BY archived_at LIMIT $2))",
        days,
        limit
    )
    .execute(store.read())
    .await?;
    Ok(done.rows_affected())
}
