//! Calls that go on while the conversation does: when they are waited for, what the model is shown meanwhile, and
//! that it is told of each end once.

use holdfast_engine::{
    builtin::Helper,
    decide::{Decision, Next},
    ids::{CallId, MailId, SessionId},
    mail::{Control, MailBody, Sender},
    session::{CallState, Status},
    waits::Waits,
};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::desk::{Desk, completed, failed, short, started};

/// An agent whose `fast*` tools run in the round, whose `slow*` tools may go on in the background.
fn agent(more: &str) -> String {
    format!(
        r#"{{"slug": "desk", "flavor": "OpenAI", "modelUrl": "http://127.0.0.1", "modelName": "m", "maxConcurrency": 8,
            "builtinToolboxes": [{{"tag": "SystemToolbox", "contents": {{"Name": "self", "Capabilities":
                ["get-tool-call-status", "list-running-tool-calls", "cancel-tool-call", "wait", "sleep-until",
                 "ask-human", "send-message", "spawn-session"]}}}}],
            "toolCallPolicyConfig": {{"default": {{"tag": "runSync"}}, "rules": [
                {{"tool": "slow_ten", "disposition": {{"tag": "runAsync", "attachSeconds": 10}}}},
                {{"tool": "slow*", "disposition": {{"tag": "runAsync"}}}},
                {{"tool": "ask", "disposition": {{"tag": "defer", "reason": "a person decides"}}}}]}},
            {more}"executionMode": "asynchronous"}}"#
    )
}

const PROGRESS: &str = r#""asyncYieldStrategy": "yieldOnAnyProgress", "#;

/// A desk of [`agent`] with a helper, whose model was asked something.
fn desk(more: &str) -> Desk {
    let mut desk = Desk::of(&agent(more));
    let helper = Helper { slug: "reviewer".into(), announce: String::new() };
    desk.agent.builtins.push(helper.tool());
    desk.agent.helpers.push(helper);
    desk.says("go");
    assert_eq!(desk.decide().next, Next::AskModel);
    desk
}

/// Begins what may begin, and decides again.
fn on(desk: &mut Desk) -> Decision {
    let decision = desk.decide();
    match &decision.next {
        Next::RunCalls(starts) if !starts.is_empty() => desk.decide(),
        _ => decision,
    }
}

fn system(desk: &mut Desk, id: &str, arguments: Value) -> CallId {
    desk.answers_with(&[(id, "system_self_system_info", arguments.to_string())])[0]
}

/// The one answer of the newest turn, as JSON.
fn only_answer(desk: &Desk) -> Value {
    let shown = desk.shown();
    assert_eq!(shown.len(), 1, "{shown:?}");
    serde_json::from_str(&shown[0]).unwrap_or_else(|_| json!(shown[0]))
}

#[test]
fn all_are_waited_for_unless_told_otherwise() {
    let mut desk = desk("");
    let calls = desk.answers(&["fast", "slow_a", "slow_b"]);
    assert_eq!(on(&mut desk).next, Next::RunCalls(Vec::new()));
    for call in &calls[..2] {
        desk.ends(*call, completed("done"));
        assert_eq!(desk.decide().next, Next::RunCalls(Vec::new()), "one still runs");
    }
    desk.ends(calls[2], completed("done"));
    assert_eq!(desk.decide().next, Next::AskModel);
    assert_eq!(desk.shown(), ["done", "done", "done"]);
}

#[test]
fn a_synchronous_agent_waits_whatever_its_rules_say() {
    let text = agent(PROGRESS).replace("asynchronous", "synchronous");
    let mut desk = Desk::of(&text);
    desk.says("go");
    desk.decide();
    let calls = desk.answers(&["slow_a", "slow_ten"]);
    on(&mut desk);
    desk.ends(calls[0], completed("a"));
    desk.pass(60);
    let decision = desk.decide();
    assert_eq!((decision.next, decision.until), (Next::RunCalls(Vec::new()), None));
}

