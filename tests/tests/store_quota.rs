//! Owners' limits: what runs at once, what starts within a minute, what may wait.

use std::time::Duration;

use futures::future::join_all;
use holdfast_engine::decide::Mode;
use holdfast_store::{
    StoreError, accept,
    claim::{self, Lease, Rotation},
    create,
    idempotency::Done,
    letters::Receipt,
    quota::{self, Limits},
    settle::{self, Report},
};
use holdfast_tests::store::{OWNER, World, caller, caller_with_key, message, new_session, roster, worker};

const NONE: Limits = Limits { max_running: None, runs_per_minute: None, max_queued: None };

/// Puts `count` due runs of an owner into the queue.
async fn queue(world: &World, owner: &str, count: i32) {
    let sql = world.sql().await;
    sql.execute(
        "INSERT INTO runs (session_id, owner, agent, agent_revision, mode, state)
         SELECT gen_random_uuid(), $1, 'helper', 'r1', 'until_blocked', 'queued' FROM generate_series(1, $2)",
        &[&owner, &count],
    )
    .await
    .expect("queued");
}

async fn claim(world: &World, slots: usize) -> Vec<Lease> {
    let (ttl, rotation) = (Duration::from_secs(60), Rotation::default());
    claim::claim(&world.store, worker(), slots, ttl, &roster(&world.agent), false, &rotation)
        .await
        .expect("a claim")
}

async fn limit(world: &World, owner: &str, limits: Limits) {
    quota::set(&world.store, owner, limits).await.expect("set");
}

fn of(leases: &[Lease], owner: &str) -> usize {
    leases.iter().filter(|lease| lease.owner == owner).count()
}

#[tokio::test]
async fn no_more_runs_are_held_at_once_than_an_owner_may() {
    let world = World::new().await;
    queue(&world, "a", 10).await;
    queue(&world, "b", 3).await;
    limit(&world, "a", Limits { max_running: Some(2), ..NONE }).await;
    let first = claim(&world, 12).await;
    assert_eq!((of(&first, "a"), of(&first, "b")), (2, 3));
    assert!(first.iter().all(|lease| lease.throttled == (lease.owner == "a")), "{first:?}");
    assert!(claim(&world, 12).await.is_empty());
    let ended = first.iter().find(|lease| lease.owner == "a").expect("one of them");
    let sql = world.sql().await;
    sql.execute("DELETE FROM runs WHERE session_id = $1", &[&ended.session.0]).await.expect("ended");
    assert_eq!(of(&claim(&world, 12).await, "a"), 1);
    assert_eq!(
        quota::read(&world.store, "a").await.expect("read"),
        (Limits { max_running: Some(2), ..NONE }, quota::Usage { running: 2, queued: 7 })
    );
    limit(&world, "a", NONE).await;
    assert_eq!(of(&claim(&world, 12).await, "a"), 7);
}

#[tokio::test]
async fn sixty_four_rival_claims_together_keep_a_limit() {
    // A queue that a claim reads as a whole, and one that it reads by owners.
    for backlog in [claim::FEW - 40, claim::FEW * 2] {
        let world = World::new().await;
        queue(&world, "a", i32::try_from(backlog).expect("few")).await;
        queue(&world, "b", 20).await;
        limit(&world, "a", Limits { max_running: Some(5), ..NONE }).await;
        let claimed: Vec<Lease> = join_all((0..64).map(|_| claim(&world, 4))).await.concat();
        assert!(of(&claimed, "a") <= 5, "{}", of(&claimed, "a"));
        // Who met a rival's lock left the owner alone; the next claim takes what is left.
        let rest = claim(&world, 100).await;
        assert_eq!(of(&claimed, "a") + of(&rest, "a"), 5);
        assert_eq!(of(&claimed, "b") + of(&rest, "b"), 20);
    }
}

