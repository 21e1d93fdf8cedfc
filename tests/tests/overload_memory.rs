//! However much tools print, what a worker keeps of it is bounded, and so is its memory.

use anyhow::{Result, ensure};
use holdfast_tests::{
    cluster::fresh_database,
    memory::{self, PRINTED, REQUEST},
    world::{PATIENCE, World},
};
use holdfast_tools::MAX_OUTPUT;

/// Runs at once.
const RUNS: usize = 32;

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_full_of_runs_with_large_results_keeps_within_its_memory() -> Result<()> {
    let database = fresh_database().await;
    let (model, agent) = memory::flood(RUNS).await?;
    let mut world = World::new(database.url(), model, agent);
    world.lease_ttl = 15;
    let (_api, api) = world.node("api", &[], &[]).await?;
    let (worker, _) = world.node("worker", &["--slots", "32"], &[]).await?;
    let before = worker.peak_memory()?;
    ensure!(before < memory::BASE, "{before} bytes without a run");
    memory::play(&api, RUNS, PATIENCE).await?;
    let (peak, limit) = (worker.peak_memory()?, memory::limit(RUNS, REQUEST));
    ensure!(peak < limit, "{peak} bytes of {limit}, {before} of them before");
    let sql = database.connect().await;
    let cut = format!("%[output cut: {} more bytes are not shown]%", PRINTED - MAX_OUTPUT as u64);
    let kept =
        sql.query_one("SELECT count(*), max(length(body)) FROM blobs WHERE body LIKE $1", &[&cut]).await?;
    let (results, longest): (i64, i32) = (kept.get(0), kept.get(1));
    // All print the same, and equal results are kept once.
    ensure!(results == 1, "{results} results say that they are cut");
    ensure!(u64::try_from(longest)? < REQUEST + 1024, "{longest} characters of a result are kept");
    Ok(())
}
