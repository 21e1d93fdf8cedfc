//! Postgres is restarted in immediate mode between any two steps of the canonical flow.

use std::{path::PathBuf, time::Duration};

use anyhow::{Result, ensure};
use holdfast_store::embedded::{Cluster, EmbeddedOptions, StopMode};
use holdfast_tests::world::{CANONICAL_ANSWER, World, answer, token};

/// Where the restart comes.
const STEPS: [&str; 6] =
    ["before create", "after create", "after deferral", "between results", "after results", "never"];

/// A Postgres of the test's own, which it may restart, with a database.
async fn own_server() -> Result<(tempfile::TempDir, Cluster, String)> {
    holdfast_store::install::ensure_installed().await?;
    let dir = tempfile::tempdir()?;
    let cluster = Cluster::start(EmbeddedOptions::new(PathBuf::from(dir.path()))).await?;
    cluster.create_database("flow").await?;
    let url = cluster.url("flow");
    Ok((dir, cluster, url))
}

#[tokio::test(flavor = "multi_thread")]
async fn the_flow_survives_a_restart_between_any_two_steps() -> Result<()> {
    let (_dir, cluster, url) = own_server().await?;
    let mut world = World::canonical(&url, true).await?;
    world.lease_ttl = 5;
    let (mut api, first) = world.node("api", &[], &[]).await?;
    let (mut other_api, second) = world.node("api", &[], &[]).await?;
    let (mut worker, _) = world.node("worker", &[], &[]).await?;
    for now in STEPS {
        let restart = async |step: &str| -> Result<()> {
            if step == now {
                cluster.restart(StopMode::Immediate).await?;
            }
            Ok(())
        };
        restart("before create").await?;
        let id = world.create(&first).await?;
        restart("after create").await?;
        let waiting = world.until(&second, id, "waiting_external").await?;
        restart("after deferral").await?;
        world.complete(&second, &token(&waiting, "fetch_remote_a")?, "A", false).await?;
        restart("between results").await?;
        world.complete(&first, &token(&waiting, "fetch_remote_b")?, "B", false).await?;
        restart("after results").await?;
        let view = world.until(&second, id, "idle").await?;
        ensure!(answer(&view)? == CANONICAL_ANSWER, "restart {now}: {view}");
        ensure!(
            view["session"]["turns"].as_array().is_some_and(|turns| turns.len() == 4),
            "restart {now}: {view}"
        );
    }
    for node in [&mut api, &mut other_api, &mut worker] {
        ensure!(!node.has_ended()?, "a restart of Postgres ended a process: {}", node.log_text());
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn while_postgres_is_away_requests_are_answered_with_503() -> Result<()> {
    let (_dir, cluster, url) = own_server().await?;
    let world = World::canonical(&url, true).await?;
    let (_api, api) = world.node("api", &[], &[]).await?;
    cluster.stop(StopMode::Fast).await?;
    let client = holdfast_tests::world::client();
    for (path, code) in [("/readyz", 503), ("/healthz", 503), ("/v1/sessions", 503)] {
        let answer = client.get(format!("{api}{path}")).timeout(Duration::from_secs(30)).send().await?;
        ensure!(answer.status() == code, "{path}: {}", answer.status());
        ensure!(answer.headers().contains_key("retry-after"), "{path} says when to come back");
    }
    cluster.restart(StopMode::Fast).await?;
    world.create(&api).await?;
    Ok(())
}
