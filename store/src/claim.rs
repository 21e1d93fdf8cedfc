//! Leases: a worker's time-bound right to hold a run, fenced by an epoch that is never used twice.

mod along;
mod due;

use std::{collections::HashMap, time::Duration};

use holdfast_engine::{
    decide::Mode,
    ids::{SessionId, WorkerId},
};
use serde::{Deserialize, Serialize};
use tokio_postgres::Row;
use uuid::Uuid;

use self::due::Order;
pub use self::{
    along::Arriving,
    due::{FEW, OWNERS_A_CLAIM, Rotation},
};
use crate::{Store, errors::StoreError, letters::mode, outage, plant::altered, retry::against_rivals, sql};

/// A run that a worker holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// Whose run.
    pub session: SessionId,
    /// The session's owner.
    pub owner: String,
    /// The agent's slug.
    pub agent: String,
    /// The agent's revision that the run asks for.
    pub agent_revision: String,
    /// How far the run goes.
    pub mode: Mode,
    /// The fence: every write about the run names it.
    pub epoch: i64,
    /// The newest mail that woke the run.
    pub wake_seq: i64,
    /// How many workers died over the run so far.
    pub takeovers: i32,
    /// Whether this claim took the run from a worker whose lease had expired.
    pub taken_over: bool,
    /// Whether its owner's runs are throttled: the end of one lets the next begin.
    pub throttled: bool,
    /// Trace context of the request that started the run.
    pub traceparent: Option<String>,
}

/// What a heartbeat learned of a lease that still stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Beat {
    /// Whose run.
    pub session: SessionId,
    /// The lease's epoch.
    pub epoch: i64,
    /// The newest mail that woke the run.
    pub wake_seq: i64,
    /// How far the run goes by now.
    pub mode: Mode,
    /// Whether the lease was renewed. It may stand without: its row was locked for a moment.
    pub renewed: bool,
}

/// Claims up to `slots` runs whose agents this worker has: with `whole`, those of dead workers first, then those
/// that are due in all of the queue; without, those that became due since the last look. That finds whatever became due
/// in a transaction that took less than half a second, so that a whole look may be rare where it takes long. `agents` names
/// revisions as `slug@revision`; who has the current revision of an agent also takes runs that ask for an older one.
///
/// Due runs are shared fairly: owners in turn, from where `rotation` stands (up to [`OWNERS_A_CLAIM`] of them, if more
/// than [`FEW`] runs are due), get an equal share of the slots, so that one owner's backlog keeps nobody else waiting
/// for longer than a slot's turn. An owner's own limits are kept (see [`crate::quota`]).
///
/// # Errors
/// [`StoreError`] as the database has it; nothing is claimed then that the worker doesn't know of
/// longer than one TTL.
pub async fn claim(
    store: &Store,
    worker: WorkerId,
    slots: usize,
    ttl: Duration,
    agents: &[String],
    whole: bool,
    rotation: &Rotation,
) -> Result<Vec<Lease>, StoreError> {
    let free = i64::try_from(slots).unwrap_or(i64::MAX);
    let ttl = ttl.as_secs_f64();
    let mut leases = Vec::new();
    if whole {
        let client = store.lease_client().await?;
        let statement = client.prepare_cached(altered(sql::CLAIM_EXPIRED)).await?;
        for row in client.query(&statement, &[&worker.0, &free, &ttl, &agents]).await? {
            leases.push(lease(&row, true)?);
        }
    }
    let free = free - i64::try_from(leases.len()).unwrap_or(i64::MAX);
    rotation.leave(true);
    if free > 0 {
        match due::claim(store, Order { worker, free, ttl, agents }, rotation, whole).await {
            Ok(due) => leases.extend(due),
            // What was taken over already has to be known to its holder.
            Err(_) if !leases.is_empty() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(leases)
}

/// Claims those of `hinted` that are due, up to `slots`: for a worker that found nothing else due when it last
/// looked, so that nobody is overtaken. Runs of throttled owners are left to [`claim`].
///
/// With `along`, a few sessions are read in the same round trip; where another worker is faster, that is in vain.
///
/// # Errors
/// As [`claim`].
pub async fn claim_hinted(
    store: &Store,
    worker: WorkerId,
    slots: usize,
    ttl: Duration,
    agents: &[String],
    hinted: &[SessionId],
    along: bool,
) -> Result<Vec<(Lease, Option<Arriving>)>, StoreError> {
    let free = i64::try_from(slots).unwrap_or(i64::MAX);
    let order = Order { worker, free, ttl: ttl.as_secs_f64(), agents };
    if along && hinted.len() <= along::MAX_ALONG {
        return along::claim(store, order, hinted).await;
    }
    let leases = due::claim_named(&store.lease_client().await?, order, hinted).await?;
    Ok(leases.into_iter().map(|lease| (lease, None)).collect())
}

fn lease(row: &Row, taken_over: bool) -> Result<Lease, StoreError> {
    Ok(Lease {
        session: SessionId(row.try_get("session_id")?),
        owner: row.try_get("owner")?,
        agent: row.try_get("agent")?,
        agent_revision: row.try_get("agent_revision")?,
        mode: mode(row)?,
        epoch: row.try_get("epoch")?,
        wake_seq: row.try_get("wake_seq")?,
        takeovers: row.try_get("takeovers")?,
        taken_over,
        throttled: false,
        traceparent: row.try_get("traceparent")?,
    })
}

/// Renews leases by name, for `ttl` from the database's now. Those that are missing from the answer
/// are lost.
///
/// # Errors
/// [`StoreError`] as the database has it; the leases then end when they would have.
pub async fn heartbeat(
    store: &Store,
    held: &[(SessionId, i64)],
    ttl: Duration,
) -> Result<Vec<Beat>, StoreError> {
    if held.is_empty() {
        return Ok(Vec::new());
    }
    let (sessions, epochs) = columns(held);
    let client = store.lease_client().await?;
    let statement = client.prepare_cached(altered(sql::HEARTBEAT)).await?;
    let rows = client.query(&statement, &[&sessions, &epochs, &ttl.as_secs_f64()]).await?;
    outage::worked();
    let mut standing: HashMap<(SessionId, i64), Beat> = HashMap::with_capacity(held.len());
    for beat in beats(&rows)? {
        let known = standing.entry((beat.session, beat.epoch)).or_insert(beat);
        known.renewed |= beat.renewed;
        if beat.wake_seq >= known.wake_seq {
            (known.wake_seq, known.mode) = (beat.wake_seq, beat.mode);
        }
    }
    Ok(standing.into_values().collect())
}

/// Renews one lease, and waits for its row as [`heartbeat`] doesn't. Returns nothing if the lease is gone.
///
/// # Errors
/// [`StoreError`] as the database has it; nothing is known of the lease then.
pub async fn renew(store: &Store, held: (SessionId, i64), ttl: Duration) -> Result<Vec<Beat>, StoreError> {
    let (session, epoch) = held;
    // Heartbeats must not wait for it.
    let client = store.client().await?;
    let statement = client.prepare_cached(sql::RENEW).await?;
    beats(&client.query(&statement, &[&session.0, &epoch, &ttl.as_secs_f64()]).await?)
}

/// Whether a lease stands by the database's clock.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn stands(store: &Store, session: SessionId, epoch: i64) -> Result<bool, StoreError> {
    let stands = sqlx::query_scalar!(
        r#"SELECT EXISTS (SELECT 1 FROM runs WHERE session_id = $1 AND epoch = $2 AND state || '' = 'claimed'
                          AND lease_until > now()) AS "stands!""#,
        session.0,
        epoch
    )
    .fetch_one(store.read())
    .await?;
    Ok(stands)
}

