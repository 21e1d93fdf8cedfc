//! Holdfast as it is deployed: nodes as processes of the real binary, a scripted model, and clients
//! that try again as a client behind a load balancer would.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Stdio,
    sync::{Arc, Mutex},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use holdfast_cli::scripted_model::{Script, serve};
use rustix::process::{Pid, kill_process};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    net::TcpListener,
    process::{Child, Command},
    sync::watch,
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

pub use rustix::process::Signal;

/// How long anything in a test may take before it counts as stuck.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// How a node's log says that something in it panicked.
pub const PANIC: &str = "\"kind\":\"panic\"";

/// How long a client waits for one answer before it sends its request again.
const ATTEMPT: Duration = Duration::from_secs(40);

/// The binary under test: beside this test's own, where the test command builds it.
///
/// # Errors
/// If it isn't there.
pub fn binary() -> Result<PathBuf> {
    let me = std::env::current_exe()?;
    let path = me
        .ancestors()
        .map(|dir| dir.join("holdfast"))
        .find(|path| path.is_file())
        .context("the holdfast binary is not built; tests/run builds it")?;
    Ok(path)
}

/// The binary of the previous release, which the test command builds from the commit that
/// `tests/previous-release` names.
///
/// # Errors
/// If it isn't there.
pub fn previous_binary() -> Result<PathBuf> {
    let me = std::env::current_exe()?;
    let path = me
        .ancestors()
        .map(|dir| dir.join("previous/holdfast"))
        .find(|path| path.is_file())
        .context("the previous release is not built; tests/build-previous builds it")?;
    Ok(path)
}

/// The canonical script: three calls first, then an answer that names their results.
pub const CANONICAL: &str = r#"{"rules": [
    {"when": {"turn": 0}, "reply": {"tool_calls": [
        {"name": "bash_fetch_local", "arguments": {"what": "local data"}},
        {"name": "fetch_remote_a", "arguments": {"query": "a"}},
        {"name": "fetch_remote_b", "arguments": {"query": "b"}}]}},
    {"when": {"turn": 1}, "reply": {"text": "local: {{tool_result:bash_fetch_local}} a: {{tool_result:fetch_remote_a}} b: {{tool_result:fetch_remote_b}}"}}
]}"#;

/// The answer that [`CANONICAL`] ends with when the deferred calls are completed with `A` and `B`.
pub const CANONICAL_ANSWER: &str = "local: got local data\n a: A b: B";

/// A scripted model, served in this process.
pub struct Model {
    /// Where it listens, as agents name it.
    pub url: String,
    stop: CancellationToken,
}

