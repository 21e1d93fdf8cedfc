//! The mailbox.

use axum::http::StatusCode;
use holdfast_engine::waking::{WakeClass, Waking};
use holdfast_store::agents::{self, Record};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::{
    hand::{calls, claim, drive, says},
    support::{AGENT, Node},
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
        json!({"tag": "control", "message": {"tag": "stopRun", "bogus": 1}}),
        json!({"tag": "control", "message": {"tag": "pause", "toolCallIds": []}}),
        json!({"tag": "control", "message": {"tag": "resume", "mode": "step"}}),
        json!({"tag": "control", "message": {"tag": "cancelAllAttached", "x": null}}),
        json!({"tag": "control", "message": ["stopRun"]}),
        json!({"tag": "userMessage", "query": ["text", []]}),
        json!({"tag": "userMessage", "query": {"text": "t", "media": [["image/png", "AAAA", "a.png"]]}}),
        json!(["userMessage", {"query": "q"}]),
        json!(["userMessage", "q"]),
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

#[tokio::test]
async fn texts_that_stay_inline_are_bounded() {
    let node = Node::new().await;
    let id = node.create(json!({})).await;
    let path = format!("/v1/sessions/{id}/mail");
    let letter = |bytes: usize| json!({"body": {"tag": "agentMessage", "text": "x".repeat(bytes)}});
    assert_eq!(node.post(&path, letter(65_536)).await.status, StatusCode::ACCEPTED);
    let reply = node.post(&path, letter(65_537)).await;
    assert_eq!(reply.refusal(), (400, "bad_request".to_owned()));
    assert!(reply.json()["message"].as_str().is_some_and(|message| message.contains("65536")));

    let id = node.create(json!({"prompt": "x"})).await;
    drive_one(&node, &id, "ask_person").await;
    let pending = node.get(&format!("/v1/sessions/{id}/pending")).await.json();
    let token = pending["calls"][0]["continuation_token"].as_str().expect("a token").to_owned();
    let path = format!("/v1/continuations/{token}");
    let reply = node.post(&path, json!({"error": "x".repeat(65_537)})).await;
    assert_eq!(reply.refusal(), (400, "bad_request".to_owned()));
    assert!(reply.json()["message"].as_str().is_some_and(|message| message.contains("65536")));
    assert_eq!(node.post(&path, json!({"error": "x".repeat(65_536)})).await.status, StatusCode::ACCEPTED);
}

/// Drives the runs that are due until the session has asked for a call.
async fn drive_one(node: &Node, id: &str, tool: &str) {
    loop {
        let held = claim(&node.store).await;
        let ours = held.session().to_string() == id;
        held.drive(vec![if ours { calls(&[("c1", tool, "{}")]) } else { says("read") }]).await;
        if ours {
            return;
        }
    }
}

#[tokio::test]
async fn a_page_of_mail_is_bounded_by_what_stands_in_it() {
    let node = Node::new().await;
    let id = node.create(json!({})).await;
    let path = format!("/v1/sessions/{id}/mail");
    for _ in 0..4 {
        let body = json!({"body": {"tag": "agentMessage", "text": "short"}});
        assert_eq!(node.post(&path, body).await.status, StatusCode::ACCEPTED);
    }
    let count = async || node.get(&path).await.json()["mail"].as_array().map(Vec::len);
    assert_eq!(count().await, Some(4));
    // As they could be sent once.
    let grow = format!(
        "UPDATE mail SET body = replace(body, '\"short\"', '\"' || repeat('x', 30000000) || '\"')
         WHERE session_id = '{id}'"
    );
    let client = node.client().await;
    client.batch_execute(&grow).await.expect("grown");
    assert_eq!(count().await, Some(2), "what fits into 64 MiB");
    let more =
        format!("UPDATE mail SET body = replace(body, 'xxxx', 'xxxxxxxxxxxx') WHERE session_id = '{id}'");
    client.batch_execute(&more).await.expect("grown");
    assert_eq!(count().await, Some(1), "one letter always does");
}

/// Records the agent anew, with other terms for its mail.
async fn waking(node: &Node, wake_on: Vec<WakeClass>, resume_on_any_mail: bool) {
    let waking = Waking { wake_on, resume_on_any_mail };
    let agent = Record { slug: AGENT, revision: "r1", descriptor: "{}", waking: &waking };
    agents::record(&node.store, &agent).await.expect("recorded");
}

#[tokio::test]
async fn agents_decide_whether_what_clients_say_starts_a_run() {
    let node = Node::new().await;
    let letters = [
        json!({"body": {"tag": "userMessage", "query": "hello"}}),
        json!({"body": {"tag": "agentMessage", "text": "hello"}}),
    ];
    let others = vec![WakeClass::Tool, WakeClass::Parent, WakeClass::Child, WakeClass::Peer];
    for (classes, status) in [(others, "ready"), (vec![WakeClass::User], "running")] {
        waking(&node, classes, false).await;
        for letter in &letters {
            let id = node.create(json!({})).await;
            let reply = node.post(&format!("/v1/sessions/{id}/mail"), letter.clone()).await;
            assert_eq!(reply.status, StatusCode::ACCEPTED, "{letter}");
            let session = node.get(&format!("/v1/sessions/{id}")).await.json();
            assert_eq!(session["status"], status, "{letter}");
        }
    }
    // Messages and orders don't ask the agent.
    waking(&node, Vec::new(), false).await;
    let id = node.create(json!({})).await;
    node.post(&format!("/v1/sessions/{id}/messages"), json!({"prompt": "hello"})).await;
    assert_eq!(node.get(&format!("/v1/sessions/{id}")).await.json()["status"], "running");
    let id = node.create(json!({})).await;
    let order = json!({"body": {"tag": "control", "message": {"tag": "resume"}}});
    node.post(&format!("/v1/sessions/{id}/mail"), order).await;
    assert_eq!(node.get(&format!("/v1/sessions/{id}")).await.json()["status"], "running");
}

#[tokio::test]
async fn any_mail_resumes_a_paused_session_where_its_agent_says_so() {
    let node = Node::new().await;
    for (resume, status) in [(false, "paused"), (true, "running")] {
        waking(&node, Vec::new(), resume).await;
        let id = node.create(json!({})).await;
        let paused = node.post(&format!("/v1/sessions/{id}/pause"), json!({})).await;
        assert!(paused.status.is_success(), "{:?}", paused.bytes);
        drive(&node.store, Vec::new()).await;
        let path = format!("/v1/sessions/{id}");
        assert_eq!(node.get(&path).await.json()["status"], "paused");
        let letter = json!({"body": {"tag": "agentMessage", "text": "get up"}});
        assert_eq!(node.post(&format!("{path}/mail"), letter).await.status, StatusCode::ACCEPTED);
        assert_eq!(node.get(&path).await.json()["status"], status);
    }
}

#[tokio::test]
async fn interrupt_is_another_word_for_high() {
    let node = Node::new().await;
    let path = format!("/v1/sessions/{}/mail", node.create(json!({})).await);
    for priority in ["interrupt", "high", "normal"] {
        let letter = json!({"body": {"tag": "userMessage", "query": "q"}, "priority": priority});
        assert_eq!(node.post(&path, letter).await.status, StatusCode::ACCEPTED, "{priority}");
    }
    let unknown = json!({"body": {"tag": "userMessage", "query": "q"}, "priority": "urgent"});
    assert_eq!(node.post(&path, unknown).await.refusal(), (400, "bad_request".to_owned()));
    let mail = node.get(&path).await.json()["mail"].clone();
    let kept: Vec<&Value> = (0..3).map(|place| &mail[place]["priority"]).collect();
    assert_eq!(kept, ["high", "high", "normal"]);
}
