//! A tree of 1 + 10 + 100 sessions, three levels deep, on two workers with four slots each: parking carries the waiting,
//! not slots.
#![expect(clippy::expect_used, reason = "a test")]

use std::{
    collections::{HashMap, HashSet},
    fs,
    sync::{Arc, Mutex},
    time::Duration,
};

use anyhow::{Result, ensure};
use holdfast_tests::{
    cluster::{Database, fresh_database},
    sse::{Follower, Frame, check_dense},
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
    let mut world = World::new(database.url(), model, files);
    // A busy machine is no reason to ask again.
    world.lease_ttl = 5;
    Ok(world)
}

async fn worker(world: &World) -> Result<Node> {
    let slots = SLOTS.to_string();
    Ok(world.node("worker", &["--slots", &slots], &[]).await?.0)
}

/// How often the model is asked for the tree if nothing is asked twice.
const REQUESTS: usize = 2 * (1 + BRANCHES) + BRANCHES * BRANCHES;

/// What was seen of the tree while it grew.
#[derive(Debug, Default)]
struct Seen {
    /// The most runs that were at work at once.
    at_work: usize,
    /// The most of them that one worker held.
    of_one: usize,
    parents_parked: bool,
}

/// Looks at the runs until the root's session is idle; `dead` is a worker that was killed.
async fn watch(world: &World, database: &Database, api: &str, root: Uuid, dead: Uuid) -> Result<Seen> {
    let sql = database.connect().await;
    let mut seen = Seen::default();
    let mut tick = tokio::time::interval(Duration::from_millis(20));
    loop {
        tick.tick().await;
        // What a dead worker holds is at nobody's work.
        let looked =
            "SELECT state, worker FROM runs WHERE state = 'parked' OR (state = 'claimed' AND worker <> $1)";
        let rows = sql.query(looked, &[&dead]).await?;
        let mut held: HashMap<Uuid, usize> = HashMap::new();
        for worker in rows.iter().filter_map(|row| row.get::<_, Option<Uuid>>(1)) {
            *held.entry(worker).or_default() += 1;
        }
        seen.of_one = held.values().copied().max().unwrap_or(0).max(seen.of_one);
        seen.at_work = held.values().sum::<usize>().max(seen.at_work);
        let parked = rows.iter().filter(|row| row.get::<_, String>(0) == "parked").count();
        if parked > 1 && !seen.parents_parked {
            let view = world.view(api, root).await?;
            seen.parents_parked = view["status"] == "running" && view["parked_on"] == "child";
        }
        if rows.is_empty() {
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
async fn check(world: &World, database: &Database, api: &str) -> Result<()> {
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
    let parents = sql.query("SELECT id FROM sessions WHERE agent <> 'leaf'", &[]).await?;
    for parent in parents {
        told_of_children(api, parent.get(0)).await?;
    }
    Ok(())
}

/// A parent's stream tells of each of its children that it began and that it ended, once.
async fn told_of_children(api: &str, parent: Uuid) -> Result<()> {
    let nodes = Arc::new(Mutex::new(vec![api.to_owned()]));
    let follower = Follower::start(nodes, format!("/v1/sessions/{parent}/events?after=0"));
    let stopped = |frames: &[Frame]| {
        frames.iter().any(|frame| frame.kind == "run.stopped" && frame.data["status"] == "idle")
    };
    let frames = follower.until(stopped).await?;
    check_dense(&frames)?;
    for kind in ["subcall.started", "subcall.completed"] {
        let of = frames.iter().filter(|frame| frame.kind == kind);
        let children: Vec<&str> = of.filter_map(|frame| frame.data["child_session_id"].as_str()).collect();
        let distinct: HashSet<&str> = children.iter().copied().collect();
        ensure!((distinct.len(), children.len()) == (BRANCHES, BRANCHES), "{kind} of {children:?}");
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
    let seen = watch(&world, &database, &api, root, Uuid::nil()).await?;
    ensure!(
        (1..=2 * SLOTS).contains(&seen.at_work) && seen.of_one <= SLOTS && seen.parents_parked,
        "{seen:?}"
    );
    check(&world, &database, &api).await?;
    let asked = world.model.requests().await?.len();
    ensure!(asked == REQUESTS, "the model was asked {asked} times");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tree_of_sessions_outlives_a_worker() -> Result<()> {
    let database = fresh_database().await;
    let world = world(&database).await?;
    let (_api, api) = world.node("api", &[], &[]).await?;
    let sql = database.connect().await;
    let mut tick = tokio::time::interval(Duration::from_millis(10));
    let mut doomed = worker(&world).await?;
    let dead: Uuid = loop {
        if let Some(row) = sql.query_opt("SELECT id FROM workers", &[]).await? {
            break row.get(0);
        }
        tick.tick().await;
    };
    let _other = worker(&world).await?;
    let root = world.create(&api).await?;
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
    let seen = watch(&world, &database, &api, root, dead).await?;
    ensure!((1..=2 * SLOTS).contains(&seen.at_work) && seen.of_one <= SLOTS, "{seen:?}");
    check(&world, &database, &api).await?;
    // Only what the dead worker had at work is asked again.
    let asked = world.model.requests().await?.len();
    ensure!((REQUESTS..=REQUESTS + SLOTS).contains(&asked), "the model was asked {asked} times");
    Ok(())
}
