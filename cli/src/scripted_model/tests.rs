//! The server asked over HTTP, by the workers' own model client where that shows more.

mod checked;

use std::{sync::Mutex, time::Duration};

use axum::http::StatusCode;
use holdfast_engine::model::{Flavor, Message, ModelAnswer, ModelRequest, ModelTarget};
use holdfast_worker::model::{Backoff, HttpModelClient, ModelClient, ModelError};
use serde_json::{Value, json};
use tokio::{net::TcpListener, task::JoinHandle};
use tokio_util::sync::CancellationToken;

use super::{Script, serve};

/// How long anything may take before it counts as stuck.
const PATIENCE: Duration = Duration::from_secs(60);

struct Running {
    base: String,
    shutdown: CancellationToken,
    task: JoinHandle<std::io::Result<()>>,
}

impl Running {
    async fn new(script: &Value) -> Self {
        // Another test may have installed it already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let script = Script::parse(&script.to_string()).expect("a script");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let base = format!("http://{}", listener.local_addr().expect("an address"));
        let shutdown = CancellationToken::new();
        let task = tokio::spawn(serve(script, listener, shutdown.clone()));
        Self { base, shutdown, task }
    }

    /// Sends a request, with what every request must have where it lacks it.
    async fn post(&self, path: &str, body: &Value) -> reqwest::Response {
        let mut body = body.clone();
        for (field, value) in [("model", json!("m")), ("max_tokens", json!(9))] {
            if body[field].is_null() {
                body[field] = value;
            }
        }
        self.post_as_it_is(path, &body).await
    }

    async fn post_as_it_is(&self, path: &str, body: &Value) -> reqwest::Response {
        let url = format!("{}{path}", self.base);
        reqwest::Client::new().post(url).json(body).send().await.expect("an answer")
    }

    async fn requests(&self) -> Value {
        reqwest::get(format!("{}/requests", self.base)).await.expect("an answer").json().await.expect("JSON")
    }

    async fn ask(&self, flavor: Flavor, messages: Vec<Message>, streamed: bool) -> Asked {
        let target = ModelTarget {
            flavor,
            base_url: format!("{}/v1", self.base),
            model: "m".into(),
            temperature: None,
            max_output_tokens: None,
            extra_body: None,
        };
        let request = ModelRequest {
            system: std::sync::Arc::default(),
            tools: std::sync::Arc::default(),
            messages: messages.into_iter().map(Into::into).collect(),
        };
        let (said, backoffs) = (Mutex::new(String::new()), Mutex::new(Vec::new()));
        let result = {
            let deltas = |text: &str| said.lock().expect("no panic").push_str(text);
            let deltas: Option<&(dyn Fn(&str) + Send + Sync)> = if streamed { Some(&deltas) } else { None };
            let on_backoff = |backoff| backoffs.lock().expect("no panic").push(backoff);
            let client = HttpModelClient::new().expect("a client");
            let client = client.with_pauses(Duration::from_millis(1), Duration::from_millis(2));
            client.complete(&target, None, &request, deltas, &on_backoff).await
        };
        Asked {
            result,
            said: said.into_inner().expect("no panic"),
            backoffs: backoffs.into_inner().expect("no panic"),
        }
    }

    async fn stop(self) {
        self.shutdown.cancel();
        self.task.await.expect("no panic").expect("stopped");
    }
}

struct Asked {
    result: Result<ModelAnswer, ModelError>,
    said: String,
    backoffs: Vec<Backoff>,
}

fn user(text: &str) -> Message {
    Message::User { text: text.into(), media: vec![] }
}

