//! A store over a database of its own, with an agent recorded.

use std::{collections::BTreeMap, time::Duration};

use chrono::{DateTime, Utc};
use holdfast_engine::{
    agent::{Agent, AgentConfig},
    content::{Payload, Query},
    decide::Mode,
    ids::{CallId, MailId, SessionId, Token, WorkerId},
};
use holdfast_store::{
    Store, StoreError,
    accept::{self, Caller, Message},
    agents::{self, Record},
    connect::{ConnectOptions, connect},
    create::{self, NewSession},
    gate::Gate,
    idempotency::{Done, Key},
    letters::Receipt,
    notify::Notifier,
    sessions::{self, SessionRow},
};
use tokio_postgres::Client;
use uuid::Uuid;

use crate::{
    cluster::{Database, fresh_database},
    step::Holder,
};

/// The owner of the test's sessions.
pub const OWNER: &str = "alice";

/// The agent's slug.
pub const AGENT: &str = "helper";

/// A lease that outlives any test.
pub const LONG: Duration = Duration::from_secs(300);

/// The agent at a revision. Its tools: `ask_*` are deferred, `ask_soon_*` with a deadline of a second,
/// `twice_*` may run again, and all others run in the worker.
///
/// # Panics
/// Never: the configuration is a constant.
pub fn agent(revision: &str) -> Agent {
    let text = r#"{"slug": "helper", "flavor": "OpenAI", "modelUrl": "http://127.0.0.1:9/v1", "modelName": "m",
        "systemPrompt": ["Help."], "toolCallPolicyConfig": {"default": {"tag": "runSync"}, "rules": [
            {"tool": "ask_soon_*", "disposition": {"tag": "defer", "reason": "soon"}, "deadlineSeconds": 1},
            {"tool": "ask_*", "disposition": {"tag": "defer", "reason": "somebody decides"}},
            {"tool": "twice_*", "disposition": {"tag": "runSync"}, "idempotent": true}]}}"#;
    let config = AgentConfig::parse(text).expect("an agent");
    config.prepare(revision.to_owned(), Vec::new()).expect("a valid agent")
}

/// Records an agent under a slug, and makes its revision the current one.
///
/// # Errors
/// As the database has it.
pub async fn record(store: &Store, slug: &str, agent: &Agent) -> Result<(), StoreError> {
    let record = Record { slug, revision: &agent.revision, descriptor: "{}", waking: &agent.waking };
    agents::record(store, &record).await
}

/// A caller for the test's owner, without a key.
pub fn caller() -> Caller {
    Caller { owner: Some(OWNER.to_owned()), traceparent: None, key: None }
}

/// The same with an idempotency key; `request` stands for method, path and body.
pub fn caller_with_key(key: &str, request: &str) -> Caller {
    let hash = holdfast_engine::content::Digest::of(request.as_bytes()).0;
    let key = Key { principal: OWNER.to_owned(), key: key.to_owned(), hash, code: 201 };
    Caller { key: Some(key), ..caller() }
}

/// A message with a fresh id.
pub fn message(text: &str) -> Message {
    let query = Payload::Inline(Query { text: text.to_owned(), media: Vec::new() });
    Message { id: MailId(Uuid::now_v7()), query, blobs: Vec::new(), interrupt: false }
}

/// A database of its own and a store over it.
#[derive(Debug)]
pub struct World {
    /// The store.
    pub store: Store,
    /// The current agent.
    pub agent: Agent,
    /// The database; last, so that it is dropped after the store's connections.
    pub database: Database,
}

impl World {
    /// A world without a notifier: everything has to be found by looking.
    pub async fn new() -> Self {
        Self::with_connections(16).await
    }

    /// A world whose store has that many hot connections.
    ///
    /// # Panics
    /// If the database refuses.
    pub async fn with_connections(hot: usize) -> Self {
        let database = fresh_database().await;
        let store = open(database.url(), hot, None).await;
        let agent = agent("r1");
        record(&store, AGENT, &agent).await.expect("recorded");
        Self { store, agent, database }
    }

    /// A world whose store announces what changed.
    ///
    /// # Panics
    /// If the database refuses.
    pub async fn with_notifier() -> Self {
        let mut world = Self::new().await;
        let notifier = Notifier::start(world.database.url(), "tests").expect("a notifier");
        world.store = Store::new(world.store.db().clone(), Some(notifier));
        world
    }

    /// The store with a gate.
    pub fn gated(&self, gate: Gate) -> Store {
        self.store.clone().with_gate(gate)
    }

    /// A plain connection.
    pub async fn sql(&self) -> Client {
        self.database.connect().await
    }

    /// Creates a session without a message.
    pub async fn session(&self) -> SessionId {
        self.created(None, Mode::None).await
    }

