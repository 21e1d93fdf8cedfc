//! What a model asks of a system toolbox.

use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Value, json};
use uuid::Uuid;

use super::{Capability, SystemToolbox};
use crate::{Time, ids::SessionId};

/// The longest text that a letter, a question or a search carries, in bytes.
pub const MAX_TEXT: usize = 64 * 1024;

/// How long a `wait` waits that doesn't say, in seconds.
const WAIT_SECONDS: u64 = 30;

/// The longest sleep, and the farthest deadline of a question, in seconds: 366 days.
pub(crate) const MAX_SLEEP_SECONDS: u64 = 366 * 86_400;

/// How many choices a question may have.
const MAX_CHOICES: usize = 32;

/// How many calls one `wait` may name.
const MAX_WAITED: usize = 128;

/// Which turns of a session are read, and what of them. Positions count from 0.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct Section {
    /// The last so many of those that the others choose.
    pub take_n: Option<u64>,
    /// All but the first so many.
    pub drop_n: Option<u64>,
    /// From this one on, behind those that are dropped.
    pub offset: Option<u64>,
    /// So many.
    pub limit: Option<u64>,
    /// With what models thought.
    #[serde(default)]
    pub include_thinking: bool,
    /// With what tools answered.
    #[serde(default)]
    pub include_tool_responses: bool,
}

/// Something that a model asks of a system toolbox, its arguments checked.
#[derive(Debug, Clone, PartialEq)]
pub enum Request {
    /// How a call is going.
    Status {
        /// The call, as the model names it.
        call: String,
        /// Whether its progress is wanted.
        include_progress: bool,
        /// Seconds to wait for its end.
        wait_seconds: Option<u64>,
    },
    /// Which calls are open.
    ListCalls,
    /// End a call.
    CancelCall {
        /// The call, as the model names it.
        call: String,
    },
    /// Wait.
    Wait {
        /// For what.
        what: WaitFor,
        /// Seconds.
        seconds: u64,
    },
    /// Sleep until a time.
    SleepUntil(Time),
    /// Sleep so many seconds.
    SleepFor(u64),
    /// Ask a person.
    AskHuman {
        /// The question.
        question: String,
        /// Seconds after which nobody is asked any more.
        deadline_seconds: Option<u64>,
        /// The answer if nobody gives one in time.
        default: Option<String>,
    },
    /// Write to a session.
    SendMessage {
        /// To whom; nothing for the sender of the letter that is answered.
        to: Option<Address>,
        /// What.
        text: String,
        /// The letter that is answered, as headers name it.
        in_reply_to: Option<String>,
        /// Whether an answer is expected.
        expects_reply: bool,
        /// Whether the recipient's calls are not waited for.
        interrupt: bool,
    },
    /// Start a session.
    Spawn {
        /// Its agent.
        agent: String,
        /// Its first letter.
        message: String,
    },
    /// List sessions.
    ListSessions,
    /// Search sessions.
    SearchSessions {
        /// For this text.
        query: String,
    },
    /// Read a session.
    ReadSession {
        /// Which.
        session: SessionId,
        /// What of it.
        section: Section,
    },
    /// Count sessions.
    SessionStats,
    /// Have events mailed.
    Watch {
        /// Of which session.
        session: Address,
        /// Kinds of events.
        events: Vec<String>,
        /// Only those of tools that this glob matches.
        tool: Option<String>,
        /// For how long, in seconds.
        ttl_seconds: Option<u64>,
    },
    /// Have them mailed no longer.
    Unwatch {
        /// Of which session.
        session: Option<Address>,
        /// Or which watch.
        watch: Option<Uuid>,
    },
}

/// What a `wait` waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WaitFor {
    /// One of these calls, as the model names them.
    Calls(Vec<String>),
    /// Any call that runs in the background.
    AnyCall,
    /// Mail.
    Mail,
}

