//! Tokens: early, late, cancelled, expired and repeated completions are defined outcomes each.

use chrono::{TimeDelta, Utc};
use holdfast_engine::{
    content::ToolResult,
    decide::{Mode, Next},
    ids::{CallId, MailId, SessionId, Token},
    mail::{Control, MailBody, Priority, Sender},
    session::{Hold, Status},
};
use holdfast_store::{
    StoreError,
    accept::{self, Caller},
    commit::{Outcome, RunAfter},
    idempotency::Done,
    letters::{Ask, Letter},
    settle::{self, Report, complete},
};
use holdfast_tests::{
    gates::{Barrier, Stopper},
    step::{calls, says, send, told_late},
    store::{World, caller, caller_with_key},
};
use tokio::task::JoinHandle;
use uuid::Uuid;

type Completing = JoinHandle<Result<Done<SessionId>, StoreError>>;

fn yes() -> Report {
    Report::Result(ToolResult::text("yes"))
}

fn completing(world: &World, token: Token) -> Completing {
    let store = world.store.clone();
    tokio::spawn(async move { complete(&store, &caller(), token, &yes(), true).await })
}

fn cancelling(world: &World, session: SessionId) -> Completing {
    let store = world.store.clone();
    tokio::spawn(async move { accept::cancel(&store, &caller(), session, true).await })
}

fn order_to_cancel(call: CallId) -> Letter {
    Letter {
        id: MailId(Uuid::now_v7()),
        from: Sender::User { owner: None },
        priority: Priority::High,
        hops: 0,
        body: MailBody::Control { message: Control::CancelCalls { tool_call_ids: vec![call] } },
    }
}

/// A session whose open call the model has been shown a placeholder of, and has answered to that.
async fn placeholder_told(world: &World) -> (SessionId, CallId, Token, i64) {
    let (session, call, token) = world.waiting().await;
    world.post(session, "any news?", Mode::UntilBlocked).await;
    let mut holder = world.hold().await;
    assert_eq!(holder.drive_with(vec![says("not yet")]).await, Status::WaitingExternal);
    (session, call, token, holder.session.length())
}

#[tokio::test]
async fn a_token_works_from_its_commit_on_and_not_before() {
    let world = World::new().await;
    let session = world.asked("please").await;
    let mut holder = world.hold().await;
    holder.decide();
    holder.answer(calls(&[("ask_anna", "{}")]));
    assert_eq!(holder.decide(), Next::Stop(Status::WaitingExternal));
    let token = holder.session.calls[0].token.expect("deferred calls have tokens");
    let work = holder.work(RunAfter::Keep);
    let (gate, stopper) = Stopper::at("commit.written");
    let store = world.gated(gate);
    let committing = tokio::spawn(async move { send(&store, &work).await });
    stopper.reached().await;
    let early = complete(&world.store, &caller(), token, &yes(), true).await;
    assert!(matches!(early, Err(StoreError::UnknownToken)), "{early:?}");
    stopper.release();
    let outcome = committing.await.expect("ended").expect("stored");
    holder.learn(outcome).await;

    // The run still goes on: the result keeps it from ending, and answers the call in its round.
    assert_eq!(
        complete(&world.store, &caller(), token, &yes(), true).await.expect("taken"),
        Done::Now(session)
    );
    let end = RunAfter::End { status: Status::WaitingExternal, detail: None };
    let outcome = holder.commit(end).await.expect("stored");
    assert!(matches!(outcome, Outcome::Stored { released: false, .. }), "{outcome:?}");
    assert_eq!(holder.drive_with(vec![says("thanks")]).await, Status::Idle);
    assert_eq!(told_late(&holder.session.turns, 1), 0);
    assert_eq!(world.runs(session).await, 0);
}

#[tokio::test]
async fn a_completion_without_resume_is_folded_and_runs_nothing() {
    let world = World::new().await;
    let (session, call, token) = world.waiting().await;
    complete(&world.store, &caller(), token, &yes(), false).await.expect("taken");
    assert!(!world.row(session).await.active);
    let mut folding = world.hold().await;
    assert_eq!(folding.lease.mode, Mode::None);
    assert_eq!(folding.decide(), Next::Stop(Status::Ready));
    assert_eq!(folding.session.call(call).map(|call| call.state.word()), Some("completed"));
    folding.end(Status::Ready).await;
    accept::resume(&world.store, &caller(), session, Mode::UntilBlocked).await.expect("a run");
    assert_eq!(world.hold().await.drive_with(vec![says("thanks")]).await, Status::Idle);
}

