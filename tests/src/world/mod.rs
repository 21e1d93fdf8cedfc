//! Holdfast as it is deployed: nodes as processes of the real binary, a scripted model, and clients
//! that try again as a client behind a load balancer would.

mod agent_files;
mod model;
mod node;

use std::{fs, path::Path, sync::Mutex, time::Duration};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tokio::time::Instant;
use uuid::Uuid;

pub use self::{
    agent_files::AgentFiles,
    model::{CANONICAL, CANONICAL_ANSWER, Model},
    node::{Node, binary, previous_binary},
};
pub use rustix::process::Signal;

/// How long anything in a test may take before it counts as stuck.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// How a node's log says that something in it panicked.
pub const PANIC: &str = "\"kind\":\"panic\"";

/// How long a client waits for one answer before it sends its request again.
const ATTEMPT: Duration = Duration::from_secs(40);

/// An HTTP client for tests.
pub fn client() -> reqwest::Client {
    // Only the first of a process's installations counts; the others find it done.
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::builder().timeout(ATTEMPT).build().expect("a client without options can be built")
}

/// Sends a request until it is answered with something else than 503, at most once in `pause`, to the `url` of
/// each attempt; a POST carries one idempotency key through all of them. `failed` is called for each attempt
/// that isn't answered.
pub(crate) async fn until_answered(
    http: &reqwest::Client,
    method: &str,
    body: Option<&Value>,
    pause: Duration,
    url: impl Fn() -> String,
    failed: impl Fn(),
) -> Result<(u16, Value)> {
    let key = Uuid::new_v4().to_string();
    let until = Instant::now() + PATIENCE;
    let mut pause = tokio::time::interval(pause);
    loop {
        pause.tick().await;
        let url = url();
        let mut request = http.request(method.parse()?, &url);
        if method == "POST" {
            request = request.header("Idempotency-Key", &key);
        }
        if let Some(body) = body {
            request = request.json(body);
        }
        let why = match request.send().await {
            Ok(answer) if answer.status() == 503 => "503".to_owned(),
            Ok(answer) => {
                let status = answer.status().as_u16();
                match answer.json().await {
                    Ok(value) => return Ok((status, value)),
                    Err(error) => format!("{:#}", anyhow::Error::from(error)),
                }
            }
            Err(error) => format!("{:#}", anyhow::Error::from(error)),
        };
        failed();
        ensure!(Instant::now() < until, "{method} {url} isn't answered: {why}");
    }
}

/// Nodes over one database.
pub struct World {
    /// The database.
    pub url: String,
    /// The model.
    pub model: Model,
    /// The agent.
    pub agent: AgentFiles,
    /// Seconds of a lease.
    pub lease_ttl: u64,
    http: reqwest::Client,
}

impl World {
    /// A world without nodes.
    pub fn new(url: &str, model: Model, agent: AgentFiles) -> Self {
        Self { url: url.to_owned(), model, agent, lease_ttl: 1, http: client() }
    }

    /// The canonical world.
    ///
    /// # Errors
    /// If the model or the files can't be made.
    pub async fn canonical(url: &str, idempotent: bool) -> Result<Self> {
        let model = Model::start(CANONICAL).await?;
        let agent = AgentFiles::canonical(&model.url, idempotent)?;
        Ok(Self::new(url, model, agent))
    }

    /// Starts a node of a role and waits until it is ready.
    ///
    /// # Errors
    /// If it doesn't start.
    pub async fn node(
        &self,
        role: &str,
        more: &[&str],
        environment: &[(&str, &str)],
    ) -> Result<(Node, String)> {
        self.node_over(&self.url, role, more, environment).await
    }

    /// As [`World::node`], with another way to the database.
    ///
    /// # Errors
    /// If it doesn't start.
    pub async fn node_over(
        &self,
        url: &str,
        role: &str,
        more: &[&str],
        environment: &[(&str, &str)],
    ) -> Result<(Node, String)> {
        self.node_from(&binary()?, url, role, more, environment).await
    }

    /// As [`World::node_over`], from another binary.
    ///
    /// # Errors
    /// If it doesn't start.
    pub async fn node_from(
        &self,
        binary: &Path,
        url: &str,
        role: &str,
        more: &[&str],
        environment: &[(&str, &str)],
    ) -> Result<(Node, String)> {
        let mut arguments = vec!["--database-url".to_owned(), url.to_owned()];
        if role != "scheduler" {
            arguments.extend(["--agent-file".to_owned(), self.agent.agent_path().display().to_string()]);
        }
        if role == "api" || role == "serve" {
            arguments.extend(["--bind".to_owned(), "127.0.0.1:0".to_owned()]);
        }
        if role == "worker" || role == "serve" {
            arguments.extend(["--lease-ttl".to_owned(), self.lease_ttl.to_string()]);
        }
        arguments.extend(more.iter().map(|&argument| argument.to_owned()));
        let environment: Vec<(String, String)> =
            environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let mut node = Node::start_from(binary, role, &arguments, &environment)?;
        let bind = node.started().await?;
        Ok((node, format!("http://{bind}")))
    }

