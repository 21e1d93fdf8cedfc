//! The roles' entry points, each behind a thin function.

use std::{net::SocketAddr, time::Duration};

use axum::{Router, extract::State, http::StatusCode, http::header, response::IntoResponse, routing::get};
use futures::future::LocalBoxFuture;
use holdfast_api::{Bound, ServeError};
use holdfast_engine::webhook::{DEFAULT_SECRET, KINDS, check_url};
use holdfast_scheduler::{Secrets, Webhooks};
use holdfast_store::{
    Store,
    retire::Terms,
    webhooks::{Endpoint, SERVER},
};
use holdfast_tools::LoadedAgent;
use holdfast_worker::{alone::Alone, model::ApiKeys};
use tokio::net::TcpListener;

use super::{WorkerPlan, start::Shared};
use crate::{
    args::{ApiArgs, CommonArgs, RetentionArgs, WebhookArgs, WorkerArgs},
    failure::{Failure, chain},
};

type Running = LocalBoxFuture<'static, Result<(), Failure>>;

/// An API node's configuration, checked.
pub(super) fn api_config(args: &ApiArgs, common: &CommonArgs) -> Result<holdfast_api::Config, Failure> {
    let config = holdfast_api::Config {
        bind: args.bind,
        socket: args.socket.clone(),
        auth_tokens: args.auth_tokens.clone(),
        admin_owners: args.admin_owners.clone(),
        cors_origins: args.cors_origin.clone(),
        allow_anonymous: args.allow_anonymous,
        max_body: args.max_body,
        metrics_bind: common.metrics_bind,
        shutdown_grace: common.grace(),
        registry: prometheus::default_registry().clone(),
    };
    config.check().map_err(|error| Failure::Config(chain(&error)))?;
    if args.allow_anonymous && args.auth_tokens.is_none() && !args.bind.ip().is_loopback() {
        tracing::warn!(
            kind = "server.anonymous",
            bind = %args.bind,
            "whoever can reach this address may do everything: no tokens are asked for"
        );
    }
    Ok(config)
}

/// How callers say who they are, as the line `server.started` has it.
pub(super) fn authentication(config: &holdfast_api::Config) -> &'static str {
    if config.auth_tokens.is_some() { "bearer" } else { "none" }
}

/// An API node.
pub(super) fn api(
    shared: &Shared,
    config: holdfast_api::Config,
    on_bound: impl FnOnce(Bound) + Send + 'static,
) -> Running {
    let serving = holdfast_api::serve(
        shared.store.clone(),
        shared.listener.clone(),
        config,
        shared.shutdown.clone(),
        on_bound,
    );
    Box::pin(async move {
        serving.await.map_err(|error| match &error {
            ServeError::Config(_) | ServeError::Tokens(_) => Failure::Config(chain(&error)),
            _ => Failure::Failed(chain(&error)),
        })
    })
}

/// A worker's configuration.
pub(super) fn worker_config(
    args: WorkerArgs,
    keys: ApiKeys,
    agents: Vec<LoadedAgent>,
    grace: Duration,
    alone: Option<Alone>,
) -> holdfast_worker::Config {
    holdfast_worker::Config {
        slots: usize::try_from(args.slots).unwrap_or(usize::MAX),
        lease_ttl: Duration::from_secs(args.lease_ttl),
        shutdown_grace: grace,
        stream_tokens: args.stream_tokens,
        labels: args.labels,
        agents,
        keys,
        alone,
    }
}

/// A worker.
pub(super) fn worker(shared: &Shared, plan: WorkerPlan, grace: Duration) -> Running {
    let WorkerPlan { args, keys } = plan;
    let config = worker_config(args, keys, shared.agents.clone(), grace, shared.alone.clone());
    let (store, listener) = (shared.store.clone(), shared.listener.clone());
    let shutdown = shared.shutdown.clone();
    Box::pin(async move {
        let running = holdfast_worker::run(store, listener, config, shutdown);
        running.await.map_err(|error| Failure::Failed(chain(&error)))
    })
}

