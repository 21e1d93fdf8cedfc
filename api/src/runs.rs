//! Running sessions on, stopping and pausing them.

use std::sync::Arc;

use axum::{Json, extract::State, http::StatusCode, response::Response};
use holdfast_engine::{decide::Mode, ids::SessionId};
use holdfast_store::{accept, idempotency::Done};
use serde::Deserialize;
use utoipa::ToSchema;

use crate::{
    auth::Who,
    describe::PostErrors,
    error::{Answer, ApiError, ErrorBody},
    extract::{Asked, KeyHeader, MaybePosted, Nothing, SessionPath, Waiting},
    limits,
    state::{Api, Shared, to_the_end},
    view::{self, SessionMeta, SessionView},
    wait::{Until, until},
};

/// How a session is run on.
#[derive(Debug, Clone, Copy, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ResumeBody {
    /// `until_blocked` unless given.
    mode: Option<ResumeMode>,
}

/// How far a run that is asked for goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ResumeMode {
    /// One model request, or one round of tool calls.
    Step,
    /// Until nothing is left that the engine can do by itself.
    UntilBlocked,
}

/// What is cancelled.
#[derive(Debug, Clone, Copy, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CancelBody {
    /// Cancel open deferred calls too; allowed without a run then.
    deferred: Option<bool>,
}

/// Nothing, or an empty object.
#[derive(Debug, Clone, Copy, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct EmptyBody {}

/// Runs a session on from where it stands; lifts a hold.
#[utoipa::path(post, path = "/v1/sessions/{id}/resume", tag = "sessions",
    params(("id" = String, Path, description = "The session."), Waiting, KeyHeader), request_body = Option<ResumeBody>,
    responses(
        (status = 200, description = "The session; no run is active.", body = SessionView),
        (status = 202, description = "The session, while a run is active.", body = SessionView),
        (status = 404, description = "`unknown_session`.", body = ErrorBody),
        (status = 409, description = "`run_in_progress`.", body = ErrorBody),
        PostErrors))]
pub(crate) async fn resume(
    State(api): State<Shared>,
    who: Who,
    SessionPath(id): SessionPath,
    Asked(waiting): Asked<Waiting>,
    MaybePosted(posted): MaybePosted<ResumeBody>,
) -> Answer<Response> {
    let (body, key) = posted.open(202);
    let keyed = key.is_some();
    let mode = match body.mode {
        Some(ResumeMode::Step) => Mode::Step,
        Some(ResumeMode::UntilBlocked) | None => Mode::UntilBlocked,
    };
    let (store, caller) = (api.store.clone(), who.caller(key));
    let done = to_the_end(async move { accept::resume(&store, &caller, id, mode).await }).await?;
    let (id, first) = match done {
        Done::Now(id) => (id, 202),
        Done::Before { code, resource } => (repeated(&resource)?, code),
    };
    let view = show(&api, &who.owner, id, waiting, false).await?;
    Ok(view.answer(code(first, keyed, waiting)))
}

/// Stops a session's run. Its local calls end, deferred ones stay open unless `deferred` says otherwise.
#[utoipa::path(post, path = "/v1/sessions/{id}/cancel", tag = "sessions",
    params(("id" = String, Path, description = "The session."), KeyHeader), request_body = Option<CancelBody>,
    responses(
        (status = 200, description = "The session after the run has ended.", body = SessionMeta),
        (status = 404, description = "`unknown_session`.", body = ErrorBody),
        (status = 409, description = "`no_active_run`.", body = ErrorBody),
        (status = 429, description = "`mailbox_full`: too many orders are unread.", body = ErrorBody),
        PostErrors))]
pub(crate) async fn cancel(
    State(api): State<Shared>,
    who: Who,
    SessionPath(id): SessionPath,
    Asked(Nothing {}): Asked<Nothing>,
    MaybePosted(posted): MaybePosted<CancelBody>,
) -> Answer<Json<SessionMeta>> {
    let (body, key) = posted.open(200);
    let deferred = body.deferred.unwrap_or(false);
    let (store, caller) = (api.store.clone(), who.caller(key));
    to_the_end(async move { accept::cancel(&store, &caller, id, deferred).await }).await?;
    until(&api, id, Until::Quiet, limits::CANCEL_WAIT).await?;
    view::meta(&api, &who.owner, id).await.map(Json)
}

