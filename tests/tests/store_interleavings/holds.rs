//! How far runs go: modes that merge, steps and pauses that hold, and requests that lift a hold.

use holdfast_engine::{
    decide::{Mode, Next},
    ids::{MailId, SessionId},
    mail::{MailBody, Priority, Sender},
    session::{Hold, Status},
};
use holdfast_store::{
    StoreError, accept,
    commit::{Outcome, RunAfter},
    letters::{Ask, Letter},
};
use holdfast_tests::{
    step::{calls, queries, renew, result, says},
    store::{LONG, World, caller, message},
};
use uuid::Uuid;

/// A letter of another agent: it wakes what isn't held.
async fn agent_writes(world: &World, session: SessionId, text: &str) {
    let letter = Letter {
        id: MailId(Uuid::now_v7()),
        from: Sender::System { source: "a test".to_owned() },
        priority: Priority::Normal,
        hops: 0,
        body: MailBody::AgentMessage { text: text.to_owned(), in_reply_to: None, expects_reply: false },
    };
    accept::send(&world.store, &caller(), session, letter, Ask::GoOn, &[]).await.expect("taken");
}

/// A session that a step has left with a call to run.
async fn stepped(world: &World) -> SessionId {
    let session = world.created(Some(message("step")), Mode::Step).await;
    let mut holder = world.hold().await;
    assert_eq!(holder.lease.mode, Mode::Step);
    assert_eq!(holder.drive_with(vec![calls(&[("run_x", "{}")])]).await, Status::Ready);
    assert_eq!(holder.session.hold, Hold::Step);
    session
}

#[tokio::test]
async fn mail_to_a_held_session_is_folded_and_runs_nothing() {
    let world = World::new().await;
    let session = stepped(&world).await;
    agent_writes(&world, session, "news").await;
    assert!(!world.row(session).await.active);
    let mut folding = world.hold().await;
    assert_eq!(folding.lease.mode, Mode::None);
    assert_eq!(folding.decide(), Next::Stop(Status::Ready));
    folding.end(Status::Ready).await;
    assert_eq!((folding.session.cursor, folding.session.left.len()), (2, 1));
    assert_eq!((world.runs(session).await, world.row(session).await.status.as_str()), (0, "ready"));

    // A request of a person lifts the hold; the call runs, and the news is told with its result.
    accept::resume(&world.store, &caller(), session, Mode::UntilBlocked).await.expect("a run");
    let mut holder = world.hold().await;
    assert_eq!(holder.drive_with(vec![says("done")]).await, Status::Idle);
    assert_eq!(holder.session.hold, Hold::None);
}

#[tokio::test]
async fn mail_during_a_step_is_folded_and_the_step_still_ends() {
    let world = World::new().await;
    let session = world.created(Some(message("step")), Mode::Step).await;
    let mut holder = world.hold().await;
    assert_eq!(holder.decide(), Next::AskModel);
    holder.answer(calls(&[("run_x", "{}")]));
    assert_eq!(holder.decide(), Next::Stop(Status::Ready));
    agent_writes(&world, session, "news").await;
    let outcome = holder.commit(RunAfter::End { status: Status::Ready, detail: None }).await.expect("stored");
    let goes_on = Outcome::Stored { version: 2, released: false, wake_seq: 2, mode: Mode::Step };
    assert_eq!(outcome, goes_on);
    assert_eq!(holder.decide(), Next::Stop(Status::Ready), "it folds, and the call isn't begun");
    holder.end(Status::Ready).await;
    assert_eq!((world.runs(session).await, holder.session.left.len()), (0, 1));
}

#[tokio::test]
async fn a_pause_ends_the_run_after_its_step_and_holds_the_session() {
    let world = World::new().await;
    let session = world.asked("work").await;
    let mut holder = world.hold().await;
    assert_eq!(holder.decide(), Next::AskModel);
    accept::pause(&world.store, &caller(), session).await.expect("ordered");
    holder.answer(calls(&[("run_x", "{}")]));
    let outcome = holder.commit(RunAfter::Keep).await.expect("stored");
    assert!(matches!(outcome, Outcome::Stored { released: false, wake_seq: 2, .. }), "{outcome:?}");
    assert_eq!(holder.decide(), Next::Stop(Status::Paused), "the call isn't begun");
    holder.end(Status::Paused).await;
    assert_eq!(world.row(session).await.status, "paused");

    agent_writes(&world, session, "news").await;
    let mut folding = world.hold().await;
    assert_eq!((folding.lease.mode, folding.decide()), (Mode::None, Next::Stop(Status::Paused)));
    folding.end(Status::Paused).await;
    assert_eq!(world.row(session).await.status, "paused");

    world.post(session, "go on", Mode::UntilBlocked).await;
    let mut again = world.hold().await;
    assert_eq!(again.drive_with(vec![says("done")]).await, Status::Idle);
    assert_eq!(queries(&again.session), ["work", "go on"]);
}

