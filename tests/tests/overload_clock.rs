//! Clocks jump by an hour: the database's, and a worker's. Nothing is lost or done twice, and no run stands
//! still for as long as a clock was set back.

use std::{fs, time::Duration};

use anyhow::{Context as _, Result, ensure};
use holdfast_store::{
    claim::{self, Rotation},
    passes,
    quota::{self, Limits},
    workers,
};
use holdfast_tests::{
    faketime::Clock,
    server::{Server, Shape},
    step::Holder,
    store::{LONG, OWNER, World as Shelf, roster, worker},
    world::{AgentFiles, CANONICAL_ANSWER, Model, Node, PATIENCE, World, answer, token},
};
use serde_json::{Value, json};
use tokio::time::Instant;
use uuid::Uuid;

const HOUR: i64 = 3600;

/// Sessions of each part of a test.
const SESSIONS: usize = 4;

/// One call of a tool that takes its time, and an answer that says what came of it.
const SCRIPT: &str = r#"{"rules": [
    {"when": {"turn": 0}, "reply": {"tool_calls": [{"name": "bash_slow"}]}},
    {"reply": {"text": "{{tool_result:bash_slow}}"}}
]}"#;

async fn world(url: &str) -> Result<World> {
    let model = Model::start(SCRIPT).await?;
    let described = json!({"slug": "slow", "description": "Takes its time.", "args": []});
    let config = json!({"slug": "patient", "flavor": "OpenAIv1", "modelUrl": model.url, "modelName": "scripted",
        "systemPrompt": ["Do it."], "toolDirectory": "tools"});
    let run = "cd \"$(dirname \"$0\")/..\"; echo \"$AGENT_SESSION_ID\" >> effects.log; sleep 3; echo worked";
    let agent = AgentFiles::with_tools(&config, &[("slow", described, run)])?;
    let mut world = World::new(url, model, agent);
    world.lease_ttl = 3;
    Ok(world)
}

async fn create(world: &World, api: &str) -> Result<Vec<Uuid>> {
    let mut created = Vec::new();
    for _ in 0..SESSIONS {
        created.push(world.create(api).await?);
    }
    Ok(created)
}

/// Waits until so many calls have started.
async fn started(world: &World, count: usize) -> Result<()> {
    let until = Instant::now() + PATIENCE;
    let mut pause = tokio::time::interval(Duration::from_millis(20));
    while world.agent.effects().len() < count {
        pause.tick().await;
        ensure!(Instant::now() < until, "{:?}", world.agent.effects());
    }
    Ok(())
}

/// Every session ends, and its call started at most once. Returns how many were told what it said.
async fn all_end(world: &World, api: &str, sessions: &[Uuid]) -> Result<usize> {
    let mut worked = 0;
    for id in sessions {
        let view = world.until(api, *id, "idle").await?;
        ensure!(view["session"]["turns"].as_array().is_some_and(|turns| turns.len() == 4), "{view}");
        worked += usize::from(answer(&view)?.starts_with("worked"));
    }
    let effects = world.agent.effects();
    let twice: Vec<_> = effects.iter().filter(|(_, count)| **count > 1).collect();
    ensure!(twice.is_empty(), "{twice:?}");
    Ok(worked)
}

/// Waits until a node says that a clock has jumped. Returns by how much.
async fn jumped(node: &Node, whose: &str) -> Result<i64> {
    let until = Instant::now() + PATIENCE;
    let mut pause = tokio::time::interval(Duration::from_millis(50));
    loop {
        pause.tick().await;
        let log = node.log_text();
        let mut entries = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        if let Some(entry) = entries.find(|entry| entry["kind"] == "clock.jumped" && entry["whose"] == whose)
        {
            return entry["seconds"].as_i64().context("by how much");
        }
        ensure!(Instant::now() < until, "nobody noticed: {log}");
    }
}

fn about(seconds: i64, wanted: i64) -> bool {
    (seconds - wanted).abs() <= 10
}

