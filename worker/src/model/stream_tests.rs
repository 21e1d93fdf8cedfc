//! What providers' streams become.

use std::sync::Mutex;

use holdfast_engine::{
    content::Usage,
    model::{Flavor, ModelAnswer},
};
use serde_json::{Value, json};

use super::{anthropic_stream, error::Failure, openai_stream, sse::Parser};

/// Folds a chat stream that arrives in pieces of 7 bytes; also the text that was given on the way.
fn chat(stream: &str) -> (Result<ModelAnswer, Failure>, Vec<String>) {
    let (mut parser, mut fold) = (Parser::default(), openai_stream::Fold::default());
    let said = Mutex::new(Vec::new());
    let deltas = |text: &str| said.lock().expect("no panic").push(text.to_owned());
    let pieces = stream.as_bytes().chunks(7);
    let folded =
        pieces.flat_map(|piece| parser.push(piece)).try_for_each(|event| fold.event(&event, None, &deltas));
    let answer = folded.and_then(|()| {
        assert!(fold.complete(), "the stream is complete");
        fold.finish(Flavor::OpenAI)
    });
    (answer, said.into_inner().expect("no panic"))
}

fn chunks(deltas: &[Value]) -> String {
    let chunk =
        |delta: &Value| format!("data: {}\r\n\r\n", json!({ "choices": [{ "index": 0, "delta": delta }] }));
    let end = json!({ "choices": [{ "index": 0, "delta": {}, "finish_reason": "stop" }] });
    let deltas: String = deltas.iter().map(chunk).collect();
    format!(": comment\r\n{deltas}data: {end}\r\n\r\ndata: [DONE]\r\n\r\n")
}

fn message(answer: &ModelAnswer) -> Value {
    serde_json::from_str(answer.raw.as_ref().expect("the message").get()).expect("JSON")
}

#[test]
fn a_chat_stream_becomes_the_whole_message() {
    let mut stream = chunks(&[
        json!({ "role": "assistant", "content": "" }),
        json!({ "reasoning_content": "h" }),
        json!({ "reasoning_content": "m" }),
        json!({ "content": "hé" }),
        json!({ "content": "llo", "new_field": { "a": [1] } }),
        json!({ "tool_calls": [{ "index": 0, "id": "a", "type": "function", "function": { "name": "look", "arguments": "" } }] }),
        json!({ "tool_calls": [{ "index": 0, "function": { "arguments": "{\"at\"" } }] }),
        json!({ "tool_calls": [{ "index": 1, "id": "b", "function": { "name": "look", "arguments": "{}" }, "signature": "s" }] }),
        json!({ "tool_calls": [{ "index": 0, "function": { "arguments": ": 1}" } }] }),
    ]);
    let usage = json!({ "choices": [], "usage": { "prompt_tokens": 4, "completion_tokens": 2 } });
    stream = stream.replace("data: [DONE]", &format!("data: {usage}\n\ndata: [DONE]"));
    let (answer, said) = chat(&stream);
    let answer = answer.expect("an answer");
    assert_eq!(said, ["hé", "llo"]);
    assert_eq!(
        message(&answer),
        json!({
            "role": "assistant", "content": "héllo", "reasoning_content": "hm", "new_field": { "a": [1] },
            "tool_calls": [
                { "id": "a", "type": "function", "function": { "name": "look", "arguments": "{\"at\": 1}" } },
                { "id": "b", "function": { "name": "look", "arguments": "{}" }, "signature": "s" },
            ],
        })
    );
    assert_eq!((answer.text.as_deref(), answer.thinking.as_deref()), (Some("héllo"), Some("hm")));
    assert_eq!(answer.calls[0].arguments, "{\"at\": 1}");
    assert_eq!(answer.usage, Some(Usage { input_tokens: 4, output_tokens: 2, cached_tokens: 0 }));
    assert_eq!(answer.stop_reason.as_deref(), Some("stop"));
}

#[test]
fn calls_of_sloppy_servers_stay_apart() {
    let one = |id: &str| json!({ "tool_calls": [{ "index": 0, "id": id, "function": { "name": "look", "arguments": "{}" } }] });
    let bare = |arguments: &str, name: Option<&str>| json!({ "tool_calls": [{ "function": { "name": name, "arguments": arguments } }] });
    let (answer, _) = chat(&chunks(&[one("a"), one("b"), bare("{\"x\"", Some("c")), bare(":1}", None)]));
    let answer = answer.expect("an answer");
    let calls: Vec<_> =
        answer.calls.iter().map(|call| (&*call.provider_id, &*call.name, &*call.arguments)).collect();
    assert_eq!(calls, [("a", "look", "{}"), ("b", "look", "{}"), ("", "c", "{\"x\":1}")]);
}

#[test]
fn reasoning_details_and_content_parts_are_joined() {
    let (answer, said) = chat(&chunks(&[
        json!({ "reasoning_details": [{ "type": "reasoning.text", "text": "a", "index": 0, "format": "f" }] }),
        json!({ "reasoning_details": [{ "type": "reasoning.text", "text": "b", "index": 0, "format": "f", "signature": "s" }] }),
        json!({ "content": [{ "type": "thinking", "thinking": [{ "type": "text", "text": "x" }] }] }),
        json!({ "content": [{ "type": "thinking", "thinking": [{ "type": "text", "text": "y" }] }] }),
        json!({ "content": "t" }),
        json!({ "content": [{ "type": "text", "text": "u" }] }),
    ]));
    let answer = answer.expect("an answer");
    let message = message(&answer);
    assert_eq!(
        message["reasoning_details"],
        json!([{ "type": "reasoning.text", "text": "ab", "index": 0, "format": "f", "signature": "s" }])
    );
    assert_eq!(
        message["content"][0],
        json!({ "type": "thinking", "thinking": [{ "type": "text", "text": "xy" }] })
    );
    assert_eq!((answer.text.as_deref(), answer.thinking.as_deref()), (Some("tu"), Some("xy")));
    assert_eq!(said, ["t", "u"]);
}

