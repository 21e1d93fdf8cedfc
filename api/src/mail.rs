//! A session's mailbox.

use axum::{Json, extract::State, http::StatusCode};
use holdfast_engine::{
    content::{Digest, INLINE_LIMIT, Payload, Query},
    decide::Mode,
    ids::{CallId, MailId, SessionId},
    mail::{Control, Envelope, MailBody, Priority, Sender, Settled},
    waking::WakeClass,
};
use holdfast_store::{
    StoreError, accept, history,
    idempotency::Done,
    letters::{Ask, Letter},
    load, sessions,
    waking::Wake,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use crate::{
    auth::Who,
    create::{MediaBody, first_receipt, message},
    describe::{PostErrors, ReadErrors},
    error::{Answer, ApiError, ErrorBody},
    extract::{
        Asked, Flag, KeyHeader, Nothing, Posted, SessionPath, inline_text, object, objects, page_size,
    },
    limits,
    state::{Api, Shared, to_the_end},
    turns::result_json,
    view::ReceiptView,
};

/// A letter to a session.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct LetterBody {
    #[serde(deserialize_with = "object")]
    body: LetterText,
    /// `normal` unless given; `high`, or `interrupt`, which is another word for it.
    #[schema(value_type = Option<String>)]
    priority: Option<Priority>,
    /// Makes the letter idempotent: a repeat is the same letter.
    id: Option<Uuid>,
}

/// What a client's letter may say.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(tag = "tag", rename_all = "camelCase", deny_unknown_fields)]
enum LetterText {
    /// A person asks.
    UserMessage { query: Said },
    /// Another agent writes.
    #[serde(rename_all = "camelCase")]
    AgentMessage {
        /// At most 65,536 bytes.
        #[schema(max_length = 65536)]
        text: String,
        in_reply_to: Option<Uuid>,
        expects_reply: Option<bool>,
    },
    /// An order to the engine.
    Control {
        #[serde(deserialize_with = "object")]
        message: Order,
    },
}

/// A text, alone or with attachments.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "query must be a text, or {text, media}")]
enum Said {
    Text(String),
    With(#[serde(deserialize_with = "object")] SaidWith),
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct SaidWith {
    text: String,
    #[serde(default, deserialize_with = "objects")]
    media: Option<Vec<MediaBody>>,
}

/// An order to the engine; the model doesn't see it.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(tag = "tag", rename_all = "camelCase", deny_unknown_fields)]
enum Order {
    /// End the run after the current step and hold the session.
    Pause {},
    /// Lift a hold and run on.
    Resume {},
    /// End the run at once; its unfinished local calls are cancelled.
    StopRun {},
    /// Cancel every call that the run waits for.
    CancelAllAttached {},
    /// Cancel these calls if they are still open: by the engine's id or by the provider's.
    #[serde(rename_all = "camelCase")]
    CancelCalls { tool_call_ids: Vec<String> },
}

/// Puts a letter into a session's mailbox.
#[utoipa::path(post, path = "/v1/sessions/{id}/mail", tag = "mail",
    params(("id" = String, Path, description = "The session."), KeyHeader), request_body = LetterBody,
    responses(
        (status = 202, description = "It is accepted.", body = ReceiptView),
        (status = 404, description = "`unknown_session`.", body = ErrorBody),
        (status = 429, description = "`mailbox_full`.", body = ErrorBody),
        PostErrors))]
pub(crate) async fn send(
    State(api): State<Shared>,
    who: Who,
    SessionPath(id): SessionPath,
    Asked(Nothing {}): Asked<Nothing>,
    posted: Posted<LetterBody>,
) -> Answer<(StatusCode, Json<ReceiptView>)> {
    let (LetterBody { body, priority, id: letter }, key) = posted.open(202);
    let letter_id = letter.unwrap_or_else(Uuid::now_v7);
    // Whether what people and programs say starts a run, the agent decides; orders decide for themselves.
    let of_user = Wake::As(WakeClass::User);
    let (body, wake, blobs) = match body {
        LetterText::UserMessage { query } => {
            let (text, media) = match query {
                Said::Text(text) => (text, Vec::new()),
                Said::With(SaidWith { text, media }) => (text, media.unwrap_or_default()),
            };
            let message = message(Some(letter_id), text, media)?
                .ok_or_else(|| ApiError::bad_request("query must not be empty"))?;
            (MailBody::UserMessage { query: message.query }, of_user, message.blobs)
        }
        LetterText::AgentMessage { text, in_reply_to, expects_reply } => {
            let (text, in_reply_to) = (inline_text("text", text)?, in_reply_to.map(MailId));
            let expects_reply = expects_reply.unwrap_or(false);
            (MailBody::AgentMessage { text, in_reply_to, expects_reply }, of_user, Vec::new())
        }
        LetterText::Control { message } => {
            let message = control(&api, &who.owner, id, message).await?;
            let ask = match message {
                Control::Resume => Ask::Run(Mode::UntilBlocked),
                // The model goes on with what the calls have come to.
                Control::CancelCalls { .. } | Control::CancelAllAttached => Ask::GoOn,
                _ => Ask::Fold,
            };
            (MailBody::Control { message }, Wake::By(ask), Vec::new())
        }
    };
    let owner = Some(who.owner.to_string()).filter(|owner| !owner.is_empty());
    let order = matches!(body, MailBody::Control { .. });
    let priority = priority.unwrap_or(if order { Priority::High } else { Priority::Normal });
    let letter = Letter { id: MailId(letter_id), from: Sender::User { owner }, priority, hops: 0, body };
    let (store, caller) = (api.store.clone(), who.caller(key));
    let done =
        to_the_end(async move { accept::send(&store, &caller, id, letter, wake, &blobs).await }).await?;
    let receipt = match done {
        Done::Now(receipt) => receipt,
        Done::Before { resource, .. } => first_receipt(&api, id, &resource).await?,
    };
    Ok((StatusCode::ACCEPTED, Json(receipt.into())))
}

