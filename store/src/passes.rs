//! What the scheduler does from time to time: each pass is bounded, idempotent and steps around what
//! others hold, so that any number of schedulers may run, and none for a while.

use chrono::{DateTime, Days, NaiveTime, Utc};

use crate::{Store, errors::StoreError, outage};

/// Wakes parked runs whose time has come. From then on they are due: a look for what has become due lately has to
/// find them, however late this is. Returns how many.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn promote_timers(store: &Store, limit: i64) -> Result<u64, StoreError> {
    let done = sqlx::query!(
        "UPDATE runs SET state = 'queued', parked_on = NULL, available_at = now() WHERE session_id IN (
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

/// Removes results of calls that are no longer given again. Returns how many.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn forget_results(store: &Store, limit: i64) -> Result<u64, StoreError> {
    let done = sqlx::query!(
        "DELETE FROM tool_results WHERE (owner, key) IN (
             SELECT owner, key FROM tool_results WHERE expires_at < now()
             ORDER BY expires_at LIMIT $1 FOR UPDATE SKIP LOCKED)",
        limit
    )
    .execute(store.read())
    .await?;
    Ok(done.rows_affected())
}

/// Removes buckets of calls that have been full for an hour: they say as much as none. Returns how many.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn forget_rates(store: &Store, limit: i64) -> Result<u64, StoreError> {
    let done = sqlx::query!(
        "DELETE FROM tool_rates WHERE (owner, tool, per_minute, burst) IN (
             SELECT owner, tool, per_minute, burst FROM tool_rates WHERE next_at < now() - interval '1 hour'
             LIMIT $1 FOR UPDATE SKIP LOCKED)",
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

/// What the database's clock says.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn clock(store: &Store) -> Result<DateTime<Utc>, StoreError> {
    let now = sqlx::query_scalar!(r#"SELECT clock_timestamp() AS "now!""#).fetch_one(store.read()).await?;
    // What a scheduler asks each second tells it that an outage is over.
    outage::worked();
    Ok(now)
}

/// Moves times back that lie where no honest one can, as a clock that was set back by more than a minute leaves
/// them: leases of workers that were last heard of in the future, by as much as they are ahead; due times of
/// queued runs, which are never put off for so long; and the times at which owners' buckets were filled. Without,
/// runs would stand still for as long as the clock was set back.
///
/// A lease outlives the moment at which its worker was last heard of, until it is moved. Then it stands for what
/// was left of it and for five seconds, the age that a worker's entry may have: a holder that lives renews it
/// before. Returns how many were moved.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn mend_clock(store: &Store, limit: i64) -> Result<u64, StoreError> {
    let leases = sqlx::query!(
        "WITH ahead AS MATERIALIZED (
             SELECT id, seen_at, seen_at - now() AS by FROM workers WHERE seen_at > now() + interval '1 minute'
         ), late AS MATERIALIZED (
             SELECT r.session_id, greatest(r.lease_until - ahead.by, now()) + interval '5 seconds' AS until
             FROM ahead JOIN runs r ON r.worker = ahead.id
             WHERE r.state = 'claimed' AND r.lease_until > ahead.seen_at
             ORDER BY r.session_id LIMIT $1 FOR UPDATE OF r SKIP LOCKED
         )
         UPDATE runs r SET lease_until = late.until FROM late WHERE r.session_id = late.session_id",
        limit
    )
    .execute(store.read())
    .await?;
    let due = sqlx::query!(
        "UPDATE runs SET available_at = now() WHERE session_id IN (
             SELECT session_id FROM runs WHERE state = 'queued' AND available_at > now() + interval '1 minute'
             ORDER BY owner, priority DESC, available_at, session_id LIMIT $1 FOR UPDATE SKIP LOCKED)",
        limit
    )
    .execute(store.read())
    .await?;
    let buckets = sqlx::query!(
        "UPDATE owner_limits SET filled_at = now() WHERE owner IN (
             SELECT owner FROM owner_limits WHERE filled_at > now() + interval '1 minute'
             ORDER BY owner LIMIT $1 FOR UPDATE SKIP LOCKED)",
        limit
    )
    .execute(store.read())
    .await?;
    Ok(leases.rows_affected() + due.rows_affected() + buckets.rows_affected())
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
