//! The canonical flow: start, defer, complete, go on.

use std::collections::BTreeMap;

use axum::http::{Method, StatusCode};
use serde_json::{Value, json};

use crate::{
    hand::{calls, drive, says},
    support::{AGENT, Node, ask, with},
};

#[tokio::test]
async fn a_session_without_a_message_is_ready_and_nothing_runs() {
    let node = Node::new().await;
    let reply = node.post("/v1/sessions?wait", json!({"agent": AGENT, "labels": {"team": "blue"}})).await;
    assert_eq!(reply.status, StatusCode::CREATED);
    let view = reply.json();
    let id = view["session_id"].as_str().expect("an id");
    assert_eq!(reply.header("location"), Some(format!("/v1/sessions/{id}").as_str()));
    for (field, value) in [
        ("status", json!("ready")),
        ("agent", json!(AGENT)),
        ("agent_revision", json!("r1")),
        ("owner", Value::Null),
        ("parent_session_id", Value::Null),
        ("labels", json!({"team": "blue"})),
        ("params", json!({})),
        ("secret_params", json!([])),
        ("sealed", json!(false)),
        ("pending", json!([])),
        ("parked_on", Value::Null),
        ("wakes_at", Value::Null),
    ] {
        assert_eq!(view[field], value, "{field}");
    }
    let session = json!({"sessionId": id, "forkedFromSessionId": null, "turnId": null, "sessionVersion": 2, "turns": []});
    assert_eq!(view["session"], session);
    assert_eq!(node.get(&format!("/v1/sessions/{id}")).await.json(), view);
}

