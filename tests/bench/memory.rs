//! What results of tools cost a worker in memory: one worker, all of whose runs have a tool print 10 MiB at once,
//! and then ask the model.
//!
//! Prints the peak of its resident memory, the limit that the documents give, and their ratio.
//! Usage: `bench memory [--runs=256]`.

use std::{io::Write as _, time::Duration};

use anyhow::{Result, ensure};
use holdfast_tests::memory::{self, PRINTED, REQUEST};

use crate::{flags, nodes::Node, processes, rig::Rig};

/// How long it may take.
const PATIENCE: Duration = Duration::from_secs(600);

const MIB: f64 = 1024.0 * 1024.0;

pub(crate) async fn measure(arguments: &[String]) -> Result<()> {
    let [runs] = flags::numbers(arguments, [("runs", 256)])?;
    let rig = Rig::start().await?;
    let (_model, agent) = memory::flood(runs).await?;
    let agent_file = agent.agent_path();
    let api = Node::start(&rig, &agent_file, "api", &[]).await?;
    let slots = runs.to_string();
    let worker = Node::start(&rig, &agent_file, "worker", &["--slots", &slots, "--lease-ttl", "120"]).await?;
    let (before, _) = processes::resident(worker.pid)?;
    memory::play(&api.url, runs, PATIENCE).await?;
    let (peak, after) = processes::resident(worker.pid)?;
    let limit = memory::limit(runs, REQUEST);
    let ratio = peak as f64 / limit as f64;
    writeln!(
        std::io::stdout(),
        "{runs} runs, {} MiB printed by each: {:.0} MiB before, {:.0} MiB at the peak, {:.0} MiB after; limit {:.0} MiB, ratio {ratio:.2}",
        PRINTED / (1024 * 1024),
        before as f64 / MIB,
        peak as f64 / MIB,
        after as f64 / MIB,
        limit as f64 / MIB,
    )?;
    ensure!(ratio <= 1.0, "the worker takes more memory than the documents say");
    Ok(())
}