#[tokio::test]
async fn a_round_of_calls_in_every_way_of_asking() {
    let script = json!({ "rules": [
        { "when": { "turn": 0 }, "reply": {
            "text": "let me  look", "thinking": "a door, hm",
            "tool_calls": [
                { "name": "look", "arguments": { "at": "{{last}}", "n": 1 } },
                { "name": "look", "arguments": "not json {", "id": "mine" },
            ],
            "usage": { "input_tokens": 10, "output_tokens": 3, "cached_tokens": 4 },
            "raw": { "reasoning_details": [{ "type": "x" }] },
        } },
        { "when": { "turn": 1, "last": { "role": "tool" } }, "reply": { "text": "it is {{tool_result:look}}" } },
    ] });
    for (flavor, streamed) in [
        (Flavor::OpenAIv1, false),
        (Flavor::OpenAIv1, true),
        (Flavor::Anthropic, false),
        (Flavor::Anthropic, true),
    ] {
        let running = Running::new(&script).await;
        let asked = running.ask(flavor, vec![user("the door")], streamed).await;
        let answer = asked.result.expect("an answer");
        assert_eq!(asked.said, if streamed { "let me  look" } else { "" });
        assert_eq!(answer.text.as_deref(), Some("let me  look"));
        assert_eq!(answer.thinking.as_deref(), Some("a door, hm"));
        let ids: Vec<_> = answer.calls.iter().map(|call| &*call.provider_id).collect();
        assert_eq!(ids, ["call_0_0", "mine"]);
        let arguments: Value = serde_json::from_str(&answer.calls[0].arguments).expect("JSON");
        assert_eq!(arguments, json!({ "at": "the door", "n": 1 }));
        assert!(answer.calls[1].arguments.contains("not json {"), "{}", answer.calls[1].arguments);
        let usage = answer.usage.expect("counted");
        assert_eq!((usage.input_tokens, usage.output_tokens, usage.cached_tokens), (10, 3, 4));
        let kept = answer.raw.as_ref().is_some_and(|raw| raw.get().contains("reasoning_details"));
        assert_eq!(kept, flavor == Flavor::OpenAIv1);

        let results = answer.calls.iter().zip(["red", "blue"]).map(|(call, text)| Message::Tool {
            provider_id: call.provider_id.clone(),
            name: call.name.clone(),
            text: text.into(),
            media: vec![],
        });
        let (text, calls, raw) = (answer.text.clone(), answer.calls.clone(), answer.raw.clone());
        let mut messages = vec![user("the door"), Message::Assistant { text, calls, flavor, raw }];
        messages.extend(results);
        let asked = running.ask(flavor, messages, streamed).await;
        assert_eq!(asked.result.expect("an answer").text.as_deref(), Some("it is blue"), "{flavor:?}");

        let requests = running.requests().await;
        let rules: Vec<_> =
            requests.as_array().expect("a list").iter().map(|request| &request["rule"]).collect();
        assert_eq!(rules, [1, 2]);
        assert_eq!(requests[1]["body"]["model"], "m");
        running.stop().await;
    }
}

#[tokio::test]
async fn failures_pass_when_their_times_are_over() {
    let script = json!({ "rules": [
        { "when": { "times": 1 }, "reply": { "status": 429, "error": "slow down" } },
        { "when": { "times": 1 }, "reply": { "text": "a b c", "break_stream_after": 2 } },
        { "when": { "times": 1 }, "reply": { "error": "upstream" } },
        { "reply": { "text": "done", "delay_ms": 1 } },
    ] });
    for (flavor, streamed, said) in
        [(Flavor::OpenAI, true, "a done"), (Flavor::OpenAI, false, ""), (Flavor::Anthropic, true, "done")]
    {
        let running = Running::new(&script).await;
        let asked = running.ask(flavor, vec![user("x")], streamed).await;
        assert_eq!(asked.result.expect("an answer").text.as_deref(), Some("done"));
        assert_eq!(asked.backoffs.len(), 3);
        assert_eq!(asked.said, said);
        running.stop().await;
    }
}

#[tokio::test]
async fn an_error_has_its_status_and_its_pause() {
    let reply = json!({ "status": 529, "retry_after": 7, "error": "no {{last}}" });
    let running = Running::new(&json!({ "rules": [{ "reply": reply }] })).await;
    let body = json!({ "messages": [{ "role": "user", "content": "way" }] });
    for path in ["/chat/completions", "/messages"] {
        let response = running.post(path, &body).await;
        assert_eq!(
            (response.status().as_u16(), response.headers()["retry-after"].to_str().ok()),
            (529, Some("7"))
        );
        let body: Value = response.json().await.expect("JSON");
        assert_eq!(body.pointer("/error/message"), Some(&json!("no way")));
    }
    running.stop().await;
}

#[tokio::test]
async fn what_fits_no_rule_is_refused_with_the_reasons() {
    let running = Running::new(&json!({ "rules": [{ "when": { "turn": 3 }, "reply": {} }, { "when": { "last": "y" }, "reply": {} }] })).await;
    let error =
        running.ask(Flavor::OpenAI, vec![user("x")], false).await.result.expect_err("refused").to_string();
    assert!(error.contains("rule 1: the turn is not 3; rule 2: the last message lacks \"y\""), "{error}");
    assert_eq!(running.requests().await[0]["rule"], Value::Null);
    for (path, body, status) in [
        ("/nothing", json!({}), StatusCode::NOT_FOUND),
        ("/any/prefix/chat/completions", json!({ "messages": [] }), StatusCode::BAD_REQUEST),
    ] {
        assert_eq!(running.post(path, &body).await.status(), status);
    }
    running.stop().await;
}

