//! Who may ask: tokens, strangers, pages of other sites.

use axum::body::Body;
use axum::http::{Method, Request, StatusCode};
use serde_json::{Value, json};

use crate::{
    hand::{calls, drive},
    support::{AGENT, Node, ask, by, with},
};

const OPEN: [&str; 7] =
    ["/openapi.json", "/docs", "/docs/", "/docs/{file}", "/healthz", "/readyz", "/metrics"];

/// Every operation of the document, with the paths' names filled in.
fn operations(session: &str, token: &str) -> Vec<(Method, String, String)> {
    let document = serde_json::to_value(holdfast_api::openapi()).expect("JSON");
    let paths = document["paths"].as_object().expect("paths");
    let mut all = Vec::new();
    for (path, item) in paths {
        for method in item.as_object().expect("an item").keys() {
            let method: Method = method.to_uppercase().parse().expect("a method");
            let filled = path
                .replace("{id}", session)
                .replace("{token}", token)
                .replace("{slug}", AGENT)
                .replace("{owner}", "alice");
            all.push((method, path.clone(), filled.replace("{file}", "index.css")));
        }
    }
    all
}

/// A body that the operation would take.
fn body(path: &str) -> Option<Value> {
    Some(match path {
        "/v1/sessions" => json!({"agent": AGENT}),
        "/v1/sessions/{id}/messages" => json!({"prompt": "x"}),
        "/v1/sessions/{id}/mail" => json!({"body": {"tag": "userMessage", "query": "q"}}),
        "/v1/continuations/{token}" => json!({"result": "r"}),
        "/v1/tenants/{owner}/limits" => json!({"max_running": 1}),
        _ => return None,
    })
}

fn request(method: &Method, template: &str, path: &str) -> Request<Body> {
    let body = if [Method::POST, Method::PUT].contains(method) { body(template) } else { None };
    ask(method.clone(), path, body)
}

async fn node_with_a_session() -> (Node, String, String) {
    let node = Node::with_tokens().await;
    let create = ask(Method::POST, "/v1/sessions", Some(json!({"agent": AGENT, "prompt": "x"})));
    let id =
        node.send(by(create, "alice-token")).await.json()["session_id"].as_str().expect("an id").to_owned();
    drive(&node.store, vec![calls(&[("c1", "ask_person", "{}")])]).await;
    let pending = ask(Method::GET, &format!("/v1/sessions/{id}/pending"), None);
    let pending = node.send(by(pending, "alice-token")).await.json();
    let token = pending["calls"][0]["continuation_token"].as_str().expect("a token").to_owned();
    (node, id, token)
}

#[tokio::test]
async fn every_route_wants_a_token() {
    let (node, id, token) = node_with_a_session().await;
    for (method, template, path) in operations(&id, &token) {
        if OPEN.contains(&template.as_str()) {
            continue;
        }
        for header in [None, Some("Bearer wrong"), Some("Basic YTpi"), Some("alice-token"), Some("Bearer")] {
            let mut asked = request(&method, &template, &path);
            if let Some(header) = header {
                asked = with(asked, "authorization", header);
            }
            let reply = node.send(asked).await;
            assert_eq!(reply.refusal(), (401, "unauthorized".to_owned()), "{method} {template} {header:?}");
            assert_eq!(reply.header("www-authenticate"), Some("Bearer"));
        }
    }
    // Only event streams take it from the query.
    let query = ask(Method::GET, &format!("/v1/sessions/{id}?access_token=alice-token"), None);
    assert_eq!(node.send(query).await.status, StatusCode::UNAUTHORIZED);
    let unknown = ask(Method::GET, "/v1/nothing", None);
    assert_eq!(node.send(unknown).await.status, StatusCode::UNAUTHORIZED);
}

#[tokio::test]
async fn a_stranger_finds_nothing_and_changes_nothing() {
    let (node, id, token) = node_with_a_session().await;
    let read = || by(ask(Method::GET, &format!("/v1/sessions/{id}"), None), "alice-token");
    let before = node.send(read()).await.json();
    for (method, template, path) in operations(&id, &token) {
        let names = template.contains("{id}") || template.contains("{token}");
        if !names {
            continue;
        }
        let reply = node.send(by(request(&method, &template, &path), "bob-token")).await;
        let (status, code) = reply.refusal();
        assert_eq!(status, 404, "{method} {template}");
        // Exactly what it would say of something that isn't there.
        let nowhere = uuid::Uuid::now_v7().to_string();
        let absent = path.replace(&id, &nowhere).replace(&token, &nowhere);
        let absent = node.send(by(request(&method, &template, &absent), "bob-token")).await;
        assert_eq!(
            (absent.refusal(), absent.bytes),
            ((404, code), reply.bytes.clone()),
            "{method} {template}"
        );
        // Knowing how far the session has come doesn't help.
        for last in ["0", "1", "999"] {
            let asked = with(by(request(&method, &template, &path), "bob-token"), "last-event-id", last);
            assert_eq!(node.send(asked).await.bytes, reply.bytes, "{method} {template} {last}");
        }
    }
    for method in [Method::GET, Method::PUT] {
        let template = "/v1/tenants/{owner}/limits";
        for owner in ["alice", "bob", "nobody"] {
            let asked = request(&method, template, &template.replace("{owner}", owner));
            let refusal = node.send(by(asked, "bob-token")).await.refusal();
            assert_eq!(refusal, (403, "forbidden".to_owned()), "{method} {owner}");
        }
    }
    for path in [
        "/v1/sessions?tree",
        "/v1/pending",
        &format!("/v1/sessions?parent={id}"),
        &format!("/v1/sessions?q={id}"),
    ] {
        let reply = node.send(by(ask(Method::GET, path, None), "bob-token")).await.json();
        let found = reply.get("sessions").or(reply.get("calls"));
        assert_eq!(found, Some(&json!([])), "{path}");
    }
    let child = json!({"agent": AGENT, "parent": id});
    let reply = node.send(by(ask(Method::POST, "/v1/sessions", Some(child)), "bob-token")).await;
    assert_eq!(reply.refusal(), (404, "unknown_session".to_owned()));
    assert_eq!(node.send(read()).await.json(), before);
}

