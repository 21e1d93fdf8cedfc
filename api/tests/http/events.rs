//! A session's stream: live, replayed, over nodes and to its end.

use axum::{
    body::Body,
    http::{Method, Request},
};
use holdfast_store::notify::Channel;
use serde_json::{Value, json};

use crate::{
    hand::{calls, drive, says},
    support::{Frame, Node, ask, kinds, with},
};

fn follow(id: &str) -> Request<Body> {
    ask(Method::GET, &format!("/v1/sessions/{id}/events"), None)
}

fn numbers(frames: &[Frame]) -> Vec<i64> {
    frames.iter().filter_map(|frame| frame.id.as_deref()).map(|id| id.parse().expect("a number")).collect()
}

#[tokio::test]
async fn a_run_is_followed_from_start_to_end() {
    let node = Node::new().await;
    let id = node.create(json!({})).await;
    let mut frames = node.stream(follow(&id)).await;
    assert_eq!(frames.replay, "live");
    let snapshot = frames.next().await.expect("a snapshot");
    assert_eq!((snapshot.event.as_str(), &snapshot.id), ("snapshot", &None));
    assert_eq!((&snapshot.data["session_id"], &snapshot.data["seq"]), (&json!(id), &json!(1)));
    assert_eq!(snapshot.data["status"], "ready");

    node.post(&format!("/v1/sessions/{id}/messages"), json!({"prompt": "x"})).await;
    drive(&node.store, vec![calls(&[("c1", "ask_person", "{}")])]).await;
    let seen = frames.until("run.stopped").await;
    assert_eq!(kinds(&seen)[..3], ["mail.accepted", "session.updated", "run.started"]);
    assert_eq!(seen[1].data["status"], "running", "it comes just before the run's start");
    assert_eq!(seen[2].data["mode"], "until_blocked");
    assert_eq!(numbers(&seen), (2..).take(seen.len()).collect::<Vec<i64>>());
    assert!(
        seen.iter().all(|frame| frame.data["session_id"] == json!(id) && frame.data["kind"] == frame.event)
    );
    let deferred = seen.iter().find(|frame| frame.event == "calls.deferred").expect("it is told");
    assert_eq!(deferred.data["calls"][0]["tool"], "ask_person");
    assert!(deferred.data["calls"][0]["continuation_token"].is_string());
    let updated: Vec<&Value> =
        seen.iter().filter(|frame| frame.event == "session.updated").map(|frame| &frame.data).collect();
    let last = updated.last().expect("an update");
    assert_eq!(last["status"], "waiting_external");
    assert_eq!(last["head_turn"]["tag"], "LlmTurn");
    assert_eq!(last["head_turn"]["contents"]["llmToolCalls"][0]["id"], "c1");
    assert_eq!(seen.last().expect("the end").data["status"], "waiting_external");
}

#[tokio::test]
async fn reconnecting_replays_what_was_missed_at_any_node() {
    let node = Node::new().await;
    let other = Node::on(&node.url, false, |_| {}).await;
    let id = node.create(json!({"prompt": "x"})).await;
    drive(&node.store, vec![says("y")]).await;
    let count = node.stream(follow(&id)).await.next().await.expect("a snapshot").data["seq"].as_i64();
    let count = count.expect("a number");

    let mut whole = Vec::new();
    let mut frames = node.stream(with(follow(&id), "last-event-id", "0")).await;
    assert_eq!(frames.replay, "replayed");
    for _ in 0..count {
        whole.push(frames.next().await.expect("an event"));
    }
    assert_eq!(numbers(&whole), (1..=count).collect::<Vec<i64>>());
    for after in 0..count {
        let mut frames = other.stream(with(follow(&id), "last-event-id", &after.to_string())).await;
        assert_eq!(frames.replay, "replayed");
        for expected in &whole[usize::try_from(after).expect("small")..] {
            assert_eq!(frames.next().await.as_ref(), Some(expected));
        }
    }
    let query = ask(Method::GET, &format!("/v1/sessions/{id}/events?after={count}"), None);
    let mut frames = other.stream(query).await;
    assert_eq!(frames.replay, "replayed", "nothing was missed");
    node.post(&format!("/v1/sessions/{id}/messages"), json!({"prompt": "again"})).await;
    assert_eq!(frames.next().await.expect("an event").id, Some((count + 1).to_string()));
}

