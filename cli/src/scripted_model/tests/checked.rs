//! Requests that are held to the providers' rules.

use axum::http::StatusCode;
use holdfast_engine::{
    content::Media,
    model::{Flavor, Message, RequestedCall},
};
use serde_json::{Value, json};

use super::{Running, user};

/// Everything that providers are particular about: what models wrote wrongly, blank texts, attachments, ids that
/// repeat or have another provider's form, mail right after results.
fn awkward() -> Vec<Message> {
    let call = |id: &str, name: &str, arguments: &str| RequestedCall {
        provider_id: id.into(),
        name: name.into(),
        arguments: arguments.into(),
    };
    let assistant = |text: Option<&str>, calls| Message::Assistant {
        text: text.map(Into::into),
        calls,
        flavor: Flavor::OpenRouter,
        raw: None,
    };
    let tool = |id: &str, text: &str, media| Message::Tool {
        provider_id: id.into(),
        name: "look".into(),
        text: text.into(),
        media,
    };
    let image = || Media { mime_type: "image/png".into(), base64_data: "eA==".into(), filename: None };
    vec![
        user(""),
        assistant(None, vec![]),
        user("go on"),
        assistant(
            Some(""),
            vec![call("functions.look:0", "look", "{"), call("", "", ""), call("", "a b", "[1]")],
        ),
        tool("functions.look:0", "", vec![image()]),
        tool("", "x", vec![]),
        tool("", "y", vec![image()]),
        user("mail"),
        assistant(Some(" "), vec![]),
        assistant(Some("hm"), vec![call(&"long".repeat(20), "look", "{}")]),
        tool(&"long".repeat(20), "z", vec![]),
        assistant(None, vec![call("half", "look", r#"{"at":"\ud800"}"#)]),
        tool("half", "no", vec![]),
    ]
}

#[tokio::test]
async fn what_the_workers_send_breaks_no_rule_of_any_flavour() {
    for flavor in Flavor::ALL {
        let mut script = json!({ "rules": [{ "reply": { "text": "ok" } }] });
        if flavor != Flavor::Anthropic {
            script["flavor"] = json!(flavor.name());
        }
        let running = Running::new(&script).await;
        for (streamed, count) in [(false, 1), (true, 8), (false, 13)] {
            let mut messages = awkward();
            messages.truncate(count);
            let asked = running.ask(flavor, messages, streamed).await;
            let requests = running.requests().await;
            assert!(asked.result.is_ok(), "{flavor:?}: {:?} {requests:#}", asked.result);
            let told =
                requests.as_array().and_then(|requests| requests.last()).map(|last| &last["violations"]);
            assert_eq!(told, Some(&json!([])), "{flavor:?}");
        }
        running.stop().await;
    }
}

#[tokio::test]
async fn what_breaks_a_rule_is_refused_in_the_providers_words() {
    let message = "messages[1]: \"x\" is no call of the message before (rule orphan_result)";
    let body = json!({ "model": "m", "messages": [
        { "role": "user", "content": "hi" },
        { "role": "tool", "tool_call_id": "x", "content": "y" },
    ] });
    let openai = json!({ "error": {
        "message": message, "type": "invalid_request_error", "param": "messages[1]", "code": "orphan_result" } });
    let mistral = json!({ "object": "error", "message": message, "type": "invalid_request_error",
        "param": null, "code": "orphan_result" });
    for (flavor, expected) in [("OpenAI", openai), ("mistralv1", mistral)] {
        let script =
            json!({ "flavor": flavor, "rules": [{ "when": { "times": 1 }, "reply": { "text": "ok" } }] });
        let running = Running::new(&script).await;
        let response = running.post_as_it_is("/v1/chat/completions", &body).await;
        assert_eq!(response.status(), StatusCode::BAD_REQUEST);
        assert_eq!(response.json::<Value>().await.expect("JSON"), expected);
        let noted = running.requests().await[0].clone();
        assert_eq!((&noted["rule"], &noted["body"]), (&Value::Null, &body));
        assert_eq!(noted["violations"][0]["rule"], "orphan_result");
        // The script's rule is still unused.
        let mut good = body.clone();
        good["messages"] = json!([{ "role": "user", "content": "hi" }]);
        assert_eq!(running.post_as_it_is("/v1/chat/completions", &good).await.status(), StatusCode::OK);
        running.stop().await;
    }
    let running = Running::new(&json!({ "rules": [{ "reply": { "text": "ok" } }] })).await;
    let answer = running.post_as_it_is("/v1/messages", &body).await.json::<Value>().await.expect("JSON");
    let message = "max_tokens: it is demanded (rule missing_field)";
    let expected =
        json!({ "type": "error", "error": { "type": "invalid_request_error", "message": message } });
    assert_eq!(answer, expected);
    running.stop().await;
}

#[tokio::test]
async fn a_lenient_script_answers_all_the_same() {
    let running = Running::new(&json!({ "lenient": true, "rules": [{ "reply": { "text": "ok" } }] })).await;
    let body = json!({ "messages": [{ "role": "assistant", "content": null }] });
    assert_eq!(running.post_as_it_is("/chat/completions", &body).await.status(), StatusCode::OK);
    let noted = running.requests().await[0].clone();
    let rules = [&noted["violations"][0]["rule"], &noted["violations"][1]["rule"]];
    assert_eq!((&noted["rule"], rules), (&json!(1), [&json!("missing_field"), &json!("empty_content")]));
    running.stop().await;
}