#[tokio::test]
async fn a_cancel_before_the_completion_settles_the_call() {
    let world = World::new().await;
    let (session, call, token) = world.waiting().await;
    let barrier = Barrier::on(&world.database, session).await;
    let cancelled = cancelling(&world, session);
    barrier.queued(1).await;
    let completed = completing(&world, token);
    barrier.queued(2).await;
    barrier.open().await;
    cancelled.await.expect("ended").expect("cancelled");
    let refused = completed.await.expect("ended");
    assert!(matches!(refused, Err(StoreError::TokenCancelled)), "{refused:?}");
    assert_eq!(world.token_state(token).await.as_deref(), Some("cancelled"));

    let mut folding = world.hold().await;
    folding.decide();
    assert_eq!(folding.session.hold, Hold::Step);
    folding.end(Status::Ready).await;
    let state = format!("SELECT count(*) FROM tool_calls WHERE id = '{call}' AND state = 'cancelled'");
    assert_eq!(world.count(&state).await, 1);
    accept::resume(&world.store, &caller(), session, Mode::UntilBlocked).await.expect("a run");
    let mut holder = world.hold().await;
    assert_eq!(holder.drive_with(vec![says("a pity")]).await, Status::Idle);
    assert_eq!(told_late(&holder.session.turns, 1), 0);
}

#[tokio::test]
async fn a_completion_before_the_cancel_stands_and_is_told_late_once() {
    let world = World::new().await;
    let (session, call, token, told) = placeholder_told(&world).await;
    let barrier = Barrier::on(&world.database, session).await;
    let completed = completing(&world, token);
    barrier.queued(1).await;
    let cancelled = cancelling(&world, session);
    barrier.queued(2).await;
    barrier.open().await;
    assert_eq!(completed.await.expect("ended").expect("taken"), Done::Now(session));
    cancelled.await.expect("ended").expect("the run that the completion started is cancelled");
    assert_eq!(world.token_state(token).await.as_deref(), Some("completed"));

    let mut folding = world.hold().await;
    let next = folding.decide();
    assert!(matches!(next, Next::Stop(_)), "{next:?}");
    assert_eq!(folding.session.call(call).map(|call| call.state.word()), Some("completed"));
    let status = folding.session.implied_status();
    folding.end(status).await;
    world.post(session, "and now?", Mode::UntilBlocked).await;
    let mut holder = world.hold().await;
    assert_eq!(holder.drive_with(vec![says("it came")]).await, Status::Idle);
    world.post(session, "sure?", Mode::UntilBlocked).await;
    let mut holder = world.hold().await;
    holder.drive_with(vec![says("sure")]).await;
    assert_eq!(told_late(&holder.session.turns, told), 1);
}

#[tokio::test]
async fn an_order_to_cancel_one_call_in_either_order() {
    for completion_first in [true, false] {
        let world = World::new().await;
        let (session, call, token, told) = placeholder_told(&world).await;
        let barrier = Barrier::on(&world.database, session).await;
        let order = || {
            let store = world.store.clone();
            tokio::spawn(async move {
                accept::send(&store, &caller(), session, order_to_cancel(call), Ask::Fold, &[]).await
            })
        };
        let (completed, ordered) = if completion_first {
            let completed = completing(&world, token);
            barrier.queued(1).await;
            (completed, order())
        } else {
            let ordered = order();
            barrier.queued(1).await;
            (completing(&world, token), ordered)
        };
        barrier.queued(2).await;
        barrier.open().await;
        ordered.await.expect("ended").expect("taken");
        let completed = completed.await.expect("ended");
        let state = if completion_first { "completed" } else { "cancelled" };
        match completed {
            Ok(Done::Now(_)) if completion_first => {}
            Err(StoreError::TokenCancelled) if !completion_first => {}
            other => panic!("completion first: {completion_first}; {other:?}"),
        }
        assert_eq!(world.token_state(token).await.as_deref(), Some(state));
        world.post(session, "and now?", Mode::UntilBlocked).await;
        let mut holder = world.hold().await;
        assert_eq!(holder.drive_with(vec![says("I see")]).await, Status::Idle);
        let stored = format!("SELECT count(*) FROM tool_calls WHERE id = '{call}' AND state = '{state}'");
        assert_eq!(world.count(&stored).await, 1);
        assert_eq!(told_late(&holder.session.turns, told), usize::from(completion_first));
    }
}