    /// Creates a session with a message that runs it.
    pub async fn asked(&self, text: &str) -> SessionId {
        self.created(Some(message(text)), Mode::UntilBlocked).await
    }

    /// Creates a session.
    ///
    /// # Panics
    /// If the store refuses.
    pub async fn created(&self, message: Option<Message>, run: Mode) -> SessionId {
        let new = new_session(message, run);
        create::create(&self.store, &caller(), new.clone()).await.expect("a session");
        new.id
    }

    /// Creates a child that answers a call of its parent.
    ///
    /// # Panics
    /// If the store refuses.
    pub async fn child(&self, parent: SessionId, call: CallId, text: &str) -> SessionId {
        let new = NewSession {
            parent: Some(parent),
            parent_call: Some(call),
            ..new_session(Some(message(text)), Mode::UntilBlocked)
        };
        create::create(&self.store, &caller(), new.clone()).await.expect("a child");
        new.id
    }

    /// Posts a message.
    ///
    /// # Panics
    /// If the store refuses.
    pub async fn post(&self, session: SessionId, text: &str, run: Mode) -> Receipt {
        match accept::post(&self.store, &caller(), session, &message(text), run).await {
            Ok(Done::Now(receipt)) => receipt,
            other => panic!("the message wasn't taken: {other:?}"),
        }
    }

    /// Claims the one run that is due, and loads its session.
    pub async fn hold(&self) -> Holder {
        Holder::claim(&self.store, &self.agent, LONG).await
    }

    /// A session that waits for one deferred call, its run ended; and the call's token.
    pub async fn waiting(&self) -> (SessionId, CallId, Token) {
        self.waiting_since(Utc::now(), "ask_anna").await
    }

    /// The same, with a call of `tool` that was deferred at `now`.
    ///
    /// # Panics
    /// If the store refuses.
    pub async fn waiting_since(&self, now: DateTime<Utc>, tool: &str) -> (SessionId, CallId, Token) {
        let session = self.asked("please").await;
        let mut holder = self.hold().await;
        holder.now = now;
        assert_eq!(holder.session.id, session);
        holder.drive_with(vec![crate::step::calls(&[(tool, "{}")])]).await;
        let call = &holder.session.calls[0];
        (session, call.id, call.token.expect("deferred calls have tokens"))
    }

    /// What clients see of a session.
    ///
    /// # Panics
    /// If it is unknown.
    pub async fn row(&self, session: SessionId) -> SessionRow {
        sessions::get(&self.store, None, session).await.expect("a session")
    }

    /// One value of the database.
    ///
    /// # Panics
    /// If the query doesn't give one.
    pub async fn count(&self, sql: &str) -> i64 {
        let client = self.store.db().client().await.expect("a connection");
        client.query_one(sql, &[]).await.expect("one row").try_get(0).expect("a bigint")
    }

    /// How many run rows there are of a session.
    ///
    /// # Panics
    /// If the database refuses.
    pub async fn runs(&self, session: SessionId) -> i64 {
        let client = self.store.db().client().await.expect("a connection");
        let sql = "SELECT count(*) FROM runs WHERE session_id = $1";
        client.query_one(sql, &[&session.0]).await.expect("one row").try_get(0).expect("a count")
    }

    /// A token's state, if it is there.
    ///
    /// # Panics
    /// If the database refuses.
    pub async fn token_state(&self, token: Token) -> Option<String> {
        let client = self.store.db().client().await.expect("a connection");
        let row = client.query_opt("SELECT state FROM continuations WHERE token = $1", &[&token.0]).await;
        row.expect("an answer").map(|row| row.get(0))
    }
}

/// A session to create.
pub fn new_session(message: Option<Message>, run: Mode) -> NewSession {
    NewSession {
        id: SessionId(Uuid::now_v7()),
        owner: OWNER.to_owned(),
        agent: AGENT.to_owned(),
        parent: None,
        parent_call: None,
        labels: BTreeMap::new(),
        priority: 0,
        message,
        run,
    }
}

/// A worker's name.
pub fn worker() -> WorkerId {
    WorkerId(Uuid::now_v7())
}

/// What a worker that has an agent at a revision tells when it claims.
pub fn roster(agent: &Agent) -> Vec<String> {
    vec![format!("{}@{}", agent.slug, agent.revision)]
}

/// A store at a URL.
///
/// # Panics
/// If the URL can't be used.
pub async fn open(url: &str, hot: usize, notifier: Option<Notifier>) -> Store {
    let options = ConnectOptions {
        hot_connections: hot,
        read_connections: 4,
        wait: Duration::from_secs(30),
        ..ConnectOptions::new(url, "tests")
    };
    Store::new(connect(options).await.expect("connections"), notifier)
}
