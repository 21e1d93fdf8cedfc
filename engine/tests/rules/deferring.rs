//! Calls that are completed outside: in any order, too late, twice, or in spite of a cancel.

use chrono::TimeDelta;
use holdfast_engine::{
    decide::Next,
    ids::{CallId, MailId},
    mail::{Control, MailBody, Settled},
    model::Message,
    session::{CallState, Hold, Status},
};
use uuid::Uuid;

use crate::desk::{Desk, completed, failed, short, started};

/// The ways in which one local and two deferred calls can end.
const ORDERS: [[usize; 3]; 6] = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];

#[test]
fn the_model_is_asked_once_when_all_three_calls_have_ended() {
    for order in ORDERS {
        let mut desk = Desk::with_calls(&["run", "ask", "sign"]);
        let calls = desk.calls();
        assert_eq!(started(&desk.decide().next), [calls[0]]);
        let mut asked = 0;
        for which in order {
            match which {
                0 => drop(desk.ends(calls[0], completed("r0"))),
                _ => drop(desk.result(calls[which], &format!("r{which}"))),
            }
            asked += usize::from(desk.decide().next == Next::AskModel);
        }
        assert_eq!(asked, 1, "{order:?}");
        assert_eq!(desk.shown(), ["r0", "r1", "r2"], "{order:?}");
        assert!(desk.said().is_empty(), "each result is told once: {:?}", desk.said());
        assert!(desk.session.calls.iter().all(|call| call.told_result && call.told == Some(3)));
        desk.decide();
        assert!(desk.session.calls.is_empty(), "calls that were told are tracked no longer");
        assert_eq!(desk.session.length(), 3);
    }
}

#[test]
fn a_deferred_call_has_a_token_of_its_own_and_maybe_a_deadline() {
    let mut desk = Desk::with_calls(&["ask", "sign", "ask"]);
    assert_eq!(desk.decide().next, Next::Stop(Status::WaitingExternal));
    let calls = &desk.session.calls;
    let mut tokens: Vec<_> = calls.iter().filter_map(|call| call.token).collect();
    tokens.dedup();
    assert_eq!(tokens.len(), 3);
    assert_eq!(calls[0].expires_at, None);
    assert_eq!(calls[1].expires_at, Some(desk.now() + TimeDelta::seconds(60)));
    assert!(calls.iter().all(|call| call.attempt == 0), "a deferred call isn't begun");
}

#[test]
fn a_message_asks_the_model_over_open_calls_and_their_results_come_as_mail() {
    let mut desk = Desk::with_calls(&["ask", "sign"]);
    let calls = desk.calls();
    desk.decide();
    desk.says("hurry");
    assert_eq!(desk.decide().next, Next::AskModel);
    let shown = desk.shown();
    let first: serde_json::Value = serde_json::from_str(&shown[0]).expect("placeholders are JSON");
    assert_eq!(first["status"], "deferred");
    assert_eq!(first["tool_call_id"], "p2_0");
    assert_eq!(first["reason"], "a person decides");
    assert!(first["message"].as_str().is_some_and(|text| text.contains("later")), "{first}");
    let second: serde_json::Value = serde_json::from_str(&shown[1]).expect("placeholders are JSON");
    assert_eq!(second.get("reason"), None, "an empty reason isn't shown");
    assert_eq!(desk.said(), ["hurry"]);

    desk.answers(&[]);
    assert_eq!(desk.decide().next, Next::Stop(Status::WaitingExternal));
    let letter = desk.result(calls[1], "signed");
    assert_eq!(desk.decide().next, Next::AskModel);
    assert_eq!(desk.said(), [format!("[mail m-{}: tool call p2_1 (sign) completed]\nsigned", short(letter))]);
    assert!(desk.shown().is_empty());
    desk.answers(&[]);
    let letter = desk.post(MailBody::ContinuationResult { tool_call_id: calls[0], settled: failed("no") });
    assert_eq!(desk.decide().next, Next::AskModel);
    assert_eq!(desk.said(), [format!("[mail m-{}: tool call p2_0 (ask) failed]\nno", short(letter))]);
    desk.answers(&[]);
    assert_eq!(desk.decide().next, Next::Stop(Status::Idle));
    let tools = desk.request().messages.iter().filter(|m| matches!(***m, Message::Tool { .. })).count();
    assert_eq!(tools, 2, "a late result is no second tool message");
}

