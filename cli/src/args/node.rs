//! Flags of servers.

use std::{net::SocketAddr, path::PathBuf};

use clap::{Args, ValueHint};
use holdfast_engine::webhook::KINDS;

/// The largest request body by default, in bytes.
const MAX_BODY: usize = 32 * 1024 * 1024;

/// Flags of `serve`.
#[derive(Debug, Args)]
pub(crate) struct ServeNode {
    #[command(flatten)]
    pub(crate) database: DatabaseArgs,
    #[command(flatten)]
    pub(crate) agents: AgentArgs,
    #[command(flatten)]
    pub(crate) api: ApiArgs,
    #[command(flatten)]
    pub(crate) worker: WorkerArgs,
    #[command(flatten)]
    pub(crate) retention: RetentionArgs,
    #[command(flatten)]
    pub(crate) webhooks: WebhookArgs,
    #[command(flatten)]
    pub(crate) common: CommonArgs,
}

/// Flags of `api`.
#[derive(Debug, Args)]
pub(crate) struct ApiNode {
    #[command(flatten)]
    pub(crate) database: DatabaseArgs,
    #[command(flatten)]
    pub(crate) agents: AgentArgs,
    #[command(flatten)]
    pub(crate) api: ApiArgs,
    #[command(flatten)]
    pub(crate) common: CommonArgs,
}

/// Flags of `worker`.
#[derive(Debug, Args)]
pub(crate) struct WorkerNode {
    #[command(flatten)]
    pub(crate) database: DatabaseArgs,
    #[command(flatten)]
    pub(crate) agents: AgentArgs,
    #[command(flatten)]
    pub(crate) worker: WorkerArgs,
    #[command(flatten)]
    pub(crate) common: CommonArgs,
}

/// Flags of `scheduler`.
#[derive(Debug, Args)]
pub(crate) struct SchedulerNode {
    #[command(flatten)]
    pub(crate) database: DatabaseArgs,
    #[command(flatten)]
    pub(crate) retention: RetentionArgs,
    #[command(flatten)]
    pub(crate) webhooks: WebhookArgs,
    #[command(flatten)]
    pub(crate) common: CommonArgs,
}

/// Which database.
#[derive(Debug, Clone, Args)]
pub(crate) struct DatabaseArgs {
    /// Postgres [default: an embedded cluster under --data-dir; DATABASE_URL is honoured too]
    #[arg(long, global = true, value_name = "URL")]
    pub(crate) database_url: Option<String>,
    /// Direct connection for LISTEN and migrations, where --database-url leads through a
    /// transaction-mode pooler
    #[arg(long, global = true, value_name = "URL")]
    pub(crate) listen_database_url: Option<String>,
    /// Home of the embedded cluster
    #[arg(long, global = true, value_name = "DIR", default_value = "./.holdfast", value_hint = ValueHint::DirPath)]
    pub(crate) data_dir: PathBuf,
    /// The most connections of each of the two pools, for the hot path and for all else
    #[arg(long, global = true, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(2..=1000))]
    pub(crate) db_connections: u32,
}

/// What ages, and what becomes of it.
#[derive(Debug, Clone, Args)]
pub(crate) struct RetentionArgs {
    /// For how long events can be replayed
    #[arg(long, value_name = "DAYS", default_value_t = 7, value_parser = clap::value_parser!(u64).range(1..=36_500))]
    pub(crate) keep_events_days: u64,
    /// Delete sessions in which nothing has happened for so long and nothing is open; 0 keeps them
    #[arg(long, value_name = "DAYS", default_value_t = 0, value_parser = clap::value_parser!(i32).range(0..=36_500))]
    pub(crate) retire_after_days: i32,
    /// Keep a document of each session that is deleted for its age
    #[arg(long)]
    pub(crate) archive: bool,
    /// Delete such documents after so long; 0 keeps them
    #[arg(long, value_name = "DAYS", default_value_t = 0, value_parser = clap::value_parser!(i32).range(0..=36_500))]
    pub(crate) keep_archives_days: i32,
}

