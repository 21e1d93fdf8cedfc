//! The mailbox.

use axum::http::StatusCode;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::{
    hand::{calls, drive, says},
    support::Node,
};

#[tokio::test]
async fn letters_are_kept_as_they_were_sent() {
    let node = Node::new().await;
    let id = node.create(json!({})).await;
    let path = format!("/v1/sessions/{id}/mail");
    let media = json!({"mime": "image/png", "base64": "AAAA", "filename": "a.png"});
    let letter = Uuid::now_v7();
    let bodies = [
        json!({"body": {"tag": "userMessage", "query": "hello"}, "id": letter}),
        json!({"body": {"tag": "userMessage", "query": {"text": "look", "media": [media]}}}),
        json!({"body": {"tag": "agentMessage", "text": "hi", "inReplyTo": letter, "expectsReply": true}, "priority": "high"}),
    ];
    for (seq, body) in (1..).zip(&bodies) {
        let reply = node.post(&path, body.clone()).await;
        assert_eq!(reply.status, StatusCode::ACCEPTED, "{:?}", reply.bytes);
        assert_eq!((&reply.json()["seq"], &reply.json()["duplicate"]), (&json!(seq), &json!(false)));
    }
    let again = node.post(&path, bodies[0].clone()).await;
    assert_eq!(again.json(), json!({"id": letter, "seq": 1, "duplicate": true}));

    let mail = node.get(&path).await.json()["mail"].clone();
    assert_eq!(mail[0]["body"], json!({"tag": "userMessage", "query": "hello"}));
    assert_eq!(mail[0]["from"], json!({"tag": "user"}));
    let kept = json!({"mimeType": "image/png", "base64Data": "AAAA", "filename": "a.png"});
    assert_eq!(mail[1]["body"]["query"], json!({"text": "look", "media": [kept]}));
    assert_eq!((&mail[2]["priority"], &mail[2]["body"]["expectsReply"]), (&json!("high"), &json!(true)));
    drive(&node.store, vec![says("read")]).await;
    assert_eq!(node.get(&format!("{path}?unread")).await.json(), json!({"mail": []}));
    assert_eq!(node.get(&format!("{path}?limit=2")).await.json()["mail"].as_array().map(Vec::len), Some(2));
}

#[tokio::test]
async fn clients_cant_write_what_only_the_engine_writes() {
    let node = Node::new().await;
    let id = node.create(json!({})).await;
    let path = format!("/v1/sessions/{id}/mail");
    let forged = [
        json!({"tag": "toolCallFinished", "toolCallId": Uuid::now_v7(), "settled": {"state": "failed", "message": "m"}}),
        json!({"tag": "continuationResult", "toolCallId": Uuid::now_v7(), "settled": {"state": "failed", "message": "m"}}),
        json!({"tag": "watchedEvent"}),
        json!({"tag": "userMessage", "query": {"$blob": "00".repeat(32), "bytes": 1}}),
        json!({"tag": "userMessage", "query": ""}),
        json!({"tag": "userMessage", "query": "q", "from": {"tag": "system", "source": "x"}}),
        json!({"tag": "control", "message": {"tag": "explode"}}),
        json!({"tag": "control", "message": {"tag": "cancelCalls", "toolCallIds": ["no-such-call"]}}),
        json!({}),
    ];
    for body in forged {
        let reply = node.post(&path, json!({"body": body})).await;
        assert_eq!(reply.refusal(), (400, "bad_request".to_owned()), "{body}");
    }
    let reply = node.post(&path, json!({"body": {"tag": "userMessage", "query": "q"}, "from": {}})).await;
    assert_eq!(reply.refusal(), (400, "bad_request".to_owned()));
    assert_eq!(node.get(&path).await.json(), json!({"mail": []}));
}

#[tokio::test]
async fn orders_are_obeyed() {
    let node = Node::new().await;
    let id = node.create(json!({"prompt": "x"})).await;
    let path = format!("/v1/sessions/{id}/mail");
    let order = |message: Value| json!({"body": {"tag": "control", "message": message}});
    drive(&node.store, vec![calls(&[("c1", "ask_person", "{}"), ("c2", "ask_other", "{}")])]).await;
    node.post(&path, order(json!({"tag": "cancelCalls", "toolCallIds": ["c2"]}))).await;
    drive(&node.store, Vec::new()).await;
    let view = node.get(&format!("/v1/sessions/{id}")).await.json();
    assert_eq!(view["pending"].as_array().map(Vec::len), Some(1));
    assert_eq!(view["pending"][0]["call"]["id"], "c1");
    assert_eq!(view["calls"][1]["state"], "cancelled");

    node.post(&path, order(json!({"tag": "pause"}))).await;
    drive(&node.store, Vec::new()).await;
    assert_eq!(node.get(&format!("/v1/sessions/{id}")).await.json()["status"], "paused");
    node.post(&path, order(json!({"tag": "resume"}))).await;
    drive(&node.store, Vec::new()).await;
    assert_eq!(node.get(&format!("/v1/sessions/{id}")).await.json()["status"], "waiting_external");
}
