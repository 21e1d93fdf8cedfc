//! What a model is told of its own calls.

use serde_json::{Value, json};

use crate::{
    Time,
    content::{Payload, ToolResult},
    ids::CallId,
    mail::Settled,
    session::{Session, TrackedCall},
    transcript,
    turn::{LlmCall, TurnBody},
    waits::Waits,
};

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

/// What is said of a call by its name that is no longer tracked: its end was told.
pub(super) fn of_past(session: &Session, name: &str, not: CallId) -> Option<Value> {
    past(session, name, not).map(|id| told_before(session, id))
}

/// What is said of a call whose end was told.
pub(super) fn told_before(session: &Session, id: CallId) -> Value {
    let name = transcript::find_call(session, id).map_or_else(|| id.to_string(), |(name, _)| name);
    let mut shown = json!({"tool_call_id": name, "is_final": true,
        "message": "Its result was told in the conversation."});
    if let Some(word) = transcript::told_end(session, id) {
        shown["status"] = json!(word);
    }
    shown
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
    let mut shown = json!({"tool_call_id": call.provider_id, "tool": call.name, "status": call.word()});
    if let Some(started) = call.started_at {
        shown["started_at"] = json!(transcript::shown_time(started));
    }
    match &call.waits {
        Some(Waits::Child { session_id, .. }) => shown["child_session_id"] = json!(session_id),
        Some(Waits::Timer) => {
            shown["until"] = json!(call.expires_at.map(transcript::shown_time));
        }
        _ => {}
    }
    shown
}
