//! Pause, resume, stop, step: what holds a session and what lifts the hold.

use holdfast_engine::{
    decide::{Mode, Next},
    mail::Control,
    session::{CallState, Event, Hold, Status, Stop},
};

use crate::desk::{Desk, completed, started};

#[test]
fn a_pause_lets_running_calls_come_home_and_starts_no_other() {
    let mut desk = Desk::with_calls(&["run", "run", "run"]);
    let calls = desk.calls();
    assert_eq!(started(&desk.decide().next), calls[..2]);
    desk.order(Control::Pause);
    assert_eq!(desk.decide().next, Next::RunCalls(Vec::new()));
    desk.ends(calls[0], completed("a"));
    assert_eq!(desk.decide().next, Next::RunCalls(Vec::new()), "a free place isn't filled");
    desk.ends(calls[1], completed("b"));
    assert_eq!(desk.decide().next, Next::Stop(Status::Paused));
    assert_eq!(desk.session.length(), 2, "nothing is sealed while a call waits to run");

    desk.reload();
    assert_eq!(desk.decide().next, Next::Stop(Status::Paused), "the hold outlives the worker");
    desk.order(Control::Resume);
    assert_eq!(started(&desk.decide().next), calls[2..]);
    desk.ends(calls[2], completed("c"));
    assert_eq!(desk.decide().next, Next::AskModel);
    assert_eq!(desk.shown(), ["a", "b", "c"]);
}

#[test]
fn a_pause_keeps_failed_attempts_for_later() {
    let mut desk = Desk::with_calls(&["again"]);
    let calls = desk.calls();
    desk.decide();
    desk.order(Control::Pause);
    desk.decide();
    desk.ends(calls[0], crate::desk::failed("flaky"));
    assert_eq!(desk.decide().next, Next::Stop(Status::Paused));
    assert_eq!(desk.state(calls[0]), CallState::Ready);
}

#[test]
fn mail_to_a_paused_session_is_folded_and_lifts_nothing() {
    let mut desk = Desk::with_calls(&["ask"]);
    let calls = desk.calls();
    desk.order(Control::Pause);
    assert_eq!(desk.decide().next, Next::Stop(Status::Paused));
    for reloaded in [false, true] {
        if reloaded {
            desk.reload();
        }
        desk.says("hello?");
        desk.result(calls[0], "done");
        assert_eq!(desk.decide().next, Next::Stop(Status::Paused), "reloaded: {reloaded}");
    }
    assert_eq!(desk.session.cursor, 6);
}

#[test]
fn stopping_ends_what_runs_at_once() {
    let mut desk = Desk::with_calls(&["run", "run", "run"]);
    desk.decide();
    desk.order(Control::StopRun);
    assert_eq!(desk.decide().next, Next::Stop(Status::Ready));
    let shown = desk.shown();
    assert!(shown[0].contains("may have taken effect") && shown[1].contains("may have taken effect"));
    assert!(!shown[2].contains("may have taken effect"), "the third never began: {shown:?}");
    assert_eq!(desk.session.hold, Hold::Step);
}

#[test]
fn stopping_a_model_request_leaves_the_question_open() {
    let mut desk = Desk::new();
    desk.says("hello");
    assert_eq!(desk.decide().next, Next::AskModel);
    desk.order(Control::StopRun);
    assert_eq!(desk.decide().next, Next::Stop(Status::Ready));
    desk.order(Control::Resume);
    desk.says("never mind, this instead");
    assert_eq!(desk.decide().next, Next::AskModel);
    assert_eq!(desk.session.length(), 2);
    assert_eq!(desk.request().messages.len(), 2);
}

#[test]
fn a_person_who_asks_after_stopping_is_answered() {
    let mut desk = Desk::with_calls(&["run"]);
    desk.decide();
    desk.order(Control::StopRun);
    desk.order(Control::Resume);
    desk.says("do this instead");
    assert_eq!(desk.decide().next, Next::AskModel);
    assert!(desk.shown()[0].starts_with("cancelled:"));
    assert_eq!(desk.said(), ["do this instead"]);
    assert_eq!((desk.session.hold, desk.session.stop), (Hold::None, None));
}

#[test]
fn an_order_to_go_on_where_nothing_stands_in_the_way_is_no_event() {
    let mut desk = Desk::with_calls(&["run"]);
    desk.decide();
    desk.order(Control::Resume);
    let decision = desk.decide();
    assert!(
        matches!(&decision.events[..], [Event::Folded { cursor: 2, left }] if left.is_empty()),
        "{decision:?}"
    );
    desk.order(Control::Pause);
    desk.order(Control::Resume);
    let decision = desk.decide();
    assert!(decision.events.iter().any(|event| matches!(event, Event::Resumed)), "{decision:?}");
}

