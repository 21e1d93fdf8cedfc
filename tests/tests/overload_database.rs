//! The database has no connection left, or no room on its disk: what can't be done is refused with 503, the
//! logs say once why, and when there is room again everything goes on by itself, with nothing lost or doubled.

use std::{
    collections::HashSet,
    fs::{self, File},
    io::Write as _,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use futures::future::join_all;
use holdfast_tests::{
    cluster::connect,
    server::{Server, Shape},
    world::{AgentFiles, Model, Node, PATIENCE, World, answer, client},
};
use serde_json::{Value, json};
use tokio::time::Instant;
use tokio_postgres::Client;
use uuid::Uuid;

/// A call of a tool that notes its start, and an answer.
const SCRIPT: &str = r#"{"rules": [
    {"when": {"turn": 0}, "reply": {"tool_calls": [{"name": "bash_note"}]}},
    {"reply": {"text": "done"}}
]}"#;

async fn world(server: &Server) -> Result<World> {
    let model = Model::start(SCRIPT).await?;
    let described = json!({"slug": "note", "description": "Notes it.", "args": []});
    let config = json!({"slug": "busy", "flavor": "OpenAIv1", "modelUrl": model.url, "modelName": "scripted",
        "systemPrompt": ["Do it."], "toolDirectory": "tools"});
    let run = "cd \"$(dirname \"$0\")/..\"; echo \"$AGENT_SESSION_ID\" >> effects.log";
    let agent = AgentFiles::with_tools(&config, &[("note", described, run)])?;
    let mut world = World::new(server.url(), model, agent);
    world.lease_ttl = 3;
    Ok(world)
}

/// Sends one request without trying again. Returns the session if it was accepted; a refusal has to be one
/// that tells the client to come back.
async fn create(http: &reqwest::Client, api: &str, prompt: &str) -> Result<Option<Uuid>> {
    let body = json!({"agent": "busy", "prompt": prompt});
    let answer = http.post(format!("{api}/v1/sessions")).json(&body).send().await?;
    let (status, waits) = (answer.status().as_u16(), answer.headers().contains_key("retry-after"));
    let view: Value = answer.json().await?;
    match status {
        201 => Ok(Some(view["session_id"].as_str().context("no id")?.parse()?)),
        503 => {
            ensure!(waits && view["error"] == "unavailable", "{view}");
            Ok(None)
        }
        _ => bail!("{status} {view}"),
    }
}

/// The entries of a node's log of some kind.
fn logged(node: &Node, kind: &str) -> Vec<Value> {
    let log = node.log_text();
    let entries = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    entries.filter(|entry| entry["kind"] == kind).collect()
}

/// What a node says of requests that failed for want of a better answer.
fn failures(node: &Node) -> String {
    format!("{:?}", logged(node, "http.failed"))
}

/// Each cause is said once an outage, and other warnings are few, however long it lasted.
fn said_once(node: &Node, cause: &str) -> Result<()> {
    let causes: Vec<Value> =
        logged(node, "database.unavailable").iter().map(|entry| entry["cause"].clone()).collect();
    let distinct: HashSet<&str> = causes.iter().filter_map(Value::as_str).collect();
    ensure!(distinct.contains(cause), "{causes:?}: {}", node.log_text());
    ensure!(distinct.len() == causes.len(), "said again: {causes:?}");
    let log = node.log_text();
    let warned = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let warned: Vec<Value> = warned
        .filter(|entry| matches!(entry["level"].as_str(), Some("WARN" | "ERROR" | "warn" | "error")))
        .filter(|entry| entry["kind"] != "run.lease_lost")
        .collect();
    ensure!(warned.len() <= 20, "{} warnings: {warned:#?}", warned.len());
    Ok(())
}

/// Every session that was accepted ends with its answer, told once, and its tool started at most once.
async fn all_end(world: &World, api: &str, accepted: &[Uuid]) -> Result<()> {
    for id in accepted {
        let view = world.until(api, *id, "idle").await?;
        ensure!(answer(&view)? == "done", "{view}");
        ensure!(view["session"]["turns"].as_array().is_some_and(|turns| turns.len() == 4), "{view}");
    }
    let effects = world.agent.effects();
    ensure!(effects.values().all(|count| *count == 1), "{effects:?}");
    let sql = connect(&world.url).await?;
    let gaps: i64 = sql
        .query_one(
            "SELECT count(*) FROM sessions s WHERE s.mail_cursor <> s.mail_seq OR s.event_seq <>
                 (SELECT count(*) FROM events e WHERE e.session_id = s.id AND e.seq BETWEEN 1 AND s.event_seq)",
            &[],
        )
        .await?
        .get(0);
    ensure!(gaps == 0, "{gaps} sessions have unread mail or gaps in their events");
    Ok(())
}

