//! Flags of the commands that operate sessions of a running server.

use std::path::PathBuf;

use clap::{
    ArgMatches, Args, Command, FromArgMatches, Subcommand, ValueEnum, ValueHint, parser::ValueSource,
};
use uuid::Uuid;

use super::PromptArgs;

/// Flags of `session`.
#[derive(Debug, Args)]
pub(crate) struct SessionArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    #[command(subcommand)]
    pub(crate) command: SessionCommand,
}

/// Which server, and as whom.
#[derive(Debug, Clone, Args)]
pub(crate) struct ClientArgs {
    /// Base URL of the server
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8080", global = true)]
    pub(crate) server: String,
    #[command(flatten)]
    pub(crate) credential: Credential,
    /// Print JSON
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

/// How a client says who it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Credential {
    /// Not at all.
    None,
    /// With this bearer token.
    Token(String),
    /// With the bearer token in this file.
    File(PathBuf),
}

#[derive(Args)]
struct CredentialFlags {
    /// Bearer token; --token-file or HOLDFAST_TOKEN keep it out of the process list
    #[arg(long, value_name = "TOKEN", global = true)]
    token: Option<String>,
    /// File that holds the bearer token
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, global = true)]
    token_file: Option<PathBuf>,
}

impl Args for Credential {
    fn augment_args(command: Command) -> Command {
        CredentialFlags::augment_args(command)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Credential {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let CredentialFlags { token, token_file } = CredentialFlags::from_arg_matches(matches)?;
        let is_flag = |id| matches.value_source(id) == Some(ValueSource::CommandLine);
        match (token, token_file) {
            // Clap sees a conflict only between flags that stand before the same subcommand.
            (Some(_), Some(_)) if is_flag("token") && is_flag("token_file") => Err(clap::Error::raw(
                clap::error::ErrorKind::ArgumentConflict,
                "--token and --token-file can't be used together\n",
            )),
            // A flag wins, whatever else is set elsewhere.
            (Some(_), Some(file)) if is_flag("token_file") => Ok(Self::File(file)),
            (Some(token), _) => Ok(Self::Token(token)),
            (None, Some(file)) => Ok(Self::File(file)),
            (None, None) => Ok(Self::None),
        }
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// What to do with sessions.
#[derive(Debug, Subcommand)]
pub(crate) enum SessionCommand {
    /// Create a session
    Start(StartArgs),
    /// Let a session take one step
    Step(StepArgs),
    /// Let a session go on until it is done or blocked
    Resume(StepArgs),
    /// Ask a session to pause
    Pause(SessionRef),
    /// Stop a session's run
    Cancel {
        #[command(flatten)]
        session: SessionRef,
        /// Also cancel the deferred calls that are open
        #[arg(long)]
        deferred: bool,
        /// Cancel the calls that the run waits for, and let it go on
        #[arg(long, conflicts_with = "deferred")]
        attached: bool,
    },
    /// List deferred calls, of a session or of all sessions
    Pending(CallsArgs),
    /// Give the result of a deferred call
    Complete(CompleteArgs),
    /// Let a deferred call fail
    Fail(FailArgs),
    /// Let a call run that waits for an approval
    Approve(ApproveArgs),
    /// Send a message to a session
    Message(MessageArgs),
    /// Show a session
    Show(ShowArgs),
    /// List sessions, newest first
    List(ListArgs),
    /// Print a session's events as they come, until it is deleted or Ctrl-C
    Follow(FollowArgs),
    /// Delete a session and its children
    Delete {
        #[command(flatten)]
        session: SessionRef,
        /// Only say what would be deleted
        #[arg(long)]
        dry_run: bool,
    },
}

/// One session.
#[derive(Debug, Clone, Args)]
pub(crate) struct SessionRef {
    /// The session's id
    #[arg(value_name = "SESSION")]
    pub(crate) id: Uuid,
}

/// Whether to wait for the run to stop.
#[derive(Debug, Clone, Args)]
pub(crate) struct WaitArgs {
    /// Answer when the run stops
    #[arg(long)]
    pub(crate) wait: bool,
    /// How long to wait at most
    #[arg(long, value_name = "SECONDS", default_value_t = 120, value_parser = clap::value_parser!(u64).range(0..=600), requires = "wait")]
    pub(crate) timeout: u64,
}

/// How far a run goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum RunMode {
    /// Nowhere
    None,
    /// One step
    Step,
    /// Until it is done, or waits for the outside
    UntilBlocked,
}

impl RunMode {
    /// Its name in requests.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Step => "step",
            Self::UntilBlocked => "until_blocked",
        }
    }
}

/// Flags of `session start`.
#[derive(Debug, Args)]
pub(crate) struct StartArgs {
    /// The agent
    #[arg(long, value_name = "SLUG")]
    pub(crate) agent: String,
    #[command(flatten)]
    pub(crate) prompt: PromptArgs,
    /// Take one step only
    #[arg(long, conflicts_with = "run")]
    pub(crate) step: bool,
    /// How far to run [default: as the server decides, until it is done or blocked]
    #[arg(long, value_enum, value_name = "MODE")]
    pub(crate) run: Option<RunMode>,
    /// A label; repeatable
    #[arg(long, value_name = "NAME=VALUE", value_parser = label_pair)]
    pub(crate) label: Vec<(String, String)>,
    #[command(flatten)]
    pub(crate) wait: WaitArgs,
    /// Print events until the run stops
    #[arg(long, conflicts_with = "wait")]
    pub(crate) follow: bool,
}

