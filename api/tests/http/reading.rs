//! Listings, pages of turns, and texts of every kind.

use std::collections::BTreeSet;

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::{
    hand::{calls, drive, says},
    support::Node,
};

fn ids(list: &Value) -> Vec<String> {
    let sessions = list["sessions"].as_array().expect("sessions");
    sessions.iter().map(|session| session["session_id"].as_str().expect("an id").to_owned()).collect()
}

#[tokio::test]
async fn a_cursor_skips_nothing_while_sessions_come_and_go() {
    let node = Node::new().await;
    let mut all = Vec::new();
    for _ in 0..25 {
        all.push(node.create(json!({})).await);
    }
    // Creation times that don't tell sessions apart.
    let sql = "UPDATE sessions SET created_at = date_trunc('hour', now())";
    node.client().await.execute(sql, &[]).await.expect("one time for all");
    let (mut seen, mut path) = (Vec::new(), "/v1/sessions?limit=4".to_owned());
    loop {
        let page = node.get(&path).await.json();
        seen.extend(ids(&page));
        node.create(json!({})).await;
        let Some(cursor) = page["next_cursor"].as_str() else {
            assert_eq!(page["next_before"], Value::Null);
            break;
        };
        path = format!("/v1/sessions?limit=4&cursor={cursor}");
    }
    assert_eq!(seen.len(), seen.iter().collect::<BTreeSet<_>>().len(), "none twice");
    all.sort();
    seen.sort();
    assert_eq!(seen, all);
}

#[tokio::test]
async fn listings_are_filtered() {
    let node = Node::new().await;
    let root = node.create(json!({"labels": {"team": "blue", "a.b": "c:d\"e"}})).await;
    let child = node.create(json!({"parent": root})).await;
    let running = node.create(json!({"prompt": "x", "labels": {"team": "red"}})).await;
    let (root, child, running) = (root.as_str(), child.as_str(), running.as_str());
    let (of_parent, of_child) = (format!("?parent={root}"), format!("?tree&q={child}"));
    let expected: [(&str, &[&str]); 14] = [
        ("", &[running, root]),
        ("?tree=true", &[running, child, root]),
        (&of_parent, &[child]),
        ("?parent=x", &[]),
        ("?status=running", &[running]),
        ("?status=running,ready", &[running, root]),
        ("?status=failed", &[]),
        ("?label=team:blue", &[root]),
        ("?label=team:b", &[]),
        ("?agent=nobody", &[]),
        ("?agent=helper&q=RED", &[running]),
        (&of_child, &[child]),
        ("?before=2020-01-01T00:00:00Z", &[]),
        ("?limit=1", &[running]),
    ];
    for (query, found) in expected {
        let list = node.get(&format!("/v1/sessions{query}")).await.json();
        assert_eq!(ids(&list), found, "{query}");
    }
}