/// Opens connections until the server has none left.
async fn fill(server: &Server, taken: &mut Vec<Client>) -> Result<()> {
    let mut refused = 0;
    while refused < 5 {
        match connect(server.url()).await {
            Ok(client) => taken.push(client),
            Err(error) => {
                let code =
                    error.downcast_ref::<tokio_postgres::Error>().and_then(tokio_postgres::Error::code);
                ensure!(code.is_some_and(|code| code.code() == "53300"), "{error:#}");
                refused += 1;
            }
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_connection_to_be_had_nothing_is_lost() -> Result<()> {
    let server =
        Server::start(Shape { settings: vec!["max_connections=50".to_owned()], ..Shape::default() }).await?;
    let world = world(&server).await?;
    let (api_node, api) = world.node("api", &[], &[]).await?;
    let (mut worker, _) = world.node("worker", &[], &[]).await?;
    let http = client();
    let mut accepted: Vec<Uuid> = create(&http, &api, "before").await?.into_iter().collect();
    all_end(&world, &api, &accepted).await?;
    // What the nodes hold yet is all they have.
    let mut taken = Vec::new();
    fill(&server, &mut taken).await?;
    let many = join_all((0..40).map(|_| create(&http, &api, "while others hold the rest"))).await;
    for one in many {
        accepted.extend(one?);
    }
    // Then they lose that too.
    let until = Instant::now() + PATIENCE;
    loop {
        let ended = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name LIKE 'holdfast-%'";
        let left: i64 = taken.first().context("a connection")?.query_one(ended, &[]).await?.get(0);
        fill(&server, &mut taken).await?;
        if left == 0 {
            break;
        }
        ensure!(Instant::now() < until, "the nodes keep {left} connections");
    }
    let mut refused = 0;
    for _ in 0..10 {
        match create(&http, &api, "while others hold all").await? {
            Some(id) => accepted.push(id),
            None => refused += 1,
        }
    }
    ensure!(refused == 10, "{refused} were refused");
    drop(taken);
    let until = Instant::now() + PATIENCE;
    let mut pause = tokio::time::interval(Duration::from_millis(200));
    loop {
        pause.tick().await;
        if let Some(id) = create(&http, &api, "after").await.with_context(|| failures(&api_node))? {
            accepted.push(id);
            break;
        }
        ensure!(Instant::now() < until, "the node doesn't recover: {}", api_node.log_text());
    }
    all_end(&world, &api, &accepted).await?;
    said_once(&api_node, "too_many_connections")?;
    said_once(&worker, "too_many_connections")?;
    ensure!(!worker.has_ended()?, "{}", worker.log_text());
    Ok(())
}

/// Bytes that are free when the disk is as good as full.
const ROOM: u64 = 3 * 1024 * 1024;

/// Text that no compression makes smaller.
fn noise() -> String {
    (0..3000).map(|_| Uuid::new_v4().simple().to_string()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_refuses_what_it_cant_hold_and_loses_nothing() -> Result<()> {
    let settings =
        ["max_wal_size=32MB", "min_wal_size=32MB", "checkpoint_timeout=30s", "shared_buffers=16MB"];
    let settings = settings.map(str::to_owned).to_vec();
    let server = Server::start(Shape { disk: Some(192), settings, ..Shape::default() }).await?;
    let world = world(&server).await?;
    let (api_node, api) = world.node("api", &[], &[]).await?;
    let (mut worker, _) = world.node("worker", &[], &[]).await?;
    let (mut scheduler, _) = world.node("scheduler", &[], &[]).await?;
    let http = client();
    let mut accepted: Vec<Uuid> = create(&http, &api, "before").await?.into_iter().collect();
    all_end(&world, &api, &accepted).await?;
    let filler = server.disk().join("filler");
    let mut file = File::create(&filler)?;
    let full = loop {
        if let Err(error) = file.write_all(&[0; 64 * 1024]) {
            break error;
        }
    };
    ensure!(full.kind() == std::io::ErrorKind::StorageFull, "{full}");
    // Room for some: they are under way when it ends.
    file.set_len(file.metadata()?.len().saturating_sub(ROOM))?;
    let sql = connect(server.url()).await?;
    let (mut refused, until) = (0, Instant::now() + PATIENCE);
    while refused < 20
        || logged(&api_node, "database.unavailable").iter().all(|entry| entry["cause"] != "disk_full")
    {
        match create(&http, &api, &noise()).await.with_context(|| failures(&api_node))? {
            Some(id) => accepted.push(id),
            None => refused += 1,
        }
        ensure!(
            Instant::now() < until,
            "the disk isn't full: {refused} refused, {} accepted; {}",
            accepted.len(),
            api_node.log_text()
        );
    }
    // A checkpoint that can't be written ends the server, and new connections find it short of everything.
    let _ = sql.batch_execute("CHECKPOINT").await;
    for _ in 0..20 {
        accepted.extend(create(&http, &api, &noise()).await.with_context(|| failures(&api_node))?);
    }
    // As long as somebody has it open, it keeps its room.
    drop(file);
    fs::remove_file(&filler)?;
    let until = Instant::now() + PATIENCE;
    let mut pause = tokio::time::interval(Duration::from_millis(200));
    loop {
        pause.tick().await;
        if let Some(id) = create(&http, &api, "after").await.with_context(|| failures(&api_node))? {
            accepted.push(id);
            break;
        }
        ensure!(Instant::now() < until, "{}", api_node.log_text());
    }
    ensure!(accepted.len() > 2, "nothing was accepted while the disk filled up");
    all_end(&world, &api, &accepted).await?;
    said_once(&api_node, "disk_full")?;
    for node in [&mut worker, &mut scheduler] {
        ensure!(!node.has_ended()?, "{}", node.log_text());
    }
    Ok(())
}
