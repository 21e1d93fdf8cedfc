//! Leases and epochs: who is gone stores nothing, renews nothing, releases nothing.

use std::time::Duration;

use futures::future::join_all;
use holdfast_engine::{decide::Mode, session::Status};
use holdfast_store::commit::{Outcome, RunAfter};
use holdfast_tests::{
    gates::Stopper,
    step::{Holder, calls, claim, release, renew, says, send},
    store::{AGENT, LONG, World, agent, open, record, roster},
};

/// Everything of a session that a commit could change.
async fn stored(world: &World) -> String {
    let sql = world.sql().await;
    let question = "SELECT concat_ws('/', (SELECT string_agg(s::text, '|') FROM sessions s),
        (SELECT string_agg(t::text, '|' ORDER BY position) FROM turns t), (SELECT string_agg(c::text, '|') FROM tool_calls c),
        (SELECT string_agg(e.seq || e.kind || e.body, '|' ORDER BY seq) FROM events e),
        (SELECT string_agg(k::text, '|') FROM continuations k), (SELECT string_agg(m::text, '|') FROM mail m))";
    sql.query_one(question, &[]).await.expect("an answer").get(0)
}

#[tokio::test]
async fn an_old_holders_commit_after_a_takeover_stores_nothing() {
    let world = World::new().await;
    world.asked("hello").await;
    let mut old = Holder::claim(&world.store, &world.agent, Duration::ZERO).await;
    old.decide();
    old.answer(calls(&[("ask_anna", "{}"), ("run_x", "{}")]));
    old.decide();
    let work = old.work(RunAfter::Keep);

    // Its transaction has begun when another worker takes the run over.
    let (gate, stopper) = Stopper::at("commit.begun");
    let committing = tokio::spawn({
        let (store, work) = (world.gated(gate), work.clone());
        async move { send(&store, &work).await }
    });
    stopper.reached().await;
    let mut new = Holder::claim(&world.store, &world.agent, LONG).await;
    assert!(new.lease.taken_over && new.lease.epoch > old.lease.epoch);
    let before = stored(&world).await;
    stopper.release();
    assert_eq!(committing.await.expect("ended").expect("an outcome"), Outcome::LeaseLost);
    assert_eq!(stored(&world).await, before);

    // The successor isn't disturbed, and the old one fails the same way afterwards.
    assert_eq!(new.drive_with(vec![says("hi")]).await, Status::Idle);
    let after = stored(&world).await;
    assert_eq!(send(&world.store, &work).await.expect("an outcome"), Outcome::LeaseLost);
    assert_eq!(stored(&world).await, after);
}

#[tokio::test]
async fn a_takeover_steps_around_a_commit_that_holds_the_row() {
    let world = World::new().await;
    world.asked("hello").await;
    let mut old = Holder::claim(&world.store, &world.agent, Duration::ZERO).await;
    old.decide();
    old.answer(calls(&[("run_x", "{}")]));
    let work = old.work(RunAfter::Keep);
    let (gate, stopper) = Stopper::at("commit.written");
    let committing = tokio::spawn({
        let store = world.gated(gate);
        async move { send(&store, &work).await }
    });
    stopper.reached().await;
    // The lease has expired, but its row is locked: a claim doesn't wait for it.
    let none = claim(&world.store, &roster(&world.agent), 1, LONG).await;
    assert_eq!(none, []);
    stopper.release();
    let outcome = committing.await.expect("ended").expect("an outcome");
    assert!(matches!(outcome, Outcome::Stored { version: 2, .. }), "{outcome:?}");
    let new = Holder::claim(&world.store, &world.agent, LONG).await;
    assert_eq!((new.session.version, new.session.length()), (2, 2));
}

#[tokio::test]
async fn an_expired_lease_is_claimed_by_exactly_one_of_sixteen() {
    let world = World::new().await;
    let session = world.asked("hello").await;
    // Each worker has connections of its own, and they stand before the race begins.
    let workers = join_all((0..16).map(|_| open(world.database.url(), 1, None))).await;
    for worker in &workers {
        assert_eq!(claim(worker, &[], 1, LONG).await, []);
    }
    for round in 1..=5 {
        let agents = roster(&world.agent);
        let old = claim(&world.store, &agents, 1, Duration::ZERO).await;
        assert_eq!(old.len(), 1);
        let claims = join_all(workers.iter().map(|worker| claim(worker, &agents, 4, LONG))).await;
        let won: Vec<_> = claims.into_iter().flatten().collect();
        assert_eq!(won.len(), 1, "round {round}: {won:?}");
        assert_eq!(won[0].session, session);
        assert!(won[0].taken_over && won[0].epoch > old[0].epoch);
        assert_eq!(release(&world.store, &[(session, won[0].epoch)], Duration::ZERO).await, 1);
    }
}

#[tokio::test]
async fn takeovers_are_counted_and_releases_are_not() {
    let world = World::new().await;
    let session = world.asked("hello").await;
    for deaths in 0..3 {
        let lease = Holder::claim(&world.store, &world.agent, LONG).await.lease;
        assert_eq!(lease.takeovers, deaths, "handing a run on is no death");
        release(&world.store, &[(session, lease.epoch)], Duration::ZERO).await;
        let dead = Holder::claim(&world.store, &world.agent, Duration::ZERO).await.lease;
        assert!(!dead.taken_over);
        // Expiries within one TTL of the server's start don't count, so the heir's is short.
        let heir = Holder::claim(&world.store, &world.agent, Duration::from_millis(1)).await.lease;
        assert_eq!((heir.taken_over, heir.takeovers), (true, deaths + 1));
        release(&world.store, &[(session, heir.epoch)], Duration::ZERO).await;
    }
}

