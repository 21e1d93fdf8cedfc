//! A run that ends its workers is given up after five of them, and nobody who sat beside it is.

use std::{fs, time::Duration};

use anyhow::{Context as _, Result, ensure};
use holdfast_store::{
    claim::{self, Rotation},
    workers,
};
use holdfast_tests::{
    cluster::{Database, fresh_database},
    store::{World as Shelf, roster, worker},
    world::{AgentFiles, Model, Node, PATIENCE, Signal, World, answer},
};
use serde_json::{Value, json};
use tokio::time::Instant;
use uuid::Uuid;

/// Sessions that wait for the model beside the poisonous one.
const NEIGHBOURS: usize = 5;

/// One tool ends whatever started it, the other notes that it ran. A neighbour's answer takes longer than any
/// worker lives that the poisonous run shares.
const SCRIPT: &str = r#"{"rules": [
    {"when": {"turn": 0, "last": "please die"}, "reply": {"tool_calls": [{"name": "bash_poison"}]}},
    {"when": {"tool_results": {"bash_poison": ""}}, "reply": {"tool_calls": [{"name": "bash_poison"}]}},
    {"when": {"turn": 0, "last": "please freeze"}, "reply": {"tool_calls": [{"name": "bash_freeze"}]}},
    {"when": {"tool_results": {"bash_freeze": ""}}, "reply": {"tool_calls": [{"name": "bash_freeze"}]}},
    {"when": {"turn": 0, "last": "please ask"}, "reply": {"tool_calls": [{"name": "bash_ask"}]}},
    {"when": {"turn": 0, "last": "please stay"}, "reply": {"tool_calls": [{"name": "bash_note"}]}},
    {"when": {"tool_results": {"bash_note": ""}}, "reply": {"text": "still here", "delay_ms": 3000}},
    {"reply": {"text": "hello"}}
]}"#;

async fn world(database: &Database) -> Result<World> {
    let model = Model::start(SCRIPT).await?;
    let described = |slug: &str| json!({"slug": slug, "description": "Does it.", "args": []});
    let config = json!({"slug": "doomed", "flavor": "OpenAIv1", "modelUrl": model.url, "modelName": "scripted",
        "systemPrompt": ["Do it."], "toolDirectory": "tools"});
    let agent = AgentFiles::with_tools(
        &config,
        &[
            (
                "poison",
                described("poison"),
                "cd \"$(dirname \"$0\")/..\"; echo x >> deaths; kill -9 $PPID; sleep 10",
            ),
            (
                "freeze",
                described("freeze"),
                "cd \"$(dirname \"$0\")/..\"; echo x >> deaths; kill -STOP $PPID; sleep 10",
            ),
            ("ask", described("ask"), "kill $PPID; sleep 0.5"),
            ("note", described("note"), "cd \"$(dirname \"$0\")/..\"; echo \"$AGENT_SESSION_ID\" >> notes"),
        ],
    )?;
    Ok(World::new(database.url(), model, agent))
}

