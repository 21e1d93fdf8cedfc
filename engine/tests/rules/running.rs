//! Calls that run here: how many at once, and what waits meanwhile.

use holdfast_engine::{
    decide::{self, Decision, Next},
    mail::{Control, MailBody},
    session::{Event, Status},
};

use crate::desk::{Desk, completed, started};

#[test]
fn no_more_calls_run_at_once_than_the_agent_allows() {
    let mut desk = Desk::with_calls(&["run", "again", "run", "run", "ask"]);
    let calls = desk.calls();
    let decision = desk.decide();
    assert_eq!(started(&decision.next), calls[..2], "in order");
    assert_eq!(desk.decide().next, Next::RunCalls(Vec::new()));
    desk.ends(calls[1], completed("b"));
    assert_eq!(started(&desk.decide().next), [calls[2]]);
    desk.ends(calls[0], completed("a"));
    desk.ends(calls[2], completed("c"));
    assert_eq!(started(&desk.decide().next), [calls[3]]);
    desk.ends(calls[3], completed("d"));
    assert_eq!(desk.decide().next, Next::Stop(Status::WaitingExternal));
    desk.result(calls[4], "e");
    assert_eq!(desk.decide().next, Next::AskModel);
    assert_eq!(desk.shown(), ["a", "b", "c", "d", "e"], "answers stand in the order of the calls");
}

#[test]
fn a_start_says_what_a_runner_needs() {
    let mut desk = Desk::with_calls(&["run", "again"]);
    let Next::RunCalls(starts) = desk.decide().next else { panic!("the calls run") };
    assert_eq!((starts[0].idempotent, starts[1].idempotent), (false, true));
    assert_eq!(starts[0].timeout_seconds, Some(9), "the agent's");
    assert_eq!(starts[1].timeout_seconds, Some(5), "the rule's");
    assert!(starts.iter().all(|start| Some(start.turn) == desk.session.head().map(|turn| turn.id)));
    assert_eq!((starts[1].name.as_str(), starts[1].arguments.as_str()), ("again", "{}"));
}

#[test]
fn a_start_says_whether_the_call_has_no_effect_but_its_result() {
    let agent = |extra: &str| {
        format!(
            r#"{{"slug": "desk", "flavor": "OpenAI", "modelUrl": "http://127.0.0.1", "modelName": "m",
            "toolCallPolicyConfig": {{"rules": [
                {{"tool": "look", "disposition": {{"tag": "runSync"}}, "readOnly": true}},
                {{"tool": "ask", "disposition": {{"tag": "runAsync"}}, "readOnly": true}},
                {{"tool": "run", "disposition": {{"tag": "runSync"}}, "idempotent": true}}]{extra}}}}}"#
        )
    };
    let reads = |extra: &str| {
        let mut desk = Desk::of(&agent(extra));
        desk.says("hello");
        desk.decide();
        desk.answers(&["look", "ask", "run"]);
        let Next::RunCalls(starts) = desk.decide().next else { panic!("the calls run") };
        assert!(starts.iter().all(|start| start.idempotent), "what only reads may run again");
        starts.iter().map(|start| start.only_reads).collect::<Vec<bool>>()
    };
    assert_eq!(reads(""), [true, false, false]);
    let wrapped = |decorator: &str| format!(r#", "wrappers": [{{"decorators": [{decorator}]}}]"#);
    for silent in [
        r#"{"tag": "timeout", "seconds": 5}"#,
        r#"{"tag": "retries", "count": 1}"#,
        r#"{"tag": "cache"}"#,
        r#"{"tag": "label", "text": "l"}"#,
        r#"{"tag": "truncate", "maxBytes": 1024}"#,
    ] {
        assert_eq!(reads(&wrapped(silent)), [true, false, false], "{silent}");
    }
    for heard in [
        r#"{"tag": "before", "hook": {"command": "h"}}"#,
        r#"{"tag": "after", "hook": {"command": "h"}}"#,
        r#"{"tag": "rateLimit", "perMinute": 1}"#,
    ] {
        assert_eq!(reads(&wrapped(heard)), [false; 3], "{heard}");
    }
}

#[test]
fn what_the_engine_carries_out_never_only_reads() {
    let mut desk = Desk::of(
        r#"{"slug": "desk", "flavor": "OpenAI", "modelUrl": "http://127.0.0.1", "modelName": "m",
            "builtinToolboxes": [{"tag": "SystemToolbox", "contents": {"Name": "self",
                "Capabilities": ["send-message"]}}],
            "toolCallPolicyConfig": {"rules": [
                {"tool": "*", "disposition": {"tag": "runSync"}, "readOnly": true}]}}"#,
    );
    desk.says("hello");
    desk.decide();
    let letter = r#"{"capability": "send-message", "to": "parent", "text": "hello"}"#.to_owned();
    desk.answers_with(&[("a", "look", "{}".into()), ("b", "system_self_system_info", letter)]);
    let Next::RunCalls(starts) = desk.decide().next else { panic!("the calls run") };
    let starts: Vec<(bool, bool)> = starts.iter().map(|start| (start.idempotent, start.only_reads)).collect();
    assert_eq!(starts, [(true, true), (true, false)], "a letter is stored before it is sent");
}

