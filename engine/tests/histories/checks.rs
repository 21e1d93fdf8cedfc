//! What must hold of a session at every moment.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use holdfast_engine::{
    content::Payload,
    ids::CallId,
    mail::{MailBody, Settled},
    model::Message,
    session::{CallState, Event, Session, TrackedCall},
    transcript,
    turn::{Said, Shown, TurnBody},
};

use crate::world::{MOST_ATTEMPTS, World};

/// A provider's id that many calls have, in one turn and over turns.
pub(crate) const REPEATED: &str = "functions.again:0";

/// Follows the calls by their events alone. Final states never change.
pub(crate) fn observe(calls: &mut BTreeMap<CallId, TrackedCall>, event: &Event) {
    let mut change = |id: &CallId, allowed: &[CallState], to: CallState| {
        let call = calls.get_mut(id).expect("events are about calls that were asked for");
        assert!(allowed.contains(&call.state), "{:?} can't become {to:?}", call.state);
        call.state = to;
        if to == CallState::Running {
            call.attempt += 1;
            let most = if call.policy.idempotent { MOST_ATTEMPTS } else { 1 };
            assert!(call.attempt <= most, "{} began {} times", call.name, call.attempt);
        }
    };
    match event {
        Event::Answered { calls: asked, .. } => {
            for call in asked {
                assert!(calls.insert(call.id, call.clone()).is_none(), "ids are fresh");
            }
        }
        Event::Started { call, .. } => change(call, &[CallState::Ready], CallState::Running),
        Event::Deferred { call, .. } => {
            change(call, &[CallState::Ready, CallState::Running], CallState::Deferred);
        }
        Event::Approved { call } => change(call, &[CallState::Deferred], CallState::Ready),
        Event::Waits { call, .. } => change(call, &[CallState::Ready], CallState::Waiting),
        Event::Returned { call } => change(call, &[CallState::Running], CallState::Ready),
        Event::Finished { call, settled, .. } => {
            let open = [CallState::Ready, CallState::Running, CallState::Waiting, CallState::Deferred];
            let to = match settled {
                Settled::Completed { .. } => CallState::Completed,
                Settled::Failed { .. } => CallState::Failed,
                Settled::Cancelled { .. } => CallState::Cancelled,
            };
            change(call, &open, to);
        }
        Event::Folded { .. }
        | Event::Read { .. }
        | Event::StopOrdered(_)
        | Event::Resumed
        | Event::Held
        | Event::Sealed(_) => {}
    }
}

/// The session agrees with what its events said, and tracks what isn't over.
pub(crate) fn calls_agree(calls: &BTreeMap<CallId, TrackedCall>, session: &Session) {
    for call in &session.calls {
        let known = &calls[&call.id];
        assert_eq!((known.state, known.attempt), (call.state, call.attempt), "{}", call.name);
        assert_eq!(call.state.is_final(), call.settled.is_some());
        assert_eq!(call.state.is_final(), call.finished_at.is_some());
    }
    for call in calls.values().filter(|call| !call.state.is_final()) {
        assert!(session.call(call.id).is_some(), "an open call of {} was dropped", call.name);
    }
}

/// Everything that holds of a session at any moment.
pub(crate) fn session_holds(world: &World, session: &Session, loaded: &Session) {
    answers_are_complete(session);
    for (tokens, rebuilt) in [(None, loaded), (Some(40), loaded)] {
        let request = transcript::request(session, tokens, &world.blobs).expect("blobs are at hand");
        let again = transcript::request(rebuilt, tokens, &world.blobs).expect("blobs are at hand");
        assert_eq!(format!("{request:?}"), format!("{again:?}"), "a rebuilt request is the same");
        if matches!(session.head().map(|turn| &turn.body), Some(TurnBody::User(_))) {
            tool_messages_follow_their_calls(&request.messages);
        }
    }
    nothing_is_told_twice(world, session);
    for (call, times) in &world.begun {
        let call = &world.calls[call];
        let most = if call.policy.idempotent { MOST_ATTEMPTS } else { 1 };
        assert!(i64::from(*times) <= i64::from(most), "{} really began {times} times", call.name);
    }
}

