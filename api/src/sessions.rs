//! Reading and deleting sessions.

use axum::{Json, extract::State, response::Response};
use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use chrono::{DateTime, Utc};
use holdfast_engine::session::Status;
use holdfast_store::{
    delete,
    sessions::{Filter, list as list_sessions},
};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use crate::{
    auth::Who,
    describe::ReadErrors,
    error::{Answer, ApiError, ErrorBody},
    extract::{Asked, Flag, Seconds, SessionPath, filter_text, page_size, patience},
    limits,
    state::{Shared, to_the_end},
    turns::{self, TurnView},
    view::{self, SessionMeta, SessionView},
    wait::{Until, until},
};

/// Which sessions a listing shows.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ListQuery {
    /// Of this agent.
    agent: Option<String>,
    /// In one of these statuses, separated by commas.
    status: Option<String>,
    /// Children of this session.
    parent: Option<String>,
    /// Children as well as roots.
    #[param(value_type = Option<bool>)]
    tree: Option<Flag>,
    /// With this label, as `key:value`.
    label: Option<String>,
    /// Whose id, agent, status detail or labels contain this.
    q: Option<String>,
    /// 1 to 500; 50 unless given.
    #[param(minimum = 1, maximum = 500)]
    limit: Option<i64>,
    /// From `next_cursor` of the page before.
    cursor: Option<String>,
    /// Created before this time. A cursor is better: it skips nothing.
    before: Option<DateTime<Utc>>,
}

/// A page of sessions.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SessionList {
    /// Newest first.
    sessions: Vec<SessionMeta>,
    /// For the next page; null on the last.
    next_cursor: Option<String>,
    /// For clients that page by time.
    next_before: Option<DateTime<Utc>>,
}

/// Lists the caller's sessions, newest first.
#[utoipa::path(get, path = "/v1/sessions", tag = "sessions", params(ListQuery),
    responses((status = 200, description = "A page.", body = SessionList), ReadErrors))]
pub(crate) async fn list(
    State(api): State<Shared>,
    who: Who,
    Asked(query): Asked<ListQuery>,
) -> Answer<Json<SessionList>> {
    let limit = page_size(query.limit, limits::LIST_DEFAULT)?;
    let Some(mut filter) = filter(query, who.owner.to_string())? else {
        return Ok(Json(SessionList { sessions: Vec::new(), next_cursor: None, next_before: None }));
    };
    filter.limit = limit;
    let rows = list_sessions(&api.store, &filter).await?;
    let full = i64::try_from(rows.len()).unwrap_or(i64::MAX) == limit;
    let last = rows.last().filter(|_| full).map(|row| (row.created_at, row.id));
    Ok(Json(SessionList {
        sessions: rows.iter().map(SessionMeta::of).collect::<Result<_, _>>()?,
        next_cursor: last.map(cursor),
        next_before: last.map(|(at, _)| at),
    }))
}

/// The filter of a query; `None` if nothing can match it.
fn filter(query: ListQuery, owner: String) -> Answer<Option<Filter>> {
    let parent: Option<Uuid> = match query.parent.as_deref().map(str::parse) {
        None => None,
        Some(Ok(parent)) => Some(parent),
        // Like a session that isn't there, it has no children.
        Some(Err(_)) => return Ok(None),
    };
    Ok(Some(Filter {
        owner: Some(owner),
        agent: filter_text("agent", query.agent, limits::SLUG)?,
        statuses: query.status.as_deref().map(statuses).transpose()?,
        parent,
        tree: query.tree.unwrap_or_default().0,
        label: query.label.map(label).transpose()?,
        text: filter_text("q", query.q, limits::SEARCH)?,
        before: query.before,
        after: query.cursor.as_deref().map(place).transpose()?,
        limit: 0,
    }))
}

fn statuses(text: &str) -> Answer<Vec<String>> {
    text.split(',')
        .map(|word| match Status::parse(word.trim()) {
            Some(status) => Ok(status.word().to_owned()),
            None => {
                let known = Status::ALL.map(Status::word).join(", ");
                Err(ApiError::bad_request(format!("status {word:?} is unknown; known are {known}")))
            }
        })
        .collect()
}

