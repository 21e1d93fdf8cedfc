//! A deployment under load: every process is replaced by a new one, one after the other.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, Result, ensure};
use holdfast_tests::{
    cluster::{Database, fresh_database},
    load::{self, Balancer, Load},
    world::{Node, Signal, World},
};

/// Seconds of a lease: longer than a deployment may keep a run waiting, so that one that waits for it is seen.
const LEASE_TTL: u64 = 60;

/// Starts another node of a role, takes the old one out of the way and tells it to leave; it has to end in
/// order.
async fn replace(world: &World, role: &str, old: &mut (Node, String), balancer: &Balancer) -> Result<String> {
    let new = world.node(role, &[], &[]).await?;
    balancer.swap(&old.1, &new.1);
    let mut gone = std::mem::replace(old, new);
    gone.0.signal(Signal::TERM)?;
    let status = gone.0.ended().await?;
    ensure!(status.success(), "a {role} that was told to leave ended with {status}: {}", gone.0.log_text());
    Ok(gone.0.log_text())
}

/// How long runs stood still at most: between two events of one run.
async fn longest_pause(database: &Database) -> Result<Duration> {
    let sql = "SELECT coalesce(max(gap), 0)::float8 FROM (
                   SELECT extract(epoch FROM at - lag(at) OVER (PARTITION BY session_id ORDER BY seq)) AS gap,
                          lag(kind) OVER (PARTITION BY session_id ORDER BY seq) AS before
                   FROM events) AS gaps
               WHERE before NOT IN ('run.stopped', 'calls.deferred')";
    Ok(Duration::from_secs_f64(database.connect().await.query_one(sql, &[]).await?.try_get(0)?))
}

#[tokio::test(flavor = "multi_thread")]
#[expect(clippy::print_stderr, reason = "the longest pause is worth knowing, and no bound for a test")]
async fn a_rolling_restart_under_load_loses_nothing_and_waits_for_no_lease() -> Result<()> {
    let database = fresh_database().await;
    let mut world = World::canonical(database.url(), false).await?;
    world.lease_ttl = LEASE_TTL;
    let world = Arc::new(world);
    let mut nodes = Vec::new();
    for role in ["api", "api", "worker", "worker", "worker", "scheduler"] {
        nodes.push((role, world.node(role, &[], &[]).await?));
    }
    let apis = nodes.iter().filter(|(role, _)| *role == "api").map(|(_, node)| node.1.clone());
    let balancer = Balancer::over(apis.collect());
    let load = Load::start(&world, &balancer, 8);
    let mut logs = Vec::new();
    for round in 0..2 {
        for (role, node) in &mut nodes {
            let log = replace(&world, role, node, &balancer).await;
            logs.push(log.with_context(|| format!("round {round}: {role}"))?);
        }
    }
    let sessions = load.end().await?;
    logs.extend(nodes.iter().map(|(_, node)| node.0.log_text()));
    load::check_logs(&logs, &[])?;
    load::check_effects(&world, &sessions)?;
    let pause = longest_pause(&database).await?;
    eprintln!(
        "{} sessions over 12 replaced processes; the longest pause of a run: {pause:?}",
        sessions.len()
    );
    Ok(())
}