/// A scheduler's configuration, checked.
pub(super) fn scheduler_config(
    args: &RetentionArgs,
    webhooks: &WebhookArgs,
) -> Result<holdfast_scheduler::Config, Failure> {
    let days = |days: i32| (days > 0).then_some(days);
    Ok(holdfast_scheduler::Config {
        keep_events_days: args.keep_events_days,
        retire: days(args.retire_after_days).map(|after_days| Terms { after_days, archive: args.archive }),
        keep_archives_days: days(args.keep_archives_days),
        webhooks: webhooks_config(webhooks)?,
    })
}

/// Which webhooks are sent; none without secrets.
fn webhooks_config(args: &WebhookArgs) -> Result<Option<Webhooks>, Failure> {
    let Some(file) = &args.webhook_secret_file else {
        return match &args.webhook_url {
            Some(_) => Err(Failure::Config("--webhook-url needs --webhook-secret-file".into())),
            None => Ok(None),
        };
    };
    let secrets = Secrets::load(file).map_err(|error| Failure::Config(chain(&error)))?;
    let server = args.webhook_url.as_ref().map(|url| {
        check_url(url).map_err(|error| Failure::Config(format!("--webhook-url: {error}")))?;
        if !secrets.has(DEFAULT_SECRET) {
            let told = format!("--webhook-url needs the secrets `{DEFAULT_SECRET}` in {}", file.display());
            return Err(Failure::Config(told));
        }
        let all = || KINDS.map(str::to_owned).to_vec();
        Ok(Endpoint {
            name: SERVER.to_owned(),
            agent: None,
            url: url.clone(),
            secret_id: DEFAULT_SECRET.to_owned(),
            kinds: if args.webhook_events.is_empty() { all() } else { args.webhook_events.clone() },
        })
    });
    let give_up = Duration::from_secs(args.webhook_give_up);
    Ok(Some(Webhooks { server: server.transpose()?, secrets, give_up }))
}

/// A scheduler.
pub(super) fn scheduler(shared: &Shared, config: holdfast_scheduler::Config) -> Running {
    let (store, shutdown) = (shared.store.clone(), shared.shutdown.clone());
    Box::pin(async move {
        holdfast_scheduler::run(store, config, shutdown).await;
        Ok(())
    })
}

/// `/metrics`, `/healthz` and `/readyz` of a process without an API.
pub(super) async fn metrics(shared: &Shared, address: SocketAddr) -> Result<(SocketAddr, Running), Failure> {
    let failed = |error: std::io::Error| Failure::Failed(format!("--metrics-bind {address}: {error}"));
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    let router = metrics_router(shared.store.clone());
    let shutdown = shared.shutdown.clone();
    let serving: Running = Box::pin(async move {
        let served = axum::serve(listener, router).with_graceful_shutdown(shutdown.cancelled_owned()).await;
        served.map_err(|error| Failure::Failed(error.to_string()))
    });
    Ok((bound, serving))
}

fn metrics_router(store: Store) -> Router {
    Router::new()
        .route("/metrics", get(exposition))
        .route("/healthz", get(|| async { (json_type(), "{\"ok\":true}") }))
        .route("/readyz", get(ready))
        .with_state(store)
}

async fn ready(State(store): State<Store>) -> impl IntoResponse {
    match store.db().ping().await {
        Ok(()) => (StatusCode::OK, json_type(), "{\"ok\":true}"),
        Err(error) => {
            tracing::debug!(%error, "not ready");
            let body = "{\"error\":\"unavailable\",\"message\":\"the database doesn't answer\"}";
            (StatusCode::SERVICE_UNAVAILABLE, json_type(), body)
        }
    }
}

async fn exposition() -> Result<impl IntoResponse, (StatusCode, String)> {
    let text = prometheus::TextEncoder::new()
        .encode_to_string(&prometheus::gather())
        .map_err(|error| (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))?;
    Ok(([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], text))
}

fn json_type() -> [(header::HeaderName, &'static str); 1] {
    [(header::CONTENT_TYPE, "application/json")]
}
