//! What a fresh holder does with what a dead one left.

use holdfast_engine::{
    decide::{self, MAX_RESTARTS, Next},
    mail::Settled,
    session::{CallState, Event},
};

use crate::desk::{Desk, completed, failed, started};

#[test]
fn an_orphan_fails_and_only_an_idempotent_call_begins_again() {
    let mut desk = Desk::with_calls(&["run", "again", "ask", "run"]);
    let calls = desk.calls();
    assert_eq!(started(&desk.decide().next), calls[..2]);
    desk.reload();
    let now = desk.now();
    let events = decide::recover(&mut desk.session, now).expect("recovery is legal");
    assert_eq!(events.len(), 2, "deferred and waiting calls are none of its business");
    assert!(matches!(&events[0],
        Event::Finished { call, settled: Settled::Failed { message }, .. }
            if *call == calls[0] && message.starts_with("orphaned") && message.contains("run")));
    assert!(matches!(events[1], Event::Returned { call } if call == calls[1]));
    assert!(decide::recover(&mut desk.session, now).expect("recovery is legal").is_empty(), "once is enough");
    assert_eq!(started(&desk.decide().next), [calls[1], calls[3]]);
    assert_eq!(desk.session.call(calls[1]).map(|call| call.attempt), Some(2));
}

#[test]
fn restarts_are_bounded() {
    let mut desk = Desk::with_calls(&["again"]);
    let call = desk.calls()[0];
    let now = desk.now();
    let mut begun = 0;
    while let Next::RunCalls(starts) = desk.decide().next {
        begun += starts.len();
        assert!(begun <= 10, "restarts go on for ever");
        decide::recover(&mut desk.session, now).expect("recovery is legal");
    }
    assert_eq!(begun, 1 + usize::try_from(MAX_RESTARTS).expect("small"));
    assert!(desk.shown()[0].starts_with("orphaned"));
    assert!(desk.session.call(call).is_some_and(|call| call.told_result));
}

#[test]
fn failures_of_idempotent_calls_are_tried_again_as_often_as_granted() {
    let mut desk = Desk::with_calls(&["again"]);
    let call = desk.calls()[0];
    for attempt in 1..=2 {
        assert_eq!(started(&desk.decide().next), [call]);
        assert!(matches!(desk.ends(call, failed("flaky")), Event::Returned { .. }), "attempt {attempt}");
    }
    desk.decide();
    assert!(matches!(desk.ends(call, failed("still")), Event::Finished { .. }));
    assert_eq!(desk.state(call), CallState::Failed);
    assert_eq!(desk.decide().next, Next::AskModel);
    assert_eq!(desk.shown(), ["still"]);
}

#[test]
fn other_ends_are_ends() {
    let mut desk = Desk::with_calls(&["again", "run"]);
    let calls = desk.calls();
    desk.decide();
    let cancelled = Settled::Cancelled { message: "by hand".into() };
    assert!(matches!(desk.ends(calls[0], cancelled), Event::Finished { .. }));
    assert!(
        matches!(desk.ends(calls[1], failed("no")), Event::Finished { .. }),
        "no rule calls it idempotent"
    );
}

#[test]
fn a_call_that_an_order_ended_can_not_end_again() {
    let mut desk = Desk::with_calls(&["again"]);
    let call = desk.calls()[0];
    desk.decide();
    desk.order(holdfast_engine::mail::Control::CancelCalls { tool_call_ids: vec![call] });
    desk.decide();
    let event = decide::finished(&desk.session, call, completed("too late"), desk.now());
    assert!(desk.session.apply(&event).is_err());
}
