//! Chat completions.

use holdfast_engine::model::Flavor::{self, KimiV1, MistralV1, Ollama, OpenAI, OpenAIv1, OpenRouter};
use serde_json::{Value, json};

use super::{super::Rule, CHAT, Case, insert, remove};

/// Those that read arguments.
const NOT_OPENAI: &[Flavor] = &[OpenAI, KimiV1, MistralV1, OpenRouter, Ollama];

/// A conversation with a round of calls, text beside and after them, and everything that is allowed.
pub(super) fn request() -> Value {
    json!({
        "model": "m", "stream": true,
        "tools": [
            { "type": "function", "function": { "name": "look", "parameters": { "type": "object", "properties": {} } } },
            { "type": "function", "function": { "name": "go-1_B" } },
        ],
        "messages": [
            { "role": "system", "content": "Be kind." },
            { "role": "user", "content": "one" },
            { "role": "user", "content": [{ "type": "text", "text": "two" }, { "type": "image_url" }] },
            { "role": "assistant", "content": null, "tool_calls": [
                { "id": "abcdefgh1", "type": "function", "function": { "name": "look", "arguments": "{}" } },
                { "id": "abcdefgh2", "type": "function", "function": { "name": "go-1_B", "arguments": " {\"a\":1}" } },
            ] },
            { "role": "tool", "tool_call_id": "abcdefgh2", "content": "" },
            { "role": "tool", "tool_call_id": "abcdefgh1", "name": "look", "content": [{ "type": "text", "text": "x" }] },
            { "role": "assistant", "content": "", "tool_calls": [
                { "id": "abcdefgh1", "type": "function", "function": { "name": "look", "arguments": "{}" } },
            ] },
            { "role": "tool", "tool_call_id": "abcdefgh1", "content": "y" },
            { "role": "assistant", "content": "done" },
            { "role": "user", "content": "and?" },
        ],
    })
}

pub(super) fn cases() -> Vec<Case> {
    [messages(), ids(), results(), fields()].concat()
}

fn messages() -> Vec<Case> {
    vec![
        (Rule::Form, CHAT, |body| body["messages"][1]["role"] = json!("function"), "messages[1]"),
        (Rule::Form, CHAT, |body| body["messages"][1]["content"] = json!(7), "messages[1]"),
        (Rule::Form, CHAT, |body| body["messages"][8]["content"] = json!({}), "messages[8]"),
        (Rule::Form, CHAT, |body| body["messages"][8]["tool_calls"] = json!("x"), "messages[8]"),
        (Rule::Form, CHAT, |body| body["messages"][2]["content"][1] = json!({}), "messages[2].content[1]"),
        (
            Rule::Form,
            &[OpenAIv1],
            |body| body["messages"][6]["tool_calls"][0]["type"] = Value::Null,
            "messages[6].tool_calls[0]",
        ),
        (Rule::EmptyList, CHAT, |body| body["messages"] = json!([]), "messages"),
        (Rule::EmptyList, CHAT, |body| body["messages"][8]["tool_calls"] = json!([]), "messages[8]"),
        (Rule::EmptyList, CHAT, |body| body["messages"][5]["content"] = json!([]), "messages[5]"),
        (Rule::EmptyContent, CHAT, |body| body["messages"][1]["content"] = Value::Null, "messages[1]"),
        (Rule::EmptyContent, CHAT, |body| body["messages"][4]["content"] = Value::Null, "messages[4]"),
        (Rule::EmptyContent, CHAT, |body| body["messages"][8]["content"] = Value::Null, "messages[8]"),
        (
            Rule::EmptyContent,
            &[KimiV1, MistralV1],
            |body| body["messages"][8]["content"] = json!(""),
            "messages[8]",
        ),
        (Rule::EmptyContent, &[KimiV1], |body| body["messages"][9]["content"] = json!(" "), "messages[9]"),
        (
            Rule::EmptyContent,
            &[KimiV1],
            |body| body["messages"][6]["content"] = json!([{ "type": "text", "text": "" }]),
            "messages[6].content[0]",
        ),
        (Rule::LastMessage, &[MistralV1], |body| remove(body, 9), "messages[8]"),
        (Rule::Order, &[MistralV1], |body| remove(body, 8), "messages[8]"),
        (
            Rule::Order,
            &[MistralV1],
            |body| insert(body, 9, json!({ "role": "system", "content": "x" })),
            "messages[9]",
        ),
    ]
}