#[tokio::test]
async fn what_is_gone_is_said_to_be_gone() {
    let node = Node::new().await;
    let id = node.create(json!({"prompt": "x"})).await;
    for last in ["999", "x", "-1", "+1"] {
        let mut frames = node.stream(with(follow(&id), "last-event-id", last)).await;
        assert_eq!(frames.replay, "unavailable", "{last}");
        assert_eq!(frames.next().await.expect("a frame").event, "snapshot");
    }
    let client = node.client().await;
    client.execute("DELETE FROM events WHERE seq <= 2", &[]).await.expect("retained away");
    let mut frames = node.stream(with(follow(&id), "last-event-id", "1")).await;
    assert_eq!(frames.replay, "unavailable");
    assert_eq!(frames.next().await.expect("a frame").event, "snapshot");
    let frames = node.stream(with(follow(&id), "last-event-id", "2")).await;
    assert_eq!(frames.replay, "replayed");
}

#[tokio::test]
async fn long_streams_come_page_by_page_in_order() {
    let node = Node::new().await;
    let id = node.create(json!({})).await;
    let path = format!("/v1/sessions/{id}/mail");
    for _ in 0..230 {
        let body = json!({"body": {"tag": "userMessage", "query": "q"}});
        assert_eq!(node.post(&path, body).await.status, 202);
    }
    let mut frames = node.stream(with(follow(&id), "last-event-id", "0")).await;
    // One for the creation, one for each letter, two for the run that the first one started.
    for expected in 1..=233_i64 {
        assert_eq!(frames.next().await.expect("an event").id, Some(expected.to_string()));
    }
}

#[tokio::test]
async fn deletion_ends_the_stream() {
    let node = Node::new().await;
    let id = node.create(json!({})).await;
    let mut frames = node.stream(follow(&id)).await;
    frames.next().await.expect("a snapshot");
    node.send(ask(Method::DELETE, &format!("/v1/sessions/{id}"), None)).await;
    assert_eq!(frames.next().await.expect("an event").event, "session.deleted");
    assert_eq!(frames.next().await, None);
    assert_eq!(node.send(follow(&id)).await.refusal(), (404, "unknown_session".to_owned()));
}

#[tokio::test]
async fn closing_ends_streams() {
    let node = Node::new().await;
    let id = node.create(json!({})).await;
    let mut frames = node.stream(follow(&id)).await;
    let mut feed = node.stream(ask(Method::GET, "/v1/events", None)).await;
    frames.next().await.expect("a snapshot");
    feed.next().await.expect("a snapshot");
    node.closing.cancel();
    assert_eq!((frames.next().await, feed.next().await), (None, None));
}

#[tokio::test]
async fn text_deltas_reach_the_streams_of_their_session() {
    let node = Node::new().await;
    let id = node.create(json!({})).await;
    let mut frames = node.stream(follow(&id)).await;
    frames.next().await.expect("a snapshot");
    // The stream is there before anything is said, but the listener may not be: say it until it is heard.
    let notifier = node.store.notifier().expect("a notifier").clone();
    let delta = json!({"session_id": id, "text": "Hel\nlo"}).to_string();
    let saying = tokio::spawn(async move {
        loop {
            notifier.send(Channel::Deltas, delta.clone());
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    });
    let frame = frames.next().await.expect("a delta");
    saying.abort();
    assert_eq!((frame.event.as_str(), frame.id), ("text.delta", None));
    assert_eq!(frame.data, json!({"session_id": id, "text": "Hel\nlo", "kind": "text.delta"}));
}

#[tokio::test]
async fn text_that_its_turn_has_overtaken_is_passed_over() {
    let node = Node::new().await;
    let id = node.create(json!({"prompt": "x"})).await;
    let mut frames = node.stream(follow(&id)).await;
    frames.next().await.expect("a snapshot");
    drive(&node.store, vec![says("y")]).await;
    let seen = frames.until("run.stopped").await;
    let updated = seen.iter().rfind(|frame| frame.event == "session.updated").expect("an update");
    let position = updated.data["head_turn"]["position"].as_i64().expect("a position");
    let notifier = node.store.notifier().expect("a notifier").clone();
    let delta = |position: i64, index: u64| {
        json!({"session_id": id, "position": position, "index": index, "text": "late"}).to_string()
    };
    let deltas = [delta(position - 1, 0), delta(position, 7), delta(position + 1, 0)];
    // The listener may not be there yet: say it until something is heard.
    let saying = tokio::spawn(async move {
        loop {
            deltas.iter().for_each(|delta| notifier.send(Channel::Deltas, delta.clone()));
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    });
    let heard = [frames.next().await.expect("a delta"), frames.next().await.expect("a delta")];
    // A stream that begins after the turn hasn't missed it either.
    let mut late = node.stream(follow(&id)).await;
    late.next().await.expect("a snapshot");
    let late = [late.next().await.expect("a delta"), late.next().await.expect("a delta")];
    saying.abort();
    for frame in heard.into_iter().chain(late) {
        let expected = json!({"session_id": id, "position": position + 1, "index": 0, "text": "late", "kind": "text.delta"});
        assert_eq!((frame.event.as_str(), frame.data), ("text.delta", expected));
    }
}
