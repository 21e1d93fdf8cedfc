//! Deferred calls, and how programs outside complete them.

use std::time::Duration;

use axum::{Json, extract::State, response::Response};
use base64::{Engine, prelude::BASE64_STANDARD};
use holdfast_engine::{
    content::{MAX_DEPTH, ToolResult},
    ids::Token,
};
use holdfast_store::{
    history,
    idempotency::Done,
    sessions,
    settle::{self, Report},
};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use tokio::time::{Instant, sleep, timeout_at};
use utoipa::{IntoParams, ToSchema};

use crate::{
    auth::Who,
    describe::{PostErrors, ReadErrors},
    error::{Answer, ApiError, ErrorBody},
    extract::{
        Asked, Flag, KeyHeader, Nothing, Posted, Seconds, SessionPath, TokenPath, Waiting, filter_text,
        inline_text, page_size, patience,
    },
    limits,
    metrics::Counted,
    runs::{code, show},
    state::{Shared, to_the_end},
    view::{Calls, DeferredCallView, SessionView},
};

/// The open deferred calls of a session, in the order in which they were asked for.
#[utoipa::path(get, path = "/v1/sessions/{id}/pending", tag = "calls",
    params(("id" = String, Path, description = "The session.")),
    responses(
        (status = 200, description = "The calls.", body = Calls),
        (status = 404, description = "`unknown_session`.", body = ErrorBody),
        ReadErrors))]
pub(crate) async fn of_session(
    State(api): State<Shared>,
    who: Who,
    SessionPath(id): SessionPath,
    Asked(Nothing {}): Asked<Nothing>,
) -> Answer<Json<Calls>> {
    sessions::get(&api.store, Some(&who.owner), id).await?;
    let calls = history::pending(&api.store, id).await?;
    Ok(Json(Calls { calls: calls.into_iter().map(DeferredCallView::from).collect() }))
}

/// Which deferred calls are shown.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct AcrossQuery {
    /// Of this tool.
    tool: Option<String>,
    /// Of sessions of this agent.
    agent: Option<String>,
    /// 1 to 500; 50 unless given.
    #[param(minimum = 1, maximum = 500)]
    limit: Option<i64>,
    /// Answer when there is a call; the bare name means true.
    #[param(value_type = Option<bool>)]
    wait: Option<Flag>,
    /// Seconds to wait at most: 120 unless given, and never more than 600.
    #[param(value_type = Option<f64>, minimum = 0)]
    timeout: Option<Seconds>,
}

/// Open deferred calls across the caller's sessions, oldest first. Waiting for the first one costs an
/// external worker one request and needs no session ids.
#[utoipa::path(get, path = "/v1/pending", tag = "calls", params(AcrossQuery),
    responses((status = 200, description = "The calls; none if the wait ran out.", body = Calls), ReadErrors))]
pub(crate) async fn across(
    State(api): State<Shared>,
    who: Who,
    Asked(query): Asked<AcrossQuery>,
) -> Answer<Json<Calls>> {
    let limit = page_size(query.limit, limits::LIST_DEFAULT)?;
    let tool = filter_text("tool", query.tool, limits::TOOL)?;
    let agent = filter_text("agent", query.agent, limits::SLUG)?;
    let patience = patience(query.wait, query.timeout).unwrap_or(Duration::ZERO);
    let deadline = Instant::now() + patience;
    let waits = !patience.is_zero();
    let _counted = waits.then(|| Counted::up(&api.metrics.waiters, limits::WAITERS)).transpose()?;
    let mut ticks = api.hub.ticks();
    loop {
        ticks.mark_unchanged();
        let (tool, agent) = (tool.as_deref(), agent.as_deref());
        let calls = history::pending_across(&api.store, &who.owner, tool, agent, limit).await?;
        let over = Instant::now() >= deadline || api.closing.is_cancelled();
        if !calls.is_empty() || over {
            return Ok(Json(Calls { calls: calls.into_iter().map(DeferredCallView::from).collect() }));
        }
        // However much happens, one poll looks at most so often.
        let news = async {
            sleep(limits::POLL_PAUSE).await;
            ticks.changed().await
        };
        tokio::select! {
            _ = timeout_at(deadline, news) => {}
            () = api.closing.cancelled() => {}
        }
    }
}

/// What a token's call asks for, and whether it is still open.
#[utoipa::path(get, path = "/v1/continuations/{token}", tag = "calls",
    params(("token" = String, Path, description = "The continuation token.")),
    responses(
        (status = 200, description = "The call.", body = DeferredCallView),
        (status = 404, description = "`unknown_token`.", body = ErrorBody),
        ReadErrors))]
pub(crate) async fn read(
    State(api): State<Shared>,
    who: Who,
    TokenPath(token): TokenPath,
    Asked(Nothing {}): Asked<Nothing>,
) -> Answer<Json<DeferredCallView>> {
    let call = history::by_token(&api.store, &who.owner, token).await?;
    Ok(Json(call.into()))
}

/// How a deferred call ended.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CompleteBody {
    /// A text, or a tool result: `{"type": "text"|"json"|"media"|"mixed", …}`. Numbers in a JSON result are
    /// kept as 64-bit integers or as doubles: send one with more digits than those hold as a text.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<Object>)]
    result: Option<Value>,
    /// Instead of a result: that the call failed, and why, in at most 65,536 bytes.
    #[schema(max_length = 65536)]
    error: Option<String>,
    /// Instead of both, for a call that was deferred until somebody says that it may run: whether it may. With
    /// `false`, `error` says why not.
    approve: Option<bool>,
    /// Whether the session goes on; true unless given.
    resume: Option<bool>,
}

