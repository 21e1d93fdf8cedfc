//! What the scheduler does from time to time: each pass is bounded, idempotent and steps around what
//! others hold, so that any number of schedulers may run, and none for a while.

use chrono::{DateTime, Days, NaiveTime, Utc};

use crate::{Store, errors::StoreError, sql};

/// Wakes parked runs whose time has come. Returns how many.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn promote_timers(store: &Store, limit: i64) -> Result<u64, StoreError> {
    let done = sqlx::query!(
        "UPDATE runs SET state = 'queued', parked_on = NULL WHERE session_id IN (
             SELECT session_id FROM runs WHERE state = 'parked' AND available_at < 'infinity' AND available_at <= now()
             ORDER BY available_at LIMIT $1 FOR UPDATE SKIP LOCKED)",
        limit
    )
    .execute(store.read())
    .await?;
    Ok(done.rows_affected())
}

/// Removes the rows of sessions that were deleted more than `grace_seconds` ago. Returns how many
/// sessions it removed.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn purge_deleted(store: &Store, grace_seconds: f64, limit: i64) -> Result<u64, StoreError> {
    let doomed: Vec<uuid::Uuid> = sqlx::query_scalar!(
        "SELECT id FROM sessions WHERE deleted_at < now() - make_interval(secs => $1) ORDER BY deleted_at LIMIT $2
         FOR UPDATE SKIP LOCKED",
        grace_seconds,
        limit
    )
    .fetch_all(store.read())
    .await?;
    let removed = doomed.len() as u64;
    if doomed.is_empty() {
        return Ok(0);
    }
    sqlx::query!("DELETE FROM turns WHERE session_id = ANY($1)", &doomed).execute(store.read()).await?;
    sqlx::query!("DELETE FROM tool_calls WHERE session_id = ANY($1)", &doomed).execute(store.read()).await?;
    sqlx::query!("DELETE FROM mail WHERE session_id = ANY($1)", &doomed).execute(store.read()).await?;
    sqlx::query!("DELETE FROM continuations WHERE session_id = ANY($1)", &doomed)
        .execute(store.read())
        .await?;
    sqlx::query!("DELETE FROM events WHERE session_id = ANY($1) AND kind <> 'session.deleted'", &doomed)
        .execute(store.read())
        .await?;
    sqlx::query!("DELETE FROM sessions WHERE id = ANY($1)", &doomed).execute(store.read()).await?;
    Ok(removed)
}

/// Removes idempotency keys older than a day. Returns how many.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn forget_keys(store: &Store, limit: i64) -> Result<u64, StoreError> {
    let done = sqlx::query!(
        "DELETE FROM idempotency_keys WHERE (principal, key) IN (
             SELECT principal, key FROM idempotency_keys WHERE created_at < now() - interval '24 hours'
             ORDER BY created_at LIMIT $1 FOR UPDATE SKIP LOCKED)",
        limit
    )
    .execute(store.read())
    .await?;
    Ok(done.rows_affected())
}

/// Takes workers out of the register that haven't been heard of for ten minutes. Returns how many.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn forget_workers(store: &Store) -> Result<u64, StoreError> {
    let done = sqlx::query!("DELETE FROM workers WHERE seen_at < now() - interval '10 minutes'")
        .execute(store.read())
        .await?;
    Ok(done.rows_affected())
}

/// Expires overdue tokens; see [`crate::settle::expire_overdue`].
///
/// # Errors
/// As there.
pub async fn expire_tokens(store: &Store, limit: i64) -> Result<u64, StoreError> {
    crate::settle::expire_overdue(store, limit).await
}

/// How many days of partitions are made ahead.
const DAYS_AHEAD: u64 = 3;

/// Makes the partitions of events for today and the days ahead, and drops those whose last day is
/// more than `keep_days` ago. A day that the default partition already holds rows of stays there.
/// Returns the names of what it made and dropped.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn turn_event_partitions(
    store: &Store,
    now: DateTime<Utc>,
    keep_days: u64,
) -> Result<Vec<String>, StoreError> {
    let mut client = store.client().await?;
    let tx = client.transaction().await?;
    tx.execute("SELECT pg_advisory_xact_lock(7402)", &[]).await?;
    let mut changed = Vec::new();
    let today = now.date_naive();
    for ahead in 0..=DAYS_AHEAD {
        let Some(day) = today.checked_add_days(Days::new(ahead)) else { continue };
        let Some(next) = day.checked_add_days(Days::new(1)) else { continue };
        let name = format!("events_{}", day.format("%Y%m%d"));
        let there: bool = tx.query_one("SELECT to_regclass($1) IS NOT NULL", &[&name]).await?.try_get(0)?;
        let (from, to) = (day.and_time(NaiveTime::MIN).and_utc(), next.and_time(NaiveTime::MIN).and_utc());
        let taken: bool = tx
            .query_one(
                "SELECT EXISTS (SELECT 1 FROM events_default WHERE at >= $1 AND at < $2)",
                &[&from, &to],
            )
            .await?
            .try_get(0)?;
        if !there && !taken {
            // The name and the bounds are made of a date and nothing else.
            tx.batch_execute(&format!(
                "CREATE TABLE {name} PARTITION OF events FOR VALUES FROM ('{}') TO ('{}')",
                from.to_rfc3339(),
                to.to_rfc3339()
            ))
            .await?;
            changed.push(name);
        }
    }
    let oldest = today.checked_sub_days(Days::new(keep_days)).unwrap_or(today);
    let limit = format!("events_{}", oldest.format("%Y%m%d"));
    let old = tx
        .query(
            "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
             WHERE i.inhparent = 'events'::regclass AND c.relname ~ '^events_[0-9]{8}$' AND c.relname < $1",
            &[&limit],
        )
        .await?;
    for row in &old {
        let name: String = row.try_get(0)?;
        tx.batch_execute(&format!("DROP TABLE {name}")).await?;
        changed.push(name);
    }
    // What fell into the default partition ages there.
    if let Some(day) = today.checked_sub_days(Days::new(keep_days)) {
        let until = day.and_time(NaiveTime::MIN).and_utc();
        tx.execute("DELETE FROM events_default WHERE at < $1", &[&until]).await?;
    }
    tx.commit().await?;
    Ok(changed)
}

/// Every statement of the hot path with its name, for the test that prepares them.
pub fn hot_statements() -> &'static [(&'static str, &'static str)] {
    sql::ALL
}
