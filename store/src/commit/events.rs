//! What a step tells those who watch its session.

use std::collections::HashSet;

use holdfast_engine::{
    decide::Mode,
    ids::{CallId, SessionId},
    session::{Event, Status},
    waits::Waits,
};
use serde_json::json;

use super::{Commit, RunAfter};
use crate::letters::NewEvent;

/// The events of a step: what ended, what the session is now, what begins, and how the run ended. A step that also
/// stores the answer which its user turn answers tells of that first, and of the calls that began and ended since.
pub(super) fn of(
    work: &Commit,
    status: Status,
    detail: Option<&str>,
    mode: Mode,
    released: bool,
) -> Vec<NewEvent> {
    let (mut ended, mut begun, mut deferred) = (Vec::new(), Vec::new(), Vec::new());
    let subcall = |call: CallId, kind: &'static str, child: SessionId, agent: &str| {
        let body = json!({"tool_call_id": call, "child_session_id": child, "agent": agent});
        NewEvent::new(kind, &body)
    };
    let started = |call: CallId| {
        NewEvent::new("tool.started", &json!({"tool_call_id": call, "tool": tool(work, call)}))
    };
    let version = work.session.version + 1;
    let updated = |head: Option<i64>| NewEvent::updated(version, status, detail, head);
    let turns = work.happened.iter().filter_map(|event| match event {
        Event::Answered { turn, .. } | Event::Sealed(turn) => Some(turn.position),
        _ => None,
    });
    let head = (work.session.length() > 0).then(|| work.session.length());
    let mut events: Vec<NewEvent> =
        turns.filter(|turn| Some(*turn) != head).map(|turn| updated(Some(turn))).collect();
    let ends = work.happened.iter().filter_map(|event| match event {
        Event::Finished { call, .. } => Some(*call),
        _ => None,
    });
    let ends: HashSet<CallId> = ends.collect();
    for event in &work.happened {
        match event {
            Event::Finished { call, settled, .. } => {
                let succeeded = settled.word() == "completed";
                if let Some(Waits::Child { session_id, agent }) = waits(work, *call) {
                    let kind = if succeeded { "subcall.completed" } else { "subcall.failed" };
                    ended.push(subcall(*call, kind, *session_id, agent));
                }
                ended.push(NewEvent::new(
                    "tool.completed",
                    &json!({"tool_call_id": call, "tool": tool(work, *call), "succeeded": succeeded, "state": settled.word()}),
                ));
            }
            Event::Waits { call, waits, .. } => {
                let begins = if ends.contains(call) { &mut events } else { &mut begun };
                begins.push(started(*call));
                if let Waits::Child { session_id, agent } = waits {
                    begins.push(subcall(*call, "subcall.started", *session_id, agent));
                }
            }
            Event::Started { call, .. } => {
                let begins = if ends.contains(call) { &mut events } else { &mut begun };
                begins.push(started(*call));
            }
            Event::Deferred { call, .. } => deferred.push(*call),
            _ => {}
        }
    }
    events.extend(ended);
    events.push(updated(head));
    if !deferred.is_empty() {
        events.push(NewEvent::new("calls.deferred", &json!({"calls": deferred})));
    }
    events.extend(begun);
    if let (true, RunAfter::End { .. }) = (released && mode != Mode::None, &work.run) {
        if status == Status::Failed {
            events.push(NewEvent::new("session.failed", &json!({"message": detail.unwrap_or_default()})));
        }
        events.push(NewEvent::new("run.stopped", &json!({"status": status.word()})));
    }
    events
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
        mail::Settled,
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