fn lines(world: &World, file: &str) -> Vec<String> {
    let text = fs::read_to_string(world.agent.dir().join(file)).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

async fn create(world: &World, api: &str, prompt: &str) -> Result<Uuid> {
    let body = json!({"agent": "doomed", "prompt": prompt});
    let (status, view) = world.call("POST", &format!("{api}/v1/sessions"), Some(&body)).await?;
    ensure!(status == 201, "{status} {view}");
    Ok(view["session_id"].as_str().context("no id")?.parse()?)
}

/// Waits until `node`'s log has a line of this kind, and returns it.
async fn logged(node: &Node, kind: &str) -> Result<Value> {
    let until = Instant::now() + PATIENCE;
    let mut pause = tokio::time::interval(Duration::from_millis(20));
    loop {
        pause.tick().await;
        let log = node.log_text();
        let entries = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        if let Some(entry) = entries.into_iter().find(|entry| entry["kind"] == kind) {
            return Ok(entry);
        }
        ensure!(Instant::now() < until, "{kind} is never logged: {log}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_poisonous_run_is_given_up_and_its_neighbours_are_not() -> Result<()> {
    let database = fresh_database().await;
    let world = world(&database).await?;
    let (_api, api) = world.node("api", &[], &[]).await?;
    let mut neighbours = Vec::new();
    for _ in 0..NEIGHBOURS {
        neighbours.push(create(&world, &api, "please stay").await?);
    }
    let (mut worker, _) = world.node("worker", &[], &[]).await?;
    let until = Instant::now() + PATIENCE;
    let mut pause = tokio::time::interval(Duration::from_millis(50));
    // Each asks the model for the second time.
    while world.model.requests().await?.len() < 2 * NEIGHBOURS {
        pause.tick().await;
        ensure!(Instant::now() < until, "the neighbours don't get on: {}", worker.log_text());
    }
    let poison = create(&world, &api, "please die").await?;
    let mut deaths = 0;
    let view = loop {
        pause.tick().await;
        if worker.has_ended()? {
            deaths += 1;
            (worker, _) = world.node("worker", &[], &[]).await?;
        }
        let view = world.view(&api, poison).await?;
        if view["status"] == "failed" {
            break view;
        }
        ensure!(Instant::now() < until, "the poisonous run goes on: {view}\n{}", worker.log_text());
    };
    ensure!(view["status_detail"] == "poison", "{view}");
    ensure!(lines(&world, "deaths").len() == 5, "{:?}", lines(&world, "deaths"));
    ensure!(deaths == 2, "{deaths} workers died: from the third death on the run had a process of its own");
    // Whoever comes now meets a worker that lives.
    let late = create(&world, &api, "hello").await?;
    world.until(&api, late, "idle").await?;
    for id in &neighbours {
        let view = world.until(&api, *id, "idle").await?;
        ensure!(answer(&view)? == "still here", "{view}");
    }
    let mut noted = lines(&world, "notes");
    noted.sort_unstable();
    let mut wanted: Vec<String> = neighbours.iter().map(Uuid::to_string).collect();
    wanted.sort_unstable();
    ensure!(noted == wanted, "each neighbour's tool ran once: {noted:?} for {wanted:?}");
    ensure!(!worker.has_ended()?, "{}", worker.log_text());
    Ok(())
}

/// Makes a run one that two workers have died over.
async fn suspect(database: &Database, id: Uuid) -> Result<()> {
    let sql = "UPDATE runs SET takeovers = 2, takeover_version = 1 WHERE session_id = $1";
    ensure!(database.connect().await.execute(sql, &[&id]).await? == 1, "the run waits for a worker");
    Ok(())
}

/// The processes that a worker has started for runs under suspicion.
fn processes(worker: &Node) -> Vec<u64> {
    let log = worker.log_text();
    let entries = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let alone = entries.filter(|entry| entry["kind"] == "run.alone");
    alone.filter_map(|entry| entry["pid"].as_u64()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_freezes_its_process_is_given_up_too() -> Result<()> {
    let database = fresh_database().await;
    let world = world(&database).await?;
    let (_api, api) = world.node("api", &[], &[]).await?;
    let id = create(&world, &api, "please freeze").await?;
    suspect(&database, id).await?;
    let (mut worker, _) = world.node("worker", &[], &[]).await?;
    let until = Instant::now() + PATIENCE;
    let mut pause = tokio::time::interval(Duration::from_millis(50));
    let view = loop {
        pause.tick().await;
        let view = world.view(&api, id).await?;
        if view["status"] == "failed" {
            break view;
        }
        ensure!(Instant::now() < until, "the run goes on: {view}\n{}", worker.log_text());
    };
    ensure!(view["status_detail"] == "poison", "{view}");
    ensure!(lines(&world, "deaths").len() == 3, "{:?}", lines(&world, "deaths"));
    ensure!(!worker.has_ended()?, "{}", worker.log_text());
    for pid in processes(&worker) {
        while fs::exists(format!("/proc/{pid}"))? {
            pause.tick().await;
            ensure!(Instant::now() < until, "process {pid} is still there");
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tool_that_asks_its_process_to_leave_is_not_obeyed() -> Result<()> {
    let database = fresh_database().await;
    let world = world(&database).await?;
    let (_api, api) = world.node("api", &[], &[]).await?;
    let id = create(&world, &api, "please ask").await?;
    suspect(&database, id).await?;
    let (worker, _) = world.node("worker", &[], &[]).await?;
    let view = world.until(&api, id, "idle").await?;
    ensure!(answer(&view)? == "hello", "{view}");
    ensure!(processes(&worker).len() == 1, "one process drove the run to its end: {}", worker.log_text());
    Ok(())
}

/// Ends the worker whose process drives a run under suspicion, and sees the run go on elsewhere, no more
/// suspect than before.
async fn worker_ends_by(signal: Signal) -> Result<()> {
    let database = fresh_database().await;
    let world = world(&database).await?;
    let (_api, api) = world.node("api", &[], &[]).await?;
    let id = create(&world, &api, "please stay").await?;
    let sql = database.connect().await;
    let marked = sql.execute("UPDATE runs SET takeovers = 2 WHERE session_id = $1", &[&id]).await?;
    ensure!(marked == 1, "the run waits for a worker");
    let (mut worker, _) = world.node("worker", &["--shutdown-grace", "0"], &[]).await?;
    let alone = logged(&worker, "run.alone").await?;
    ensure!(alone["takeovers"] == 2, "{alone}");
    let pid = alone["pid"].as_u64().context("a pid")?;
    // The tool has run, and the model is being asked.
    let asked = async || Ok::<_, anyhow::Error>(world.model.requests().await?.len() >= 2);
    let mut pause = tokio::time::interval(Duration::from_millis(20));
    while !asked().await? {
        pause.tick().await;
    }
    worker.signal(signal)?;
    worker.ended().await?;
    let until = Instant::now() + PATIENCE;
    while fs::exists(format!("/proc/{pid}"))? {
        pause.tick().await;
        ensure!(Instant::now() < until, "the run's process outlives its worker: {}", worker.log_text());
    }
    let left: i32 = sql
        .query_one("SELECT takeovers FROM runs WHERE session_id = $1 AND state = 'queued'", &[&id])
        .await
        .context("the lease was given back")?
        .get(0);
    ensure!(left == 2, "{left}");
    let (successor, _) = world.node("worker", &[], &[]).await?;
    let alone = logged(&successor, "run.alone").await?;
    ensure!(alone["takeovers"] == 2, "{alone}");
    let view = world.until(&api, id, "idle").await?;
    ensure!(answer(&view)? == "still here", "{view}");
    ensure!(lines(&world, "notes").len() == 1, "{:?}", lines(&world, "notes"));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_of_its_own_process_outlives_its_worker_and_gives_its_lease_back() -> Result<()> {
    worker_ends_by(Signal::KILL).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_drains_takes_the_processes_of_its_runs_along() -> Result<()> {
    worker_ends_by(Signal::TERM).await
}

/// How long those leases last.
const TTL: Duration = Duration::from_secs(3);

/// Lets a worker's lease of a session's run end, as far as the database sees it, when the worker was last heard of so
/// long before, and has another worker take the run over. Returns how many deaths are counted then.
async fn taken_over(shelf: &Shelf, heard_before: f64) -> i32 {
    let (first, second) = (worker(), worker());
    let (ttl, agents, rotation) = (TTL, roster(&shelf.agent), Rotation::default());
    let session = shelf.asked("go on").await;
    claim::claim(&shelf.store, first, 1, ttl, &agents, false, &rotation).await.expect("claimed");
    workers::register(&shelf.store, first, "host", 1, 1, &[], &agents).await.expect("registered");
    let sql = shelf.sql().await;
    sql.execute(
        "UPDATE runs SET lease_until = now() - interval '1 second' WHERE session_id = $1",
        &[&session.0],
    )
    .await
    .expect("ended");
    sql.execute(
        "UPDATE workers SET seen_at = now() - make_interval(secs => 1 + $2::float8) WHERE id = $1",
        &[&first.0, &heard_before],
    )
    .await
    .expect("heard of");
    let leases = claim::claim(&shelf.store, second, 1, ttl, &agents, true, &rotation).await.expect("claimed");
    let lease = leases.iter().find(|lease| lease.session == session).expect("it is taken over");
    assert!(lease.taken_over);
    lease.takeovers
}

#[tokio::test]
async fn only_workers_that_have_died_count_as_deaths() {
    let shelf = Shelf::new().await;
    // Ends of leases that a start of the server explains don't count either.
    let old =
        "SELECT count(*) FROM (SELECT 1) one WHERE pg_postmaster_start_time() < now() - interval '5 seconds'";
    let mut pause = tokio::time::interval(Duration::from_millis(100));
    while shelf.count(old).await == 0 {
        pause.tick().await;
    }
    // Dead since before the lease would have been renewed, a third of its time before its end or more.
    assert_eq!(taken_over(&shelf, 2.0).await, 1);
    assert_eq!(taken_over(&shelf, 1.2).await, 1);
    // Alive, but late with the lease.
    assert_eq!(taken_over(&shelf, 0.8).await, 0);
    assert_eq!(taken_over(&shelf, 0.1).await, 0);
}

#[tokio::test]
async fn deaths_that_are_seen_count_within_the_same_versions() {
    let shelf = Shelf::new().await;
    let (ttl, agents, rotation) = (Duration::from_secs(15), roster(&shelf.agent), Rotation::default());
    let session = shelf.asked("go on").await;
    let sql = shelf.sql().await;
    for (version, counted) in [(1, 1), (5, 2), (25, 3), (46, 1), (47, 2)] {
        let taken = claim::claim(&shelf.store, worker(), 1, ttl, &agents, false, &rotation).await;
        let [lease] = &taken.expect("claimed")[..] else { panic!("the run is due") };
        sql.execute("UPDATE sessions SET version = $1 WHERE id = $2", &[&i64::from(version), &session.0])
            .await
            .expect("got on");
        let held = [(session, lease.epoch)];
        assert_eq!(claim::release(&shelf.store, &held, Duration::ZERO, true).await.expect("released"), 1);
        let row = sql.query_one("SELECT takeovers FROM runs WHERE session_id = $1", &[&session.0]).await;
        assert_eq!(row.expect("the run").get::<_, i32>(0), counted, "at version {version}");
    }
}