/// Every call of a model turn has exactly one answer in the turn after it, in order.
fn answers_are_complete(session: &Session) {
    let mut expected: Vec<CallId> = Vec::new();
    for (turn, position) in session.turns.iter().zip(1..) {
        assert_eq!(turn.position, position, "positions are dense");
        match &turn.body {
            TurnBody::User(user) => {
                let answered: Vec<CallId> = user.answers.iter().map(|answer| answer.call).collect();
                assert_eq!(answered, expected, "turn {position} answers the turn before");
                assert!(!user.answers.is_empty() || !user.said.is_empty(), "turn {position} says nothing");
                expected.clear();
            }
            TurnBody::Llm(llm) => {
                assert!(expected.is_empty(), "a model turn follows a user turn");
                expected = llm.calls.iter().map(|call| call.id).collect();
                let ids: BTreeSet<&str> = llm.calls.iter().map(|call| call.provider_id.as_str()).collect();
                assert_eq!(ids.len(), llm.calls.len(), "providers' ids are unique in their turn");
                assert!(!ids.contains(""), "providers' ids are not empty");
            }
        }
    }
}

/// After each assistant message comes one tool message for each of its calls, in order, and nowhere else.
pub(crate) fn tool_messages_follow_their_calls(messages: &[Arc<Message>]) {
    let mut open: std::collections::VecDeque<&str> = std::collections::VecDeque::new();
    for message in messages {
        match &**message {
            Message::Tool { provider_id, .. } => {
                assert_eq!(open.pop_front(), Some(provider_id.as_str()), "tool messages answer in order");
            }
            Message::User { .. } => assert!(open.is_empty(), "calls without answers: {open:?}"),
            Message::Assistant { calls, .. } => {
                assert!(open.is_empty(), "calls without answers: {open:?}");
                open = calls.iter().map(|call| call.provider_id.as_str()).collect();
            }
        }
    }
    assert!(open.is_empty(), "calls without answers: {open:?}");
    assert!(
        messages.first().is_none_or(|first| matches!(**first, Message::User { .. })),
        "requests begin with a user message"
    );
}

/// The model may be asked: the last word isn't its own.
pub(crate) fn may_ask(session: &Session) {
    assert!(matches!(session.head().map(|turn| &turn.body), Some(TurnBody::User(_))));
    assert!(!session.busy());
}

/// What the model has been told of a call.
#[derive(Debug, Default, Clone)]
struct Told {
    placeholder: u32,
    answered: u32,
    answered_cancelled: u32,
    late_results: u32,
    late_cancels: u32,
}

fn told(world: &World, session: &Session) -> BTreeMap<CallId, Told> {
    let mut told: BTreeMap<CallId, Told> = BTreeMap::new();
    let mut said: Vec<&Said> = Vec::new();
    for turn in &session.turns {
        let TurnBody::User(user) = &turn.body else { continue };
        for answer in &user.answers {
            let told = told.entry(answer.call).or_default();
            match &answer.shown {
                Shown::Placeholder(_) => told.placeholder += 1,
                Shown::Settled(Settled::Cancelled { .. }) => told.answered_cancelled += 1,
                Shown::Settled(_) => told.answered += 1,
            }
        }
        said.extend(&user.said);
    }
    for said in said {
        match said {
            Said::Late { header, result: Payload::Inline(result) } => {
                let text = result.as_text();
                let call =
                    world.markers.iter().find(|(marker, _)| *marker == text).and_then(|(_, call)| *call);
                let told = told.entry(call.expect("late results belong to calls")).or_default();
                if header.ends_with("cancelled]") {
                    told.late_cancels += 1;
                } else {
                    told.late_results += 1;
                }
            }
            Said::Text(text) => {
                for call in world.calls.values().filter(|call| call.provider_id != REPEATED) {
                    let notice = format!("tool call {} ({}) cancelled]", call.provider_id, call.name);
                    let times = text.matches(&notice).count();
                    told.entry(call.id).or_default().late_cancels += u32::try_from(times).expect("few");
                }
            }
            Said::Late { .. } | Said::Query(_) => {}
        }
    }
    told
}