#[test]
fn on_any_progress_the_model_is_told_of_each_end_once() {
    let mut desk = desk(PROGRESS);
    let calls = desk.answers(&["fast", "slow_a", "slow_b"]);
    assert_eq!(on(&mut desk).next, Next::RunCalls(Vec::new()));
    desk.ends(calls[0], completed("fast"));
    assert_eq!(desk.decide().next, Next::AskModel, "one has ended");
    let shown = desk.shown();
    assert_eq!(shown[0], "fast");
    for (shown, id) in shown[1..].iter().zip(["p2_1", "p2_2"]) {
        let shown: Value = serde_json::from_str(shown).expect("a placeholder");
        assert_eq!((&shown["status"], &shown["tool_call_id"]), (&json!("running"), &json!(id)));
    }
    desk.run.asking = true;
    desk.ends(calls[1], completed("a"));
    assert_eq!(desk.decide().next, Next::AskModel, "it is being asked, and isn't disturbed");
    assert_eq!(desk.session.length(), 3);
    desk.answers(&[]);
    assert_eq!(desk.decide().next, Next::AskModel, "what ended meanwhile is told");
    let late = format!("[mail m-{}: tool call p2_1 (slow_a) completed]\na", short(MailId(calls[1].0)));
    assert_eq!(desk.said(), [late]);
    desk.answers(&[]);
    assert_eq!(desk.decide().next, Next::RunCalls(Vec::new()), "the run waits for the last one");
    desk.ends(calls[2], failed("b"));
    assert_eq!(desk.decide().next, Next::AskModel);
    assert_eq!(
        desk.said(),
        [format!("[mail m-{}: tool call p2_2 (slow_b) failed]\nb", short(MailId(calls[2].0)))]
    );
    desk.answers(&[]);
    assert_eq!(desk.decide().next, Next::Stop(Status::Idle));
}

#[test]
fn a_call_is_attached_for_as_long_as_its_rule_says() {
    let mut desk = desk("");
    let calls = desk.answers(&["slow_ten"]);
    let decision = on(&mut desk);
    assert_eq!(decision.next, Next::RunCalls(Vec::new()));
    let asked = desk.session.call(calls[0]).expect("tracked").created_at;
    assert_eq!(decision.until, Some(asked + chrono::TimeDelta::seconds(10)));
    desk.pass(20);
    assert_eq!(desk.decide().next, Next::AskModel, "ten seconds are over");
    desk.answers(&[]);
    assert_eq!(desk.decide().next, Next::RunCalls(Vec::new()));
    desk.ends(calls[0], completed("done"));
    assert_eq!(desk.decide().next, Next::AskModel);
    assert_eq!(desk.said().len(), 1);
}