/// Flags of `session message`.
#[derive(Debug, Args)]
pub(crate) struct MessageArgs {
    #[command(flatten)]
    pub(crate) session: SessionRef,
    #[command(flatten)]
    pub(crate) prompt: PromptArgs,
    /// How far to run [default: as the server decides, until it is done or blocked]
    #[arg(long, value_enum, value_name = "MODE")]
    pub(crate) run: Option<RunMode>,
    /// Don't wait for the calls that the run waits for
    #[arg(long)]
    pub(crate) interrupt: bool,
    /// Makes the message idempotent: a repeat with the same id does nothing
    #[arg(long, value_name = "UUID")]
    pub(crate) message_id: Option<Uuid>,
    #[command(flatten)]
    pub(crate) wait: WaitArgs,
    /// Print events until the run stops
    #[arg(long, conflicts_with = "wait")]
    pub(crate) follow: bool,
}

/// Flags of `session step` and `session resume`.
#[derive(Debug, Args)]
pub(crate) struct StepArgs {
    #[command(flatten)]
    pub(crate) session: SessionRef,
    #[command(flatten)]
    pub(crate) wait: WaitArgs,
}

/// Flags of `session pending`.
#[derive(Debug, Args)]
pub(crate) struct CallsArgs {
    /// The session; all of them if absent
    #[arg(value_name = "SESSION")]
    pub(crate) id: Option<Uuid>,
    /// Only calls of this tool
    #[arg(long, value_name = "NAME", conflicts_with = "id")]
    pub(crate) tool: Option<String>,
    /// Only calls of this agent's sessions
    #[arg(long, value_name = "SLUG", conflicts_with = "id")]
    pub(crate) agent: Option<String>,
    /// How many calls at most
    #[arg(long, value_name = "N", conflicts_with = "id", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) limit: Option<u32>,
    /// Wait until there is one
    #[arg(long, conflicts_with = "id")]
    pub(crate) wait: bool,
}

/// Flags of `session complete`.
#[derive(Debug, Args)]
pub(crate) struct CompleteArgs {
    /// The call's token
    #[arg(value_name = "TOKEN")]
    pub(crate) call_token: Uuid,
    /// The result: JSON in a result form, else plain text; `-` reads standard input
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) file: PathBuf,
    /// Don't let the session go on
    #[arg(long)]
    pub(crate) no_resume: bool,
    #[command(flatten)]
    pub(crate) wait: WaitArgs,
}

/// Flags of `session fail`.
#[derive(Debug, Args)]
pub(crate) struct FailArgs {
    /// The call's token
    #[arg(value_name = "TOKEN")]
    pub(crate) call_token: Uuid,
    /// Why it failed, for the model
    pub(crate) reason: String,
    /// Don't let the session go on
    #[arg(long)]
    pub(crate) no_resume: bool,
    #[command(flatten)]
    pub(crate) wait: WaitArgs,
}

/// Flags of `session approve`.
#[derive(Debug, Args)]
pub(crate) struct ApproveArgs {
    /// The call's token
    #[arg(value_name = "TOKEN")]
    pub(crate) call_token: Uuid,
    /// Don't let the session go on
    #[arg(long)]
    pub(crate) no_resume: bool,
    #[command(flatten)]
    pub(crate) wait: WaitArgs,
}

/// Flags of `session show`.
#[derive(Debug, Args)]
pub(crate) struct ShowArgs {
    #[command(flatten)]
    pub(crate) session: SessionRef,
    /// How many of the newest turns to show
    #[arg(long, value_name = "N", default_value_t = 200)]
    pub(crate) turns: u32,
    #[command(flatten)]
    pub(crate) wait: WaitArgs,
}

/// Flags of `session list`.
#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// Only sessions of this agent
    #[arg(long, value_name = "SLUG")]
    pub(crate) agent: Option<String>,
    /// Only sessions in one of these statuses
    #[arg(long, value_name = "A,B")]
    pub(crate) status: Option<String>,
    /// Only children of this session
    #[arg(long, value_name = "SESSION")]
    pub(crate) parent: Option<Uuid>,
    /// Children too
    #[arg(long)]
    pub(crate) tree: bool,
    /// Only sessions with this label
    #[arg(long, value_name = "NAME=VALUE", value_parser = label_pair)]
    pub(crate) label: Option<(String, String)>,
    /// Only sessions that match this text
    #[arg(long = "query", value_name = "TEXT")]
    pub(crate) query: Option<String>,
    /// How many at most
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=500))]
    pub(crate) limit: Option<u32>,
    /// Where the page before ended
    #[arg(long, value_name = "CURSOR")]
    pub(crate) cursor: Option<String>,
}

/// Flags of `session follow`.
#[derive(Debug, Args)]
pub(crate) struct FollowArgs {
    #[command(flatten)]
    pub(crate) session: SessionRef,
    /// Start after this event; 0 replays everything
    #[arg(long, value_name = "SEQ")]
    pub(crate) after: Option<u64>,
    /// End when the run stops
    #[arg(long)]
    pub(crate) until_stopped: bool,
}

fn label_pair(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("expected NAME=VALUE")?;
    if name.is_empty() {
        return Err("the name is missing".to_owned());
    }
    // It ends the name where sessions are looked for by their labels.
    if name.contains(':') {
        return Err("a name can't hold `:`".to_owned());
    }
    Ok((name.to_owned(), value.to_owned()))
}