#[test]
fn repeats_of_results_say_nothing_at_any_time() {
    let mut desk = Desk::with_calls(&["ask", "sign"]);
    let calls = desk.calls();
    desk.decide();
    desk.result(calls[0], "first");
    desk.result(calls[0], "repeat before the answer");
    assert_eq!(desk.decide().next, Next::Stop(Status::WaitingExternal));
    assert!(desk.session.left.is_empty());
    desk.says("and?");
    desk.decide();
    desk.result(calls[0], "repeat after the answer");
    desk.answers(&[]);
    assert_eq!(desk.decide().next, Next::Stop(Status::WaitingExternal));
    desk.result(calls[1], "late");
    desk.result(calls[1], "repeat beside the late one");
    assert_eq!(desk.decide().next, Next::AskModel);
    assert_eq!(desk.said().len(), 1);
    desk.answers(&[]);
    desk.result(calls[1], "repeat after the late one");
    assert_eq!(desk.decide().next, Next::Stop(Status::Idle));
}

#[test]
fn a_result_for_a_call_that_never_was_says_nothing() {
    let mut desk = Desk::with_calls(&[]);
    desk.decide();
    desk.result(CallId(Uuid::from_u128(77)), "stray");
    let decision = desk.decide();
    assert_eq!(decision.next, Next::Stop(Status::Idle));
    assert_eq!((desk.session.cursor, desk.session.length()), (2, 2), "it is considered and over");
}

#[test]
fn a_completion_before_the_cancel_stays() {
    let mut desk = Desk::with_calls(&["ask"]);
    let calls = desk.calls();
    desk.decide();
    desk.result(calls[0], "done");
    desk.order(Control::CancelCalls { tool_call_ids: calls.clone() });
    assert_eq!(desk.decide().next, Next::AskModel);
    assert_eq!(desk.shown(), ["done"]);
    assert!(desk.said().is_empty());
}

#[test]
fn a_completion_that_beats_a_cancel_is_told_late_and_once() {
    let mut desk = Desk::with_calls(&["ask"]);
    let calls = desk.calls();
    desk.decide();
    desk.order(Control::CancelCalls { tool_call_ids: calls.clone() });
    assert_eq!(desk.decide().next, Next::AskModel);
    assert!(desk.shown()[0].starts_with("cancelled:"));
    desk.answers(&[]);
    desk.post(MailBody::ContinuationResult {
        tool_call_id: calls[0],
        settled: Settled::Cancelled { message: "again".into() },
    });
    assert_eq!(desk.decide().next, Next::Stop(Status::Idle), "that it was cancelled is no news");
    let letter = desk.result(calls[0], "done after all");
    assert_eq!(desk.decide().next, Next::AskModel, "the call is tracked no longer, its result still counts");
    assert_eq!(
        desk.said(),
        [format!("[mail m-{}: tool call p2_0 (ask) completed]\ndone after all", short(letter))]
    );
    desk.answers(&[]);
    desk.result(calls[0], "once more");
    assert_eq!(desk.decide().next, Next::Stop(Status::Idle));
}

#[test]
fn a_call_cancelled_after_its_placeholder_is_told_with_the_next_message() {
    let mut desk = Desk::with_placeholder();
    let call = desk.session.calls[0].id;
    desk.order(Control::CancelCalls { tool_call_ids: vec![call] });
    desk.order(Control::CancelCalls { tool_call_ids: vec![call] });
    assert_eq!(desk.decide().next, Next::Stop(Status::Idle), "an order is no reason to speak");
    assert_eq!(desk.state(call), CallState::Cancelled);
    desk.says("so?");
    assert_eq!(desk.decide().next, Next::AskModel);
    assert_eq!(
        desk.said(),
        [format!("[mail m-{}: tool call p2_0 (ask) cancelled]", short(MailId(call.0))), "so?".into()]
    );
    assert!(desk.session.calls.iter().all(|call| call.told_result));
}

