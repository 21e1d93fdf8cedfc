//! What is refused, and how: the status, a stable code, a sentence, a request id.

use axum::{
    body::Body,
    http::{Method, Request, StatusCode, header},
};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::support::{AGENT, Node, ask, with};

#[tokio::test]
async fn malformed_and_absent_ids_answer_alike() {
    let node = Node::new().await;
    let absent = Uuid::now_v7().to_string();
    let long = "x".repeat(5000);
    for id in [absent.as_str(), "x", "%00", "%FF%FE", "..%2f", &long] {
        for (method, rest, body) in [
            (Method::GET, "", None),
            (Method::DELETE, "", None),
            (Method::GET, "?wait=true", None),
            (Method::GET, "/turns", None),
            (Method::POST, "/messages", Some(json!({"prompt": "x"}))),
            (Method::POST, "/resume", None),
            (Method::POST, "/cancel", None),
            (Method::POST, "/pause", None),
            (Method::POST, "/mail", Some(json!({"body": {"tag": "userMessage", "query": "q"}}))),
            (Method::GET, "/mail", None),
            (Method::GET, "/pending", None),
            (Method::GET, "/events", None),
        ] {
            let reply = node.send(ask(method.clone(), &format!("/v1/sessions/{id}{rest}"), body)).await;
            assert_eq!(reply.refusal(), (404, "unknown_session".to_owned()), "{method} {id} {rest}");
        }
        let path = format!("/v1/continuations/{id}");
        assert_eq!(node.get(&path).await.refusal(), (404, "unknown_token".to_owned()));
        let reply = node.post(&path, json!({"result": "r"})).await;
        assert_eq!(reply.refusal(), (404, "unknown_token".to_owned()));
    }
}

#[tokio::test]
async fn bad_bodies_are_named() {
    let node = Node::new().await;
    let id = node.create(json!({})).await;
    let labels: serde_json::Map<String, Value> = (0..65).map(|n| (format!("k{n}"), json!("v"))).collect();
    let media =
        |mime: &str, base64: &str| json!({"agent": AGENT, "media": [{"mime": mime, "base64": base64}]});
    let many: Vec<Value> = (0..65).map(|_| json!({"mime": "a/b", "base64": ""})).collect();
    let created = [
        (json!({}), "agent"),
        (json!({"agent": 1}), "string"),
        (json!([]), "object"),
        (json!([AGENT, "prompt", null, null, null, null, null]), "object"),
        (json!("helper"), "object"),
        (json!({"agent": AGENT, "media": [["image/png", "AAAA", null]]}), "object"),
        (json!({"agent": AGENT, "labels": {"a:b": "v"}}), "':'"),
        (json!({"agent": AGENT, "labels": {"a\0b": "v"}}), "NUL"),
        (json!({"agent": AGENT, "params": {}}), "params"),
        (json!({"agent": AGENT, "fork": "x"}), "fork"),
        (json!({"agent": AGENT, "seal": true}), "seal"),
        (json!({"agent": AGENT, "session_token": true}), "session_token"),
        (json!({"agent": AGENT, "after": 1}), "after"),
        (json!({"agent": AGENT, "run": "twice"}), "twice"),
        (json!({"agent": "a\0b"}), "NUL"),
        (json!({"agent": AGENT, "priority": 101}), "priority"),
        (json!({"agent": AGENT, "labels": labels}), "64"),
        (json!({"agent": AGENT, "labels": {"": "v"}}), "100"),
        (json!({"agent": AGENT, "labels": {"k".repeat(101): "v"}}), "100"),
        (json!({"agent": AGENT, "labels": {"k": "v".repeat(501)}}), "500"),
        (json!({"agent": AGENT, "labels": {"k": 1}}), "string"),
        (media("image", "AAAA"), "media[0]"),
        (media("image/png", "AAA"), "media[0]"),
        (media("image/png", "A A="), "media[0]"),
        (json!({"agent": AGENT, "media": many}), "64"),
    ];
    for (body, named) in created {
        refused(&node, "/v1/sessions", body, named).await;
    }
    let of = |command: &str| format!("/v1/sessions/{id}/{command}");
    refused(&node, &of("messages"), json!({}), "prompt").await;
    refused(&node, &of("messages"), json!({"prompt": ""}), "prompt").await;
    refused(&node, &of("messages"), json!({"prompt": "x", "interrupts": true}), "interrupts").await;
    refused(&node, &of("messages"), json!({"prompt": "x", "params": {}}), "params").await;
    refused(&node, &of("messages"), json!({"prompt": "x", "message_id": "m"}), "").await;
    refused(&node, &of("resume"), json!({"mode": "none"}), "none").await;
    refused(&node, &of("resume"), json!({"params": {}}), "params").await;
    refused(&node, &of("cancel"), json!({"deferred": "yes"}), "boolean").await;
    refused(&node, &of("pause"), json!({"x": 1}), "x").await;
    let token = format!("/v1/continuations/{}", Uuid::now_v7());
    refused(&node, &token, json!({}), "result").await;
    refused(&node, &token, json!({"result": "r", "error": "e"}), "exactly one").await;
    refused(&node, &token, json!({"result": null}), "result").await;
    refused(&node, &token, json!({"result": 1}), "result").await;
    refused(&node, &token, json!({"result": {"type": "picture"}}), "picture").await;
    refused(
        &node,
        &token,
        json!({"result": {"type": "media", "mimeType": "a/b", "base64Data": "?"}}),
        "base64",
    )
    .await;
    refused(&node, &token, json!({"result": "r", "params": {}}), "params").await;
    refused(&node, &token, json!(["r"]), "object").await;
    for (result, named) in [
        (json!({"type": "text", "content": "x", "extra": 1}), "extra"),
        (json!({"type": "json", "content": {"any": 1}, "mimeType": "a/b"}), "mimeType"),
        (json!({"type": "media", "mimeType": "a/b", "base64Data": "", "content": "x"}), "content"),
        (json!({"type": "mixed", "parts": [], "content": "x"}), "content"),
        (
            json!({"type": "mixed", "parts": [{"type": "text", "text": "x"}, {"type": "text", "text": "x", "y": 1}]}),
            "parts[1]",
        ),
        (json!({"type": "mixed", "parts": [["text", "x"]]}), "parts[0]"),
        (json!({"type": "json", "content": nested(101)}), "deeper than 100 levels"),
    ] {
        refused(&node, &token, json!({"result": result}), named).await;
    }
    let unknown = Uuid::now_v7();
    let deepest = json!({"result": {"type": "json", "content": nested(100)}});
    let reply = node.post(&format!("/v1/continuations/{unknown}"), deepest).await;
    assert_eq!(reply.refusal().1, "unknown_token", "nothing is wrong with the result");
    assert_eq!(node.get("/v1/sessions?tree").await.json()["sessions"].as_array().map(Vec::len), Some(1));
}

