//! Claims are shared among owners: nobody waits behind somebody else's backlog.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use holdfast_engine::{decide::Mode, ids::SessionId};
use holdfast_store::{
    claim::{self, Lease, Rotation},
    passes,
};
use holdfast_tests::store::{World, roster, worker};
use tokio_postgres::Client;

/// Puts `count` due runs of an owner into the queue, older the lower their number.
async fn queue(sql: &Client, owner: &str, count: i32) {
    sql.execute(
        "INSERT INTO runs (session_id, owner, agent, agent_revision, mode, state, available_at)
         SELECT gen_random_uuid(), $1, 'helper', 'r1', 'until_blocked', 'queued', now() - make_interval(secs => $2 - n)
         FROM generate_series(1, $2) n",
        &[&owner, &count],
    )
    .await
    .expect("queued");
}

/// Claims what has become due since the last look.
async fn claim(world: &World, slots: usize, rotation: &Rotation) -> Vec<Lease> {
    look(world, slots, rotation, false).await
}

async fn look(world: &World, slots: usize, rotation: &Rotation, whole: bool) -> Vec<Lease> {
    let ttl = Duration::from_secs(60);
    claim::claim(&world.store, worker(), slots, ttl, &roster(&world.agent), whole, rotation)
        .await
        .expect("a claim")
}

fn by_owner(leases: &[Lease]) -> BTreeMap<&str, usize> {
    let mut counts = BTreeMap::new();
    for lease in leases {
        *counts.entry(lease.owner.as_str()).or_default() += 1;
    }
    counts
}

#[tokio::test]
async fn one_run_of_one_owner_starts_within_a_slots_turn_of_anothers_ten_thousand() {
    let world = World::new().await;
    let sql = world.sql().await;
    queue(&sql, "a", 10_000).await;
    let rotation = Rotation::default();
    assert_eq!(by_owner(&claim(&world, 8, &rotation).await), BTreeMap::from([("a", 8)]));
    queue(&sql, "b", 1).await;
    // One slot becomes free, then another: one of the two is b's.
    let next: Vec<Lease> = [claim(&world, 1, &rotation).await, claim(&world, 1, &rotation).await].concat();
    assert_eq!(by_owner(&next), BTreeMap::from([("a", 1), ("b", 1)]));
}

#[tokio::test]
async fn free_slots_are_shared_equally_and_none_stays_free() {
    let world = World::new().await;
    let sql = world.sql().await;
    for (owner, count) in [("a", 100), ("b", 100), ("c", 2), ("", 100)] {
        queue(&sql, owner, count).await;
    }
    let rotation = Rotation::default();
    let shared = claim(&world, 20, &rotation).await;
    assert_eq!(by_owner(&shared), BTreeMap::from([("", 5), ("a", 5), ("b", 5), ("c", 2)]));
    assert_eq!(claim(&world, 3, &rotation).await.len(), 3, "what one owner leaves goes to the others");
}

#[tokio::test]
async fn a_short_queue_is_shared_in_one_claim_the_oldest_of_each_first() {
    let world = World::new().await;
    let sql = world.sql().await;
    for (owner, count) in [("a", 50), ("b", 50), ("c", 2), ("", 50)] {
        queue(&sql, owner, count).await;
    }
    let rotation = Rotation::default();
    let shared = claim(&world, 20, &rotation).await;
    assert_eq!(by_owner(&shared), BTreeMap::from([("", 6), ("a", 6), ("b", 6), ("c", 2)]));
    let overtaken = "SELECT count(*) FROM runs mine JOIN runs other ON other.owner = mine.owner AND other.state = 'queued'
                     WHERE mine.state = 'claimed' AND other.available_at < mine.available_at";
    assert_eq!(world.count(overtaken).await, 0);
    assert!(rotation.left_some());
    assert_eq!(claim(&world, 200, &rotation).await.len(), 132);
    assert!(!rotation.left_some());
}

#[tokio::test]
async fn a_look_begins_where_the_last_one_ended_and_a_whole_look_at_the_beginning() {
    let world = World::new().await;
    let sql = world.sql().await;
    let rotation = Rotation::default();
    queue(&sql, "a", 3).await;
    assert_eq!(claim(&world, 1, &rotation).await.len(), 1, "the first look is a whole one");
    queue(&sql, "b", 1).await;
    assert_eq!(by_owner(&claim(&world, 4, &rotation).await), BTreeMap::from([("a", 2), ("b", 1)]));
    // Nothing is left, and what becomes due now is found, but nothing that pretends to have been due for long.
    assert!(claim(&world, 4, &rotation).await.is_empty());
    queue(&sql, "c", 10).await;
    let found = claim(&world, 20, &rotation).await;
    assert!(found.len() <= 2, "{}", found.len());
    assert_eq!(found.len() + look(&world, 20, &rotation, true).await.len(), 10);
}