/// The order comes before the commit that opens the token, the result before the commit that obeys.
#[tokio::test]
async fn a_completion_that_beats_the_commit_of_a_cancel_is_told_late_once() {
    let world = World::new().await;
    let session = world.asked("please").await;
    let mut holder = world.hold().await;
    holder.decide();
    holder.answer(calls(&[("ask_anna", "{}"), ("ask_bert", "{}")]));
    holder.decide();
    let call = holder.session.calls[0].clone();
    let token = call.token.expect("deferred calls have tokens");
    accept::send(&world.store, &caller(), session, order_to_cancel(call.id), Ask::Fold, &[])
        .await
        .expect("taken");
    let outcome = holder.commit(RunAfter::Keep).await.expect("stored");
    assert!(matches!(outcome, Outcome::Stored { released: false, wake_seq: 1.., .. }), "{outcome:?}");
    assert_eq!(holder.inbox.len(), 1);
    holder.decide();
    let work = holder.work(RunAfter::End { status: Status::WaitingExternal, detail: None });
    let (gate, stopper) = Stopper::at("commit.begun");
    let store = world.gated(gate);
    let committing = tokio::spawn(async move { send(&store, &work).await });
    stopper.reached().await;
    complete(&world.store, &caller(), token, &yes(), true).await.expect("the token is open");
    stopper.release();
    let outcome = committing.await.expect("ended").expect("stored");
    assert_eq!(world.token_state(token).await.as_deref(), Some("completed"), "a settled token stays settled");
    holder.learn(outcome).await;
    holder.drive_with(vec![says("so anna has answered after all")]).await;
    world.post(session, "go on", Mode::UntilBlocked).await;
    let mut holder = world.hold().await;
    holder.drive_with(vec![says("yes")]).await;
    assert_eq!(told_late(&holder.session.turns, 1), 1);
}

#[tokio::test]
async fn a_cancel_reaches_tokens_that_a_step_is_about_to_open() {
    let world = World::new().await;
    let session = world.asked("please").await;
    let mut holder = world.hold().await;
    holder.decide();
    holder.answer(calls(&[("ask_anna", "{}")]));
    holder.decide();
    let (call, token) = (holder.session.calls[0].id, holder.session.calls[0].token.expect("a token"));
    cancelling(&world, session).await.expect("ended").expect("a run is active");
    let outcome = holder.commit(RunAfter::End { status: Status::WaitingExternal, detail: None }).await;
    assert!(matches!(outcome, Ok(Outcome::Stored { released: false, .. })), "{outcome:?}");
    assert_eq!(world.token_state(token).await.as_deref(), Some("open"));
    let next = holder.decide();
    assert!(matches!(next, Next::Stop(_)), "{next:?}");
    assert_eq!(holder.session.call(call).map(|call| call.state.word()), Some("cancelled"));
    let status = holder.session.implied_status();
    holder.end(status).await;
    assert_eq!(world.token_state(token).await.as_deref(), Some("cancelled"));
    let refused = complete(&world.store, &caller(), token, &yes(), true).await;
    assert!(matches!(refused, Err(StoreError::TokenCancelled)), "{refused:?}");
}

#[tokio::test]
async fn an_overdue_token_is_expired_by_whoever_meets_it_first() {
    for completer_first in [true, false] {
        let world = World::new().await;
        let long_ago = Utc::now() - TimeDelta::hours(1);
        let (session, call, token) = world.waiting_since(long_ago, "ask_soon_anna").await;
        let barrier = Barrier::on(&world.database, session).await;
        let pass = || {
            let store = world.store.clone();
            tokio::spawn(async move { settle::expire_overdue(&store, 10).await })
        };
        let (completed, expired) = if completer_first {
            let completed = completing(&world, token);
            barrier.queued(1).await;
            (completed, pass())
        } else {
            let expired = pass();
            barrier.queued(1).await;
            (completing(&world, token), expired)
        };
        barrier.queued(2).await;
        barrier.open().await;
        let refused = completed.await.expect("ended");
        assert!(matches!(refused, Err(StoreError::TokenExpired)), "{refused:?}");
        // A completer gives the lock back before it expires the token, so the pass may overtake it.
        let count = expired.await.expect("ended").expect("a pass");
        assert!(count == 1 || (completer_first && count == 0), "{count}");
        assert_eq!(world.token_state(token).await.as_deref(), Some("expired"));
        assert_eq!(world.count("SELECT count(*) FROM mail WHERE tag = 'continuationResult'").await, 1);
        assert_eq!(settle::expire_overdue(&world.store, 10).await.expect("a pass"), 0);
        let mut holder = world.hold().await;
        assert_eq!(holder.lease.mode, Mode::UntilBlocked, "an expiry lets the session go on");
        assert_eq!(holder.drive_with(vec![says("too late")]).await, Status::Idle);
        let failed = format!("SELECT count(*) FROM tool_calls WHERE id = '{call}' AND state = 'failed'");
        assert_eq!(world.count(&failed).await, 1);
        let late = complete(&world.store, &caller(), token, &yes(), true).await;
        assert!(matches!(late, Err(StoreError::TokenExpired)), "{late:?}");
    }
}