/// Where events are sent.
#[derive(Debug, Clone, Args)]
pub(crate) struct WebhookArgs {
    /// Secrets that sign webhooks: {"default": "whsec_…" | ["whsec_…", …], …}; without it none is sent
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) webhook_secret_file: Option<PathBuf>,
    /// Send the events of all sessions here, signed with the secrets `default`
    #[arg(long, value_name = "URL", value_hint = ValueHint::Url)]
    pub(crate) webhook_url: Option<String>,
    /// Only these kinds of events [default: all of them]
    #[arg(long, value_name = "A,B", value_delimiter = ',', value_parser = KINDS)]
    pub(crate) webhook_events: Vec<String>,
    /// Give up a webhook that was tried for so long
    #[arg(long, value_name = "SECONDS", default_value_t = 86_400, value_parser = clap::value_parser!(u64).range(1..=604_800))]
    pub(crate) webhook_give_up: u64,
}

/// Which agents.
#[derive(Debug, Clone, Args)]
pub(crate) struct AgentArgs {
    /// An agent file; repeatable
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) agent_file: Vec<PathBuf>,
    /// A directory whose *.json are agent files; repeatable
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) agents_dir: Vec<PathBuf>,
    /// Use only this one of the loaded agents; repeatable
    #[arg(long = "agent", value_name = "SLUG")]
    pub(crate) only_agent: Vec<String>,
}

/// Flags of whatever answers HTTP.
#[derive(Debug, Clone, Args)]
pub(crate) struct ApiArgs {
    /// Where to listen; port 0 picks one
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:8080")]
    pub(crate) bind: SocketAddr,
    /// Also a Unix socket, open to this user only
    #[arg(long, value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub(crate) socket: Option<PathBuf>,
    /// Bearer tokens: {"tokens": [{"owner", "sha256"} | {"owner", "token"}]}, re-read on SIGHUP
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) auth_tokens: Option<PathBuf>,
    /// Owners who may follow the events of all owners (/v1/events?scope=all)
    #[arg(long, value_name = "A,B", value_delimiter = ',')]
    pub(crate) admin_owners: Vec<String>,
    /// An origin that browsers may call from; repeatable
    #[arg(long, value_name = "ORIGIN", value_delimiter = ',')]
    pub(crate) cors_origin: Vec<String>,
    /// Bind beyond loopback without tokens
    #[arg(long)]
    pub(crate) allow_anonymous: bool,
    /// The largest request body
    #[arg(long, value_name = "BYTES", default_value_t = MAX_BODY, value_parser = clap::value_parser!(usize))]
    pub(crate) max_body: usize,
}

/// Flags of whatever runs sessions.
#[derive(Debug, Clone, Args)]
pub(crate) struct WorkerArgs {
    /// How many runs the worker holds at once
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) slots: u32,
    /// After how long a dead worker's runs go to another
    #[arg(long, value_name = "SECONDS", default_value_t = 15, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(crate) lease_ttl: u64,
    /// Send text as the model writes it
    #[arg(long)]
    pub(crate) stream_tokens: bool,
    /// What the worker offers to isolated calls
    #[arg(long, value_name = "A,B", value_delimiter = ',')]
    pub(crate) labels: Vec<String>,
    #[command(flatten)]
    pub(crate) keys: KeyArgs,
}

/// Which keys of model APIs.
#[derive(Debug, Clone, Args)]
pub(crate) struct KeyArgs {
    /// Keys of model APIs: a JSON object of key id to key [default: ~/.config/holdfast/secret-keys]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) api_keys: Option<PathBuf>,
}

/// Flags of every server.
#[derive(Debug, Clone, Args)]
pub(crate) struct CommonArgs {
    /// How long work under way may still take after SIGTERM
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(0..=3600))]
    pub(crate) shutdown_grace: u64,
    /// Threads that work; 1 suits a process beside others on a small machine [default: one a core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=512))]
    pub(crate) threads: Option<u16>,
    /// Refuse to start on an outdated schema instead of migrating it
    #[arg(long)]
    pub(crate) no_migrate: bool,
    /// Metrics and health on an address of their own; port 0 picks one
    #[arg(long, value_name = "ADDR:PORT")]
    pub(crate) metrics_bind: Option<SocketAddr>,
    /// Send traces, metrics and logs to an OTLP server over HTTP
    #[arg(long, value_name = "URL", value_hint = ValueHint::Url)]
    pub(crate) otlp_endpoint: Option<String>,
}
