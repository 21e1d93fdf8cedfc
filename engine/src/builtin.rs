//! Tools that the engine itself carries out: helpers, which are agents that an agent may call, and system
//! toolboxes, by which a model looks after its own calls, mail and sessions.

mod request;

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::{agent::AgentError, naming, scope::IntrospectionScope, tool::ToolSpec};

pub(crate) use request::MAX_SLEEP_SECONDS;
pub use request::{Address, MAX_TEXT, Request, Section, WaitFor};

/// How many sessions a look among sessions may name, unless the toolbox says otherwise.
pub const MAX_RESULTS: u32 = 50;

/// The most sessions that a toolbox may let a look name.
pub const MOST_RESULTS: u32 = 500;

/// An agent that another may call, as an agent file names it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExtraAgent {
    /// Its slug, as its own file has it.
    pub slug: String,
    /// Its file, relative to the one that names it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
}

/// A toolbox of the engine's, as an agent file describes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "tag", content = "contents")]
pub enum BuiltinToolbox {
    /// The session's own calls, mail and relatives.
    SystemToolbox(SystemToolbox),
}

/// What a system toolbox offers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct SystemToolbox {
    /// Its name, which the tool's name is made of.
    pub name: String,
    /// What the model is told of it.
    #[serde(default)]
    pub description: String,
    /// What may be asked of it.
    pub capabilities: Vec<Capability>,
    /// Which sessions can be read.
    #[serde(default)]
    pub session_introspection_scope: IntrospectionScope,
    /// How many sessions one look may name.
    #[serde(default = "max_results")]
    pub session_introspection_max_results: u32,
    /// Whether results of tools may be read.
    #[serde(default = "yes")]
    pub session_introspection_include_tool_outputs: bool,
    /// Fields that have no effect, by name.
    #[serde(flatten)]
    pub unknown: Map<String, Value>,
}

fn max_results() -> u32 {
    MAX_RESULTS
}

fn yes() -> bool {
    true
}

macro_rules! capabilities {
    ($($(#[$doc:meta])* $name:ident = $word:literal, $about:literal;)*) => {
        /// What may be asked of a system toolbox.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum Capability {
            $($(#[$doc])* #[serde(rename = $word)] $name,)*
        }

        impl Capability {
            /// All, in the order in which models are told of them.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// The word for it in agent files and calls.
            pub fn word(self) -> &'static str {
                match self { $(Self::$name => $word),* }
            }

            /// What the model is told of it.
            fn about(self) -> &'static str {
                match self { $(Self::$name => $about),* }
            }
        }
    };
}

capabilities! {
    /// How one of its calls is going.
    GetToolCallStatus = "get-tool-call-status",
        "status, progress and result of one of your calls: tool_call_id; include_progress; wait_for_completion with timeout_seconds";
    /// Which of its calls are open.
    ListRunningToolCalls = "list-running-tool-calls", "your calls that have no result yet";
    /// Ends one of its calls.
    CancelToolCall = "cancel-tool-call", "ends one of your calls: tool_call_id";
    /// Waits for calls or mail.
    Wait = "wait",
        "waits until a call ends, mail comes or the time is over: for (a list of call ids, \"any-call\" or \"mail\"), timeout_seconds";
    /// Sleeps, however long.
    SleepUntil = "sleep-until", "sleeps until a time, which may be days away: until (RFC 3339) or seconds";
    /// Asks a person.
    AskHuman = "ask-human",
        "asks a person and gets the answer as the result: question; choices; deadline_seconds; default (the answer if nobody gives one in time)";
    /// Writes to another session.
    SendMessage = "send-message",
        "writes to another session: to (its id, the last 8 characters of it, or \"parent\"), text; in_reply_to; expects_reply; interrupt";
    /// Starts a session that goes on by itself.
    SpawnSession = "spawn-session",
        "starts a session of another agent, which goes on by itself and answers by mail: agent, message";
    /// Lists sessions.
    ListSessions = "list-sessions", "the sessions that you may read";
    /// Searches sessions.
    SearchSessions = "search-sessions", "searches the sessions that you may read: query";
    /// Reads a session.
    ReadSession = "read-session",
        "the turns of a session: session_id; take_n, drop_n, offset, limit; include_thinking; include_tool_responses";
    /// Counts sessions.
    GetSessionStats = "get-session-stats", "how many sessions you may read, and how long they are";
    /// Has events of another session mailed.
    WatchSession = "watch-session",
        "has events of another session come as mail: session_id, events; tool; ttl_seconds";
    /// Ends that.
    UnwatchSession = "unwatch-session", "ends a watch: session_id or watch_id";
}

/// A tool that the engine carries out.
#[derive(Debug, Clone)]
pub struct Builtin {
    /// What the model is told of it.
    pub spec: ToolSpec,
    /// What it is.
    pub kind: BuiltinKind,
}

/// What carries a tool of the engine's out.
#[derive(Debug, Clone)]
pub enum BuiltinKind {
    /// A session of another agent.
    Helper(Helper),
    /// The engine, as a system toolbox allows.
    System(Arc<SystemToolbox>),
}

/// An agent that may be called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Helper {
    /// Its slug.
    pub slug: String,
    /// What it is for.
    pub announce: String,
}

