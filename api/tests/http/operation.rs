//! Health, metrics, the document's page, and a node on real sockets from start to end.

use std::{os::unix::fs::PermissionsExt, time::Duration};

use axum::{
    extract::ConnectInfo,
    http::{Method, StatusCode},
};
use holdfast_api::{Config, Peer, ServeError, serve};
use holdfast_store::{listen::Listener, notify::Channel};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpStream, UnixStream},
    sync::oneshot,
};
use tokio_util::sync::CancellationToken;

use crate::support::{Node, PATIENCE, ask};

#[tokio::test]
async fn health_counts_what_goes_on() {
    let node = Node::new().await;
    assert_eq!(node.get("/readyz").await.status, StatusCode::OK);
    node.create(json!({"prompt": "x"})).await;
    tokio::time::sleep(Duration::from_millis(1100)).await;
    let health = node.get("/healthz").await.json();
    let expected = json!({"ok": true, "live_sessions": 1, "active_runs": 0, "queued_runs": 1, "parked_runs": 0, "open_continuations": 0});
    assert_eq!(health, expected);
    node.closing.cancel();
    assert_eq!(node.get("/readyz").await.refusal(), (503, "unavailable".to_owned()));
}

#[tokio::test]
async fn without_a_database_everything_says_so() {
    let node = Node::new().await;
    node.store.db().close().await;
    for path in ["/healthz", "/readyz", "/v1/agents", "/v1/sessions", "/v1/events"] {
        let reply = node.get(path).await;
        assert_eq!(reply.refusal(), (503, "unavailable".to_owned()), "{path}");
        assert!(reply.header("retry-after").is_some(), "{path}");
    }
    let reply = node.post("/v1/sessions", json!({"agent": "helper"})).await;
    assert_eq!(reply.refusal(), (503, "unavailable".to_owned()));
    assert_eq!(node.get("/openapi.json").await.status, StatusCode::OK);
}

#[tokio::test]
async fn metrics_are_shown_to_this_machine_only() {
    let node = Node::new().await;
    node.get("/v1/agents").await;
    node.get("/nothing").await;
    let from = |peer: Option<&str>| {
        let mut request = ask(Method::GET, "/metrics", None);
        if let Some(peer) = peer {
            let peer = Peer::Tcp(peer.parse().expect("an address"));
            request.extensions_mut().insert(ConnectInfo(peer));
        }
        node.send(request)
    };
    for peer in [None, Some("10.0.0.1:5"), Some("[2001:db8::1]:5")] {
        assert_eq!(from(peer).await.refusal(), (403, "forbidden".to_owned()), "{peer:?}");
    }
    for peer in ["127.0.0.1:5", "[::1]:5", "[::ffff:127.0.0.1]:5"] {
        let text = String::from_utf8(from(Some(peer)).await.bytes.to_vec()).expect("text");
        for wanted in [
            r#"holdfast_http_requests_total{method="GET",route="/v1/agents",status="200"} 1"#,
            r#"holdfast_http_requests_total{method="GET",route="none",status="404"} 1"#,
            r#"holdfast_runs{state="queued"} 0"#,
            r#"holdfast_queue_due_runs{class="throttled"} 0"#,
            "holdfast_continuations_open 0",
            "holdfast_database_up 1",
            "holdfast_workers 0",
            "holdfast_feed_lag_seconds 0",
            r#"holdfast_stream_delay_seconds_count{stream="feed"} 0"#,
            "holdfast_http_request_duration_seconds_bucket",
        ] {
            assert!(text.contains(wanted), "{wanted} is missing from\n{text}");
        }
    }
}

#[tokio::test]
async fn metrics_dont_wait_for_a_database_that_doesnt_answer() {
    let node = Node::new().await;
    let mut slow = node.client().await;
    let open = slow.transaction().await.expect("a transaction");
    open.batch_execute("LOCK TABLE runs, sessions, continuations IN ACCESS EXCLUSIVE MODE")
        .await
        .expect("locked");
    let mut request = ask(Method::GET, "/metrics", None);
    request.extensions_mut().insert(ConnectInfo(Peer::Tcp(([127, 0, 0, 1], 5).into())));
    let begun = std::time::Instant::now();
    let reply = node.send(request).await;
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    let text = String::from_utf8_lossy(&reply.bytes).into_owned();
    assert_eq!(reply.status, StatusCode::OK);
    assert!(text.contains("holdfast_http_waiters") && text.contains("holdfast_database_up 1"), "{text}");
    for stale in ["holdfast_runs{", "holdfast_queue_", "holdfast_continuations_open", "holdfast_workers"] {
        assert!(!text.contains(&format!("\n{stale}")), "{stale} is told although nobody knows: {text}");
    }
    open.rollback().await.expect("unlocked");
}

