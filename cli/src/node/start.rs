//! From a plan to running roles, and to their end.

use std::{
    net::SocketAddr,
    sync::{Arc, OnceLock},
    time::Duration,
};

use chrono::Utc;
use futures::{StreamExt as _, future::LocalBoxFuture, stream::FuturesUnordered};
use holdfast_api::Bound;
use holdfast_store::{
    Store, connect, feed,
    listen::Listener,
    migrate,
    notify::{Channel, Notifier},
    passes,
};
use holdfast_tools::LoadedAgent;
use holdfast_worker::alone::Alone;
use tokio_util::sync::CancellationToken;

use super::{
    Plan, agents, alone,
    database::{Attempt as _, Database, patiently},
    fault,
    metrics::StoreMetrics,
    roles, signals,
};
use crate::{
    failure::Failure,
    otlp::push::{self, Pushing},
};

/// What a role may take beyond the grace before the process goes without it.
const LINGER: Duration = Duration::from_secs(8);

/// A role that runs, by name. It stays on the main thread, and what it spawns doesn't.
type Role = LocalBoxFuture<'static, (&'static str, Result<(), Failure>)>;

/// What every role of the process shares.
pub(super) struct Shared {
    pub(super) store: Store,
    pub(super) listener: Listener,
    pub(super) agents: Vec<LoadedAgent>,
    /// How a process for one run is started.
    pub(super) alone: Option<Alone>,
    pub(super) shutdown: CancellationToken,
}

/// What the line `server.started` says.
#[derive(Clone)]
struct Banner {
    role: &'static str,
    authentication: Option<&'static str>,
    database: String,
    agents: Vec<String>,
}

impl Banner {
    /// Says where the process listens: for whoever it serves, and for those who watch it.
    fn log(&self, bind: Option<SocketAddr>, metrics_bind: Option<SocketAddr>) {
        tracing::info!(
            kind = "server.started",
            bind = bind.map(|bind| bind.to_string()),
            metrics_bind = metrics_bind.map(|bind| bind.to_string()),
            role = self.role,
            authentication = self.authentication,
            database = self.database,
            agents = ?self.agents,
            pid = std::process::id(),
            version = env!("CARGO_PKG_VERSION"),
        );
    }
}

/// Runs the process until it is told to stop or a role fails.
pub(super) async fn run(plan: Plan) -> Result<(), Failure> {
    if alone::asked() {
        return alone::run(plan).await;
    }
    let shutdown = CancellationToken::new();
    // An API node with tokens reads them again upon SIGHUP; nobody else has use for it.
    let reads_again = plan.api.as_ref().is_some_and(|config| config.auth_tokens.is_some());
    let signals = signals::watch(shutdown.clone(), !reads_again)?;
    let mut loaded = match &plan.agents {
        Some(args) => agents::load(args).await?,
        None => Vec::new(),
    };
    if let Some(worker) = &plan.worker {
        agents::warn_of_missing_keys(&mut loaded, &worker.keys);
    }
    agents::log_warnings(&loaded);
    let database = tokio::select! {
        opened = Database::open(&plan.database) => opened?,
        () = shutdown.cancelled() => return stopped_early(),
    };
    let done = match shutdown.run_until_cancelled(prepare(&plan, &database, &loaded)).await {
        None => stopped_early(),
        Some(Err(failure)) => Err(failure),
        Some(Ok((store, listener))) => {
            let alone = alone::how(&database);
            let shared = Shared { store: store.clone(), listener, agents: loaded, alone, shutdown };
            let done = run_roles(plan, shared, database.to_string()).await;
            if let Some(notifier) = store.notifier() {
                notifier.close().await;
            }
            // In the background, as a connection that hangs must not hold the process.
            let _ = tokio::time::timeout(LINGER, store.db().close()).await;
            done
        }
    };
    database.close().await;
    drop(signals);
    if done.is_ok() {
        tracing::info!(kind = "server.stopped");
    }
    done
}

fn stopped_early() -> Result<(), Failure> {
    tracing::info!(kind = "server.stopping", "told to stop while starting");
    Ok(())
}

async fn prepare(
    plan: &Plan,
    database: &Database,
    loaded: &[LoadedAgent],
) -> Result<(Store, Listener), Failure> {
    let store = store(database, plan.role, plan.common.no_migrate).await?;
    let store = fault::inject(store)?;
    let listener =
        Listener::start(database.direct_url(), plan.role, &Channel::ALL).map_err(|error| error.failure())?;
    agents::record(&store, loaded).await?;
    Ok((store, listener))
}

/// The store on a database whose schema this build can use: migrated, unless only checking is asked for.
pub(crate) async fn store(database: &Database, role: &str, only_check: bool) -> Result<Store, Failure> {
    let url = database.direct_url();
    if only_check {
        patiently("checking the schema", async || migrate::require(url).await).await?;
    } else {
        let report = patiently("migrating", async || migrate::migrate(url).await).await?;
        for one in &report.applied {
            tracing::info!(kind = "migration.applied", version = one.version, description = one.description);
        }
    }
    let db = connect::connect(database.options(role)).await.map_err(|error| error.failure())?;
    let notifier = Notifier::start(url, role).map_err(|error| error.failure())?;
    let store = Store::new(db, Some(notifier));
    if !only_check {
        patiently("naming the feed", async || feed::renew(&store).await).await?;
        // What is old is for the scheduler to drop, which knows for how long events are kept.
        patiently("making partitions", async || {
            passes::turn_event_partitions(&store, Utc::now(), None).await
        })
        .await?;
    }
    Ok(store)
}

