//! Letters between sessions: a child that ends while its parent parks, and commits that want each
//! other's rows.

use std::time::Duration;

use holdfast_engine::{
    decide::{Mode, Next},
    ids::{CallId, SessionId},
    session::Status,
};
use holdfast_store::{
    claim,
    commit::{Outcome, RunAfter},
    create,
};
use holdfast_tests::{
    gates::{PATIENCE, Stopper, until_queued},
    step::{Holder, calls, letter_from, renew, says, send},
    store::{LONG, World, caller, message, new_session},
};

/// A parent whose call is open, about to park, and its child with the last word decided.
async fn family(world: &World) -> (Holder, Holder, CallId) {
    let id = world.asked("delegate").await;
    let mut parent = world.hold().await;
    parent.decide();
    parent.answer(calls(&[("ask_child", "{}")]));
    assert_eq!(parent.decide(), Next::Stop(Status::WaitingExternal));
    parent.commit(RunAfter::Keep).await.expect("stored");
    let call = parent.session.calls[0].id;
    world.child(id, call, "the work").await;
    let mut child = world.hold().await;
    child.decide();
    child.answer(says("the result"));
    assert_eq!(child.decide(), Next::Stop(Status::Idle));
    (parent, child, call)
}

fn park() -> RunAfter {
    RunAfter::Park { on: "its child".to_owned(), until: None }
}

fn end() -> RunAfter {
    RunAfter::End { status: Status::Idle, detail: None }
}

#[tokio::test]
async fn a_childs_end_before_its_parents_park_keeps_the_parent_going() {
    let world = World::new().await;
    let (mut parent, mut child, call) = family(&world).await;
    let (parking, ending) = (parent.work(park()), child.work(end()));
    let (gate, stopper) = Stopper::at("commit.written");
    let child_store = world.gated(gate);
    let ended = tokio::spawn(async move { send(&child_store, &ending).await });
    stopper.reached().await;
    let parked = tokio::spawn({
        let store = world.store.clone();
        async move { send(&store, &parking).await }
    });
    until_queued(&world.sql().await, 1).await;
    stopper.release();
    let ended = ended.await.expect("ended").expect("an outcome");
    assert!(matches!(ended, Outcome::Stored { released: true, .. }), "{ended:?}");
    let outcome = parked.await.expect("ended").expect("an outcome");
    assert!(matches!(outcome, Outcome::Stored { released: false, .. }), "{outcome:?}");
    parent.learn(outcome).await;
    parent.decide();
    assert_eq!(parent.session.call(call).map(|call| call.state.word()), Some("completed"));
    assert_eq!(parent.drive_with(vec![says("thanks")]).await, Status::Idle);
}

#[tokio::test]
async fn a_childs_end_behind_its_parents_park_wakes_the_parent() {
    let world = World::new().await;
    let (mut parent, mut child, call) = family(&world).await;
    let (parking, ending) = (parent.work(park()), child.work(end()));
    let (gate, stopper) = Stopper::at("commit.written");
    let parent_store = world.gated(gate);
    let parked = tokio::spawn(async move { send(&parent_store, &parking).await });
    stopper.reached().await;
    let ended = tokio::spawn({
        let store = world.store.clone();
        async move { send(&store, &ending).await }
    });
    until_queued(&world.sql().await, 1).await;
    stopper.release();
    let outcome = parked.await.expect("ended").expect("an outcome");
    assert!(matches!(outcome, Outcome::Stored { released: true, .. }), "{outcome:?}");
    ended.await.expect("ended").expect("an outcome");
    let mut heir = world.hold().await;
    assert_eq!(heir.session.id, parent.session.id);
    assert!(!heir.lease.taken_over && heir.lease.epoch > parent.lease.epoch);
    heir.decide();
    assert_eq!(heir.session.call(call).map(|call| call.state.word()), Some("completed"));
    assert_eq!(heir.drive_with(vec![says("thanks")]).await, Status::Idle);
}

#[tokio::test]
async fn a_child_that_goes_on_has_not_told_its_parent_yet() {
    let world = World::new().await;
    let (parent, mut child, _) = family(&world).await;
    let id = child.session.id;
    let ending = child.work(end());
    world.post(id, "one more thing", Mode::UntilBlocked).await;
    let outcome = send(&world.store, &ending).await.expect("an outcome");
    assert!(matches!(outcome, Outcome::Stored { released: false, .. }), "{outcome:?}");
    let of_parent = format!("SELECT count(*) FROM mail WHERE session_id = '{}'", parent.session.id);
    assert_eq!(world.count(&of_parent).await, 1, "the child hasn't ended");
    child.learn(outcome).await;
    child.drive_with(vec![says("the final result")]).await;
    assert_eq!(world.count(&of_parent).await, 2);
    let told = format!("{of_parent} AND body LIKE '%the final result%'");
    assert_eq!(world.count(&told).await, 1);
}

