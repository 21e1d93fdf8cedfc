//! The messages of chat completions.

use std::collections::HashSet;

use holdfast_engine::model::Flavor;
use serde_json::{Map, Value};

use super::{Found, Rule, is_blank, is_name};

/// OpenAI: "string too long. Expected a string with maximum length 40" for the id of a call.
const MAX_OPENAI_ID: usize = 40;

/// How long Mistral's ids of calls are: "must be a-z, A-Z, 0-9, with a length of 9".
const MISTRAL_ID: usize = 9;

pub(super) fn check(flavor: Flavor, messages: &[Value], found: &mut Found) {
    let mut open = Calls::default();
    let mut before = "";
    for (position, message) in messages.iter().enumerate() {
        let at = format!("messages[{position}]");
        let role = message["role"].as_str().unwrap_or_default();
        if role != "tool" {
            open.close(found);
        }
        match role {
            "system" | "developer" | "user" => content(flavor, message, &at, found),
            "assistant" => {
                assistant(flavor, message, &at, found);
                open = Calls::of(flavor, message, &at, found);
            }
            "tool" => {
                content(flavor, message, &at, found);
                // Mistral: a name that comes with the result is held to the same pattern.
                let name = message["name"].as_str().filter(|name| !is_name(Flavor::MistralV1, name));
                if let Some(name) = name.filter(|_| flavor == Flavor::MistralV1) {
                    found.add(Rule::CallName, &at, format!("{name:?} is no name of a tool"));
                }
                open.answer(message, &at, found);
            }
            other => found.add(Rule::Form, &at, format!("{other:?} is no role")),
        }
        if flavor == Flavor::MistralV1 {
            order(before, role, &at, found);
        }
        before = role;
    }
    open.close(found);
    // Mistral: "Expected last role User or Tool (or Assistant with prefix True) for serving".
    let last = messages.last().filter(|_| flavor == Flavor::MistralV1);
    if last.is_some_and(|last| last["role"] == "assistant" && last["prefix"] != true) {
        found.add(Rule::LastMessage, format!("messages[{}]", messages.len() - 1), "it is the model's own");
    }
}

/// Mistral: "Unexpected role 'user' after role 'tool'" (3230). A tool message in the wrong place is told as an
/// orphan for all flavours alike.
fn order(before: &str, role: &str, at: &str, found: &mut Found) {
    let refused = match before {
        "tool" => role != "assistant" && role != "tool",
        "assistant" => role == "system",
        _ => false,
    };
    if refused {
        found.add(Rule::Order, at, format!("a message of role {role} can't follow one of role {before}"));
    }
}

/// The content of a message that must have some.
fn content(flavor: Flavor, message: &Value, at: &str, found: &mut Found) {
    match &message["content"] {
        // Moonshot: "the message at position 2 with role 'user' must not be empty". OpenAI takes an empty text.
        Value::String(text) => {
            if flavor == Flavor::KimiV1 && message["role"] == "user" && is_blank(text) {
                found.add(Rule::EmptyContent, at, "it is empty");
            }
        }
        Value::Array(parts) => content_parts(flavor, parts, at, found),
        // OpenAI: "Invalid value for 'content': expected a string, got null."
        Value::Null => found.add(Rule::EmptyContent, at, "it has no content"),
        _ => found.add(Rule::Form, at, "its content is neither text nor parts"),
    }
}

fn content_parts(flavor: Flavor, parts: &[Value], at: &str, found: &mut Found) {
    // OpenAI: "empty array. Expected an array with minimum length 1".
    if parts.is_empty() {
        found.add(Rule::EmptyList, at, "its content has no part");
    }
    for (position, part) in parts.iter().enumerate() {
        let at = format!("{at}.content[{position}]");
        match (part["type"].as_str(), part["text"].as_str()) {
            (None, _) => found.add(Rule::Form, at, "it has no type"),
            (Some("text"), None) => found.add(Rule::Form, at, "it has no text"),
            // Moonshot: "text content is empty", which it says of parts only.
            (Some("text"), Some("")) if flavor == Flavor::KimiV1 => {
                found.add(Rule::EmptyContent, at, "its text is empty");
            }
            _ => {}
        }
    }
}