/// A session, as a model names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// By its id.
    Session(SessionId),
    /// The session that called or started this one.
    Parent,
    /// By the end of its id, as headers show it.
    Short(String),
}

impl Address {
    /// Reads an address.
    ///
    /// # Errors
    /// A text for the model.
    pub fn parse(text: &str) -> Result<Self, String> {
        let hex = |text: &str| text.len() == 8 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        match text.trim() {
            "parent" => Ok(Self::Parent),
            short if hex(short) => Ok(Self::Short(short.to_ascii_lowercase())),
            id => id.parse().map(Self::Session).map_err(|_| {
                format!("{id:?} is no session: give its id, the last 8 characters of it, or \"parent\"")
            }),
        }
    }
}

#[derive(Deserialize)]
struct Named {
    capability: Option<String>,
}

#[derive(Deserialize)]
struct StatusForm {
    tool_call_id: String,
    #[serde(default)]
    include_progress: bool,
    #[serde(default)]
    wait_for_completion: bool,
    timeout_seconds: Option<f64>,
}

#[derive(Deserialize)]
struct CallForm {
    tool_call_id: String,
}

#[derive(Deserialize)]
struct WaitForm {
    #[serde(rename = "for")]
    what: Value,
    timeout_seconds: Option<f64>,
}

#[derive(Deserialize)]
struct SleepForm {
    until: Option<String>,
    seconds: Option<f64>,
}

#[derive(Deserialize)]
struct AskForm {
    question: String,
    #[serde(default)]
    choices: Vec<String>,
    deadline_seconds: Option<f64>,
    default: Option<String>,
}

#[derive(Deserialize)]
struct SendForm {
    to: Option<String>,
    text: String,
    in_reply_to: Option<String>,
    #[serde(default)]
    expects_reply: bool,
    #[serde(default)]
    interrupt: bool,
}

#[derive(Deserialize)]
struct SpawnForm {
    agent: String,
    message: String,
}

#[derive(Deserialize)]
struct SearchForm {
    query: String,
}

#[derive(Deserialize)]
struct ReadForm {
    session_id: String,
    #[serde(flatten)]
    section: Section,
}

#[derive(Deserialize)]
struct WatchForm {
    #[serde(alias = "session")]
    session_id: String,
    events: Vec<String>,
    tool: Option<String>,
    ttl_seconds: Option<u64>,
}

#[derive(Deserialize)]
struct UnwatchForm {
    #[serde(alias = "session")]
    session_id: Option<String>,
    watch_id: Option<Uuid>,
}

impl Request {
    /// Reads what a model asks of a toolbox; `arguments` is the text that it wrote.
    ///
    /// # Errors
    /// A text for the model that says what is wrong.
    pub fn parse(toolbox: &SystemToolbox, arguments: &str) -> Result<Self, String> {
        let arguments: Value = match arguments.trim() {
            "" => json!({}),
            text => serde_json::from_str(text).map_err(|error| format!("arguments aren't JSON: {error}"))?,
        };
        let named: Named = form(&arguments)?;
        let words = || {
            let words: Vec<&str> = toolbox.capabilities.iter().map(|capability| capability.word()).collect();
            words.join(", ")
        };
        let word = named.capability.ok_or_else(|| format!("capability is missing: one of {}", words()))?;
        let offered = toolbox.capabilities.iter().find(|capability| capability.word() == word);
        let capability =
            offered.ok_or_else(|| format!("capability {word:?} isn't offered: one of {}", words()))?;
        read(*capability, &arguments).map_err(|problem| format!("{word}: {problem}"))
    }
}

fn form<T: DeserializeOwned>(arguments: &Value) -> Result<T, String> {
    T::deserialize(arguments).map_err(|error| error.to_string())
}