#[test]
fn several_cancels_tell_of_each_call_once() {
    let mut desk = Desk::with_calls(&["ask", "sign"]);
    let calls = desk.calls();
    desk.decide();
    desk.says("meanwhile");
    desk.decide();
    desk.answers(&[]);
    desk.order(Control::CancelCalls { tool_call_ids: vec![calls[0]] });
    desk.order(Control::CancelCalls { tool_call_ids: calls.clone() });
    desk.says("so?");
    desk.decide();
    let line = |call: CallId, name| format!("[mail m-{}: tool call {name} cancelled]", short(MailId(call.0)));
    assert_eq!(desk.said(), [line(calls[0], "p2_0 (ask)"), line(calls[1], "p2_1 (sign)"), "so?".into()]);
}

#[test]
fn a_result_speaks_for_a_call_whose_cancel_was_not_told_yet() {
    let mut desk = Desk::with_placeholder();
    let call = desk.session.calls[0].id;
    desk.order(Control::CancelCalls { tool_call_ids: vec![call] });
    desk.decide();
    let letter = desk.result(call, "done");
    assert_eq!(desk.decide().next, Next::AskModel);
    assert_eq!(desk.said(), [format!("[mail m-{}: tool call p2_0 (ask) completed]\ndone", short(letter))]);
}

#[test]
fn repeating_ids_never_cost_a_result() {
    // Two calls with the provider's same id: the second one's told result isn't taken for the first's.
    let mut desk = Desk::with_calls(&[]);
    let ask = |desk: &mut Desk| {
        desk.says("ask");
        desk.decide();
        let call = desk.answers_under(&[("functions.ask:0", "ask")])[0];
        desk.decide();
        desk.says("meanwhile");
        desk.decide();
        desk.answers(&[]);
        call
    };
    let (first, second) = (ask(&mut desk), ask(&mut desk));
    desk.order(Control::CancelCalls { tool_call_ids: vec![first] });
    desk.result(second, "of the second");
    desk.decide();
    assert_eq!(desk.said().len(), 2);
    desk.answers(&[]);
    desk.result(first, "of the first");
    assert_eq!(desk.decide().next, Next::AskModel);
    assert!(desk.said()[0].ends_with("of the first"), "{:?}", desk.said());
    desk.answers(&[]);
    desk.result(first, "of the first again");
    desk.result(second, "of the second again");
    assert_eq!(desk.decide().next, Next::Stop(Status::Idle));
}

/// A cancel as the API posts it: orders about deferred calls come before the one that stops.
#[test]
fn a_cancel_settles_what_it_says_and_nothing_else() {
    for deferred in [false, true] {
        for (tools, begun) in [(&["run", "ask"][..], true), (&["ask"][..], false)] {
            let mut desk = Desk::with_calls(tools);
            let calls = desk.calls();
            assert_eq!(matches!(desk.decide().next, Next::RunCalls(_)), begun);
            let open = calls.iter().copied().filter(|call| desk.state(*call) == CallState::Deferred);
            let open: Vec<CallId> = open.collect();
            if deferred {
                desk.order(Control::CancelCalls { tool_call_ids: open.clone() });
            }
            desk.order(Control::StopRun);
            let next = desk.decide().next;
            let case = format!("deferred: {deferred}, begun: {begun}");
            assert_eq!(desk.session.hold, Hold::Step, "{case}");
            if deferred {
                assert_eq!(next, Next::Stop(Status::Ready), "{case}");
                assert_eq!(desk.shown().len(), tools.len(), "every call has its answer: {case}");
                assert!(desk.shown().iter().all(|text| text.starts_with("cancelled:")), "{case}");
            } else {
                assert_eq!(next, Next::Stop(Status::WaitingExternal), "{case}");
                assert_eq!(desk.state(open[0]), CallState::Deferred, "{case}");
                desk.reload();
                desk.result(open[0], "done");
                assert_eq!(desk.decide().next, Next::Stop(Status::Ready), "a result lifts no hold: {case}");
                assert_eq!(desk.shown().last().map(String::as_str), Some("done"), "{case}");
            }
            desk.order(Control::Resume);
            assert_eq!(desk.decide().next, Next::AskModel, "{case}");
        }
    }
}