#[test]
fn only_readiness_asks_for_the_database() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/kubernetes/holdfast.yaml");
    let manifest = std::fs::read_to_string(path).expect("the manifest");
    let probes = |name: &str| -> Vec<&str> {
        manifest.lines().filter(|line| line.trim_start().starts_with(name)).collect()
    };
    let restarting: Vec<&str> = [probes("livenessProbe:"), probes("startupProbe:")].concat();
    assert_eq!(restarting.len(), 4);
    assert!(restarting.iter().all(|line| line.contains("tcpSocket") && !line.contains("httpGet")));
    assert!(matches!(probes("readinessProbe:")[..], [line] if line.contains("/readyz")));
    assert!(!manifest.contains("path: /healthz"));
}

#[tokio::test]
async fn a_client_that_only_sends_still_reads_why_it_is_refused() {
    let node = Node::new().await;
    let Served { address, shutdown, ended, .. } = served(&node, |config| config.max_body = 2048).await;
    let body = "x".repeat(8 * 1024 * 1024);
    let head = "POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n";
    let declared = format!("{head}Connection: close\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    let chunked = format!(
        "{head}Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n{:x}\r\n{body}\r\n0\r\n\r\n",
        body.len()
    );
    // Who asks first is answered without having to send anything.
    let asking =
        format!("{head}Connection: close\r\nExpect: 100-continue\r\nContent-Length: {}\r\n\r\n", body.len());
    for request in [declared, chunked, asking] {
        let answer = speak(TcpStream::connect(address).await.expect("connected"), &request).await;
        assert!(answer.starts_with("HTTP/1.1 413") && answer.contains("payload_too_large"), "{answer}");
    }
    shutdown.cancel();
    ended.await.expect("no panic").expect("a clean end");
}

#[tokio::test]
async fn the_document_has_a_page() {
    let node = Node::new().await;
    let reply = node.get("/docs").await;
    assert_eq!((reply.status, reply.header("location")), (StatusCode::PERMANENT_REDIRECT, Some("/docs/")));
    let page = node.get("/docs/").await;
    assert!(page.header("content-type").is_some_and(|kind| kind.starts_with("text/html")));
    let start = node.get("/docs/swagger-initializer.js").await;
    assert!(String::from_utf8_lossy(&start.bytes).contains("/openapi.json"));
    assert_eq!(node.get("/docs/nothing.js").await.refusal(), (404, "not_found".to_owned()));
}

/// A node on real sockets.
struct Served {
    address: std::net::SocketAddr,
    metrics: Option<std::net::SocketAddr>,
    shutdown: CancellationToken,
    ended: tokio::task::JoinHandle<Result<(), ServeError>>,
}

async fn served(node: &Node, change: impl FnOnce(&mut Config)) -> Served {
    let mut config = Config {
        bind: ([127, 0, 0, 1], 0).into(),
        shutdown_grace: Duration::from_secs(5),
        ..Config::default()
    };
    change(&mut config);
    let listener = Listener::start(&node.url, "api-test", &Channel::ALL).expect("a listener");
    let (tell, told) = oneshot::channel();
    let shutdown = CancellationToken::new();
    let serving = serve(node.store.clone(), listener, config, shutdown.clone(), |bound| {
        let _ = tell.send((bound.bind, bound.metrics));
    });
    let ended = tokio::spawn(serving);
    let (address, metrics) = told.await.expect("it is bound");
    Served { address, metrics, shutdown, ended }
}

async fn speak(mut stream: impl AsyncReadExt + AsyncWriteExt + Unpin, request: &str) -> String {
    stream.write_all(request.as_bytes()).await.expect("written");
    let mut answer = String::new();
    tokio::time::timeout(PATIENCE, stream.read_to_string(&mut answer)).await.expect("in time").expect("read");
    answer
}