fn read(capability: Capability, arguments: &Value) -> Result<Request, String> {
    Ok(match capability {
        Capability::GetToolCallStatus => {
            let StatusForm { tool_call_id: call, include_progress, wait_for_completion, timeout_seconds } =
                form(arguments)?;
            let timeout = timeout_seconds.map(|given| seconds("timeout_seconds", given)).transpose()?;
            let wait_seconds = wait_for_completion.then(|| timeout.unwrap_or(WAIT_SECONDS));
            Request::Status { call, include_progress, wait_seconds }
        }
        Capability::ListRunningToolCalls => Request::ListCalls,
        Capability::CancelToolCall => {
            let CallForm { tool_call_id } = form(arguments)?;
            Request::CancelCall { call: tool_call_id }
        }
        Capability::Wait => wait(form(arguments)?)?,
        Capability::SleepUntil => sleep(form(arguments)?)?,
        Capability::AskHuman => ask(form(arguments)?)?,
        Capability::SendMessage => send(form(arguments)?)?,
        Capability::SpawnSession => {
            let SpawnForm { agent, message } = form(arguments)?;
            Request::Spawn { agent, message: text("message", message)? }
        }
        Capability::ListSessions => Request::ListSessions,
        Capability::SearchSessions => {
            let SearchForm { query } = form(arguments)?;
            Request::SearchSessions { query: text("query", query)? }
        }
        Capability::ReadSession => {
            let ReadForm { session_id, section } = form(arguments)?;
            let session =
                session_id.trim().parse().map_err(|_| format!("{session_id:?} is no session id"))?;
            Request::ReadSession { session, section }
        }
        Capability::GetSessionStats => Request::SessionStats,
        Capability::WatchSession => {
            let WatchForm { session_id, events, tool, ttl_seconds } = form(arguments)?;
            Request::Watch { session: Address::parse(&session_id)?, events, tool, ttl_seconds }
        }
        Capability::UnwatchSession => {
            let UnwatchForm { session_id, watch_id: watch } = form(arguments)?;
            let session = session_id.as_deref().map(Address::parse).transpose()?;
            if session.is_none() && watch.is_none() {
                return Err("session_id or watch_id is missing".to_owned());
            }
            Request::Unwatch { session, watch }
        }
    })
}

fn text(name: &str, text: String) -> Result<String, String> {
    match text.len() {
        0 => Err(format!("{name} must not be empty")),
        1..=MAX_TEXT => Ok(text),
        _ => Err(format!("{name} has more than {MAX_TEXT} bytes")),
    }
}

/// Whole seconds; a part of one counts as one.
fn seconds(name: &str, given: f64) -> Result<u64, String> {
    if (0.0..=MAX_SLEEP_SECONDS as f64).contains(&given) {
        Ok(given.ceil() as u64)
    } else {
        Err(format!("{name} must be 0 to {MAX_SLEEP_SECONDS}"))
    }
}

fn wait(WaitForm { what, timeout_seconds }: WaitForm) -> Result<Request, String> {
    let what = match &what {
        Value::String(word) if word == "any-call" => WaitFor::AnyCall,
        Value::String(word) if word == "mail" => WaitFor::Mail,
        Value::String(call) => WaitFor::Calls(vec![call.clone()]),
        Value::Array(calls) if (1..=MAX_WAITED).contains(&calls.len()) => {
            let names = calls.iter().map(|call| call.as_str().map(str::to_owned));
            WaitFor::Calls(names.collect::<Option<_>>().ok_or("for must be a list of call ids")?)
        }
        _ => return Err("for must be a list of call ids, \"any-call\" or \"mail\"".to_owned()),
    };
    let given = timeout_seconds.map(|given| seconds("timeout_seconds", given)).transpose()?;
    Ok(Request::Wait { what, seconds: given.unwrap_or(WAIT_SECONDS) })
}

