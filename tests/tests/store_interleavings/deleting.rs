//! Deleting against everything that writes: the mark is the fence, whoever gets the lock first.

use holdfast_engine::{
    decide::Mode,
    ids::{CallId, SessionId},
    session::Status,
};
use holdfast_store::{
    StoreError, accept,
    commit::{Outcome, RunAfter},
    create,
    delete::{Plan, delete},
    idempotency::Done,
    load,
    settle::{Report, complete},
};
use holdfast_tests::{
    gates::{Barrier, Stopper, until_queued},
    step::{calls, letter_from, says, send},
    store::{World, caller, message, new_session},
};
use tokio::task::JoinHandle;
use uuid::Uuid;

fn deleting(world: &World, session: SessionId) -> JoinHandle<Result<Plan, StoreError>> {
    let store = world.store.clone();
    tokio::spawn(async move { delete(&store, &caller(), session, false).await })
}

async fn live_sessions(world: &World) -> i64 {
    world.count("SELECT count(*) FROM sessions WHERE deleted_at IS NULL").await
}

#[tokio::test]
async fn a_commit_after_a_delete_stores_nothing() {
    let world = World::new().await;
    // A run that only folds doesn't stand in a deletion's way.
    let session = world.created(Some(message("hello")), Mode::None).await;
    let mut holder = world.hold().await;
    holder.decide();
    let work = holder.work(RunAfter::End { status: Status::Ready, detail: None });
    let (gate, stopper) = Stopper::at("commit.begun");
    let committing = tokio::spawn({
        let (store, work) = (world.gated(gate), work.clone());
        async move { send(&store, &work).await }
    });
    stopper.reached().await;
    let plan = delete(&world.store, &caller(), session, false).await.expect("deleted");
    assert_eq!(plan.sessions, [session]);
    stopper.release();
    assert_eq!(committing.await.expect("ended").expect("an outcome"), Outcome::LeaseLost);
    assert_eq!(world.count("SELECT version FROM sessions").await, 1);
    assert_eq!(world.count("SELECT count(*) FROM turns").await, 0);
    let last =
        "SELECT count(*) FROM events WHERE kind = 'session.deleted' AND seq = (SELECT max(seq) FROM events)";
    assert_eq!(world.count(last).await, 1, "nothing comes after the end");
    assert!(matches!(load::load(&world.store, session).await, Err(StoreError::UnknownSession)));
}

#[tokio::test]
async fn a_delete_behind_a_commit_takes_what_it_stored() {
    let world = World::new().await;
    let session = world.created(Some(message("hello")), Mode::None).await;
    let mut holder = world.hold().await;
    holder.decide();
    let work = holder.work(RunAfter::End { status: Status::Ready, detail: None });
    let (gate, stopper) = Stopper::at("commit.written");
    let store = world.gated(gate);
    let committing = tokio::spawn(async move { send(&store, &work).await });
    stopper.reached().await;
    let gone = deleting(&world, session);
    until_queued(&world.sql().await, 1).await;
    stopper.release();
    let outcome = committing.await.expect("ended").expect("an outcome");
    assert!(matches!(outcome, Outcome::Stored { released: true, .. }), "{outcome:?}");
    gone.await.expect("ended").expect("deleted");
    assert_eq!((live_sessions(&world).await, world.runs(session).await), (0, 0));
}

#[tokio::test]
async fn a_run_in_a_workers_hand_refuses_a_delete_of_itself_and_its_relatives() {
    let world = World::new().await;
    let parent = world.asked("delegate").await;
    let mut holder = world.hold().await;
    let child = world.child(parent, CallId(Uuid::now_v7()), "work").await;
    for session in [parent, child] {
        let refused = delete(&world.store, &caller(), session, false).await;
        assert!(matches!(refused, Err(StoreError::RunInProgress)), "{refused:?}");
    }
    holder.drive_with(vec![says("done")]).await;
    // The child's run is queued, which refuses nothing; a look changes nothing.
    let plan = delete(&world.store, &caller(), parent, true).await.expect("a plan");
    assert_eq!((plan.sessions, live_sessions(&world).await), (vec![child, parent], 2));
    let of_child = world.hold().await;
    let refused = delete(&world.store, &caller(), parent, false).await;
    assert!(matches!(refused, Err(StoreError::RunInProgress)), "{refused:?}");
    drop(of_child);
}

