//! A process for one run under suspicion: how a worker starts it, and what it does.
//!
//! It is this program again with the same command line, told by a variable that it is nothing but the
//! process of one run. What it can't find out by itself, where an embedded database listens and which run it
//! is for, comes in by standard input.

use std::{
    io::{self, BufRead as _},
    path::PathBuf,
};

use holdfast_store::{
    Store,
    claim::Lease,
    connect::{self, ConnectOptions},
    listen::Listener,
    notify::{Channel, Notifier},
};
use holdfast_worker::{
    Config,
    alone::{Alone, HELD, Order, grace_alone, run_alone},
};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::{Plan, WorkerPlan, agents, database::Attempt as _, database::Database, fault, roles, signals};
use crate::{
    failure::{Failure, chain},
    output,
};

/// Says to a process that it is for one run.
const VARIABLE: &str = "HOLDFAST_RUN_ALONE";

/// Connections of each of its pools: it drives one run.
const CONNECTIONS: u32 = 2;

/// This program, as it runs: a file of that name may be another version by now.
const PROGRAM: &str = "/proc/self/exe";

/// What the process is told of its node.
#[derive(Serialize, Deserialize)]
struct Node {
    url: String,
    listen_url: Option<String>,
}

/// Whether this process is for one run.
pub(super) fn asked() -> bool {
    std::env::var_os(VARIABLE).is_some_and(|value| !value.is_empty())
}

/// How a worker of this process starts one; nothing where the system can't name the program that runs.
pub(super) fn how(database: &Database) -> Option<Alone> {
    let program = PathBuf::from(PROGRAM);
    if !program.exists() {
        return None;
    }
    let ConnectOptions { url, listen_url, .. } = database.options("worker");
    let node = serde_json::to_value(Node { url, listen_url }).ok()?;
    Some(Alone {
        program,
        arguments: std::env::args_os().skip(1).collect(),
        environment: vec![(VARIABLE.to_owned(), "1".to_owned())],
        node,
    })
}

/// Drives the one run that the process was started for.
pub(super) async fn run(plan: Plan) -> Result<(), Failure> {
    let shutdown = CancellationToken::new();
    // A tool that tells its parent to stop doesn't get rid of suspicion; the worker closes standard input.
    signals::ignore()?;
    // Seen as what it is by whoever looks for the cause of a death. Where the system has no such file, it isn't.
    let _ = std::fs::write("/proc/self/comm", "holdfast-alone");
    // A worker that has gone, or changed its mind, before anything has begun is waited for by nobody.
    let Some(ready) = shutdown.clone().run_until_cancelled(prepare(plan, shutdown.clone())).await else {
        return Ok(());
    };
    let Ready { store, listener, config, lease } = ready?;
    let held = || {
        // A worker that is gone is heard of on standard input.
        let _ = output::line(HELD);
    };
    let done = run_alone(store.clone(), listener, config, lease, held, shutdown).await;
    if let Some(notifier) = store.notifier() {
        notifier.close().await;
    }
    done.map_err(|error| Failure::Failed(chain(&error)))
}

/// What a run needs to be driven.
struct Ready {
    store: Store,
    listener: Listener,
    config: Config,
    lease: Lease,
}

async fn prepare(plan: Plan, leave: CancellationToken) -> Result<Ready, Failure> {
    let told = |error: &dyn std::error::Error| Failure::during("the order of the worker")(error);
    let line = hear(leave).await.map_err(|error| told(&error))?;
    let Order { node, lease, revision } = serde_json::from_str(&line).map_err(|error| told(&error))?;
    let Node { url, listen_url } = serde_json::from_value(node).map_err(|error| told(&error))?;
    let (Some(worker), Some(agents)) = (plan.worker, &plan.agents) else {
        return Err(Failure::Config(format!("{VARIABLE} is set, but {} drives no runs", plan.role)));
    };
    let mut loaded = agents::load(agents).await?;
    loaded.retain(|one| one.agent.slug == lease.agent && one.agent.revision == revision);
    if loaded.is_empty() {
        let agent = &lease.agent;
        return Err(Failure::Failed(format!("the files of agent {agent} aren't what the worker has read")));
    }
    let options = ConnectOptions {
        transaction_pooler: listen_url.is_some(),
        hot_connections: CONNECTIONS as usize,
        read_connections: CONNECTIONS,
        listen_url: listen_url.clone(),
        ..ConnectOptions::new(url.clone(), "alone")
    };
    let direct = listen_url.unwrap_or(url);
    let db = connect::connect(options).await.map_err(|error| error.failure())?;
    let notifier = Notifier::start(&direct, "alone").map_err(|error| error.failure())?;
    let store = fault::inject(Store::new(db, Some(notifier)))?;
    let listener = Listener::start(&direct, "alone", &Channel::ALL).map_err(|error| error.failure())?;
    let WorkerPlan { args, keys } = worker;
    let config = roles::worker_config(args, keys, loaded, grace_alone(plan.common.grace()), None);
    Ok(Ready { store, listener, config, lease })
}

/// The first line of standard input, whose end then cancels `leave`: the worker has gone, or wishes that this
/// process goes.
async fn hear(leave: CancellationToken) -> io::Result<String> {
    let (tell, told) = oneshot::channel();
    // A thread of its own: nothing ends a read of standard input, and the process doesn't wait for it.
    std::thread::spawn(move || {
        let mut input = io::stdin().lock();
        let mut line = String::new();
        let _ = tell.send(input.read_line(&mut line).map(|_| line));
        let _ = io::copy(&mut input, &mut io::sink());
        leave.cancel();
    });
    told.await.map_err(io::Error::other)?
}
