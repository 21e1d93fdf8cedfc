//! The command line. Every flag and command that is offered here works; what belongs to later work isn't
//! offered.

mod node;
mod operate;
#[cfg(test)]
mod page;
mod prompt;
mod session;

use clap::{Parser, Subcommand};

pub(crate) use node::{
    AgentArgs, ApiArgs, ApiNode, CommonArgs, DatabaseArgs, KeyArgs, RetentionArgs, SchedulerNode, ServeNode,
    WebhookArgs, WorkerArgs, WorkerNode,
};
pub(crate) use operate::{
    CheckArgs, DemoArgs, MigrateArgs, ScriptedModelArgs, StatusArgs, ToolCommand, ToolDisplay, WebhooksArgs,
    WebhooksCommand, WhichWebhooks,
};
pub(crate) use prompt::{Part, PromptArgs};
pub(crate) use session::{
    ApproveArgs, CallsArgs, ClientArgs, CompleteArgs, Credential, FailArgs, ListArgs, MessageArgs,
    SessionArgs, SessionCommand, ShowArgs, StartArgs, WaitArgs,
};

use crate::logs::Format;

/// Durable workflows of agent sessions on Postgres.
#[derive(Debug, Parser)]
#[command(
    name = "holdfast",
    version,
    max_term_width = 100,
    subcommand_required = true,
    arg_required_else_help = true
)]
#[command(after_help = "Flags of servers and of their clients may also come from the environment, as \
    HOLDFAST_<FLAG>, and from holdfast.toml in this directory or the nearest one above it. Exit codes: 0 \
    success, 1 failure, 2 wrong usage, 3 configuration, 4 an agent doesn't load, 5 a tool failed.")]
pub(crate) struct Cli {
    /// How logs look on standard error
    #[arg(long, value_enum, default_value = "json", global = true, value_name = "FORMAT")]
    pub(crate) log_format: Format,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// API, worker and scheduler in one process
    Serve(Box<ServeNode>),
    /// An API node
    Api(Box<ApiNode>),
    /// A worker
    Worker(Box<WorkerNode>),
    /// A scheduler
    Scheduler(Box<SchedulerNode>),
    /// Apply migrations of the database, or check them
    Migrate(MigrateArgs),
    /// Play a whole session on an embedded database: crash, takeover, outside results, answer
    Demo(DemoArgs),
    /// A model server that answers from a script
    ScriptedModel(ScriptedModelArgs),
    /// Load agent files and report what they hold
    ///
    /// What keeps an agent from being used is an error (exit code 4). What is only odd is a warning: an
    /// unknown field, a tool directory that isn't there, a tool that can't describe itself, a rule that
    /// matches no tool, a model key that isn't among the keys.
    Check(CheckArgs),
    /// Operate sessions of a running server
    Session(Box<SessionArgs>),
    /// Queue, workers and lag, as the database has them
    Status(StatusArgs),
    /// See webhooks that were given up, and send them again
    Webhooks(WebhooksArgs),
    /// Run or inspect one tool without a model
    #[command(subcommand)]
    Tool(ToolCommand),
}

impl Command {
    /// Whether it is a server, whose failures are logged.
    pub(crate) fn is_server(&self) -> bool {
        matches!(
            self,
            Self::Serve(_) | Self::Api(_) | Self::Worker(_) | Self::Scheduler(_) | Self::ScriptedModel(_)
        )
    }

    /// The role of a node, `client` of anything else.
    pub(crate) fn role(&self) -> &'static str {
        match self {
            Self::Serve(_) => "serve",
            Self::Api(_) => "api",
            Self::Worker(_) => "worker",
            Self::Scheduler(_) => "scheduler",
            _ => "client",
        }
    }

    /// Where traces, metrics and logs go.
    pub(crate) fn otlp_endpoint(&self) -> Option<&str> {
        self.common()?.otlp_endpoint.as_deref()
    }

    /// How many threads work, where that is said.
    pub(crate) fn threads(&self) -> Option<usize> {
        self.common()?.threads.map(usize::from)
    }

    fn common(&self) -> Option<&CommonArgs> {
        match self {
            Self::Serve(node) => Some(&node.common),
            Self::Api(node) => Some(&node.common),
            Self::Worker(node) => Some(&node.common),
            Self::Scheduler(node) => Some(&node.common),
            _ => None,
        }
    }
}
