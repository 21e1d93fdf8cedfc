//! Leases: a worker's time-bound right to hold a run, fenced by an epoch that is never used twice.

use std::{
    collections::{HashMap, HashSet},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use holdfast_engine::{
    decide::Mode,
    ids::{SessionId, WorkerId},
};
use serde::{Deserialize, Serialize};
use tokio_postgres::Row;
use uuid::Uuid;

use crate::{
    Store,
    errors::StoreError,
    letters::mode,
    outage,
    plant::altered,
    retry::against_rivals,
    sql,
    transaction::{Parameters, Transaction, Writes, parameters},
};

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

/// Owners that get a share of one claim.
pub const OWNERS_A_CLAIM: i64 = 32;

/// Where a worker's turn around the owners stands: the next claim begins behind the owner that the last
/// one ended with.
#[derive(Debug, Default)]
pub struct Rotation(Mutex<Turn>);

#[derive(Debug, Default)]
struct Turn {
    owner: String,
    left: bool,
}

impl Rotation {
    /// Whether the last claim may have left due runs behind: it had no slot for them, or an owner had its
    /// share.
    pub fn left_some(&self) -> bool {
        self.lock().left
    }

    fn lock(&self) -> MutexGuard<'_, Turn> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self) -> String {
        self.lock().owner.clone()
    }

    fn set(&self, owner: &str) {
        owner.clone_into(&mut self.lock().owner);
    }
}