impl Helper {
    /// The tool by which it is called.
    pub fn tool(&self) -> Builtin {
        let original = format!("prompt_agent_{}", self.slug);
        let about = match self.announce.as_str() {
            "" => format!("Asks the agent {:?} and returns its answer.", self.slug),
            announce => format!("Asks the agent {:?} and returns its answer. {announce}", self.slug),
        };
        let spec = ToolSpec {
            name: naming::normalize(&original),
            original,
            description: about,
            parameters: json!({
                "type": "object",
                "properties": {"what": {"type": "string", "description": "what the agent is asked"}},
                "required": ["what"],
            }),
        };
        Builtin { spec, kind: BuiltinKind::Helper(self.clone()) }
    }
}

/// The tools of an agent's toolboxes.
///
/// # Errors
/// [`AgentError::Toolbox`].
pub(crate) fn of_toolboxes(toolboxes: &[BuiltinToolbox]) -> Result<Vec<Builtin>, AgentError> {
    let mut names = std::collections::HashSet::new();
    let tool = |(index, BuiltinToolbox::SystemToolbox(toolbox)): (usize, &BuiltinToolbox)| {
        let refuse = |problem: &str| AgentError::Toolbox { index, problem: problem.to_owned() };
        if toolbox.name.is_empty() || toolbox.name.len() > 100 {
            return Err(refuse("Name must be 1 to 100 bytes"));
        }
        if toolbox.capabilities.is_empty() {
            return Err(refuse("Capabilities must name at least one"));
        }
        if !(1..=MOST_RESULTS).contains(&toolbox.session_introspection_max_results) {
            return Err(refuse("SessionIntrospectionMaxResults must be 1 to 500"));
        }
        let spec = system_spec(toolbox);
        if !names.insert(spec.name.clone()) {
            return Err(refuse("another toolbox has this Name"));
        }
        Ok(Builtin { spec, kind: BuiltinKind::System(Arc::new(toolbox.clone())) })
    };
    toolboxes.iter().enumerate().map(tool).collect()
}

fn system_spec(toolbox: &SystemToolbox) -> ToolSpec {
    let original = format!("system_{}_system_info", toolbox.name);
    let offered = |capability: &&Capability| toolbox.capabilities.contains(capability);
    let capabilities: Vec<&Capability> = Capability::ALL.iter().filter(offered).collect();
    let mut description = toolbox.description.clone();
    for capability in &capabilities {
        description.push_str(&format!("\n- {}: {}", capability.word(), capability.about()));
    }
    let words: Vec<&str> = capabilities.iter().map(|capability| capability.word()).collect();
    let mut properties = Map::new();
    properties.insert("capability".to_owned(), json!({"type": "string", "enum": words}));
    for capability in &capabilities {
        for (name, schema) in request::parameters(**capability) {
            properties.insert((*name).to_owned(), schema);
        }
    }
    ToolSpec {
        name: naming::normalize(&original),
        original,
        description: description.trim_start().to_owned(),
        parameters: json!({"type": "object", "properties": properties, "required": ["capability"]}),
    }
}
