//! Starting sessions and speaking to them.

use std::{collections::BTreeMap, sync::Arc};

use axum::{
    extract::State,
    http::{HeaderValue, StatusCode, header},
    response::Response,
};
use base64::{Engine, prelude::BASE64_STANDARD};
use holdfast_engine::{
    content::{Media, Payload, Query},
    decide::Mode,
    ids::{MailId, SessionId},
};
use holdfast_store::{
    accept::{self, Message},
    create::{self, NewSession},
    history,
    idempotency::Done,
    letters::Receipt,
};
use serde::Deserialize;
use utoipa::ToSchema;
use uuid::Uuid;

use crate::{
    auth::Who,
    describe::PostErrors,
    error::{Answer, ApiError, ErrorBody},
    extract::{Asked, KeyHeader, Posted, SessionPath, Waiting, objects},
    limits,
    runs::{repeated, show},
    state::{Shared, to_the_end},
    view::SessionView,
};

/// How far a run goes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum RunMode {
    /// Nothing runs.
    None,
    /// One model request, or one round of tool calls.
    Step,
    /// Until nothing is left that the engine can do by itself.
    #[default]
    UntilBlocked,
}

impl From<RunMode> for Mode {
    fn from(mode: RunMode) -> Self {
        match mode {
            RunMode::None => Self::None,
            RunMode::Step => Self::Step,
            RunMode::UntilBlocked => Self::UntilBlocked,
        }
    }
}

/// An attachment.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct MediaBody {
    /// MIME type, such as `image/png`.
    #[schema(max_length = 200, pattern = "^[^/]+/.+$")]
    mime: String,
    /// The bytes in standard base64, padded.
    #[schema(content_encoding = "base64")]
    base64: String,
    #[schema(max_length = 500)]
    filename: Option<String>,
}

/// A session to start.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CreateBody {
    /// Slug of the agent.
    #[schema(max_length = 100)]
    agent: String,
    /// The first message. Without it and without media the session is `ready` and nothing runs.
    prompt: Option<String>,
    #[serde(default, deserialize_with = "objects")]
    #[schema(max_items = 64)]
    media: Option<Vec<MediaBody>>,
    /// `until_blocked` unless given.
    run: Option<RunMode>,
    /// The session that it belongs to.
    parent: Option<String>,
    /// At most 64, for finding it; keys hold neither `:` nor NUL.
    labels: Option<BTreeMap<String, String>>,
    /// -100 to 100; higher ones run first among their owner's.
    #[schema(minimum = -100, maximum = 100)]
    priority: Option<i16>,
}

/// A message to a session.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct MessageBody {
    /// What is said; may be missing or empty if there is media.
    prompt: Option<String>,
    #[serde(default, deserialize_with = "objects")]
    #[schema(max_items = 64)]
    media: Option<Vec<MediaBody>>,
    /// `until_blocked` unless given.
    run: Option<RunMode>,
    /// Makes the message idempotent: a repeat is the same message.
    message_id: Option<Uuid>,
    /// Whether it is said at once, with placeholders for the calls that the conversation waits for; they go on in
    /// the background.
    interrupt: Option<bool>,
}

/// Starts a session.
#[utoipa::path(post, path = "/v1/sessions", tag = "sessions", params(Waiting, KeyHeader), request_body = CreateBody,
    responses(
        (status = 201, description = "The session, as it is when the answer is made.", body = SessionView,
         headers(("Location" = String, description = "Its path."))),
        (status = 404, description = "`unknown_agent`; `unknown_session` for the parent.", body = ErrorBody),
        PostErrors))]
pub(crate) async fn create(
    State(api): State<Shared>,
    who: Who,
    Asked(waiting): Asked<Waiting>,
    posted: Posted<CreateBody>,
) -> Answer<Response> {
    let (body, key) = posted.open(201);
    let new = new_session(body, &who.owner)?;
    let folds = new.run == Mode::None && new.message.is_some();
    let caller = who.caller(key);
    let store = api.store.clone();
    let done = to_the_end(async move { create::create(&store, &caller, new.clone()).await }).await?;
    let id = match done {
        Done::Now(id) => id,
        Done::Before { resource, .. } => repeated(&resource)?,
    };
    let view = show(&api, &who.owner, id, waiting, folds).await?;
    let mut response = view.answer(Some(StatusCode::CREATED));
    if let Ok(path) = HeaderValue::from_str(&format!("/v1/sessions/{id}")) {
        response.headers_mut().insert(header::LOCATION, path);
    }
    Ok(response)
}

fn new_session(body: CreateBody, owner: &Arc<str>) -> Answer<NewSession> {
    let CreateBody { agent, prompt, media, run, parent, labels, priority } = body;
    if agent.contains('\0') {
        return Err(ApiError::bad_request("agent must not contain NUL"));
    }
    if agent.len() > limits::SLUG {
        return Err(ApiError::unknown_agent(&agent));
    }
    let priority = priority.unwrap_or(0);
    if !limits::PRIORITY.contains(&priority) {
        return Err(ApiError::bad_request("priority must be -100 to 100"));
    }
    let parent = parent.map(|id| id.parse().map_err(|_| ApiError::unknown_session())).transpose()?;
    Ok(NewSession {
        id: SessionId(Uuid::now_v7()),
        owner: owner.to_string(),
        agent,
        parent,
        parent_call: None,
        labels: checked_labels(labels.unwrap_or_default())?,
        priority,
        message: message(None, prompt.unwrap_or_default(), media.unwrap_or_default())?,
        run: run.unwrap_or_default().into(),
    })
}

