//! What owners may use, for admins.

use axum::{Json, extract::State};
use holdfast_store::quota::{self, DEFAULT_MAX_QUEUED, Limits, Usage};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    auth::Who,
    describe::{PostErrors, ReadErrors},
    error::{Answer, ApiError, ErrorBody},
    extract::{Asked, Nothing, OwnerPath, Posted},
    state::{Api, Shared},
};

/// How large a limit may be.
const MAX_LIMIT: i64 = 1_000_000_000;
/// How many runs may be let wait: they are counted.
const MAX_QUEUED: i64 = 1_000_000;

/// The limits of an owner. What isn't given, or is null, isn't limited.
#[derive(Debug, Clone, Copy, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct LimitsBody {
    /// Runs that workers hold at the same time; 0 to 1,000,000,000.
    max_running: Option<i64>,
    /// Runs that start within a minute; 0 to 1,000,000,000.
    runs_per_minute: Option<i64>,
    /// Runs that may wait before requests for more are refused; 0 to 1,000,000. 100,000 if it isn't given.
    max_queued: Option<i64>,
}

/// An owner's limits and what it uses of them.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct LimitsView {
    owner: String,
    /// Runs that workers hold at the same time; null is no limit.
    max_running: Option<i32>,
    /// Runs that start within a minute; null is no limit.
    runs_per_minute: Option<i32>,
    /// Runs that may wait.
    max_queued: i32,
    /// Runs that workers hold now, counted up to 100,000.
    running: i64,
    /// Runs that wait now, counted up to 100,000.
    queued: i64,
}

impl LimitsView {
    fn of(owner: String, limits: Limits, usage: Usage) -> Json<Self> {
        Json(Self {
            owner,
            max_running: limits.max_running,
            runs_per_minute: limits.runs_per_minute,
            max_queued: limits.max_queued.unwrap_or(DEFAULT_MAX_QUEUED),
            running: usage.running,
            queued: usage.queued,
        })
    }
}

/// The owner that a path names, for who may ask about it. Without tokens there is one nameless owner, whose
/// name in a path is `-`.
fn of_path(api: &Api, who: &Who, name: String) -> Answer<String> {
    if api.tokens.is_none() {
        return if name == "-" { Ok(String::new()) } else { Err(ApiError::not_found()) };
    }
    if !api.is_admin(who) {
        return Err(ApiError::forbidden("only admins may see and set limits"));
    }
    Ok(name)
}

fn limit(name: &str, value: Option<i64>, most: i64) -> Answer<Option<i32>> {
    let refused = || ApiError::bad_request(format!("{name} must be 0 to {most}, or null"));
    let within = |value: i64| if (0..=most).contains(&value) { i32::try_from(value).ok() } else { None };
    value.map(|value| within(value).ok_or_else(refused)).transpose()
}

/// An owner's limits, and what it uses of them. For admins; where there are no tokens, the one owner is `-`.
#[utoipa::path(get, path = "/v1/tenants/{owner}/limits", tag = "tenants",
    params(("owner" = String, Path, description = "The owner.")),
    responses(
        (status = 200, description = "The limits; an owner that was never heard of has none.", body = LimitsView),
        (status = 403, description = "`forbidden`.", body = ErrorBody),
        (status = 404, description = "`not_found`: no owner can have that name.", body = ErrorBody),
        ReadErrors))]
pub(crate) async fn read(
    State(api): State<Shared>,
    who: Who,
    OwnerPath(name): OwnerPath,
    Asked(Nothing {}): Asked<Nothing>,
) -> Answer<Json<LimitsView>> {
    let owner = of_path(&api, &who, name)?;
    let (limits, usage) = quota::read(&api.store, &owner).await?;
    Ok(LimitsView::of(owner, limits, usage))
}

/// Sets all limits of an owner. What runs goes on, and what waits is kept. For admins.
#[utoipa::path(put, path = "/v1/tenants/{owner}/limits", tag = "tenants",
    params(("owner" = String, Path, description = "The owner.")), request_body = LimitsBody,
    responses(
        (status = 200, description = "The limits as they are now.", body = LimitsView),
        (status = 403, description = "`forbidden`.", body = ErrorBody),
        (status = 404, description = "`not_found`: no owner can have that name.", body = ErrorBody),
        PostErrors))]
pub(crate) async fn write(
    State(api): State<Shared>,
    who: Who,
    OwnerPath(name): OwnerPath,
    Asked(Nothing {}): Asked<Nothing>,
    posted: Posted<LimitsBody>,
) -> Answer<Json<LimitsView>> {
    let owner = of_path(&api, &who, name)?;
    let (body, _) = posted.open(200);
    let limits = Limits {
        max_running: limit("max_running", body.max_running, MAX_LIMIT)?,
        runs_per_minute: limit("runs_per_minute", body.runs_per_minute, MAX_LIMIT)?,
        max_queued: limit("max_queued", body.max_queued, MAX_QUEUED)?,
    };
    quota::set(&api.store, &owner, limits).await?;
    let (limits, usage) = quota::read(&api.store, &owner).await?;
    Ok(LimitsView::of(owner, limits, usage))
}