/// Tells `null`, which is no result, from no result at all.
fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(deserializer).map(Some)
}

/// Completes a deferred call. Accepted from the moment that the token exists, whether or not the run that
/// made it has stopped.
#[utoipa::path(post, path = "/v1/continuations/{token}", tag = "calls",
    params(("token" = String, Path, description = "The continuation token."), Waiting, KeyHeader),
    request_body = CompleteBody,
    responses(
        (status = 200, description = "The session; no run is active.", body = SessionView),
        (status = 202, description = "The session, while a run is active.", body = SessionView),
        (status = 404, description = "`unknown_token`.", body = ErrorBody),
        (status = 409, description = "`token_already_completed` with `same_result`; `token_cancelled`; `nothing_to_approve`.", body = ErrorBody),
        (status = 410, description = "`token_expired`.", body = ErrorBody),
        PostErrors))]
pub(crate) async fn complete(
    State(api): State<Shared>,
    who: Who,
    TokenPath(token): TokenPath,
    Asked(waiting): Asked<Waiting>,
    posted: Posted<CompleteBody>,
) -> Answer<Response> {
    let resume = posted.body.resume.unwrap_or(true);
    let first = if resume { 202 } else { 200 };
    let (body, key) = posted.open(first);
    let keyed = key.is_some();
    let report = report(body)?;
    let (store, caller) = (api.store.clone(), who.caller(key));
    let done =
        to_the_end(async move { settle::complete(&store, &caller, token, &report, resume).await }).await?;
    let (id, first) = match done {
        Done::Now(id) => (id, first),
        Done::Before { code, resource } => {
            let token: Token = resource.parse().map_err(|_| ApiError::internal())?;
            let call = history::by_token(&api.store, &who.owner, token).await?;
            (call.session_id.into(), code)
        }
    };
    let view = show(&api, &who.owner, id, waiting, !resume).await?;
    Ok(view.answer(code(first, keyed, waiting)))
}

fn report(body: CompleteBody) -> Answer<Report> {
    match (body.approve, &body.result, &body.error) {
        (None, ..) => {}
        (Some(true), None, None) => return Ok(Report::Approval),
        (Some(false), None, reason) => {
            let reason = reason.clone().unwrap_or_else(|| "a person said no".to_owned());
            return Ok(Report::Error(inline_text("error", format!("denied: {reason}"))?));
        }
        _ => return Err(ApiError::bad_request("approve goes with nothing but, if it is false, error")),
    }
    let result = match (body.result, body.error) {
        (Some(Value::String(text)), None) => ToolResult::text(text),
        (Some(value @ Value::Object(_)), None) => {
            check_result(&value).map_err(ApiError::bad_request)?;
            let result: ToolResult = serde_json::from_value(value)
                .map_err(|error| ApiError::bad_request(format!("result: {error}")))?;
            if result.is_too_deep() {
                return Err(ApiError::bad_request(format!(
                    "result: the content is nested deeper than {MAX_DEPTH} levels; it can be given as text"
                )));
            }
            result
        }
        (Some(_), None) => {
            return Err(ApiError::bad_request("result must be a text or a tool result with a `type`"));
        }
        (None, Some(message)) => return Ok(Report::Error(inline_text("error", message)?)),
        _ => return Err(ApiError::bad_request("give exactly one of result, error and approve")),
    };
    for media in result.media() {
        if BASE64_STANDARD.decode(&media.base64_data).is_err() {
            return Err(ApiError::bad_request("result: base64Data must be standard base64, padded"));
        }
    }
    Ok(Report::Result(result))
}

const MEDIA: &[&str] = &["mimeType", "base64Data", "filename"];
/// What each type of result has.
const RESULTS: &[(&str, &[&str])] =
    &[("text", &["content"]), ("json", &["content"]), ("media", MEDIA), ("mixed", &["parts"])];
/// What each type of a mixed result's parts has.
const PARTS: &[(&str, &[&str])] = &[("text", &["text"]), ("media", MEDIA)];

/// Refuses what a result wouldn't be kept with: stored results are read leniently, what clients send isn't.
fn check_result(result: &Value) -> Result<(), String> {
    check_fields("result", result, RESULTS)?;
    let Some(Value::Array(parts)) = result.get("parts") else { return Ok(()) };
    (0..).zip(parts).try_for_each(|(index, part): (usize, &Value)| {
        check_fields(&format!("result.parts[{index}]"), part, PARTS)
    })
}

fn check_fields(at: &str, value: &Value, types: &[(&str, &[&str])]) -> Result<(), String> {
    let Value::Object(fields) = value else { return Err(format!("{at} must be an object with a `type`")) };
    let named = fields.get("type").and_then(Value::as_str);
    // A type that there isn't is refused, and those that there are named, when the result is read.
    let Some((named, known)) = types.iter().find(|(known, _)| Some(*known) == named) else { return Ok(()) };
    match fields.keys().find(|field| *field != "type" && !known.contains(&field.as_str())) {
        Some(field) => Err(format!("{at}: unknown field {field:?}; {named:?} has {}", known.join(", "))),
        None => Ok(()),
    }
}