fn ids() -> Vec<Case> {
    vec![
        (
            Rule::CallId,
            CHAT,
            |body| {
                body["messages"][6]["tool_calls"][0]["id"] = json!("");
                body["messages"][7]["tool_call_id"] = json!("");
            },
            "messages[6].tool_calls[0]",
        ),
        (
            Rule::CallId,
            &[OpenAIv1, MistralV1],
            |body| {
                body["messages"][6]["tool_calls"][0]["id"] = json!("x".repeat(41));
                body["messages"][7]["tool_call_id"] = json!("x".repeat(41));
            },
            "messages[6].tool_calls[0]",
        ),
        (
            Rule::CallId,
            &[MistralV1],
            |body| {
                body["messages"][6]["tool_calls"][0]["id"] = json!("call_0_12");
                body["messages"][7]["tool_call_id"] = json!("call_0_12");
            },
            "messages[6].tool_calls[0]",
        ),
        (
            Rule::CallIdTwice,
            CHAT,
            |body| {
                body["messages"][3]["tool_calls"][1]["id"] = json!("abcdefgh1");
                body["messages"][4]["tool_call_id"] = json!("abcdefgh1");
            },
            "messages[3].tool_calls[1]",
        ),
        (
            Rule::CallName,
            CHAT,
            |body| body["messages"][3]["tool_calls"][1]["function"]["name"] = json!("functions.go"),
            "messages[3].tool_calls[1]",
        ),
        (Rule::CallName, &[MistralV1], |body| body["messages"][5]["name"] = json!("l ook"), "messages[5]"),
    ]
}

fn results() -> Vec<Case> {
    vec![
        (
            Rule::CallArguments,
            NOT_OPENAI,
            |body| body["messages"][3]["tool_calls"][0]["function"]["arguments"] = json!("{\"a\":"),
            "messages[3].tool_calls[0]",
        ),
        (
            Rule::CallArguments,
            NOT_OPENAI,
            |body| body["messages"][3]["tool_calls"][0]["function"]["arguments"] = json!("[1]"),
            "messages[3].tool_calls[0]",
        ),
        (
            Rule::CallArguments,
            &[OpenAIv1],
            |body| body["messages"][3]["tool_calls"][0]["function"]["arguments"] = json!({}),
            "messages[3].tool_calls[0]",
        ),
        (Rule::UnansweredCall, CHAT, |body| remove(body, 4), "messages[3]"),
        (Rule::UnansweredCall, CHAT, |body| remove(body, 7), "messages[6]"),
        (
            Rule::ResultTwice,
            CHAT,
            |body| insert(body, 6, json!({ "role": "tool", "tool_call_id": "abcdefgh2", "content": "z" })),
            "messages[6]",
        ),
        (
            Rule::OrphanResult,
            CHAT,
            |body| insert(body, 6, json!({ "role": "tool", "tool_call_id": "abcdefgh3", "content": "z" })),
            "messages[6]",
        ),
        (
            Rule::OrphanResult,
            CHAT,
            |body| {
                insert(body, 10, json!({ "role": "tool", "tool_call_id": "abcdefgh1", "content": "late" }))
            },
            "messages[10]",
        ),
        (
            Rule::MissingField,
            CHAT,
            |body| insert(body, 6, json!({ "role": "tool", "content": "z" })),
            "messages[6].tool_call_id",
        ),
    ]
}

fn fields() -> Vec<Case> {
    vec![
        (Rule::MissingField, CHAT, |body| body["model"] = Value::Null, "model"),
        (Rule::MissingField, CHAT, |body| body["messages"] = Value::Null, "messages"),
        (Rule::Form, CHAT, |body| body["messages"] = json!({}), "messages"),
        (Rule::UnknownField, &[OpenAIv1, MistralV1], |body| body["top_k"] = json!(1), "top_k"),
        (
            Rule::UnknownField,
            &[MistralV1],
            |body| body["stream_options"] = json!({ "include_usage": true }),
            "stream_options",
        ),
        (
            Rule::UnknownField,
            &[OpenAIv1, MistralV1],
            |body| {
                body["stream"] = json!(false);
                body["stream_options"] = json!({});
            },
            "stream_options",
        ),
        (Rule::EmptyList, CHAT, |body| body["tools"] = json!([]), "tools"),
        (Rule::Form, CHAT, |body| body["tools"] = json!({}), "tools"),
        (Rule::Form, CHAT, |body| body["tools"][1]["type"] = Value::Null, "tools[1]"),
        (Rule::ToolName, CHAT, |body| body["tools"][1]["function"]["name"] = json!("a b"), "tools[1]"),
        (
            Rule::ToolName,
            CHAT,
            |body| body["tools"][1]["function"]["name"] = json!("a".repeat(65)),
            "tools[1]",
        ),
        (Rule::ToolName, &[KimiV1], |body| body["tools"][1]["function"]["name"] = json!("9go"), "tools[1]"),
        (
            Rule::ToolNameTwice,
            &[KimiV1],
            |body| body["tools"][1]["function"]["name"] = json!("look"),
            "tools[1]",
        ),
        (
            Rule::ToolSchema,
            CHAT,
            |body| body["tools"][0]["function"]["parameters"] = json!({ "properties": {} }),
            "tools[0]",
        ),
    ]
}
