//! Owners' limits over HTTP: for admins, and what their owners meet.

use axum::http::{Method, StatusCode};
use serde_json::json;

use crate::support::{AGENT, Node, ask, by};

const PATH: &str = "/v1/tenants/alice/limits";

#[tokio::test]
async fn admins_read_and_set_limits() {
    let node = Node::with_tokens().await;
    let none = json!({"owner": "alice", "max_running": null, "runs_per_minute": null, "max_queued": 100_000,
        "running": 0, "queued": 0});
    let read = || by(ask(Method::GET, PATH, None), "root-token");
    assert_eq!(node.send(read()).await.json(), none);
    let put = |body| by(ask(Method::PUT, PATH, Some(body)), "root-token");
    let reply = node.send(put(json!({"max_running": 4, "runs_per_minute": 600, "max_queued": 0}))).await;
    assert_eq!(reply.status, StatusCode::OK);
    let set = json!({"owner": "alice", "max_running": 4, "runs_per_minute": 600, "max_queued": 0,
        "running": 0, "queued": 0});
    assert_eq!(reply.json(), set);
    assert_eq!(node.send(read()).await.json(), set);
    // All are set at once: what isn't given falls away.
    assert_eq!(node.send(put(json!({}))).await.json(), none);
    for wrong in [
        json!({"max_running": -1}),
        json!({"max_queued": 1_000_001}),
        json!({"max_running": "1"}),
        json!({"running": 1}),
        json!([]),
    ] {
        assert_eq!(node.send(put(wrong)).await.refusal(), (400, "bad_request".to_owned()));
    }
    let long = format!("/v1/tenants/{}/limits", "x".repeat(201));
    assert_eq!(node.send(by(ask(Method::GET, &long, None), "root-token")).await.refusal().0, 404);
}

#[tokio::test]
async fn an_owner_whose_queue_is_full_is_told_when_to_come_back() {
    let node = Node::with_tokens().await;
    let put = ask(Method::PUT, PATH, Some(json!({"max_queued": 1})));
    assert_eq!(node.send(by(put, "root-token")).await.status, StatusCode::OK);
    let create =
        |token| by(ask(Method::POST, "/v1/sessions", Some(json!({"agent": AGENT, "prompt": "x"}))), token);
    assert_eq!(node.send(create("alice-token")).await.status, StatusCode::CREATED);
    let refused = node.send(create("alice-token")).await;
    assert_eq!(refused.refusal(), (429, "rate_limited".to_owned()));
    assert_eq!(refused.header("retry-after"), Some("5"));
    // Nothing was kept of it, nobody else is held up, and a session that doesn't run is no backlog.
    let read = by(ask(Method::GET, PATH, None), "root-token");
    assert_eq!(node.send(read).await.json()["queued"], 1);
    assert_eq!(node.send(create("bob-token")).await.status, StatusCode::CREATED);
    let idle = ask(Method::POST, "/v1/sessions", Some(json!({"agent": AGENT})));
    assert_eq!(node.send(by(idle, "alice-token")).await.status, StatusCode::CREATED);
}

#[tokio::test]
async fn without_tokens_the_one_owner_is_a_dash() {
    let node = Node::new().await;
    let put = |owner: &str| {
        ask(Method::PUT, &format!("/v1/tenants/{owner}/limits"), Some(json!({"max_running": 2})))
    };
    let reply = node.send(put("-")).await.json();
    assert_eq!((&reply["owner"], &reply["max_running"]), (&json!(""), &json!(2)));
    assert_eq!(node.send(put("alice")).await.refusal(), (404, "not_found".to_owned()));
}
