//! A model that takes requests and never answers them keeps the slots that wait for it, and nothing else.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use holdfast_tests::{
    cluster::fresh_database,
    world::{AgentFiles, Model, PATIENCE, World, answer},
};
use serde_json::json;
use tokio::time::Instant;
use uuid::Uuid;

/// Runs that the worker holds at once.
const SLOTS: usize = 4;

const SCRIPT: &str = r#"{"rules": [
    {"when": {"last": "hang"}, "reply": {"hang": true}},
    {"when": {"last": "drip"}, "reply": {"text": "a b c d", "hang": true, "break_stream_after": 1}},
    {"reply": {"text": "hello"}}
]}"#;

async fn create(world: &World, api: &str, prompt: &str) -> Result<Uuid> {
    let body = json!({"agent": "asking", "prompt": prompt});
    let (status, view) = world.call("POST", &format!("{api}/v1/sessions"), Some(&body)).await?;
    ensure!(status == 201, "{status} {view}");
    Ok(view["session_id"].as_str().context("no id")?.parse()?)
}

/// Waits until the model has been asked so often.
async fn asked(world: &World, count: usize) -> Result<()> {
    let until = Instant::now() + PATIENCE;
    let mut pause = tokio::time::interval(Duration::from_millis(20));
    while world.model.requests().await?.len() < count {
        pause.tick().await;
        ensure!(Instant::now() < until, "the model isn't asked");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn hanging_requests_keep_their_slots_and_nobody_elses() -> Result<()> {
    let database = fresh_database().await;
    let model = Model::start(SCRIPT).await?;
    let config = json!({"slug": "asking", "flavor": "OpenAIv1", "modelUrl": model.url, "modelName": "scripted",
        "systemPrompt": ["Answer."]});
    let agent = AgentFiles::with_tools(&config, &[])?;
    let world = World::new(database.url(), model, agent);
    let (_api, api) = world.node("api", &[], &[]).await?;
    let slots = SLOTS.to_string();
    let (_worker, _) = world.node("worker", &["--slots", &slots, "--stream-tokens"], &[]).await?;
    let mut hanging = Vec::new();
    for prompt in ["hang", "drip", "hang"] {
        hanging.push(create(&world, &api, prompt).await?);
    }
    asked(&world, SLOTS - 1).await?;
    // One slot is enough for everybody else.
    for _ in 0..2 * SLOTS {
        let id = create(&world, &api, "hi").await?;
        ensure!(answer(&world.until(&api, id, "idle").await?)? == "hello");
    }
    // Without any, what comes waits in the queue, for this worker or another one.
    hanging.push(create(&world, &api, "hang").await?);
    let before = world.model.requests().await?.len();
    asked(&world, before.max(SLOTS - 1 + 2 * SLOTS + 1)).await?;
    let waiting = create(&world, &api, "hi").await?;
    let sql = database.connect().await;
    let held: i64 = sql.query_one("SELECT count(*) FROM runs WHERE state = 'claimed'", &[]).await?.get(0);
    ensure!(usize::try_from(held)? == SLOTS, "{held} runs are held");
    let (_other, _) = world.node("worker", &["--slots", "1"], &[]).await?;
    ensure!(answer(&world.until(&api, waiting, "idle").await?)? == "hello");
    // Leases of those that hang are renewed all the while.
    let renewed =
        "SELECT count(*) FROM runs WHERE state = 'claimed' AND takeovers = 0 AND lease_until > now()";
    let renewed: i64 = sql.query_one(renewed, &[]).await?.get(0);
    ensure!(usize::try_from(renewed)? == SLOTS, "{renewed} leases stand");
    // An order to stop ends them at once.
    for id in &hanging {
        let view = world.view(&api, *id).await?;
        ensure!(view["status"] == "running", "{view}");
        let (status, said) =
            world.call("POST", &format!("{api}/v1/sessions/{id}/cancel"), Some(&json!({}))).await?;
        ensure!(status == 200, "{status} {said}");
    }
    let until = Instant::now() + PATIENCE;
    let mut pause = tokio::time::interval(Duration::from_millis(50));
    for id in &hanging {
        while world.view(&api, *id).await?["status"] == "running" {
            pause.tick().await;
            ensure!(Instant::now() < until, "the order isn't obeyed");
        }
    }
    let requests = world.model.requests().await?.len();
    ensure!(requests == SLOTS + 2 * SLOTS + 1, "{requests} requests: each was sent once");
    Ok(())
}
