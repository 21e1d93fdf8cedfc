//! What the scheduler does from time to time: each pass is bounded, idempotent and steps around what
//! others hold, so that any number of schedulers may run, and none for a while.

use chrono::{DateTime, Days, NaiveTime, Utc};

use crate::{Store, errors::StoreError};

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

/// How many days of partitions are made ahead.
const DAYS_AHEAD: u64 = 3;

/// Makes the partitions of events for today and the days ahead and, with `keep_days`, drops those whose last
/// day is longer ago. A day that the default partition already holds rows of stays there.
/// Returns the names of what it made and dropped.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn turn_event_partitions(
    store: &Store,
    now: DateTime<Utc>,
    keep_days: Option<u64>,
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
    let Some(oldest) = keep_days.and_then(|days| today.checked_sub_days(Days::new(days))) else {
        tx.commit().await?;
        return Ok(changed);
    };
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
    let until = oldest.and_time(NaiveTime::MIN).and_utc();
    tx.execute("DELETE FROM events_default WHERE at < $1", &[&until]).await?;
    tx.commit().await?;
    Ok(changed)
}