#[tokio::test]
async fn whatever_wakes_late_is_due_from_then_on() {
    let world = World::new().await;
    let (timed, _, _) = world.waiting().await;
    let (written_to, _, _) = world.waiting().await;
    let sql = world.sql().await;
    for session in [timed, written_to] {
        sql.execute(
            "INSERT INTO runs (session_id, owner, agent, agent_revision, mode, state, available_at, parked_on)
             SELECT id, owner, agent, agent_revision, 'until_blocked', 'parked', now() - interval '1 hour', 'a timer'
             FROM sessions WHERE id = $1",
            &[&session.0],
        )
        .await
        .expect("parked");
    }
    let rotation = Rotation::default();
    assert!(look(&world, 4, &rotation, true).await.is_empty());
    world.post(written_to, "wake up", Mode::UntilBlocked).await;
    let woken = claim(&world, 4, &rotation).await;
    assert_eq!(woken.iter().map(|lease| lease.session).collect::<Vec<_>>(), [written_to]);
    assert_eq!(passes::promote_timers(&world.store, 10).await.expect("a pass"), 1);
    let woken = claim(&world, 4, &rotation).await;
    assert_eq!(woken.iter().map(|lease| lease.session).collect::<Vec<_>>(), [timed]);
}

#[tokio::test]
async fn more_owners_than_a_claim_serves_take_turns() {
    let world = World::new().await;
    let sql = world.sql().await;
    let owners = 3 * usize::try_from(claim::OWNERS_A_CLAIM).expect("small");
    for n in 0..owners {
        queue(&sql, &format!("o{n:03}"), 2).await;
    }
    let rotation = Rotation::default();
    let mut seen = BTreeMap::new();
    for _ in 0..3 {
        for lease in claim(&world, 32, &rotation).await {
            *seen.entry(lease.owner).or_insert(0) += 1;
        }
    }
    assert_eq!(seen.len(), owners, "each was served once: {seen:?}");
    assert!(seen.values().all(|count| *count == 1), "{seen:?}");
}

#[tokio::test]
async fn an_owner_that_this_worker_cannot_serve_holds_up_nobody() {
    let world = World::new().await;
    let sql = world.sql().await;
    for n in 0..40 {
        queue(&sql, &format!("o{n:03}"), 1).await;
    }
    sql.batch_execute("UPDATE runs SET agent = 'another'").await.expect("changed");
    queue(&sql, "z", 1).await;
    let rotation = Rotation::default();
    assert_eq!(by_owner(&claim(&world, 4, &rotation).await), BTreeMap::from([("z", 1)]));
}

#[tokio::test]
async fn single_slots_go_around_all_who_wait() {
    let world = World::new().await;
    let sql = world.sql().await;
    for owner in ["a", "b", "c"] {
        queue(&sql, owner, 50).await;
    }
    let rotation = Rotation::default();
    let mut served = Vec::new();
    for _ in 0..9 {
        served.extend(claim(&world, 1, &rotation).await.into_iter().map(|lease| lease.owner));
    }
    assert_eq!(served.join(""), "abcabcabc");
}

#[tokio::test]
async fn a_long_backlog_beside_an_old_snapshot_is_shared_too() {
    let world = World::new().await;
    let (sql, holder) = (world.sql().await, world.sql().await);
    holder.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1").await.expect("held");
    // So many that were due and have ended that looking owner by owner takes long.
    queue(&sql, "a", 100_000).await;
    sql.batch_execute("DELETE FROM runs; ANALYZE runs").await.expect("ended");
    queue(&sql, "a", 1_500).await;
    let rotation = Rotation::default();
    let mut claimed = look(&world, 64, &rotation, true).await;
    assert_eq!(by_owner(&claimed), BTreeMap::from([("a", 64)]));
    queue(&sql, "b", 3).await;
    for _ in 0..2 {
        claimed.extend(claim(&world, 4, &rotation).await);
    }
    assert_eq!(by_owner(&claimed)["b"], 3, "who comes anew needn't wait for the backlog");
    while rotation.left_some() {
        claimed.extend(claim(&world, 64, &rotation).await);
    }
    claimed.extend(look(&world, 64, &rotation, true).await);
    let sessions: BTreeSet<SessionId> = claimed.iter().map(|lease| lease.session).collect();
    assert_eq!((claimed.len(), sessions.len()), (1_503, 1_503));
    holder.batch_execute("COMMIT").await.expect("let go");
}
