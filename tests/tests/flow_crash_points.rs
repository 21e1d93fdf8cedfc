//! The worker is aborted at every named point of the flow, at every passing of it; each time another
//! one goes on, and each time the end is the same.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use holdfast_store::gate::POINTS;
use holdfast_tests::{
    cluster::fresh_database,
    sse::{Follower, check_dense},
    world::{CANONICAL_ANSWER, World, answer, token},
};
use tokio::sync::Semaphore;

/// Flows that go on at once: they mostly wait for leases to end.
const AT_ONCE: usize = 4;

/// Passings of one point that are tried: more than the flow has of any.
const MAX_PASSINGS: usize = 12;

/// Plays the flow with a worker that aborts at the `n`-th passing of `point`. Returns whether it did.
async fn play(point: &'static str, n: usize) -> Result<bool> {
    let database = fresh_database().await;
    let world = World::canonical(database.url(), true).await?;
    let (_api, api) = world.node("api", &[], &[]).await?;
    let crash = format!("{point}:{n}");
    let (mut doomed, _) = world.node("worker", &[], &[("HOLDFAST_CRASH_AT", crash.as_str())]).await?;
    let mut successor = None;
    let id = world.create(&api).await?;
    let mut completed = false;
    let view = loop {
        if successor.is_none() && doomed.has_ended()? {
            successor = Some(world.node("worker", &[], &[]).await?);
        }
        let view = world.view(&api, id).await?;
        match view["status"].as_str() {
            Some("idle") => break view,
            Some("waiting_external") if !completed => {
                for (tool, result) in [("fetch_remote_a", "A"), ("fetch_remote_b", "B")] {
                    world.complete(&api, &token(&view, tool)?, result, false).await?;
                }
                completed = true;
            }
            Some("failed") => anyhow::bail!("{crash}: {view}"),
            _ => tokio::time::sleep(std::time::Duration::from_millis(50)).await, // polls a process
        }
    };
    check(&world, &api, id, &view).await.with_context(|| format!("aborted at {crash}"))?;
    doomed.has_ended()
}

/// The promises, as far as this flow can break them.
async fn check(world: &World, api: &str, id: uuid::Uuid, view: &serde_json::Value) -> Result<()> {
    // I1: each message and result is told once, in one place.
    ensure!(answer(view)? == CANONICAL_ANSWER, "{view}");
    ensure!(view["session"]["turns"].as_array().is_some_and(|turns| turns.len() == 4), "{view}");
    // I3: one tool message a call in every request, and the same request whenever it is repeated.
    let requests = world.model.requests().await?;
    for request in &requests {
        let messages = request["messages"].as_array().context("messages")?;
        let asked: usize =
            messages.iter().filter_map(|message| message["tool_calls"].as_array()).map(Vec::len).sum();
        let told = messages.iter().filter(|message| message["role"] == "tool").count();
        ensure!(asked == told, "{request}");
        let twin =
            requests.iter().find(|other| other["messages"].as_array().map(Vec::len) == Some(messages.len()));
        ensure!(twin == Some(request), "a repeated request differs: {request}");
    }
    // I4: an idempotent call may start again, with the same key.
    let effects = world.agent.effects();
    ensure!(effects.len() == 1 && effects.values().all(|count| (1..=2).contains(count)), "{effects:?}");
    // I5: a token that was used stays used.
    let (status, refused) = world.call("GET", &format!("{api}/v1/sessions/{id}/pending"), None).await?;
    ensure!(status == 200 && refused["calls"].as_array().is_some_and(Vec::is_empty), "{refused}");
    // I2 and I6: versions and events without gap or double.
    let nodes = Arc::new(std::sync::Mutex::new(vec![api.to_owned()]));
    let follower = Follower::start(nodes, format!("/v1/sessions/{id}/events?after=0"));
    let idle = |frames: &[holdfast_tests::sse::Frame]| {
        frames.iter().any(|frame| frame.kind == "run.stopped" && frame.data["status"] == "idle")
    };
    let frames = follower.until(idle).await?;
    check_dense(&frames)?;
    let count = |kind: &str| frames.iter().filter(|frame| frame.kind == kind).count();
    ensure!(count("run.started") == count("run.stopped"), "{frames:#?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_may_die_anywhere() -> Result<()> {
    let slots = Semaphore::new(AT_ONCE);
    let points = POINTS.iter().map(async |&point| {
        for n in 1..=MAX_PASSINGS {
            let _slot = slots.acquire().await?;
            if !play(point, n).await? {
                ensure!(n > 1 || point == "run.released", "the flow never passes {point}");
                return Ok(n - 1);
            }
        }
        anyhow::bail!("the flow passes {point} more than {MAX_PASSINGS} times")
    });
    let crashes: usize = futures::future::try_join_all(points).await?.into_iter().sum();
    ensure!(crashes >= POINTS.len(), "only {crashes} crashes");
    Ok(())
}
