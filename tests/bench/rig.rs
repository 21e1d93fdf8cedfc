//! What the bench programs share: a durable Postgres, a worker in this process, and a model that costs
//! nothing and asks for one more call until it has been asked often enough.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use futures::{FutureExt, future::BoxFuture};
use holdfast_engine::{
    content::{Payload, Query},
    decide::Mode,
    ids::{MailId, SessionId},
    model::{Flavor, Message as Shown, ModelAnswer, ModelRequest, ModelTarget, RequestedCall},
};
use holdfast_store::{
    Store,
    accept::{Caller, Message},
    connect::{self, ConnectOptions},
    create::{self, NewSession},
    embedded::{Cluster, EmbeddedOptions},
    listen::Listener,
    migrate,
    notify::{Channel, Notifier},
};
use holdfast_worker::{
    Config,
    model::{ApiKey, ApiKeys, Backoff, ModelClient, ModelError},
};
use serde_json::json;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// A Postgres that flushes to disk, with a database of the current schema.
pub(crate) struct Rig {
    /// The database.
    pub(crate) url: String,
    /// Whether its agent's tools only read, so that one commit stores an answer and their results.
    pub(crate) tools_only_read: bool,
    /// How long its agent's prompt is, in KiB.
    pub(crate) prompt_kib: usize,
    cluster: Cluster,
    dir: tempfile::TempDir,
}

impl Rig {
    /// Starts it.
    pub(crate) async fn start() -> Result<Self> {
        holdfast_store::install::ensure_installed().await?;
        let dir = tempfile::tempdir()?;
        // A checkpoint in the middle would write whole pages again and drown what is measured.
        let settings = [
            ("full_page_writes", "off"),
            ("checkpoint_timeout", "1h"),
            ("max_wal_size", "8GB"),
            ("shared_buffers", "512MB"),
            ("shared_preload_libraries", "pg_stat_statements"),
            ("track_io_timing", "off"),
        ];
        let cluster = Cluster::start(EmbeddedOptions {
            data_dir: PathBuf::from(dir.path()),
            durable: true,
            settings: settings.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec(),
            port: None,
        })
        .await?;
        cluster.create_database("bench").await?;
        let url = cluster.url("bench");
        migrate::migrate(&url).await?;
        Ok(Self { url, tools_only_read: false, prompt_kib: 0, cluster, dir })
    }

    /// Room for files.
    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// A plain connection.
    pub(crate) async fn connect(&self) -> Result<tokio_postgres::Client> {
        let (client, connection) = tokio_postgres::connect(&self.url, tokio_postgres::NoTls).await?;
        let _connection = tokio::spawn(connection);
        Ok(client)
    }

    /// Where the server's programs lie.
    pub(crate) fn bin_dir(&self) -> PathBuf {
        self.cluster.installation().bin.clone()
    }

    /// The server's process.
    pub(crate) fn server(&self) -> Result<u32> {
        self.cluster.pid().context("the server has no pid")
    }

    /// The file of an agent that needs no tool.
    pub(crate) fn agent_file(&self) -> Result<PathBuf> {
        let agent = self.dir().join("agent.json");
        let rule = json!({"tool": "*", "disposition": {"tag": "runSync"}, "readOnly": self.tools_only_read});
        let config = json!({"slug": "bench", "flavor": "openai", "modelUrl": "http://127.0.0.1:1", "modelName": "none",
            "systemPrompt": ["Be brief. ".repeat(self.prompt_kib * 1024 / 10)],
            "toolCallPolicyConfig": {"rules": [rule]}});
        std::fs::write(&agent, config.to_string())?;
        Ok(agent)
    }

    /// A store, and an agent recorded for it.
    pub(crate) async fn store(&self, connections: usize) -> Result<(Store, holdfast_tools::LoadedAgent)> {
        let loaded = holdfast_tools::load_agent(&self.agent_file()?).await?;
        let store = store(&self.url, "bench", connections).await?;
        holdfast_tests::store::record(&store, "bench", &loaded.agent).await?;
        Ok((store, loaded))
    }
}

/// A store over the database at `url`.
pub(crate) async fn store(url: &str, role: &str, connections: usize) -> Result<Store> {
    let options = ConnectOptions { hot_connections: connections, ..ConnectOptions::new(url, role) };
    Ok(Store::new(connect::connect(options).await?, Some(Notifier::start(url, role)?)))
}

