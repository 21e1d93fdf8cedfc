//! Anthropic's messages.

use holdfast_engine::model::Flavor::{self, Anthropic};
use serde_json::{Value, json};

use super::{super::Rule, Case, insert, remove};

const REFUSES: &[Flavor] = &[Anthropic];

pub(super) fn request() -> Value {
    json!({
        "model": "m", "max_tokens": 9, "system": [{ "type": "text", "text": "Be kind." }, { "type": "text", "text": " " }],
        "tools": [
            { "name": "look", "input_schema": { "type": "object" } },
            { "type": "web_search_20250305", "name": "web_search" },
        ],
        "messages": [
            { "role": "user", "content": "one" },
            { "role": "user", "content": [{ "type": "text", "text": "two" }, { "type": "text", "text": " " }] },
            { "role": "assistant", "content": [
                { "type": "thinking", "thinking": "", "signature": "s" },
                { "type": "text", "text": "hm" },
                { "type": "tool_use", "id": "a-1", "name": "look", "input": {} },
                { "type": "tool_use", "id": "a_2", "name": "look", "input": { "a": 1 } },
            ] },
            { "role": "user", "content": [{ "type": "tool_result", "tool_use_id": "a_2", "content": "" }] },
            { "role": "user", "content": [
                { "type": "tool_result", "tool_use_id": "a-1", "content": [{ "type": "text", "text": "" }] },
                { "type": "text", "text": "next" },
            ] },
            { "role": "assistant", "content": "done" },
            { "role": "user", "content": "and?" },
        ],
    })
}

pub(super) fn cases() -> Vec<Case> {
    [fields(), messages(), calls()].concat()
}

fn fields() -> Vec<Case> {
    vec![
        (Rule::MissingField, REFUSES, |body| body["max_tokens"] = Value::Null, "max_tokens"),
        (
            Rule::UnknownField,
            REFUSES,
            |body| body["max_completion_tokens"] = json!(1),
            "max_completion_tokens",
        ),
        (Rule::EmptyContent, REFUSES, |body| body["system"] = json!(" "), "system"),
        (Rule::EmptyContent, REFUSES, |body| body["system"][1]["text"] = json!(""), "system[1]"),
        (Rule::Form, REFUSES, |body| body["system"][1] = json!({ "type": "image" }), "system[1]"),
        (Rule::Form, REFUSES, |body| body["system"] = json!(7), "system"),
        (Rule::ToolName, REFUSES, |body| body["tools"][0]["name"] = json!("a.b"), "tools[0]"),
        (
            Rule::ToolNameTwice,
            REFUSES,
            |body| body["tools"][1] = json!({ "name": "look", "input_schema": { "type": "object" } }),
            "tools[1]",
        ),
        (Rule::ToolSchema, REFUSES, |body| body["tools"][0]["input_schema"] = Value::Null, "tools[0]"),
        (Rule::EmptyList, REFUSES, |body| body["messages"] = json!([]), "messages"),
    ]
}

fn messages() -> Vec<Case> {
    vec![
        (
            Rule::FirstMessage,
            REFUSES,
            |body| insert(body, 0, json!({ "role": "assistant", "content": "hi" })),
            "messages[0]",
        ),
        (Rule::LastMessage, REFUSES, |body| remove(body, 6), "messages[5]"),
        (
            Rule::Form,
            REFUSES,
            |body| insert(body, 6, json!({ "role": "system", "content": "x" })),
            "messages[6]",
        ),
        (Rule::Form, REFUSES, |body| body["messages"][6]["content"] = json!([{}]), "messages[6].content[0]"),
        (Rule::EmptyContent, REFUSES, |body| body["messages"][0]["content"] = json!(""), "messages[0]"),
        (Rule::EmptyContent, REFUSES, |body| body["messages"][0]["content"] = json!("\n"), "messages[0]"),
        (Rule::EmptyContent, REFUSES, |body| body["messages"][5]["content"] = json!([]), "messages[5]"),
        (
            Rule::EmptyContent,
            REFUSES,
            |body| body["messages"][2]["content"][1]["text"] = json!(""),
            "messages[2].content[1]",
        ),
    ]
}

fn calls() -> Vec<Case> {
    vec![
        (
            Rule::CallId,
            REFUSES,
            |body| {
                body["messages"][2]["content"][2]["id"] = json!("functions.look:0");
                body["messages"][4]["content"][0]["tool_use_id"] = json!("functions.look:0");
            },
            "messages[2].content[2]",
        ),
        (
            Rule::CallIdTwice,
            REFUSES,
            |body| {
                body["messages"][5]["content"] =
                    json!([{ "type": "tool_use", "id": "a-1", "name": "look", "input": {} }]);
                body["messages"][6]["content"] = json!([{ "type": "tool_result", "tool_use_id": "a-1" }]);
            },
            "messages[5].content[0]",
        ),
        (
            Rule::CallName,
            REFUSES,
            |body| body["messages"][2]["content"][2]["name"] = json!(""),
            "messages[2].content[2]",
        ),
        (
            Rule::CallArguments,
            REFUSES,
            |body| body["messages"][2]["content"][2]["input"] = json!("{}"),
            "messages[2].content[2]",
        ),
        (
            Rule::CallsLast,
            REFUSES,
            |body| insert(body, 3, json!({ "role": "assistant", "content": "so" })),
            "messages[3]",
        ),
        (Rule::UnansweredCall, REFUSES, |body| remove(body, 3), "messages[2].content[3]"),
        (
            Rule::OrphanResult,
            REFUSES,
            |body| body["messages"][6]["content"] = json!([{ "type": "tool_result", "tool_use_id": "a_2" }]),
            "messages[6].content[0]",
        ),
        (
            Rule::ResultTwice,
            REFUSES,
            |body| {
                insert(
                    body,
                    3,
                    json!({ "role": "user", "content": [{ "type": "tool_result", "tool_use_id": "a-1" }] }),
                );
            },
            "messages[5].content[0]",
        ),
        (
            Rule::ResultsFirst,
            REFUSES,
            |body| insert(body, 4, json!({ "role": "user", "content": "wait" })),
            "messages[5].content[0]",
        ),
        (
            Rule::MissingField,
            REFUSES,
            |body| insert(body, 3, json!({ "role": "user", "content": [{ "type": "tool_result" }] })),
            "messages[3].content[0].tool_use_id",
        ),
    ]
}
