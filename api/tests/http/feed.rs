//! The feed across sessions.

use std::collections::BTreeSet;

use axum::{
    body::Body,
    http::{Method, Request},
};
use serde_json::json;
use uuid::Uuid;

use crate::{
    hand::{drive, says},
    support::{AGENT, Frame, Node, ask, by, kinds, with},
};

fn follow(query: &str) -> Request<Body> {
    ask(Method::GET, &format!("/v1/events{query}"), None)
}

fn create(token: &str) -> Request<Body> {
    by(ask(Method::POST, "/v1/sessions", Some(json!({"agent": AGENT}))), token)
}

#[tokio::test]
async fn the_feed_is_followed_and_replayed_from_every_place() {
    let node = Node::new().await;
    let before = node.create(json!({})).await;
    let mut frames = node.stream(follow("")).await;
    assert_eq!(frames.replay, "live");
    let snapshot = frames.next().await.expect("a snapshot");
    assert_eq!((snapshot.event.as_str(), &snapshot.id), ("snapshot", &None));
    assert_eq!(snapshot.data["sessions"][0]["session_id"], json!(before));

    let id = node.create(json!({"prompt": "x"})).await;
    drive(&node.store, vec![says("y")]).await;
    let whole = frames.until("run.stopped").await;
    // A transaction elsewhere in the cluster may have held back events that the snapshot shows already.
    let own: Vec<Frame> =
        whole.iter().filter(|frame| frame.data["session_id"] == json!(id)).cloned().collect();
    assert_eq!(kinds(&own)[..2], ["session.created", "mail.accepted"]);
    assert!(whole.iter().all(|frame| [json!(id), json!(before)].contains(&frame.data["session_id"])));
    let updated: Vec<&Frame> = whole.iter().filter(|frame| frame.event == "session.updated").collect();
    assert_eq!(updated.last().expect("an update").data["head_turn"]["contents"]["llmResponse"], "y");

    let other = Node::on(&node.url, false, |_| {}).await;
    for (index, frame) in whole.iter().enumerate() {
        let last = frame.id.as_deref().expect("an id");
        let mut frames = other.stream(with(follow(""), "last-event-id", last)).await;
        assert_eq!(frames.replay, "replayed");
        for expected in &whole[index + 1..] {
            assert_eq!(frames.next().await.as_ref(), Some(expected));
        }
    }
}

#[tokio::test]
async fn a_place_of_another_feed_or_none_at_all_is_unavailable() {
    let node = Node::new().await;
    let id = node.create(json!({})).await;
    let foreign = format!("{}.1.{}.1", Uuid::now_v7().simple(), id.replace('-', ""));
    let mut frames = node.stream(follow("")).await;
    frames.next().await.expect("a snapshot");
    node.create(json!({})).await;
    let real = frames.next().await.expect("an event").id.expect("an id");
    let mut parts: Vec<&str> = real.split('.').collect();
    // An event that is there, said to be of a transaction that nothing could ever follow.
    let never = i64::MAX.to_string();
    parts[1] = &never;
    let never = parts.join(".");
    for last in ["1", "x", &foreign, &never, &format!("{real}.1")] {
        let mut frames = node.stream(with(follow(""), "last-event-id", last)).await;
        assert_eq!(frames.replay, "unavailable", "{last}");
        assert_eq!(frames.next().await.expect("a frame").event, "snapshot");
    }
    let mut frames = node.stream(follow("")).await;
    frames.next().await.expect("a snapshot");
    node.create(json!({})).await;
    let last = frames.next().await.expect("an event").id.expect("an id");
    node.client().await.execute("DELETE FROM events", &[]).await.expect("retained away");
    let frames = node.stream(follow(&format!("?after={last}"))).await;
    assert_eq!(frames.replay, "unavailable");
}

#[tokio::test]
async fn an_event_of_somebody_else_is_as_unknown_as_none() {
    let node = Node::with_tokens().await;
    let mut alice = node.stream(by(follow(""), "alice-token")).await;
    alice.next().await.expect("a snapshot");
    node.send(create("alice-token")).await;
    let place = alice.next().await.expect("an event").id.expect("an id");
    let mut parts: Vec<String> = place.split('.').map(str::to_owned).collect();
    parts[2] = Uuid::now_v7().simple().to_string();
    let absent = parts.join(".");
    for last in [&place, &absent] {
        let header = with(by(follow(""), "bob-token"), "last-event-id", last);
        let query = by(follow(&format!("?after={last}")), "bob-token");
        for request in [header, query] {
            let mut frames = node.stream(request).await;
            assert_eq!(frames.replay, "unavailable");
            assert_eq!(frames.next().await.expect("a snapshot").data["sessions"], json!([]));
        }
    }
    let own = node.stream(with(by(follow(""), "alice-token"), "last-event-id", &place)).await;
    assert_eq!(own.replay, "replayed");
    let admin = node.stream(with(by(follow("?scope=all"), "root-token"), "last-event-id", &place)).await;
    assert_eq!(admin.replay, "replayed");
}

#[tokio::test]
async fn owners_see_their_own_and_admins_everything() {
    let node = Node::with_tokens().await;
    let forbidden = node.send(by(follow("?scope=all"), "alice-token")).await;
    assert_eq!(forbidden.refusal(), (403, "forbidden".to_owned()));
    let mut alice = node.stream(by(follow("?scope=owner"), "alice-token")).await;
    let mut root = node.stream(by(follow("?scope=all"), "root-token")).await;
    // A browser's way of saying who asks.
    let mut bob = node.stream(follow("?access_token=bob-token")).await;
    for frames in [&mut alice, &mut root, &mut bob] {
        assert_eq!(frames.next().await.expect("a snapshot").data["sessions"], json!([]));
    }
    let of_bob = node.send(create("bob-token")).await.json()["session_id"].clone();
    let of_alice = node.send(create("alice-token")).await.json()["session_id"].clone();
    assert_eq!(alice.next().await.expect("an event").data["session_id"], of_alice);
    assert_eq!(bob.next().await.expect("an event").data["session_id"], of_bob);
    let mut all = BTreeSet::new();
    for _ in 0..2 {
        let frame = root.next().await.expect("an event");
        assert!(frame.data["owner"].is_string());
        all.insert(frame.data["session_id"].to_string());
    }
    assert_eq!(all, BTreeSet::from([of_alice.to_string(), of_bob.to_string()]));
}

#[tokio::test]
async fn nothing_appears_before_what_was_sent() {
    let node = Node::new().await;
    let mut frames = node.stream(follow("")).await;
    frames.next().await.expect("a snapshot");
    // A transaction that has its number but isn't done holds back whatever came after it.
    let mut slow = node.client().await;
    let open = slow.transaction().await.expect("a transaction");
    open.execute("SELECT pg_current_xact_id()", &[]).await.expect("a number");
    let id = node.create(json!({})).await;
    let early = tokio::time::timeout(std::time::Duration::from_millis(300), frames.next()).await;
    assert!(early.is_err(), "{early:?}");
    open.commit().await.expect("done");
    assert_eq!(frames.next().await.expect("an event").data["session_id"], json!(id));
}
