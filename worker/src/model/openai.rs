//! Requests to chat completions APIs.

use std::mem;

use holdfast_engine::{
    content::Media,
    model::{Flavor, Message, ModelRequest, ModelTarget, RequestedCall},
    tool::ToolSpec,
};
use serde_json::{Value, json, value::RawValue};

use super::{
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

fn messages(flavor: Flavor, request: &ModelRequest) -> Vec<Box<RawValue>> {
    let mut out = Vec::with_capacity(request.messages.len() + 1);
    let mut ids = CallIds::new(flavor);
    // A user message may come only after all tool messages of a block, so their attachments wait here.
    let mut attachments = Vec::new();
    let system: Vec<_> = request.system.iter().map(String::as_str).filter(|part| !part.is_empty()).collect();
    if !system.is_empty() {
        out.push(raw(&json!({ "role": "system", "content": system.join("\n\n") })));
    }
    for message in &request.messages {
        if !matches!(**message, Message::Tool { .. }) {
            out.extend(attachment_message(mem::take(&mut attachments)));
        }
        match &**message {
            Message::User { text, media } => out.push(raw(&user(flavor, text, media))),
            Message::Assistant { text, calls, flavor: from, raw: own } => {
                let out_ids = ids.begin(calls);
                let own = own.as_deref().filter(|_| *from != Flavor::Anthropic).and_then(Object::parse);
                out.push(match own {
                    Some(own) => raw(&replay(own, calls, &out_ids)),
                    None => raw(&assistant(text.as_deref(), calls, &out_ids)),
                });
            }
            Message::Tool { provider_id, name, text, media } => {
                let id = ids.answer(provider_id);
                if !media.is_empty() {
                    attachments.push(json!({ "type": "text", "text": format!("attachments of tool result {name} ({id}):") }));
                    attachments.extend(media.iter().map(|media| chat_part(media, flavor)));
                }
                out.push(raw(&tool_message(flavor, &id, name, text)));
            }
        }
    }
    out.extend(attachment_message(attachments));
    out
}

fn attachment_message(parts: Vec<Value>) -> Option<Box<RawValue>> {
    (!parts.is_empty()).then(|| raw(&json!({ "role": "user", "content": parts })))
}

fn user(flavor: Flavor, text: &str, media: &[Media]) -> Value {
    if media.is_empty() {
        return json!({ "role": "user", "content": text });
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
