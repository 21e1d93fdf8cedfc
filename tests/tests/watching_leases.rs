//! A worker that loses its database can't keep its leases, and both its metrics and its log say so.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use holdfast_store::embedded::{Cluster, EmbeddedOptions, StopMode};
use holdfast_tests::{
    scrape::{Scrape, metrics_address},
    world::{AgentFiles, Model, PATIENCE, World},
};
use serde_json::{Value, json};
use tokio::time::{Instant, interval};

/// An agent whose tool doesn't end by itself.
async fn endless(url: &str) -> Result<World> {
    let script =
        r#"{"rules": [{"when": {}, "reply": {"tool_calls": [{"name": "bash_endless", "arguments": {}}]}}]}"#;
    let model = Model::start(script).await?;
    let config = json!({"slug": "endless", "flavor": "OpenAI", "modelUrl": model.url, "modelName": "scripted", "toolDirectory": "tools"});
    let described = json!({"slug": "endless", "description": "Never ends.", "args": []});
    let agent = AgentFiles::with_tools(&config, &[("endless", described, "exec sleep infinity")])?;
    let mut world = World::new(url, model, agent);
    // Short, since the test waits for its end, and yet no machine stalls for so long.
    world.lease_ttl = 5;
    Ok(world)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_cannot_renew_its_leases_says_so() -> Result<()> {
    holdfast_store::install::ensure_installed().await?;
    let dir = tempfile::tempdir()?;
    let cluster = Cluster::start(EmbeddedOptions::new(dir.path())).await?;
    cluster.create_database("flow").await?;
    let world = endless(&cluster.url("flow")).await?;
    let (_api, api) = world.node("api", &[], &[]).await?;
    let (worker, _) = world.node("worker", &["--metrics-bind", "127.0.0.1:0"], &[]).await?;
    let address = metrics_address(&worker)?;
    world.create(&api).await?;
    until(&address, "the run is held", |shown| Ok(shown.sum("holdfast_worker_slots_used", &[])? == 1.0))
        .await?;
    let before = Scrape::of(&address).await?;
    ensure!(before.sum("holdfast_leases_lost_total", &[])? == 0.0);
    ensure!(!worker.log_text().contains("worker.leases_not_kept"));

    cluster.stop(StopMode::Fast).await?;
    let lost =
        until(
            &address,
            "the lease is lost",
            |shown| Ok(shown.sum("holdfast_leases_lost_total", &[])? == 1.0),
        );
    let shown = lost.await?;
    ensure!(shown.sum("holdfast_heartbeats_total", &[("outcome", "failed")])? >= 1.0);
    ensure!(shown.sum("holdfast_runs_ended_total", &[("outcome", "lease_lost")])? == 1.0);
    ensure!(shown.sum("holdfast_store_errors_total", &[("kind", "connection")])? >= 1.0);
    ensure!(shown.sum("holdfast_worker_slots_used", &[])? == 0.0);
    let (age, ttl) = (shown.sum("holdfast_heartbeat_age_seconds", &[])?, world.lease_ttl as f64);
    ensure!(age >= 0.7 * ttl, "what the alert asks for is true: {age} s of {ttl} s");
    // The heartbeat learns of it with its next try.
    until(&address, "it says so", |_| Ok(worker.log_text().contains("worker.leases_not_kept"))).await?;
    let log = worker.log_text();
    let line = log.lines().find(|line| line.contains("worker.leases_not_kept")).context("it says so")?;
    let line: Value = serde_json::from_str(line)?;
    ensure!(line["level"] == "error" && line["leases"] == 1 && line["worker_id"].is_string(), "{line}");

    // The lost lease keeps nobody from renewing others once the database is back.
    cluster.restart(StopMode::Fast).await?;
    let back = |shown: &Scrape| Ok(shown.sum("holdfast_heartbeat_age_seconds", &[])? < age / 2.0);
    until(&address, "heartbeats go on", back).await?;
    ensure!(worker.log_text().contains("worker.leases_kept"), "{}", worker.log_text());
    Ok(())
}

/// Waits until what a node shows is as wanted.
async fn until(address: &str, what: &str, wanted: impl Fn(&Scrape) -> Result<bool>) -> Result<Scrape> {
    let deadline = Instant::now() + PATIENCE;
    let mut pause = interval(Duration::from_millis(20));
    loop {
        pause.tick().await;
        let shown = Scrape::of(address).await?;
        if wanted(&shown)? {
            return Ok(shown);
        }
        ensure!(Instant::now() < deadline, "{what}: never");
    }
}
