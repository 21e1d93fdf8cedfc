//! A request in either dialect, as far as a script looks at it.

use std::collections::HashMap;

use serde_json::Value;

/// The API that a request speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dialect {
    /// Chat completions.
    Chat,
    /// Anthropic's messages.
    Anthropic,
}

/// What a script sees of a request.
#[derive(Debug)]
pub(super) struct View {
    pub(super) dialect: Dialect,
    pub(super) model: String,
    pub(super) tools: Vec<String>,
    /// How many assistant messages there are.
    pub(super) turn: usize,
    pub(super) system: String,
    pub(super) messages: Vec<Seen>,
    /// The provider's id and the tool of each call, in order.
    pub(super) calls: Vec<(String, String)>,
    pub(super) stream: bool,
    pub(super) include_usage: bool,
    /// Characters of all messages.
    pub(super) size: usize,
}

/// A message.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) role: String,
    pub(super) text: String,
    /// The tool whose result this is.
    pub(super) tool: Option<String>,
}

impl View {
    /// Reads a request's body.
    pub(super) fn new(dialect: Dialect, body: &Value) -> Self {
        let tools = body["tools"].as_array().into_iter().flatten().filter_map(|tool| {
            let name = tool["function"]["name"].as_str().or_else(|| tool["name"].as_str());
            name.map(str::to_owned)
        });
        let mut names = HashMap::new();
        let mut calls = Vec::new();
        let mut messages = Vec::new();
        let mut turn = 0;
        for message in body["messages"].as_array().into_iter().flatten() {
            if message["role"] == "assistant" {
                turn += 1;
                let made = calls_of(message);
                names.extend(made.iter().cloned());
                calls.extend(made);
            }
            see(message, &names, &mut messages);
        }
        Self {
            dialect,
            model: body["model"].as_str().unwrap_or_default().to_owned(),
            tools: tools.collect(),
            turn,
            system: system_of(body),
            calls,
            size: messages.iter().map(|seen| seen.text.chars().count()).sum(),
            messages,
            stream: body["stream"] == true,
            include_usage: body["stream_options"]["include_usage"] == true,
        }
    }

    /// The last message.
    pub(super) fn last(&self) -> Option<&Seen> {
        self.messages.last()
    }

    /// What has been said, oldest first: all messages but the system prompt, which only one API has among them.
    pub(super) fn said(&self) -> impl DoubleEndedIterator<Item = &str> {
        self.messages.iter().filter(|seen| !is_system(&seen.role)).map(|seen| seen.text.as_str())
    }

    /// Whether a message contains this.
    pub(super) fn says(&self, part: &str) -> bool {
        self.said().any(|text| text.contains(part))
    }

    /// The provider's id of the latest call of a tool.
    pub(super) fn call_id(&self, tool: &str) -> Option<&str> {
        self.calls.iter().rev().find(|(_, name)| name == tool).map(|(id, _)| id.as_str())
    }

    /// The results of a tool, oldest first.
    pub(super) fn results<'a>(&'a self, tool: &'a str) -> impl DoubleEndedIterator<Item = &'a str> {
        self.messages
            .iter()
            .filter(move |seen| seen.tool.as_deref() == Some(tool))
            .map(|seen| seen.text.as_str())
    }
}

/// The ids and tools of the calls that a message holds.
fn calls_of(message: &Value) -> Vec<(String, String)> {
    let of_chat = message["tool_calls"].as_array().into_iter().flatten();
    let of_chat = of_chat.map(|call| (&call["id"], &call["function"]["name"]));
    let blocks =
        message["content"].as_array().into_iter().flatten().filter(|block| block["type"] == "tool_use");
    let all = of_chat.chain(blocks.map(|block| (&block["id"], &block["name"])));
    all.filter_map(|(id, name)| Some((id.as_str()?.to_owned(), name.as_str()?.to_owned()))).collect()
}

