//! Which event a session's state allows: the whole table.

use std::sync::Arc;

use holdfast_engine::{
    content::Digest,
    ids::{CallId, Token, TurnId},
    mail::Settled,
    session::{CallState, Event, Hold, Illegal, Session, Stop, Terms, TrackedCall},
    turn::{Answer, Shown, Turn, TurnBody, UserTurn},
    waits::Waits,
};
use uuid::Uuid;

use crate::desk::{Desk, completed, failed};

/// A session whose newest turn has one call, in `state`.
fn session_with(state: CallState) -> (Session, CallId) {
    let mut desk = Desk::with_calls(&["run"]);
    let call = &mut desk.session.calls[0];
    call.state = state;
    call.settled = match state {
        CallState::Completed => Some(completed("done")),
        CallState::Failed => Some(failed("no")),
        CallState::Cancelled => Some(Settled::Cancelled { message: "stop".into() }),
        CallState::Ready | CallState::Running | CallState::Waiting | CallState::Deferred => None,
    };
    let id = call.id;
    (desk.session, id)
}

fn user_turn(position: i64, answers: Vec<Answer>) -> Event {
    let nothing = Digest::of(b"[]");
    let user = UserTurn {
        system: nothing,
        tools: nothing,
        answers,
        said: Vec::new(),
        mail: Vec::new(),
        said_in_answer: false,
    };
    let id = TurnId(Uuid::from_u128(500));
    Event::Sealed(Arc::new(Turn {
        id,
        position,
        at: chrono::DateTime::UNIX_EPOCH,
        body: TurnBody::User(user),
    }))
}

fn answer(call: CallId, shown: Shown) -> Answer {
    Answer { call, provider_id: "p".into(), name: "run".into(), shown }
}

/// Every event, by name, and the states of its call in which it may happen.
fn table(call: CallId, other: &TrackedCall, llm: &Arc<Turn>) -> Vec<(&'static str, Event, Vec<CallState>)> {
    use CallState::{Cancelled, Completed, Deferred, Failed, Ready, Running, Waiting};
    let at = chrono::DateTime::UNIX_EPOCH;
    let every = CallState::ALL.to_vec();
    let token = Token(Uuid::from_u128(9));
    let finished = |settled| Event::Finished { call, settled, at };
    let told = |shown| user_turn(3, vec![answer(call, shown)]);
    vec![
        ("started", Event::Started { call, at }, vec![Ready]),
        (
            "deferred",
            Event::Deferred { call, token, expires_at: None, terms: Terms::default(), at },
            vec![Ready, Running],
        ),
        ("returned", Event::Returned { call }, vec![Running]),
        ("completed", finished(completed("x")), vec![Ready, Running, Waiting, Deferred]),
        ("failed", finished(failed("x")), vec![Ready, Running, Waiting, Deferred]),
        (
            "cancelled",
            finished(Settled::Cancelled { message: "x".into() }),
            vec![Ready, Running, Waiting, Deferred],
        ),
        ("sealed over an end", told(Shown::Settled(failed("x"))), vec![Completed, Failed, Cancelled]),
        (
            "sealed over an open call",
            told(Shown::Placeholder("open".into())),
            vec![Ready, Running, Waiting, Deferred],
        ),
        ("sealed without the answer", user_turn(3, Vec::new()), vec![]),
        ("folded", Event::Folded { cursor: 1, left: Vec::new() }, every.clone()),
        ("folded backwards", Event::Folded { cursor: 0, left: Vec::new() }, vec![]),
        ("paused", Event::StopOrdered(Stop::Paused), every.clone()),
        ("stopped", Event::StopOrdered(Stop::Cancelled), every.clone()),
        ("resumed", Event::Resumed, every.clone()),
        ("held", Event::Held, every),
        ("approved", Event::Approved { call }, vec![Deferred]),
        ("waiting", Event::Waits { call, waits: Waits::Mail, until: None, at }, vec![Ready]),
        ("read", Event::Read { call }, vec![Completed, Failed, Cancelled]),
        ("answered", Event::Answered { turn: Arc::clone(llm), calls: vec![other.clone()] }, vec![]),
    ]
}

#[test]
fn every_pair_of_state_and_event_is_allowed_or_refused_without_a_trace() {
    for state in CallState::ALL {
        let (session, call) = session_with(state);
        let llm = Arc::clone(session.turns.last().expect("a model turn"));
        let other = session.calls[0].clone();
        for (name, event, allowed) in table(call, &other, &llm) {
            let mut after = session.clone();
            let result = after.apply(&event);
            assert_eq!(
                result.is_ok(),
                allowed.contains(&state),
                "{name} of a call that is {state:?}: {result:?}"
            );
            if result.is_err() {
                assert_eq!(format!("{after:?}"), format!("{session:?}"), "{name} left a trace on {state:?}");
            }
        }
    }
}