#[test]
fn a_timeout_yields_with_whatever_there_is() {
    let mut desk = desk(r#""asyncYieldStrategy": {"tag": "yieldOnTimeout", "milliseconds": 5000}, "#);
    desk.answers(&["slow_a", "slow_b"]);
    assert!(on(&mut desk).until.is_some());
    assert_eq!(desk.decide().next, Next::RunCalls(Vec::new()));
    desk.pass(9);
    assert_eq!(desk.decide().next, Next::AskModel);
}

#[test]
fn when_all_are_waited_for_late_ends_are_told_together() {
    let mut desk = desk("");
    let calls = desk.answers(&["fast_a", "fast_b"]);
    on(&mut desk);
    desk.interrupts("how is it going?");
    assert_eq!(desk.decide().next, Next::AskModel, "an interrupt detaches what is attached");
    desk.answers(&[]);
    assert_eq!(desk.decide().next, Next::RunCalls(Vec::new()));
    desk.ends(calls[0], completed("a"));
    assert_eq!(desk.decide().next, Next::RunCalls(Vec::new()), "the other is waited for");
    desk.ends(calls[1], completed("b"));
    assert_eq!(desk.decide().next, Next::AskModel);
    assert_eq!(desk.said().len(), 2);
}

#[test]
fn mail_that_doesnt_interrupt_waits_for_what_is_attached() {
    let mut desk = desk("");
    let calls = desk.answers(&["fast"]);
    on(&mut desk);
    desk.says("and then?");
    assert_eq!(desk.decide().next, Next::RunCalls(Vec::new()));
    desk.ends(calls[0], completed("done"));
    assert_eq!(desk.decide().next, Next::AskModel);
    assert_eq!((desk.shown(), desk.said()), (vec!["done".to_owned()], vec!["and then?".to_owned()]));
}

#[test]
fn an_interrupt_in_the_middle_of_a_request_ends_it_only_where_the_agent_says_so() {
    for (more, asked) in [("", 1), (r#""interruptCompletions": true, "#, 2)] {
        let mut desk = desk(more);
        desk.run.asking = true;
        desk.interrupts("wait");
        assert_eq!(desk.decide().next, Next::AskModel);
        assert_eq!(desk.session.length(), asked, "{more}");
        desk.run.asking = true;
        desk.says("no hurry");
        assert_eq!((desk.decide().next, desk.session.length()), (Next::AskModel, asked), "no interrupt");
        desk.answers(&[]);
        assert_eq!(desk.decide().next, Next::AskModel, "the rest is told next");
        let all = if asked == 1 { vec!["wait", "no hurry"] } else { vec!["no hurry"] };
        assert_eq!(desk.said(), all);
    }
}

#[test]
fn orders_reach_a_model_request_and_the_calls_beside_it() {
    let mut desk = desk(PROGRESS);
    let calls = desk.answers(&["fast", "slow_a"]);
    on(&mut desk);
    desk.ends(calls[0], completed("fast"));
    desk.decide();
    desk.run.asking = true;
    desk.order(Control::Pause);
    assert_eq!(desk.decide().next, Next::AskModel, "a pause lets the step end");
    desk.answers(&[]);
    assert_eq!(desk.decide().next, Next::RunCalls(Vec::new()), "and the calls come home");
    desk.order(Control::StopRun);
    assert_eq!(desk.decide().next, Next::Stop(Status::Paused));
    assert_eq!(desk.state(calls[1]), CallState::Cancelled);
}

#[test]
fn cancelling_what_is_attached_leaves_the_background_alone() {
    let mut desk = desk(PROGRESS);
    let first = desk.answers(&["fast", "slow_a"]);
    on(&mut desk);
    desk.ends(first[0], completed("fast"));
    desk.decide();
    let second = desk.answers(&["fast"]);
    on(&mut desk);
    desk.order(Control::CancelAllAttached);
    assert_eq!(desk.decide().next, Next::AskModel);
    assert_eq!((desk.state(second[0]), desk.state(first[1])), (CallState::Cancelled, CallState::Running));
    assert!(only_answer(&desk).as_str().is_some_and(|text| text.starts_with("cancelled:")));
}

#[test]
fn a_status_says_how_a_call_is_going_and_its_result_is_told_once() {
    let mut desk = desk(PROGRESS);
    let calls = desk.answers(&["fast", "slow_a"]);
    on(&mut desk);
    desk.ends(calls[0], completed("fast"));
    desk.decide();
    system(&mut desk, "s1", json!({"capability": "get-tool-call-status", "tool_call_id": "p2_1"}));
    assert_eq!(on(&mut desk).next, Next::AskModel);
    let status = only_answer(&desk);
    assert_eq!((&status["status"], &status["is_final"]), (&json!("running"), &json!(false)));
    desk.run.asking = true;
    desk.ends(calls[1], completed("the answer"));
    desk.decide();
    system(&mut desk, "s2", json!({"capability": "get-tool-call-status", "tool_call_id": "p2_1"}));
    assert_eq!(on(&mut desk).next, Next::AskModel);
    let status = only_answer(&desk);
    assert_eq!((&status["status"], &status["result"]), (&json!("completed"), &json!("the answer")));
    let said = desk.said();
    assert!(said.len() == 1 && said[0].ends_with("You have read its result already."), "{said:?}");
    assert!(!said[0].contains("the answer"));
    desk.answers(&[]);
    assert_eq!(desk.decide().next, Next::Stop(Status::Idle));
}

#[test]
fn a_status_of_a_call_long_past_and_of_none_are_told_apart() {
    let mut desk = desk("");
    let call = desk.answers(&["fast"])[0];
    on(&mut desk);
    desk.ends(call, failed("no"));
    desk.decide();
    system(&mut desk, "s1", json!({"capability": "get-tool-call-status", "tool_call_id": "p2_0"}));
    on(&mut desk);
    assert_eq!(only_answer(&desk)["status"], "failed");
    system(&mut desk, "s2", json!({"capability": "get-tool-call-status", "tool_call_id": "p99"}));
    on(&mut desk);
    assert_eq!(only_answer(&desk), json!("no call \"p99\" was made in this session"));
    system(&mut desk, "s3", json!({"capability": "cancel-tool-call", "tool_call_id": "p2_0"}));
    on(&mut desk);
    assert_eq!(only_answer(&desk)["cancelled"], false);
}

#[test]
fn a_wait_ends_with_its_call_with_mail_or_with_its_time() {
    let with = |then: &dyn Fn(&mut Desk, CallId), expected: Value| {
        let mut desk = desk(PROGRESS);
        let calls = desk.answers(&["fast", "slow_a"]);
        on(&mut desk);
        desk.ends(calls[0], completed("fast"));
        desk.decide();
        let arguments = json!({"capability": "wait", "for": ["p2_1"], "timeout_seconds": 20});
        let wait = system(&mut desk, "w", arguments);
        let decision = on(&mut desk);
        assert_eq!(decision.next, Next::RunCalls(Vec::new()), "it waits beside what runs");
        assert!(decision.until.is_some());
        assert_eq!(desk.state(wait), CallState::Waiting);
        then(&mut desk, calls[1]);
        assert_eq!(desk.decide().next, Next::AskModel, "{expected}");
        let answer = only_answer(&desk);
        assert_eq!(answer["woken_by"], expected, "{answer}");
        desk
    };
    let ended = with(&|desk, slow| drop(desk.ends(slow, completed("a"))), json!("call"));
    assert_eq!(ended.said().len(), 1, "the result is told in the same turn");
    let written = with(&|desk, _| assert_ne!(desk.writes("hello", 0).0, Uuid::nil()), json!("mail"));
    assert!(written.said()[0].ends_with("hello"), "the mail is told in the same turn");
    with(&|desk, _| desk.pass(30), json!("timeout"));
    with(&|desk, _| desk.interrupts("stop waiting"), json!("mail"));
}

#[test]
fn a_wait_alone_parks_the_run_and_waiting_for_nothing_returns() {
    let mut desk = desk("");
    system(&mut desk, "w", json!({"capability": "wait", "for": "mail", "timeout_seconds": 9999}));
    let decision = on(&mut desk);
    assert_eq!(decision.next, Next::Park("wait"));
    let most = desk.now() + chrono::TimeDelta::seconds(300);
    assert_eq!(decision.until, Some(most), "no wait is longer than the agent allows");
    desk.says("hello");
    assert_eq!(desk.decide().next, Next::AskModel);
    system(&mut desk, "w2", json!({"capability": "wait", "for": "any-call"}));
    assert_eq!(on(&mut desk).next, Next::AskModel);
    assert_eq!(only_answer(&desk)["woken_by"], "nothing");
}

#[test]
fn a_sleep_parks_the_run_and_a_person_may_speak_meanwhile() {
    let mut desk = desk("");
    let sleep = system(&mut desk, "z", json!({"capability": "sleep-until", "seconds": 86_400}));
    let decision = on(&mut desk);
    assert_eq!(decision.next, Next::Park("timer"));
    let until = decision.until.expect("a time");
    assert_eq!(until, desk.now() + chrono::TimeDelta::seconds(86_400));
    desk.says("are you there?");
    assert_eq!(desk.decide().next, Next::AskModel, "whoever speaks isn't kept waiting");
    assert_eq!(only_answer(&desk)["status"], "waiting");
    desk.answers(&[]);
    assert_eq!(desk.decide().next, Next::Park("timer"));
    desk.pass(86_400);
    assert_eq!(desk.decide().next, Next::AskModel);
    assert!(desk.said()[0].contains("woken_by"), "{:?}", desk.said());
    desk.answers(&[]);
    assert_eq!(desk.decide().next, Next::Stop(Status::Idle));
    assert!(desk.session.call(sleep).is_none_or(|call| call.told_result));
}

#[test]
fn a_question_to_a_person_is_a_deferred_call_with_its_terms() {
    let mut desk = desk("");
    let arguments = json!({"capability": "ask-human", "question": "ship it?", "choices": ["yes", "no"],
        "deadline_seconds": 60, "default": "no"});
    let call = system(&mut desk, "q", arguments);
    let decision = on(&mut desk);
    assert_eq!(decision.next, Next::Stop(Status::WaitingExternal));
    let terms = decision.events.iter().find_map(|event| match event {
        holdfast_engine::session::Event::Deferred { terms, expires_at, .. } => {
            Some((terms.clone(), *expires_at))
        }
        _ => None,
    });
    let (terms, expires_at) = terms.expect("deferred");
    assert_eq!(terms.reason, "ship it?");
    assert_eq!(terms.on_deadline.map(|answer| answer.as_text()), Some("no".to_owned()));
    assert_eq!(expires_at, Some(desk.now() + chrono::TimeDelta::seconds(60)));
    desk.result(call, "yes");
    assert_eq!(desk.decide().next, Next::AskModel);
    assert_eq!(desk.shown(), ["yes"]);
}

#[test]
fn a_helper_is_a_child_session_that_parks_its_parent() {
    let mut desk = desk("");
    let what = json!({"what": "review it"}).to_string();
    let call = desk.answers_with(&[("h", "prompt_agent_reviewer", what)])[0];
    let decision = on(&mut desk);
    assert_eq!((decision.next, decision.until), (Next::Park("child"), None));
    let [spawn] = &decision.spawns[..] else { panic!("one child: {:?}", decision.spawns) };
    assert_eq!((spawn.agent.as_str(), spawn.call, spawn.id.0), ("reviewer", Some(call), call.0));
    let text = |body: &MailBody| serde_json::to_value(body).expect("JSON");
    assert_eq!(text(&spawn.body)["query"]["text"], "review it");
    desk.says("hurry");
    assert_eq!(desk.decide().next, Next::Park("child"), "it is waited for");
    desk.post(MailBody::ToolCallFinished { tool_call_id: call, settled: completed("looks good") });
    assert_eq!(desk.decide().next, Next::AskModel);
    assert_eq!((desk.shown(), desk.said()), (vec!["looks good".to_owned()], vec!["hurry".to_owned()]));
}

#[test]
fn a_child_that_nobody_waits_for_any_more_is_let_go() {
    let what = || json!({"what": "review it"}).to_string();
    let mut stopped = desk("");
    let call = stopped.answers_with(&[("h", "prompt_agent_reviewer", what())])[0];
    on(&mut stopped);
    stopped.order(Control::CancelAllAttached);
    let decision = stopped.decide();
    assert_eq!((decision.next, decision.dismissed.len()), (Next::AskModel, 1));
    assert_eq!(decision.dismissed[0].0, call.0);

    let mut late = desk(r#""asyncCallTimeoutSeconds": 60, "#);
    late.answers_with(&[("h", "prompt_agent_reviewer", what())]);
    assert!(on(&mut late).until.is_some());
    late.pass(61);
    let decision = late.decide();
    assert_eq!((decision.next, decision.dismissed.len()), (Next::AskModel, 1));
    assert!(late.shown()[0].contains("timed out"));

    let mut cancelled = desk("");
    cancelled.answers_with(&[
        ("h", "prompt_agent_reviewer", what()),
        (
            "c",
            "system_self_system_info",
            json!({"capability": "cancel-tool-call", "tool_call_id": "h"}).to_string(),
        ),
    ]);
    let decision = on(&mut cancelled);
    assert_eq!((decision.next, decision.dismissed.len()), (Next::AskModel, 1));
}

#[test]
fn sessions_go_only_so_deep() {
    let mut desk = desk(r#""maxRecursionDepth": 2, "#);
    desk.session.stack = vec!["root".into(), "desk".into()];
    desk.answers_with(&[("h", "prompt_agent_reviewer", json!({"what": "x"}).to_string())]);
    let decision = on(&mut desk);
    assert_eq!((decision.next, decision.spawns.len()), (Next::AskModel, 0));
    assert!(desk.shown()[0].contains("root > desk > desk"), "{:?}", desk.shown());
}

#[test]
fn a_session_that_is_started_answers_by_mail() {
    let mut desk = desk("");
    let arguments = json!({"capability": "spawn-session", "agent": "reviewer", "message": "look at it"});
    let call = system(&mut desk, "s", arguments);
    let decision = on(&mut desk);
    assert_eq!(decision.next, Next::AskModel, "it isn't waited for");
    let [spawn] = &decision.spawns[..] else { panic!("one session") };
    assert_eq!((spawn.call, spawn.hops), (None, 0));
    assert_eq!(only_answer(&desk)["session_id"], json!(call));
    system(&mut desk, "s2", json!({"capability": "spawn-session", "agent": "nobody", "message": "x"}));
    on(&mut desk);
    assert_eq!(only_answer(&desk), json!("there is no agent \"nobody\" to start; there are: reviewer"));
}

#[test]
fn hops_are_counted_from_the_letter_that_is_answered() {
    let mut desk = desk("");
    assert_eq!(holdfast_engine::decide::hops(&desk.session), 0, "a person has spoken");
    desk.answers(&[]);
    desk.writes("hello", 4);
    desk.decide();
    assert_eq!(holdfast_engine::decide::hops(&desk.session), 5);
    let call = desk.answers(&["fast"])[0];
    on(&mut desk);
    desk.ends(call, completed("x"));
    desk.decide();
    assert_eq!(holdfast_engine::decide::hops(&desk.session), 5, "results change nothing");
    desk.answers(&[]);
    desk.writes("again", 6);
    desk.says("enough");
    desk.decide();
    assert_eq!(holdfast_engine::decide::hops(&desk.session), 0, "a person has spoken");
}

#[test]
fn mail_may_stand_in_the_last_result() {
    for inside in [false, true] {
        let mut desk = desk(if inside { r#""mailInToolResult": true, "# } else { "" });
        let call = desk.answers(&["fast"])[0];
        on(&mut desk);
        desk.says("and then?");
        desk.decide();
        desk.ends(call, completed("done"));
        desk.decide();
        let request = format!("{:?}", desk.request().messages.last().expect("a message"));
        let expected = if inside { r#"text: "done\n\nand then?""# } else { r#"User { text: "and then?""# };
        assert!(request.contains(expected), "{request}");
    }
}

#[test]
fn a_pause_may_end_the_calls_that_run() {
    let mut desk = desk(r#""pauseCancelsCalls": true, "#);
    let call = desk.answers(&["fast"])[0];
    on(&mut desk);
    desk.order(Control::Pause);
    assert_eq!(desk.decide().next, Next::Stop(Status::Paused));
    assert!(desk.session.call(call).is_none_or(|call| call.state == CallState::Cancelled));
}

#[test]
fn what_waits_outlives_its_worker_and_what_ran_does_not() {
    let mut desk = desk(PROGRESS);
    let what = json!({"what": "review it"}).to_string();
    let calls = desk.answers_with(&[("h", "prompt_agent_reviewer", what), ("f", "fast", "{}".into())]);
    on(&mut desk);
    let now = desk.now();
    let events = holdfast_engine::decide::recover(&mut desk.session, now).expect("legal");
    assert_eq!(events.len(), 1, "{events:?}");
    assert_eq!((desk.state(calls[0]), desk.state(calls[1])), (CallState::Waiting, CallState::Failed));
    assert!(matches!(desk.session.call(calls[0]).expect("tracked").waits, Some(Waits::Child { .. })));
    desk.reload();
    assert_eq!(desk.decide().next, Next::Park("child"));
}

#[test]
fn a_held_session_doesnt_park() {
    let mut desk = desk("");
    desk.answers_with(&[("h", "prompt_agent_reviewer", json!({"what": "x"}).to_string())]);
    on(&mut desk);
    desk.order(Control::Pause);
    assert_eq!(desk.decide().next, Next::Stop(Status::Paused), "the child goes on, the session is held");
    desk.order(Control::Resume);
    assert_eq!(desk.decide().next, Next::Park("child"));
}

#[test]
fn an_approved_call_runs_with_its_token_used_up() {
    let mut desk = desk("");
    let call = desk.answers(&["ask"])[0];
    on(&mut desk);
    assert_eq!(desk.state(call), CallState::Deferred);
    desk.post(MailBody::Approved { tool_call_id: call });
    desk.post(MailBody::Approved { tool_call_id: call });
    assert_eq!(started(&desk.decide().next), [call]);
    desk.ends(call, completed("done"));
    assert_eq!(desk.decide().next, Next::AskModel);
    assert_eq!(desk.shown(), ["done"]);
}

/// A desk whose helper goes on in the background, and the call of it.
fn detached() -> (Desk, CallId) {
    let mut desk = desk("");
    let what = json!({"what": "review it"}).to_string();
    let call = desk.answers_with(&[("h", "prompt_agent_reviewer", what)])[0];
    on(&mut desk);
    desk.interrupts("how is it going?");
    assert_eq!(desk.decide().next, Next::AskModel);
    desk.answers(&[]);
    assert_eq!(desk.decide().next, Next::Park("child"));
    (desk, call)
}

#[test]
fn a_call_that_is_ended_before_its_turn_never_begins() {
    let what = || json!({"what": "review it"}).to_string();
    for tool in ["prompt_agent_reviewer", "ask", "fast"] {
        let mut desk = desk("");
        let cancel = json!({"capability": "cancel-tool-call", "tool_call_id": "h"}).to_string();
        let calls = desk.answers_with(&[("c", "system_self_system_info", cancel), ("h", tool, what())]);
        let decision = on(&mut desk);
        assert_eq!((decision.next, decision.spawns.len()), (Next::AskModel, 0), "{tool}");
        assert_eq!(desk.state(calls[1]), CallState::Cancelled);
        assert!(desk.shown()[0].contains("\"cancelled\":true"), "{:?}", desk.shown());
    }
}

#[test]
fn what_begins_is_shown_as_begun() {
    let mut desk = Desk::of(&agent("").replace("\"attachSeconds\": 10", "\"attachSeconds\": 0"));
    desk.says("go");
    desk.decide();
    let call = desk.answers(&["slow_ten"])[0];
    assert_eq!(started(&desk.decide().next), [call]);
    assert_eq!(only_answer(&desk)["status"], "running");
}

#[test]
fn a_child_that_somebody_else_has_stopped_is_told_of() {
    let (mut desk, call) = detached();
    let settled = holdfast_engine::mail::Settled::Cancelled { message: "by a person".into() };
    desk.post(MailBody::ToolCallFinished { tool_call_id: call, settled });
    assert_eq!(desk.decide().next, Next::AskModel);
    assert!(desk.said()[0].ends_with("(prompt_agent_reviewer) cancelled]"), "{:?}", desk.said());
    desk.answers(&[]);
    assert_eq!(desk.decide().next, Next::Stop(Status::Idle));
}

#[test]
fn the_past_is_told_as_it_was() {
    for (settled, word) in [(completed("x"), "completed"), (failed("x"), "failed")] {
        let (mut desk, call) = detached();
        desk.post(MailBody::ToolCallFinished { tool_call_id: call, settled });
        desk.sent_by(Sender::Session { session_id: SessionId(call.0), agent: None }, 0);
        assert_eq!(desk.decide().next, Next::AskModel);
        assert_eq!(desk.said().len(), 1);
        for ask in [
            json!({"capability": "get-tool-call-status", "tool_call_id": "h"}),
            json!({"capability": "wait", "for": ["h"]}),
        ] {
            system(&mut desk, "s", ask);
            assert_eq!(on(&mut desk).next, Next::AskModel);
            let answer = only_answer(&desk);
            assert_eq!((&answer["status"], &answer["tool_call_id"]), (&json!(word), &json!("h")));
        }
    }
}

#[test]
fn a_call_is_not_its_own_past() {
    let mut desk = desk("");
    system(&mut desk, "s", json!({"capability": "get-tool-call-status", "tool_call_id": "s"}));
    assert_eq!(on(&mut desk).next, Next::AskModel);
    assert_eq!(only_answer(&desk), json!("no call \"s\" was made in this session"));
}

#[test]
fn a_helpers_task_is_a_letter_of_its_caller() {
    let mut desk = desk("");
    desk.answers(&[]);
    desk.writes("hello", 4);
    desk.decide();
    desk.answers_with(&[("h", "prompt_agent_reviewer", json!({"what": "x"}).to_string())]);
    let spawn = desk.decide().spawns.remove(0);
    assert_eq!(spawn.hops, 5);
    let mut child = Desk::of(&agent(""));
    child.post(spawn.body);
    child.sent_by(Sender::Session { session_id: desk.session.id, agent: None }, spawn.hops);
    child.decide();
    assert_eq!(holdfast_engine::decide::hops(&child.session), 6, "no person has spoken");
}

#[test]
fn having_read_that_a_call_was_cancelled_is_not_having_read_its_result() {
    let (mut desk, call) = detached();
    desk.says("stop it");
    assert_eq!(desk.decide().next, Next::AskModel);
    let of = |capability: &str| json!({"capability": capability, "tool_call_id": "h"}).to_string();
    let name = "system_self_system_info";
    let calls = desk.answers_with(&[
        ("c", name, of("cancel-tool-call")),
        ("s", name, of("get-tool-call-status")),
        ("f", "fast", "{}".into()),
    ]);
    assert_eq!(on(&mut desk).next, Next::RunCalls(Vec::new()));
    assert_eq!(desk.state(call), CallState::Cancelled);
    // It had ended before it was told to stop.
    desk.post(MailBody::ToolCallFinished { tool_call_id: call, settled: completed("looks good") });
    desk.sent_by(Sender::Session { session_id: SessionId(call.0), agent: None }, 0);
    desk.ends(calls[2], completed("done"));
    assert_eq!(desk.decide().next, Next::AskModel);
    assert!(desk.said()[0].ends_with("completed]\nlooks good"), "{:?}", desk.said());
}

#[test]
fn a_wait_for_a_wait_ends_with_it() {
    let mut desk = desk("");
    let of = |value: Value| value.to_string();
    let name = "system_self_system_info";
    desk.answers_with(&[
        ("a", name, of(json!({"capability": "wait", "for": ["b"], "timeout_seconds": 200}))),
        ("b", name, of(json!({"capability": "sleep-until", "seconds": 5}))),
        ("c", name, of(json!({"capability": "wait", "for": ["a"], "timeout_seconds": 200}))),
    ]);
    assert_eq!(on(&mut desk).next, Next::Park("timer"));
    desk.pass(5);
    assert_eq!(desk.decide().next, Next::AskModel, "all three have ended");
    assert!(desk.shown().iter().all(|shown| shown.contains("woken_by")), "{:?}", desk.shown());
}

#[test]
fn that_a_run_was_stopped_outlives_its_worker() {
    use holdfast_engine::decide::{Mode, was_stopped};
    let mut desk = desk("");
    desk.answers(&["fast"]);
    on(&mut desk);
    desk.order(Control::StopRun);
    desk.decide();
    desk.reload();
    assert_eq!(desk.decide().next, Next::Stop(Status::Ready));
    assert!(was_stopped(&desk.session, desk.run.mode));
    desk.order(Control::Resume);
    desk.decide();
    assert!(!was_stopped(&desk.session, desk.run.mode));
    (desk.run.mode, desk.run.steps) = (Mode::Step, 1);
    desk.decide();
    assert!(!was_stopped(&desk.session, desk.run.mode), "a step that has ended was not stopped");
}

#[test]
fn what_a_worker_that_leaves_may_not_begin_is_left_to_another_one() {
    for waits in [false, true] {
        let mut desk = desk("");
        desk.agent.max_concurrency = 1;
        let mut asked = vec![("a", "fast_a", "{}".to_owned()), ("b", "fast_b", "{}".to_owned())];
        let sleep = json!({"capability": "sleep-until", "seconds": 500}).to_string();
        asked.extend(waits.then_some(("c", "system_self_system_info", sleep)));
        let calls = desk.answers_with(&asked);
        on(&mut desk);
        assert_eq!((desk.state(calls[0]), desk.state(calls[1])), (CallState::Running, CallState::Ready));
        desk.agent.max_concurrency = 0;
        desk.order(Control::CancelCalls { tool_call_ids: vec![calls[0]] });
        assert_eq!(desk.decide().next, Next::RunCalls(Vec::new()), "neither parked nor ended: {waits}");
        desk.agent.max_concurrency = 1;
        assert_eq!(started(&desk.decide().next), [calls[1]]);
    }
}

#[test]
fn a_run_that_is_to_pause_asks_nothing_new_whoever_interrupts() {
    let mut desk = desk(r#""interruptCompletions": true, "#);
    desk.run.asking = true;
    let before = desk.session.length();
    desk.order(Control::Pause);
    assert_eq!(desk.decide().next, Next::AskModel, "the step that goes on comes to its end");
    desk.interrupts("now!");
    assert_eq!(desk.decide().next, Next::AskModel);
    assert_eq!(desk.session.length(), before, "the request is the same one");
    desk.answers(&[]);
    assert_eq!(desk.decide().next, Next::Stop(Status::Paused));
}
