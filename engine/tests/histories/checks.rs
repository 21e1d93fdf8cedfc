//! What must hold of a session at every moment.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use holdfast_engine::{
    content::Payload,
    ids::CallId,
    mail::{MailBody, Priority, Sender, Settled},
    model::Message,
    session::{CallState, Event, Session, TrackedCall},
    transcript,
    turn::{Origin, Said, Shown, TurnBody},
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
        Event::Deferred { call, token, .. } => {
            change(call, &[CallState::Ready, CallState::Running], CallState::Deferred);
            calls.entry(*call).and_modify(|call| call.token = Some(*token));
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
        Event::Read { call } => {
            let call = calls.get_mut(call).expect("events are about calls that were asked for");
            assert!(call.state.is_final(), "only ends are read");
            call.read = true;
        }
        Event::Folded { .. } | Event::StopOrdered(_) | Event::Resumed | Event::Held | Event::Sealed(_) => {}
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
        // One that isn't stored only read, and began as often in one life alone.
        let idempotent = world.calls.get(call).is_none_or(|call| call.policy.idempotent);
        let most = if idempotent { MOST_ATTEMPTS } else { 1 };
        assert!(times.stored <= most && times.unstored <= most, "{call:?} really began {times:?} times");
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

/// The model may be asked: the last word isn't its own. An agent that waits for all that it asked for is asked
/// when nothing is left to do, unless somebody has interrupted.
pub(crate) fn may_ask(world: &World, session: &Session) {
    assert!(matches!(session.head().map(|turn| &turn.body), Some(TurnBody::User(_))));
    let interrupted = world.mailbox.iter().any(|letter| letter.priority == Priority::High);
    assert!(!world.shape.is_plain() || interrupted || !session.busy());
}

/// What the model has been told of a call.
#[derive(Debug, Default, Clone)]
pub(crate) struct Told {
    pub(crate) placeholder: u32,
    pub(crate) answered: u32,
    pub(crate) answered_cancelled: u32,
    /// Ends other than cancels, told late; a notice that the result was read already is one.
    pub(crate) late_results: u32,
    pub(crate) late_cancels: u32,
    pub(crate) read_notices: u32,
}

/// The call whose end a letter brought that stands in a turn.
fn ended_by(origin: &Origin) -> Option<CallId> {
    match (origin.tag.as_str(), &origin.from) {
        ("toolCallFinished" | "continuationResult", Sender::ToolCall { tool_call_id }) => Some(*tool_call_id),
        ("toolCallFinished", Sender::Session { session_id, .. }) => Some(CallId(session_id.0)),
        _ => None,
    }
}

pub(crate) fn told(session: &Session) -> BTreeMap<CallId, Told> {
    let mut told: BTreeMap<CallId, Told> = BTreeMap::new();
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
        let mut late = 0;
        for origin in &user.mail {
            let Some(call) = ended_by(origin) else { continue };
            let head = format!("[mail {}: tool call ", transcript::letter_name(origin.id));
            let of = |said: &&Said| match said {
                Said::Late { header: text, .. } | Said::Text(text) => text.starts_with(&head),
                Said::Query(_) => false,
            };
            let said: Vec<&Said> = user.said.iter().filter(of).collect();
            let [said] = said[..] else { panic!("a letter is told once: {head} {said:?}") };
            late += usize::from(matches!(said, Said::Late { .. }));
            let told = told.entry(call).or_default();
            match said {
                Said::Late { header, .. } | Said::Text(header) if header.ends_with(" cancelled]") => {
                    told.late_cancels += 1;
                }
                Said::Text(text) => {
                    assert!(text.ends_with("] You have read its result already."), "{text}");
                    told.read_notices += 1;
                    if text.contains(" cancelled] ") {
                        told.late_cancels += 1;
                    } else {
                        told.late_results += 1;
                    }
                }
                Said::Late { .. } | Said::Query(_) => told.late_results += 1,
            }
        }
        let all = user.said.iter().filter(|said| matches!(said, Said::Late { .. })).count();
        assert_eq!(late, all, "late results belong to letters");
    }
    told
}

fn nothing_is_told_twice(world: &World, session: &Session) {
    for (id, told) in told(session) {
        let call = &world.calls[&id];
        assert!(told.read_notices == 0 || world.was_read(session, id), "nobody has read it: {call:?}");
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
    let told = told(session);
    for call in world.calls.values() {
        assert!(call.state.is_final(), "{} is {:?}", call.name, call.state);
        let told = told.get(&call.id).cloned().unwrap_or_default();
        assert_eq!(told.answered + told.answered_cancelled + told.placeholder, 1, "one answer: {told:?}");
        if told.placeholder == 0 {
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