impl Model {
    /// Serves a script.
    ///
    /// # Errors
    /// If the script is none, or no port is free.
    pub async fn start(script: &str) -> Result<Self> {
        let script = Script::parse(script)?;
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}/v1", listener.local_addr()?);
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        let _serving = tokio::spawn(async move { serve(script, listener, stopped).await });
        Ok(Self { url, stop })
    }

    /// The bodies of the requests that it was sent, in order.
    ///
    /// # Errors
    /// If it doesn't answer.
    pub async fn requests(&self) -> Result<Vec<Value>> {
        let base = self.url.trim_end_matches("/v1");
        let recorded: Value = client().get(format!("{base}/requests")).send().await?.json().await?;
        let list = recorded.as_array().cloned().unwrap_or_default();
        Ok(list.into_iter().map(|entry| entry["body"].clone()).collect())
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

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

/// A node of Holdfast: one process.
pub struct Node {
    child: Child,
    pid: u32,
    log: Arc<Mutex<Vec<String>>>,
    bound: watch::Receiver<Option<String>>,
}

impl Node {
    /// Starts a node; its log is kept.
    ///
    /// # Errors
    /// If the binary can't be run.
    pub fn start(role: &str, arguments: &[String], environment: &[(String, String)]) -> Result<Self> {
        Self::start_from(&binary()?, role, arguments, environment)
    }

    /// As [`Node::start`], from another binary.
    ///
    /// # Errors
    /// If it can't be run.
    pub fn start_from(
        binary: &Path,
        role: &str,
        arguments: &[String],
        environment: &[(String, String)],
    ) -> Result<Self> {
        let mut command = Command::new(binary);
        command.arg(role).args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        command.envs(environment.iter().cloned()).env_remove("DATABASE_URL").kill_on_drop(true);
        let mut child = command.spawn()?;
        let pid = child.id().context("the node ended at once")?;
        let stderr = child.stderr.take().context("no log")?;
        let log = Arc::new(Mutex::new(Vec::new()));
        let (sender, bound) = watch::channel(None);
        let lines = Arc::clone(&log);
        let _reading = tokio::spawn(async move {
            let mut reader = BufReader::new(stderr).lines();
            while let Ok(Some(line)) = reader.next_line().await {
                let started = serde_json::from_str::<Value>(&line)
                    .ok()
                    .filter(|entry| entry["kind"] == "server.started");
                // Kept first, so that whoever learns of the start finds the line.
                if let Ok(mut lines) = lines.lock() {
                    lines.push(line);
                }
                if let Some(entry) = started {
                    sender.send_replace(Some(entry["bind"].as_str().unwrap_or_default().to_owned()));
                }
            }
        });
        Ok(Self { child, pid, log, bound })
    }

    /// Waits until the node has started. Returns where it listens.
    ///
    /// # Errors
    /// If it ends before, or takes too long; the error shows its log.
    pub async fn started(&mut self) -> Result<String> {
        let mut bound = self.bound.clone();
        let waiting = tokio::time::timeout(PATIENCE, bound.wait_for(Option::is_some));
        match waiting.await {
            Ok(Ok(bind)) => Ok(bind.clone().unwrap_or_default()),
            _ => bail!("the node did not start: {}", self.log_text()),
        }
    }

    /// Its log so far.
    pub fn log_text(&self) -> String {
        self.log.lock().map(|lines| lines.join("\n")).unwrap_or_default()
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The most memory that it has had resident so far, in bytes, as Linux has it.
    ///
    /// # Errors
    /// If it has ended.
    pub fn peak_memory(&self) -> Result<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("no VmHWM")?;
        let kib: u64 = line.trim().trim_end_matches("kB").trim().parse()?;
        Ok(kib * 1024)
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// If there is no such process any more.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill_process(self.process()?, signal)?)
    }

    /// Its process.
    ///
    /// # Errors
    /// Never, where processes have ids.
    pub fn process(&self) -> Result<Pid> {
        i32::try_from(self.pid).ok().and_then(Pid::from_raw).context("no process id")
    }

    /// Kills it with SIGKILL and waits for its end.
    ///
    /// # Errors
    /// If it can't be killed.
    pub async fn kill(&mut self) -> Result<()> {
        self.child.kill().await.context("SIGKILL")
    }

    /// Waits for its end by itself.
    ///
    /// # Errors
    /// If it takes too long.
    pub async fn ended(&mut self) -> Result<std::process::ExitStatus> {
        Ok(tokio::time::timeout(PATIENCE, self.child.wait()).await.context("the node doesn't end")??)
    }

    /// Whether it has ended.
    ///
    /// # Errors
    /// If the system can't say.
    pub fn has_ended(&mut self) -> Result<bool> {
        Ok(self.status()?.is_some())
    }

    /// How it has ended, if it has.
    ///
    /// # Errors
    /// If the system can't say.
    pub fn status(&mut self) -> Result<Option<std::process::ExitStatus>> {
        Ok(self.child.try_wait()?)
    }
}

/// An agent's files in a directory of their own.
pub struct AgentFiles {
    dir: tempfile::TempDir,
}

impl AgentFiles {
    /// The agent of the canonical flow: `bash_fetch_local` runs in the worker and notes each start in
    /// `effects.log`; `fetch_remote_*` is deferred. `idempotent` is what a rule says of the former.
    ///
    /// # Errors
    /// If files can't be written.
    pub fn canonical(model_url: &str, idempotent: bool) -> Result<Self> {
        let files = Self { dir: tempfile::tempdir()? };
        fs::create_dir(files.dir.path().join("tools"))?;
        files.tool(
            "fetch-local",
            &json!({"slug": "fetch_local", "description": "Fetches local data.", "args": [
                {"name": "what", "description": "what to fetch", "type": "string", "backing_type": "string", "arity": "single", "mode": "positional"}]}),
            &format!("echo \"$HOLDFAST_IDEMPOTENCY_KEY\" >> '{}'\necho \"got $2\"", files.effects_path().display()),
        )?;
        files.agent(&json!({
            "slug": "canonical", "flavor": "OpenAIv1", "modelUrl": model_url, "modelName": "scripted",
            "systemPrompt": ["You fetch things."], "toolDirectory": "tools",
            "toolCallPolicyConfig": {"default": {"tag": "runSync"}, "rules": [
                {"tool": "fetch_remote_*", "disposition": {"tag": "defer", "reason": "external worker"}},
                {"tool": "bash_fetch_local", "disposition": {"tag": "runSync"}, "idempotent": idempotent}]}
        }))?;
        Ok(files)
    }

    /// An agent with these tools, each a name and a shell script that is run with `run …`.
    ///
    /// # Errors
    /// If files can't be written.
    pub fn with_tools(config: &Value, tools: &[(&str, Value, &str)]) -> Result<Self> {
        let files = Self { dir: tempfile::tempdir()? };
        fs::create_dir(files.dir.path().join("tools"))?;
        for (name, described, script) in tools {
            files.tool(name, described, script)?;
        }
        files.agent(config)?;
        Ok(files)
    }

    fn tool(&self, name: &str, described: &Value, run: &str) -> Result<()> {
        let path = self.dir.path().join("tools").join(name);
        let script = format!(
            "#!/bin/bash\nif [ \"$1\" = describe ]; then\ncat <<'DESCRIBED'\n{described}\nDESCRIBED\nexit 0\nfi\n{run}\n"
        );
        fs::write(&path, script)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        Ok(())
    }

    fn agent(&self, config: &Value) -> Result<()> {
        fs::write(self.dir.path().join("agent.json"), config.to_string())?;
        Ok(())
    }

    /// The agent file.
    pub fn agent_path(&self) -> PathBuf {
        self.dir.path().join("agent.json")
    }

    /// Where tools note that they were started.
    pub fn effects_path(&self) -> PathBuf {
        self.dir.path().join("effects.log")
    }

    /// How often each call was started, by its idempotency key.
    pub fn effects(&self) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for line in fs::read_to_string(self.effects_path()).unwrap_or_default().lines() {
            *counts.entry(line.to_owned()).or_insert(0) += 1;
        }
        counts
    }

    /// The directory of it all.
    pub fn dir(&self) -> &Path {
        self.dir.path()
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