#[tokio::test]
async fn shutting_down_ends_streams_and_answers_who_waits() {
    let node = Node::new().await;
    let id = node.create(json!({"prompt": "x"})).await;
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("api.sock");
    let Served { address, shutdown, ended, .. } =
        served(&node, |config| config.socket = Some(path.clone())).await;
    assert_eq!(std::fs::metadata(&path).expect("a socket").permissions().mode() & 0o777, 0o600);

    let get =
        |path: &str, host: &str| format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    let over = UnixStream::connect(&path).await.expect("connected");
    let answer = speak(over, &get("/metrics", "any-name")).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let tcp =
        async |request: String| speak(TcpStream::connect(address).await.expect("connected"), &request).await;
    let rebound = tcp(get("/healthz", "evil.example")).await;
    assert!(rebound.starts_with("HTTP/1.1 403") && rebound.contains("forbidden_origin"), "{rebound}");

    let mut stream = TcpStream::connect(address).await.expect("connected");
    stream
        .write_all(get(&format!("/v1/sessions/{id}/events"), "localhost").as_bytes())
        .await
        .expect("written");
    let mut head = vec![0; 1];
    stream.read_exact(&mut head).await.expect("the stream has begun");
    let close = async {
        // Long enough for the request to have begun in any order; it answers either way.
        tokio::time::sleep(Duration::from_millis(200)).await;
        shutdown.cancel();
    };
    let (waited, ()) =
        tokio::join!(tcp(get(&format!("/v1/sessions/{id}?wait&timeout=600"), "localhost")), close);
    assert!(waited.starts_with("HTTP/1.1 202"), "{waited}");
    let mut rest = String::new();
    stream.read_to_string(&mut rest).await.expect("the stream ends properly");
    assert!(rest.contains("event: snapshot"), "{rest}");
    tokio::time::timeout(PATIENCE, ended).await.expect("in time").expect("no panic").expect("a clean end");
    assert!(!path.exists(), "the socket's file is gone");
}

#[tokio::test]
async fn the_grace_is_kept_even_with_a_client_that_never_ends() {
    let node = Node::new().await;
    let Served { address, shutdown, ended, .. } =
        served(&node, |config| config.shutdown_grace = Duration::from_millis(300)).await;
    let mut slow = TcpStream::connect(address).await.expect("connected");
    let request = "POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{";
    slow.write_all(request.as_bytes()).await.expect("written");
    slow.flush().await.expect("sent");
    tokio::time::sleep(Duration::from_millis(200)).await;
    shutdown.cancel();
    tokio::time::timeout(Duration::from_secs(5), ended)
        .await
        .expect("in time")
        .expect("no panic")
        .expect("a clean end");
}

#[tokio::test]
async fn metrics_have_an_address_of_their_own_if_asked_for() {
    let node = Node::new().await;
    let Served { metrics, shutdown, ended, .. } =
        served(&node, |config| config.metrics_bind = Some(([127, 0, 0, 1], 0).into())).await;
    let port = metrics.expect("the address is told although the system chose the port");
    assert_ne!(port.port(), 0);
    let stream = TcpStream::connect(port).await.expect("connected");
    let answer = speak(stream, "GET /metrics HTTP/1.1\r\nHost: node-7\r\nConnection: close\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("holdfast_runs"), "{answer}");
    for path in ["/healthz", "/readyz"] {
        let request = format!("GET {path} HTTP/1.1\r\nHost: node-7\r\nConnection: close\r\n\r\n");
        let answer = speak(TcpStream::connect(port).await.expect("connected"), &request).await;
        assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("live_sessions"), "{answer}");
    }
    let stream = TcpStream::connect(port).await.expect("connected");
    let answer = speak(stream, "GET /v1/agents HTTP/1.1\r\nHost: node-7\r\nConnection: close\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 404"), "nothing else is served there: {answer}");
    shutdown.cancel();
    ended.await.expect("no panic").expect("a clean end");
}

#[tokio::test]
async fn tokens_are_read_again_at_a_hangup() {
    let node = Node::new().await;
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("tokens.json");
    let tokens = |token: &str| json!({"tokens": [{"owner": "alice", "token": token}]}).to_string();
    std::fs::write(&path, tokens("old")).expect("written");
    let Served { address, shutdown, ended, .. } =
        served(&node, |config| config.auth_tokens = Some(path.clone())).await;
    let code = async |token: &str| {
        let request = format!(
            "GET /v1/agents HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n\r\n"
        );
        let answer = speak(TcpStream::connect(address).await.expect("connected"), &request).await;
        answer.split(' ').nth(1).map(str::to_owned).unwrap_or_default()
    };
    assert_eq!((code("old").await.as_str(), code("new").await.as_str()), ("200", "401"));
    let hang_up = || {
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::HUP).expect("sent");
    };
    std::fs::write(&path, tokens("new")).expect("written");
    hang_up();
    let read = async {
        while code("new").await != "200" {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, read).await.expect("the new token is valid");
    assert_eq!(code("old").await, "401");
    shutdown.cancel();
    ended.await.expect("no panic").expect("a clean end");
}