#[tokio::test]
async fn a_deferred_call_is_completed_and_the_session_goes_on() {
    let node = Node::new().await;
    let body = json!({"agent": AGENT, "prompt": "Deploy?", "run": "until_blocked"});
    let asks = calls(&[("c1", "ask_person", r#"{"what": "deploy"}"#), ("c2", "look", "{}")]);
    let (reply, ()) =
        tokio::join!(node.post("/v1/sessions?wait=true&timeout=20", body), drive(&node.store, vec![asks]));
    let view = reply.json();
    assert_eq!((reply.status, view["status"].as_str()), (StatusCode::CREATED, Some("waiting_external")));
    let id = view["session_id"].as_str().expect("an id").to_owned();

    let turns = view["session"]["turns"].as_array().expect("turns");
    assert_eq!(turns.len(), 2);
    assert_eq!((turns[0]["tag"].as_str(), turns[1]["tag"].as_str()), (Some("LlmTurn"), Some("UserTurn")));
    assert_eq!(view["session"]["turnId"], turns[0]["id"]);
    assert_eq!(turns[1]["contents"]["userPrompt"], json!({"systemPrompt": "Help.\n\nBe kind."}));
    assert_eq!(turns[1]["contents"]["userQuery"], json!({"text": "Deploy?", "media": []}));
    assert_eq!(turns[1]["contents"]["userToolResponses"], json!([]));
    assert_eq!(turns[1]["contents"]["userMail"][0]["tag"], "userMessage");
    let asked = json!({"id": "c1", "type": "function", "function": {"name": "ask_person", "arguments": r#"{"what": "deploy"}"#}});
    assert_eq!(turns[0]["contents"]["llmToolCalls"][0], asked);

    let pending = &view["pending"][0];
    assert_eq!(view["pending"].as_array().map(Vec::len), Some(1));
    assert_eq!(
        (&pending["tool"], &pending["reason"], &pending["call"]),
        (&json!("ask_person"), &json!("somebody decides"), &asked)
    );
    let states: BTreeMap<&str, &str> = view["calls"]
        .as_array()
        .expect("calls")
        .iter()
        .map(|call| (call["id"].as_str().expect("an id"), call["state"].as_str().expect("a state")))
        .collect();
    assert_eq!(states, BTreeMap::from([("c1", "deferred"), ("c2", "completed")]));
    assert_eq!(view["calls"][1]["result"], json!({"type": "text", "content": "done"}));

    let token = pending["continuation_token"].as_str().expect("a token");
    let of_session = node.get(&format!("/v1/sessions/{id}/pending")).await.json();
    let across = node.get("/v1/pending?tool=ask_person").await.json();
    let one = node.get(&format!("/v1/continuations/{token}")).await.json();
    assert_eq!((&of_session["calls"][0], &across["calls"][0], &one), (pending, pending, pending));
    assert_eq!(node.get("/v1/pending?tool=other").await.json(), json!({"calls": []}));

    let path = format!("/v1/continuations/{token}?wait&timeout=20");
    let (done, ()) =
        tokio::join!(node.post(&path, json!({"result": "yes"})), drive(&node.store, vec![says("Deployed.")]));
    let view = done.json();
    assert_eq!((done.status, view["status"].as_str()), (StatusCode::OK, Some("idle")));
    let responses = &view["session"]["turns"][1]["contents"]["userToolResponses"];
    assert_eq!(responses[0], json!([asked, {"type": "text", "content": "yes"}]));
    assert_eq!(view["session"]["turns"][0]["contents"]["llmResponse"], "Deployed.");
    assert_eq!((&view["calls"], &view["pending"]), (&json!([]), &json!([])));

    let again = node.post(&format!("/v1/continuations/{token}"), json!({"result": "yes"})).await;
    assert_eq!(again.refusal(), (409, "token_already_completed".to_owned()));
    assert_eq!(again.json()["same_result"], true);
    let rival = node.post(&format!("/v1/continuations/{token}"), json!({"error": "no"})).await;
    assert_eq!(rival.json()["same_result"], false);
    assert_eq!(node.get(&format!("/v1/continuations/{token}")).await.json()["state"], "completed");
}

#[tokio::test]
async fn cancel_ends_the_run_and_with_deferred_the_open_calls() {
    let node = Node::new().await;
    let id = node.create(json!({"prompt": "x"})).await;
    let path = format!("/v1/sessions/{id}/cancel");
    let (reply, ()) = tokio::join!(node.send(ask(Method::POST, &path, None)), drive(&node.store, Vec::new()));
    assert_eq!((reply.status, reply.json()["status"].as_str()), (StatusCode::OK, Some("ready")));
    let none = node.send(ask(Method::POST, &path, None)).await;
    assert_eq!(none.refusal(), (409, "no_active_run".to_owned()));

    let resume = format!("/v1/sessions/{id}/resume?wait&timeout=20");
    let asks = calls(&[("c1", "ask_person", "{}")]);
    let (reply, ()) =
        tokio::join!(node.send(ask(Method::POST, &resume, None)), drive(&node.store, vec![asks]));
    assert_eq!((reply.status, reply.json()["status"].as_str()), (StatusCode::OK, Some("waiting_external")));
    let token = reply.json()["pending"][0]["continuation_token"].as_str().expect("a token").to_owned();
    assert_eq!(node.send(ask(Method::POST, &path, None)).await.refusal(), (409, "no_active_run".to_owned()));
    let (reply, ()) =
        tokio::join!(node.post(&path, json!({"deferred": true})), drive(&node.store, Vec::new()));
    assert_eq!(reply.status, StatusCode::OK);
    let late = node.post(&format!("/v1/continuations/{token}"), json!({"result": "late"})).await;
    assert_eq!(late.refusal(), (409, "token_cancelled".to_owned()));
}

#[tokio::test]
async fn an_overdue_token_is_expired_by_whoever_meets_it() {
    let node = Node::new().await;
    let id = node.create(json!({"prompt": "x"})).await;
    drive(&node.store, vec![calls(&[("c1", "ask_soon_person", "{}")])]).await;
    let path = format!("/v1/sessions/{id}/pending");
    let token = node.get(&path).await.json()["calls"][0]["continuation_token"].as_str().map(str::to_owned);
    let path = format!("/v1/continuations/{}", token.expect("a token"));
    let sql = "UPDATE continuations SET expires_at = now() - interval '1 second'";
    node.client().await.execute(sql, &[]).await.expect("overdue");
    assert_eq!(node.get(&path).await.json()["state"], "expired");
    for _ in 0..2 {
        let late = ask(Method::POST, &path, Some(json!({"result": "late"})));
        let reply = node.send(with(late, "idempotency-key", "k")).await;
        assert_eq!(reply.refusal(), (410, "token_expired".to_owned()), "a repeat is no success either");
    }
}

#[tokio::test]
async fn pause_holds_and_resume_goes_on() {
    let node = Node::new().await;
    let id = node.create(json!({"prompt": "x"})).await;
    let pause = format!("/v1/sessions/{id}/pause");
    let (reply, ()) =
        tokio::join!(node.send(ask(Method::POST, &pause, None)), drive(&node.store, Vec::new()));
    assert_eq!((reply.status, reply.json()["status"].as_str()), (StatusCode::OK, Some("paused")));
    let resume = format!("/v1/sessions/{id}/resume");
    let reply = node.post(&resume, json!({"mode": "step"})).await;
    assert_eq!((reply.status, reply.json()["status"].as_str()), (StatusCode::ACCEPTED, Some("running")));
    assert_eq!(node.post(&resume, json!({})).await.refusal(), (409, "run_in_progress".to_owned()));
    drive(&node.store, vec![says("one step")]).await;
    assert_eq!(node.get(&format!("/v1/sessions/{id}")).await.json()["status"], "idle");
}

#[tokio::test]
async fn a_busy_session_takes_messages_as_mail() {
    let node = Node::new().await;
    let id = node.create(json!({"prompt": "one"})).await;
    let reply = node.post(&format!("/v1/sessions/{id}/messages"), json!({"prompt": "two"})).await;
    assert_eq!(reply.status, StatusCode::ACCEPTED);
    let receipt = reply.json()["receipt"].clone();
    assert!(receipt["seq"].as_i64().is_some_and(|seq| seq > 1), "{receipt}");
    assert_eq!(receipt["duplicate"], false);
    drive(&node.store, vec![says("both")]).await;
    let view = node.get(&format!("/v1/sessions/{id}")).await.json();
    assert_eq!(view["session"]["turns"][1]["contents"]["userQuery"]["text"], "one\n\ntwo");
}

#[tokio::test]
async fn a_message_that_starts_no_run_shows_once_it_is_folded() {
    let node = Node::new().await;
    let id = node.create(json!({})).await;
    let path = format!("/v1/sessions/{id}/messages");
    let body = json!({"prompt": "later", "run": "none"});
    let (reply, ()) = tokio::join!(node.post(&path, body), drive(&node.store, Vec::new()));
    assert_eq!(reply.status, StatusCode::OK);
    let view = reply.json();
    assert_eq!(view["status"], "ready");
    assert_eq!(view["session"]["turns"][0]["contents"]["userQuery"]["text"], "later");
}

#[tokio::test]
async fn deleting_takes_the_tree_and_says_so_before() {
    let node = Node::new().await;
    let parent = node.create(json!({})).await;
    let child = node.create(json!({"parent": parent})).await;
    let path = format!("/v1/sessions/{parent}");
    let dry = node.send(ask(Method::DELETE, &format!("{path}?dry_run"), None)).await;
    assert_eq!(dry.json(), json!({"sessions": [child, parent], "continuations": 0, "dry_run": true}));
    assert_eq!(node.get(&path).await.status, StatusCode::OK);
    let done = node.send(ask(Method::DELETE, &path, None)).await;
    assert_eq!(done.json(), json!({"sessions": [child, parent], "continuations": 0, "dry_run": false}));
    for id in [&parent, &child] {
        assert_eq!(
            node.get(&format!("/v1/sessions/{id}")).await.refusal(),
            (404, "unknown_session".to_owned())
        );
    }
}

#[tokio::test]
async fn agents_are_described() {
    let node = Node::new().await;
    let expected = json!({"slug": AGENT, "revision": "r1", "source": "file", "announce": "Helps.", "model": "m", "tools": []});
    assert_eq!(node.get("/v1/agents").await.json(), json!([expected]));
    assert_eq!(node.get(&format!("/v1/agents/{AGENT}")).await.json(), expected);
    for unknown in ["nobody", "a%00b", "%FF", &"x".repeat(200)] {
        let reply = node.get(&format!("/v1/agents/{unknown}")).await;
        assert_eq!(reply.refusal(), (404, "unknown_agent".to_owned()), "{unknown}");
    }
}