#[tokio::test]
async fn a_request_lifts_a_pause_that_nobody_has_read_yet() {
    let world = World::new().await;
    let session = world.session().await;
    accept::pause(&world.store, &caller(), session).await.expect("ordered");
    world.post(session, "and yet", Mode::UntilBlocked).await;
    let mut holder = world.hold().await;
    assert_eq!(holder.lease.mode, Mode::UntilBlocked);
    assert_eq!(holder.drive_with(vec![says("here I am")]).await, Status::Idle);

    // The same for a request without words, and for a pause that meets a run under way.
    accept::pause(&world.store, &caller(), session).await.expect("ordered");
    world.post(session, "quietly", Mode::None).await;
    accept::resume(&world.store, &caller(), session, Mode::UntilBlocked).await.expect("a run");
    assert_eq!(world.hold().await.drive_with(vec![says("still here")]).await, Status::Idle);

    world.post(session, "work", Mode::UntilBlocked).await;
    let mut holder = world.hold().await;
    holder.decide();
    accept::pause(&world.store, &caller(), session).await.expect("ordered");
    world.post(session, "no, go on", Mode::UntilBlocked).await;
    holder.answer(says("well"));
    holder.commit(RunAfter::Keep).await.expect("stored");
    assert_eq!(holder.drive_with(vec![says("going on")]).await, Status::Idle);
    assert_eq!(world.row(session).await.status, "idle");
}

#[tokio::test]
async fn a_later_pause_is_not_undone_by_an_earlier_request() {
    let world = World::new().await;
    let session = world.asked("work").await;
    accept::pause(&world.store, &caller(), session).await.expect("ordered");
    let mut holder = world.hold().await;
    assert_eq!(holder.decide(), Next::Stop(Status::Paused), "nothing is asked after the order");
    holder.end(Status::Paused).await;
    assert_eq!(world.row(session).await.status, "paused");
}

#[tokio::test]
async fn modes_merge_on_the_run() {
    use Mode::{None, Step, UntilBlocked};
    let cases = [
        (None, Step, Step),
        (None, UntilBlocked, UntilBlocked),
        (Step, None, Step),
        (Step, UntilBlocked, UntilBlocked),
        (UntilBlocked, Step, UntilBlocked),
        (UntilBlocked, None, UntilBlocked),
    ];
    for (first, second, merged) in cases {
        // Before a worker holds the run.
        let world = World::new().await;
        let session = world.session().await;
        world.post(session, "one", first).await;
        world.post(session, "two", second).await;
        assert_eq!(world.hold().await.lease.mode, merged, "{first:?} and then {second:?}");

        // And while one does: heartbeats and commits tell it.
        let session = world.session().await;
        world.post(session, "one", first).await;
        let mut holder = world.hold().await;
        assert_eq!((holder.session.id, holder.lease.mode), (session, first));
        world.post(session, "two", second).await;
        let beats = renew(&world.store, &[holder.held()], LONG).await;
        assert_eq!(beats[0].mode, merged);
        holder.decide();
        let outcome = holder.commit(RunAfter::Keep).await.expect("stored");
        assert!(matches!(outcome, Outcome::Stored { mode, .. } if mode == merged), "{outcome:?}");
    }
}

#[tokio::test]
async fn one_run_at_a_time_and_none_to_cancel_without_one() {
    let world = World::new().await;
    let session = world.session().await;
    let cancelled = accept::cancel(&world.store, &caller(), session, false).await;
    assert!(matches!(cancelled, Err(StoreError::NoActiveRun)), "{cancelled:?}");
    let cancelled = accept::cancel(&world.store, &caller(), session, true).await;
    assert!(matches!(cancelled, Err(StoreError::NoActiveRun)), "nothing is deferred: {cancelled:?}");
    world.post(session, "work", Mode::UntilBlocked).await;
    let resumed = accept::resume(&world.store, &caller(), session, Mode::UntilBlocked).await;
    assert!(matches!(resumed, Err(StoreError::RunInProgress)), "{resumed:?}");

    // A cancel ends calls that run here, and holds the session.
    let mut holder = world.hold().await;
    holder.decide();
    holder.answer(calls(&[("run_x", "{}"), ("run_y", "{}")]));
    let Next::RunCalls(starts) = holder.decide() else { panic!("the calls begin") };
    assert_eq!(starts.len(), 2);
    holder.finish(starts[0].call, result("done in time"));
    accept::cancel(&world.store, &caller(), session, false).await.expect("a run is active");
    holder.commit(RunAfter::Keep).await.expect("stored");
    assert_eq!(holder.decide(), Next::Stop(Status::Ready));
    let states = [0, 1].map(|place| holder.session.call(starts[place].call).map(|call| call.state.word()));
    assert_eq!(states, [Some("completed"), Some("cancelled")]);
    holder.end(Status::Ready).await;
    assert_eq!((holder.session.hold, world.runs(session).await), (Hold::Step, 0));
    let cancelled = "SELECT count(*) FROM tool_calls WHERE state = 'cancelled'";
    assert_eq!(world.count(cancelled).await, 1);
}