#[test]
fn calls_begin_unstored_if_they_only_read_and_the_model_is_shown_nothing() {
    let agent = r#"{"slug": "desk", "flavor": "OpenAI", "modelUrl": "http://127.0.0.1", "modelName": "m",
        "maxConcurrency": 2, "executionMode": "asynchronous", "asyncYieldStrategy": "yieldOnAnyProgress",
        "toolCallPolicyConfig": {"default": {"tag": "runSync"}, "rules": [
            {"tool": "slow", "disposition": {"tag": "runAsync"}},
            {"tool": "look", "disposition": {"tag": "runSync"}, "readOnly": true}]}}"#;
    let round = |tools: &[&str]| {
        let mut desk = Desk::of(agent);
        desk.says("hello");
        desk.decide();
        let calls = desk.answers(tools);
        (desk, calls)
    };
    let may = |decision: &Decision| match &decision.next {
        Next::RunCalls(starts) => decide::may_begin_unstored(starts, &decision.events),
        other => panic!("no calls begin: {other:?}"),
    };
    assert!(may(&round(&["look", "look"]).0.decide()));
    assert!(!may(&round(&["look", "run"]).0.decide()), "one of them may have effects");
    // A place gets free, and somebody interrupts: what has ended is told as the next call begins.
    let (mut desk, calls) = round(&["slow", "slow", "look"]);
    desk.decide();
    desk.ends(calls[0], completed("done"));
    desk.interrupts("well?");
    let decision = desk.decide();
    assert!(decision.events.iter().any(|event| matches!(event, Event::Sealed(_))), "{decision:?}");
    assert_eq!(started(&decision.next), [calls[2]]);
    assert!(!may(&decision), "the store has to learn how the first one ended");
    assert!(desk.session.call(calls[0]).is_some_and(|call| call.told_result));
    // Whatever happens before that is stored.
    let again = desk.decide_unstored();
    assert!(desk.session.call(calls[0]).is_some(), "{again:?}");
}

#[test]
fn mail_waits_while_calls_run_and_is_told_once_in_order() {
    let mut desk = Desk::with_calls(&["run"]);
    let call = desk.calls()[0];
    desk.decide();
    desk.says("one");
    let decision = desk.decide();
    assert_eq!(decision.next, Next::RunCalls(Vec::new()));
    assert!(matches!(&decision.events[..], [Event::Folded { cursor: 2, left }] if left.len() == 1));
    desk.post(MailBody::AgentMessage { text: "two".into(), in_reply_to: None, expects_reply: true });
    desk.says("three");
    desk.decide();
    assert_eq!(desk.session.left.len(), 3);
    desk.ends(call, completed("done"));
    assert_eq!(desk.decide().next, Next::AskModel);
    assert_eq!(desk.shown(), ["done"]);
    let said = desk.said();
    assert_eq!((said[0].as_str(), said[2].as_str()), ("one", "three"));
    assert!(said[1].contains("expects reply]\ntwo"), "{said:?}");
    let origins: Vec<i64> = desk.user().mail.iter().map(|origin| origin.seq).collect();
    assert_eq!(origins, [2, 3, 4]);
    assert!(desk.session.left.is_empty());
}

#[test]
fn mail_that_was_considered_is_not_considered_again() {
    let mut desk = Desk::new();
    desk.says("one");
    desk.decide();
    let before = desk.session.length();
    desk.session.cursor = 5;
    desk.says("numbered 2, below the cursor");
    assert!(desk.decide().events.is_empty());
    assert_eq!(desk.session.length(), before);
}

#[test]
fn a_letter_that_was_read_twice_at_once_is_told_once() {
    let mut desk = Desk::with_calls(&["run"]);
    desk.decide();
    desk.says("one");
    desk.repeats();
    desk.decide();
    desk.ends(desk.calls()[0], completed("done"));
    assert_eq!(desk.decide().next, Next::AskModel);
    assert_eq!(desk.said(), ["one"]);
}

#[test]
fn a_question_that_was_not_answered_yet_stays_when_another_comes() {
    let mut desk = Desk::new();
    desk.says("one");
    desk.decide();
    desk.says("two");
    assert_eq!(desk.decide().next, Next::AskModel);
    assert_eq!((desk.session.length(), desk.said()), (2, vec!["two".to_owned()]));
}

#[test]
fn deciding_again_without_news_changes_nothing() {
    let mut desk = Desk::with_calls(&["ask"]);
    for order in [None, Some(Control::Pause), Some(Control::StopRun), Some(Control::Resume)] {
        if let Some(order) = order {
            desk.order(order);
        }
        let first = desk.decide();
        let again = desk.decide();
        assert_eq!(first.next, again.next);
        assert!(again.events.is_empty() && again.blobs.is_empty(), "{again:?}");
    }
}