async fn server(clock: &Clock) -> Result<Server> {
    Server::start(Shape { environment: clock.environment(), ..Shape::default() }).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_databases_clock_an_hour_ahead_ends_all_leases_and_nothing_happens_twice() -> Result<()> {
    let clock = Clock::new().await?;
    let server = server(&clock).await?;
    let world = world(server.url()).await?;
    let (_api, api) = world.node("api", &[], &[]).await?;
    let (scheduler, _) = world.node("scheduler", &[], &[]).await?;
    let (_one, _) = world.node("worker", &[], &[]).await?;
    let (_two, _) = world.node("worker", &[], &[]).await?;
    let running = create(&world, &api).await?;
    started(&world, SESSIONS).await?;
    clock.set(HOUR)?;
    let seconds = jumped(&scheduler, "the database").await?;
    ensure!(about(seconds, HOUR), "{seconds}");
    all_end(&world, &api, &running).await?;
    let later = create(&world, &api).await?;
    ensure!(all_end(&world, &api, &later).await? == SESSIONS, "{}", scheduler.log_text());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_databases_clock_an_hour_back_holds_up_nobody() -> Result<()> {
    let clock = Clock::new().await?;
    let server = server(&clock).await?;
    let world = world(server.url()).await?;
    let (_api, api) = world.node("api", &[], &[]).await?;
    let (scheduler, _) = world.node("scheduler", &[], &[]).await?;
    // Runs of a worker that dies, runs that wait, and runs of a worker that lives.
    let (mut dying, _) = world.node("worker", &["--slots", "4"], &[]).await?;
    let orphaned = create(&world, &api).await?;
    started(&world, SESSIONS).await?;
    dying.kill().await?;
    let (_living, _) = world.node("worker", &["--slots", "4"], &[]).await?;
    let running = create(&world, &api).await?;
    started(&world, 2 * SESSIONS).await?;
    let waiting = create(&world, &api).await?;
    clock.set(-HOUR)?;
    let seconds = jumped(&scheduler, "the database").await?;
    ensure!(about(seconds, -HOUR), "{seconds}");
    all_end(&world, &api, &orphaned).await?;
    ensure!(all_end(&world, &api, &running).await? == SESSIONS, "a holder that lives was robbed");
    ensure!(all_end(&world, &api, &waiting).await? == SESSIONS, "what waits is done as usual");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_nodes_own_clock_may_jump_in_the_middle_of_a_flow() -> Result<()> {
    let clock = Clock::new().await?;
    let database = holdfast_tests::cluster::fresh_database().await;
    let world = World::canonical(database.url(), false).await?;
    let environment = clock.environment();
    let environment: Vec<(&str, &str)> =
        environment.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    let (node, api) = world.node("serve", &[], &environment).await?;
    for (deferred, completed) in [(HOUR, HOUR), (-HOUR, 0), (0, -HOUR), (HOUR, -HOUR)] {
        let id = world.create(&api).await?;
        let waiting = world.until(&api, id, "waiting_external").await?;
        clock.set(deferred)?;
        world.complete(&api, &token(&waiting, "fetch_remote_a")?, "A", false).await?;
        clock.set(completed)?;
        world.complete(&api, &token(&waiting, "fetch_remote_b")?, "B", false).await?;
        let view = world.until(&api, id, "idle").await?;
        ensure!(answer(&view)? == CANONICAL_ANSWER, "{view}");
        ensure!(view["session"]["turns"].as_array().is_some_and(|turns| turns.len() == 4), "{view}");
    }
    ensure!(world.agent.effects().values().all(|count| *count == 1), "{:?}", world.agent.effects());
    let seconds = jumped(&node, "this process").await?;
    ensure!(about(seconds.abs(), HOUR) || about(seconds.abs(), 2 * HOUR), "{seconds}");
    ensure!(fs::exists(world.agent.effects_path())?, "the tool ran");
    Ok(())
}

/// Sets the database's clock back by an hour, as far as what is stored can tell.
async fn set_back(world: &Shelf) {
    let sql = world.sql().await;
    sql.batch_execute(
        "UPDATE runs SET lease_until = lease_until + interval '1 hour', available_at = available_at + interval '1 hour';
         UPDATE workers SET seen_at = seen_at + interval '1 hour';
         UPDATE owner_limits SET filled_at = filled_at + interval '1 hour'",
    )
    .await
    .expect("set back");
}

#[tokio::test]
async fn times_that_lie_ahead_are_moved_back_and_honest_ones_stay() {
    let world = Shelf::new().await;
    let agents = roster(&world.agent);
    let (dead, living) = (worker(), worker());
    let short = Duration::from_secs(2);
    let limits = Limits { max_running: None, runs_per_minute: Some(60), max_queued: None };
    quota::set(&world.store, OWNER, limits).await.expect("limited");
    let first = world.asked("first").await;
    let rotation = Rotation::default();
    let leases =
        claim::claim(&world.store, dead, 1, short, &agents, false, &rotation).await.expect("claimed");
    assert_eq!(leases.iter().map(|lease| lease.session).collect::<Vec<_>>(), [first]);
    world.asked("second").await;
    for id in [dead, living] {
        workers::register(&world.store, id, "host", 1, 1, &[], &agents).await.expect("registered");
    }
    set_back(&world).await;
    // Claimed after the jump, for as long as a lease may last, by one who was heard of since.
    let third = world.asked("third").await;
    workers::register(&world.store, living, "host", 1, 1, &[], &agents).await.expect("registered");
    let held: Vec<(holdfast_engine::ids::SessionId, i64)> = {
        let sql = world.sql().await;
        let taken = sql
            .query_one(
                "UPDATE runs SET state = 'claimed', worker = $2, epoch = nextval('run_epochs'), lease_until = now() + interval '1 hour'
                 WHERE session_id = $1 RETURNING epoch",
                &[&third.0, &living.0],
            )
            .await
            .expect("claimed");
        vec![(third, taken.get(0))]
    };
    let moved = passes::mend_clock(&world.store, 100).await.expect("mended");
    assert_eq!(moved, 3, "a lease, a due time and a bucket");
    assert_eq!(passes::mend_clock(&world.store, 100).await.expect("mended"), 0, "once");
    // The second run is due, and the bucket fills.
    assert_eq!(Holder::claim(&world.store, &world.agent, LONG).await.lease.session.0.get_version_num(), 7);
    let ahead = "SELECT count(*) FROM owner_limits WHERE filled_at > now()";
    assert_eq!(world.count(ahead).await, 0);
    // The dead worker's lease stands for a moment yet, and the living one's as it did.
    let until = "SELECT count(*) FROM runs WHERE lease_until BETWEEN now() AND now() + interval '8 seconds'";
    assert_eq!(world.count(until).await, 1);
    let untouched = "SELECT count(*) FROM runs WHERE lease_until > now() + interval '50 minutes'";
    assert_eq!(world.count(untouched).await, 1);
    let beats = claim::heartbeat(&world.store, &held, LONG).await.expect("a heartbeat");
    assert!(beats.iter().any(|beat| beat.renewed), "{beats:?}");
}

/// A model that sleeps for three days and asks a person who has as long, and says so when both are over.
const SLEEPER: &str = r#"{"rules": [
    {"when": {"turn": 0}, "reply": {"tool_calls": [
        {"name": "system_own_system_info", "id": "call_sleep", "arguments": {"capability": "sleep-until", "seconds": 259200}},
        {"name": "system_own_system_info", "id": "call_ask", "arguments": {"capability": "ask-human", "question": "may I?", "deadline_seconds": 259200, "default": "no"}}]}},
    {"reply": {"text": "they said {{tool_result:system_own_system_info}}"}}
]}"#;

#[tokio::test(flavor = "multi_thread")]
async fn a_sleep_of_days_and_a_deadline_end_by_the_databases_clock_whatever_dies_meanwhile() -> Result<()> {
    const DAYS: i64 = 3 * 24 * HOUR;
    let clock = Clock::new().await?;
    let server = server(&clock).await?;
    let model = Model::start(SLEEPER).await?;
    let config = json!({"slug": "sleeper", "flavor": "OpenAIv1", "modelUrl": model.url, "modelName": "scripted",
        "builtinToolboxes": [{"tag": "SystemToolbox", "contents": {"Name": "own", "Capabilities": ["sleep-until", "ask-human"]}}]});
    let world = World::new(server.url(), model, AgentFiles::with_tools(&config, &[])?);
    let (_api, api) = world.node("api", &[], &[]).await?;
    let (scheduler, _) = world.node("scheduler", &[], &[]).await?;
    let (mut doomed, _) = world.node("worker", &[], &[]).await?;
    let id = world.create(&api).await?;
    let asleep = async || {
        let until = Instant::now() + PATIENCE;
        loop {
            let view = world.view(&api, id).await?;
            if view["parked_on"] == "timer" {
                return Ok(view);
            }
            ensure!(Instant::now() < until, "it doesn't sleep: {view}");
            tokio::time::sleep(Duration::from_millis(50)).await; // polls a process
        }
    };
    let view = asleep().await?;
    ensure!(view["status"] == "running" && view["wakes_at"].is_string(), "{view}");

    doomed.kill().await?;
    clock.set(-HOUR)?;
    ensure!(about(jumped(&scheduler, "the database").await?, -HOUR));
    server.restart().await?;
    let (_worker, _) = world.node("worker", &[], &[]).await?;
    ensure!(asleep().await?["wakes_at"] == view["wakes_at"], "nobody wakes it early");
    ensure!(world.model.requests().await?.len() == 1, "the model was asked again");

    clock.set(DAYS + 60)?;
    let view = world.until(&api, id, "idle").await?;
    ensure!(answer(&view)? == "they said no", "{view}");
    Ok(())
}

/// A model that sleeps for two hours, beside a call that takes as long as it is let.
const WORKS_AND_SLEEPS: &str = r#"{"rules": [
    {"when": {"turn": 0}, "reply": {"tool_calls": [
        {"name": "bash_slow", "id": "call_slow"},
        {"name": "system_own_system_info", "id": "call_sleep", "arguments": {"capability": "sleep-until", "seconds": 7200}}]}},
    {"reply": {"text": "told"}}
]}"#;