#[tokio::test]
async fn long_histories_travel_in_pages() {
    let node = Node::new().await;
    let id = node.create(json!({"prompt": "0"})).await;
    drive(&node.store, vec![calls(&[("c", "look", r#"{"n": 0}"#)]), says("a")]).await;
    for n in 1..4 {
        node.post(&format!("/v1/sessions/{id}/messages"), json!({"prompt": n.to_string()})).await;
        drive(&node.store, vec![says("a")]).await;
    }
    let view = node.get(&format!("/v1/sessions/{id}?turns=3")).await.json();
    let positions = |turns: &Value| -> Vec<i64> {
        turns.as_array().expect("turns").iter().filter_map(|turn| turn["position"].as_i64()).collect()
    };
    assert_eq!(positions(&view["session"]["turns"]), [10, 9, 8]);
    let none = node.get(&format!("/v1/sessions/{id}?turns=0")).await.json();
    assert_eq!(
        (&none["session"]["turns"], &none["session"]["turnId"]),
        (&json!([]), &view["session"]["turnId"])
    );

    let first = node.get(&format!("/v1/sessions/{id}/turns?limit=4")).await.json();
    assert_eq!((positions(&first["turns"]), &first["next_from"]), (vec![1, 2, 3, 4], &json!(5)));
    let rest = node.get(&format!("/v1/sessions/{id}/turns?from=5&limit=500")).await.json();
    assert_eq!((positions(&rest["turns"]), &rest["next_from"]), ((5..=10).collect(), &Value::Null));
    assert_eq!(
        node.get(&format!("/v1/sessions/{id}/turns?from=11")).await.json(),
        json!({"turns": [], "next_from": null})
    );
    // The call that a turn answers stands in the turn before, which is on another page.
    let alone = node.get(&format!("/v1/sessions/{id}/turns?from=3&limit=1")).await.json();
    let answered = &alone["turns"][0]["contents"]["userToolResponses"][0];
    assert_eq!(answered[0]["function"], json!({"name": "look", "arguments": r#"{"n": 0}"#}));
    assert_eq!(answered[1], json!({"type": "text", "content": "done"}));
}

#[tokio::test]
async fn texts_come_back_as_they_were() {
    let node = Node::new().await;
    let texts = [
        "nul \0 in it",
        "\u{1F980} crab",
        "\u{FEFF}bom",
        "\u{202E}rtl",
        "line\nbreak\r\u{2028}",
        "\u{7f}\u{1b}[0m",
        "\\u0000",
    ];
    for text in texts {
        // Keys take everything but NUL and what separates them from values in filters.
        let labels = json!({text.replace('\0', ""): text});
        let id = node.create(json!({"prompt": text, "labels": labels})).await;
        drive(&node.store, vec![says(text)]).await;
        let view = node.get(&format!("/v1/sessions/{id}")).await.json();
        let turns = &view["session"]["turns"];
        assert_eq!(turns[1]["contents"]["userQuery"]["text"], text);
        assert_eq!(turns[0]["contents"]["llmResponse"], text);
        assert_eq!(view["labels"], labels);
        let path = format!("/v1/sessions/{id}/messages?wait&timeout=20");
        let asks = calls(&[("c", "ask_person", "{}")]);
        let body = json!({"prompt": text});
        let (reply, ()) = tokio::join!(node.post(&path, body), drive(&node.store, vec![asks]));
        let token = reply.json()["pending"][0]["continuation_token"].as_str().expect("a token").to_owned();
        let result = json!({"type": "json", "content": {text: [text]}});
        let reply = node.post(&format!("/v1/continuations/{token}"), json!({"result": result})).await;
        assert_eq!(reply.status, StatusCode::ACCEPTED);
        drive(&node.store, vec![says("ok")]).await;
        let view = node.get(&format!("/v1/sessions/{id}")).await.json();
        assert_eq!(view["session"]["turns"][1]["contents"]["userToolResponses"][0][1], result);
    }
}

#[tokio::test]
async fn large_messages_and_results_come_back_whole() {
    let node = Node::new().await;
    let prompt = "Lorem \u{1F980} ".repeat(20_000);
    let data = "QUFB".repeat(5_000);
    let media = json!([{"mime": "image/png", "base64": data}]);
    let id = node.create(json!({"prompt": prompt, "media": media})).await;
    let unread = node.get(&format!("/v1/sessions/{id}/mail?unread")).await.json();
    assert_eq!(unread["mail"][0]["body"]["query"]["text"], json!(prompt));
    drive(&node.store, vec![calls(&[("c", "ask_person", "{}"), ("d", "ask_other", "{}")])]).await;
    let view = node.get(&format!("/v1/sessions/{id}")).await.json();
    let query = &view["session"]["turns"][1]["contents"]["userQuery"];
    assert_eq!(query["text"], json!(prompt));
    assert_eq!(query["media"][0], json!({"mimeType": "image/png", "base64Data": data}));
    let token = view["pending"][0]["continuation_token"].as_str().expect("a token");
    let result = json!({"type": "mixed", "parts": [
        {"type": "text", "text": prompt}, {"type": "media", "mimeType": "image/png", "base64Data": data}]});
    let path = format!("/v1/continuations/{token}");
    let (reply, ()) = tokio::join!(
        node.post(&path, json!({"result": result, "resume": false})),
        drive(&node.store, Vec::new())
    );
    assert_eq!(reply.json()["calls"][0]["result"], result, "{:?}", reply.json()["calls"]);
}

#[tokio::test]
async fn pages_of_large_turns_are_cut_off_whole() {
    let node = Node::new().await;
    let id = node.create(json!({"prompt": "0"})).await;
    let call = |id: &'static str| calls(&[(id, "look", r#"{"n": "mark"}"#)]);
    drive(&node.store, vec![call("c1"), call("c2"), call("c3"), call("c4"), says("end")]).await;
    // A user turn and five answers, each followed by a user turn but the last.
    let grow = "UPDATE turns SET body = replace(body, 'mark', repeat('m', 20000000)) WHERE tag = 'LlmTurn'";
    node.client().await.execute(grow, &[]).await.expect("grown");
    let positions = |turns: &Value| -> Vec<i64> {
        let turns = turns.as_array().expect("turns");
        turns.iter().map(|turn| turn["position"].as_i64().expect("a position")).collect()
    };
    let answered = |turns: &Value| {
        let turns = turns.as_array().expect("turns").clone();
        turns.iter().all(|turn| {
            let responses = turn["contents"]["userToolResponses"].as_array().cloned().unwrap_or_default();
            let arguments = |response: &Value| response[0]["function"]["arguments"].as_str().map(str::len);
            responses.iter().all(|response| arguments(response).is_some_and(|len| len > 20_000_000))
        })
    };
    let view = node.get(&format!("/v1/sessions/{id}")).await.json();
    let newest = &view["session"]["turns"];
    let shown = positions(newest);
    assert!(shown.len() > 1 && shown.len() < 10 && shown[0] == 10, "{shown:?}");
    assert!(answered(newest), "what answers a call shows the call");

    let (mut from, mut all) = (1, Vec::new());
    loop {
        let page = node.get(&format!("/v1/sessions/{id}/turns?from={from}&limit=500")).await.json();
        assert!(answered(&page["turns"]), "from {from}");
        let some = positions(&page["turns"]);
        assert!(!some.is_empty() && some.len() < 10);
        all.extend(some);
        match page["next_from"].as_i64() {
            Some(next) => from = next,
            None => break,
        }
    }
    assert_eq!(all, (1..=10).collect::<Vec<i64>>());
}
