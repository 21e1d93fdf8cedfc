//! An answer in either dialect, whole or as the events of a stream.

use holdfast_engine::model::Flavor;
use serde_json::{Map, Value, json};

use super::{
    rules::Violation,
    script::{Reply, Tokens},
    template::{fill, fill_within},
    view::{Dialect, View},
};

/// A reply with its templates filled in.
#[derive(Debug)]
pub(super) struct Answer {
    id: String,
    model: String,
    text: Option<String>,
    thinking: Option<String>,
    calls: Vec<Call>,
    tokens: Tokens,
    raw: Map<String, Value>,
}

#[derive(Debug)]
struct Call {
    id: String,
    name: String,
    /// JSON text, unless the script wants it otherwise.
    arguments: String,
}

impl Answer {
    /// Fills in a reply to the request with number `seq`.
    pub(super) fn new(reply: &Reply, view: &View, seq: u64) -> Self {
        let calls = reply.tool_calls.iter().enumerate().map(|(position, call)| Call {
            id: call.id.clone().unwrap_or_else(|| format!("call_{}_{position}", view.turn)),
            name: call.name.clone(),
            arguments: match fill_within(&call.arguments, view) {
                Value::String(text) => text,
                other => other.to_string(),
            },
        });
        let text = reply.text.as_ref().map(|text| fill(text, view));
        let calls: Vec<_> = calls.collect();
        // Four characters a token, as a rule of thumb, unless the script counts.
        let written = text.iter().map(|text| text.chars().count()).sum::<usize>()
            + calls.iter().map(|call| call.arguments.chars().count()).sum::<usize>();
        let estimated = |characters: usize| u64::try_from(characters.div_ceil(4)).unwrap_or(u64::MAX);
        let tokens = reply.usage.unwrap_or_else(|| Tokens {
            input_tokens: estimated(view.size),
            output_tokens: estimated(written),
            cached_tokens: 0,
        });
        Self {
            id: format!("scripted-{seq}"),
            model: view.model.clone(),
            text,
            thinking: reply.thinking.as_ref().map(|text| fill(text, view)),
            calls,
            tokens,
            raw: reply.raw.clone(),
        }
    }

    /// The whole answer.
    pub(super) fn whole(&self, dialect: Dialect) -> Value {
        match dialect {
            Dialect::Chat => {
                let mut message = json!({ "role": "assistant", "content": self.text });
                if let Some(thinking) = &self.thinking {
                    message["reasoning_content"] = json!(thinking);
                }
                if !self.calls.is_empty() {
                    message["tool_calls"] =
                        self.calls.iter().map(|call| chat_call(call, &call.arguments)).collect();
                }
                self.raw.iter().for_each(|(key, value)| message[key] = value.clone());
                json!({
                    "id": self.id, "object": "chat.completion", "created": 0, "model": self.model,
                    "choices": [{ "index": 0, "message": message, "finish_reason": self.stop_reason(dialect) }],
                    "usage": self.usage(dialect),
                })
            }
            Dialect::Anthropic => {
                let mut message = self.anthropic_message();
                message["content"] = self.blocks().into_iter().map(|(block, _)| block).collect();
                message["stop_reason"] = json!(self.stop_reason(dialect));
                message["usage"] = self.usage(dialect);
                self.raw.iter().for_each(|(key, value)| message[key] = value.clone());
                message
            }
        }
    }

    /// The answer as the events of a stream, each complete with its blank line.
    pub(super) fn events(&self, view: &View) -> Vec<String> {
        match view.dialect {
            Dialect::Chat => self.chat_events(view.include_usage),
            Dialect::Anthropic => self.anthropic_events(),
        }
    }

    fn chat_events(&self, include_usage: bool) -> Vec<String> {
        let chunk = |choices: Value| json!({ "id": self.id, "object": "chat.completion.chunk", "created": 0, "model": self.model, "choices": choices });
        let delta = |delta: Value| chunk(json!([{ "index": 0, "delta": delta, "finish_reason": null }]));
        let mut chunks = vec![delta(json!({ "role": "assistant" }))];
        chunks.extend(
            pieces(self.thinking.as_deref()).map(|piece| delta(json!({ "reasoning_content": piece }))),
        );
        chunks.extend(pieces(self.text.as_deref()).map(|piece| delta(json!({ "content": piece }))));
        for (index, call) in self.calls.iter().enumerate() {
            let mut begin = chat_call(call, "");
            begin["index"] = json!(index);
            chunks.push(delta(json!({ "tool_calls": [begin] })));
            let parts = pieces(Some(&call.arguments));
            chunks.extend(parts.map(|piece| {
                delta(json!({ "tool_calls": [{ "index": index, "function": { "arguments": piece } }] }))
            }));
        }
        if !self.raw.is_empty() {
            chunks.push(delta(Value::Object(self.raw.clone())));
        }
        let reason = self.stop_reason(Dialect::Chat);
        chunks.push(chunk(json!([{ "index": 0, "delta": {}, "finish_reason": reason }])));
        if include_usage {
            let mut last = chunk(json!([]));
            last["usage"] = self.usage(Dialect::Chat);
            chunks.push(last);
        }
        let events = chunks.into_iter().map(|chunk| format!("data: {chunk}\n\n"));
        events.chain(["data: [DONE]\n\n".to_owned()]).collect()
    }