#[test]
fn events_lead_to_the_states_that_they_name() {
    let lead = |from: CallState, index: usize| {
        let (mut session, call) = session_with(from);
        let llm = Arc::clone(session.turns.last().expect("a model turn"));
        let (name, event, _) = table(call, &session.calls[0].clone(), &llm).swap_remove(index);
        session.apply(&event).expect(name);
        session.call(call).cloned().expect("still tracked")
    };
    let running = lead(CallState::Ready, 0);
    assert_eq!((running.state, running.attempt), (CallState::Running, 1));
    assert!(running.started_at.is_some());
    let deferred = lead(CallState::Ready, 1);
    assert_eq!((deferred.state, deferred.attempt), (CallState::Deferred, 0));
    assert!(deferred.token.is_some() && deferred.started_at.is_some());
    assert_eq!(lead(CallState::Running, 2).state, CallState::Ready);
    for (index, state) in [(3, CallState::Completed), (4, CallState::Failed), (5, CallState::Cancelled)] {
        let ended = lead(CallState::Deferred, index);
        assert_eq!(ended.state, state);
        assert!(ended.settled.is_some() && ended.finished_at.is_some());
    }
    let shown = lead(CallState::Deferred, 7);
    assert_eq!((shown.told, shown.told_result), (Some(3), false));
}

#[test]
fn a_call_is_forgotten_once_its_end_was_told() {
    let (mut session, call) = session_with(CallState::Failed);
    session.apply(&user_turn(3, vec![answer(call, Shown::Settled(failed("x")))])).expect("legal");
    let told = session.call(call).cloned().expect("kept until it is stored as told");
    assert_eq!((told.told, told.told_result), (Some(3), true));
    session.forget_told();
    let again = Event::Finished { call, settled: failed("x"), at: chrono::DateTime::UNIX_EPOCH };
    assert_eq!(session.apply(&again), Err(Illegal::UnknownCall(call)));
}

#[test]
fn answers_have_to_fit_the_round() {
    let stranger = CallId(Uuid::from_u128(404));
    let (session, call) = session_with(CallState::Completed);
    let told = |call| answer(call, Shown::Settled(failed("x")));
    for answers in [vec![told(call), told(call)], vec![told(stranger)], vec![told(call), told(stranger)]] {
        let mut after = session.clone();
        assert_eq!(after.apply(&user_turn(3, answers)), Err(Illegal::Answers));
        assert_eq!(format!("{after:?}"), format!("{session:?}"));
    }
}

#[test]
fn turns_follow_one_another() {
    let (session, call) = session_with(CallState::Completed);
    let told = vec![answer(call, Shown::Settled(failed("x")))];
    for position in [0, 1, 2, 4] {
        let refused = session.clone().apply(&user_turn(position, told.clone()));
        assert!(matches!(refused, Err(Illegal::TurnOrder { .. })), "{position}: {refused:?}");
    }
    let llm = Arc::clone(session.turns.last().expect("a model turn"));
    let mut wrong = (*llm).clone();
    wrong.position = 3;
    let sealed = session.clone().apply(&Event::Sealed(Arc::new(wrong.clone())));
    assert!(matches!(sealed, Err(Illegal::TurnOrder { .. })), "a model's turn isn't sealed");
    let answered = session.clone().apply(&Event::Answered { turn: Arc::new(wrong), calls: Vec::new() });
    assert!(matches!(answered, Err(Illegal::TurnOrder { .. })), "nobody asked");
}

#[test]
fn an_answer_brings_exactly_its_calls_and_each_is_ready() {
    let (done, call) = session_with(CallState::Completed);
    let mut session = done;
    session.apply(&user_turn(3, vec![answer(call, Shown::Settled(failed("x")))])).expect("legal");
    let mut desk = Desk::with_calls(&["run"]);
    let mut turn = (**desk.session.turns.last().expect("a model turn")).clone();
    turn.position = 4;
    let mut good = desk.session.calls.remove(0);
    good.turn = 4;
    let wrong = |change: fn(&mut TrackedCall)| {
        let mut call = good.clone();
        change(&mut call);
        vec![call]
    };
    let lists = [
        Vec::new(),
        vec![good.clone(), good.clone()],
        wrong(|call| call.turn = 2),
        wrong(|call| call.state = CallState::Running),
        wrong(|call| call.id = CallId(Uuid::from_u128(404))),
    ];
    for calls in lists {
        let mut after = session.clone();
        let refused = after.apply(&Event::Answered { turn: Arc::new(turn.clone()), calls });
        assert_eq!(refused, Err(Illegal::Answers));
        assert_eq!(format!("{after:?}"), format!("{session:?}"));
    }
    session.apply(&Event::Answered { turn: Arc::new(turn), calls: vec![good] }).expect("legal");
    assert_eq!(session.round().count(), 1);
}

#[test]
fn orders_and_holds() {
    let (mut session, _) = session_with(CallState::Ready);
    let mut hold_after = |event: Event| {
        session.apply(&event).expect("always legal");
        (session.hold, session.stop)
    };
    assert_eq!(hold_after(Event::Held), (Hold::Step, None));
    assert_eq!(hold_after(Event::StopOrdered(Stop::Paused)), (Hold::Paused, Some(Stop::Paused)));
    assert_eq!(hold_after(Event::StopOrdered(Stop::Cancelled)), (Hold::Paused, Some(Stop::Cancelled)));
    assert_eq!(hold_after(Event::StopOrdered(Stop::Paused)), (Hold::Paused, Some(Stop::Cancelled)));
    assert_eq!(hold_after(Event::Resumed), (Hold::None, None));
    assert_eq!(hold_after(Event::StopOrdered(Stop::Cancelled)), (Hold::Step, Some(Stop::Cancelled)));
}