fn sleep(SleepForm { until, seconds: given }: SleepForm) -> Result<Request, String> {
    match (until, given) {
        (Some(until), None) => {
            let time = chrono::DateTime::parse_from_rfc3339(until.trim())
                .map_err(|error| format!("until must be a time such as 2030-01-31T12:00:00Z: {error}"))?;
            Ok(Request::SleepUntil(time.to_utc()))
        }
        (None, Some(given)) => Ok(Request::SleepFor(seconds("seconds", given)?)),
        _ => Err("give either until or seconds".to_owned()),
    }
}

fn ask(AskForm { question, choices, deadline_seconds, default }: AskForm) -> Result<Request, String> {
    let deadline_seconds = deadline_seconds.map(|given| seconds("deadline_seconds", given)).transpose()?;
    if choices.len() > MAX_CHOICES {
        return Err(format!("choices has more than {MAX_CHOICES}"));
    }
    if default.is_some() && deadline_seconds.is_none() {
        return Err("default is the answer when the time is over: give deadline_seconds too".to_owned());
    }
    if let Some(default) =
        default.as_ref().filter(|default| !choices.is_empty() && !choices.contains(default))
    {
        return Err(format!("default {default:?} is not among the choices"));
    }
    Ok(Request::AskHuman { question: text("question", question)?, deadline_seconds, default })
}

fn send(
    SendForm { to, text: said, in_reply_to, expects_reply, interrupt }: SendForm,
) -> Result<Request, String> {
    if to.is_none() && in_reply_to.is_none() {
        return Err("to is missing".to_owned());
    }
    let to = to.as_deref().map(Address::parse).transpose()?;
    Ok(Request::SendMessage { to, text: text("text", said)?, in_reply_to, expects_reply, interrupt })
}