#[tokio::test]
async fn limits_hold_behind_a_long_backlog_too() {
    let world = World::new().await;
    queue(&world, "z", i32::try_from(claim::FEW + 1).expect("few")).await;
    queue(&world, "a", 10).await;
    queue(&world, "b", 10).await;
    limit(&world, "a", Limits { max_running: Some(2), ..NONE }).await;
    limit(&world, "b", Limits { runs_per_minute: Some(3), ..NONE }).await;
    let claimed = claim(&world, 30).await;
    assert_eq!((of(&claimed, "a"), of(&claimed, "b"), of(&claimed, "z")), (2, 3, 10));
    let claimed = claim(&world, 30).await;
    assert_eq!((of(&claimed, "a"), of(&claimed, "b"), of(&claimed, "z")), (0, 0, 30));
}

#[tokio::test]
async fn a_rate_is_a_bucket_that_fills_evenly() {
    let world = World::new().await;
    queue(&world, "a", 20).await;
    limit(&world, "a", Limits { runs_per_minute: Some(3), ..NONE }).await;
    assert_eq!(claim(&world, 8).await.len(), 3, "a minute's worth at once");
    assert!(claim(&world, 8).await.is_empty());
    let sql = world.sql().await;
    let back = |seconds: i32| {
        format!("UPDATE owner_limits SET filled_at = filled_at - interval '{seconds} seconds'")
    };
    sql.batch_execute(&back(21)).await.expect("later");
    assert_eq!(claim(&world, 8).await.len(), 1);
    sql.batch_execute(&back(3600)).await.expect("much later");
    assert_eq!(claim(&world, 8).await.len(), 3, "no more than a minute's worth is saved up");
    // A clock that went back takes nothing away and gives nothing.
    sql.batch_execute(&back(-3600)).await.expect("earlier");
    assert!(claim(&world, 8).await.is_empty());
    limit(&world, "a", Limits { runs_per_minute: Some(0), ..NONE }).await;
    assert!(claim(&world, 8).await.is_empty());
}

#[tokio::test]
async fn throttled_owners_hold_up_nobody() {
    let world = World::new().await;
    for n in 0..40 {
        let owner = format!("o{n:02}");
        queue(&world, &owner, 1).await;
        limit(&world, &owner, Limits { max_running: Some(0), ..NONE }).await;
    }
    queue(&world, "z", 1).await;
    assert_eq!(of(&claim(&world, 4).await, "z"), 1);
}

#[tokio::test]
async fn a_full_queue_refuses_new_runs_and_nothing_that_was_promised() {
    let world = &World::new().await;
    let (session, _, token) = world.waiting().await;
    limit(world, OWNER, Limits { max_queued: Some(2), ..NONE }).await;
    let first = message("one");
    accept::post(&world.store, &caller(), session, &first, Mode::UntilBlocked).await.expect("room");
    let two = new_session(Some(message("two")), Mode::UntilBlocked);
    create::create(&world.store, &caller_with_key("k", "create"), two.clone()).await.expect("room");
    let create = |run| async move {
        let new = new_session(Some(message("three")), run);
        create::create(&world.store, &caller(), new.clone()).await.map(|_| ())
    };
    let refused = |result: Result<(), StoreError>| {
        assert!(matches!(result, Err(StoreError::Backlog { limit: 2 })), "{result:?}");
    };
    refused(create(Mode::UntilBlocked).await);
    refused(accept::resume(&world.store, &caller(), session, Mode::Step).await.map(|_| ()));
    let more = message("more");
    refused(accept::post(&world.store, &caller(), session, &more, Mode::Step).await.map(|_| ()));
    // A repeat of what was carried out gets its answer, by its id or by its key.
    let again =
        accept::post(&world.store, &caller(), session, &first, Mode::UntilBlocked).await.expect("known");
    assert!(matches!(again, Done::Now(Receipt { duplicate: true, .. })), "{again:?}");
    let keyed = caller_with_key("k", "create");
    let again =
        create::create(&world.store, &keyed, new_session(Some(message("two")), Mode::UntilBlocked)).await;
    assert!(matches!(again, Ok(Done::Before { code: 201, .. })), "{again:?}");
    // What asks for no run, and what completes a call, is accepted.
    create(Mode::None).await.expect("no run is asked for");
    let done = Report::Error("nobody is there".to_owned());
    settle::complete(&world.store, &caller(), token, &done, true).await.expect("it was promised");
    limit(world, OWNER, NONE).await;
    create(Mode::UntilBlocked).await.expect("there is room again");
}
