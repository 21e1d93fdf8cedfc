//! Who is claimed next: due runs, shared fairly among owners, within an owner by priority and then by age.
//!
//! While few are due, a look reads all of them, from where the last look ended, and the order is made here. A longer
//! backlog is read owner by owner, no more of it than there are slots for; and where that takes long, since an old
//! snapshot keeps dead entries in the index, the oldest and the newest of it most of the time.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap, HashSet},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use chrono::{DateTime, Utc};
use holdfast_engine::ids::{SessionId, WorkerId};
use tokio::time::Instant;
use tokio_postgres::Row;
use uuid::Uuid;

use super::{Lease, lease};
use crate::{
    Store,
    errors::StoreError,
    plant::altered,
    sql,
    transaction::{Parameters, Transaction, Writes, parameters},
};

/// Owners that get a share of one claim while more is due than [`FEW`].
pub const OWNERS_A_CLAIM: i64 = 32;

/// Due runs that are few enough to be read at each look.
pub const FEW: usize = 256;

/// A look at the backlog owner by owner that takes longer than this is taken more rarely.
const LONG_LOOK: Duration = Duration::from_millis(10);

/// The part of a worker's time that such looks take.
const LONG_LOOK_SHARE: u32 = 20;

/// The longest pause between looks owner by owner.
const LONG_LOOK_PAUSE: Duration = Duration::from_secs(5);

/// Pages of owners that one claim looks at before it finds a run that its worker can serve.
const PAGES_A_CLAIM: usize = 16;

/// Where a worker's turn around the owners stands, and how far it has looked.
#[derive(Debug, Default)]
pub struct Rotation(Mutex<Turn>);

#[derive(Debug, Default)]
struct Turn {
    /// The owner that the last claim ended with: the next one begins behind it.
    owner: String,
    left: bool,
    /// What became due before this has been looked at, or will be by a look at all of the queue.
    since: Option<DateTime<Utc>>,
    /// Whether more was due at the last look than is read at one.
    crowded: bool,
    /// Until when the backlog isn't read owner by owner, because that took long.
    spared_until: Option<Instant>,
}

impl Rotation {
    /// Whether the last claim may have left due runs behind: it had no slot for them, or an owner had its
    /// share.
    pub fn left_some(&self) -> bool {
        self.lock().left
    }

    pub(super) fn leave(&self, some: bool) {
        self.lock().left = some;
    }

    fn lock(&self) -> MutexGuard<'_, Turn> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn owner(&self) -> String {
        self.lock().owner.clone()
    }

    fn end_with(&self, owner: &str) {
        owner.clone_into(&mut self.lock().owner);
    }
}

/// What a claim wants.
#[derive(Clone, Copy)]
pub(super) struct Order<'a> {
    pub(super) worker: WorkerId,
    pub(super) free: i64,
    pub(super) ttl: f64,
    pub(super) agents: &'a [String],
}

/// A due run.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Due {
    session: SessionId,
    owner: String,
    priority: i16,
    available_at: DateTime<Utc>,
    throttled: bool,
}

/// Claims due runs: with `whole`, looks at all of the queue, else at what has become due since the last look.
pub(super) async fn claim(
    store: &Store,
    order: Order<'_>,
    rotation: &Rotation,
    whole: bool,
) -> Result<Vec<Lease>, StoreError> {
    let (since, crowded, spared) = {
        let turn = rotation.lock();
        let spared = turn.spared_until.is_some_and(|until| Instant::now() < until);
        (turn.since.filter(|_| !whole), turn.crowded, spared)
    };
    // Where a backlog is long, looking at its beginning again and again would be in vain.
    if since.is_none() || !crowded || spared {
        let due = look(store, order, rotation, since, spared).await?;
        let crowded = rotation.lock().crowded;
        if !crowded || spared {
            let leases = claim_few(store, order, rotation, due).await?;
            if !crowded || !leases.is_empty() {
                if crowded {
                    rotation.leave(true);
                }
                return Ok(leases);
            }
        }
    }
    let began = Instant::now();
    let leases = claim_by_owners(store, order, rotation).await?;
    let took = began.elapsed();
    let mut turn = rotation.lock();
    turn.crowded &= turn.left;
    turn.spared_until = (took > LONG_LOOK).then(|| began + (took * LONG_LOOK_SHARE).min(LONG_LOOK_PAUSE));
    Ok(leases)
}

