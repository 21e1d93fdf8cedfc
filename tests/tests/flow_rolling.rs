//! A deployment under load: every process is replaced by a new one, one after the other.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use holdfast_tests::{
    cluster::{Database, fresh_database},
    world::{CANONICAL_ANSWER, Node, Signal, World, answer, token},
};
use tokio::task::JoinSet;
use uuid::Uuid;

/// Clients, each with one session after the other.
const CLIENTS: usize = 8;
/// Seconds of a lease: longer than a deployment may keep a run waiting, so that one that waits for it is seen.
const LEASE_TTL: u64 = 60;

/// The nodes that take requests now.
type Balancer = Arc<Mutex<Vec<String>>>;

fn pick(balancer: &Balancer, number: usize) -> String {
    let nodes = balancer.lock().unwrap_or_else(PoisonError::into_inner);
    nodes[number % nodes.len()].clone()
}

/// One client: sessions one after the other until it is told to stop. Returns them.
async fn play(
    world: Arc<World>,
    balancer: Balancer,
    number: usize,
    stop: Arc<Mutex<bool>>,
) -> Result<Vec<Uuid>> {
    let mut done = Vec::new();
    while !*stop.lock().unwrap_or_else(PoisonError::into_inner) {
        // Each request goes to another node, as behind a load balancer.
        let mut turn = number + done.len();
        let mut node = || {
            turn += 1;
            pick(&balancer, turn)
        };
        let id = world.create_over(&mut node).await?;
        let waiting = world.until_over(&mut node, id, "waiting_external").await?;
        world.complete_over(&mut node, &token(&waiting, "fetch_remote_a")?, "A").await?;
        world.complete_over(&mut node, &token(&waiting, "fetch_remote_b")?, "B").await?;
        let view = world.until_over(&mut node, id, "idle").await?;
        ensure!(answer(&view)? == CANONICAL_ANSWER, "{view}");
        done.push(id);
    }
    Ok(done)
}

/// Starts another node of a role, takes the old one out of the way and tells it to leave; it has to end in
/// order.
async fn replace(world: &World, role: &str, old: &mut (Node, String), balancer: &Balancer) -> Result<String> {
    let new = world.node(role, &[], &[]).await?;
    {
        let mut nodes = balancer.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = nodes.iter_mut().find(|address| **address == old.1) {
            place.clone_from(&new.1);
        }
    }
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
    let balancer: Balancer = Arc::new(Mutex::new(apis.collect()));
    let stop = Arc::new(Mutex::new(false));
    let mut clients = JoinSet::new();
    for number in 0..CLIENTS {
        clients.spawn(play(Arc::clone(&world), Arc::clone(&balancer), number, Arc::clone(&stop)));
    }
    let mut logs = Vec::new();
    for round in 0..2 {
        for (role, node) in &mut nodes {
            let log = replace(&world, role, node, &balancer).await;
            logs.push(log.with_context(|| format!("round {round}: {role}"))?);
        }
    }
    *stop.lock().unwrap_or_else(PoisonError::into_inner) = true;
    let mut sessions = Vec::new();
    while let Some(played) = clients.join_next().await {
        sessions.extend(played??);
    }
    logs.extend(nodes.iter().map(|(_, node)| node.0.log_text()));
    for said in ["\"sessions.taken_over\"", "\"run.lease_lost\"", "\"run.broken\"", "panicked at"] {
        let line = logs.iter().flat_map(|log| log.lines()).find(|line| line.contains(said));
        ensure!(line.is_none(), "a deployment made a node say: {line:?}");
    }
    let effects = world.agent.effects();
    ensure!(effects.len() == sessions.len(), "{} starts for {} sessions", effects.len(), sessions.len());
    ensure!(effects.values().all(|starts| *starts == 1), "{effects:?}");
    let pause = longest_pause(&database).await?;
    eprintln!(
        "{} sessions over 12 replaced processes; the longest pause of a run: {pause:?}",
        sessions.len()
    );
    Ok(())
}