/// Anthropic's system prompt, or the messages that chat completions have for it, a line each.
fn system_of(body: &Value) -> String {
    let own = text_of(&body["system"]);
    let messages = body["messages"].as_array().into_iter().flatten();
    let messages = messages.filter(|message| message["role"].as_str().is_some_and(is_system));
    let texts = messages.map(|message| text_of(&message["content"]));
    [own].into_iter().chain(texts).filter(|text| !text.is_empty()).collect::<Vec<_>>().join("\n")
}

fn is_system(role: &str) -> bool {
    matches!(role, "system" | "developer")
}

fn see(message: &Value, names: &HashMap<String, String>, messages: &mut Vec<Seen>) {
    let role = message["role"].as_str().unwrap_or_default();
    let name = |id: &Value| Some(id.as_str().and_then(|id| names.get(id)).cloned().unwrap_or_default());
    if role == "tool" {
        let (text, tool) = (text_of(&message["content"]), name(&message["tool_call_id"]));
        messages.push(Seen { role: role.to_owned(), text, tool });
        return;
    }
    let blocks = message["content"].as_array().into_iter().flatten();
    let before = messages.len();
    for result in blocks.filter(|block| block["type"] == "tool_result") {
        let (text, tool) = (text_of(&result["content"]), name(&result["tool_use_id"]));
        messages.push(Seen { role: "tool".to_owned(), text, tool });
    }
    let text = text_of(&message["content"]);
    if !text.is_empty() || messages.len() == before {
        messages.push(Seen { role: role.to_owned(), text, tool: None });
    }
}

/// Text, or the text parts of a list, a line each.
fn text_of(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(parts) => {
            parts.iter().filter_map(|part| part["text"].as_str()).collect::<Vec<_>>().join("\n")
        }
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn seen(view: &View) -> Vec<(&str, &str, Option<&str>)> {
        view.messages.iter().map(|seen| (&*seen.role, &*seen.text, seen.tool.as_deref())).collect()
    }

    #[test]
    fn both_dialects_look_the_same() {
        let chat = json!({
            "model": "m", "stream": true, "stream_options": { "include_usage": true },
            "tools": [{ "type": "function", "function": { "name": "look" } }],
            "messages": [
                { "role": "system", "content": "Be kind." },
                { "role": "user", "content": [{ "type": "text", "text": "hi" }, { "type": "image_url" }] },
                { "role": "assistant", "content": null, "tool_calls": [{ "id": "a", "function": { "name": "look" } }] },
                { "role": "tool", "tool_call_id": "a", "content": "seen" },
                { "role": "user", "content": "next" },
            ],
        });
        let anthropic = json!({
            "model": "m", "stream": true, "system": [{ "type": "text", "text": "Be kind." }],
            "tools": [{ "name": "look" }],
            "messages": [
                { "role": "user", "content": "hi" },
                { "role": "assistant", "content": [{ "type": "tool_use", "id": "a", "name": "look", "input": {} }] },
                { "role": "user", "content": [
                    { "type": "tool_result", "tool_use_id": "a", "content": [{ "type": "text", "text": "seen" }] },
                    { "type": "text", "text": "next" },
                ] },
            ],
        });
        let expected = [
            ("user", "hi", None),
            ("assistant", "", None),
            ("tool", "seen", Some("look")),
            ("user", "next", None),
        ];
        for (dialect, body) in [(Dialect::Chat, chat), (Dialect::Anthropic, anthropic)] {
            let view = View::new(dialect, &body);
            let all = seen(&view);
            let all = all.strip_prefix(&[("system", "Be kind.", None)]).unwrap_or(&all);
            assert_eq!(all, expected);
            assert_eq!(view.system, "Be kind.");
            assert_eq!((view.says("seen"), view.says("kind")), (true, false));
            assert_eq!((view.call_id("look"), view.call_id("go")), (Some("a"), None));
            assert_eq!(
                (view.turn, view.stream, view.tools.as_slice()),
                (1, true, ["look".to_owned()].as_slice())
            );
            assert_eq!(view.results("look").collect::<Vec<_>>(), ["seen"]);
            assert_eq!(view.include_usage, dialect == Dialect::Chat);
        }
    }
}
