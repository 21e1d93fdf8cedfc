//! What providers' whole answers become.

use holdfast_engine::{content::Usage, model::Flavor};
use serde_json::json;

use super::{ModelError, anthropic_answer, error::Failure, openai_answer};

fn chat(text: &str) -> Result<holdfast_engine::model::ModelAnswer, Failure> {
    openai_answer::parse(text, Flavor::OpenAI, None)
}

fn detail(result: Result<holdfast_engine::model::ModelAnswer, Failure>) -> String {
    match result {
        Err(Failure::Final(error)) => error.to_string(),
        Err(Failure::Passing { detail, .. }) => format!("passing: {detail}"),
        Ok(answer) => format!("{answer:?}"),
    }
}

#[test]
fn a_chat_answer_keeps_the_providers_text() {
    let message = r#"{ "role": "assistant", "content": "hi \u00e9", "reasoning_content": "hm", "n": 1.10, "tool_calls": [ {"id":"a","type":"function","function":{"name":"look","arguments":"{\"at\": 1}"}}, {"function":{"name":"look","arguments":{"at": 1.50}}} ] }"#;
    let text = format!(
        r#"{{"choices":[{{"message":{message},"finish_reason":"tool_calls"}}],"usage":{{"prompt_tokens":10,"completion_tokens":2,"prompt_tokens_details":{{"cached_tokens":4}}}}}}"#
    );
    let answer = chat(&text).expect("an answer");
    assert_eq!(answer.raw.as_deref().map(|raw| raw.get()), Some(message));
    assert_eq!((answer.text.as_deref(), answer.thinking.as_deref()), (Some("hi é"), Some("hm")));
    let calls: Vec<_> =
        answer.calls.iter().map(|call| (call.provider_id.as_str(), call.arguments.as_str())).collect();
    assert_eq!(calls, [("a", r#"{"at": 1}"#), ("", r#"{"at": 1.50}"#)]);
    assert_eq!(answer.usage, Some(Usage { input_tokens: 10, output_tokens: 2, cached_tokens: 4 }));
    assert_eq!(answer.stop_reason.as_deref(), Some("tool_calls"));
}

#[test]
fn content_may_have_many_shapes() {
    for (message, text, thinking) in [
        (json!({ "content": null }), None, None),
        (json!({ "content": "" , "tool_calls": null }), None, None),
        (
            json!({ "content": [{ "type": "text", "text": "a" }, { "type": "image" }, { "type": "text", "text": "b" }] }),
            Some("ab"),
            None,
        ),
        (
            json!({ "content": [{ "type": "thinking", "thinking": [{ "type": "text", "text": "t" }] }, { "type": "text", "text": "a" }] }),
            Some("a"),
            Some("t"),
        ),
        (json!({ "content": null, "refusal": "no" }), Some("no"), None),
        (json!({ "content": "a", "reasoning": "r" }), Some("a"), Some("r")),
        (
            json!({ "content": "a", "reasoning_details": [{ "type": "reasoning.summary", "summary": "s" }] }),
            Some("a"),
            Some("s"),
        ),
    ] {
        let answer = chat(&json!({ "choices": [{ "message": message }] }).to_string()).expect("an answer");
        assert_eq!((answer.text.as_deref(), answer.thinking.as_deref()), (text, thinking), "{message}");
        assert_eq!((answer.usage, answer.stop_reason), (None, None));
    }
}

#[test]
fn cached_tokens_of_other_providers_count() {
    for usage in [
        json!({ "prompt_tokens": 3, "completion_tokens": 1, "cached_tokens": 2 }),
        json!({ "prompt_tokens": 3, "completion_tokens": 1, "prompt_cache_hit_tokens": 2 }),
    ] {
        assert_eq!(
            openai_answer::usage(&usage),
            Some(Usage { input_tokens: 3, output_tokens: 1, cached_tokens: 2 })
        );
    }
    assert_eq!(openai_answer::usage(&json!({ "total": 3 })), None);
}

#[test]
fn unreadable_chat_answers_are_told_without_their_text() {
    for (text, expected) in [
        ("<html>secret", "not JSON"),
        (r#"{"choices":"secret"}"#, "another shape"),
        (r#"{"choices":[]}"#, "no choice"),
        (r#"{"choices":[{"message":null}]}"#, "no choice"),
        (r#"{"choices":[{"message":"secret"}]}"#, "not a JSON object"),
        (r#"{"choices":[{"message":{"tool_calls":["secret"]}}]}"#, "not a list of calls"),
    ] {
        let said = detail(chat(text));
        assert!(said.contains(expected) && !said.contains("secret"), "{said}");
    }
}

#[test]
fn an_error_in_a_successful_answer() {
    let said = detail(chat(r#"{"error":{"code":400,"message":"context too long"}}"#));
    assert_eq!(said, "the model provider reports an error: context too long");
    assert_eq!(detail(chat(r#"{"error":{"code":503,"message":"busy"}}"#)), "passing: busy");
}

#[test]
fn an_anthropic_answer_keeps_the_providers_text() {
    let content = r#"[ {"type":"thinking","thinking":"hm","signature":"s"}, {"type":"text","text":"a"}, {"type":"new","x":1.10}, {"type":"text","text":"b"}, {"type":"tool_use","id":"t","name":"look","input":{"at": 1.50}} ]"#;
    let text = format!(
        r#"{{"type":"message","content":{content},"stop_reason":"tool_use","usage":{{"input_tokens":5,"cache_read_input_tokens":7,"cache_creation_input_tokens":11,"output_tokens":3}}}}"#
    );
    let answer = anthropic_answer::parse(&text, None).expect("an answer");
    assert_eq!(answer.raw.as_deref().map(|raw| raw.get()), Some(content));
    assert_eq!((answer.text.as_deref(), answer.thinking.as_deref()), (Some("ab"), Some("hm")));
    assert_eq!(answer.calls[0].arguments, r#"{"at": 1.50}"#);
    assert_eq!(answer.usage, Some(Usage { input_tokens: 23, output_tokens: 3, cached_tokens: 7 }));
    assert_eq!(answer.stop_reason.as_deref(), Some("tool_use"));
}

#[test]
fn unreadable_anthropic_answers() {
    let parse = |text| detail(anthropic_answer::parse(text, None));
    assert!(parse("{}").contains("no content"));
    assert!(parse(r#"{"content":"x"}"#).contains("not a list of blocks"));
    let error = r#"{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}"#;
    assert_eq!(parse(error), "passing: Overloaded");
    let result = anthropic_answer::parse(r#"{"error":{"type":"invalid_request_error","message":"m"}}"#, None);
    assert!(matches!(result, Err(Failure::Final(ModelError::Provider { .. }))));
}