/// The pair as it stands in the stored labels.
fn label(text: String) -> Answer<String> {
    let parts = text.split_once(':').filter(|(key, value)| {
        let fits = (1..=limits::LABEL_KEY).contains(&key.len()) && value.len() <= limits::LABEL_VALUE;
        fits && !text.contains('\0')
    });
    let Some((key, value)) = parts else {
        return Err(ApiError::bad_request("label must be key:value"));
    };
    let quoted = |text: &str| serde_json::Value::from(text).to_string();
    Ok(format!("{}:{}", quoted(key), quoted(value)))
}

fn cursor((at, id): (DateTime<Utc>, Uuid)) -> String {
    let mut bytes = at.timestamp_micros().to_be_bytes().to_vec();
    bytes.extend_from_slice(id.as_bytes());
    BASE64_URL_SAFE_NO_PAD.encode(bytes)
}

fn place(cursor: &str) -> Answer<(DateTime<Utc>, Uuid)> {
    let place = || {
        let bytes: [u8; 24] = BASE64_URL_SAFE_NO_PAD.decode(cursor).ok()?.try_into().ok()?;
        let (at, id) = bytes.split_first_chunk::<8>()?;
        // What Postgres can't hold as a time was never a cursor.
        let at = DateTime::from_timestamp_micros(i64::from_be_bytes(*at))
            .filter(|at| (0..=9_999).contains(&chrono::Datelike::year(at)))?;
        Some((at, Uuid::from_slice(id).ok()?))
    };
    place().ok_or_else(|| ApiError::bad_request("cursor isn't one that a listing gave"))
}

/// How a session is read.
#[derive(Debug, Clone, Copy, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ReadQuery {
    /// Answer when the run stops; the bare name means true.
    #[param(value_type = Option<bool>)]
    wait: Option<Flag>,
    /// Seconds to wait at most: 120 unless given, and never more than 600.
    #[param(value_type = Option<f64>, minimum = 0)]
    timeout: Option<Seconds>,
    /// How many of the newest turns to show: 0 to 500, 200 unless given.
    #[param(minimum = 0, maximum = 500)]
    turns: Option<i64>,
}

/// A session with its newest turns and open calls.
#[utoipa::path(get, path = "/v1/sessions/{id}", tag = "sessions",
    params(("id" = String, Path, description = "The session."), ReadQuery),
    responses(
        (status = 200, description = "The session.", body = SessionView),
        (status = 202, description = "The session, when the wait ran out with a run active.", body = SessionView),
        (status = 404, description = "`unknown_session`.", body = ErrorBody),
        ReadErrors))]
pub(crate) async fn read(
    State(api): State<Shared>,
    who: Who,
    SessionPath(id): SessionPath,
    Asked(query): Asked<ReadQuery>,
) -> Answer<Response> {
    let limit = match query.turns.unwrap_or(limits::TURNS_DEFAULT) {
        limit @ 0..=limits::LIST_MAX => limit,
        _ => return Err(ApiError::bad_request(format!("turns must be 0 to {}", limits::LIST_MAX))),
    };
    let patience = patience(query.wait, query.timeout);
    if let Some(patience) = patience {
        // Only the session's owner may learn, by the time it takes, what it is doing.
        holdfast_store::sessions::get(&api.store, Some(&who.owner), id).await?;
        until(&api, id, Until::Stopped, patience).await?;
    }
    let view = view::session(&api, &who.owner, id, limit).await?;
    Ok(view.answer(patience.is_none().then_some(axum::http::StatusCode::OK)))
}

/// Which turns a page shows.
#[derive(Debug, Clone, Copy, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct TurnsQuery {
    /// Position of the first turn; 1 unless given.
    #[param(minimum = 1)]
    from: Option<i64>,
    /// 1 to 500; 50 unless given.
    #[param(minimum = 1, maximum = 500)]
    limit: Option<i64>,
}