    fn anthropic_events(&self) -> Vec<String> {
        let usage = self.usage(Dialect::Anthropic);
        let mut message = self.anthropic_message();
        message["content"] = json!([]);
        message["usage"] = usage.clone();
        message["usage"]["output_tokens"] = json!(0);
        let mut events = vec![json!({ "type": "message_start", "message": message })];
        for (index, (block, deltas)) in self.blocks().into_iter().enumerate() {
            let mut begin = block;
            for key in ["text", "thinking"] {
                if begin.get(key).is_some() && !deltas.is_empty() {
                    begin[key] = json!("");
                }
            }
            if begin["type"] == "tool_use" && !deltas.is_empty() {
                begin["input"] = json!({});
            }
            events.push(json!({ "type": "content_block_start", "index": index, "content_block": begin }));
            let deltas = deltas.into_iter();
            events.extend(
                deltas.map(|delta| json!({ "type": "content_block_delta", "index": index, "delta": delta })),
            );
            events.push(json!({ "type": "content_block_stop", "index": index }));
        }
        let reason = self.stop_reason(Dialect::Anthropic);
        events.push(json!({ "type": "message_delta", "delta": { "stop_reason": reason }, "usage": usage }));
        events.push(json!({ "type": "message_stop" }));
        events.iter().map(named_event).collect()
    }

    fn anthropic_message(&self) -> Value {
        json!({ "id": self.id, "type": "message", "role": "assistant", "model": self.model, "stop_reason": null })
    }

    /// Anthropic's content blocks, each with the deltas that a stream makes it of.
    fn blocks(&self) -> Vec<(Value, Vec<Value>)> {
        if let Some(Value::Array(blocks)) = self.raw.get("content") {
            return blocks.iter().map(|block| (block.clone(), Vec::new())).collect();
        }
        let deltas = |kind: &str, key: &str, text: &str| {
            pieces(Some(text)).map(|piece| json!({ "type": kind, key: piece })).collect::<Vec<_>>()
        };
        let thinking = self.thinking.iter().map(|text| {
            let block = json!({ "type": "thinking", "thinking": text, "signature": "scripted" });
            (block, deltas("thinking_delta", "thinking", text))
        });
        let text = self
            .text
            .iter()
            .map(|text| (json!({ "type": "text", "text": text }), deltas("text_delta", "text", text)));
        let calls = self.calls.iter().map(|call| {
            let input: Value =
                serde_json::from_str(&call.arguments).unwrap_or_else(|_| json!(call.arguments));
            let block = json!({ "type": "tool_use", "id": call.id, "name": call.name, "input": input });
            (block, deltas("input_json_delta", "partial_json", &call.arguments))
        });
        thinking.chain(text).chain(calls).collect()
    }

    fn stop_reason(&self, dialect: Dialect) -> &'static str {
        match (dialect, self.calls.is_empty()) {
            (Dialect::Chat, true) => "stop",
            (Dialect::Chat, false) => "tool_calls",
            (Dialect::Anthropic, true) => "end_turn",
            (Dialect::Anthropic, false) => "tool_use",
        }
    }

    fn usage(&self, dialect: Dialect) -> Value {
        let Tokens { input_tokens, output_tokens, cached_tokens } = self.tokens;
        match dialect {
            Dialect::Chat => json!({
                "prompt_tokens": input_tokens,
                "completion_tokens": output_tokens,
                "total_tokens": input_tokens.saturating_add(output_tokens),
                "prompt_tokens_details": { "cached_tokens": cached_tokens },
            }),
            Dialect::Anthropic => json!({
                "input_tokens": input_tokens.saturating_sub(cached_tokens),
                "output_tokens": output_tokens,
                "cache_read_input_tokens": cached_tokens,
                "cache_creation_input_tokens": 0,
            }),
        }
    }
}

/// The body of an error answer.
pub(super) fn error_body(dialect: Dialect, status: u16, message: &str) -> Value {
    match dialect {
        Dialect::Chat => json!({ "error": { "message": message, "type": "scripted", "code": status } }),
        Dialect::Anthropic => {
            json!({ "type": "error", "error": { "type": anthropic_error(status), "message": message } })
        }
    }
}

/// The answer to a request that breaks a rule, as the flavour's provider words it.
pub(super) fn refusal(flavor: Flavor, violation: &Violation) -> Value {
    let (kind, message) = ("invalid_request_error", violation.to_string());
    let code = violation.rule.name();
    match flavor {
        Flavor::Anthropic => json!({ "type": "error", "error": { "type": kind, "message": message } }),
        Flavor::MistralV1 => {
            json!({ "object": "error", "message": message, "type": kind, "param": null, "code": code })
        }
        _ => {
            json!({ "error": { "message": message, "type": kind, "param": violation.at, "code": code } })
        }
    }
}

/// An error as an event of a stream.
pub(super) fn error_event(dialect: Dialect, status: u16, message: &str) -> String {
    let body = error_body(dialect, status, message);
    match dialect {
        Dialect::Chat => format!("data: {body}\n\n"),
        Dialect::Anthropic => named_event(&body),
    }
}

fn anthropic_error(status: u16) -> &'static str {
    match status {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        429 => "rate_limit_error",
        529 => "overloaded_error",
        500..=599 => "api_error",
        _ => "invalid_request_error",
    }
}

fn named_event(event: &Value) -> String {
    format!("event: {}\ndata: {event}\n\n", event["type"].as_str().unwrap_or_default())
}

fn chat_call(call: &Call, arguments: &str) -> Value {
    json!({ "id": call.id, "type": "function", "function": { "name": call.name, "arguments": arguments } })
}

/// Text in the pieces in which it is streamed: words with the blanks after them.
fn pieces(text: Option<&str>) -> impl Iterator<Item = &str> {
    text.unwrap_or_default().split_inclusive(char::is_whitespace)
}