/// Arrays in arrays.
fn nested(levels: usize) -> Value {
    (0..levels).fold(json!(1), |inner, _| json!([inner]))
}

async fn refused(node: &Node, path: &str, body: Value, named: &str) {
    let reply = node.post(path, body.clone()).await;
    assert_eq!(reply.refusal(), (400, "bad_request".to_owned()), "{body}");
    let message = reply.json()["message"].as_str().expect("a message").to_owned();
    assert!(message.contains(named), "{body}: {message}");
}

#[tokio::test]
async fn bad_queries_are_refused_everywhere() {
    let node = Node::new().await;
    let id = node.create(json!({})).await;
    let paths = [
        "/v1/agents?x=1".to_owned(),
        format!("/v1/agents/{AGENT}?x"),
        "/v1/sessions?limit=0".to_owned(),
        "/v1/sessions?limit=501".to_owned(),
        "/v1/sessions?limit=x".to_owned(),
        "/v1/sessions?status=asleep".to_owned(),
        "/v1/sessions?status=".to_owned(),
        "/v1/sessions?cursor=x".to_owned(),
        "/v1/sessions?before=yesterday".to_owned(),
        "/v1/sessions?label=x".to_owned(),
        "/v1/sessions?label=a%00:b".to_owned(),
        "/v1/sessions?q=%00".to_owned(),
        format!("/v1/sessions?q={}", "x".repeat(201)),
        "/v1/sessions?agent=%00".to_owned(),
        "/v1/sessions?tree=maybe".to_owned(),
        "/v1/sessions?unknown=1".to_owned(),
        "/v1/sessions?q=a&q=b".to_owned(),
        format!("/v1/sessions/{id}?turns=-1"),
        format!("/v1/sessions/{id}?turns=501"),
        format!("/v1/sessions/{id}?wait=1"),
        format!("/v1/sessions/{id}?timeout=soon"),
        format!("/v1/sessions/{id}/turns?from=0"),
        format!("/v1/sessions/{id}/turns?limit=501"),
        format!("/v1/sessions/{id}/mail?unread=1"),
        format!("/v1/sessions/{id}/mail?limit=0"),
        format!("/v1/sessions/{id}/pending?x"),
        format!("/v1/sessions/{id}/events?after=x"),
        format!("/v1/sessions/{id}/events?after=%2B1"),
        "/v1/events?scope=everything".to_owned(),
        "/v1/events?after=junk".to_owned(),
        "/v1/events?after=".to_owned(),
        "/v1/events?after=1".to_owned(),
        "/v1/pending?tool=%00".to_owned(),
        "/v1/pending?limit=501".to_owned(),
    ];
    for path in paths {
        let reply = node.get(&path).await;
        assert_eq!(reply.refusal(), (400, "bad_request".to_owned()), "{path}");
        assert!(!String::from_utf8_lossy(&reply.bytes).contains("deserialize"), "{path}: {:?}", reply.bytes);
    }
    for path in ["resume?x", "cancel?wait", "pause?x=1", "messages?wait=no", "mail?x"] {
        let body = (path.starts_with("messages")).then(|| json!({"prompt": "x"}));
        let reply = node.send(ask(Method::POST, &format!("/v1/sessions/{id}/{path}"), body)).await;
        assert_eq!(reply.refusal(), (400, "bad_request".to_owned()), "{path}");
    }
    let reply = node.send(ask(Method::DELETE, &format!("/v1/sessions/{id}?dry_run=1"), None)).await;
    assert_eq!(reply.refusal(), (400, "bad_request".to_owned()));
    assert_eq!(node.get(&format!("/v1/sessions/{id}")).await.status, StatusCode::OK);
}

