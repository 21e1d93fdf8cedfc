//! The canonical flow in one process, on a real Postgres: three calls, one run, two deferred, results
//! by token, one answer.
#![expect(clippy::unwrap_used, reason = "a test")]

use std::{
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::{FutureExt, future::BoxFuture};
use holdfast_engine::{
    content::{Payload, Query, ToolResult},
    decide::Mode,
    ids::{MailId, SessionId, Token},
    model::{Flavor, Message as ModelMessage, ModelAnswer, ModelRequest, ModelTarget, RequestedCall},
};
use holdfast_store::{
    Store,
    accept::{Caller, Message},
    connect::{self, ConnectOptions},
    create::{self, NewSession},
    embedded::{Cluster, EmbeddedOptions},
    history,
    listen::{Heard, Listener, Subscription},
    migrate,
    notify::{Channel, Notifier},
    sessions,
    settle::{self, Report},
};
use holdfast_worker::{
    Config,
    model::{ApiKey, ApiKeys, Backoff, ModelClient, ModelError},
};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

#[derive(Default)]
struct Scripted(Mutex<Vec<ModelRequest>>);

impl ModelClient for Scripted {
    fn complete<'a>(
        &'a self,
        _: &'a ModelTarget,
        _: Option<&'a ApiKey>,
        request: &'a ModelRequest,
        deltas: Option<&'a (dyn Fn(&str) + Send + Sync)>,
        _: &'a (dyn Fn(Backoff) + Send + Sync),
    ) -> BoxFuture<'a, Result<ModelAnswer, ModelError>> {
        let results: Vec<String> = request
            .messages
            .iter()
            .filter_map(|message| match &**message {
                ModelMessage::Tool { name, text, .. } => Some(format!("{name}={text}")),
                _ => None,
            })
            .collect();
        self.0.lock().unwrap().push(request.clone());
        if let Some(deltas) = deltas {
            deltas("one ");
            deltas("two");
        }
        async move {
            let call = |n: usize, name: &str, arguments: &str| RequestedCall {
                provider_id: format!("call_{n}"),
                name: name.to_owned(),
                arguments: arguments.to_owned(),
            };
            let (text, calls) = if results.is_empty() {
                let calls = vec![
                    call(1, "bash_fetch_local", r#"{"what": "here"}"#),
                    call(2, "fetch_remote_a", "{}"),
                    call(3, "fetch_remote_b", "{}"),
                ];
                (None, calls)
            } else {
                (Some(results.join("; ")), Vec::new())
            };
            Ok(ModelAnswer {
                text,
                thinking: None,
                calls,
                usage: None,
                flavor: Flavor::OpenAI,
                raw: None,
                stop_reason: None,
            })
        }
        .boxed()
    }
}

async fn wait_for(store: &Store, id: SessionId, status: &str) -> sessions::SessionRow {
    let mut tick = tokio::time::interval(Duration::from_millis(20));
    let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
    loop {
        tick.tick().await;
        let row = sessions::get(store, Some(""), id).await.unwrap();
        if row.status == status {
            return row;
        }
        assert!(tokio::time::Instant::now() < deadline, "still {row:?}");
    }
}

/// The next delta, as position, index and text.
async fn delta(heard: &mut Subscription, id: SessionId) -> (i64, u64, String) {
    loop {
        let next = tokio::time::timeout(Duration::from_secs(20), heard.recv()).await.unwrap().unwrap();
        let Heard::Item { channel: Channel::Deltas, item } = next else { continue };
        let delta: serde_json::Value = serde_json::from_str(&item).unwrap();
        assert_eq!(delta["session_id"], serde_json::json!(id));
        let (position, index) = (delta["position"].as_i64().unwrap(), delta["index"].as_u64().unwrap());
        return (position, index, delta["text"].as_str().unwrap().to_owned());
    }
}

/// Every request's pieces of text, each of which says which turn it is part of.
async fn pieces_of(answers: &[i64], heard: &mut Subscription, id: SessionId) {
    for position in answers {
        for (index, text) in [(0, "one "), (1, "two")] {
            assert_eq!(delta(heard, id).await, (*position, index, text.to_owned()));
        }
    }
}

/// The session's events are dense, and every run that started has stopped.
async fn events_are_whole(store: &Store, row: &sessions::SessionRow) {
    let events = holdfast_store::feed::after(store, row.id.into(), 0, 100).await.unwrap();
    assert_eq!(
        events.iter().map(|event| event.seq).collect::<Vec<_>>(),
        (1..=row.event_seq).collect::<Vec<_>>()
    );
    let kinds: Vec<&str> = events.iter().map(|event| event.kind.as_str()).collect();
    assert_eq!(
        kinds.iter().filter(|kind| **kind == "run.started").count(),
        kinds.iter().filter(|kind| **kind == "run.stopped").count(),
        "{kinds:?}"
    );
}