#[test]
fn errors_in_a_chat_stream() {
    let (result, _) = chat("data: {\"error\":{\"code\":502,\"message\":\"upstream\"}}\n\n");
    assert!(matches!(result, Err(Failure::Passing { detail, .. }) if detail == "upstream"));
    let (result, _) = chat("data: {\"choices\"\n\n");
    assert!(matches!(result, Err(Failure::Final(_))));
    let (result, _) = chat("data: [DONE]\n\n");
    assert!(matches!(result, Err(Failure::Final(_))));
    let mut fold = openai_stream::Fold::default();
    let event =
        Parser::default().push(b"data: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\n").remove(0);
    fold.event(&event, None, &|_| {}).expect("a delta");
    assert!(!fold.complete(), "neither [DONE] nor a reason to stop");
}

fn anthropic(events: &[Value]) -> (Result<ModelAnswer, Failure>, bool, Vec<String>) {
    let stream: String = events
        .iter()
        .map(|event| format!("event: {}\ndata: {event}\n\n", event["type"].as_str().expect("a type")))
        .collect();
    let (mut parser, mut fold) = (Parser::default(), anthropic_stream::Fold::default());
    let said = Mutex::new(Vec::new());
    let deltas = |text: &str| said.lock().expect("no panic").push(text.to_owned());
    let pieces = stream.as_bytes().chunks(7);
    let folded =
        pieces.flat_map(|piece| parser.push(piece)).try_for_each(|event| fold.event(&event, None, &deltas));
    let complete = fold.complete();
    (folded.and_then(|()| fold.finish()), complete, said.into_inner().expect("no panic"))
}

fn start(index: u64, block: Value) -> Value {
    json!({ "type": "content_block_start", "index": index, "content_block": block })
}

fn delta(index: u64, delta: Value) -> Value {
    json!({ "type": "content_block_delta", "index": index, "delta": delta })
}

#[test]
fn an_anthropic_stream_becomes_the_whole_content() {
    let call = |id| json!({ "type": "tool_use", "id": id, "name": "look", "input": {} });
    let (answer, complete, said) = anthropic(&[
        json!({ "type": "message_start", "message": { "usage": { "input_tokens": 5, "cache_read_input_tokens": 3, "output_tokens": 1 } } }),
        json!({ "type": "ping" }),
        start(0, json!({ "type": "thinking", "thinking": "", "signature": "" })),
        delta(0, json!({ "type": "thinking_delta", "thinking": "h" })),
        delta(0, json!({ "type": "thinking_delta", "thinking": "m" })),
        delta(0, json!({ "type": "signature_delta", "signature": "s==" })),
        json!({ "type": "content_block_stop", "index": 0 }),
        start(1, json!({ "type": "text", "text": "" })),
        delta(1, json!({ "type": "text_delta", "text": "hé" })),
        delta(1, json!({ "type": "citations_delta", "citation": { "n": 1 } })),
        delta(1, json!({ "type": "text_delta", "text": "llo" })),
        start(2, call("a")),
        delta(2, json!({ "type": "input_json_delta", "partial_json": "" })),
        delta(2, json!({ "type": "input_json_delta", "partial_json": "{\"at\": " })),
        delta(2, json!({ "type": "input_json_delta", "partial_json": "1.50}" })),
        start(3, call("b")),
        start(4, call("c")),
        delta(4, json!({ "type": "input_json_delta", "partial_json": "{\"cut" })),
        json!({ "type": "message_delta", "delta": { "stop_reason": "tool_use" }, "usage": { "output_tokens": 9 } }),
        json!({ "type": "message_stop" }),
    ]);
    let answer = answer.expect("an answer");
    assert!(complete);
    assert_eq!(said, ["hé", "llo"]);
    assert_eq!(
        message(&answer),
        json!([
            { "type": "thinking", "thinking": "hm", "signature": "s==" },
            { "type": "text", "text": "héllo", "citations": [{ "n": 1 }] },
            { "type": "tool_use", "id": "a", "name": "look", "input": { "at": 1.5 } },
            { "type": "tool_use", "id": "b", "name": "look", "input": {} },
            { "type": "tool_use", "id": "c", "name": "look", "input": { "_malformed": "{\"cut" } },
        ])
    );
    let arguments: Vec<_> = answer.calls.iter().map(|call| &*call.arguments).collect();
    assert_eq!(arguments, ["{\"at\": 1.50}", "{}", "{\"cut"]);
    assert_eq!(answer.usage, Some(Usage { input_tokens: 8, output_tokens: 9, cached_tokens: 3 }));
    assert_eq!(answer.stop_reason.as_deref(), Some("tool_use"));
}

#[test]
fn errors_in_an_anthropic_stream() {
    let begin = json!({ "type": "message_start", "message": {} });
    let error = json!({ "type": "error", "error": { "type": "overloaded_error", "message": "Overloaded" } });
    let (result, _, _) = anthropic(&[begin.clone(), error]);
    assert!(matches!(result, Err(Failure::Passing { detail, .. }) if detail == "Overloaded"));
    let (_, complete, _) = anthropic(&[begin.clone(), start(0, json!({ "type": "text", "text": "x" }))]);
    assert!(!complete);
    let (result, _, _) = anthropic(&[begin, delta(3, json!({ "type": "text_delta", "text": "x" }))]);
    assert!(matches!(result, Err(Failure::Final(_))));
}