fn nothing_is_told_twice(world: &World, session: &Session) {
    for (id, told) in told(world, session) {
        let call = &world.calls[&id];
        let cancelled = call.state == CallState::Cancelled;
        let ends = told.answered + told.answered_cancelled + told.late_cancels;
        assert!(told.answered + told.answered_cancelled + told.placeholder <= 1, "one answer: {told:?}");
        assert!(told.late_cancels == 0 || cancelled, "only cancelled calls are told so: {told:?}");
        assert!(ends <= 1 && told.late_results <= 1, "an end was told twice: {told:?}");
        // A result that a cancel was faster than is told late; every other end is told once.
        assert!(cancelled || ends + told.late_results <= 1, "an end was told twice: {told:?}");
    }
    for (marker, _) in &world.markers {
        assert!(times_shown(session, marker) <= 1, "{marker} was shown twice");
    }
}

/// How often a text stands in user turns.
fn times_shown(session: &Session, marker: &str) -> usize {
    let shown = session.turns.iter().flat_map(|turn| match &turn.body {
        TurnBody::User(user) => user.said.iter().collect::<Vec<_>>(),
        TurnBody::Llm(_) => Vec::new(),
    });
    let counts = shown.map(|said| match said {
        Said::Query(Payload::Inline(query)) => usize::from(query.text == marker),
        Said::Text(text) => text.matches(marker).count(),
        Said::Late { result: Payload::Inline(result), .. } => usize::from(result.as_text() == marker),
        Said::Query(_) | Said::Late { .. } => 0,
    });
    counts.sum()
}

/// Once a session is at rest, the model has heard everything exactly once.
pub(crate) fn all_is_told(world: &World, session: &Session) {
    assert!(session.calls.is_empty(), "calls are left: {:?}", session.calls);
    assert!(session.left.is_empty(), "mail is left: {:?}", session.left);
    assert_eq!(session.cursor, i64::try_from(world.mailbox.len()).expect("few letters"));
    let told = told(world, session);
    for call in world.calls.values() {
        assert!(call.state.is_final(), "{} is {:?}", call.name, call.state);
        let told = told.get(&call.id).cloned().unwrap_or_default();
        assert_eq!(told.answered + told.answered_cancelled + told.placeholder, 1, "one answer: {told:?}");
        if call.provider_id == REPEATED || told.placeholder == 0 {
            continue;
        }
        assert!(told.late_results + told.late_cancels >= 1, "an end was never told: {call:?} {told:?}");
    }
    for letter in &world.mailbox {
        let marker = match &letter.body {
            MailBody::UserMessage { query: Payload::Inline(query) } => &query.text,
            MailBody::AgentMessage { text, .. } => text,
            _ => continue,
        };
        assert_eq!(times_shown(session, marker), 1, "{marker} was shown once");
    }
}

/// Which situations histories have reached.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    placeholders: u32,
    late_results: u32,
    late_cancels: u32,
    beaten: u32,
    restarts: u32,
    orphans: u32,
    deaths: u32,
    full_rounds: u32,
}

impl Seen {
    pub(crate) fn add(&mut self, world: &World) {
        let session = world.stored_session();
        for (id, told) in told(world, &session) {
            let call = &world.calls[&id];
            self.placeholders += told.placeholder;
            self.late_results += told.late_results;
            self.late_cancels += told.late_cancels;
            self.beaten += u32::from(call.state == CallState::Cancelled && told.late_results > 0);
            self.restarts += u32::from(call.attempt > 1);
        }
        let orphaned = world.stored.turns.iter().map(|turn| turn.4.matches("\"orphaned: ").count());
        self.orphans += u32::try_from(orphaned.sum::<usize>()).expect("few");
        self.deaths += world.deaths;
        let full = session.turns.iter().filter(|turn| match &turn.body {
            TurnBody::Llm(llm) => llm.calls.len() == 5,
            TurnBody::User(_) => false,
        });
        self.full_rounds += u32::try_from(full.count()).expect("few");
    }

    pub(crate) fn assert_all(&self) {
        let reached = [
            self.placeholders,
            self.late_results,
            self.late_cancels,
            self.beaten,
            self.restarts,
            self.orphans,
            self.deaths,
            self.full_rounds,
        ];
        assert!(reached.iter().all(|times| *times > 0), "the simulator is too tame: {self:?}");
    }
}
