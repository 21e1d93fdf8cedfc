//! Repeats of a request, one after the other and all at once.

use std::collections::BTreeSet;

use axum::http::{Method, StatusCode};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::{
    hand::{calls, drive, says},
    support::{AGENT, Node, Reply, ask, by, with},
};

async fn keyed(node: &Node, key: &str, path: &str, body: Value) -> Reply {
    node.send(with(ask(Method::POST, path, Some(body)), "idempotency-key", key)).await
}

#[tokio::test]
async fn sixty_four_creations_with_one_key_are_one() {
    let node = Node::new().await;
    let body = json!({"agent": AGENT, "prompt": "x"});
    let all = (0..64).map(|_| keyed(&node, "one", "/v1/sessions", body.clone()));
    let replies = futures::future::join_all(all).await;
    let ids: BTreeSet<String> = replies
        .iter()
        .map(|reply| {
            assert_eq!(reply.status, StatusCode::CREATED, "{:?}", reply.bytes);
            reply.json()["session_id"].as_str().expect("an id").to_owned()
        })
        .collect();
    assert_eq!(ids.len(), 1);
    assert_eq!(node.get("/v1/sessions").await.json()["sessions"].as_array().map(Vec::len), Some(1));
}

#[tokio::test]
async fn sixty_four_messages_with_one_id_are_one() {
    let node = Node::new().await;
    let id = node.create(json!({})).await;
    let path = format!("/v1/sessions/{id}/messages");
    let body = json!({"prompt": "x", "message_id": Uuid::now_v7()});
    let replies = futures::future::join_all((0..64).map(|_| node.post(&path, body.clone()))).await;
    let receipts: Vec<Value> = replies.iter().map(|reply| reply.json()["receipt"].clone()).collect();
    assert!(receipts.iter().all(|receipt| receipt["seq"] == 1), "{receipts:?}");
    assert_eq!(receipts.iter().filter(|receipt| receipt["duplicate"] == false).count(), 1);
    let mail = node.get(&format!("/v1/sessions/{id}/mail")).await.json();
    assert_eq!(mail["mail"].as_array().map(Vec::len), Some(1));
}

#[tokio::test]
async fn a_repeat_answers_the_first_code_and_the_resource_as_it_is_now() {
    let node = Node::new().await;
    let id = node.create(json!({})).await;
    let path = format!("/v1/sessions/{id}/messages");
    let first = keyed(&node, "m", &path, json!({"prompt": "x"})).await;
    assert_eq!((first.status, &first.json()["status"]), (StatusCode::ACCEPTED, &json!("running")));
    drive(&node.store, vec![says("y")]).await;
    let repeat = keyed(&node, "m", &path, json!({"prompt": "x"})).await;
    assert_eq!((repeat.status, &repeat.json()["status"]), (StatusCode::ACCEPTED, &json!("idle")));
    assert_eq!(repeat.json()["receipt"]["id"], first.json()["receipt"]["id"]);
    assert_eq!(repeat.json()["receipt"]["duplicate"], true);
    let waits = keyed(&node, "m", &format!("{path}?wait"), json!({"prompt": "x"})).await;
    assert_eq!(waits.json()["receipt"]["seq"], 1, "the query isn't part of the request");

    for (path, body) in
        [(path.clone(), json!({"prompt": "z"})), (format!("/v1/sessions/{id}/resume"), json!({}))]
    {
        let reply = keyed(&node, "m", &path, body).await;
        assert_eq!(reply.refusal(), (422, "idempotency_mismatch".to_owned()));
    }
}

#[tokio::test]
async fn every_command_takes_a_key() {
    let node = Node::new().await;
    let id = node.create(json!({"prompt": "x"})).await;
    let of = |command: &str| format!("/v1/sessions/{id}/{command}");
    for _ in 0..2 {
        let reply =
            keyed(&node, "mail", &of("mail"), json!({"body": {"tag": "userMessage", "query": "q"}})).await;
        assert_eq!((reply.status, &reply.json()["seq"]), (StatusCode::ACCEPTED, &json!(2)));
    }
    drive(&node.store, vec![calls(&[("c1", "ask_person", "{}")])]).await;
    let pending = node.get(&of("pending")).await.json();
    let token = pending["calls"][0]["continuation_token"].as_str().expect("a token").to_owned();
    let path = format!("/v1/continuations/{token}");
    for _ in 0..2 {
        let reply = keyed(&node, "complete", &path, json!({"result": "r", "resume": true})).await;
        assert_eq!((reply.status, &reply.json()["session_id"]), (StatusCode::ACCEPTED, &json!(id)));
    }
    drive(&node.store, vec![says("y")]).await;
    for _ in 0..2 {
        let reply = keyed(&node, "resume", &of("resume"), json!({})).await;
        assert_eq!(reply.status, StatusCode::ACCEPTED, "{:?}", reply.bytes);
    }
    let (cancel, pause) = (of("cancel"), of("pause"));
    let (one, ()) = tokio::join!(keyed(&node, "cancel", &cancel, json!({})), drive(&node.store, Vec::new()));
    let two = keyed(&node, "cancel", &of("cancel"), json!({})).await;
    assert_eq!((one.status, two.status), (StatusCode::OK, StatusCode::OK));
    let (one, ()) = tokio::join!(keyed(&node, "pause", &pause, json!({})), drive(&node.store, Vec::new()));
    let two = keyed(&node, "pause", &of("pause"), json!({})).await;
    assert_eq!((one.status, &two.json()["status"]), (StatusCode::OK, &json!("paused")));
}

#[tokio::test]
async fn errors_arent_kept_and_keys_belong_to_owners() {
    let node = Node::with_tokens().await;
    let create = |token: &str, agent: &str| {
        let request = by(ask(Method::POST, "/v1/sessions", Some(json!({"agent": agent}))), token);
        node.send(with(request, "idempotency-key", "k"))
    };
    assert_eq!(create("alice-token", "nobody").await.refusal(), (404, "unknown_agent".to_owned()));
    let alice = create("alice-token", AGENT).await;
    let bob = create("bob-token", AGENT).await;
    assert_eq!((alice.status, bob.status), (StatusCode::CREATED, StatusCode::CREATED));
    assert_ne!(alice.json()["session_id"], bob.json()["session_id"]);
}

#[tokio::test]
async fn sixty_four_completions_are_one() {
    let node = Node::new().await;
    let id = node.create(json!({"prompt": "x"})).await;
    drive(&node.store, vec![calls(&[("c1", "ask_person", "{}")])]).await;
    let pending = node.get(&format!("/v1/sessions/{id}/pending")).await.json();
    let path =
        format!("/v1/continuations/{}", pending["calls"][0]["continuation_token"].as_str().expect("a token"));
    let all = (0..64).map(|n| node.post(&path, json!({"result": format!("{n}")})));
    let replies = futures::future::join_all(all).await;
    assert_eq!(replies.iter().filter(|reply| reply.status == StatusCode::ACCEPTED).count(), 1);
    assert_eq!(replies.iter().filter(|reply| reply.status == StatusCode::CONFLICT).count(), 63);
    let mail = node.get(&format!("/v1/sessions/{id}/mail")).await.json();
    assert_eq!(mail["mail"].as_array().map(Vec::len), Some(2), "the prompt and one result");
}
