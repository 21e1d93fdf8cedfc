//! Connections that die during COMMIT: one step of the version, whichever way it went.

use holdfast_engine::session::Status;
use holdfast_store::{
    Store,
    commit::{Outcome, RunAfter},
    delete,
};
use holdfast_tests::{
    gates::until_queued,
    proxy::{Fault, Proxy},
    step::{Holder, release, renew, says, send},
    store::{LONG, World, caller, message, open},
};

/// A worker's hand behind a proxy, with an answer to store.
async fn behind_a_proxy(world: &World) -> (Proxy, Store, Holder) {
    let proxy = Proxy::before(&world.database).await;
    let store = open(&world.database.url_by(proxy.address()), 4, None).await;
    world.asked("hello").await;
    let mut holder = Holder::claim(&store, &world.agent, LONG).await;
    holder.decide();
    holder.answer(says("hi"));
    holder.decide();
    (proxy, store, holder)
}

/// What exactly one commit leaves: one version, its turns and its events once.
async fn stored_once(world: &World) {
    assert_eq!(world.count("SELECT version FROM sessions").await, 2);
    assert_eq!(world.count("SELECT count(*) FROM turns").await, 2);
    let updates = "SELECT count(*) * 10 + count(DISTINCT body::json->>'head') FROM events
                   WHERE kind = 'session.updated' AND body LIKE '%\"version\":2%'";
    assert_eq!(world.count(updates).await, 22, "one for each turn");
    let dense = "SELECT count(*) FROM events e JOIN sessions s ON s.id = e.session_id
                 WHERE s.event_seq = (SELECT count(*) FROM events)";
    assert_eq!(world.count(dense).await, world.count("SELECT count(*) FROM events").await);
}

#[tokio::test]
async fn a_commit_whose_answer_is_lost_took_place_once() {
    for (run, released) in [(RunAfter::Keep, false), (end(), true)] {
        let world = World::new().await;
        let (proxy, store, mut holder) = behind_a_proxy(&world).await;
        let work = holder.work(run);
        proxy.arm(Fault::CutAfter);
        let outcome = send(&store, &work).await.expect("found out");
        proxy.tripped().await;
        assert!(
            matches!(outcome, Outcome::Stored { version: 2, released: freed, .. } if freed == released),
            "{outcome:?}"
        );
        stored_once(&world).await;
        if !released {
            holder.learn(outcome).await;
            holder.end(Status::Idle).await;
        }
    }
}

#[tokio::test]
async fn a_commit_that_never_reached_the_server_is_sent_again() {
    for (run, released) in [(RunAfter::Keep, false), (end(), true)] {
        let world = World::new().await;
        let (proxy, store, mut holder) = behind_a_proxy(&world).await;
        let work = holder.work(run);
        proxy.arm(Fault::CutBefore);
        let outcome = send(&store, &work).await.expect("sent again");
        proxy.tripped().await;
        assert!(
            matches!(outcome, Outcome::Stored { version: 2, released: freed, .. } if freed == released),
            "{outcome:?}"
        );
        stored_once(&world).await;
    }
}

#[tokio::test]
async fn a_commit_in_flight_when_the_connection_dies_takes_place_once() {
    for _ in 0..8 {
        let world = World::new().await;
        let (proxy, store, mut holder) = behind_a_proxy(&world).await;
        let work = holder.work(end());
        proxy.arm(Fault::CutAtOnce);
        let outcome = send(&store, &work).await.expect("found out");
        proxy.tripped().await;
        assert!(matches!(outcome, Outcome::Stored { version: 2, .. }), "{outcome:?}");
        stored_once(&world).await;
    }
}

#[tokio::test]
async fn a_commit_that_vanishes_is_sent_again_when_its_connection_is_found_dead() {
    let world = World::new().await;
    let (proxy, store, mut holder) = behind_a_proxy(&world).await;
    let work = holder.work(end());
    proxy.arm(Fault::Swallow);
    let committing = tokio::spawn(async move { send(&store, &work).await });
    proxy.tripped().await;
    assert_eq!(world.count("SELECT version FROM sessions").await, 1);
    proxy.cut_all();
    let outcome = committing.await.expect("ended").expect("sent again");
    assert!(matches!(outcome, Outcome::Stored { version: 2, released: true, .. }), "{outcome:?}");
    stored_once(&world).await;
}

