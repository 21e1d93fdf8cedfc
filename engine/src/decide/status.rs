//! What a model is told of its own calls.

use serde_json::{Value, json};

use crate::{
    Time,
    content::{Payload, ToolResult},
    ids::CallId,
    mail::Settled,
    session::{CallState, Session, TrackedCall},
    turn::{LlmCall, Shown, TurnBody},
    waits::Waits,
};

/// The word for a call's state that models read.
pub(super) fn word(call: &TrackedCall) -> &'static str {
    match call.state {
        CallState::Ready => "pending",
        CallState::Waiting if call.child().is_some() => "running",
        state => state.word(),
    }
}

/// A tracked call by the name that the model has for it: the provider's id, of several the newest that is open,
/// else the newest; or the engine's id. `not` is the call that asks.
pub(super) fn find<'a>(session: &'a Session, name: &str, not: CallId) -> Option<&'a TrackedCall> {
    let named = || {
        let others = session.calls.iter().rev().filter(move |call| call.id != not);
        others.filter(|call| call.provider_id == name || call.id.to_string() == name)
    };
    named().find(|call| !call.state.is_final()).or_else(|| named().next())
}

/// The engine's ids of calls that the model names; those that are over are left to their place in the past.
pub(super) fn find_all(session: &Session, names: &[String], not: CallId) -> Result<Vec<CallId>, String> {
    let one = |name: &String| {
        let tracked = find(session, name, not).map(|call| call.id);
        let known = tracked.or_else(|| past(session, name, not));
        known.ok_or_else(|| format!("no call {name:?} was made in this session"))
    };
    names.iter().map(one).collect()
}

/// A call that is no longer tracked; not the one that asks.
fn past(session: &Session, name: &str, not: CallId) -> Option<CallId> {
    session.turns.iter().rev().find_map(|turn| match &turn.body {
        TurnBody::Llm(llm) => {
            let named = |call: &&LlmCall| call.provider_id == name || call.id.to_string() == name;
            llm.calls.iter().find(|call| call.id != not && named(call)).map(|call| call.id)
        }
        TurnBody::User(_) => None,
    })
}

/// What is said of a call that is no longer tracked: its end was told.
pub(super) fn of_past(session: &Session, name: &str, not: CallId) -> Option<Value> {
    let id = past(session, name, not)?;
    let answer = session.turns.iter().find_map(|turn| match &turn.body {
        TurnBody::User(user) => user.answers.iter().find(|answer| answer.call == id),
        TurnBody::Llm(_) => None,
    });
    let status = match answer.map(|answer| &answer.shown) {
        Some(Shown::Settled(settled)) => settled.word(),
        _ => "completed",
    };
    Some(json!({"tool_call_id": name, "status": status, "is_final": true,
        "message": "Its result was told in the conversation."}))
}

/// What is said of a tracked call, and whether that is its whole result.
pub(super) fn of(call: &TrackedCall, progress: Vec<Value>, now: Time) -> (Value, bool) {
    let mut shown = brief(call);
    shown["is_final"] = json!(call.state.is_final());
    if let Some(started) = call.started_at {
        let end = call.finished_at.unwrap_or(now);
        shown["seconds"] = json!((end - started).num_milliseconds().max(0) as f64 / 1000.0);
    }
    if !progress.is_empty() {
        shown["progress"] = Value::Array(progress);
    }
    let whole = match &call.settled {
        None => false,
        Some(Settled::Completed { result: Payload::Inline(result) }) => {
            match result {
                ToolResult::Text { content } => shown["result"] = json!(content),
                ToolResult::Json { content } => shown["result"] = content.clone(),
                // Attachments can't stand in a text: they come with the message that tells the end.
                ToolResult::Media(_) | ToolResult::Mixed { .. } => {
                    shown["message"] = json!("The result follows as a message.");
                }
            }
            shown.get("result").is_some()
        }
        Some(Settled::Completed { result: Payload::Blob { .. } }) => {
            shown["message"] = json!("The result is long; it follows as a message.");
            false
        }
        Some(Settled::Failed { message } | Settled::Cancelled { message }) => {
            // A worker that died says so in the text.
            if message.starts_with("orphaned:") {
                shown["status"] = json!("orphaned");
            }
            shown["error"] = json!(message);
            true
        }
    };
    (shown, whole)
}

/// The calls that have no result yet, but for the one that asks.
pub(super) fn list(session: &Session, not: CallId) -> Value {
    let open = session.calls.iter().filter(|call| call.id != not && !call.state.is_final());
    json!({"calls": open.map(brief).collect::<Vec<_>>()})
}

fn brief(call: &TrackedCall) -> Value {
    let mut shown = json!({"tool_call_id": call.provider_id, "tool": call.name, "status": word(call)});
    if let Some(started) = call.started_at {
        shown["started_at"] = json!(started.to_rfc3339_opts(chrono::SecondsFormat::Secs, true));
    }
    match &call.waits {
        Some(Waits::Child { session_id, .. }) => shown["child_session_id"] = json!(session_id),
        Some(Waits::Timer) => {
            let until = call.expires_at.map(|at| at.to_rfc3339_opts(chrono::SecondsFormat::Secs, true));
            shown["until"] = json!(until);
        }
        _ => {}
    }
    shown
}