#[tokio::test]
async fn who_meets_an_overdue_token_that_a_cancel_closes_first_hears_of_the_cancel() {
    let long_ago = Utc::now() - TimeDelta::hours(1);
    // The server wakes the cancel when the completer's look ends; the expiry that follows may still be quicker.
    for _ in 0..50 {
        let world = World::new().await;
        let (session, _, token) = world.waiting_since(long_ago, "ask_soon_anna").await;
        let barrier = Barrier::on(&world.database, session).await;
        let completed = completing(&world, token);
        barrier.queued(1).await;
        let cancelled = cancelling(&world, session);
        barrier.queued(2).await;
        barrier.open().await;
        cancelled.await.expect("ended").expect("cancelled");
        let refused = completed.await.expect("ended");
        match world.token_state(token).await.as_deref() {
            Some("expired") => assert!(matches!(refused, Err(StoreError::TokenExpired)), "{refused:?}"),
            state => {
                assert_eq!(state, Some("cancelled"));
                assert!(matches!(refused, Err(StoreError::TokenCancelled)), "{refused:?}");
                return;
            }
        }
    }
    panic!("the cancel never came between");
}

#[tokio::test]
async fn an_expiry_is_no_success_that_a_key_remembers() {
    let world = World::new().await;
    let long_ago = Utc::now() - TimeDelta::hours(1);
    let (_, _, token) = world.waiting_since(long_ago, "ask_soon_anna").await;
    let caller = caller_with_key("k1", "complete");
    for attempt in 1..=2 {
        let refused = complete(&world.store, &caller, token, &yes(), true).await;
        assert!(matches!(refused, Err(StoreError::TokenExpired)), "attempt {attempt}: {refused:?}");
    }
    assert_eq!(world.count("SELECT count(*) FROM idempotency_keys").await, 0);
    assert_eq!(world.token_state(token).await.as_deref(), Some("expired"));
}

#[tokio::test]
async fn a_repeated_completion_with_its_key_is_the_same_success() {
    let world = World::new().await;
    let (session, _, token) = world.waiting().await;
    let caller = caller_with_key("k1", "complete");
    assert_eq!(
        complete(&world.store, &caller, token, &yes(), true).await.expect("taken"),
        Done::Now(session)
    );
    let again = complete(&world.store, &caller, token, &yes(), true).await.expect("a repeat");
    assert_eq!(again, Done::Before { code: 201, resource: token.to_string() });
    let other = caller_with_key("k1", "something else");
    let refused = complete(&world.store, &other, token, &yes(), true).await;
    assert!(matches!(refused, Err(StoreError::IdempotencyMismatch)), "{refused:?}");
    // Without the key it is a retry or a rival, told apart by the result.
    let retry = complete(&world.store, &super_caller(), token, &yes(), true).await;
    assert!(matches!(retry, Err(StoreError::UnknownToken)), "another owner's token: {retry:?}");
}

fn super_caller() -> Caller {
    Caller { owner: Some("mallory".to_owned()), traceparent: None, key: None }
}

#[tokio::test]
async fn a_late_completion_is_told_in_the_next_turn_and_only_there() {
    let world = World::new().await;
    let (session, _, token, told) = placeholder_told(&world).await;
    complete(&world.store, &caller(), token, &yes(), true).await.expect("taken");
    let mut holder = world.hold().await;
    assert_eq!(holder.drive_with(vec![says("it came")]).await, Status::Idle);
    assert_eq!(told_late(&holder.session.turns, told), 1);
    world.post(session, "and?", Mode::UntilBlocked).await;
    let mut holder = world.hold().await;
    holder.drive_with(vec![says("that's all")]).await;
    assert_eq!(told_late(&holder.session.turns, told), 1);
}
