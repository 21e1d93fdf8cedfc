//! Text that breaks naive stores: NUL, emoji, lone surrogates, long lines, bytes that are no UTF-8. It
//! comes through intact, or with a replacement that is said, and never wedges a session.

use std::sync::{Arc, Mutex};

use anyhow::{Context, Result, ensure};
use holdfast_tests::{
    cluster::fresh_database,
    sse::Follower,
    world::{AgentFiles, Model, World, answer, client, token},
};
use serde_json::{Value, json};

const SCRIPT: &str = r#"{"rules": [
    {"when": {"turn": 0}, "reply": {"text": "a\u0000b \ud83d\ude00", "tool_calls": [
        {"name": "bash_odd", "arguments": "{\"kind\": \"nul\"}"},
        {"name": "bash_odd", "arguments": "{\"kind\": \"emoji \ud83d\ude00\"}"},
        {"name": "bash_odd", "arguments": "{\"kind\": \"long\"}"},
        {"name": "bash_odd", "arguments": "{\"kind\": \"invalid\"}"},
        {"name": "bash_odd", "arguments": "{\"kind\": \"a\\u0000b\"}"},
        {"name": "bash_odd", "arguments": "{\"kind\": \"\\ud800\"}"},
        {"name": "bash_odd", "arguments": "not json \u0000"},
        {"name": "no\u0000tool", "arguments": "{}"},
        {"name": "outside", "arguments": "{}"}]}},
    {"when": {"turn": 1}, "reply": {"text": "seen"}},
    {"when": {}, "reply": {"text": "still here: {{last}}"}}
]}"#;

fn described() -> Value {
    json!({"slug": "odd", "description": "Prints odd text.", "args": [
        {"name": "kind", "description": "which", "type": "string", "backing_type": "string", "arity": "single", "mode": "positional"}]})
}

const ODD: &str = r#"case "$2" in
nul) printf 'a\0b' ;;
long) head -c 1048576 /dev/zero | tr '\0' x ;;
invalid) printf 'a\377\376b' ;;
*) printf '%s' "$2" ;;
esac"#;

async fn world(url: &str) -> Result<World> {
    let model = Model::start(SCRIPT).await?;
    let config = json!({"slug": "odd", "flavor": "OpenAI", "modelUrl": model.url, "modelName": "scripted", "toolDirectory": "tools",
        "toolCallPolicyConfig": {"rules": [{"tool": "outside", "disposition": {"tag": "defer", "reason": "a\u{0}b"}}]}});
    let agent = AgentFiles::with_tools(&config, &[("odd", described(), ODD)])?;
    Ok(World::new(url, model, agent))
}

#[tokio::test(flavor = "multi_thread")]
async fn odd_text_goes_through_message_tool_result_and_event() -> Result<()> {
    let database = fresh_database().await;
    let world = world(database.url()).await?;
    let (_api, api) = world.node("api", &[], &[]).await?;
    let (_worker, _) = world.node("worker", &[], &[]).await?;
    let prompt = format!("nul \u{0}, emoji 😀, {}", "y".repeat(1 << 20));
    let created = world
        .call(
            "POST",
            &format!("{api}/v1/sessions"),
            Some(&json!({"agent": "odd", "prompt": prompt, "labels": {"k": "v\u{0}😀"}})),
        )
        .await?;
    ensure!(created.0 == 201, "{created:?}");
    let id = created.1["session_id"].as_str().context("id")?.parse()?;
    let waiting = world.until(&api, id, "waiting_external").await?;
    let result = json!({"result": {"type": "json", "content": {"nul\u{0}": "😀\u{0}"}}});
    let url = format!("{api}/v1/continuations/{}", token(&waiting, "outside")?);
    ensure!(world.call("POST", &url, Some(&result)).await?.0 < 300);
    let view = world.until(&api, id, "idle").await?;
    ensure!(answer(&view)? == "seen", "{view}");

    let requests = world.model.requests().await?;
    let messages = requests.last().context("asked")?["messages"].as_array().cloned().context("messages")?;
    ensure!(
        messages.iter().any(|message| message["content"] == prompt.as_str()),
        "the message arrived whole"
    );
    let results: Vec<&str> = messages
        .iter()
        .filter(|message| message["role"] == "tool")
        .filter_map(|message| message["content"].as_str())
        .collect();
    ensure!(results.len() == 9, "{results:?}");
    ensure!(
        results[0].starts_with("a\u{FFFD}b") && results[0].len() > 6,
        "a replaced NUL is said: {:?}",
        results[0]
    );
    ensure!(results[1] == "emoji 😀", "{:?}", results[1]);
    ensure!(results[2].starts_with(&"x".repeat(1 << 20)), "a line of 1 MiB: {}", results[2].len());
    ensure!(results[3].starts_with("a\u{FFFD}") && results[3].contains("UTF-8"), "{:?}", results[3]);
    ensure!(
        results[4].starts_with("Error:")
            && results[5].starts_with("Error:")
            && results[6].starts_with("Error:"),
        "{:?}",
        &results[4..7]
    );
    ensure!(results[7].contains("bash_odd"), "an unknown tool is told the known ones: {:?}", results[7]);
    ensure!(results[8].contains("😀"), "{:?}", results[8]);

    let again = world
        .call(
            "POST",
            &format!("{api}/v1/sessions/{id}/messages?wait=true"),
            Some(&json!({"prompt": "\u{0}😀"})),
        )
        .await?;
    ensure!(answer(&again.1)? == "still here: \u{0}😀", "{}", again.1);
    let stream =
        Follower::start(Arc::new(Mutex::new(vec![api.clone()])), format!("/v1/sessions/{id}/events?after=0"));
    let frames =
        stream.until(|frames| frames.iter().filter(|frame| frame.kind == "run.stopped").count() >= 3).await?;
    let said = frames.iter().any(|frame| frame.data["head_turn"]["contents"]["llmResponse"] == "a\u{0}b 😀");
    ensure!(said, "events carry the text as it is");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_text_is_refused_and_leaves_nothing() -> Result<()> {
    let database = fresh_database().await;
    let world = world(database.url()).await?;
    let (_api, api) = world.node("api", &[], &[]).await?;
    let bodies: [(&str, &[u8]); 5] = [
        ("a lone surrogate", br#"{"agent": "odd", "prompt": "\ud800"}"#),
        ("bytes that are no UTF-8", b"{\"agent\": \"odd\", \"prompt\": \"\xff\"}"),
        ("an agent's name with NUL", br#"{"agent": "o\u0000dd", "prompt": "x"}"#),
        ("half an object", br#"{"agent": "odd""#),
        ("an unknown field", br#"{"agent": "odd", "prompt": "x", "promt": "y"}"#),
    ];
    for (what, body) in bodies {
        let request = client()
            .post(format!("{api}/v1/sessions"))
            .header("content-type", "application/json")
            .body(body.to_vec());
        let answer = request.send().await?;
        let status = answer.status().as_u16();
        let error: Value = answer.json().await?;
        ensure!(matches!(status, 400 | 404) && error["error"].is_string(), "{what}: {status} {error}");
    }
    let (_, list) = world.call("GET", &format!("{api}/v1/sessions"), None).await?;
    ensure!(list["sessions"] == json!([]), "{list}");
    Ok(())
}
