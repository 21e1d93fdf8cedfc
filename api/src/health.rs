//! Whether the node is well, and what it counts.

use std::sync::{LazyLock, atomic::Ordering};

use axum::{
    Json,
    extract::State,
    http::{Extensions, HeaderMap, HeaderValue, StatusCode, header},
    response::{IntoResponse, Redirect, Response},
};
use holdfast_store::{StoreError, migrate, sessions::Census};
use prometheus::TextEncoder;
use serde::Serialize;
use tokio::time::timeout;
use utoipa::ToSchema;

use crate::{
    describe::OpenErrors,
    error::{Answer, ApiError, ErrorBody},
    extract::FilePath,
    limits,
    peer::Peer,
    routes,
    state::{Api, Shared},
};

/// That the node is well, and what the cluster is doing.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Health {
    ok: bool,
    /// Sessions that the engine is working on or will go on with.
    live_sessions: i64,
    /// Runs that a worker holds.
    active_runs: i64,
    /// Runs that wait for a worker.
    queued_runs: i64,
    /// Runs that the engine waits for elsewhere.
    parked_runs: i64,
    /// Deferred calls that are open.
    open_continuations: i64,
}

impl From<Census> for Health {
    fn from(counts: Census) -> Self {
        Self {
            ok: true,
            live_sessions: counts.claimed + counts.queued + counts.parked,
            active_runs: counts.claimed,
            queued_runs: counts.queued,
            parked_runs: counts.parked,
            open_continuations: counts.open_continuations,
        }
    }
}

/// Whether the node and its database answer.
#[utoipa::path(get, path = "/healthz", tag = "operation",
    responses((status = 200, description = "They do.", body = Health), OpenErrors))]
pub(crate) async fn healthz(State(api): State<Shared>) -> Answer<Json<Health>> {
    Ok(Json(census(&api).await?.into()))
}

async fn census(api: &Api) -> Result<Census, ApiError> {
    match timeout(limits::HEALTH_WAIT, api.census()).await {
        Ok(counts) => Ok(counts?),
        Err(_) => Err(ApiError::unavailable("the database takes too long to answer")),
    }
}

/// Whether the node can serve: the database answers and its schema is current.
#[utoipa::path(get, path = "/readyz", tag = "operation",
    responses((status = 200, description = "It can.", body = Health), OpenErrors))]
pub(crate) async fn readyz(State(api): State<Shared>) -> Answer<Json<Health>> {
    if api.closing.is_cancelled() {
        return Err(ApiError::unavailable("the node is closing"));
    }
    if !api.migrated.load(Ordering::Relaxed) {
        let status = timeout(limits::HEALTH_WAIT, migrate::status(api.store.db().listen_url())).await;
        match status {
            Ok(Ok(status)) if status.is_ready() => api.migrated.store(true, Ordering::Relaxed),
            Ok(Ok(_)) => {
                return Err(ApiError::unavailable(
                    "the database's schema is outdated: run `holdfast migrate`",
                ));
            }
            Ok(Err(error)) => {
                tracing::debug!(%error, "the schema couldn't be read");
                return Err(ApiError::unavailable("the database is away; try again"));
            }
            Err(_) => return Err(ApiError::unavailable("the database takes too long to answer")),
        }
    }
    Ok(Json(census(&api).await?.into()))
}

/// What the node counts, for Prometheus. Only programs on this machine may ask, unless it has an address of
/// its own.
#[utoipa::path(get, path = "/metrics", tag = "operation",
    responses((status = 200, description = "Prometheus text.", body = String, content_type = "text/plain"), OpenErrors))]
pub(crate) async fn metrics(State(api): State<Shared>, extensions: Extensions) -> Answer<Response> {
    if !Peer::of(&extensions).is_some_and(Peer::is_local) {
        return Err(ApiError::forbidden("metrics are shown to programs on this machine only"));
    }
    metrics_text(State(api)).await
}

/// The same for whoever can connect.
pub(crate) async fn metrics_text(State(api): State<Shared>) -> Answer<Response> {
    let text = TextEncoder::new()
        .encode_to_string(&api.gather().await)
        .map_err(|error| StoreError::Corrupt(error.to_string()))?;
    Ok(([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], text).into_response())
}

/// This document.
#[utoipa::path(get, path = "/openapi.json", tag = "operation",
    responses((status = 200, description = "OpenAPI 3.1.", body = Object), OpenErrors))]
pub(crate) async fn document() -> Json<&'static utoipa::openapi::OpenApi> {
    static DOCUMENT: LazyLock<utoipa::openapi::OpenApi> = LazyLock::new(routes::openapi);
    Json(&DOCUMENT)
}

/// The document as a page to try requests on.
#[utoipa::path(get, path = "/docs", tag = "operation",
    responses((status = 308, description = "To the page."), OpenErrors))]
pub(crate) async fn docs() -> Redirect {
    Redirect::permanent("/docs/")
}

/// The page.
#[utoipa::path(get, path = "/docs/", tag = "operation",
    responses((status = 200, description = "HTML.", body = String, content_type = "text/html"), OpenErrors))]
pub(crate) async fn docs_page() -> Answer<Response> {
    page("index.html")
}

/// What the page consists of.
#[utoipa::path(get, path = "/docs/{file}", tag = "operation",
    params(("file" = String, Path, description = "A file of the page.")),
    responses(
        (status = 200, description = "The file."),
        (status = 404, description = "`not_found`.", body = ErrorBody),
        OpenErrors))]
pub(crate) async fn docs_file(FilePath(file): FilePath) -> Answer<Response> {
    page(&file)
}

fn page(file: &str) -> Answer<Response> {
    let config = std::sync::Arc::new(utoipa_swagger_ui::Config::from("/openapi.json"));
    match utoipa_swagger_ui::serve(file, config) {
        Ok(Some(found)) => {
            let mut headers = HeaderMap::new();
            if let Ok(kind) = found.content_type.parse() {
                headers.insert(header::CONTENT_TYPE, kind);
            }
            if found.gzpipped {
                headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
            }
            Ok((StatusCode::OK, headers, found.bytes.into_owned()).into_response())
        }
        Ok(None) | Err(_) => Err(ApiError::not_found()),
    }
}