/// The runs that have become due since then and may be claimed: all of them if they are few, else the oldest and, with
/// `newest`, the newest as well, among which are those of owners that nothing of was due before.
async fn look(
    store: &Store,
    order: Order<'_>,
    rotation: &Rotation,
    since: Option<DateTime<Utc>>,
    newest: bool,
) -> Result<Vec<Due>, StoreError> {
    let client = store.lease_client().await?;
    let statement = client.prepare_cached(sql::DUE_SINCE).await?;
    let limit = i64::try_from(FEW + 1).unwrap_or(i64::MAX);
    let rows = client.query(&statement, &[&since, &limit, &order.agents, &newest]).await?;
    if let Some(row) = rows.first() {
        let mut turn = rotation.lock();
        turn.since = Some(row.try_get("since")?);
        turn.crowded = rows.len() > FEW;
    }
    let mut due = Vec::with_capacity(rows.len());
    for row in rows {
        if row.try_get::<_, Option<bool>>("claimable")?.unwrap_or(false) {
            due.push(Due {
                session: SessionId(row.try_get("session_id")?),
                owner: row.try_get("owner")?,
                priority: row.try_get("priority")?,
                available_at: row.try_get("available_at")?,
                throttled: row.try_get("throttled")?,
            });
        }
    }
    Ok(due)
}

async fn claim_few(
    store: &Store,
    order: Order<'_>,
    rotation: &Rotation,
    due: Vec<Due>,
) -> Result<Vec<Lease>, StoreError> {
    if due.is_empty() {
        rotation.leave(false);
        return Ok(Vec::new());
    }
    let due = in_turn(due, &rotation.owner());
    let client = store.lease_client().await?;
    let (leases, wanted) = if due.iter().any(|run| run.throttled) {
        let throttled: Vec<&str> =
            due.iter().filter(|run| run.throttled).map(|run| run.owner.as_str()).collect();
        let locked = Limits::lock(client, &throttled).await?;
        let named = locked.allow(&due);
        (locked.claim(order, Wanted::Named(&named)).await?, named.len())
    } else {
        let named: Vec<SessionId> = due.iter().map(|run| run.session).collect();
        (claim_named(&client, order, &named).await?, named.len())
    };
    // Of those that were claimed, the last in turn.
    let claimed: HashSet<SessionId> = leases.iter().map(|lease| lease.session).collect();
    if let Some(last) = due.iter().rfind(|run| claimed.contains(&run.session)) {
        rotation.end_with(&last.owner);
    }
    // Those that were tried and not had were somebody else's.
    let full = leases.len() >= usize::try_from(order.free).unwrap_or(usize::MAX);
    rotation.leave(full && wanted > leases.len());
    Ok(leases)
}

/// Claims as many of these runs as there are slots for, in this order; nobody's who is throttled.
pub(super) async fn claim_named(
    client: &deadpool_postgres::Client,
    order: Order<'_>,
    named: &[SessionId],
) -> Result<Vec<Lease>, StoreError> {
    let named: Vec<Uuid> = named.iter().map(|session| session.0).collect();
    let statement = client.prepare_cached(altered(sql::CLAIM_NAMED)).await?;
    let Order { worker, free, ttl, agents } = order;
    let rows = client.query(&statement, &[&worker.0, &free, &ttl, &agents, &named, &false]).await?;
    rows.iter().map(|row| lease(row, false)).collect()
}