#[tokio::test]
async fn bodies_are_json_and_bounded() {
    let node = Node::with(|config| config.max_body = 2048).await;
    let raw = |kind: Option<&str>, body: Vec<u8>| {
        let request = Request::builder().method(Method::POST).uri("/v1/sessions");
        let request = match kind {
            Some(kind) => request.header(header::CONTENT_TYPE, kind),
            None => request,
        };
        request.body(Body::from(body)).expect("a request")
    };
    let good = json!({"agent": AGENT}).to_string().into_bytes();
    for kind in [None, Some("text/plain"), Some("application/x-www-form-urlencoded")] {
        let reply = node.send(raw(kind, good.clone())).await;
        assert_eq!(reply.refusal(), (415, "unsupported_media_type".to_owned()), "{kind:?}");
    }
    assert_eq!(
        node.send(raw(Some("application/json; charset=utf-8"), good)).await.status,
        StatusCode::CREATED
    );
    for (encoding, expected) in [("identity", 201), ("gzip", 415), ("identity, br", 415)] {
        let request = ask(Method::POST, "/v1/sessions", Some(json!({"agent": AGENT})));
        let reply = node.send(with(request, "content-encoding", encoding)).await;
        assert_eq!(reply.status, expected, "{encoding}");
    }
    let lone_surrogate = br#"{"agent": "helper", "prompt": "\ud800"}"#.to_vec();
    let not_utf8 = b"{\"agent\": \"helper\", \"prompt\": \"\xff\"}".to_vec();
    let twice = br#"{"agent": "helper", "agent": "helper"}"#.to_vec();
    let deep = ["[".repeat(1000), "]".repeat(1000)].concat().into_bytes();
    for body in [
        b"".to_vec(),
        b"{".to_vec(),
        b"{} {}".to_vec(),
        b"nul".to_vec(),
        lone_surrogate,
        not_utf8,
        twice,
        deep,
    ] {
        let reply = node.send(raw(Some("application/json"), body.clone())).await;
        assert_eq!(reply.refusal(), (400, "bad_request".to_owned()), "{body:?}");
    }
    let large = json!({"agent": AGENT, "prompt": "x".repeat(2048)}).to_string();
    let declared =
        with(raw(Some("application/json"), large.clone().into()), "content-length", &large.len().to_string());
    let parts: Vec<Result<Vec<u8>, std::convert::Infallible>> =
        large.into_bytes().chunks(100).map(|part| Ok(part.to_vec())).collect();
    let mut streamed = raw(Some("application/json"), Vec::new());
    *streamed.body_mut() = Body::from_stream(futures::stream::iter(parts));
    for request in [declared, streamed] {
        let reply = node.send(request).await;
        assert_eq!(reply.refusal(), (413, "payload_too_large".to_owned()));
        assert!(reply.json()["message"].as_str().is_some_and(|message| message.contains("2048")));
    }
}

