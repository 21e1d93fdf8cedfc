//! Requests to chat completions APIs.

use std::mem;

use holdfast_engine::{
    content::Media,
    model::{Flavor, Message, ModelRequest, ModelTarget, RequestedCall},
    tool::ToolSpec,
};
use serde::Serialize;
use serde_json::{Value, json, value::RawValue};

use super::{
    EMPTY_MESSAGE,
    call_ids::CallIds,
    error::ModelError,
    fit,
    media::chat_part,
    wire::{Object, raw},
};

/// The body of a request. The same request always has the same bytes.
pub(super) fn encode(
    target: &ModelTarget,
    request: &ModelRequest,
    stream: bool,
) -> Result<Vec<u8>, ModelError> {
    let mut body =
        Object::default().with("model", &target.model).with("messages", &messages(target.flavor, request));
    if !request.tools.is_empty() {
        body.set("tools", &request.tools.iter().map(tool).collect::<Vec<_>>());
    }
    if let Some(temperature) = target.temperature {
        body.set("temperature", &temperature);
    }
    if let Some(limit) = target.max_output_tokens {
        let key = if target.flavor == Flavor::OpenAIv1 { "max_completion_tokens" } else { "max_tokens" };
        body.set(key, &limit);
    }
    if stream {
        body.set("stream", &true);
        // Only OpenAI's own API is sure to know this field; others may refuse it.
        if target.flavor == Flavor::OpenAIv1 {
            body.set("stream_options", &json!({ "include_usage": true }));
        }
    }
    super::finish_body(body, target)
}

fn tool(spec: &ToolSpec) -> Value {
    json!({
        "type": "function",
        "function": {
            "name": spec.name,
            "description": spec.description,
            "parameters": super::object_schema(&spec.parameters),
        },
    })
}

/// What the assistant is made to say where Mistral takes no user message: right after a tool message.
const BRIDGE: &str = "Done.";

/// Messages as they go out. `after_tool` says whether the last is a tool's.
struct Messages {
    flavor: Flavor,
    out: Vec<Box<RawValue>>,
    after_tool: bool,
}

impl Messages {
    fn user(&mut self, message: &Value) {
        if self.after_tool && self.flavor == Flavor::MistralV1 {
            self.push(&json!({ "role": "assistant", "content": BRIDGE }));
        }
        self.push(message);
    }

    fn tool(&mut self, message: &Value) {
        self.push(message);
        self.after_tool = true;
    }

    fn push(&mut self, message: &(impl Serialize + ?Sized)) {
        self.out.push(raw(message));
        self.after_tool = false;
    }
}

fn messages(flavor: Flavor, request: &ModelRequest) -> Vec<Box<RawValue>> {
    let out = Vec::with_capacity(request.messages.len() + 1);
    let mut out = Messages { flavor, out, after_tool: false };
    let mut ids = CallIds::new(flavor);
    // A user message may come only after all tool messages of a block, so their attachments wait here.
    let mut attachments = Vec::new();
    let system: Vec<_> = request.system.iter().map(String::as_str).filter(|part| !part.is_empty()).collect();
    if !system.is_empty() {
        out.push(&json!({ "role": "system", "content": system.join("\n\n") }));
    }
    for message in &request.messages {
        if !matches!(**message, Message::Tool { .. }) {
            attach(&mut out, mem::take(&mut attachments));
        }
        match &**message {
            Message::User { text, media } => out.user(&user(flavor, text, media)),
            Message::Assistant { text, calls, flavor: from, raw: own } => {
                let out_ids = ids.begin(calls);
                let own = own.as_deref().filter(|_| *from != Flavor::Anthropic).and_then(Object::parse);
                let message = match own {
                    Some(own) => replay(own, calls, &out_ids),
                    None => assistant(text.as_deref(), calls, &out_ids),
                };
                if !calls.is_empty() || !refuses_empty(flavor) || !says_nothing(&message) {
                    out.push(&message);
                }
            }
            Message::Tool { provider_id, name, text, media } => {
                let id = ids.answer(provider_id);
                if !media.is_empty() {
                    attachments.push(json!({ "type": "text", "text": format!("attachments of tool result {name} ({id}):") }));
                    attachments.extend(media.iter().map(|media| chat_part(media, flavor)));
                }
                out.tool(&tool_message(flavor, &id, name, text));
            }
        }
    }
    attach(&mut out, attachments);
    out.out
}

