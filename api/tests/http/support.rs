//! A node over a database of its own, and requests to it.

use std::{
    path::PathBuf,
    sync::{OnceLock, mpsc},
    time::Duration,
};

use axum::{
    Router,
    body::{Body, Bytes, to_bytes},
    http::{HeaderMap, Method, Request, StatusCode, header},
};
use futures::StreamExt;
use holdfast_api::{Api, Config, router};
use holdfast_engine::waking::Waking;
use holdfast_store::{
    Store, agents,
    connect::{ConnectOptions, connect},
    embedded::{Cluster, EmbeddedOptions},
    feed,
    listen::Listener,
    migrate::migrate,
    notify::{Channel, Notifier},
};
use serde_json::{Value, json};
use tokio_postgres::NoTls;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;
use uuid::Uuid;

/// Longer than anything here takes.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
/// The agent that the tests' sessions use.
pub(crate) const AGENT: &str = "helper";

fn server_url() -> &'static str {
    static URL: OnceLock<String> = OnceLock::new();
    URL.get_or_init(|| std::env::var("HOLDFAST_TEST_SERVER").unwrap_or_else(|_| own_server()))
}

/// A server that lives as long as this process, kept by a thread with a runtime of its own.
fn own_server() -> String {
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(async {
            let dir = std::env::temp_dir().join(format!("holdfast-tests-{}", std::process::id()));
            let settings = vec![("max_connections".to_owned(), "400".to_owned())];
            let options = EmbeddedOptions { durable: false, settings, ..EmbeddedOptions::new(dir) };
            let cluster = Cluster::start(options).await.expect("a Postgres for the tests");
            tell.send(cluster.url("postgres")).expect("somebody asked for it");
            std::future::pending::<()>().await;
        });
    });
    told.recv().expect("the test server has started")
}

async fn fresh_database() -> String {
    let server = tokio::task::spawn_blocking(server_url).await.expect("a server");
    let (client, connection) = tokio_postgres::connect(server, NoTls).await.expect("the server answers");
    tokio::spawn(connection);
    let name = format!("holdfast_api_{}", Uuid::now_v7().simple());
    client.batch_execute(&format!("CREATE DATABASE {name} TEMPLATE template0")).await.expect("a database");
    let at = server.rfind('/').expect("the URL names a database");
    let url = format!("{}/{name}", &server[..at]);
    migrate(&url).await.expect("migrated");
    url
}

/// An API node.
pub(crate) struct Node {
    pub(crate) url: String,
    pub(crate) store: Store,
    pub(crate) app: Router,
    pub(crate) closing: CancellationToken,
    _dir: tempfile::TempDir,
}

/// Two owners and an admin.
pub(crate) const TOKENS: &str = r#"{"tokens": [
    {"owner": "alice", "token": "alice-token"},
    {"owner": "bob", "token": "bob-token"},
    {"owner": "root", "token": "root-token"}]}"#;

impl Node {
    /// A node without tokens.
    pub(crate) async fn new() -> Self {
        Self::with(|_| {}).await
    }

    /// A node of which alice, bob and the admin root have tokens.
    pub(crate) async fn with_tokens() -> Self {
        Self::on(&fresh_database().await, true, |_| {}).await
    }

    /// A node without tokens, configured.
    pub(crate) async fn with(change: impl FnOnce(&mut Config)) -> Self {
        Self::on(&fresh_database().await, false, change).await
    }

    /// A node on a database that is there.
    pub(crate) async fn on(url: &str, tokens: bool, change: impl FnOnce(&mut Config)) -> Self {
        let options = ConnectOptions { hot_connections: 16, ..ConnectOptions::new(url, "api-test") };
        let db = connect(options).await.expect("pools");
        let notifier = Notifier::start(url, "api-test").expect("a notifier");
        let store = Store::new(db, Some(notifier));
        feed::renew(&store).await.expect("the feed has a name");
        let descriptor = json!({"announce": "Helps.", "model": "m", "tools": []}).to_string();
        let waking = Waking::default();
        let agent = agents::Record { slug: AGENT, revision: "r1", descriptor: &descriptor, waking: &waking };
        agents::record(&store, &agent).await.expect("recorded");
        let listener =
            Listener::start(url, "api-test", &[Channel::Events, Channel::Deltas]).expect("a listener");
        let dir = tempfile::tempdir().expect("a directory");
        let mut config = Config::default();
        if tokens {
            let path: PathBuf = dir.path().join("tokens.json");
            std::fs::write(&path, TOKENS).expect("written");
            config.auth_tokens = Some(path);
            config.admin_owners = vec!["root".to_owned()];
        }
        change(&mut config);
        let closing = CancellationToken::new();
        let api = Api::start(store.clone(), listener, config, closing.clone()).expect("a node");
        let app = router(api);
        Self { url: url.to_owned(), store, app, closing, _dir: dir }
    }