fn checked_labels(labels: BTreeMap<String, String>) -> Answer<BTreeMap<String, String>> {
    if labels.len() > limits::LABELS {
        return Err(ApiError::bad_request(format!("at most {} labels", limits::LABELS)));
    }
    let fits = |(key, value): (&String, &String)| {
        // A filter names them as `key:value`.
        let plain = !key.contains([':', '\0']);
        plain && (1..=limits::LABEL_KEY).contains(&key.len()) && value.len() <= limits::LABEL_VALUE
    };
    if !labels.iter().all(fits) {
        let (key, value) = (limits::LABEL_KEY, limits::LABEL_VALUE);
        let message =
            format!("a label's key must be 1 to {key} bytes without ':' and NUL, its value at most {value}");
        return Err(ApiError::bad_request(message));
    }
    Ok(labels)
}

/// A message, or none if nothing is said.
pub(crate) fn message(id: Option<Uuid>, text: String, media: Vec<MediaBody>) -> Answer<Option<Message>> {
    if text.is_empty() && media.is_empty() {
        return Ok(None);
    }
    if media.len() > limits::MEDIA {
        return Err(ApiError::bad_request(format!("at most {} attachments", limits::MEDIA)));
    }
    let media = (0..).zip(media).map(attachment).collect::<Answer<_>>()?;
    let (query, blob) = Payload::pack(Query { text, media });
    let id = MailId(id.unwrap_or_else(Uuid::now_v7));
    Ok(Some(Message { id, query, blobs: blob.into_iter().collect(), interrupt: false }))
}

fn attachment((index, media): (usize, MediaBody)) -> Answer<Media> {
    let MediaBody { mime, base64, filename } = media;
    let refuse = |problem: &str| Err(ApiError::bad_request(format!("media[{index}]: {problem}")));
    let plain = mime.split_once('/').is_some_and(|(kind, rest)| !kind.is_empty() && !rest.is_empty());
    if !plain || mime.len() > limits::MIME || mime.chars().any(|c| c.is_control()) {
        return refuse("mime must be a MIME type, such as image/png");
    }
    if filename.as_ref().is_some_and(|name| name.len() > limits::FILENAME) {
        return refuse(&format!("filename must be at most {} bytes", limits::FILENAME));
    }
    if BASE64_STANDARD.decode(&base64).is_err() {
        return refuse("base64 must be standard base64, padded");
    }
    Ok(Media { mime_type: mime, base64_data: base64, filename })
}

/// Sends a message. A busy session takes it as mail and considers it when it comes to it.
#[utoipa::path(post, path = "/v1/sessions/{id}/messages", tag = "sessions",
    params(("id" = String, Path, description = "The session."), Waiting, KeyHeader), request_body = MessageBody,
    responses(
        (status = 200, description = "The session with the message's `receipt`; no run is active.", body = SessionView),
        (status = 202, description = "The same, while a run is active.", body = SessionView),
        (status = 404, description = "`unknown_session`.", body = ErrorBody),
        (status = 429, description = "`mailbox_full`.", body = ErrorBody),
        PostErrors))]
pub(crate) async fn send_message(
    State(api): State<Shared>,
    who: Who,
    SessionPath(id): SessionPath,
    Asked(waiting): Asked<Waiting>,
    posted: Posted<MessageBody>,
) -> Answer<Response> {
    let run: Mode = posted.body.run.unwrap_or_default().into();
    let first = if run == Mode::None { 200 } else { 202 };
    let (body, key) = posted.open(first);
    let keyed = key.is_some();
    let MessageBody { prompt, media, run: _, message_id, interrupt } = body;
    let message = message(message_id, prompt.unwrap_or_default(), media.unwrap_or_default())?;
    let message = message.ok_or_else(|| ApiError::bad_request("prompt must not be empty without media"))?;
    let message = Message { interrupt: interrupt.unwrap_or(false), ..message };
    let (store, caller) = (api.store.clone(), who.caller(key));
    let done = to_the_end(async move { accept::post(&store, &caller, id, &message, run).await }).await?;
    let (code, receipt) = match done {
        Done::Now(receipt) => (first, receipt),
        Done::Before { code, resource } => (code, first_receipt(&api, id, &resource).await?),
    };
    let view = show(&api, &who.owner, id, waiting, run == Mode::None).await?.with_receipt(receipt);
    Ok(view.answer(crate::runs::code(code, keyed, waiting)))
}

/// The receipt of a letter that a repeated request names.
pub(crate) async fn first_receipt(api: &Shared, session: SessionId, resource: &str) -> Answer<Receipt> {
    let letter = resource.rsplit_once('/').and_then(|(_, letter)| letter.parse().ok());
    let id: MailId = letter.ok_or_else(ApiError::internal)?;
    let seq = history::mail_number(&api.store, session, id).await?.ok_or_else(ApiError::unknown_session)?;
    Ok(Receipt { id, seq, duplicate: true })
}