#[tokio::test]
async fn usage_is_streamed_only_when_asked_for() {
    let running = Running::new(&json!({ "rules": [{ "reply": { "text": "a b" } }] })).await;
    let mut body = json!({ "stream": true, "messages": [{ "role": "user", "content": "12345" }] });
    let text = running.post("/v1/chat/completions", &body).await.text().await.expect("text");
    assert!(!text.contains("usage") && text.ends_with("data: [DONE]\n\n"), "{text}");
    assert!(text.contains(r#""content":"a "#) && text.contains(r#""content":"b""#), "{text}");
    body["stream_options"] = json!({ "include_usage": true });
    let text = running.post("/v1/chat/completions", &body).await.text().await.expect("text");
    assert!(text.contains(r#""prompt_tokens":2"#), "{text}");
    running.stop().await;
}

#[tokio::test]
async fn a_hanging_answer_does_not_hold_the_server() {
    let running = Running::new(&json!({ "rules": [
        { "when": { "last": "whole" }, "reply": { "hang": true } },
        { "reply": { "text": "a b c", "hang": true, "break_stream_after": 2 } },
    ] }))
    .await;
    let body = |text| json!({ "stream": true, "messages": [{ "role": "user", "content": text }] });
    let mut silent = running.post("/chat/completions", &body("part")).await;
    assert!(silent.chunk().await.expect("bytes").is_some());
    let (base, mut asked) = (running.base.clone(), body("whole"));
    asked["model"] = json!("m");
    let hanging = tokio::spawn(async move {
        reqwest::Client::new().post(format!("{base}/chat/completions")).json(&asked).send().await
    });
    // The second request is noted once it is being answered, or rather not answered.
    while running.requests().await.as_array().map(Vec::len) != Some(2) {
        tokio::task::yield_now().await;
    }
    running.stop().await;
    assert_eq!(
        hanging.await.expect("no panic").expect("an answer").status(),
        StatusCode::SERVICE_UNAVAILABLE
    );
}

#[tokio::test]
async fn requests_are_recorded_in_the_file() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("requests.jsonl");
    let running = Running::new(&json!({ "rules": [{ "reply": { "text": "ok" } }], "record": file })).await;
    for text in ["one", "two"] {
        let body = json!({ "messages": [{ "role": "user", "content": text }] });
        assert_eq!(running.post("/messages", &body).await.status(), StatusCode::OK);
    }
    running.stop().await;
    let text = std::fs::read_to_string(&file).expect("the file");
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!((&lines[0]["seq"], &lines[1]["seq"], lines.len()), (&json!(1), &json!(2), 2));
    assert_eq!(lines[1]["body"]["messages"][0]["content"], "two");
    assert_eq!(lines[1]["path"], "/messages");
}

#[tokio::test]
async fn a_held_answer_waits_until_it_is_released() {
    let running = Running::new(&json!({ "rules": [{ "reply": { "text": "ok", "hold": "gate-1" } }] })).await;
    let base = running.base.clone();
    let held = async || {
        let answer = reqwest::get(format!("{base}/held")).await.expect("an answer");
        answer.json::<Vec<Value>>().await.expect("a list")
    };
    let until = async |count| {
        let waiting = async {
            while held().await.len() != count {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(PATIENCE, waiting).await.expect("so many wait");
    };
    let ask = || {
        let (client, url) = (reqwest::Client::new(), format!("{base}/chat/completions"));
        let body = json!({ "model": "m", "messages": [{ "role": "user", "content": "hi" }] });
        tokio::spawn(async move { client.post(url).json(&body).send().await.map(|answer| answer.status()) })
    };
    until(0).await;
    let (first, given_up) = (ask(), ask());
    until(2).await;
    assert!(held().await.iter().all(|held| held["name"] == "gate-1") && !given_up.is_finished());
    given_up.abort();
    until(1).await;
    assert!(!first.is_finished());
    let release =
        async |name: &str| running.post_as_it_is(&format!("/release/{name}"), &json!({})).await.status();
    assert_eq!(release("gate-2").await, StatusCode::NOT_FOUND);
    assert_eq!(held().await.len(), 1);
    assert_eq!(release("gate-1").await, StatusCode::OK);
    assert_eq!(first.await.expect("no panic").expect("an answer"), StatusCode::OK);
    until(0).await;
    // Once released, it stays so.
    assert_eq!(ask().await.expect("no panic").expect("an answer"), StatusCode::OK);
    running.stop().await;
}