    /// Sends a request.
    pub(crate) async fn send(&self, request: Request<Body>) -> Reply {
        let answering = async {
            let response = self.app.clone().oneshot(request).await.expect("a router never fails");
            let (parts, body) = response.into_parts();
            let bytes = to_bytes(body, usize::MAX).await.expect("a body");
            Reply { status: parts.status, headers: parts.headers, bytes }
        };
        tokio::time::timeout(PATIENCE, answering).await.expect("an answer in time")
    }

    pub(crate) async fn get(&self, path: &str) -> Reply {
        self.send(ask(Method::GET, path, None)).await
    }

    pub(crate) async fn post(&self, path: &str, body: Value) -> Reply {
        self.send(ask(Method::POST, path, Some(body))).await
    }

    /// Creates a session; returns its id.
    pub(crate) async fn create(&self, body: Value) -> String {
        let mut whole = json!({"agent": AGENT});
        for (name, value) in body.as_object().expect("an object") {
            whole[name] = value.clone();
        }
        let reply = self.post("/v1/sessions", whole).await;
        assert_eq!(reply.status, StatusCode::CREATED, "{:?}", reply.bytes);
        reply.json()["session_id"].as_str().expect("an id").to_owned()
    }

    /// Opens an event stream.
    pub(crate) async fn stream(&self, request: Request<Body>) -> Frames {
        let response = self.app.clone().oneshot(request).await.expect("a router never fails");
        assert_eq!(response.status(), StatusCode::OK);
        let replay = response.headers()["agents-replay"].to_str().expect("a word").to_owned();
        Frames { replay, body: Box::pin(response.into_body().into_data_stream()), kept: Vec::new() }
    }

    pub(crate) async fn client(&self) -> tokio_postgres::Client {
        let (client, connection) =
            tokio_postgres::connect(&self.url, NoTls).await.expect("the server answers");
        tokio::spawn(connection);
        client
    }
}

/// A request with a JSON body, or none.
pub(crate) fn ask(method: Method, path: &str, body: Option<Value>) -> Request<Body> {
    let request = Request::builder().method(method).uri(path);
    match body {
        Some(body) => request
            .header(header::CONTENT_TYPE, "application/json")
            .body(Body::from(body.to_string()))
            .expect("a request"),
        None => request.body(Body::empty()).expect("a request"),
    }
}

/// The same request with a header more.
pub(crate) fn with(mut request: Request<Body>, name: &'static str, value: &str) -> Request<Body> {
    request.headers_mut().insert(name, value.parse().expect("a header value"));
    request
}

/// The same request of somebody.
pub(crate) fn by(request: Request<Body>, token: &str) -> Request<Body> {
    with(request, "authorization", &format!("Bearer {token}"))
}

/// An answer.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) bytes: Bytes,
}

impl Reply {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.bytes).unwrap_or_else(|error| panic!("{error}: {:?}", self.bytes))
    }

    /// Its status and error code, which has to come with a sentence.
    pub(crate) fn refusal(&self) -> (u16, String) {
        let body = self.json();
        assert!(body["message"].as_str().is_some_and(|message| !message.is_empty()), "{body}");
        (self.status.as_u16(), body["error"].as_str().expect("a code").to_owned())
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }
}

/// What comes by an event stream.
pub(crate) struct Frames {
    pub(crate) replay: String,
    body: std::pin::Pin<Box<axum::body::BodyDataStream>>,
    kept: Vec<u8>,
}

/// One frame.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Frame {
    pub(crate) id: Option<String>,
    pub(crate) event: String,
    pub(crate) data: Value,
}

impl Frames {
    /// The next event; comments are passed over. None at the stream's end.
    pub(crate) async fn next(&mut self) -> Option<Frame> {
        tokio::time::timeout(PATIENCE, async {
            loop {
                if let Some(end) = self.kept.windows(2).position(|pair| pair == b"\n\n") {
                    let block: Vec<u8> = self.kept.drain(..end + 2).collect();
                    match parse(std::str::from_utf8(&block).expect("UTF-8")) {
                        Some(frame) => return Some(frame),
                        None => continue,
                    }
                }
                self.kept.extend_from_slice(&self.body.next().await?.expect("a part"));
            }
        })
        .await
        .expect("a frame in time")
    }

    /// Everything up to and with the first event of a kind.
    pub(crate) async fn until(&mut self, kind: &str) -> Vec<Frame> {
        let mut frames = Vec::new();
        loop {
            let frame = self.next().await.unwrap_or_else(|| panic!("no {kind} in {frames:#?}"));
            let found = frame.event == kind;
            frames.push(frame);
            if found {
                return frames;
            }
        }
    }
}

fn parse(block: &str) -> Option<Frame> {
    let (mut id, mut event, mut data) = (None, String::new(), None);
    for line in block.lines() {
        match line.split_once(": ") {
            Some(("id", value)) => id = Some(value.to_owned()),
            Some(("event", value)) => event = value.to_owned(),
            Some(("data", value)) => data = Some(serde_json::from_str(value).expect("JSON in one line")),
            _ => {}
        }
    }
    data.map(|data| Frame { id, event, data })
}

/// The kinds of frames, in order.
pub(crate) fn kinds(frames: &[Frame]) -> Vec<&str> {
    frames.iter().map(|frame| frame.event.as_str()).collect()
}
