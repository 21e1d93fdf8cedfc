//! The messages of Anthropic's API.

use std::{borrow::Cow, collections::HashSet};

use serde_json::{Value, json};

use holdfast_engine::model::Flavor;

use super::{Found, Rule, is_blank, is_name};

/// A turn: a message and those of the same role right after it, which the API combines.
#[derive(Debug)]
struct Turn<'a> {
    role: &'a str,
    /// Each block with its place.
    blocks: Vec<(String, Cow<'a, Value>)>,
    at: String,
}

pub(super) fn check(messages: &[Value], found: &mut Found) {
    let turns = turns(messages, found);
    // "messages: first message must use the \"user\" role".
    if turns.first().is_some_and(|turn| turn.role != "user") {
        found.add(Rule::FirstMessage, "messages[0]", "it is not the user's");
    }
    // From Opus 4.6 on: "This model does not support assistant message prefill. The conversation must end with a
    // user message."
    if let Some(last) = turns.last().filter(|turn| turn.role == "assistant") {
        found.add(Rule::LastMessage, &last.at, "it is the model's own");
    }
    let mut spent = HashSet::new();
    for (position, turn) in turns.iter().enumerate() {
        match turn.role {
            "assistant" => calls(turn, turns.get(position + 1), &mut spent, found),
            _ => results(turn, position.checked_sub(1).map(|before| &turns[before]), found),
        }
    }
}

fn turns<'a>(messages: &'a [Value], found: &mut Found) -> Vec<Turn<'a>> {
    let mut turns: Vec<Turn<'a>> = Vec::new();
    for (position, message) in messages.iter().enumerate() {
        let at = format!("messages[{position}]");
        let role = message["role"].as_str().unwrap_or_default();
        if !matches!(role, "user" | "assistant") {
            found.add(Rule::Form, &at, format!("{role:?} is no role"));
            continue;
        }
        let blocks: Vec<(String, Cow<'a, Value>)> = match &message["content"] {
            Value::String(text) if text.is_empty() => Vec::new(),
            Value::String(text) => vec![(at.clone(), Cow::Owned(json!({ "type": "text", "text": text })))],
            Value::Array(blocks) => {
                let place = |position| format!("{at}.content[{position}]");
                blocks.iter().enumerate().map(|(at, block)| (place(at), Cow::Borrowed(block))).collect()
            }
            _ => {
                found.add(Rule::Form, &at, "its content is neither text nor blocks");
                continue;
            }
        };
        content(&blocks, &at, found);
        match turns.last_mut().filter(|turn| turn.role == role) {
            Some(turn) => turn.blocks.extend(blocks),
            None => turns.push(Turn { role, blocks, at }),
        }
    }
    turns
}

/// "all messages must have non-empty content", "text content blocks must be non-empty" and, where a message is
/// nothing but text, "text content blocks must contain non-whitespace text". Newer models let an empty message of
/// the assistant pass; older ones don't. What a result holds may be empty.
fn content(blocks: &[(String, Cow<'_, Value>)], at: &str, found: &mut Found) {
    if blocks.is_empty() {
        return found.add(Rule::EmptyContent, at, "it is empty");
    }
    let mut blank = true;
    for (at, block) in blocks {
        let is_text = block["type"] == "text";
        match block["text"].as_str().filter(|_| is_text) {
            Some("") => found.add(Rule::EmptyContent, at, "its text is empty"),
            Some(text) if is_blank(text) => continue,
            None if is_text => found.add(Rule::Form, at, "it has no text"),
            None if !block["type"].is_string() => found.add(Rule::Form, at, "it has no type"),
            _ => {}
        }
        blank = false;
    }
    if blank {
        found.add(Rule::EmptyContent, at, "it is blank");
    }
}

fn of_kind<'a>(turn: &'a Turn<'_>, kind: &'static str) -> impl Iterator<Item = (&'a str, &'a Value)> {
    let blocks = turn.blocks.iter().map(|(at, block)| (at.as_str(), block.as_ref()));
    blocks.filter(move |(_, block)| block["type"] == kind)
}

/// An assistant's turn: its calls, and that the next turn answers each.
fn calls<'a>(turn: &'a Turn<'_>, next: Option<&Turn<'_>>, spent: &mut HashSet<&'a str>, found: &mut Found) {
    let mut called = false;
    for (at, block) in &turn.blocks {
        let is_call = block["type"] == "tool_use";
        // What stands behind a call ends the message as far as the call is concerned: "`tool_use` ids were found
        // without `tool_result` blocks immediately after".
        if called && !is_call {
            found.add(Rule::CallsLast, at, "it follows a call");
        }
        called |= is_call;
    }
    for (at, block) in of_kind(turn, "tool_use") {
        let id = block["id"].as_str().unwrap_or_default();
        // "tool_use.id: String should match pattern '^[a-zA-Z0-9_-]+$'".
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
        if id.is_empty() || !id.bytes().all(plain) {
            found.add(Rule::CallId, at, format!("{id:?} is no id of a call"));
        }
        // "`tool_use` ids must be unique", throughout the request.
        if !spent.insert(id) {
            found.add(Rule::CallIdTwice, at, format!("{id:?} is another call's id, too"));
        }
        let name = block["name"].as_str().unwrap_or_default();
        if !is_name(Flavor::Anthropic, name) {
            found.add(Rule::CallName, at, format!("{name:?} is no name of a tool"));
        }
        // "tool_use.input: Input should be a valid dictionary".
        if !block["input"].is_object() {
            found.add(Rule::CallArguments, at, "its input is no object");
        }
        // "Each `tool_use` block must have a corresponding `tool_result` block in the next message."
        let answered = next.is_some_and(|next| {
            of_kind(next, "tool_result").any(|(_, result)| result["tool_use_id"].as_str() == Some(id))
        });
        if !answered {
            found.add(Rule::UnansweredCall, at, format!("the call {id:?} has no result"));
        }
    }
}

/// A user's turn: its results, and that each answers a call of the turn before.
fn results(turn: &Turn<'_>, before: Option<&Turn<'_>>, found: &mut Found) {
    // The guide to tool use: "In the user message containing tool results, the tool_result blocks must come first".
    let mut others = false;
    for (at, block) in &turn.blocks {
        let is_result = block["type"] == "tool_result";
        if is_result && others {
            found.add(Rule::ResultsFirst, at, "it follows something else");
        }
        others |= !is_result;
    }
    let mut seen = HashSet::new();
    for (at, block) in of_kind(turn, "tool_result") {
        let Some(id) = block["tool_use_id"].as_str() else {
            found.add(Rule::MissingField, format!("{at}.tool_use_id"), "it is demanded");
            continue;
        };
        // "each tool_use must have a single result. Found multiple `tool_result` blocks with id".
        if !seen.insert(id) {
            found.add(Rule::ResultTwice, at, format!("the call {id:?} has a result already"));
        }
        // "unexpected `tool_use_id` found in `tool_result` blocks".
        let asked = before.is_some_and(|before| {
            of_kind(before, "tool_use").any(|(_, call)| call["id"].as_str() == Some(id))
        });
        if !asked {
            found.add(Rule::OrphanResult, at, format!("{id:?} is no call of the message before"));
        }
    }
}