fn assistant(flavor: Flavor, message: &Value, at: &str, found: &mut Found) {
    let calls = match &message["tool_calls"] {
        Value::Null => false,
        // OpenAI: "Invalid 'messages[1].tool_calls': empty array."
        Value::Array(calls) if calls.is_empty() => {
            found.add(Rule::EmptyList, at, "its tool_calls are empty");
            false
        }
        Value::Array(_) => true,
        _ => {
            found.add(Rule::Form, at, "its tool_calls are no list");
            false
        }
    };
    match &message["content"] {
        // OpenAI: "Invalid value for 'content': expected a string, got null."; Ollama: "invalid message content
        // type". With calls null is the usual form.
        Value::Null if !calls => found.add(Rule::EmptyContent, at, "it has neither content nor calls"),
        // Mistral: "Assistant message must have either content or tool_calls, but not none." (3240); Moonshot:
        // "the message at position 2 with role 'assistant' must not be empty". OpenAI takes an empty text.
        Value::String(text) if !calls => {
            let refused = match flavor {
                Flavor::MistralV1 => text.is_empty(),
                Flavor::KimiV1 => is_blank(text),
                _ => false,
            };
            if refused {
                found.add(Rule::EmptyContent, at, "it has neither content nor calls");
            }
        }
        Value::Null | Value::String(_) => {}
        Value::Array(parts) => content_parts(flavor, parts, at, found),
        _ => found.add(Rule::Form, at, "its content is neither text nor parts"),
    }
}

/// The calls of the assistant message before, and which of them have been answered.
#[derive(Debug, Default)]
struct Calls {
    at: String,
    ids: Vec<(String, bool)>,
}

impl Calls {
    fn of(flavor: Flavor, message: &Value, at: &str, found: &mut Found) -> Self {
        let calls = message["tool_calls"].as_array().map(Vec::as_slice).unwrap_or_default();
        let mut ids: Vec<(String, bool)> = Vec::with_capacity(calls.len());
        let mut seen = HashSet::new();
        for (position, call) in calls.iter().enumerate() {
            let at = format!("{at}.tool_calls[{position}]");
            let id = call["id"].as_str().unwrap_or_default();
            check_id(flavor, id, &at, found);
            // Mistral: "Duplicate tool call id … in assistant message"; elsewhere two calls would have one answer.
            if !seen.insert(id) {
                found.add(Rule::CallIdTwice, &at, format!("{id:?} is another call's id, too"));
            }
            check_function(flavor, call, &at, found);
            ids.push((id.to_owned(), false));
        }
        Self { at: at.to_owned(), ids }
    }

    /// OpenAI: "messages with role 'tool' must be a response to a preceeding message with 'tool_calls'"; Mistral:
    /// "Unexpected tool call id … in tool results", "Duplicate tool call id … in tool results".
    fn answer(&mut self, message: &Value, at: &str, found: &mut Found) {
        let Some(id) = message["tool_call_id"].as_str() else {
            return found.add(Rule::MissingField, format!("{at}.tool_call_id"), "it is demanded");
        };
        let open = self.ids.iter().position(|(known, answered)| known == id && !answered);
        match open {
            Some(position) => self.ids[position].1 = true,
            None if self.ids.iter().any(|(known, _)| known == id) => {
                found.add(Rule::ResultTwice, at, format!("the call {id:?} has a result already"));
            }
            None => {
                found.add(Rule::OrphanResult, at, format!("{id:?} is no call of the message before"));
            }
        }
    }

    /// OpenAI, and Moonshot in the same words: "An assistant message with 'tool_calls' must be followed by tool
    /// messages responding to each 'tool_call_id'."; Mistral: "Not the same number of function calls and responses".
    fn close(&mut self, found: &mut Found) {
        for (id, _) in self.ids.drain(..).filter(|(_, answered)| !answered) {
            found.add(Rule::UnansweredCall, &self.at, format!("the call {id:?} has no result"));
        }
    }
}

fn check_id(flavor: Flavor, id: &str, at: &str, found: &mut Found) {
    let fits = match flavor {
        Flavor::MistralV1 => id.len() == MISTRAL_ID && id.bytes().all(|byte| byte.is_ascii_alphanumeric()),
        Flavor::OpenAIv1 => (1..=MAX_OPENAI_ID).contains(&id.chars().count()),
        _ => !id.is_empty(),
    };
    if !fits {
        found.add(Rule::CallId, at, format!("{id:?} is no id of a call"));
    }
}

fn check_function(flavor: Flavor, call: &Value, at: &str, found: &mut Found) {
    // OpenAI: "Missing required parameter: 'messages[1].tool_calls[0].type'"; the others assume it.
    if flavor == Flavor::OpenAIv1 && call["type"] != "function" {
        found.add(Rule::Form, at, "its type is not function");
    }
    let name = call["function"]["name"].as_str().unwrap_or_default();
    if !is_name(flavor, name) {
        found.add(Rule::CallName, at, format!("{name:?} is no name of a tool"));
    }
    let fits = match &call["function"]["arguments"] {
        // OpenAI reads no arguments; the others parse them for the model's template, Ollama as an object.
        Value::String(text) => {
            flavor == Flavor::OpenAIv1 || serde_json::from_str::<Map<String, Value>>(text).is_ok()
        }
        // OpenAI: "expected a string, but got an object instead".
        Value::Object(_) => flavor != Flavor::OpenAIv1,
        _ => false,
    };
    if !fits {
        found.add(Rule::CallArguments, at, "its arguments are not the text of a JSON object");
    }
}