#[test]
fn the_last_order_counts() {
    for (orders, next, hold) in [
        (vec![Control::Pause, Control::Resume], Next::AskModel, Hold::None),
        (vec![Control::Resume, Control::Pause], Next::Stop(Status::Paused), Hold::Paused),
        (vec![Control::Resume, Control::StopRun], Next::Stop(Status::Ready), Hold::Step),
        (vec![Control::StopRun, Control::Resume], Next::AskModel, Hold::None),
        // A pause is stronger than a stop, whichever comes first.
        (vec![Control::StopRun, Control::Pause], Next::Stop(Status::Paused), Hold::Paused),
        (vec![Control::Pause, Control::StopRun], Next::Stop(Status::Paused), Hold::Paused),
    ] {
        let mut desk = Desk::new();
        desk.says("hello");
        for order in &orders {
            desk.order(order.clone());
        }
        assert_eq!(desk.decide().next, next, "{orders:?}");
        assert_eq!(desk.session.hold, hold, "{orders:?}");
        assert_eq!(desk.session.stop.is_some(), hold != Hold::None, "{orders:?}");
    }
    let mut desk = Desk::new();
    desk.order(Control::StopRun);
    desk.order(Control::Pause);
    desk.decide();
    assert_eq!(desk.session.stop, Some(Stop::Cancelled), "what was to end at once still does");
}

#[test]
fn cancelling_what_is_attached_goes_on_without_it() {
    let mut desk = Desk::with_calls(&["run", "ask"]);
    let calls = desk.calls();
    desk.decide();
    desk.order(Control::CancelAllAttached);
    assert_eq!(desk.decide().next, Next::Stop(Status::WaitingExternal));
    assert_eq!((desk.state(calls[0]), desk.state(calls[1])), (CallState::Cancelled, CallState::Deferred));
    assert_eq!(desk.session.hold, Hold::None);
    desk.result(calls[1], "done");
    assert_eq!(desk.decide().next, Next::AskModel);
}

#[test]
fn a_step_is_one_question_or_one_round() {
    let mut desk = Desk::new();
    desk.run.mode = Mode::Step;
    desk.says("hello");
    assert_eq!(desk.decide().next, Next::AskModel);
    desk.answers(&["run", "run", "run", "ask"]);
    assert_eq!(desk.decide().next, Next::Stop(Status::Ready), "the calls are the next step");
    assert_eq!(desk.session.hold, Hold::Step);

    desk.run.steps = 0;
    assert_eq!(desk.decide().next, Next::Stop(Status::Ready), "only an order lifts the hold");
    desk.order(Control::Resume);
    let calls = desk.calls();
    assert_eq!(started(&desk.decide().next), calls[..2]);
    desk.ends(calls[0], completed("a"));
    assert_eq!(started(&desk.decide().next), [calls[2]], "the whole round is one step");
    desk.ends(calls[1], completed("b"));
    desk.ends(calls[2], completed("c"));
    assert_eq!(desk.decide().next, Next::Stop(Status::WaitingExternal));
    assert_eq!(desk.session.hold, Hold::None, "no work is left that would have to be held");
    desk.result(calls[3], "d");
    assert_eq!(desk.decide().next, Next::Stop(Status::Ready));
    assert_eq!(desk.session.hold, Hold::Step);
    assert_eq!(desk.shown(), ["a", "b", "c", "d"]);
}

#[test]
fn a_step_that_finishes_the_conversation_holds_nothing() {
    let mut desk = Desk::new();
    desk.run.mode = Mode::Step;
    desk.says("hello");
    desk.decide();
    desk.answers(&[]);
    assert_eq!(desk.decide().next, Next::Stop(Status::Idle));
    assert_eq!(desk.session.hold, Hold::None);
}

#[test]
fn a_run_without_effects_folds_and_holds_nothing() {
    let mut desk = Desk::new();
    desk.run.mode = Mode::None;
    assert_eq!(desk.decide().next, Next::Stop(Status::Ready), "an empty session is ready");
    assert!(desk.session.turns.is_empty());
    desk.says("hello");
    assert_eq!(desk.decide().next, Next::Stop(Status::Ready));
    assert_eq!((desk.session.length(), desk.session.hold), (1, Hold::None));
    desk.run.mode = Mode::UntilBlocked;
    assert_eq!(desk.decide().next, Next::AskModel, "what was folded is there for the next run");
    desk.answers(&["run"]);
    desk.run.mode = Mode::None;
    assert_eq!(desk.decide().next, Next::Stop(Status::Ready));
    assert_eq!(desk.state(desk.calls()[0]), CallState::Ready);
}

#[test]
fn modes_and_holds_have_words() {
    for mode in [Mode::None, Mode::Step, Mode::UntilBlocked] {
        assert_eq!(Mode::parse(mode.word()), Some(mode));
    }
    for hold in [Hold::None, Hold::Step, Hold::Paused] {
        assert_eq!(Hold::parse(hold.word()), Some(hold));
    }
    for status in Status::ALL {
        assert_eq!(Status::parse(status.word()), Some(status));
        assert_eq!(serde_json::to_value(status).expect("JSON"), status.word());
    }
    assert_eq!((Mode::parse("x"), Hold::parse("x"), Status::parse("x")), (None, None, None));
    assert!(Mode::UntilBlocked > Mode::Step && Mode::Step > Mode::None, "modes merge by their order");
}

#[test]
fn cancelling_with_the_deferred_calls_leaves_none_open() {
    let mut desk = Desk::with_calls(&["run", "ask"]);
    let calls = desk.calls();
    desk.decide();
    assert_eq!(desk.state(calls[1]), CallState::Deferred);
    desk.order(Control::CancelDeferred);
    desk.order(Control::StopRun);
    assert_eq!(desk.decide().next, Next::Stop(Status::Ready));
    for call in calls {
        assert_eq!(desk.shown().len(), 2, "both are answered: {call}");
    }
}