/// A page of turns.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TurnPage {
    /// Oldest first; fewer than asked for if they are large.
    turns: Vec<TurnView>,
    /// Position at which the next page begins; null on the last.
    next_from: Option<i64>,
}

/// Turns of a session by position, oldest first.
#[utoipa::path(get, path = "/v1/sessions/{id}/turns", tag = "sessions",
    params(("id" = String, Path, description = "The session."), TurnsQuery),
    responses(
        (status = 200, description = "A page.", body = TurnPage),
        (status = 404, description = "`unknown_session`.", body = ErrorBody),
        ReadErrors))]
pub(crate) async fn read_turns(
    State(api): State<Shared>,
    who: Who,
    SessionPath(id): SessionPath,
    Asked(query): Asked<TurnsQuery>,
) -> Answer<Json<TurnPage>> {
    let limit = page_size(query.limit, limits::LIST_DEFAULT)?;
    let from = query.from.unwrap_or(1);
    if from < 1 {
        return Err(ApiError::bad_request("from must be at least 1"));
    }
    let row = holdfast_store::sessions::get(&api.store, Some(&who.owner), id).await?;
    let turns = turns::from(&api, &who.owner, id, from, limit).await?;
    let next = turns.last().map(|turn| turn.position + 1).filter(|next| *next <= row.turns);
    Ok(Json(TurnPage { turns, next_from: next }))
}

/// How a session is deleted.
#[derive(Debug, Clone, Copy, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct DeleteQuery {
    /// Only say what would be deleted.
    #[param(value_type = Option<bool>)]
    dry_run: Option<Flag>,
}

/// What was deleted, or would be.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Deleted {
    /// The session and its descendants, deepest first.
    sessions: Vec<Uuid>,
    /// How many continuation tokens go with them.
    continuations: i64,
    dry_run: bool,
}

/// Deletes a session with all its descendants.
#[utoipa::path(delete, path = "/v1/sessions/{id}", tag = "sessions",
    params(("id" = String, Path, description = "The session."), DeleteQuery),
    responses(
        (status = 200, description = "What was deleted, or would be.", body = Deleted),
        (status = 404, description = "`unknown_session`.", body = ErrorBody),
        (status = 409, description = "`run_in_progress`: a worker holds a run of the tree or of an ancestor.", body = ErrorBody),
        ReadErrors))]
pub(crate) async fn remove(
    State(api): State<Shared>,
    who: Who,
    SessionPath(id): SessionPath,
    Asked(query): Asked<DeleteQuery>,
) -> Answer<Json<Deleted>> {
    let dry_run = query.dry_run.unwrap_or_default().0;
    let (store, caller) = (api.store.clone(), who.caller(None));
    let plan = to_the_end(async move { delete::delete(&store, &caller, id, dry_run).await }).await?;
    let sessions = plan.sessions.into_iter().map(|id| id.0).collect();
    Ok(Json(Deleted { sessions, continuations: plan.continuations, dry_run }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cursors_come_back_and_others_are_refused() {
        let at = DateTime::from_timestamp_micros(1_700_000_000_123_456).expect("a time");
        let id = Uuid::now_v7();
        assert_eq!(place(&cursor((at, id))).expect("a cursor"), (at, id));
        let far = |micros: i64| {
            let mut bytes = micros.to_be_bytes().to_vec();
            bytes.extend_from_slice(id.as_bytes());
            BASE64_URL_SAFE_NO_PAD.encode(bytes)
        };
        for bad in ["", "x", "AAAA", "*", &far(i64::MAX), &far(i64::MIN), &format!("{}A", cursor((at, id)))] {
            assert!(place(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn labels_are_found_as_they_are_stored() {
        let labels = std::collections::BTreeMap::from([("k\"ey", "va:l\\ue")]);
        let stored = serde_json::to_string(&labels).expect("JSON");
        assert!(stored.contains(&label("k\"ey:va:l\\ue".to_owned()).expect("a label")));
        for bad in ["", "x", ":x", "a\0:b"] {
            assert!(label(bad.to_owned()).is_err(), "{bad:?}");
        }
    }
}
