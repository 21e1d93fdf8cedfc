//! What a step tells those who watch its session.

use std::collections::HashSet;

use holdfast_engine::{
    decide::Mode,
    ids::{CallId, SessionId},
    mail::Settled,
    session::{Event, Status},
    waits::Waits,
};
use serde_json::json;

use super::{Commit, RunAfter};
use crate::letters::NewEvent;

/// The events of a step: what ended, what the session is now, what begins, and how the run ended.
///
/// Calls may have begun and ended within a step that stores the answer which asked for them. It tells what two steps
/// would have told: first the answer, with what was deferred, then what began and ended, as it did, and the rest.
pub(super) fn of(
    work: &Commit,
    status: Status,
    detail: Option<&str>,
    mode: Mode,
    released: bool,
) -> Vec<NewEvent> {
    let ends: HashSet<CallId> = work.happened.iter().filter_map(ended_call).collect();
    let passes = |event: &Event| begun_call(event).is_some_and(|call| ends.contains(&call));
    let answers = |event: &Event| matches!(event, Event::Answered { .. });
    let at_once = work.happened.iter().any(answers) && work.happened.iter().any(passes);
    let (mut ended, mut begun, mut deferred) = (Vec::new(), Vec::new(), Vec::new());
    for event in &work.happened {
        match event {
            Event::Finished { call, settled, .. } => ended.extend(completed(work, *call, settled)),
            Event::Waits { call, .. } | Event::Started { call, .. } => {
                let begins = if at_once || passes(event) { &mut ended } else { &mut begun };
                begins.push(started(work, *call));
                if let Event::Waits { waits: Waits::Child { session_id, agent }, .. } = event {
                    begins.push(subcall("subcall.started", *call, *session_id, agent));
                }
            }
            Event::Deferred { call, .. } => deferred.push(*call),
            _ => {}
        }
    }
    let deferred =
        (!deferred.is_empty()).then(|| NewEvent::new("calls.deferred", &json!({"calls": deferred})));
    let version = work.session.version + 1;
    let head = (work.session.length() > 0).then(|| work.session.length());
    let mut events = Vec::new();
    let mut answer_told = false;
    for event in &work.happened {
        let (turn, answer) = match event {
            Event::Sealed(turn) => (turn, false),
            Event::Answered { turn, .. } => (turn, true),
            _ => continue,
        };
        if Some(turn.position) != head || (answer && at_once) {
            // The run went on from there.
            let status = if mode == Mode::None { status } else { Status::Running };
            events.push(NewEvent::updated(version, status, None, Some(turn.position)));
            answer_told |= answer;
        }
    }
    let (early, late) = if answer_told { (deferred, None) } else { (None, deferred) };
    events.extend(early);
    events.extend(ended);
    events.push(NewEvent::updated(version, status, detail, head));
    events.extend(late);
    events.extend(begun);
    if let (true, RunAfter::End { .. }) = (released && mode != Mode::None, &work.run) {
        if status == Status::Failed {
            events.push(NewEvent::new("session.failed", &json!({"message": detail.unwrap_or_default()})));
        }
        events.push(NewEvent::new("run.stopped", &json!({"status": status.word()})));
    }
    events
}

fn begun_call(event: &Event) -> Option<CallId> {
    match event {
        Event::Waits { call, .. } | Event::Started { call, .. } => Some(*call),
        _ => None,
    }
}

fn ended_call(event: &Event) -> Option<CallId> {
    match event {
        Event::Finished { call, .. } => Some(*call),
        _ => None,
    }
}

fn started(work: &Commit, call: CallId) -> NewEvent {
    NewEvent::new("tool.started", &json!({"tool_call_id": call, "tool": tool(work, call)}))
}

fn subcall(kind: &'static str, call: CallId, child: SessionId, agent: &str) -> NewEvent {
    NewEvent::new(kind, &json!({"tool_call_id": call, "child_session_id": child, "agent": agent}))
}

/// A call's end, after that of the child session that worked on it.
fn completed(work: &Commit, call: CallId, settled: &Settled) -> impl Iterator<Item = NewEvent> {
    let succeeded = matches!(settled, Settled::Completed { .. });
    let child = waits(work, call).and_then(|waits| match waits {
        Waits::Child { session_id, agent } => {
            let kind = if succeeded { "subcall.completed" } else { "subcall.failed" };
            Some(subcall(kind, call, *session_id, agent))
        }
        _ => None,
    });
    let body = json!({"tool_call_id": call, "tool": tool(work, call), "succeeded": succeeded, "state": settled.word()});
    child.into_iter().chain([NewEvent::new("tool.completed", &body)])
}

fn tool(work: &Commit, call: CallId) -> &str {
    work.session.call(call).map_or("", |call| call.name.as_str())
}