#[tokio::test]
async fn idempotency_keys_are_short_and_visible() {
    let node = Node::new().await;
    let keyed = |key: &str| {
        with(ask(Method::POST, "/v1/sessions", Some(json!({"agent": AGENT}))), "idempotency-key", key)
    };
    for bad in ["", "a b", &"k".repeat(201)] {
        assert_eq!(node.send(keyed(bad)).await.refusal(), (400, "bad_request".to_owned()), "{bad:?}");
    }
    assert_eq!(node.send(keyed(&"k".repeat(200))).await.status, StatusCode::CREATED);
    let mut two = keyed("a");
    two.headers_mut().append("idempotency-key", "b".parse().expect("a value"));
    assert_eq!(node.send(two).await.refusal(), (400, "bad_request".to_owned()));
}

#[tokio::test]
async fn every_answer_has_a_request_id() {
    let node = Node::new().await;
    for path in ["/healthz", "/nothing", "/v1/sessions/x", "/docs/"] {
        let own = node.get(path).await;
        let id = own.header("x-request-id").expect("an id").to_owned();
        assert!(id.parse::<Uuid>().is_ok(), "{path}: {id}");
        let given = node.send(with(ask(Method::GET, path, None), "x-request-id", "trace-1")).await;
        assert_eq!(given.header("x-request-id"), Some("trace-1"));
    }
    assert_eq!(node.get("/nothing").await.refusal(), (404, "not_found".to_owned()));
    assert_eq!(node.get("/v1/sessions/a/b/c").await.refusal(), (404, "not_found".to_owned()));
    assert_eq!(node.get("/v1/schedules/x").await.refusal(), (404, "not_found".to_owned()));
}

#[tokio::test]
async fn a_full_mailbox_says_so_and_orders_still_get_in() {
    let node = Node::new().await;
    let id = node.create(json!({})).await;
    let path = format!("/v1/sessions/{id}/mail");
    let body = || json!({"body": {"tag": "userMessage", "query": "q"}});
    for _ in 0..256 {
        assert_eq!(node.post(&path, body()).await.status, StatusCode::ACCEPTED);
    }
    let full = node.post(&path, body()).await;
    assert_eq!(full.refusal(), (429, "mailbox_full".to_owned()));
    assert!(full.header("retry-after").is_some());
    let message = node.post(&format!("/v1/sessions/{id}/messages"), json!({"prompt": "x"})).await;
    assert_eq!(message.refusal(), (429, "mailbox_full".to_owned()));
    let order = || json!({"body": {"tag": "control", "message": {"tag": "pause"}}});
    for _ in 0..512 {
        assert_eq!(node.post(&path, order()).await.status, StatusCode::ACCEPTED);
    }
    // They are bounded as well, by whichever way they come.
    let full = node.post(&path, order()).await;
    assert_eq!(full.refusal(), (429, "mailbox_full".to_owned()));
    assert!(full.json()["message"].as_str().is_some_and(|message| message.contains("512")));
    for command in ["pause", "cancel"] {
        let reply = node.send(ask(Method::POST, &format!("/v1/sessions/{id}/{command}"), None)).await;
        assert_eq!(reply.refusal(), (429, "mailbox_full".to_owned()), "{command}");
    }
    let count = "SELECT count(*) FROM mail WHERE tag = 'control'";
    let count: i64 = node.client().await.query_one(count, &[]).await.expect("a count").get(0);
    assert_eq!(count, 512);
}

#[tokio::test]
async fn an_agent_that_isnt_there_is_named() {
    let node = Node::new().await;
    let long = "y".repeat(101);
    for (slug, path, shown) in
        [("nobody", "nobody", "\"nobody\""), ("a\0b", "a%00b", "a\\0b"), (&long, &long, "yyy…")]
    {
        let reply = node.get(&format!("/v1/agents/{path}")).await;
        assert_eq!(reply.refusal(), (404, "unknown_agent".to_owned()));
        let message = reply.json()["message"].as_str().expect("a message").to_owned();
        assert!(message.contains(shown), "{slug:?}: {message}");
    }
    let reply = node.post("/v1/sessions", json!({"agent": long})).await;
    assert_eq!(reply.refusal(), (404, "unknown_agent".to_owned()));
    assert!(reply.json()["message"].as_str().is_some_and(|message| message.contains("yyy…")));
    let reply = node.get("/v1/agents/%FF").await;
    assert_eq!(reply.refusal(), (404, "unknown_agent".to_owned()));
    assert!(!reply.json()["message"].to_string().contains("named"));
}
