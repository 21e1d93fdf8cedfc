//! Waiting, at whichever node, without holding anything.

use std::time::Duration;

use axum::http::StatusCode;
use serde_json::json;
use tokio::time::Instant;

use crate::{
    hand::{calls, claim, drive, says},
    support::Node,
};

#[tokio::test]
async fn a_wait_that_runs_out_answers_with_what_is_there() {
    let node = Node::new().await;
    let id = node.create(json!({"prompt": "x"})).await;
    let reply = node.get(&format!("/v1/sessions/{id}?wait=true&timeout=0.2")).await;
    assert_eq!((reply.status, reply.json()["status"].as_str()), (StatusCode::ACCEPTED, Some("running")));
    let unasked = node.get(&format!("/v1/sessions/{id}")).await;
    assert_eq!(unasked.status, StatusCode::OK, "who doesn't wait gets what is there");
    drive(&node.store, vec![says("y")]).await;
    let reply = node.get(&format!("/v1/sessions/{id}?wait")).await;
    assert_eq!((reply.status, reply.json()["status"].as_str()), (StatusCode::OK, Some("idle")));
}

#[tokio::test]
async fn any_node_wakes_whoever_waits() {
    let node = Node::new().await;
    let other = Node::on(&node.url, false, |_| {}).await;
    let id = node.create(json!({"prompt": "x"})).await;
    let path = format!("/v1/sessions/{id}?wait&timeout=25");
    let waits = (0..64).map(|n| if n % 2 == 0 { node.get(&path) } else { other.get(&path) });
    let (replies, ()) =
        tokio::join!(futures::future::join_all(waits), drive(&node.store, vec![says("done")]));
    for reply in replies {
        assert_eq!((reply.status, reply.json()["status"].as_str()), (StatusCode::OK, Some("idle")));
    }
}

#[tokio::test]
async fn a_run_that_sleeps_for_longer_isnt_waited_for() {
    let node = Node::new().await;
    let id = node.create(json!({"prompt": "x"})).await;
    claim(&node.store).await.park(3600).await;
    let begun = Instant::now();
    let reply = node.get(&format!("/v1/sessions/{id}?wait&timeout=25")).await;
    assert!(begun.elapsed() < Duration::from_secs(20), "it was waited for");
    let view = reply.json();
    assert_eq!((reply.status, view["status"].as_str()), (StatusCode::ACCEPTED, Some("running")));
    assert_eq!(view["parked_on"], "timer");
    assert!(view["wakes_at"].is_string());
}

#[tokio::test]
async fn closing_answers_those_who_wait() {
    let node = Node::new().await;
    let id = node.create(json!({"prompt": "x"})).await;
    let path = format!("/v1/sessions/{id}?wait&timeout=600");
    let close = async {
        tokio::task::yield_now().await;
        node.closing.cancel();
    };
    let (reply, polled, ()) = tokio::join!(node.get(&path), node.get("/v1/pending?wait&timeout=600"), close);
    assert_eq!(reply.status, StatusCode::ACCEPTED);
    assert_eq!(polled.json(), json!({"calls": []}));
}

#[tokio::test]
async fn a_long_poll_meets_the_call_when_it_comes() {
    let node = Node::new().await;
    assert_eq!(node.get("/v1/pending?wait=true&timeout=0.1").await.json(), json!({"calls": []}));
    let id = node.create(json!({"prompt": "x"})).await;
    let asks = calls(&[("c1", "ask_person", "{}")]);
    let (reply, ()) = tokio::join!(node.get("/v1/pending?wait&timeout=25"), drive(&node.store, vec![asks]));
    assert_eq!(reply.json()["calls"][0]["session_id"], json!(id));
    assert_eq!(
        node.get("/v1/pending?agent=helper&limit=1").await.json()["calls"].as_array().map(Vec::len),
        Some(1)
    );
    assert_eq!(node.get("/v1/pending?agent=other").await.json(), json!({"calls": []}));
}

#[tokio::test]
async fn waiting_holds_no_database_connection() {
    let node = Node::new().await;
    let id = node.create(json!({"prompt": "x"})).await;
    let path = format!("/v1/sessions/{id}?wait&timeout=25");
    // Many times the connections of both pools.
    let waits = futures::future::join_all((0..200).map(|_| node.get(&path)));
    let meanwhile = async {
        for _ in 0..20 {
            assert_eq!(node.get("/v1/agents").await.status, StatusCode::OK);
        }
        drive(&node.store, vec![says("done")]).await;
    };
    let (replies, ()) = tokio::join!(waits, meanwhile);
    assert!(replies.iter().all(|reply| reply.status == StatusCode::OK));
}