#[tokio::test]
async fn owners_are_named_in_views() {
    let (node, id, _) = node_with_a_session().await;
    let reply = node.send(by(ask(Method::GET, &format!("/v1/sessions/{id}"), None), "alice-token")).await;
    assert_eq!(reply.json()["owner"], "alice");
    assert_eq!(
        reply.json()["session"]["turns"][1]["contents"]["userMail"][0]["from"],
        json!({"tag": "user", "owner": "alice"})
    );
}

#[tokio::test]
async fn pages_of_other_sites_arent_served_without_tokens() {
    let node = Node::with(|config| config.cors_origins = vec!["https://app.example".to_owned()]).await;
    let from = |origin: &str, path: &str| with(ask(Method::GET, path, None), "origin", origin);
    for path in ["/healthz", "/openapi.json", "/v1/agents", "/nothing"] {
        for origin in
            ["https://evil.example", "null", "http://127.0.0.1.evil.example", "http://localhost.evil.example"]
        {
            let reply = node.send(from(origin, path)).await;
            assert_eq!(reply.refusal(), (403, "forbidden_origin".to_owned()), "{origin} {path}");
        }
    }
    for origin in ["http://localhost:3000", "http://127.0.0.1:1", "http://[::1]", "https://app.example"] {
        let reply = node.send(from(origin, "/v1/agents")).await;
        assert_eq!(reply.status, StatusCode::OK, "{origin}");
        let listed = origin == "https://app.example";
        assert_eq!(reply.header("access-control-allow-origin"), listed.then_some(origin));
    }
    let rebound = with(ask(Method::GET, "/v1/agents", None), "host", "evil.example:8080");
    assert_eq!(node.send(rebound).await.refusal(), (403, "forbidden_origin".to_owned()));
    let local = with(ask(Method::GET, "/v1/agents", None), "host", "127.0.0.1:8080");
    assert_eq!(node.send(local).await.status, StatusCode::OK);

    let open = Node::on(&node.url, false, |config| config.allow_anonymous = true).await;
    let named = with(ask(Method::GET, "/v1/agents", None), "host", "holdfast.internal");
    assert_eq!(open.send(named).await.status, StatusCode::OK);
}

#[tokio::test]
async fn listed_pages_may_read_and_preflights_need_no_token() {
    let node = Node::with_tokens().await;
    let node =
        Node::on(&node.url, true, |config| config.cors_origins = vec!["https://app.example".to_owned()])
            .await;
    let preflight = |origin: &str, path: &str, headers: &str| {
        let request = with(ask(Method::OPTIONS, path, None), "origin", origin);
        let request = with(request, "access-control-request-method", "POST");
        with(request, "access-control-request-headers", headers)
    };
    for path in ["/v1/sessions", "/v1/sessions/x/cancel", "/nothing/at/all"] {
        let reply = node
            .send(preflight("https://app.example", path, "authorization, Agents-Param-Region, x-other"))
            .await;
        assert_eq!(reply.status, StatusCode::NO_CONTENT);
        assert_eq!(reply.header("access-control-allow-origin"), Some("https://app.example"));
        assert_eq!(reply.header("access-control-max-age"), Some("600"));
        assert_eq!(reply.header("access-control-allow-methods"), Some("GET, POST, PUT, DELETE, OPTIONS"));
        assert_eq!(
            reply.header("access-control-allow-headers"),
            Some(
                "Authorization, Content-Type, Last-Event-ID, Idempotency-Key, traceparent, Agents-Param-Region"
            )
        );
    }
    let other = node.send(preflight("https://evil.example", "/v1/sessions", "authorization")).await;
    assert_eq!(other.header("access-control-allow-origin"), None);
    let read = with(by(ask(Method::GET, "/v1/agents", None), "alice-token"), "origin", "https://app.example");
    let reply = node.send(read).await;
    assert_eq!(reply.header("access-control-allow-origin"), Some("https://app.example"));
    assert_eq!(
        reply.header("access-control-expose-headers"),
        Some("Location, Agents-Replay, Retry-After, X-Request-Id")
    );
    assert!(reply.headers.get_all("vary").iter().any(|vary| vary == "Origin"));
    // With tokens it is the token that decides, not the page.
    let foreign =
        with(by(ask(Method::GET, "/v1/agents", None), "alice-token"), "origin", "https://evil.example");
    let reply = node.send(foreign).await;
    assert_eq!((reply.status, reply.header("access-control-allow-origin")), (StatusCode::OK, None));
}
