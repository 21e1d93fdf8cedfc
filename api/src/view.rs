//! What clients see of sessions and deferred calls.

use std::{collections::BTreeMap, sync::Arc};

use axum::{
    Json,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use chrono::{DateTime, Utc};
use holdfast_engine::{ids::SessionId, mail::Settled, waits::Waits};
use holdfast_store::{
    StoreError,
    history::{DeferredCall, UntoldCall},
    letters::Receipt,
    sessions::{self, SessionRow},
    snapshot::{self, Snapshot},
};
use serde::Serialize;
use serde_json::{Value, json};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::{
    error::Answer,
    state::Api,
    turns::{self, TurnView, result_json},
};

/// A session without its turns.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct SessionMeta {
    pub(crate) session_id: Uuid,
    /// Slug of its agent.
    agent: String,
    /// The agent's revision that its last run used.
    agent_revision: String,
    parent_session_id: Option<Uuid>,
    forked_from: Option<Uuid>,
    /// Null where clients don't name themselves.
    owner: Option<String>,
    /// `ready`, `running`, `waiting_external`, `idle`, `paused` or `failed`.
    pub(crate) status: String,
    /// Why, where that needs words.
    pub(crate) status_detail: Option<String>,
    /// What a parked run waits for.
    pub(crate) parked_on: Option<String>,
    /// When a parked run wakes by itself.
    pub(crate) wakes_at: Option<DateTime<Utc>>,
    pub(crate) version: i64,
    settings_rev: i64,
    labels: BTreeMap<String, String>,
    pub(crate) created_at: DateTime<Utc>,
    pub(crate) updated_at: DateTime<Utc>,
    /// Session values that aren't secret.
    #[schema(value_type = Object)]
    params: serde_json::Map<String, Value>,
    /// Names of the secret values that are held.
    secret_params: Vec<String>,
    sealed: bool,
}

impl SessionMeta {
    pub(crate) fn of(row: &SessionRow) -> Result<Self, StoreError> {
        Ok(Self {
            session_id: row.id,
            agent: row.agent.clone(),
            agent_revision: row.agent_revision.clone(),
            parent_session_id: row.parent_id,
            forked_from: row.forked_from,
            owner: Some(row.owner.clone()).filter(|owner| !owner.is_empty()),
            status: row.status.clone(),
            status_detail: row.status_detail.clone(),
            parked_on: row.parked_on.clone(),
            wakes_at: row.wakes_at,
            version: row.version,
            settings_rev: row.settings_rev,
            labels: serde_json::from_str(&row.labels)?,
            created_at: row.created_at,
            updated_at: row.updated_at,
            params: serde_json::Map::new(),
            secret_params: Vec::new(),
            sealed: false,
        })
    }
}

/// A session with its newest turns and its open calls.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SessionView {
    #[serde(flatten)]
    meta: SessionMeta,
    session: Conversation,
    /// Deferred calls that are open.
    pending: Vec<DeferredCallView>,
    /// Calls that the model hasn't been told the end of: open, or ended since the newest turn.
    calls: Vec<CallView>,
    /// Of the message that this answers, if it does.
    #[serde(skip_serializing_if = "Option::is_none")]
    receipt: Option<ReceiptView>,
    #[serde(skip)]
    active: bool,
}

/// The turns of a session.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct Conversation {
    session_id: Uuid,
    forked_from_session_id: Option<Uuid>,
    /// Id of the newest turn; null without turns.
    turn_id: Option<Uuid>,
    session_version: u8,
    /// Newest first.
    turns: Vec<TurnView>,
}

/// A call that the model hasn't been told the end of.
#[derive(Debug, Serialize, ToSchema)]
struct CallView {
    /// The provider's id.
    id: String,
    /// The engine's id.
    tool_call_id: Uuid,
    /// The tool.
    name: String,
    /// `ready`, `running`, `waiting`, `deferred`, `completed`, `failed` or `cancelled`.
    state: String,
    /// The session that works on it, if one does.
    #[serde(skip_serializing_if = "Option::is_none")]
    child_session_id: Option<Uuid>,
    /// How it ended: a tool result, a text if it failed or was cancelled.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    result: Option<Value>,
}

/// A letter's place in a mailbox.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
pub(crate) struct ReceiptView {
    id: Uuid,
    /// Dense from 1, in order of acceptance.
    seq: i64,
    /// Whether it had been accepted before.
    duplicate: bool,
}

impl From<Receipt> for ReceiptView {
    fn from(receipt: Receipt) -> Self {
        Self { id: receipt.id.0, seq: receipt.seq, duplicate: receipt.duplicate }
    }
}

/// A call as models and providers write it.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct WrittenCall {
    /// The provider's id.
    id: String,
    /// Always `function`.
    #[serde(rename = "type")]
    #[schema(value_type = String)]
    kind: &'static str,
    function: Function,
}

#[derive(Debug, Clone, Serialize, ToSchema)]
struct Function {
    name: String,
    /// JSON as the model wrote it.
    arguments: String,
}

impl WrittenCall {
    pub(crate) fn new(id: &str, name: &str, arguments: &str) -> Self {
        let function = Function { name: name.to_owned(), arguments: arguments.to_owned() };
        Self { id: id.to_owned(), kind: "function", function }
    }
}