async fn control(api: &Api, owner: &str, session: SessionId, order: Order) -> Answer<Control> {
    Ok(match order {
        Order::Pause {} => Control::Pause,
        Order::Resume {} => Control::Resume,
        Order::StopRun {} => Control::StopRun,
        Order::CancelAllAttached {} => Control::CancelAllAttached,
        Order::CancelCalls { tool_call_ids } => {
            if tool_call_ids.len() > limits::CANCELLED_CALLS {
                let message = format!("at most {} toolCallIds", limits::CANCELLED_CALLS);
                return Err(ApiError::bad_request(message));
            }
            // The calls are another owner's secret too.
            sessions::get(&api.store, Some(owner), session).await?;
            let untold = history::untold_calls(&api.store, session).await?;
            let find = |name: &String| {
                let by_provider = || untold.iter().rev().find(|call| call.provider_id == *name);
                let id = name.parse().ok().or_else(|| by_provider().map(|call| call.id)).map(CallId);
                id.ok_or_else(|| ApiError::bad_request(format!("toolCallIds: no call {name:?} is open")))
            };
            Control::CancelCalls { tool_call_ids: tool_call_ids.iter().map(find).collect::<Answer<_>>()? }
        }
    })
}

/// Which letters a listing shows.
#[derive(Debug, Clone, Copy, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct MailQuery {
    /// Only those that the model hasn't been told yet.
    #[param(value_type = Option<bool>)]
    unread: Option<Flag>,
    /// Only those above this number.
    #[param(minimum = 0)]
    after: Option<i64>,
    /// 1 to 500; 500 unless given.
    #[param(minimum = 1, maximum = 500)]
    limit: Option<i64>,
}

/// Letters of a mailbox.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Mailbox {
    /// Envelopes in order: `{id, seq, from, priority, hops, sentAt, body}`.
    #[schema(value_type = Vec<Object>)]
    mail: Vec<Value>,
}

/// Letters of a session's mailbox, in order.
#[utoipa::path(get, path = "/v1/sessions/{id}/mail", tag = "mail",
    params(("id" = String, Path, description = "The session."), MailQuery),
    responses(
        (status = 200, description = "The letters; fewer than asked for if they are large.", body = Mailbox),
        (status = 404, description = "`unknown_session`.", body = ErrorBody),
        ReadErrors))]
pub(crate) async fn list(
    State(api): State<Shared>,
    who: Who,
    SessionPath(id): SessionPath,
    Asked(query): Asked<MailQuery>,
) -> Answer<Json<Mailbox>> {
    let limit = page_size(query.limit, limits::LIST_MAX)?;
    sessions::get(&api.store, Some(&who.owner), id).await?;
    let (after, unread) = (query.after.unwrap_or(0), query.unread.unwrap_or_default().0);
    let mut letters = history::mail(&api.store, id, after, unread, limit).await?;
    let mut bytes = 0_u64;
    let within = |letter: &&Envelope| {
        bytes = bytes.saturating_add(size(letter));
        bytes <= limits::PAGE_BYTES
    };
    let fitting = letters.iter().take_while(within).count();
    letters.truncate(fitting.max(1));
    let digests: Vec<Digest> = letters.iter().filter_map(blob).map(|(digest, _)| digest).collect();
    let blobs = load::blobs(&api.store, &who.owner, &digests).await?;
    let mail = letters.iter().map(|letter| envelope(letter, &blobs)).collect::<Result<_, _>>()?;
    Ok(Json(Mailbox { mail }))
}

/// Bytes that a letter refers to, or about as many as it holds.
fn size(letter: &Envelope) -> u64 {
    let text = match &letter.body {
        MailBody::AgentMessage { text, .. } => text,
        MailBody::ContinuationResult { settled, .. } | MailBody::ToolCallFinished { settled, .. } => {
            match settled {
                Settled::Failed { message } | Settled::Cancelled { message } => message,
                Settled::Completed { .. } => "",
            }
        }
        _ => "",
    };
    blob(letter).map_or(INLINE_LIMIT as u64, |(_, size)| size).saturating_add(text.len() as u64)
}

/// The blob that a letter names, and its size.
fn blob(letter: &Envelope) -> Option<(Digest, u64)> {
    fn of<T>(payload: &Payload<T>) -> Option<(Digest, u64)> {
        match payload {
            Payload::Blob { blob, bytes } => Some((*blob, *bytes)),
            Payload::Inline(_) => None,
        }
    }
    match &letter.body {
        MailBody::UserMessage { query } => of(query),
        MailBody::ContinuationResult { settled: Settled::Completed { result }, .. }
        | MailBody::ToolCallFinished { settled: Settled::Completed { result }, .. } => of(result),
        _ => None,
    }
}

fn envelope(letter: &Envelope, blobs: &dyn holdfast_engine::content::Blobs) -> Result<Value, StoreError> {
    let mut shown = serde_json::to_value(letter)?;
    match &letter.body {
        MailBody::UserMessage { query } => {
            let Query { text, media } = query.open(blobs)?;
            shown["body"]["query"] =
                if media.is_empty() { json!(text) } else { json!({"text": text, "media": media}) };
        }
        MailBody::ContinuationResult { settled: Settled::Completed { result }, .. }
        | MailBody::ToolCallFinished { settled: Settled::Completed { result }, .. } => {
            shown["body"]["settled"]["result"] = result_json(&result.open(blobs)?)?;
        }
        _ => {}
    }
    Ok(shown)
}