fn waits(work: &Commit, call: CallId) -> Option<&Waits> {
    work.session.call(call).and_then(|call| call.waits.as_ref())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use chrono::DateTime;
    use holdfast_engine::{
        ids::TurnId,
        model::Flavor,
        policy::{Applied, Disposition},
        session::{CallState, Session, TrackedCall},
        turn::{LlmTurn, Turn, TurnBody},
    };
    use uuid::Uuid;

    use super::*;

    fn tracked(id: u128, waits: Option<Waits>) -> TrackedCall {
        let at = DateTime::UNIX_EPOCH;
        TrackedCall {
            id: CallId(Uuid::from_u128(id)),
            provider_id: "c".to_owned(),
            name: "t".to_owned(),
            arguments: "{}".to_owned(),
            turn: 1,
            index: 0,
            policy: Applied {
                disposition: Disposition::RunSync,
                decided_by: "default".to_owned(),
                idempotent: true,
                read_only: false,
                deadline_seconds: None,
                on_deadline: None,
            },
            state: CallState::Running,
            attempt: 0,
            token: None,
            expires_at: None,
            waits,
            created_at: at,
            started_at: Some(at),
            settled: None,
            finished_at: None,
            told: None,
            told_result: false,
            read: false,
        }
    }

    /// What a step tells in which this happened to a session with these turns and calls.
    fn told(turns: Vec<Arc<Turn>>, calls: Vec<TrackedCall>, happened: Vec<Event>) -> Vec<&'static str> {
        let mut session = Session::new(SessionId(Uuid::from_u128(3)));
        (session.turns, session.calls) = (turns, calls);
        let work = Commit {
            id: Uuid::from_u128(4),
            epoch: 1,
            agent: "main".to_owned(),
            agent_revision: "r".to_owned(),
            session,
            happened,
            blobs: Vec::new(),
            run: RunAfter::Keep,
            to_parent: None,
            spawns: Vec::new(),
            dismissed: Vec::new(),
            traceparent: None,
        };
        let told = of(&work, Status::Running, None, Mode::UntilBlocked, false);
        told.iter().map(|event| event.kind).collect()
    }

    #[test]
    fn a_child_that_begins_and_ends_in_one_step_is_told_of_in_that_order() {
        let (call, child) = (CallId(Uuid::from_u128(1)), SessionId(Uuid::from_u128(2)));
        let waits = Waits::Child { session_id: child, agent: "helper".to_owned() };
        let (at, settled) = (DateTime::UNIX_EPOCH, Settled::Cancelled { message: "stopped".to_owned() });
        let calls = vec![tracked(1, Some(waits.clone()))];
        let happened =
            vec![Event::Waits { call, waits, until: None, at }, Event::Finished { call, settled, at }];
        assert_eq!(
            told(Vec::new(), calls, happened),
            ["tool.started", "subcall.started", "subcall.failed", "tool.completed", "session.updated"]
        );
    }

    #[test]
    fn what_begins_with_the_answer_that_asked_for_it_is_told_before_what_has_ended() {
        let at = DateTime::UNIX_EPOCH;
        let llm = LlmTurn {
            text: None,
            thinking: None,
            calls: Vec::new(),
            usage: None,
            flavor: Flavor::OpenAI,
            model: "m".to_owned(),
            stop_reason: None,
            raw: None,
        };
        let turn = Turn { id: TurnId(Uuid::from_u128(5)), position: 1, at, body: TurnBody::Llm(llm) };
        let turn = Arc::new(turn);
        let call = |id: u128| CallId(Uuid::from_u128(id));
        let started = |id: u128| Event::Started { call: call(id), at };
        let settled = Settled::Cancelled { message: "stopped".to_owned() };
        let finished = |id: u128| Event::Finished { call: call(id), settled: settled.clone(), at };
        let calls = || vec![tracked(1, None), tracked(2, None)];
        let answered = || Event::Answered { turn: Arc::clone(&turn), calls: calls() };
        let of = |happened: Vec<Event>| told(vec![Arc::clone(&turn)], calls(), happened);
        // The answer, what began, what ended, and what the session is then: whether it is one step or two.
        let two = [of(vec![answered(), started(1), started(2)]), of(vec![finished(1)])].concat();
        assert_eq!(of(vec![answered(), started(1), started(2), finished(1)]), two);
        assert_eq!(
            two,
            ["session.updated", "tool.started", "tool.started", "tool.completed", "session.updated"]
        );
        // The second one begins as the first one leaves its place.
        assert_eq!(
            of(vec![answered(), started(1), finished(1), started(2)]),
            ["session.updated", "tool.started", "tool.completed", "tool.started", "session.updated"]
        );
    }
}
