//! Clients that play the canonical flow over and over, behind a load balancer whose nodes come and go.

use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicBool, Ordering},
};

use anyhow::{Result, ensure};
use tokio::task::JoinSet;
use uuid::Uuid;

use crate::world::{CANONICAL_ANSWER, PANIC, World, answer, token};

/// The nodes that take requests now. Each request goes to another one.
#[derive(Debug, Clone, Default)]
pub struct Balancer(Arc<Mutex<Vec<String>>>);

impl Balancer {
    /// A balancer over these nodes.
    pub fn over(nodes: Vec<String>) -> Self {
        Self(Arc::new(Mutex::new(nodes)))
    }

    /// Lets requests go to `new` instead of `old`; does nothing if nothing goes to `old`.
    pub fn swap(&self, old: &str, new: &str) {
        let mut nodes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = nodes.iter_mut().find(|address| *address == old) {
            new.clone_into(place);
        }
    }

    /// Lets requests go to one more node.
    pub fn add(&self, node: &str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(node.to_owned());
    }

    /// Which node request `number` goes to.
    pub fn pick(&self, number: usize) -> String {
        let nodes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        nodes[number % nodes.len()].clone()
    }
}

/// The clients at work.
#[derive(Debug)]
pub struct Load {
    clients: JoinSet<Result<Vec<Uuid>>>,
    stop: Arc<AtomicBool>,
}

impl Load {
    /// Starts so many clients, each with one session after the other.
    pub fn start(world: &Arc<World>, balancer: &Balancer, clients: usize) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let mut playing = JoinSet::new();
        for number in 0..clients {
            let (world, balancer, stop) = (Arc::clone(world), balancer.clone(), Arc::clone(&stop));
            playing.spawn(async move {
                let mut done = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    done.push(play(&world, &balancer, number + done.len()).await?);
                }
                Ok(done)
            });
        }
        Self { clients: playing, stop }
    }

    /// Lets the clients finish their sessions. Returns all that were played, each to the right end.
    ///
    /// # Errors
    /// If one of them wasn't.
    pub async fn end(mut self) -> Result<Vec<Uuid>> {
        self.stop.store(true, Ordering::Relaxed);
        let mut sessions = Vec::new();
        while let Some(played) = self.clients.join_next().await {
            sessions.extend(played??);
        }
        Ok(sessions)
    }
}

async fn play(world: &World, balancer: &Balancer, from: usize) -> Result<Uuid> {
    let id = ask(world, balancer, from).await?;
    finish(world, balancer, id, from).await?;
    Ok(id)
}

/// Creates a session and waits until its deferred calls do.
///
/// # Errors
/// If that isn't what becomes of it.
pub async fn ask(world: &World, balancer: &Balancer, from: usize) -> Result<Uuid> {
    let mut turn = from;
    let mut node = || {
        turn += 1;
        balancer.pick(turn)
    };
    let id = world.create_over(&mut node).await?;
    world.until_over(&mut node, id, "waiting_external").await?;
    Ok(id)
}

/// Completes the deferred calls of a session and checks its answer.
///
/// # Errors
/// If it isn't the right one.
pub async fn finish(world: &World, balancer: &Balancer, id: Uuid, from: usize) -> Result<()> {
    let mut turn = from;
    let mut node = || {
        turn += 1;
        balancer.pick(turn)
    };
    let waiting = world.until_over(&mut node, id, "waiting_external").await?;
    world.complete_over(&mut node, &token(&waiting, "fetch_remote_a")?, "A").await?;
    world.complete_over(&mut node, &token(&waiting, "fetch_remote_b")?, "B").await?;
    let view = world.until_over(&mut node, id, "idle").await?;
    ensure!(answer(&view)? == CANONICAL_ANSWER, "{view}");
    Ok(())
}

/// How a worker's log says that it lost a lease.
pub const LEASE_LOST: &str = "\"run.lease_lost\"";

/// Makes sure that no node said what only a fault, or a wait for a lease, makes it say; `excused` is what it may.
///
/// # Errors
/// If a node did.
pub fn check_logs(logs: &[String], excused: &[&str]) -> Result<()> {
    for said in ["\"sessions.taken_over\"", LEASE_LOST, "\"run.broken\"", PANIC] {
        if excused.contains(&said) {
            continue;
        }
        for log in logs {
            let line = log.lines().find(|line| line.contains(said));
            ensure!(line.is_none(), "a node said: {line:?}");
        }
    }
    Ok(())
}

/// Makes sure that each session's tool was started once.
///
/// # Errors
/// If one was started more or less often.
pub fn check_effects(world: &World, sessions: &[Uuid]) -> Result<()> {
    let effects = world.agent.effects();
    ensure!(effects.len() == sessions.len(), "{} starts for {} sessions", effects.len(), sessions.len());
    ensure!(effects.values().all(|starts| *starts == 1), "{effects:?}");
    Ok(())
}