/// A call that somebody outside completes.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct DeferredCallView {
    /// The engine's id of the call.
    tool_call_id: Uuid,
    /// Completes the call by `POST /v1/continuations/{token}`.
    continuation_token: Uuid,
    session_id: Uuid,
    /// Slug of the session's agent.
    agent: String,
    tool: String,
    /// Always `defer`.
    #[schema(value_type = String)]
    disposition: &'static str,
    reason: String,
    /// `open`, `completed`, `failed`, `approved`, `cancelled` or `expired`.
    state: String,
    /// Whether `approve` answers it: it runs then, or is denied.
    approval: bool,
    created_at: DateTime<Utc>,
    /// Null if it waits for ever.
    expires_at: Option<DateTime<Utc>>,
    call: WrittenCall,
}

impl From<DeferredCall> for DeferredCallView {
    fn from(call: DeferredCall) -> Self {
        Self {
            tool_call_id: call.call_id,
            continuation_token: call.token,
            session_id: call.session_id,
            agent: call.agent,
            disposition: "defer",
            reason: call.reason,
            state: call.state,
            approval: call.approval,
            created_at: call.created_at,
            expires_at: call.expires_at,
            call: WrittenCall::new(&call.provider_id, &call.tool, &call.arguments),
            tool: call.tool,
        }
    }
}

/// Deferred calls.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Calls {
    pub(crate) calls: Vec<DeferredCallView>,
}

/// A session as it is now, with at most `limit` turns.
pub(crate) async fn session(api: &Api, owner: &Arc<str>, id: SessionId, limit: i64) -> Answer<SessionView> {
    // One turn more than are shown, since answers to calls show the call, which stands in the turn before.
    let most = limit.max(1);
    let Snapshot { row, turns, pending, untold } = snapshot::read(&api.store, owner, id, most + 1).await?;
    let newest = turns::newest(api, owner, &turns, most).await?;
    let turn_id = newest.first().map(|turn| turn.id);
    let turns = if limit == 0 { Vec::new() } else { newest };
    Ok(SessionView {
        meta: SessionMeta::of(&row)?,
        session: Conversation {
            session_id: row.id,
            forked_from_session_id: row.forked_from,
            turn_id,
            session_version: 2,
            turns,
        },
        pending: pending.into_iter().map(DeferredCallView::from).collect(),
        calls: calls(api, owner, untold).await?,
        receipt: None,
        active: row.active,
    })
}

/// A session's meta as it is now.
pub(crate) async fn meta(api: &Api, owner: &str, id: SessionId) -> Answer<SessionMeta> {
    let row = sessions::get(&api.store, Some(owner), id).await?;
    Ok(SessionMeta::of(&row)?)
}

async fn calls(api: &Api, owner: &Arc<str>, untold: Vec<UntoldCall>) -> Answer<Vec<CallView>> {
    let digests: Vec<_> = untold
        .iter()
        .filter_map(|call| match &call.settled {
            Some(Settled::Completed { result }) => result.digest(),
            _ => None,
        })
        .collect();
    let blobs = holdfast_store::load::blobs(&api.store, owner, &digests).await?;
    untold
        .into_iter()
        .map(|call| {
            let result = match &call.settled {
                Some(Settled::Completed { result }) => {
                    Some(result_json(&result.open(&blobs).map_err(StoreError::from)?)?)
                }
                Some(Settled::Failed { message } | Settled::Cancelled { message }) => {
                    Some(json!({"type": "text", "content": message}))
                }
                None => None,
            };
            let UntoldCall { id, provider_id, name, state, settled: _, waits } = call;
            let child_session_id = match waits {
                Some(Waits::Child { session_id, .. }) => Some(session_id.0),
                _ => None,
            };
            Ok(CallView { id: provider_id, tool_call_id: id, name, state, child_session_id, result })
        })
        .collect()
}

impl SessionView {
    /// With the receipt of the message that this answers.
    pub(crate) fn with_receipt(self, receipt: Receipt) -> Self {
        Self { receipt: Some(receipt.into()), ..self }
    }

    /// The answer: `code` if it is known before, else 202 while a run is active and 200 without.
    pub(crate) fn answer(self, code: Option<StatusCode>) -> Response {
        let computed = if self.active { StatusCode::ACCEPTED } else { StatusCode::OK };
        (code.unwrap_or(computed), Json(self)).into_response()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deferred_call_is_listed_as_its_event_shows_it() {
        let call = DeferredCall {
            token: Uuid::from_u128(1),
            session_id: Uuid::from_u128(2),
            agent: "helper".to_owned(),
            call_id: Uuid::from_u128(3),
            provider_id: "call_1".to_owned(),
            tool: "ask".to_owned(),
            arguments: r#"{"who": "anna"}"#.to_owned(),
            reason: "a person decides".to_owned(),
            state: "open".to_owned(),
            approval: true,
            created_at: DateTime::<Utc>::UNIX_EPOCH,
            expires_at: None,
        };
        let listed = serde_json::to_value(DeferredCallView::from(call.clone())).expect("JSON");
        assert_eq!(listed, holdfast_store::shown::call(&call));
    }
}