async fn run_roles(plan: Plan, shared: Shared, database: String) -> Result<(), Failure> {
    let banner = Banner {
        role: plan.role,
        authentication: plan.api.as_ref().map(roles::authentication),
        database,
        agents: shared.agents.iter().map(|one| one.agent.slug.clone()).collect(),
    };
    let grace = plan.common.grace();
    let shutdown = shared.shutdown.clone();
    let metrics = StoreMetrics::new(plan.role, shared.store.clone(), shared.listener.clone());
    metrics
        .and_then(|metrics| prometheus::register(Box::new(metrics)))
        .map_err(|error| Failure::Failed(format!("metrics: {error}")))?;
    let _ = push::pushes();
    let node = Arc::new(OnceLock::new());
    let pushing = match &plan.common.otlp_endpoint {
        Some(endpoint) => Some(Pushing::start(endpoint, plan.role, gather(Arc::clone(&node)))?),
        None => None,
    };
    let running: FuturesUnordered<Role> = FuturesUnordered::new();
    if plan.api.is_none() {
        let bind = match plan.common.metrics_bind {
            Some(address) => {
                let (bound, serving) = roles::metrics(&shared, address).await?;
                running.push(named("metrics", serving));
                Some(bound)
            }
            None => None,
        };
        // Clients that wait for a node look for `bind`, whatever its role.
        banner.log(bind, bind);
    }
    if let Some(config) = plan.api {
        let (banner, node) = (banner.clone(), Arc::clone(&node));
        let on_bound = move |bound: Bound| {
            // Set once: there is one API in a process.
            let _ = node.set(bound.node);
            banner.log(Some(bound.bind), bound.metrics);
        };
        running.push(named("api", roles::api(&shared, config, on_bound)));
    }
    if let Some(worker) = plan.worker {
        running.push(named("worker", roles::worker(&shared, worker, grace)));
    }
    if let Some(config) = plan.scheduler {
        running.push(named("scheduler", roles::scheduler(&shared, config)));
    }
    let done = finish(running, shutdown, grace).await;
    if let Some(pushing) = pushing {
        pushing.finish().await;
    }
    done
}

/// What the process counts, with what only its API node knows once it is bound.
fn gather(node: Arc<OnceLock<holdfast_api::Shared>>) -> push::Gather {
    Arc::new(move || {
        let node = Arc::clone(&node);
        Box::pin(async move {
            match node.get() {
                Some(node) => node.gather().await,
                None => prometheus::gather(),
            }
        })
    })
}

fn named(name: &'static str, role: LocalBoxFuture<'static, Result<(), Failure>>) -> Role {
    Box::pin(async move { (name, role.await) })
}

/// Waits for the roles. The first that ends on its own takes the others with it.
async fn finish(
    mut running: FuturesUnordered<Role>,
    shutdown: CancellationToken,
    grace: Duration,
) -> Result<(), Failure> {
    let mut done = Ok(());
    tokio::select! {
        () = shutdown.cancelled() => {}
        Some(ended) = running.next() => {
            done = outcome(ended, shutdown.is_cancelled());
            shutdown.cancel();
        }
    }
    tracing::info!(kind = "server.stopping", grace_seconds = grace.as_secs());
    let rest = async {
        while let Some(ended) = running.next().await {
            let more = outcome(ended, true);
            if done.is_ok() {
                done = more;
            }
        }
    };
    if tokio::time::timeout(grace + LINGER, rest).await.is_err() {
        tracing::warn!(
            kind = "server.stopping",
            roles = running.len(),
            "not everything stopped within the grace"
        );
    }
    done
}

fn outcome((name, ended): (&'static str, Result<(), Failure>), expected: bool) -> Result<(), Failure> {
    match ended {
        Ok(()) if expected => Ok(()),
        Ok(()) => Err(Failure::Failed(format!("{name}: ended without being told to"))),
        Err(Failure::Failed(reason)) => Err(Failure::Failed(format!("{name}: {reason}"))),
        Err(other) => Err(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn role(name: &'static str, work: impl Future<Output = Result<(), Failure>> + 'static) -> Role {
        named(name, Box::pin(work))
    }

    #[tokio::test]
    async fn a_role_that_fails_stops_the_others_and_is_the_reason() {
        let shutdown = CancellationToken::new();
        let (asked, heard) = tokio::sync::oneshot::channel();
        let other = shutdown.clone();
        let roles = FuturesUnordered::from_iter([
            role("api", async { Err(Failure::Failed("port taken".into())) }),
            role("worker", async move {
                other.cancelled().await;
                let _ = asked.send(());
                Ok(())
            }),
        ]);
        let done = finish(roles, shutdown, Duration::from_secs(10)).await;
        assert_eq!(done, Err(Failure::Failed("api: port taken".into())));
        assert_eq!(heard.await, Ok(()), "the worker was stopped, not dropped");
    }

    #[tokio::test]
    async fn ending_is_success_only_when_it_was_asked_for() {
        let shutdown = CancellationToken::new();
        let roles = FuturesUnordered::from_iter([role("scheduler", async { Ok(()) })]);
        let done = finish(roles, shutdown.clone(), Duration::ZERO).await;
        assert!(matches!(done, Err(Failure::Failed(text)) if text.contains("scheduler")));
        assert!(shutdown.is_cancelled());

        let shutdown = CancellationToken::new();
        let other = shutdown.clone();
        let roles = FuturesUnordered::from_iter([role("api", async move {
            other.cancelled().await;
            Ok(())
        })]);
        shutdown.cancel();
        assert_eq!(finish(roles, shutdown, Duration::from_secs(1)).await, Ok(()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_role_that_hangs_is_left_behind() {
        let shutdown = CancellationToken::new();
        shutdown.cancel();
        let roles = FuturesUnordered::from_iter([role("api", std::future::pending())]);
        assert_eq!(finish(roles, shutdown, Duration::from_secs(1)).await, Ok(()));
    }
}
