//! What providers ask of a request, as they publish it and as their APIs answer what breaks it.
//!
//! [`check`] is written from the providers' side and shares nothing with the workers that make requests. Which
//! rules hold depends on the flavour; `docs/scripted-model.md` has the table. Sources, by the name under which
//! comments cite them:
//!
//! - *OpenAI*: the chat completions reference and its API's errors ("An assistant message with 'tool_calls' must
//!   be followed by tool messages…", "Unknown parameter: …", "empty array. Expected an array with minimum
//!   length 1", "string too long. Expected a string with maximum length 40").
//! - *Anthropic*: the messages reference, the guide to tool use, and its API's errors ("`tool_use` ids were found
//!   without `tool_result` blocks immediately after", "text content blocks must be non-empty", …).
//! - *Mistral*: the request validator of mistral-common in its serving mode, which the API runs, and the API's
//!   codes (3230 order, 3240 assistant message, 3280 call id).
//! - *Moonshot*: the errors of Kimi's API ("the message at position 2 with role 'assistant' must not be empty",
//!   "text content is empty", "function name is invalid, must start with a letter…").
//! - *Ollama*: how its chat completions API reads messages ("invalid message content type", "invalid tool call
//!   arguments"); vLLM and llama.cpp parse arguments likewise.
//!
//! No provider demands today that roles alternate: Anthropic combines consecutive messages of a role before it
//! looks at them, Mistral joins consecutive user messages, the others take them as they are. So that is no
//! rule here. Nor is the order of tool messages among themselves.

mod anthropic;
mod chat;
mod fields;
#[cfg(test)]
mod tests;

use std::fmt;

use holdfast_engine::model::Flavor;
use serde::{Serialize, Serializer};
use serde_json::Value;

/// What a provider refuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rule {
    /// A body, message or content that has another form than the API's.
    Form,
    /// A field that the API demands isn't there.
    MissingField,
    /// A field that the API doesn't know, or not together with the others.
    UnknownField,
    /// A tool's name has other characters, or more, than the API takes.
    ToolName,
    /// Two tools have one name.
    ToolNameTwice,
    /// A tool's parameters are not the schema of an object.
    ToolSchema,
    /// A list that must have an entry has none.
    EmptyList,
    /// The conversation begins with another message than a user's.
    FirstMessage,
    /// The conversation ends with a message that the model can't answer.
    LastMessage,
    /// A message of this role may not follow the one before.
    Order,
    /// A message or a text in it is empty.
    EmptyContent,
    /// A call's id has another form than the API's.
    CallId,
    /// Two calls have one id.
    CallIdTwice,
    /// A call names a tool as no tool may be named.
    CallName,
    /// A call's arguments are not what the API reads.
    CallArguments,
    /// Something follows a call within its message.
    CallsLast,
    /// A call has no result right after its message.
    UnansweredCall,
    /// A result answers no call of the message before.
    OrphanResult,
    /// A call has two results.
    ResultTwice,
    /// Something precedes a result within its message.
    ResultsFirst,
}

impl Rule {
    /// All rules.
    pub const ALL: [Self; 20] = [
        Self::Form,
        Self::MissingField,
        Self::UnknownField,
        Self::ToolName,
        Self::ToolNameTwice,
        Self::ToolSchema,
        Self::EmptyList,
        Self::FirstMessage,
        Self::LastMessage,
        Self::Order,
        Self::EmptyContent,
        Self::CallId,
        Self::CallIdTwice,
        Self::CallName,
        Self::CallArguments,
        Self::CallsLast,
        Self::UnansweredCall,
        Self::OrphanResult,
        Self::ResultTwice,
        Self::ResultsFirst,
    ];

    /// The name that answers and the documentation use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Form => "form",
            Self::MissingField => "missing_field",
            Self::UnknownField => "unknown_field",
            Self::ToolName => "tool_name",
            Self::ToolNameTwice => "tool_name_twice",
            Self::ToolSchema => "tool_schema",
            Self::EmptyList => "empty_list",
            Self::FirstMessage => "first_message",
            Self::LastMessage => "last_message",
            Self::Order => "order",
            Self::EmptyContent => "empty_content",
            Self::CallId => "call_id",
            Self::CallIdTwice => "call_id_twice",
            Self::CallName => "call_name",
            Self::CallArguments => "call_arguments",
            Self::CallsLast => "calls_last",
            Self::UnansweredCall => "unanswered_call",
            Self::OrphanResult => "orphan_result",
            Self::ResultTwice => "result_twice",
            Self::ResultsFirst => "results_first",
        }
    }
}

impl Serialize for Rule {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// A place where a request breaks a rule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Violation {
    /// The rule.
    pub rule: Rule,
    /// Where in the body, such as `messages[2].tool_calls[0]`; empty for the body itself.
    pub at: String,
    /// What is wrong there. It may quote ids and names, never what is said.
    pub detail: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rule, at, detail } = self;
        let at = if at.is_empty() { "the body" } else { at };
        write!(formatter, "{at}: {detail} (rule {})", rule.name())
    }
}

/// Where a request of a flavour breaks the provider's rules; empty if it would be taken.
pub fn check(flavor: Flavor, body: &Value) -> Vec<Violation> {
    let mut found = Found::default();
    if !body.is_object() {
        found.add(Rule::Form, "", "it is no JSON object");
        return found.0;
    }
    fields::check(flavor, body, &mut found);
    match body["messages"].as_array() {
        Some(messages) => found.0.extend(check_messages(flavor, messages)),
        // That there are none at all is told with the other missing fields.
        None if body["messages"].is_null() => {}
        None => found.add(Rule::Form, "messages", "it is no list"),
    }
    found.0
}

/// As [`check`], of the messages alone.
pub fn check_messages(flavor: Flavor, messages: &[Value]) -> Vec<Violation> {
    let mut found = Found::default();
    match (messages, flavor) {
        ([], _) => found.add(Rule::EmptyList, "messages", "there is no message"),
        (_, Flavor::Anthropic) => anthropic::check(messages, &mut found),
        _ => chat::check(flavor, messages, &mut found),
    }
    found.0
}

/// What has been found so far.
#[derive(Debug, Default)]
struct Found(Vec<Violation>);

impl Found {
    fn add(&mut self, rule: Rule, at: impl Into<String>, detail: impl Into<String>) {
        self.0.push(Violation { rule, at: at.into(), detail: detail.into() });
    }
}

/// The longest name of a tool that OpenAI, Anthropic, Mistral and Moonshot all take.
const MAX_NAME: usize = 64;

/// Whether a tool may have this name: `^[a-zA-Z0-9_-]{1,64}$` in OpenAI's, Anthropic's and Mistral's words;
/// Moonshot demands a letter first.
fn is_name(flavor: Flavor, name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    let begins =
        flavor != Flavor::KimiV1 || name.bytes().next().is_some_and(|byte| byte.is_ascii_alphabetic());
    (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(plain) && begins
}

fn is_blank(text: &str) -> bool {
    text.trim().is_empty()
}