/// What woke these runs, without renewing anything.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn look(store: &Store, sessions: &[SessionId]) -> Result<Vec<Beat>, StoreError> {
    let ids: Vec<Uuid> = sessions.iter().map(|session| session.0).collect();
    let client = store.lease_client().await?;
    let statement = client.prepare_cached(sql::LOOK).await?;
    beats(&client.query(&statement, &[&ids]).await?)
}

fn beats(rows: &[Row]) -> Result<Vec<Beat>, StoreError> {
    rows.iter()
        .map(|row| {
            Ok(Beat {
                session: SessionId(row.try_get("session_id")?),
                epoch: row.try_get("epoch")?,
                wake_seq: row.try_get("wake_seq")?,
                mode: mode(row)?,
                renewed: row.try_get("renewed")?,
            })
        })
        .collect()
}

/// Gives leases back, so that other workers may claim the runs after `delay`. After a `panic` that
/// counts as a death of the worker over the run.
///
/// # Errors
/// [`StoreError`] as the database has it; the leases then expire.
pub async fn release(
    store: &Store,
    held: &[(SessionId, i64)],
    delay: Duration,
    panic: bool,
) -> Result<u64, StoreError> {
    if held.is_empty() {
        return Ok(0);
    }
    let released = against_rivals(|| release_once(store, held, delay, panic)).await?;
    for (session, _) in held {
        store.announce(*session, true);
    }
    Ok(released)
}

async fn release_once(
    store: &Store,
    held: &[(SessionId, i64)],
    delay: Duration,
    panic: bool,
) -> Result<u64, StoreError> {
    let (sessions, epochs) = columns(held);
    // It may wait for rows; heartbeats must not wait for it.
    let client = store.client().await?;
    let statement = client.prepare_cached(sql::RELEASE).await?;
    let died = i32::from(panic);
    Ok(client.execute(&statement, &[&sessions, &epochs, &delay.as_secs_f64(), &died]).await?)
}

fn columns(held: &[(SessionId, i64)]) -> (Vec<Uuid>, Vec<i64>) {
    held.iter().map(|(session, epoch)| (session.0, *epoch)).unzip()
}