/// The parameters of a capability, for the tool's schema.
pub(super) fn parameters(capability: Capability) -> Vec<(&'static str, Value)> {
    let (string, number, boolean) =
        (|| json!({"type": "string"}), || json!({"type": "number"}), || json!({"type": "boolean"}));
    let strings = || json!({"type": "array", "items": {"type": "string"}});
    match capability {
        Capability::GetToolCallStatus => vec![
            ("tool_call_id", string()),
            ("include_progress", boolean()),
            ("wait_for_completion", boolean()),
            ("timeout_seconds", number()),
        ],
        Capability::CancelToolCall => vec![("tool_call_id", string())],
        Capability::Wait => {
            let what = json!({"anyOf": [{"type": "string", "enum": ["any-call", "mail"]}, strings()]});
            vec![("for", what), ("timeout_seconds", number())]
        }
        Capability::SleepUntil => vec![("until", string()), ("seconds", number())],
        Capability::AskHuman => vec![
            ("question", string()),
            ("choices", strings()),
            ("deadline_seconds", number()),
            ("default", string()),
        ],
        Capability::SendMessage => vec![
            ("to", string()),
            ("text", string()),
            ("in_reply_to", string()),
            ("expects_reply", boolean()),
            ("interrupt", boolean()),
        ],
        Capability::SpawnSession => vec![("agent", string()), ("message", string())],
        Capability::SearchSessions => vec![("query", string())],
        Capability::ReadSession => vec![
            ("session_id", string()),
            ("take_n", number()),
            ("drop_n", number()),
            ("offset", number()),
            ("limit", number()),
            ("include_thinking", boolean()),
            ("include_tool_responses", boolean()),
        ],
        Capability::WatchSession => vec![
            ("session_id", string()),
            ("events", strings()),
            ("tool", string()),
            ("ttl_seconds", number()),
        ],
        Capability::UnwatchSession => vec![("session_id", string()), ("watch_id", string())],
        Capability::ListRunningToolCalls | Capability::ListSessions | Capability::GetSessionStats => {
            Vec::new()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::builtin::BuiltinToolbox;

    fn toolbox(capabilities: &str) -> SystemToolbox {
        let text = format!(
            r#"{{"tag": "SystemToolbox", "contents": {{"Name": "system", "Capabilities": {capabilities}}}}}"#
        );
        let BuiltinToolbox::SystemToolbox(toolbox) = serde_json::from_str(&text).expect("a toolbox");
        toolbox
    }

    fn all() -> SystemToolbox {
        toolbox(&serde_json::to_string(Capability::ALL).expect("words"))
    }

    #[test]
    fn only_what_is_offered_can_be_asked_for() {
        let few = toolbox(r#"["wait"]"#);
        let refused = Request::parse(&few, r#"{"capability": "list-sessions"}"#).expect_err("not offered");
        assert_eq!(refused, "capability \"list-sessions\" isn't offered: one of wait");
        assert!(Request::parse(&few, "{}").expect_err("none").contains("capability is missing"));
        assert!(Request::parse(&few, "{nonsense").expect_err("no JSON").contains("aren't JSON"));
        assert!(Request::parse(&few, "[1]").is_err());
    }

    #[test]
    fn arguments_are_checked_and_the_fault_is_named() {
        let faults = [
            (r#"{"capability": "wait", "for": 3}"#, "wait: for must be"),
            (r#"{"capability": "wait", "for": []}"#, "wait: for must be"),
            (
                r#"{"capability": "wait", "for": "mail", "timeout_seconds": -1}"#,
                "timeout_seconds must be 0 to",
            ),
            (r#"{"capability": "sleep-until"}"#, "give either until or seconds"),
            (r#"{"capability": "sleep-until", "until": "tomorrow"}"#, "until must be a time"),
            (r#"{"capability": "sleep-until", "seconds": 31622401}"#, "seconds must be 0 to 31622400"),
            (r#"{"capability": "ask-human", "question": ""}"#, "question must not be empty"),
            (r#"{"capability": "ask-human", "question": "q", "default": "a"}"#, "give deadline_seconds too"),
            (
                r#"{"capability": "ask-human", "question": "q", "default": "c", "choices": ["a", "b"], "deadline_seconds": 9}"#,
                "is not among the choices",
            ),
            (r#"{"capability": "send-message", "text": "t"}"#, "to is missing"),
            (r#"{"capability": "send-message", "text": "t", "to": "bob"}"#, "is no session"),
            (r#"{"capability": "unwatch-session"}"#, "session_id or watch_id is missing"),
            (r#"{"capability": "get-tool-call-status"}"#, "tool_call_id"),
        ];
        for (arguments, fault) in faults {
            let refused = Request::parse(&all(), arguments).expect_err(arguments);
            assert!(refused.contains(fault), "{arguments}: {refused}");
        }
        let long = json!({"capability": "send-message", "to": "parent", "text": "x".repeat(MAX_TEXT + 1)});
        assert!(Request::parse(&all(), &long.to_string()).expect_err("long").contains("more than 65536"));
    }

    #[test]
    fn requests_are_read() {
        let read = |arguments: &str| Request::parse(&all(), arguments).expect(arguments);
        assert_eq!(
            read(r#"{"capability": "wait", "for": ["a"], "timeout_seconds": 0.2}"#),
            Request::Wait { what: WaitFor::Calls(vec!["a".into()]), seconds: 1 }
        );
        assert_eq!(
            read(r#"{"capability": "wait", "for": "mail"}"#),
            Request::Wait { what: WaitFor::Mail, seconds: WAIT_SECONDS }
        );
        assert_eq!(
            read(
                r#"{"capability": "get-tool-call-status", "tool_call_id": "a", "wait_for_completion": true}"#
            ),
            Request::Status { call: "a".into(), include_progress: false, wait_seconds: Some(WAIT_SECONDS) }
        );
        let Request::SendMessage { to, .. } =
            read(r#"{"capability": "send-message", "to": "0A0b0c0d", "text": "hi"}"#)
        else {
            panic!("a letter")
        };
        assert_eq!(to, Some(Address::Short("0a0b0c0d".into())));
    }
}
