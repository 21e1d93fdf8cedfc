//! A tree of 1 + 10 + 100 sessions, three levels deep, on two workers with four slots each: parking carries the waiting,
//! not slots.
#![expect(clippy::expect_used, reason = "a test")]

use std::{fs, time::Duration};

use anyhow::{Result, ensure};
use holdfast_tests::{
    cluster::{Database, fresh_database},
    sse::{Follower, check_dense},
    world::{AgentFiles, Model, Node, World, answer},
};
use serde_json::{Value, json};
use uuid::Uuid;

/// How many sessions each session that isn't a leaf calls.
const BRANCHES: usize = 10;

/// Slots of a worker.
const SLOTS: usize = 4;

fn calls(helper: &str) -> Value {
    let call = |n: usize| json!({"name": format!("prompt_agent_{helper}"), "id": format!("call_{n}"), "arguments": {"what": format!("{n}")}});
    json!({"tool_calls": (0..BRANCHES).map(call).collect::<Vec<_>>()})
}

async fn world(database: &Database) -> Result<World> {
    let rules = json!([
        {"when": {"model": "leaf"}, "reply": {"text": "leaf", "delay_ms": 30}},
        {"when": {"model": "middle", "turn": 0}, "reply": calls("leaf")},
        {"when": {"model": "middle"}, "reply": {"text": "middle {{tool_result:prompt_agent_leaf}}"}},
        {"when": {"model": "root", "turn": 0}, "reply": calls("middle")},
        {"when": {"model": "root"}, "reply": {"text": "root {{tool_result:prompt_agent_middle}}"}}]);
    let model = Model::start(&json!({"rules": rules}).to_string()).await?;
    let agent = |slug: &str, helper: Option<&str>| {
        let helpers = helper.map(|slug| json!({"slug": slug, "path": format!("{slug}.json")}));
        json!({"slug": slug, "flavor": "OpenAI", "modelUrl": model.url, "modelName": slug,
            "extraAgents": helpers.into_iter().collect::<Vec<_>>()})
    };
    let files = AgentFiles::with_tools(&agent("root", Some("middle")), &[])?;
    for (slug, helper) in [("middle", Some("leaf")), ("leaf", None)] {
        fs::write(files.dir().join(format!("{slug}.json")), agent(slug, helper).to_string())?;
    }
    Ok(World::new(database.url(), model, files))
}

async fn worker(world: &World) -> Result<Node> {
    let slots = SLOTS.to_string();
    Ok(world.node("worker", &["--slots", &slots], &[]).await?.0)
}

/// What was seen of the tree while it grew.
#[derive(Debug, Default)]
struct Seen {
    most_held: i64,
    parents_parked: bool,
}

/// Looks at the runs until the root's session is idle.
async fn watch(world: &World, database: &Database, api: &str, root: Uuid) -> Result<Seen> {
    let sql = database.connect().await;
    let mut seen = Seen::default();
    let mut tick = tokio::time::interval(Duration::from_millis(20));
    loop {
        tick.tick().await;
        let looked = "SELECT count(*) FILTER (WHERE state = 'claimed'), count(*) FILTER (WHERE state = 'parked') FROM runs";
        let row = sql.query_one(looked, &[]).await?;
        let (held, parked): (i64, i64) = (row.get(0), row.get(1));
        seen.most_held = seen.most_held.max(held);
        if parked > 1 && !seen.parents_parked {
            let view = world.view(api, root).await?;
            seen.parents_parked = view["status"] == "running" && view["parked_on"] == "child";
        }
        if parked == 0 && held == 0 {
            let view = world.view(api, root).await?;
            ensure!(view["status"] != "failed", "{view}");
            if view["status"] == "idle" {
                ensure!(answer(&view)? == "root middle leaf", "{view}");
                return Ok(seen);
            }
        }
    }
}

/// What holds of every such tree: each session is there once and has answered once, each call was told of once.
async fn check(world: &World, database: &Database, api: &str, root: Uuid) -> Result<()> {
    let sql = database.connect().await;
    let count = "SELECT agent, status, count(*) FROM sessions GROUP BY agent, status ORDER BY agent";
    let rows = sql.query(count, &[]).await?;
    let rows: Vec<(String, String, i64)> =
        rows.iter().map(|row| (row.get(0), row.get(1), row.get(2))).collect();
    let idle = |agent: &str, count: usize| {
        (agent.to_owned(), "idle".to_owned(), i64::try_from(count).expect("small"))
    };
    ensure!(
        rows == [idle("leaf", BRANCHES * BRANCHES), idle("middle", BRANCHES), idle("root", 1)],
        "{rows:?}"
    );
    let left: i64 = sql.query_one("SELECT count(*) FROM runs", &[]).await?.get(0);
    ensure!(left == 0, "{left} runs are left");
    ensure!(world.model.violations().await?.is_empty());
    let nodes = std::sync::Arc::new(std::sync::Mutex::new(vec![api.to_owned()]));
    let follower = Follower::start(nodes, format!("/v1/sessions/{root}/events?after=0"));
    let stopped = |frames: &[holdfast_tests::sse::Frame]| {
        frames.iter().any(|frame| frame.kind == "run.stopped" && frame.data["status"] == "idle")
    };
    let frames = follower.until(stopped).await?;
    check_dense(&frames)?;
    for kind in ["subcall.started", "subcall.completed"] {
        let of = frames.iter().filter(|frame| frame.kind == kind);
        let mut children: Vec<&str> =
            of.filter_map(|frame| frame.data["child_session_id"].as_str()).collect();
        children.sort_unstable();
        children.dedup();
        let told = frames.iter().filter(|frame| frame.kind == kind).count();
        ensure!((children.len(), told) == (BRANCHES, BRANCHES), "{kind}: {told} of {children:?}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tree_of_sessions_grows_on_few_slots() -> Result<()> {
    let database = fresh_database().await;
    let world = world(&database).await?;
    let (_api, api) = world.node("api", &[], &[]).await?;
    let _workers = (worker(&world).await?, worker(&world).await?);
    let root = world.create(&api).await?;
    let seen = watch(&world, &database, &api, root).await?;
    ensure!((1..=2 * SLOTS as i64).contains(&seen.most_held) && seen.parents_parked, "{seen:?}");
    check(&world, &database, &api, root).await?;
    let asked = world.model.requests().await?.len();
    ensure!(asked == 2 * (1 + BRANCHES) + BRANCHES * BRANCHES, "the model was asked {asked} times");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tree_of_sessions_outlives_a_worker() -> Result<()> {
    let database = fresh_database().await;
    let world = world(&database).await?;
    let (_api, api) = world.node("api", &[], &[]).await?;
    let (mut doomed, _other) = (worker(&world).await?, worker(&world).await?);
    let root = world.create(&api).await?;
    let sql = database.connect().await;
    let mut tick = tokio::time::interval(Duration::from_millis(10));
    loop {
        tick.tick().await;
        let row = sql
            .query_one("SELECT count(*) FROM sessions WHERE agent = 'leaf' AND status = 'idle'", &[])
            .await?;
        if row.get::<_, i64>(0) >= 20 {
            break;
        }
    }
    doomed.kill().await?;
    let _successor = worker(&world).await?;
    let seen = watch(&world, &database, &api, root).await?;
    ensure!(seen.most_held <= 3 * SLOTS as i64, "{seen:?}");
    check(&world, &database, &api, root).await
}
