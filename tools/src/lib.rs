//! Executable programs as tools: found beside an agent file, described, called, and stopped.
//!
//! A tool is a program that answers two commands. `program describe` prints a JSON object that
//! says what it is and which arguments it takes ([`ScriptInfo`]); `program run …` does the work and
//! prints the result. [`load_agents`] reads agent files, and those of the agents that these call, and
//! gathers the programs of each in a [`Toolbox`], which notices when programs are added, changed or
//! removed.
//!
//! What a call promises:
//!
//! - Nothing starts before the model's arguments fit the tool's schema; a misfit is told in words
//!   that the model can act on.
//! - Every program leads a process group of its own, and no member of that group outlives the call:
//!   not after a timeout, a cancellation, a dropped future, nor a normal end. On Linux nor does what
//!   left the group, as daemons do; elsewhere a program that moves to a session of its own (`setsid`)
//!   leaves the promise too.
//! - Memory is bounded whatever a program prints ([`MAX_OUTPUT`], [`MAX_MEDIA`]), and whoever reads a
//!   shortened or repaired result is told so.
//! - Holdfast's own settings (`HOLDFAST_*`, `DATABASE_URL`) are not in a program's environment;
//!   everything else of the worker's environment and its working directory is.

mod agent_file;
mod capture;
mod context;
mod describe;
mod group;
mod hook;
mod invocation;
mod output;
mod policy_file;
mod process;
mod progress;
mod scan;
mod schema;
mod script;
#[cfg(target_os = "linux")]
mod stragglers;
#[cfg(not(target_os = "linux"))]
#[path = "stragglers_elsewhere.rs"]
mod stragglers;
mod toolbox;

pub use agent_file::{
    LoadError, LoadedAgent, MAX_AGENT_FILE, MAX_LEVELS, MAX_REACHED, load_agent, load_agents, offered,
};
pub use context::{CallContext, agent_id, hook_id};
pub use describe::{
    Arity, DESCRIBE_TIMEOUT, DescribeError, EmptyResult, MAX_ARGS, MAX_DESCRIPTION, Mode, ScriptArg,
    ScriptInfo, describe,
};
pub use hook::{HookError, ask_program, ask_tool};
pub use output::{MAX_MEDIA, MAX_OUTPUT, STDERR_TAIL};
pub use process::{DRAIN_GRACE, STOP_TIME, StartError};
pub use progress::{MAX_PROGRESS_LINE, PROGRESS_EVERY, Progress, ProgressFn, Stream};
pub use scan::{Filter, FilterError, Source};
pub use script::Script;
pub use stragglers::{MARKS_VARIABLE, end_marked, marks_for_child};
pub use toolbox::{DESCRIBES_AT_ONCE, RETRY_BROKEN, Refreshed, Toolbox};
