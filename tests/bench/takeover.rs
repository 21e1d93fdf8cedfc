//! How soon the runs of a worker that goes go on elsewhere: from its end to the next request that the model is
//! sent for each of them. One worker holds all runs, in the middle of model requests; another one stands by.
//! It is killed, so that its leases have to expire, and then, with other runs, told to leave.
//!
//! Usage: `bench takeover [--runs=32] [--ttl=2]`.

use std::{
    collections::HashMap,
    io::Write as _,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use holdfast_tests::world;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::{
    flags,
    model::Model,
    nodes::{self, Node},
    rig::Rig,
    samples::Samples,
};

/// Enough for runs not to end while they are watched.
const ROUNDS: usize = 1_000;
/// How long the model thinks: what a worker that is told to leave still waits for.
const THINKS: Duration = Duration::from_millis(100);

pub(crate) async fn measure(arguments: &[String]) -> Result<()> {
    let [runs, ttl] = flags::numbers(arguments, [("runs", 32), ("ttl", 2)])?;
    let mut out = std::io::stdout();
    for (signal, name) in [(Signal::KILL, "SIGKILL"), (Signal::TERM, "SIGTERM")] {
        let (asked, again) = watch(runs, ttl, signal).await?;
        writeln!(out, "{name} → next model request of each run  {asked}")?;
        writeln!(out, "{name}: {again} of {runs} runs were taken over from expired leases; TTL {ttl} s")?;
    }
    Ok(())
}

/// How long each run waited for its next request, and how many of them were taken over.
async fn watch(runs: usize, ttl: usize, signal: Signal) -> Result<(Samples, i64)> {
    let rig = Rig::start().await?;
    let mut model = Model::start(THINKS, ROUNDS).await?;
    let agent = nodes::looping_agent_file(&rig, &model)?;
    let ttl = ttl.to_string();
    let worker = ["--lease-ttl", ttl.as_str()];
    let api = Node::start(&rig, &agent, "api", &[]).await?;
    let going = Node::start(&rig, &agent, "worker", &worker).await?;
    create(&api, runs).await?;
    let mut seen: HashMap<String, usize> = HashMap::new();
    while seen.len() < runs || seen.values().any(|count| *count < 2) {
        *seen.entry(model.next().await?.prompt).or_insert(0) += 1;
    }
    // It finds nothing to claim yet, since the other one holds everything.
    let _standing_by = Node::start(&rig, &agent, "worker", &worker).await?;
    let ended = Instant::now();
    let pid = i32::try_from(going.pid).ok().and_then(Pid::from_raw).context("no process id")?;
    kill_process(pid, signal)?;
    let mut waited: HashMap<String, Duration> = HashMap::new();
    while waited.len() < runs {
        let asked = model.next().await?;
        // What was on its way when the worker was signalled is from before.
        if asked.at > ended {
            waited.entry(asked.prompt).or_insert(asked.at - ended);
        }
    }
    let mut samples = Samples::default();
    for took in waited.into_values() {
        samples.add(took);
    }
    let sql = "SELECT count(*) FROM runs WHERE takeovers > 0";
    Ok((samples, rig.connect().await?.query_one(sql, &[]).await?.try_get(0)?))
}

async fn create(api: &Node, runs: usize) -> Result<()> {
    let http = world::client();
    for number in 0..runs {
        let body = json!({"agent": nodes::AGENT, "prompt": format!("run {number}")});
        let answer = http.post(format!("{}/v1/sessions", api.url)).json(&body).send().await?;
        ensure!(answer.status().is_success(), "{}", answer.status());
    }
    Ok(())
}