#[tokio::test]
async fn a_slow_commit_is_just_slow() {
    let world = World::new().await;
    let (proxy, store, mut holder) = behind_a_proxy(&world).await;
    let work = holder.work(end());
    proxy.arm(Fault::Hold);
    let committing = tokio::spawn(async move { send(&store, &work).await });
    proxy.tripped().await;
    assert_eq!(world.count("SELECT version FROM sessions").await, 1, "nothing is visible before the commit");
    proxy.release();
    let outcome = committing.await.expect("ended").expect("stored");
    assert!(matches!(outcome, Outcome::Stored { version: 2, released: true, .. }), "{outcome:?}");
    stored_once(&world).await;
}

#[tokio::test]
async fn a_commit_that_is_sent_twice_is_stored_once() {
    let world = World::new().await;
    let (_proxy, store, mut holder) = behind_a_proxy(&world).await;
    let work = holder.work(RunAfter::Keep);
    let first = send(&store, &work).await.expect("stored");
    assert_eq!(send(&store, &work).await.expect("known by its id"), first);
    stored_once(&world).await;
}

#[tokio::test]
async fn an_unsent_commit_whose_lease_has_gone_is_lost() {
    let world = World::new().await;
    let (proxy, store, mut holder) = behind_a_proxy(&world).await;
    let work = holder.work(RunAfter::Keep);
    // The lease is handed on while the COMMIT is under way and then never sent.
    proxy.arm(Fault::Hold);
    let committing = tokio::spawn({
        let (store, work) = (store.clone(), work.clone());
        async move { send(&store, &work).await }
    });
    proxy.tripped().await;
    let releasing = tokio::spawn({
        let (store, held) = (world.store.clone(), holder.held());
        async move { release(&store, &[held], std::time::Duration::ZERO).await }
    });
    until_queued(&world.sql().await, 1).await;
    proxy.cut_all();
    assert_eq!(releasing.await.expect("ended"), 1);
    assert_eq!(committing.await.expect("ended").expect("an outcome"), Outcome::LeaseLost);
    assert_eq!(world.count("SELECT version FROM sessions").await, 1);
    assert_eq!(world.hold().await.drive_with(vec![says("hi")]).await, Status::Idle);
}

#[tokio::test]
async fn an_unsent_commit_of_a_deleted_session_is_lost() {
    let world = World::new().await;
    let (proxy, store, mut holder) = behind_a_proxy(&world).await;
    let session = holder.session.id;
    let work = holder.work(RunAfter::Keep);
    assert_eq!(renew(&world.store, &[holder.held()], std::time::Duration::ZERO).await.len(), 1);
    proxy.arm(Fault::Hold);
    let committing = tokio::spawn(async move { send(&store, &work).await });
    proxy.tripped().await;
    let deleting = tokio::spawn({
        let store = world.store.clone();
        async move { delete::delete(&store, &caller(), session, false).await }
    });
    until_queued(&world.sql().await, 1).await;
    proxy.cut_all();
    deleting.await.expect("ended").expect("deleted");
    assert_eq!(committing.await.expect("ended").expect("an outcome"), Outcome::LeaseLost);
    assert_eq!(world.count("SELECT count(*) FROM turns").await, 0);
}

#[tokio::test]
async fn a_message_whose_answer_is_lost_is_accepted_once_when_it_is_sent_again() {
    for fault in [Fault::CutBefore, Fault::CutAfter] {
        let world = World::new().await;
        let proxy = Proxy::before(&world.database).await;
        let store = open(&world.database.url_by(proxy.address()), 4, None).await;
        let session = world.session().await;
        let message = message("once");
        let post = async || {
            let run = holdfast_engine::decide::Mode::UntilBlocked;
            holdfast_store::accept::post(&store, &caller(), session, &message, run).await
        };
        proxy.arm(fault);
        let lost = post().await.expect_err("the connection is cut");
        assert!(lost.is_unavailable(), "{lost}");
        post().await.expect("sent again by its sender");
        assert_eq!(world.count("SELECT count(*) FROM mail").await, 1, "{fault:?}");
        assert_eq!(world.count("SELECT mail_seq FROM sessions").await, 1, "{fault:?}");
    }
}

fn end() -> RunAfter {
    RunAfter::End { status: Status::Idle, detail: None }
}