async fn works_and_sleeps(url: &str) -> Result<World> {
    let model = Model::start(WORKS_AND_SLEEPS).await?;
    let config = json!({"slug": "sleeper", "flavor": "OpenAIv1", "modelUrl": model.url, "modelName": "scripted", "toolDirectory": "tools",
        "builtinToolboxes": [{"tag": "SystemToolbox", "contents": {"Name": "own", "Capabilities": ["sleep-until"]}}]});
    let described = json!({"slug": "slow", "description": "Takes its time.", "args": []});
    let run = "cd \"$(dirname \"$0\")/..\"; echo x >> effects.log; until [ -e go-on ]; do sleep 0.02; done; echo worked";
    let mut world = World::new(url, model, AgentFiles::with_tools(&config, &[("slow", described, run)])?);
    world.lease_ttl = 5;
    Ok(world)
}

/// When a session wakes, once it sleeps: so many seconds from now by the database's clock.
async fn sleeps_for(world: &World, api: &str, id: Uuid) -> Result<i64> {
    let until = Instant::now() + PATIENCE;
    let mut pause = tokio::time::interval(Duration::from_millis(50));
    loop {
        pause.tick().await;
        let view = world.view(api, id).await?;
        if view["parked_on"] == "timer" {
            let sql = holdfast_tests::cluster::connect(&world.url).await?;
            let left =
                "SELECT extract(epoch FROM available_at - now())::bigint FROM runs WHERE session_id = $1";
            return Ok(sql.query_one(left, &[&id]).await?.get(0));
        }
        ensure!(Instant::now() < until, "it doesn't sleep: {view}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_whose_clock_is_wrong_or_is_set_ends_no_wait_early() -> Result<()> {
    let clock = Clock::new().await?;
    let database = holdfast_tests::cluster::fresh_database().await;
    let environment = clock.environment();
    let environment: Vec<(&str, &str)> =
        environment.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    let world = works_and_sleeps(database.url()).await?;
    let (_api, api) = world.node("api", &[], &[]).await?;
    let (_scheduler, _) = world.node("scheduler", &[], &[]).await?;
    // Days ahead from its start on, and set further while it holds the run: the call goes on beside the sleep.
    clock.set(100 * HOUR)?;
    let (_worker, _) = world.node("worker", &[], &environment).await?;
    let id = world.create(&api).await?;
    started(&world, 1).await?;
    clock.set(200 * HOUR)?;
    let url = format!("{api}/v1/sessions/{id}/messages");
    let (status, view) = world.call("POST", &url, Some(&json!({"prompt": "are you there?"}))).await?;
    ensure!(matches!(status, 200 | 202), "{status} {view}");
    fs::write(world.agent.dir().join("go-on"), "")?;
    let left = sleeps_for(&world, &api, id).await?;
    ensure!((HOUR..=2 * HOUR).contains(&left), "{left} s are left");
    let requests = world.model.requests().await?;
    ensure!(requests.len() == 2 && !requests[1].to_string().contains("woken_by"), "{requests:#?}");
    Ok(())
}