#[tokio::test]
async fn a_child_spawned_behind_a_delete_is_refused() {
    let world = World::new().await;
    let parent = world.session().await;
    let barrier = Barrier::on(&world.database, parent).await;
    let gone = deleting(&world, parent);
    barrier.queued(1).await;
    let spawning = tokio::spawn(spawn(&world, parent));
    barrier.queued(2).await;
    barrier.open().await;
    assert_eq!(gone.await.expect("ended").expect("deleted").sessions, [parent]);
    let refused = spawning.await.expect("ended");
    assert!(matches!(refused, Err(StoreError::UnknownSession)), "{refused:?}");
    assert_eq!(live_sessions(&world).await, 0);
}

#[tokio::test]
async fn a_child_spawned_before_a_delete_is_deleted_with_its_parent() {
    let world = World::new().await;
    let parent = world.session().await;
    let barrier = Barrier::on(&world.database, parent).await;
    let spawning = tokio::spawn(spawn(&world, parent));
    barrier.queued(1).await;
    let gone = deleting(&world, parent);
    barrier.queued(2).await;
    barrier.open().await;
    let Done::Now(child) = spawning.await.expect("ended").expect("a child") else {
        panic!("no key was given")
    };
    assert_eq!(gone.await.expect("ended").expect("deleted").sessions, [child, parent]);
    assert_eq!((live_sessions(&world).await, world.runs(child).await), (0, 0));
}

#[tokio::test]
async fn a_grandchild_spawned_while_a_delete_waits_for_its_parent_is_deleted() {
    let world = World::new().await;
    let root = world.session().await;
    let Done::Now(child) = spawn(&world, root).await.expect("a child") else { panic!("no key was given") };
    let barrier = Barrier::on(&world.database, child).await;
    let spawning = tokio::spawn(spawn(&world, child));
    barrier.queued(1).await;
    // It holds the root's lock, has seen the child, and waits for it.
    let gone = deleting(&world, root);
    barrier.queued(2).await;
    barrier.open().await;
    let Done::Now(grandchild) = spawning.await.expect("ended").expect("a grandchild") else {
        panic!("no key was given")
    };
    assert_eq!(gone.await.expect("ended").expect("deleted").sessions, [grandchild, child, root]);
    assert_eq!(live_sessions(&world).await, 0);
    let refused = spawn(&world, grandchild).await;
    assert!(matches!(refused, Err(StoreError::UnknownSession)), "{refused:?}");
}

fn spawn(
    world: &World,
    parent: SessionId,
) -> impl Future<Output = Result<Done<SessionId>, StoreError>> + Send + 'static {
    let store = world.store.clone();
    async move {
        let new = holdfast_store::create::NewSession {
            parent: Some(parent),
            ..new_session(Some(message("work")), Mode::UntilBlocked)
        };
        create::create(&store, &caller(), new.clone()).await
    }
}

#[tokio::test]
async fn mail_and_a_delete_in_either_order() {
    for mail_first in [true, false] {
        let world = World::new().await;
        let session = world.session().await;
        let barrier = Barrier::on(&world.database, session).await;
        let post = || {
            let store = world.store.clone();
            tokio::spawn(async move {
                accept::post(&store, &caller(), session, &message("hello"), Mode::UntilBlocked).await
            })
        };
        let (posting, gone) = if mail_first {
            let posting = post();
            barrier.queued(1).await;
            (posting, deleting(&world, session))
        } else {
            let gone = deleting(&world, session);
            barrier.queued(1).await;
            (post(), gone)
        };
        barrier.queued(2).await;
        barrier.open().await;
        let posted = posting.await.expect("ended");
        match posted {
            Ok(Done::Now(receipt)) if mail_first => assert_eq!(receipt.seq, 1),
            Err(StoreError::UnknownSession) if !mail_first => {}
            other => panic!("mail first: {mail_first}; {other:?}"),
        }
        gone.await.expect("ended").expect("deleted");
        assert_eq!((live_sessions(&world).await, world.runs(session).await), (0, 0));
        assert_eq!(world.count("SELECT count(*) FROM mail").await, i64::from(mail_first));
    }
}

