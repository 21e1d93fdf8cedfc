//! Sessions that sessions call: they start with their parent's commit, their end is told whatever ends them, and
//! whoever is waited for no longer is told to stop. And the terms on which calls are handed to the outside.
#![expect(clippy::expect_used, reason = "a test")]

use holdfast_engine::{
    agent::Agent,
    builtin::{BuiltinToolbox, Helper},
    content::ToolResult,
    decide::{Mode, Next},
    ids::{CallId, MailId, SessionId, Token},
    mail::{Control, MailBody, Priority, Sender},
    session::{CallState, Status},
    waking::{WakeClass, Waking},
};
use holdfast_store::{
    StoreError,
    accept::{self, Caller},
    commit, create, delete, history,
    letters::{Ask, Letter},
    settle::{self, Report},
    waking::Wake,
};
use holdfast_tests::{
    step::{Holder, calls, says},
    store::{AGENT, LONG, OWNER, World, caller, message, new_session, record},
};

use uuid::Uuid;

/// The test's agent, which may call itself and has a toolbox of the engine's.
fn with_helper(agent: &Agent) -> Agent {
    let mut agent = agent.clone();
    let helper = Helper { slug: AGENT.to_owned(), announce: String::new() };
    agent.builtins.push(helper.tool());
    agent.helpers.push(helper);
    let text = r#"{"slug": "x", "flavor": "OpenAI", "modelUrl": "http://m", "modelName": "m", "builtinToolboxes":
        [{"tag": "SystemToolbox", "contents": {"Name": "self", "Capabilities": ["ask-human", "sleep-until", "wait"]}}]}"#;
    let config = holdfast_engine::agent::AgentConfig::parse(text).expect("an agent");
    assert!(matches!(config.builtin_toolboxes[..], [BuiltinToolbox::SystemToolbox(_)]));
    agent.builtins.extend(config.prepare("r".into(), Vec::new()).expect("usable").builtins);
    agent
}

/// A session that has called its helper and is parked, and the call.
async fn parked(world: &World) -> (SessionId, CallId) {
    parked_by(world, &caller()).await
}