/// Due runs in the order in which slots are given: one to each owner in turn, beginning behind `after`, and then one
/// to each again, as far as each has any. An owner's own go by priority, then by age.
fn in_turn(mut due: Vec<Due>, after: &str) -> Vec<Due> {
    due.sort_by(|a, b| {
        let key = |run: &Due| (Reverse(run.priority), run.available_at, run.session);
        key(a).cmp(&key(b))
    });
    let mut rounds: BTreeMap<String, usize> = BTreeMap::new();
    let mut placed: Vec<(usize, bool, Due)> = due
        .into_iter()
        .map(|run| {
            let round = rounds.entry(run.owner.clone()).or_default();
            *round += 1;
            (*round, run.owner.as_str() <= after, run)
        })
        .collect();
    placed.sort_by(|a, b| (a.0, a.1, &a.2.owner).cmp(&(b.0, b.1, &b.2.owner)));
    placed.into_iter().map(|(_, _, run)| run).collect()
}

async fn claim_by_owners(
    store: &Store,
    order: Order<'_>,
    rotation: &Rotation,
) -> Result<Vec<Lease>, StoreError> {
    let mut seen: HashSet<String> = HashSet::new();
    for _ in 0..PAGES_A_CLAIM {
        let client = store.lease_client().await?;
        let list = client.prepare_cached(sql::DUE_OWNERS).await?;
        let rows = client.query(&list, &[&rotation.owner(), &OWNERS_A_CLAIM]).await?;
        let owners: Vec<&str> = rows.iter().map(|row| row.try_get("owner")).collect::<Result<_, _>>()?;
        let throttled: Vec<bool> =
            rows.iter().map(|row| row.try_get("throttled")).collect::<Result<_, _>>()?;
        let Some(last) = owners.last() else {
            rotation.leave(false);
            return Ok(Vec::new());
        };
        let share = (order.free + owners_count(&owners) - 1) / owners_count(&owners);
        let mut shares = vec![share; owners.len()];
        let leases = if throttled.contains(&true) {
            let limited: Vec<&str> = owners
                .iter()
                .zip(&throttled)
                .filter(|(_, throttled)| **throttled)
                .map(|(owner, _)| *owner)
                .collect();
            let locked = Limits::lock(client, &limited).await?;
            for ((owner, throttled), share) in owners.iter().zip(&throttled).zip(&mut shares) {
                if *throttled {
                    *share = (*share).min(locked.runs(owner));
                }
            }
            locked.claim(order, Wanted::Shares(&owners, &shares)).await?
        } else {
            let claim = client.prepare_cached(altered(sql::CLAIM_QUEUED)).await?;
            let Order { worker, free, ttl, agents } = order;
            let rows = client.query(&claim, &[&worker.0, &free, &ttl, &agents, &owners, &shares]).await?;
            rows.iter().map(|row| lease(row, false)).collect::<Result<_, _>>()?
        };
        // The next turn begins behind the last owner that was served: those behind it have waited.
        let served = owners.iter().rposition(|owner| leases.iter().any(|lease| lease.owner == *owner));
        rotation.end_with(served.map_or(last, |place| owners[place]));
        // All the way around: whoever is due and could be served has been looked at.
        let around = owners.iter().any(|owner| !seen.insert((*owner).to_owned()));
        let whole = around || owners_count(&owners) < OWNERS_A_CLAIM;
        if !leases.is_empty() || whole {
            rotation.leave(!whole || has_shares(&leases, order.free, share));
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

/// Which runs a claim is for.
enum Wanted<'a> {
    /// These.
    Named(&'a [Uuid]),
    /// The first of these owners, as many of each.
    Shares(&'a [&'a str], &'a [i64]),
}

/// Throttled owners whose limits are locked, so that no other claim takes runs of theirs meanwhile. Owners that
/// another claim has locked get nothing from this one.
struct Limits {
    tx: Transaction,
    allowances: HashMap<String, Allowance>,
}

impl Limits {
    async fn lock(client: deadpool_postgres::Client, owners: &[&str]) -> Result<Self, StoreError> {
        let tx = Transaction::over(client);
        tx.prepare(&[sql::LOCK_LIMITS, sql::COUNT_HELD]).await?;
        let owners: Vec<&str> = owners.iter().copied().collect::<HashSet<_>>().into_iter().collect();
        let wanted: Parameters<'_> = &[&owners];
        let ((), limits, held) = futures::try_join!(
            tx.begin(),
            tx.query(sql::LOCK_LIMITS, wanted),
            tx.query(sql::COUNT_HELD, wanted)
        )?;
        Ok(Self { tx, allowances: allowances(&limits, &held)? })
    }

    fn runs(&self, owner: &str) -> i64 {
        self.allowances.get(owner).map_or(0, |allowance| allowance.runs)
    }

    /// Those of them that their owners may start, in their order.
    fn allow(&self, due: &[Due]) -> Vec<Uuid> {
        let mut left: HashMap<&str, i64> = HashMap::new();
        let allowed = due.iter().filter(|run| {
            if !run.throttled {
                return true;
            }
            let left = left.entry(&run.owner).or_insert_with(|| self.runs(&run.owner));
            *left -= 1;
            *left >= 0
        });
        allowed.map(|run| run.session.0).collect()
    }

    async fn claim(mut self, order: Order<'_>, wanted: Wanted<'_>) -> Result<Vec<Lease>, StoreError> {
        let Order { worker, free, ttl, agents } = order;
        let rows = match wanted {
            Wanted::Named(named) => {
                let parameters: Parameters<'_> = &[&worker.0, &free, &ttl, &agents, &named, &true];
                self.tx.query(sql::CLAIM_NAMED, parameters).await?
            }
            Wanted::Shares(owners, shares) => {
                let parameters: Parameters<'_> = &[&worker.0, &free, &ttl, &agents, &owners, &shares];
                self.tx.query(sql::CLAIM_QUEUED, parameters).await?
            }
        };
        let mut leases: Vec<Lease> = rows.iter().map(|row| lease(row, false)).collect::<Result<_, _>>()?;
        let mut spent: HashMap<String, f64> = HashMap::new();
        for lease in &mut leases {
            if let Some(allowance) = self.allowances.get_mut(&lease.owner) {
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
        self.tx.commit(writes).await?;
        Ok(leases)
    }
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

#[cfg(test)]
mod tests {
    use chrono::TimeDelta;

    use super::*;

    fn due(owner: &str, priority: i16, age: i64) -> Due {
        Due {
            session: SessionId(Uuid::from_u128(u128::try_from(1_000 - age).expect("young"))),
            owner: owner.to_owned(),
            priority,
            available_at: DateTime::UNIX_EPOCH - TimeDelta::seconds(age),
            throttled: false,
        }
    }

    fn order(due: Vec<Due>, after: &str) -> String {
        let word =
            |run: &Due| format!("{}{}", run.owner, (DateTime::UNIX_EPOCH - run.available_at).num_seconds());
        in_turn(due, after).iter().map(word).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn owners_take_turns_and_their_own_go_by_priority_and_age() {
        let queue = vec![
            due("a", 0, 9),
            due("a", 0, 8),
            due("a", 5, 1),
            due("b", 0, 2),
            due("c", -1, 7),
            due("c", 0, 3),
        ];
        assert_eq!(order(queue.clone(), ""), "a1 b2 c3 a9 c7 a8");
        assert_eq!(order(queue.clone(), "a"), "b2 c3 a1 c7 a9 a8");
        assert_eq!(order(queue.clone(), "bb"), "c3 a1 b2 c7 a9 a8");
        assert_eq!(order(queue, "z"), "a1 b2 c3 a9 c7 a8");
    }
}