#[tokio::test]
async fn commits_that_write_to_each_other_both_take_place() {
    let world = World::new().await;
    for round in 0..12 {
        let mut holders = Vec::new();
        for _ in 0..2 {
            world.asked("write to the other").await;
            let mut holder = world.hold().await;
            holder.decide();
            holder.answer(says("done"));
            holder.decide();
            holders.push(holder);
        }
        let ids: Vec<SessionId> = holders.iter().map(|holder| holder.session.id).collect();
        // Both transactions have begun before either takes a lock.
        let gates = [Stopper::at("commit.begun"), Stopper::at("commit.begun")];
        let mut sending = Vec::new();
        for ((holder, other), (gate, _)) in holders.iter_mut().zip([ids[1], ids[0]]).zip(&gates) {
            let mut work = holder.work(end());
            let letter = letter_from(work.session.id, CallId(work.session.id.0), "a letter");
            work.to_parent = Some((other, letter));
            let store = world.gated(gate.clone());
            sending.push(tokio::spawn(async move { send(&store, &work).await }));
        }
        for (_, stopper) in &gates {
            stopper.reached().await;
        }
        for (_, stopper) in &gates {
            stopper.release();
        }
        let mut ended = 0;
        for (sent, id) in sending.into_iter().zip(&ids) {
            let outcome = sent.await.expect("ended").expect("an outcome");
            let Outcome::Stored { version: 2, released, .. } = outcome else {
                panic!("round {round}: {outcome:?}")
            };
            ended += usize::from(released);
            assert_eq!(world.row(*id).await.version, 2);
        }
        // Whoever was first ended and wrote; the letter keeps the other from ending, and from writing.
        assert_eq!(ended, 1, "round {round}");
        let letters = format!(
            "SELECT count(*) FROM mail WHERE session_id IN ('{}', '{}') AND tag = 'toolCallFinished'",
            ids[0], ids[1]
        );
        assert_eq!(world.count(&letters).await, 1, "round {round}");
    }
}

/// Heartbeats name their leases in any order, and meet commits that lock two runs in the order of
/// their ids. Nobody is ended for the other's sake, and what stands isn't taken for lost.
#[tokio::test]
async fn a_heartbeat_that_meets_a_commit_crosswise_loses_no_lease() {
    let world = World::new().await;
    // The rows lie in the other order than their ids.
    let (first, second) = (
        new_session(Some(message("one")), Mode::UntilBlocked),
        new_session(Some(message("two")), Mode::UntilBlocked),
    );
    for new in [&second, &first] {
        create::create(&world.store, &caller(), new.clone()).await.expect("a session");
    }
    let mut held: Vec<_> =
        Holder::claim_all(&world.store, &world.agent).await.iter().map(Holder::held).collect();
    held.sort();
    for order in [[held[0], held[1]], [held[1], held[0]]] {
        let commit = world.sql().await;
        let lock = "SELECT 1 FROM runs WHERE session_id = $1 FOR UPDATE";
        commit.batch_execute("BEGIN").await.expect("a transaction");
        commit.execute(lock, &[&held[0].0.0]).await.expect("the first run");
        let beating = tokio::spawn({
            let store = world.store.clone();
            async move { claim::heartbeat(&store, &order, LONG).await }
        });
        let beats = tokio::time::timeout(PATIENCE, beating).await;
        let beats = beats.expect("it doesn't wait for a commit").expect("ended").expect("an answer");
        let mut renewed: Vec<_> =
            beats.iter().map(|beat| ((beat.session, beat.epoch), beat.renewed)).collect();
        renewed.sort();
        assert_eq!(renewed, [(held[0], false), (held[1], true)], "both stand");
        commit.execute(lock, &[&held[1].0.0]).await.expect("the second run");
        commit.batch_execute("COMMIT").await.expect("committed");
        assert_eq!(renew(&world.store, &order, LONG).await.len(), 2);
    }
}

/// A release that meets such a commit waits for it, and gives everything back in the end.
#[tokio::test]
async fn a_release_that_meets_a_commit_crosswise_releases_in_the_end() {
    let world = World::new().await;
    let (first, second) = (
        new_session(Some(message("one")), Mode::UntilBlocked),
        new_session(Some(message("two")), Mode::UntilBlocked),
    );
    for new in [&second, &first] {
        create::create(&world.store, &caller(), new.clone()).await.expect("a session");
    }
    for backwards in [false, true] {
        let mut held: Vec<_> =
            Holder::claim_all(&world.store, &world.agent).await.iter().map(Holder::held).collect();
        held.sort();
        let commit = world.sql().await;
        let lock = "SELECT 1 FROM runs WHERE session_id = $1 FOR UPDATE";
        commit.batch_execute("BEGIN").await.expect("a transaction");
        commit.execute(lock, &[&held[0].0.0]).await.expect("the first run");
        let releasing = tokio::spawn({
            let (store, mut held) = (world.store.clone(), held.clone());
            if backwards {
                held.reverse();
            }
            async move { claim::release(&store, &held, Duration::ZERO, false).await }
        });
        until_queued(&world.sql().await, 1).await;
        commit.execute(lock, &[&held[1].0.0]).await.expect("the second run");
        commit.batch_execute("COMMIT").await.expect("committed");
        assert_eq!(releasing.await.expect("ended").expect("released"), 2);
    }
}