#[tokio::test]
async fn an_old_epoch_neither_renews_nor_releases_its_successors_lease() {
    let world = World::new().await;
    let session = world.asked("hello").await;
    let old = Holder::claim(&world.store, &world.agent, Duration::ZERO).await;
    let new = Holder::claim(&world.store, &world.agent, LONG).await;
    let lease = "SELECT (extract(epoch FROM lease_until) * 1000000)::bigint FROM runs";
    let until = world.count(lease).await;
    assert_eq!(renew(&world.store, &[old.held()], LONG * 2).await, []);
    assert_eq!(release(&world.store, &[old.held()], Duration::ZERO).await, 0);
    assert_eq!(world.count(lease).await, until, "an old epoch touches nothing");

    let held = [old.held(), new.held()];
    let beats = renew(&world.store, &held, LONG * 2).await;
    assert_eq!(beats.iter().map(|beat| (beat.session, beat.epoch)).collect::<Vec<_>>(), [new.held()]);
    assert!(world.count(lease).await > until);
    assert_eq!(release(&world.store, &held, Duration::ZERO).await, 1);
    // What is released is queued; the epoch that released it renews it no more.
    assert_eq!(renew(&world.store, &held, LONG).await, []);
    assert_eq!(world.hold().await.session.id, session);
}

#[tokio::test]
async fn a_released_run_waits_for_its_delay_unless_mail_comes() {
    let world = World::new().await;
    let session = world.asked("hello").await;
    let lease = world.hold().await;
    release(&world.store, &[lease.held()], LONG).await;
    let none = claim(&world.store, &roster(&world.agent), 1, LONG).await;
    assert_eq!(none, [], "the delay stands");
    let wake_seq = world.post(session, "are you there?", Mode::UntilBlocked).await.seq;
    assert_eq!(world.hold().await.lease.wake_seq, wake_seq);
}

#[tokio::test]
async fn epochs_are_never_used_again_after_run_rows_go() {
    let world = World::new().await;
    let session = world.asked("hello").await;
    let mut first = world.hold().await;
    let old = first.clone();
    first.drive_with(vec![says("hi")]).await;
    assert_eq!(world.runs(session).await, 0);
    world.post(session, "again", Mode::UntilBlocked).await;
    let mut second = world.hold().await;
    assert!(second.lease.epoch > old.lease.epoch);
    assert_eq!(second.lease.takeovers, 0);
    assert_eq!(renew(&world.store, &[old.held()], LONG).await, []);
    assert_eq!(release(&world.store, &[old.held()], LONG).await, 0);
    // Even with the right version the old epoch stores nothing.
    let mut stale = second.clone();
    stale.lease.epoch = old.lease.epoch;
    stale.decide();
    assert_eq!(stale.commit(RunAfter::Keep).await.expect("an outcome"), Outcome::LeaseLost);
    assert_eq!(second.drive_with(vec![says("again")]).await, Status::Idle);
}

#[tokio::test]
async fn claims_take_what_their_worker_can_serve_and_no_more() {
    let world = World::new().await;
    record(&world.store, "other", &agent("r1")).await.expect("recorded");
    let session = world.asked("hello").await;
    let look = |agents: &[&str]| {
        let (store, agents) =
            (world.store.clone(), agents.iter().map(|&name| name.to_owned()).collect::<Vec<_>>());
        async move {
            let leases = claim(&store, &agents, 9, LONG).await;
            for lease in &leases {
                release(&store, &[(lease.session, lease.epoch)], Duration::ZERO).await;
            }
            leases.into_iter().map(|lease| lease.session).collect::<Vec<_>>()
        }
    };
    assert_eq!(look(&[]).await, []);
    assert_eq!(look(&["other@r1"]).await, [], "another agent's worker");
    assert_eq!(look(&["helper@r0"]).await, [], "a revision that isn't asked for");
    assert_eq!(look(&["other@r1", "helper@r1"]).await, [session]);

    // A newer revision becomes current: its workers take runs that ask for the older one, and workers
    // of the older one go on taking them.
    record(&world.store, AGENT, &agent("r2")).await.expect("recorded");
    assert_eq!(look(&["helper@r2"]).await, [session]);
    assert_eq!(look(&["helper@r1"]).await, [session]);
    // A run that asks for the new one isn't for workers that only have the old one.
    let newer = world.asked("newer").await;
    assert_eq!(look(&["helper@r1"]).await, [session]);
    let mut both = look(&["helper@r2"]).await;
    both.sort();
    assert_eq!(both, [session, newer]);
    // The same holds for leases that have expired.
    let expired = claim(&world.store, &roster(&agent("r2")), 9, Duration::ZERO).await;
    assert_eq!(expired.len(), 2);
    assert_eq!(look(&["other@r1"]).await, []);
    assert_eq!(look(&["helper@r1"]).await, [session]);
}

#[tokio::test]
async fn a_claim_takes_no_more_than_its_free_slots() {
    let world = World::new().await;
    for number in 0..5 {
        world.asked(&number.to_string()).await;
    }
    let agents = roster(&world.agent);
    let take = async |slots: usize, ttl: Duration| claim(&world.store, &agents, slots, ttl).await.len();
    assert_eq!(take(0, LONG).await, 0);
    assert_eq!(take(2, Duration::ZERO).await, 2);
    // Two of dead workers and one that is due fill three slots.
    assert_eq!(take(3, LONG).await, 3);
    assert_eq!(take(9, LONG).await, 2);
    assert_eq!(take(9, LONG).await, 0);
}