/// An agent with one executable tool, which defers what it calls remote.
fn write_agent(dir: &Path) -> PathBuf {
    let tools = dir.join("tools");
    std::fs::create_dir(&tools).unwrap();
    let script = tools.join("fetch-local");
    std::fs::write(
        &script,
        "#!/bin/sh\nif [ \"$1\" = describe ]; then\ncat <<'E'\n{\"slug\":\"fetch_local\",\"description\":\"fetches\",\"args\":[{\"name\":\"what\",\"description\":\"what\",\"type\":\"string\",\"backing_type\":\"string\",\"arity\":\"single\",\"mode\":\"positional\"}]}\nE\nexit 0; fi\necho local $2\n",
    )
    .unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let agent = dir.join("agent.json");
    std::fs::write(
        &agent,
        r#"{"slug":"demo","flavor":"openai","modelUrl":"http://127.0.0.1:1/v1","modelName":"m","toolDirectory":"tools",
            "toolCallPolicyConfig":{"default":{"tag":"runSync"},"rules":[{"tool":"fetch_remote_*","disposition":{"tag":"defer","reason":"outside"}}]}}"#,
    )
    .unwrap();
    agent
}

#[tokio::test(flavor = "multi_thread")]
async fn three_calls_become_one_answer() {
    let dir = tempfile::tempdir().unwrap();
    let agent = write_agent(dir.path());
    let cluster = Cluster::start(EmbeddedOptions {
        data_dir: dir.path().join("pg"),
        durable: false,
        settings: Vec::new(),
        port: None,
    })
    .await
    .unwrap();
    cluster.create_database("flow").await.unwrap();
    let url = cluster.url("flow");
    migrate::migrate(&url).await.unwrap();
    let db = connect::connect(ConnectOptions::new(&url, "test")).await.unwrap();
    let notifier = Notifier::start(&url, "test").unwrap();
    let listener = Listener::start(&url, "test", &[Channel::Runs, Channel::Events]).unwrap();
    let deltas = Listener::start(&url, "test-deltas", &[Channel::Deltas]).unwrap();
    deltas.connected().await;
    let mut heard = deltas.subscribe();
    let store = Store::new(db, Some(notifier));
    let loaded = holdfast_tools::load_agent(&agent).await.unwrap();
    let (slug, revision) = ("demo", loaded.agent.revision.as_str());
    let record =
        holdfast_store::agents::Record { slug, revision, descriptor: "{}", waking: &loaded.agent.waking };
    holdfast_store::agents::record(&store, &record).await.unwrap();

    let model = Arc::new(Scripted::default());
    let stop = CancellationToken::new();
    let config = Config {
        slots: 4,
        lease_ttl: Duration::from_secs(5),
        shutdown_grace: Duration::from_secs(5),
        stream_tokens: true,
        labels: Vec::new(),
        agents: vec![loaded],
        keys: ApiKeys::default(),
        alone: None,
    };
    let worker =
        holdfast_worker::run_with(store.clone(), listener, config, Arc::clone(&model) as _, stop.clone());
    let flow = async {
        let caller = Caller { owner: Some(String::new()), traceparent: None, key: None };
        let id = SessionId(Uuid::now_v7());
        let new = NewSession {
            id,
            owner: String::new(),
            agent: "demo".to_owned(),
            parent: None,
            parent_call: None,
            labels: Default::default(),
            priority: 0,
            message: Some(Message {
                id: MailId(Uuid::now_v7()),
                query: Payload::Inline(Query { text: "fetch it all".to_owned(), media: Vec::new() }),
                blobs: Vec::new(),
                interrupt: false,
            }),
            run: Mode::UntilBlocked,
        };
        create::create(&store, &caller, new.clone()).await.unwrap();
        wait_for(&store, id, "waiting_external").await;
        let pending = history::pending(&store, id).await.unwrap();
        assert_eq!(
            pending.iter().map(|call| call.tool.as_str()).collect::<Vec<_>>(),
            ["fetch_remote_a", "fetch_remote_b"]
        );
        for call in &pending {
            let report = Report::Result(ToolResult::text(format!("result of {}", call.tool)));
            settle::complete(&store, &caller, Token(call.token), &report, true).await.unwrap();
        }
        let row = wait_for(&store, id, "idle").await;
        let turns = history::newest_turns(&store, id, i64::MAX, 10).await.unwrap();
        assert_eq!(turns.len(), 4);
        let holdfast_engine::turn::TurnBody::Llm(answer) = &turns[0].body else { panic!("no answer") };
        assert_eq!(
            answer.text.as_deref().unwrap(),
            "bash_fetch_local=local here\n; fetch_remote_a=result of fetch_remote_a; fetch_remote_b=result of fetch_remote_b"
        );
        assert_eq!(model.0.lock().unwrap().len(), 2, "asked twice: for the calls and with all three results");
        let answers: Vec<i64> = turns
            .iter()
            .filter(|turn| turn.body.tag() == "LlmTurn")
            .map(|turn| turn.position)
            .rev()
            .collect();
        pieces_of(&answers, &mut heard, id).await;
        events_are_whole(&store, &row).await;
        stop.cancel();
    };
    let (ended, ()) = tokio::join!(worker, flow);
    ended.unwrap();
}
