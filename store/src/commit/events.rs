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
/// would have told: first the answer, with what was deferred and begun, then the rest.
pub(super) fn of(
    work: &Commit,
    status: Status,
    detail: Option<&str>,
    mode: Mode,
    released: bool,
) -> Vec<NewEvent> {
    let ends: HashSet<CallId> = work.happened.iter().filter_map(ended_call).collect();
    let (mut passed, mut begun, mut ended, mut deferred) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for event in &work.happened {
        match event {
            Event::Finished { call, settled, .. } => ended.extend(completed(work, *call, settled)),
            Event::Waits { call, .. } | Event::Started { call, .. } => {
                let begins = if ends.contains(call) { &mut passed } else { &mut begun };
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
        if Some(turn.position) != head || (answer && !passed.is_empty()) {
            // The run went on from there.
            let status = if mode == Mode::None { status } else { Status::Running };
            events.push(NewEvent::updated(version, status, None, Some(turn.position)));
            answer_told |= answer;
        }
    }
    let (early, late) = if answer_told { (deferred, None) } else { (None, deferred) };
    events.extend(early);
    events.extend(passed);
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
    use chrono::DateTime;
    use holdfast_engine::{
        policy::{Applied, Disposition},
        session::{CallState, Session, TrackedCall},
    };
    use uuid::Uuid;

    use super::*;

    #[test]
    fn a_child_that_begins_and_ends_in_one_step_is_told_of_in_that_order() {
        let (call, child) = (CallId(Uuid::from_u128(1)), SessionId(Uuid::from_u128(2)));
        let waits = Waits::Child { session_id: child, agent: "helper".to_owned() };
        let (at, settled) = (DateTime::UNIX_EPOCH, Settled::Cancelled { message: "stopped".to_owned() });
        let mut session = Session::new(SessionId(Uuid::from_u128(3)));
        session.calls.push(TrackedCall {
            id: call,
            provider_id: "c".to_owned(),
            name: "prompt_agent_helper".to_owned(),
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
            state: CallState::Cancelled,
            attempt: 0,
            token: None,
            expires_at: None,
            waits: Some(waits.clone()),
            created_at: at,
            started_at: Some(at),
            settled: Some(settled.clone()),
            finished_at: Some(at),
            told: None,
            told_result: false,
            read: false,
        });
        let work = Commit {
            id: Uuid::from_u128(4),
            epoch: 1,
            agent: "main".to_owned(),
            agent_revision: "r".to_owned(),
            session,
            happened: vec![
                Event::Waits { call, waits, until: None, at },
                Event::Finished { call, settled, at },
            ],
            blobs: Vec::new(),
            run: RunAfter::Keep,
            to_parent: None,
            spawns: Vec::new(),
            dismissed: Vec::new(),
            traceparent: None,
        };
        let told = of(&work, Status::Running, None, Mode::UntilBlocked, false);
        let kinds: Vec<&str> = told.iter().map(|event| event.kind).collect();
        assert_eq!(
            kinds,
            ["tool.started", "subcall.started", "subcall.failed", "tool.completed", "session.updated"]
        );
    }
}