async fn parked_by(world: &World, caller: &Caller) -> (SessionId, CallId) {
    let new = new_session(Some(message("delegate")), Mode::UntilBlocked);
    create::create(&world.store, caller, new.clone()).await.expect("a session");
    let id = new.id;
    let mut parent = hold(world).await;
    assert_eq!(parent.decide(), Next::AskModel);
    parent.answer(calls(&[("prompt_agent_helper", r#"{"what": "the work"}"#)]));
    assert_eq!(parent.decide(), Next::Park("child"));
    let on = commit::RunAfter::Park { on: "child".to_owned(), until: None };
    let outcome = parent.commit(on).await.expect("stored");
    assert!(matches!(outcome, commit::Outcome::Stored { released: true, .. }), "{outcome:?}");
    (id, parent.session.calls[0].id)
}

async fn hold(world: &World) -> Holder {
    Holder::claim(&world.store, &with_helper(&world.agent), LONG).await
}

/// The one run that is due, which is the parent's; what became of its call.
async fn told(world: &World, parent: SessionId) -> (CallState, String) {
    let mut holder = hold(world).await;
    assert_eq!(holder.session.id, parent);
    assert_eq!(holder.decide(), Next::AskModel, "the parent goes on");
    let call = &holder.session.calls[0];
    let text = match call.settled.clone().expect("ended") {
        holdfast_engine::mail::Settled::Completed { result } => match result {
            holdfast_engine::content::Payload::Inline(result) => result.as_text(),
            holdfast_engine::content::Payload::Blob { .. } => "blob".to_owned(),
        },
        holdfast_engine::mail::Settled::Failed { message }
        | holdfast_engine::mail::Settled::Cancelled { message } => message,
    };
    let state = call.state;
    holder.answer(says("I see"));
    assert_eq!(holder.decide(), Next::Stop(Status::Idle));
    holder.end(Status::Idle).await;
    (state, text)
}

#[tokio::test]
async fn a_child_is_there_once_its_parents_commit_is() {
    let world = World::new().await;
    let (parent, call) = parked(&world).await;
    let child = world.row(SessionId(call.0)).await;
    assert_eq!((child.parent_id, child.status.as_str()), (Some(parent.0), "running"));
    let view = world.row(parent).await;
    assert_eq!((view.status.as_str(), view.parked_on.as_deref()), ("running", Some("child")));
    let mut worker = hold(&world).await;
    assert_eq!(worker.session.id.0, call.0, "the parent's run is parked: it isn't due");
    assert_eq!(worker.session.stack, [AGENT]);
    assert_eq!(worker.decide(), Next::AskModel);
    worker.answer(says("the result"));
    assert_eq!(worker.decide(), Next::Stop(Status::Idle));
    worker.end(Status::Idle).await;
    assert_eq!(told(&world, parent).await, (CallState::Completed, "the result".to_owned()));
}

#[tokio::test]
async fn a_child_that_cant_be_driven_tells_its_parent() {
    let world = World::new().await;
    let (parent, _) = parked(&world).await;
    let child = hold(&world).await;
    let (id, epoch) = child.held();
    assert!(commit::fail(&world.store, id, epoch, "poison").await.expect("an answer"));
    assert_eq!(told(&world, parent).await, (CallState::Failed, "poison".to_owned()));
}

#[tokio::test]
async fn a_child_that_is_deleted_tells_its_parent() {
    let world = World::new().await;
    let (parent, call) = parked(&world).await;
    delete::delete(&world.store, &caller(), SessionId(call.0), false).await.expect("deleted");
    let (state, text) = told(&world, parent).await;
    assert!(state == CallState::Failed && text.contains("deleted"), "{text}");
}

#[tokio::test]
async fn a_child_that_nobody_waits_for_is_told_to_stop_and_its_tokens_are_closed() {
    let world = World::new().await;
    let (parent, call) = parked(&world).await;
    let mut child = hold(&world).await;
    child.decide();
    child.answer(calls(&[("ask_person", "{}")]));
    assert_eq!(child.decide(), Next::Stop(Status::WaitingExternal));
    child.end(Status::WaitingExternal).await;
    let open = history::pending(&world.store, SessionId(call.0)).await.expect("an answer");
    assert_eq!(open.len(), 1);

    accept::cancel_attached(&world.store, &caller(), parent).await.expect("ordered");
    let mut holder = hold(&world).await;
    assert_eq!(holder.decide(), Next::AskModel);
    holder.commit(commit::RunAfter::Keep).await.expect("stored");
    let refused = settle::complete(
        &world.store,
        &caller(),
        Token(open[0].token),
        &Report::Result(ToolResult::text("late")),
        true,
    )
    .await;
    assert!(matches!(refused, Err(StoreError::TokenCancelled)), "{refused:?}");
    let mut child = hold(&world).await;
    assert_eq!(child.session.id.0, call.0);
    let orders = child.inbox.iter().filter(|letter| {
        matches!(&letter.body, holdfast_engine::mail::MailBody::Control { message } if matches!(message, Control::StopRun | Control::CancelDeferred))
    });
    assert_eq!(orders.count(), 2);
    assert_eq!(child.decide(), Next::Stop(Status::Ready));
    child.end(Status::Ready).await;
}

#[tokio::test]
async fn calls_that_are_cancelled_where_nothing_runs_are_told_to_the_model() {
    let world = World::new().await;
    for attached in [false, true] {
        let (id, call, _) = world.waiting().await;
        if attached {
            accept::cancel_attached(&world.store, &caller(), id).await.expect("ordered");
        } else {
            let message = Control::CancelCalls { tool_call_ids: vec![call] };
            let from = Sender::User { owner: Some(OWNER.to_owned()) };
            let (letter_id, priority) = (MailId(Uuid::now_v7()), Priority::High);
            let body = MailBody::Control { message };
            let letter = Letter { id: letter_id, from, priority, hops: 0, body };
            accept::send(&world.store, &caller(), id, letter, Wake::By(Ask::GoOn), &[])
                .await
                .expect("ordered");
        }
        let mut holder = world.hold().await;
        assert_eq!(holder.session.id, id);
        let next = holder.decide();
        if attached {
            // A deferred call isn't attached: there is nothing to tell.
            assert_eq!(next, Next::Stop(Status::WaitingExternal));
            holder.end(Status::WaitingExternal).await;
            continue;
        }
        assert_eq!(next, Next::AskModel);
        holder.answer(says("never mind"));
        assert_eq!(holder.decide(), Next::Stop(Status::Idle));
        holder.end(Status::Idle).await;
    }
}

#[tokio::test]
async fn a_wait_for_mail_ends_with_mail_that_starts_no_run() {
    let world = World::new().await;
    let waking = Waking { wake_on: Vec::new(), resume_on_any_mail: false };
    record(&world.store, AGENT, &Agent { waking, ..world.agent.clone() }).await.expect("recorded");
    let letter = |text: &str| {
        let body = MailBody::AgentMessage { text: text.to_owned(), in_reply_to: None, expects_reply: false };
        let from = Sender::User { owner: Some(OWNER.to_owned()) };
        Letter { id: MailId(Uuid::now_v7()), from, priority: Priority::Normal, hops: 0, body }
    };
    for (arguments, parked, told) in [
        (r#"{"capability": "sleep-until", "seconds": 500}"#, "timer", false),
        (r#"{"capability": "wait", "for": "mail", "timeout_seconds": 60}"#, "wait", true),
    ] {
        let id = world.asked("wait for news").await;
        let mut holder = hold(&world).await;
        holder.decide();
        holder.answer(calls(&[("system_self_system_info", arguments)]));
        assert_eq!(holder.decide(), Next::Park(parked));
        let on = commit::RunAfter::Park { on: parked.to_owned(), until: holder.until };
        holder.commit(on).await.expect("stored");
        accept::send(&world.store, &caller(), id, letter("news"), WakeClass::User, &[]).await.expect("room");
        let due = format!("SELECT count(*) FROM runs WHERE session_id = '{id}' AND state = 'queued'");
        assert_eq!(world.count(&due).await, i64::from(told), "{arguments}");
    }
    let mut holder = hold(&world).await;
    assert_eq!(holder.decide(), Next::AskModel);
}

#[tokio::test]
async fn children_can_be_stopped_by_their_parent_without_a_run() {
    let world = World::new().await;
    let id = world.asked("delegate").await;
    let mut parent = hold(&world).await;
    parent.decide();
    parent.answer(calls(&[("prompt_agent_helper", r#"{"what": "the work"}"#)]));
    assert_eq!(parent.decide(), Next::Park("child"));
    // Its model gave no answer beside the child.
    parent.end(Status::Failed).await;
    let mut child = hold(&world).await;
    child.decide();
    accept::cancel(&world.store, &caller(), id, false).await.expect("there is something to stop");
    let mut holder = Holder::claim(&world.store, &with_helper(&world.agent), LONG).await;
    assert_eq!(holder.session.id, id);
    assert!(matches!(holder.decide(), Next::Stop(_)));
    holder.end(Status::Failed).await;
    child.commit(commit::RunAfter::Keep).await.expect("stored");
    assert!(matches!(child.decide(), Next::Stop(_)), "it was told to stop");
    let refused = accept::cancel(&world.store, &caller(), id, false).await;
    assert!(matches!(refused, Err(StoreError::NoActiveRun)), "{refused:?}");
}

#[tokio::test]
async fn what_a_step_starts_elsewhere_belongs_to_its_trace() {
    let world = World::new().await;
    let trace = |n: u8| format!("00-{}-00f067aa0ba902b7-01", format!("{n:02x}").repeat(16));
    let caller = Caller { traceparent: Some(trace(1)), ..caller() };
    let (parent, call) = parked_by(&world, &caller).await;
    let mut child = hold(&world).await;
    assert_eq!(child.lease.session.0, call.0);
    assert_eq!(child.lease.traceparent.as_deref(), Some(trace(1).as_str()), "that of its parent's run");
    child.decide();
    child.answer(says("done"));
    child.decide();
    // Another trace than the one in which the parent waits, which it stays in.
    child.lease.traceparent = Some(trace(2));
    child.end(Status::Idle).await;
    let woken = hold(&world).await;
    assert_eq!(woken.lease.session, parent);
    assert_eq!(woken.lease.traceparent.as_deref(), Some(trace(1).as_str()));
}

#[tokio::test]
async fn a_child_that_its_parent_has_stopped_starts_no_run_of_it() {
    let world = World::new().await;
    let (parent, call) = parked(&world).await;
    let mut child = hold(&world).await;
    child.decide();
    child.answer(calls(&[("ask_person", "{}")]));
    child.decide();
    child.end(Status::WaitingExternal).await;
    accept::cancel_attached(&world.store, &caller(), parent).await.expect("ordered");
    let mut holder = hold(&world).await;
    assert_eq!(holder.decide(), Next::AskModel);
    holder.answer(says("never mind"));
    assert_eq!(holder.decide(), Next::Stop(Status::Idle));
    holder.end(Status::Idle).await;

    let mut child = hold(&world).await;
    assert_eq!(child.decide(), Next::Stop(Status::Ready));
    let mut work = child.work(commit::RunAfter::End { status: Status::Ready, detail: None });
    let settled = holdfast_engine::mail::Settled::Cancelled { message: "stopped".to_owned() };
    work.to_parent = Some((parent, commit::end_of_child(SessionId(call.0), None, call, settled)));
    let deadline = tokio::time::Instant::now() + LONG;
    let outcome = commit::commit(&world.store, &work, deadline).await.expect("stored");
    assert!(matches!(outcome, commit::Outcome::Stored { released: true, .. }), "{outcome:?}");
    assert_eq!(world.row(parent).await.status, "idle");
    assert_eq!(world.count("SELECT count(*) FROM mail WHERE tag = 'toolCallFinished'").await, 1);
    assert_eq!(
        world.count("SELECT count(*) FROM runs WHERE mode <> 'none'").await,
        0,
        "nothing is to be done"
    );
}

#[tokio::test]
async fn a_deadline_has_the_answer_that_was_agreed() {
    let world = World::new().await;
    let id = world.asked("ask").await;
    let mut holder = hold(&world).await;
    holder.decide();
    let arguments =
        r#"{"capability": "ask-human", "question": "may I?", "deadline_seconds": 1, "default": "no"}"#;
    holder.answer(calls(&[("system_self_system_info", arguments)]));
    assert_eq!(holder.decide(), Next::Stop(Status::WaitingExternal));
    holder.end(Status::WaitingExternal).await;
    let open = history::pending(&world.store, id).await.expect("an answer");
    assert_eq!((open[0].reason.as_str(), open[0].approval), ("may I?", false));
    let sql = world.sql().await;
    let past = "UPDATE continuations SET expires_at = now() - interval '1 second'";
    sql.batch_execute(past).await.expect("moved");
    assert_eq!(settle::expire_overdue(&world.store, 10).await.expect("an answer"), 1);
    let token = Token(open[0].token);
    let late = settle::complete(&world.store, &caller(), token, &Report::Error("late".into()), true).await;
    assert!(matches!(late, Err(StoreError::TokenExpired)), "{late:?}");
    assert_eq!(told(&world, id).await, (CallState::Completed, "no".to_owned()));
}

#[tokio::test]
async fn only_calls_that_wait_for_an_approval_can_be_approved() {
    let world = World::new().await;
    let id = world.asked("ask").await;
    let mut holder = hold(&world).await;
    holder.decide();
    holder.answer(calls(&[("ask_person", "{}")]));
    holder.decide();
    holder.end(Status::WaitingExternal).await;
    let open = history::pending(&world.store, id).await.expect("an answer");
    let token = Token(open[0].token);
    let refused = settle::complete(&world.store, &caller(), token, &Report::Approval, true).await;
    assert!(matches!(refused, Err(StoreError::NothingToApprove)), "{refused:?}");

    let sql = world.sql().await;
    sql.batch_execute("UPDATE continuations SET approval = true").await.expect("made so");
    settle::complete(&world.store, &caller(), token, &Report::Approval, true).await.expect("approved");
    let again = settle::complete(&world.store, &caller(), token, &Report::Approval, true).await;
    assert!(matches!(again, Err(StoreError::TokenCompleted { same_result: true })), "{again:?}");
    let rival = settle::complete(&world.store, &caller(), token, &Report::Error("no".into()), true).await;
    assert!(matches!(rival, Err(StoreError::TokenCompleted { same_result: false })), "{rival:?}");
    let mut holder = hold(&world).await;
    let Next::RunCalls(starts) = holder.decide() else { panic!("the call runs") };
    assert_eq!(starts.len(), 1);
}

#[tokio::test]
async fn a_sleep_is_a_parked_run_that_is_due_when_it_is_over() {
    let world = World::new().await;
    let id = world.asked("sleep").await;
    let mut holder = hold(&world).await;
    holder.decide();
    let arguments = r#"{"capability": "sleep-until", "seconds": 604800}"#;
    holder.answer(calls(&[("system_self_system_info", arguments)]));
    assert_eq!(holder.decide(), Next::Park("timer"));
    let park = commit::RunAfter::Park { on: "timer".to_owned(), until: holder.until };
    holder.commit(park).await.expect("stored");
    let row = world.row(id).await;
    assert_eq!(row.parked_on.as_deref(), Some("timer"));
    let left = row.wakes_at.expect("a time") - chrono::Utc::now();
    assert!((604_000..=604_800).contains(&left.num_seconds()), "{left}");
    assert_eq!(holdfast_store::passes::promote_timers(&world.store, 10).await.expect("an answer"), 0);

    // Whoever speaks is answered, and the sleep goes on.
    accept::post(&world.store, &caller(), id, &message("hello"), holdfast_engine::decide::Mode::UntilBlocked)
        .await
        .expect("sent");
    let mut holder = hold(&world).await;
    assert_eq!(holder.decide(), Next::AskModel);
    holder.answer(says("I sleep"));
    assert_eq!(holder.decide(), Next::Park("timer"));
    let park = commit::RunAfter::Park { on: "timer".to_owned(), until: holder.until };
    holder.commit(park).await.expect("stored");

    let sql = world.sql().await;
    let over = "UPDATE runs SET available_at = now() - interval '1 second';
                UPDATE tool_calls SET expires_at = now() - interval '1 second' WHERE state = 'waiting'";
    sql.batch_execute(over).await.expect("moved");
    assert_eq!(holdfast_store::passes::promote_timers(&world.store, 10).await.expect("an answer"), 1);
    let mut holder = hold(&world).await;
    assert_eq!(holder.decide(), Next::AskModel);
}