/// Claims up to `slots` runs whose agents this worker has: with `expired`, those of dead workers first,
/// then those that are due. `agents` names revisions as `slug@revision`; who has the current revision of an
/// agent also takes runs that ask for an older one.
///
/// Due runs are shared fairly: up to [`OWNERS_A_CLAIM`] owners in turn, from where `rotation` stands, get
/// an equal share of the slots, so that one owner's backlog keeps nobody else waiting for longer than a
/// slot's turn. An owner's own limits are kept (see [`crate::quota`]).
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
    expired: bool,
    rotation: &Rotation,
) -> Result<Vec<Lease>, StoreError> {
    let free = i64::try_from(slots).unwrap_or(i64::MAX);
    let ttl = ttl.as_secs_f64();
    let mut leases = Vec::new();
    if expired {
        let client = store.lease_client().await?;
        let statement = client.prepare_cached(altered(sql::CLAIM_EXPIRED)).await?;
        for row in client.query(&statement, &[&worker.0, &free, &ttl, &agents]).await? {
            leases.push(lease(&row, true)?);
        }
    }
    let free = free - i64::try_from(leases.len()).unwrap_or(i64::MAX);
    rotation.lock().left = true;
    if free > 0 {
        match claim_due(store, Order { worker, free, ttl, agents }, rotation).await {
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
/// # Errors
/// As [`claim`].
pub async fn claim_hinted(
    store: &Store,
    worker: WorkerId,
    slots: usize,
    ttl: Duration,
    agents: &[String],
    hinted: &[SessionId],
) -> Result<Vec<Lease>, StoreError> {
    let free = i64::try_from(slots).unwrap_or(i64::MAX);
    let sessions: Vec<Uuid> = hinted.iter().map(|session| session.0).collect();
    let client = store.lease_client().await?;
    let statement = client.prepare_cached(altered(sql::CLAIM_HINTED)).await?;
    let rows = client.query(&statement, &[&worker.0, &free, &ttl.as_secs_f64(), &agents, &sessions]).await?;
    rows.iter().map(|row| lease(row, false)).collect()
}

/// Pages of owners that one claim looks at before it finds a run that its worker can serve.
const PAGES_A_CLAIM: usize = 16;

/// What a claim wants.
#[derive(Clone, Copy)]
struct Order<'a> {
    worker: WorkerId,
    free: i64,
    ttl: f64,
    agents: &'a [String],
}

async fn claim_due(store: &Store, order: Order<'_>, rotation: &Rotation) -> Result<Vec<Lease>, StoreError> {
    let mut seen: HashSet<String> = HashSet::new();
    for _ in 0..PAGES_A_CLAIM {
        let client = store.lease_client().await?;
        let list = client.prepare_cached(sql::DUE_OWNERS).await?;
        let rows = client.query(&list, &[&rotation.get(), &OWNERS_A_CLAIM]).await?;
        let owners: Vec<&str> = rows.iter().map(|row| row.try_get("owner")).collect::<Result<_, _>>()?;
        let throttled: Vec<bool> =
            rows.iter().map(|row| row.try_get("throttled")).collect::<Result<_, _>>()?;
        let Some(last) = owners.last() else {
            rotation.lock().left = false;
            return Ok(Vec::new());
        };
        let share = (order.free + owners_count(&owners) - 1) / owners_count(&owners);
        let shares = vec![share; owners.len()];
        let leases = if throttled.contains(&true) {
            claim_throttled(client, order, &owners, &throttled, shares).await?
        } else {
            let claim = client.prepare_cached(altered(sql::CLAIM_QUEUED)).await?;
            let Order { worker, free, ttl, agents } = order;
            let rows = client.query(&claim, &[&worker.0, &free, &ttl, &agents, &owners, &shares]).await?;
            rows.iter().map(|row| lease(row, false)).collect::<Result<_, _>>()?
        };
        // The next turn begins behind the last owner that was served: those behind it have waited.
        let served = owners.iter().rposition(|owner| leases.iter().any(|lease| lease.owner == *owner));
        rotation.set(served.map_or(last, |place| owners[place]));
        // All the way around: whoever is due and could be served has been looked at.
        let around = owners.iter().any(|owner| !seen.insert((*owner).to_owned()));
        let whole = around || owners_count(&owners) < OWNERS_A_CLAIM;
        if !leases.is_empty() || whole {
            rotation.lock().left = !whole || has_shares(&leases, order.free, share);
            return Ok(leases);
        }
    }
    Ok(Vec::new())
}

/// What a throttled owner may still start.
struct Allowance {
    runs: i64,
    /// Starts that its rate allows, fractions included.
    bucket: Option<f64>,
}

/// Claims where some owners have limits: their rows are locked, so that no other claim takes runs of
/// theirs meanwhile. Owners that another claim has locked get nothing from this one.
async fn claim_throttled(
    client: deadpool_postgres::Client,
    order: Order<'_>,
    owners: &[&str],
    throttled: &[bool],
    mut shares: Vec<i64>,
) -> Result<Vec<Lease>, StoreError> {
    let tx = Transaction::over(client);
    tx.prepare(&[sql::LOCK_LIMITS, sql::COUNT_HELD]).await?;
    let limited: Vec<&str> =
        owners.iter().zip(throttled).filter(|(_, throttled)| **throttled).map(|(owner, _)| *owner).collect();
    let wanted: Parameters<'_> = &[&limited];
    let ((), limits, held) = futures::try_join!(
        tx.begin(),
        tx.query(sql::LOCK_LIMITS, wanted),
        tx.query(sql::COUNT_HELD, wanted)
    )?;
    let mut allowances = allowances(&limits, &held)?;
    for ((owner, throttled), share) in owners.iter().zip(throttled).zip(&mut shares) {
        if *throttled {
            *share = allowances.get(*owner).map_or(0, |allowance| (*share).min(allowance.runs));
        }
    }
    let Order { worker, free, ttl, agents } = order;
    let rows = tx.query(sql::CLAIM_QUEUED, &[&worker.0, &free, &ttl, &agents, &owners, &shares]).await?;
    let mut leases: Vec<Lease> = rows.iter().map(|row| lease(row, false)).collect::<Result<_, _>>()?;
    let mut spent: HashMap<String, f64> = HashMap::new();
    for lease in &mut leases {
        if let Some(allowance) = allowances.get_mut(&lease.owner) {
            lease.throttled = true;
            if let Some(bucket) = &mut allowance.bucket {
                *bucket = (*bucket - 1.0).max(0.0);
                spent.insert(lease.owner.clone(), *bucket);
            }
        }
    }
    let (filled, buckets): (Vec<String>, Vec<f64>) = spent.into_iter().unzip();
    let mut writes = Writes::default();
    if !filled.is_empty() {
        writes.push(sql::FILL_BUCKETS, parameters![filled, buckets]);
    }
    tx.commit(writes).await?;
    Ok(leases)
}

fn allowances(limits: &[Row], held: &[Row]) -> Result<HashMap<String, Allowance>, StoreError> {
    let held: HashMap<&str, i64> = held
        .iter()
        .map(|row| Ok((row.try_get("owner")?, row.try_get("held")?)))
        .collect::<Result<_, StoreError>>()?;
    let mut allowances = HashMap::new();
    for row in limits {
        let owner: &str = row.try_get("owner")?;
        let held = held.get(owner).copied().unwrap_or(0);
        let slots = row
            .try_get::<_, Option<i32>>("max_running")?
            .map_or(i64::MAX, |max| (i64::from(max) - held).max(0));
        let bucket: Option<f64> = row.try_get("bucket")?;
        let runs = bucket.map_or(slots, |bucket| slots.min(bucket.floor() as i64));
        allowances.insert(owner.to_owned(), Allowance { runs, bucket });
    }
    Ok(allowances)
}

/// Whether all slots are taken, or an owner's whole share.
fn has_shares(leases: &[Lease], free: i64, share: i64) -> bool {
    let mut counts: HashMap<&str, i64> = HashMap::new();
    for lease in leases {
        *counts.entry(lease.owner.as_str()).or_default() += 1;
    }
    counts.values().sum::<i64>() >= free || counts.values().any(|count| *count >= share)
}

fn owners_count(owners: &[&str]) -> i64 {
    i64::try_from(owners.len()).unwrap_or(i64::MAX)
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