    /// Sends a request until it is answered with something else than 503, as a client behind a load
    /// balancer does; a POST carries one idempotency key through all attempts.
    ///
    /// # Errors
    /// If that takes too long; an answer is returned whatever its status.
    pub async fn call(&self, method: &str, url: &str, body: Option<&Value>) -> Result<(u16, Value)> {
        self.call_over(method, &mut || url.to_owned(), body).await
    }

    /// As [`World::call`], each attempt to the URL that it is told.
    async fn call_over(
        &self,
        method: &str,
        url: &mut (dyn FnMut() -> String + Send),
        body: Option<&Value>,
    ) -> Result<(u16, Value)> {
        let pause = Duration::from_millis(100);
        let url = Mutex::new(url);
        let next = || url.lock().map(|mut url| url()).unwrap_or_default();
        until_answered(&self.http, method, body, pause, next, || {}).await
    }

    /// Creates a session with the canonical question.
    ///
    /// # Errors
    /// If it isn't answered with 201.
    pub async fn create(&self, api: &str) -> Result<Uuid> {
        self.create_over(&mut || api.to_owned()).await
    }

    /// As [`World::create`], each attempt at the node that it is told.
    ///
    /// # Errors
    /// If it isn't answered with 201.
    pub async fn create_over(&self, api: &mut (dyn FnMut() -> String + Send)) -> Result<Uuid> {
        let slug = fs::read_to_string(self.agent.agent_path())?;
        let slug: Value = serde_json::from_str(&slug)?;
        let body = json!({"agent": slug["slug"], "prompt": "fetch the local and the remote data"});
        let (status, view) =
            self.call_over("POST", &mut || format!("{}/v1/sessions", api()), Some(&body)).await?;
        ensure!(status == 201, "{status} {view}");
        Ok(view["session_id"].as_str().context("no id")?.parse()?)
    }

    /// A session's view.
    ///
    /// # Errors
    /// If it isn't answered with 200.
    pub async fn view(&self, api: &str, id: Uuid) -> Result<Value> {
        self.view_over(&mut || api.to_owned(), id).await
    }

    async fn view_over(&self, api: &mut (dyn FnMut() -> String + Send), id: Uuid) -> Result<Value> {
        let (status, view) =
            self.call_over("GET", &mut || format!("{}/v1/sessions/{id}", api()), None).await?;
        ensure!(status == 200, "{status} {view}");
        Ok(view)
    }

    /// Waits until a session has a status.
    ///
    /// # Errors
    /// If that takes too long, or the session has failed instead.
    pub async fn until(&self, api: &str, id: Uuid, wanted: &str) -> Result<Value> {
        self.until_over(&mut || api.to_owned(), id, wanted).await
    }

    /// As [`World::until`], each look at the node that it is told.
    ///
    /// # Errors
    /// If that takes too long, or the session has failed instead.
    pub async fn until_over(
        &self,
        api: &mut (dyn FnMut() -> String + Send),
        id: Uuid,
        wanted: &str,
    ) -> Result<Value> {
        let until = Instant::now() + PATIENCE;
        let mut pause = tokio::time::interval(Duration::from_millis(50));
        loop {
            pause.tick().await;
            let view = self.view_over(api, id).await?;
            if view["status"] == wanted {
                return Ok(view);
            }
            ensure!(view["status"] != "failed", "the session failed: {}", view["status_detail"]);
            ensure!(Instant::now() < until, "the session is still {}: {view}", view["status"]);
        }
    }

    /// Completes the pending call of a tool. An earlier attempt whose answer was lost counts.
    ///
    /// # Errors
    /// If it is refused.
    pub async fn complete(&self, api: &str, token: &str, result: &str, wait: bool) -> Result<Value> {
        let query = if wait { "?wait=true&timeout=30" } else { "" };
        self.complete_over(&mut || api.to_owned(), &format!("{token}{query}"), result).await
    }

    /// As [`World::complete`], each attempt at the node that it is told.
    ///
    /// # Errors
    /// If it is refused.
    pub async fn complete_over(
        &self,
        api: &mut (dyn FnMut() -> String + Send),
        token: &str,
        result: &str,
    ) -> Result<Value> {
        let body = json!({"result": result});
        let mut url = || format!("{}/v1/continuations/{token}", api());
        let (status, view) = self.call_over("POST", &mut url, Some(&body)).await?;
        let retried = status == 409 && view["same_result"] == true;
        ensure!(matches!(status, 200 | 202) || retried, "{status} {view}");
        Ok(view)
    }
}

/// The token of a tool's pending call in a view.
///
/// # Errors
/// If there is none.
pub fn token(view: &Value, tool: &str) -> Result<String> {
    let calls = view["pending"].as_array().context("no pending calls")?;
    let call = calls
        .iter()
        .find(|call| call["tool"] == tool)
        .with_context(|| format!("no call of {tool}: {view}"))?;
    Ok(call["continuation_token"].as_str().context("no token")?.to_owned())
}

/// The text of the newest turn.
///
/// # Errors
/// If it isn't the model's.
pub fn answer(view: &Value) -> Result<String> {
    let turn = &view["session"]["turns"][0];
    ensure!(turn["tag"] == "LlmTurn", "no answer: {turn}");
    Ok(turn["contents"]["llmResponse"].as_str().unwrap_or_default().to_owned())
}
