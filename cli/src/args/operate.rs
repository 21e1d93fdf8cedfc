//! Flags of the commands that look after an installation.

use std::{net::SocketAddr, path::PathBuf};

use clap::{Args, Subcommand, ValueEnum, ValueHint};
use uuid::Uuid;

use super::{AgentArgs, DatabaseArgs, KeyArgs};

/// Flags of `migrate`.
#[derive(Debug, Args)]
pub(crate) struct MigrateArgs {
    #[command(flatten)]
    pub(crate) database: DatabaseArgs,
    /// Change nothing; fail if migrations are pending
    #[arg(long)]
    pub(crate) check: bool,
    /// Report as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Flags of `demo`.
#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Home of the demo's database and files
    #[arg(long = "data-dir", id = "demo_dir", value_name = "DIR", default_value = "./.holdfast/demo", value_hint = ValueHint::DirPath)]
    pub(crate) data_dir: PathBuf,
    /// Leave the servers up until Ctrl-C
    #[arg(long)]
    pub(crate) keep: bool,
}

/// Flags of `scripted-model`.
#[derive(Debug, Args)]
pub(crate) struct ScriptedModelArgs {
    /// What to answer
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) script: PathBuf,
    /// Where to listen; port 0 picks one
    #[arg(long = "bind", id = "model_bind", value_name = "ADDR:PORT", default_value = "127.0.0.1:8081")]
    pub(crate) bind: SocketAddr,
}

/// How `check` shows tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ToolDisplay {
    /// Not at all
    None,
    /// Name and description
    List,
    /// All that is known of them, as JSON
    Internal,
    /// As they are told to an OpenAI-compatible model
    Openai,
}

/// Flags of `check`.
#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    pub(crate) agents: AgentArgs,
    #[command(flatten)]
    pub(crate) keys: KeyArgs,
    /// How to show the tools
    #[arg(long, value_enum, default_value = "list", value_name = "HOW")]
    pub(crate) tools: ToolDisplay,
    /// Show each agent's configuration as it was understood
    #[arg(long)]
    pub(crate) show_config: bool,
    /// Report as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Flags of `status`.
#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    pub(crate) database: DatabaseArgs,
    /// Explain one session instead: where it stands, who holds it, what it waits for
    #[arg(long, value_name = "ID")]
    pub(crate) session: Option<Uuid>,
    /// Tell of one owner's sessions only, and of its limits; '' is the owner of clients without a name
    #[arg(long, value_name = "NAME", conflicts_with = "session")]
    pub(crate) owner: Option<String>,
    /// Exit with 1 if something needs attention
    #[arg(long, conflicts_with = "session")]
    pub(crate) check: bool,
    /// After how long a due run that nothing explains needs attention
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(i64).range(1..=86_400))]
    pub(crate) old_run: i64,
    /// After how long an open transaction needs attention
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(i64).range(1..=86_400))]
    pub(crate) long_transaction: i64,
    /// For how long events can be replayed, as the scheduler was told
    #[arg(long, value_name = "DAYS", default_value_t = 7, value_parser = clap::value_parser!(u64).range(1..=36_500))]
    pub(crate) keep_events_days: u64,
    /// After how long sessions are retired, as the scheduler was told; 0, never, shows what 30 days would do
    #[arg(long, value_name = "DAYS", default_value_t = 0, value_parser = clap::value_parser!(i32).range(0..=36_500))]
    pub(crate) retire_after_days: i32,
    /// After how long archives are deleted, as the scheduler was told; 0, never, shows what 365 days would do
    #[arg(long, value_name = "DAYS", default_value_t = 0, value_parser = clap::value_parser!(i32).range(0..=36_500))]
    pub(crate) keep_archives_days: i32,
    /// Report as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Flags of `webhooks`.
#[derive(Debug, Args)]
pub(crate) struct WebhooksArgs {
    #[command(flatten)]
    pub(crate) database: DatabaseArgs,
    /// Report as JSON
    #[arg(long, global = true)]
    pub(crate) json: bool,
    #[command(subcommand)]
    pub(crate) command: WebhooksCommand,
}

/// What to do with webhooks.
#[derive(Debug, Subcommand)]
pub(crate) enum WebhooksCommand {
    /// Endpoints, and the newest webhooks that were given up
    List,
    /// Send webhooks again that were given up, and enable endpoints whose receiver disabled them
    Retry(WhichWebhooks),
    /// Forget webhooks that were given up
    Discard(WhichWebhooks),
    /// Forget an endpoint that isn't configured any more, with what it was still to be sent
    Remove {
        /// `server`, or `agent:` and the slug
        endpoint: String,
    },
}

/// Which of the webhooks that were given up.
#[derive(Debug, Args)]
#[group(required = true, multiple = true)]
pub(crate) struct WhichWebhooks {
    /// All of them
    #[arg(long, conflicts_with_all = ["endpoint", "webhook_id"])]
    pub(crate) all: bool,
    /// Those of one endpoint
    #[arg(long, value_name = "NAME")]
    pub(crate) endpoint: Option<String>,
    /// That of one event
    #[arg(long = "id", id = "webhook_id", value_name = "ID")]
    pub(crate) id: Option<String>,
}

/// What to do with a tool.
#[derive(Debug, Subcommand)]
pub(crate) enum ToolCommand {
    /// Run it once
    Call {
        /// The program
        #[arg(value_hint = ValueHint::FilePath)]
        path: PathBuf,
        /// Its arguments, a JSON object; `-` reads them from standard input
        #[arg(default_value = "{}", value_name = "ARGUMENTS")]
        arguments: String,
        /// Stop it after so many seconds
        #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
        timeout: Option<u64>,
        /// Print the outcome as JSON
        #[arg(long)]
        json: bool,
    },
    /// Show what it says of itself
    Describe {
        /// The program
        #[arg(value_hint = ValueHint::FilePath)]
        path: PathBuf,
        /// Print it as JSON
        #[arg(long)]
        json: bool,
    },
    /// Check its description, and arguments where they are given, without running it
    Validate {
        /// The program
        #[arg(value_hint = ValueHint::FilePath)]
        path: PathBuf,
        /// Arguments, a JSON object; `-` reads them from standard input
        #[arg(value_name = "ARGUMENTS")]
        arguments: Option<String>,
        /// Report as JSON
        #[arg(long)]
        json: bool,
    },
}