fn attach(out: &mut Messages, parts: Vec<Value>) {
    if !parts.is_empty() {
        out.user(&json!({ "role": "user", "content": parts }));
    }
}

/// Whether the API refuses an assistant's message that neither says nor asks anything. Without it the
/// conversation is still in order: neighbouring user messages are taken.
fn refuses_empty(flavor: Flavor) -> bool {
    matches!(flavor, Flavor::MistralV1 | Flavor::KimiV1)
}

fn says_nothing(message: &Object) -> bool {
    match message.get("content").map(|content| serde_json::from_str(content.get())) {
        Some(Ok(Value::String(text))) => text.trim().is_empty(),
        Some(Ok(Value::Array(parts))) => parts.is_empty(),
        other => matches!(other, None | Some(Ok(Value::Null))),
    }
}

fn user(flavor: Flavor, text: &str, media: &[Media]) -> Value {
    if media.is_empty() {
        // Kimi takes no empty message.
        let blank = flavor == Flavor::KimiV1 && text.trim().is_empty();
        return json!({ "role": "user", "content": if blank { EMPTY_MESSAGE } else { text } });
    }
    let text = (!text.is_empty()).then(|| json!({ "type": "text", "text": text }));
    let parts: Vec<_> = text.into_iter().chain(media.iter().map(|media| chat_part(media, flavor))).collect();
    json!({ "role": "user", "content": parts })
}

fn tool_message(flavor: Flavor, id: &str, name: &str, text: &str) -> Value {
    let mut message = json!({ "role": "tool", "tool_call_id": id, "content": text });
    if matches!(flavor, Flavor::MistralV1 | Flavor::KimiV1) {
        message["name"] = json!(fit::name(name));
    }
    message
}

/// An assistant message made of what is known of it.
fn assistant(text: Option<&str>, calls: &[RequestedCall], ids: &[String]) -> Object {
    let mut message = Object::default().with("role", "assistant");
    match text {
        None if !calls.is_empty() => message.set("content", &()),
        text => message.set("content", text.unwrap_or_default()),
    }
    if !calls.is_empty() {
        message.set("tool_calls", &tool_calls(calls, ids));
    }
    message
}

fn tool_calls(calls: &[RequestedCall], ids: &[String]) -> Vec<Value> {
    let both = calls.iter().zip(ids);
    both.map(|(call, id)| {
        let (name, arguments) = (fit::name(&call.name), fit::arguments(&call.arguments));
        json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments.get() } })
    })
    .collect()
}

/// The provider's own message, changed only where it would be refused: ids that had to change, calls that
/// the model wrote wrongly, and nulls and empty lists that APIs send but don't accept.
fn replay(mut own: Object, calls: &[RequestedCall], ids: &[String]) -> Object {
    if own.lacks("role") {
        own.set("role", "assistant");
    }
    if own.lacks("function_call") {
        own.remove("function_call");
    }
    if calls.is_empty() {
        own.remove("tool_calls");
        if own.lacks("content") {
            own.set("content", "");
        }
        return own;
    }
    let sent: Vec<Box<RawValue>> =
        own.get("tool_calls").and_then(|list| serde_json::from_str(list.get()).ok()).unwrap_or_default();
    let entries: Option<Vec<Object>> = sent.iter().map(|entry| Object::parse(entry)).collect();
    match entries.filter(|entries| entries.len() == ids.len()) {
        Some(mut entries) => {
            let mut changed = false;
            for (entry, id) in entries.iter_mut().zip(ids) {
                if entry.get("id").map(RawValue::get) != Some(raw(id).get()) {
                    entry.set("id", id);
                    changed = true;
                }
                if let Some(function) = fit::repaired_function(entry.get("function")) {
                    entry.set("function", &function);
                    changed = true;
                }
            }
            if changed {
                own.set("tool_calls", &entries);
            }
        }
        None => own.set("tool_calls", &tool_calls(calls, ids)),
    }
    own
}