/// Runs a worker in this process while `work` goes on.
pub(crate) async fn with_worker<T>(
    url: &str,
    store: &Store,
    agent: holdfast_tools::LoadedAgent,
    slots: usize,
    model: Arc<Asking>,
    work: impl Future<Output = Result<T>>,
) -> Result<T> {
    let stop = CancellationToken::new();
    let listener = Listener::start(url, "bench", &[Channel::Runs])?;
    let config = Config {
        slots,
        lease_ttl: Duration::from_secs(15),
        shutdown_grace: Duration::from_secs(5),
        stream_tokens: false,
        labels: Vec::new(),
        agents: vec![agent],
        keys: ApiKeys::default(),
        alone: None,
    };
    let worker = holdfast_worker::run_with(store.clone(), listener, config, model, stop.clone());
    let working = async {
        let done = work.await;
        stop.cancel();
        done
    };
    let (worked, done) = tokio::join!(worker, working);
    worked?;
    done
}

/// Creates a session that runs at once.
pub(crate) async fn create(store: &Store) -> Result<SessionId> {
    let id = SessionId(Uuid::now_v7());
    let query = Query { text: "go on".to_owned(), media: Vec::new() };
    let new = NewSession {
        id,
        owner: String::new(),
        agent: "bench".to_owned(),
        parent: None,
        parent_call: None,
        labels: BTreeMap::new(),
        priority: 0,
        message: Some(Message {
            id: MailId(Uuid::now_v7()),
            query: Payload::Inline(query),
            blobs: Vec::new(),
            interrupt: false,
        }),
        run: Mode::UntilBlocked,
    };
    let caller = Caller { owner: Some(String::new()), traceparent: None, key: None };
    Box::pin(create::create(store, &caller, new.clone())).await?;
    Ok(id)
}

/// Answers with one call of a tool that isn't there, which costs no process, until a session has been
/// answered `loops` times; then with text. Notes when each session was asked.
pub(crate) struct Asking {
    loops: usize,
    probe: Option<tokio_postgres::Client>,
    /// When the model was asked and where the WAL stood, in the order of requests.
    pub(crate) marks: Mutex<Vec<(Instant, u64)>>,
    /// How many sessions have had their last answer.
    pub(crate) finished: tokio::sync::watch::Sender<usize>,
}

impl Asking {
    /// A model that ends each session's run after `loops` answers. With `probe`, it also notes the WAL.
    pub(crate) fn new(loops: usize, probe: Option<tokio_postgres::Client>) -> Arc<Self> {
        Arc::new(Self { loops, probe, marks: Mutex::default(), finished: tokio::sync::watch::Sender::new(0) })
    }

    /// Waits until that many sessions have had their last answer.
    pub(crate) async fn until_finished(&self, sessions: usize) -> Result<()> {
        self.finished.subscribe().wait_for(|finished| *finished >= sessions).await?;
        Ok(())
    }
}

impl ModelClient for Asking {
    fn complete<'a>(
        &'a self,
        _: &'a ModelTarget,
        _: Option<&'a ApiKey>,
        request: &'a ModelRequest,
        _: Option<&'a (dyn Fn(&str) + Send + Sync)>,
        _: &'a (dyn Fn(Backoff) + Send + Sync),
    ) -> BoxFuture<'a, Result<ModelAnswer, ModelError>> {
        async move {
            if let Some(probe) = &self.probe {
                let row = probe.query_one("SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint", &[]).await;
                let bytes = row.map(|row| row.get::<_, i64>(0)).unwrap_or_default();
                self.marks
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push((Instant::now(), bytes.unsigned_abs()));
            }
            let turn = request
                .messages
                .iter()
                .filter(|message| matches!(***message, Shown::Assistant { .. }))
                .count();
            let last = turn + 1 >= self.loops;
            if last {
                self.finished.send_modify(|finished| *finished += 1);
            }
            let call = RequestedCall {
                provider_id: format!("call_{turn}"),
                name: "no_such_tool".to_owned(),
                arguments: format!("{{\"note\": \"{}\"}}", "x".repeat(700)),
            };
            Ok(ModelAnswer {
                text: Some("y".repeat(200)),
                thinking: None,
                calls: if last { Vec::new() } else { vec![call] },
                usage: None,
                flavor: Flavor::OpenAI,
                raw: None,
                stop_reason: None,
            })
        }
        .boxed()
    }
}
