//! Events as everybody outside is shown them, on streams and by webhooks. They are stored as references; what they
//! refer to is read when they are shown.

use holdfast_engine::ids::SessionId;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use uuid::Uuid;

use crate::{
    Store,
    errors::StoreError,
    feed::EventRow,
    history::{self, DeferredCall},
};

/// The body of `calls.deferred`.
#[derive(Deserialize)]
struct Deferred {
    calls: Vec<Uuid>,
}

/// What an event says of itself, and what it refers to besides the session. What is gone from the database is
/// missing from it.
///
/// # Errors
/// [`StoreError`] as the database has it, and [`StoreError::Corrupt`] for a body that is no object.
pub async fn data(store: &Store, event: &EventRow) -> Result<Map<String, Value>, StoreError> {
    if event.kind != "calls.deferred" {
        return Ok(serde_json::from_str(&event.body)?);
    }
    let body: Deferred = serde_json::from_str(&event.body)?;
    let calls = history::deferred_calls(store, SessionId(event.session_id), &body.calls).await?;
    // As the event left them: what became of them since is told by later events.
    let as_deferred = |call| DeferredCall { state: "open".to_owned(), ..call };
    let calls: Vec<Value> = calls.into_iter().map(as_deferred).map(|one| call(&one)).collect();
    Ok(Map::from_iter([("calls".to_owned(), Value::Array(calls))]))
}

/// Adds which event it is, as every rendering of one says it.
pub fn name(data: &mut Map<String, Value>, event: &EventRow) {
    data.insert("session_id".to_owned(), json!(event.session_id));
    data.insert("kind".to_owned(), json!(event.kind));
    data.insert("seq".to_owned(), json!(event.seq));
    data.insert("at".to_owned(), json!(event.at));
}

/// A deferred call with its token.
pub fn call(call: &DeferredCall) -> Value {
    json!({
        "tool_call_id": call.call_id,
        "continuation_token": call.token,
        "session_id": call.session_id,
        "agent": call.agent,
        "tool": call.tool,
        "disposition": "defer",
        "reason": call.reason,
        "state": call.state,
        "approval": call.approval,
        "created_at": call.created_at,
        "expires_at": call.expires_at,
        "call": {
            "id": call.provider_id,
            "type": "function",
            "function": {"name": call.tool, "arguments": call.arguments},
        },
    })
}