#[tokio::test]
async fn a_completion_and_a_delete_in_either_order() {
    for completion_first in [true, false] {
        let world = World::new().await;
        let (session, _, token) = world.waiting().await;
        let barrier = Barrier::on(&world.database, session).await;
        let finish = || {
            let store = world.store.clone();
            tokio::spawn(async move {
                complete(&store, &caller(), token, &Report::Error("no".to_owned()), true).await
            })
        };
        let (completing, gone) = if completion_first {
            let completing = finish();
            barrier.queued(1).await;
            (completing, deleting(&world, session))
        } else {
            let gone = deleting(&world, session);
            barrier.queued(1).await;
            (finish(), gone)
        };
        barrier.queued(2).await;
        barrier.open().await;
        match completing.await.expect("ended") {
            Ok(Done::Now(_)) if completion_first => {}
            Err(StoreError::UnknownToken) if !completion_first => {}
            other => panic!("completion first: {completion_first}; {other:?}"),
        }
        let plan = gone.await.expect("ended").expect("deleted");
        assert_eq!(plan.continuations, 1);
        assert_eq!((world.token_state(token).await, world.runs(session).await), (None, 0));
        let late = complete(&world.store, &caller(), token, &Report::Error("no".to_owned()), true).await;
        assert!(matches!(late, Err(StoreError::UnknownToken)), "{late:?}");
    }
}

#[tokio::test]
async fn a_childs_end_after_its_parents_deletion_tells_nobody() {
    let world = World::new().await;
    let parent = world.asked("delegate").await;
    let mut holder = world.hold().await;
    holder.drive_with(vec![calls(&[("ask_child", "{}")])]).await;
    // A letter to a session outside of the deleted tree's fence: the recipient is gone, the sender isn't.
    let sender = world.asked("write").await;
    let mut writing = world.hold().await;
    writing.decide();
    writing.answer(says("done"));
    let mut work = writing.work(RunAfter::End { status: Status::Idle, detail: None });
    work.to_parent = Some((parent, letter_from(sender, holder.session.calls[0].id, "late")));
    let (gate, stopper) = Stopper::at("commit.begun");
    let store = world.gated(gate);
    let committing = tokio::spawn(async move { send(&store, &work).await });
    stopper.reached().await;
    delete(&world.store, &caller(), parent, false).await.expect("deleted");
    stopper.release();
    let outcome = committing.await.expect("ended").expect("an outcome");
    assert!(matches!(outcome, Outcome::Stored { released: true, .. }), "{outcome:?}");
    let letters = format!("SELECT count(*) FROM mail WHERE session_id = '{parent}'");
    assert_eq!(world.count(&letters).await, 1);
    assert_eq!((world.runs(parent).await, live_sessions(&world).await), (0, 1));
}

#[tokio::test]
async fn another_owners_session_is_unknown_and_stays() {
    let world = World::new().await;
    let session = world.session().await;
    let stranger = accept::Caller { owner: Some("mallory".to_owned()), ..caller() };
    let refused = delete(&world.store, &stranger, session, false).await;
    assert!(matches!(refused, Err(StoreError::UnknownSession)), "{refused:?}");
    let refused = accept::post(&world.store, &stranger, session, &message("hello"), Mode::UntilBlocked).await;
    assert!(matches!(refused, Err(StoreError::UnknownSession)), "{refused:?}");
    assert_eq!((live_sessions(&world).await, world.count("SELECT mail_seq FROM sessions").await), (1, 0));
}
