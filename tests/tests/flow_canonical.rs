//! The canonical flow with two API nodes and two workers as processes, with kills in between.
#![expect(clippy::expect_used, reason = "a test")]

use std::sync::{Arc, Mutex};

use anyhow::{Result, ensure};
use holdfast_tests::{
    cluster::fresh_database,
    sse::{Follower, check_dense},
    world::{CANONICAL_ANSWER, Signal, World, answer, token},
};
use serde_json::Value;

/// Checks what every end of the flow has in common: one answer, four turns, one request a round, one
/// tool message a call, each tool started once.
async fn check_end(world: &World, view: &Value, starts: usize) -> Result<()> {
    ensure!(answer(view)? == CANONICAL_ANSWER, "{view}");
    let turns = view["session"]["turns"].as_array().expect("turns");
    ensure!(turns.len() == 4, "{} turns: {view}", turns.len());
    ensure!(view["pending"].as_array().is_some_and(Vec::is_empty), "{view}");
    let requests = world.model.requests().await?;
    let last = requests.last().expect("the model was asked");
    let messages = last["messages"].as_array().expect("messages");
    let tools: Vec<&str> = messages
        .iter()
        .filter(|message| message["role"] == "tool")
        .map(|message| message["content"].as_str().unwrap_or_default())
        .collect();
    ensure!(tools == ["got local data\n", "A", "B"], "{tools:?}");
    let effects = world.agent.effects();
    ensure!(effects.len() == 1 && effects.values().all(|count| *count == starts), "{effects:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn kills_between_deferral_and_results_lose_nothing() -> Result<()> {
    let database = fresh_database().await;
    let world = World::canonical(database.url(), false).await?;
    let (mut doomed_api, first) = world.node("api", &[], &[]).await?;
    let (_api, second) = world.node("api", &[], &[]).await?;
    let (mut doomed_worker, _) = world.node("worker", &[], &[]).await?;
    let id = world.create(&first).await?;
    let path = format!("/v1/sessions/{id}/events?after=0");
    let on_first = Follower::start(Arc::new(Mutex::new(vec![first.clone()])), path.clone());
    let on_second = Follower::start(Arc::new(Mutex::new(vec![second.clone()])), path.clone());
    let waiting = world.until(&first, id, "waiting_external").await?;
    on_first.until(|frames| frames.iter().any(|frame| frame.kind == "run.stopped")).await?;

    doomed_worker.kill().await?;
    doomed_api.kill().await?;
    let (_worker, _) = world.node("worker", &[], &[]).await?;
    let (_other_worker, _) = world.node("worker", &[], &[]).await?;
    let (_new_api, third) = world.node("api", &[], &[]).await?;

    let partly = world.complete(&second, &token(&waiting, "fetch_remote_a")?, "A", false).await?;
    ensure!(partly["pending"].as_array().is_some_and(|calls| calls.len() == 1), "{partly}");
    let view = world.complete(&second, &token(&waiting, "fetch_remote_b")?, "B", true).await?;
    ensure!(view["status"] == "idle", "{view}");
    check_end(&world, &view, 1).await?;
    ensure!(world.model.requests().await?.len() == 2, "the model was asked once a round");

    let finished = |frames: &[holdfast_tests::sse::Frame]| {
        frames.iter().any(|frame| frame.kind == "run.stopped" && frame.data["status"] == "idle")
    };
    let frames = on_second.until(finished).await?;
    check_dense(&frames)?;
    let on_third = Follower::start(Arc::new(Mutex::new(vec![third])), path);
    let replayed = on_third.until(finished).await?;
    ensure!(frames == replayed, "both nodes tell the same story:\n{frames:#?}\n{replayed:#?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_worker_that_comes_back_stores_nothing() -> Result<()> {
    let database = fresh_database().await;
    let world = World::canonical(database.url(), true).await?;
    let (_api, api) = world.node("api", &[], &[]).await?;
    let hold = world.agent.dir().join("go-on");
    let pause = format!("tool.done:{}", hold.display());
    let (frozen, _) = world.node("worker", &[], &[("HOLDFAST_PAUSE_AT", pause.as_str())]).await?;
    let id = world.create(&api).await?;
    // The tool has run in the first worker, which then holds before it can store the result.
    let started = tokio::time::timeout(holdfast_tests::world::PATIENCE, async {
        let mut tick = tokio::time::interval(std::time::Duration::from_millis(20));
        while world.agent.effects().is_empty() {
            tick.tick().await;
        }
    });
    started.await?;
    frozen.signal(Signal::STOP)?;
    let (_worker, _) = world.node("worker", &[], &[]).await?;
    let waiting = world.until(&api, id, "waiting_external").await?;
    std::fs::write(&hold, "")?;
    frozen.signal(Signal::CONT)?;
    world.complete(&api, &token(&waiting, "fetch_remote_a")?, "A", false).await?;
    let view = world.complete(&api, &token(&waiting, "fetch_remote_b")?, "B", true).await?;
    check_end(&world, &view, 2).await?;
    let frames =
        Follower::start(Arc::new(Mutex::new(vec![api])), format!("/v1/sessions/{id}/events?after=0"));
    check_dense(
        &frames
            .until(|frames| frames.iter().filter(|frame| frame.kind == "run.stopped").count() >= 2)
            .await?,
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drained_worker_hands_its_runs_over_at_once() -> Result<()> {
    let database = fresh_database().await;
    let mut world = World::canonical(database.url(), false).await?;
    // Far longer than the test: whoever waits for an expiry fails.
    world.lease_ttl = 600;
    let (_api, api) = world.node("api", &[], &[]).await?;
    let hold = world.agent.dir().join("go-on");
    let pause = format!("model.before:{}", hold.display());
    let (mut leaving, _) =
        world.node("worker", &["--shutdown-grace", "1"], &[("HOLDFAST_PAUSE_AT", pause.as_str())]).await?;
    let id = world.create(&api).await?;
    world.until(&api, id, "running").await?;
    leaving.signal(Signal::TERM)?;
    ensure!(leaving.ended().await?.success(), "{}", leaving.log_text());
    let (_worker, _) = world.node("worker", &[], &[]).await?;
    world.until(&api, id, "waiting_external").await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_its_worker_left_behind_is_not_started_again() -> Result<()> {
    let database = fresh_database().await;
    let world = World::canonical(database.url(), false).await?;
    let (_api, api) = world.node("api", &[], &[]).await?;
    // The tool has run, and the worker dies with its result.
    let (_doomed, _) = world.node("worker", &[], &[("HOLDFAST_CRASH_AT", "tool.done:1")]).await?;
    let id = world.create(&api).await?;
    let (_worker, _) = world.node("worker", &[], &[]).await?;
    let waiting = world.until(&api, id, "waiting_external").await?;
    world.complete(&api, &token(&waiting, "fetch_remote_a")?, "A", false).await?;
    let view = world.complete(&api, &token(&waiting, "fetch_remote_b")?, "B", true).await?;
    let answer = answer(&view)?;
    ensure!(answer.starts_with("local: Error: orphaned: ") && answer.ends_with(" a: A b: B"), "{answer}");
    let effects = world.agent.effects();
    ensure!(effects.len() == 1 && effects.values().all(|starts| *starts == 1), "{effects:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn this_flow_catches_planted_mistakes() -> anyhow::Result<()> {
    holdfast_tests::planted::check(holdfast_tests::planted::Suite::Flow).await
}
