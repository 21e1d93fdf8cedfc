//! Claims are shared among owners: nobody waits behind somebody else's backlog.

use std::{collections::BTreeMap, time::Duration};

use holdfast_store::claim::{self, Lease, Rotation};
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

async fn claim(world: &World, slots: usize, rotation: &Rotation) -> Vec<Lease> {
    let ttl = Duration::from_secs(60);
    claim::claim(&world.store, worker(), slots, ttl, &roster(&world.agent), false, rotation)
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