/// Pauses a session: a run ends after its current step, and only a request of a person runs it on.
#[utoipa::path(post, path = "/v1/sessions/{id}/pause", tag = "sessions",
    params(("id" = String, Path, description = "The session."), KeyHeader), request_body = Option<EmptyBody>,
    responses(
        (status = 200, description = "The session; a step that takes long may still be under way.", body = SessionMeta),
        (status = 404, description = "`unknown_session`.", body = ErrorBody),
        (status = 429, description = "`mailbox_full`: too many orders are unread.", body = ErrorBody),
        PostErrors))]
pub(crate) async fn pause(
    State(api): State<Shared>,
    who: Who,
    SessionPath(id): SessionPath,
    Asked(Nothing {}): Asked<Nothing>,
    MaybePosted(posted): MaybePosted<EmptyBody>,
) -> Answer<Json<SessionMeta>> {
    let (EmptyBody {}, key) = posted.open(200);
    let (store, caller) = (api.store.clone(), who.caller(key));
    to_the_end(async move { accept::pause(&store, &caller, id).await }).await?;
    until(&api, id, Until::Quiet, limits::PAUSE_WAIT).await?;
    view::meta(&api, &who.owner, id).await.map(Json)
}

/// Cancels the calls that the conversation waits for: the model is told so and asked on. Calls in the background and
/// deferred ones go on.
#[utoipa::path(post, path = "/v1/sessions/{id}/cancel-attached", tag = "sessions",
    params(("id" = String, Path, description = "The session."), KeyHeader), request_body = Option<EmptyBody>,
    responses(
        (status = 200, description = "The session; the worker that holds its run obeys.", body = SessionMeta),
        (status = 404, description = "`unknown_session`.", body = ErrorBody),
        (status = 429, description = "`mailbox_full`: too many orders are unread.", body = ErrorBody),
        PostErrors))]
pub(crate) async fn cancel_attached(
    State(api): State<Shared>,
    who: Who,
    SessionPath(id): SessionPath,
    Asked(Nothing {}): Asked<Nothing>,
    MaybePosted(posted): MaybePosted<EmptyBody>,
) -> Answer<Json<SessionMeta>> {
    let (EmptyBody {}, key) = posted.open(200);
    let (store, caller) = (api.store.clone(), who.caller(key));
    to_the_end(async move { accept::cancel_attached(&store, &caller, id).await }).await?;
    view::meta(&api, &who.owner, id).await.map(Json)
}

/// The session that a repeated request was about.
pub(crate) fn repeated(resource: &str) -> Answer<SessionId> {
    let id = resource.split('/').next().and_then(|id| id.parse().ok());
    id.ok_or_else(ApiError::internal)
}

/// A session after a command: at once, after its run or, with `folds`, when what was sent shows.
pub(crate) async fn show(
    api: &Api,
    owner: &Arc<str>,
    id: SessionId,
    waiting: Waiting,
    folds: bool,
) -> Answer<SessionView> {
    if let Some(patience) = waiting.patience() {
        until(api, id, Until::Stopped, patience).await?;
    }
    if folds {
        until(api, id, Until::Quiet, limits::FOLD_WAIT).await?;
    }
    view::session(api, owner, id, limits::TURNS_DEFAULT).await
}

/// The code of an answer, where it doesn't follow from the session: a request with a key answers what its
/// repeats will, whatever the session does meanwhile; one that waits answers what came of it.
pub(crate) fn code(first: i16, keyed: bool, waiting: Waiting) -> Option<StatusCode> {
    let fixed = keyed && waiting.patience().is_none();
    fixed.then(|| u16::try_from(first).ok().and_then(|code| StatusCode::from_u16(code).ok())).flatten()
}
