//! Servers: what each role is made of, and how a process of one or more of them starts and stops.

mod agents;
mod alone;
mod database;
mod fault;
mod metrics;
mod roles;
mod signals;
mod start;

pub(crate) use agents::{load, warn_of_missing_keys};
pub(crate) use database::{Database, once, patiently};
pub(crate) use signals::watch as watch_signals;
pub(crate) use start::store;

use std::{path::PathBuf, time::Duration};

use holdfast_worker::model::ApiKeys;

use crate::{
    args::{
        AgentArgs, ApiNode, CommonArgs, DatabaseArgs, KeyArgs, SchedulerNode, ServeNode, WorkerArgs,
        WorkerNode,
    },
    failure::{Failure, chain},
};

/// What a process is asked to be: the roles that it takes, each with its configuration.
struct Plan {
    /// `serve`, `api`, `worker` or `scheduler`.
    role: &'static str,
    database: DatabaseArgs,
    agents: Option<AgentArgs>,
    api: Option<holdfast_api::Config>,
    worker: Option<WorkerPlan>,
    scheduler: Option<holdfast_scheduler::Config>,
    common: CommonArgs,
}

/// A worker's configuration, but for its agents.
struct WorkerPlan {
    args: WorkerArgs,
    keys: ApiKeys,
}

/// `holdfast serve`.
pub(crate) async fn serve(node: ServeNode) -> Result<(), Failure> {
    start::run(Plan {
        role: "serve",
        api: Some(roles::api_config(&node.api, &node.common)?),
        worker: Some(worker_plan(node.worker)?),
        scheduler: Some(roles::scheduler_config(&node.retention, &node.webhooks)?),
        database: node.database,
        agents: Some(node.agents),
        common: node.common,
    })
    .await
}

/// `holdfast api`.
pub(crate) async fn api(node: ApiNode) -> Result<(), Failure> {
    start::run(Plan {
        role: "api",
        api: Some(roles::api_config(&node.api, &node.common)?),
        worker: None,
        scheduler: None,
        database: node.database,
        agents: Some(node.agents),
        common: node.common,
    })
    .await
}

/// `holdfast worker`.
pub(crate) async fn worker(node: WorkerNode) -> Result<(), Failure> {
    start::run(Plan {
        role: "worker",
        api: None,
        worker: Some(worker_plan(node.worker)?),
        scheduler: None,
        database: node.database,
        agents: Some(node.agents),
        common: node.common,
    })
    .await
}

/// `holdfast scheduler`.
pub(crate) async fn scheduler(node: SchedulerNode) -> Result<(), Failure> {
    start::run(Plan {
        role: "scheduler",
        api: None,
        worker: None,
        scheduler: Some(roles::scheduler_config(&node.retention, &node.webhooks)?),
        database: node.database,
        agents: None,
        common: node.common,
    })
    .await
}

fn worker_plan(args: WorkerArgs) -> Result<WorkerPlan, Failure> {
    let keys = keys(&args.keys)?;
    Ok(WorkerPlan { args, keys })
}

/// The keys of model APIs that the flags name, or those of this user.
pub(crate) fn keys(args: &KeyArgs) -> Result<ApiKeys, Failure> {
    let keys = match (&args.api_keys, default_keys()) {
        (Some(path), _) => ApiKeys::load(path, false),
        (None, Some(path)) => ApiKeys::load(&path, true),
        (None, None) => Ok(ApiKeys::default()),
    };
    keys.map_err(|error| Failure::Config(chain(&error)))
}

fn default_keys() -> Option<PathBuf> {
    let base = std::env::var_os("XDG_CONFIG_HOME").filter(|dir| !dir.is_empty()).map(PathBuf::from);
    let base = base.or_else(|| std::env::home_dir().map(|home| home.join(".config")))?;
    Some(base.join("holdfast/secret-keys"))
}

impl CommonArgs {
    fn grace(&self) -> Duration {
        Duration::from_secs(self.shutdown_grace)
    }
}
