//! What one owner's backlog does to others: a worker with a few slots and a model that takes its time.
//!
//! First, owner `a` has queued many runs; `b` queues one, again and again, and is timed until the model is
//! asked for it, in milliseconds and in slot turns: how many runs of `a` were begun in between. Then, many
//! owners have queued some runs each, one owner's after the other's; when half of all are done, the owners
//! with the most and the fewest are compared. Usage: `bench fairness [--backlog=3000] [--samples=20]
//! [--owners=1000] [--runs=10] [--slots=8] [--model-ms=20]`.

use std::{
    collections::HashMap,
    io::Write as _,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use holdfast_engine::decide::Mode;
use holdfast_store::{
    Store,
    accept::Caller,
    create::{self, NewSession},
};
use holdfast_tests::store::{message, new_session, record};

use crate::{flags, model::Model, nodes, nodes::Node, rig, rig::Rig, samples::Samples};

/// Clients that queue runs.
const CLIENTS: usize = 8;

pub(crate) async fn measure(arguments: &[String]) -> Result<()> {
    let known =
        [("backlog", 3000), ("samples", 20), ("owners", 1000), ("runs", 10), ("slots", 8), ("model-ms", 20)];
    let [backlog, samples, owners, runs, slots, thinks] = flags::numbers(arguments, known)?;
    let rig = Rig::start().await?;
    let mut model = Model::start(Duration::from_millis(u64::try_from(thinks)?), 0).await?;
    let file = nodes::agent_file(&rig, &model)?;
    let store = rig::store(&rig.url, "bench", CLIENTS).await?;
    // Runs can be queued before a worker knows the agent.
    let agent = holdfast_tools::load_agent(&file).await?.agent;
    record(&store, &agent.slug, &agent).await?;
    let slots = slots.max(1);
    one_beside_a_backlog(&rig, &store, &file, &mut model, [backlog, samples, slots]).await?;
    many_owners(&rig, &store, &file, &mut model, [owners, runs, slots]).await
}

async fn one_beside_a_backlog(
    rig: &Rig,
    store: &Store,
    file: &Path,
    model: &mut Model,
    [backlog, samples, slots]: [usize; 3],
) -> Result<()> {
    queue(store, (0..backlog).map(|_| "a".to_owned())).await?;
    let began = Instant::now();
    let _worker = Node::start(rig, file, "worker", &["--slots", &slots.to_string()]).await?;
    let (mut waits, mut turns, mut done) = (Samples::default(), Vec::new(), 0);
    for _ in 0..samples {
        // The worker is in the middle of its backlog, wherever that is.
        for _ in 0..slots * 4 {
            model.next().await?;
            done += 1;
        }
        queue(store, ["b".to_owned()].into_iter()).await?;
        let (queued, mut between) = (Instant::now(), 0);
        let asked = loop {
            let asked = model.next().await?;
            if asked.prompt == "b" {
                break asked;
            }
            done += 1;
            between += usize::from(asked.at > queued);
        };
        turns.push(between);
        waits.add(asked.at.saturating_duration_since(queued));
    }
    ensure!(done < backlog, "the backlog was done before the samples: give --backlog more or --samples less");
    let left = backlog - done;
    while done < backlog {
        model.next().await?;
        done += 1;
    }
    let (sql, mut tick) = (rig.connect().await?, tokio::time::interval(Duration::from_millis(20)));
    // The model has been asked for the last ones; they have to end before their worker does.
    while !sql.query("SELECT FROM runs LIMIT 1", &[]).await?.is_empty() {
        tick.tick().await;
    }
    let rate = (backlog + samples) as f64 / began.elapsed().as_secs_f64();
    turns.sort_unstable();
    let (middle, most) = (turns.get(turns.len() / 2).unwrap_or(&0), turns.last().unwrap_or(&0));
    let mut out = std::io::stdout();
    writeln!(out, "b beside a's backlog of {backlog} ({left} left after the last sample; {rate:.0} runs/s)")?;
    writeln!(out, "  queued → begun       {waits}")?;
    writeln!(
        out,
        "  runs of a in between p50 {middle}  max {most}, on {slots} slots: {:.2} turns of a slot at the most",
        *most as f64 / slots as f64
    )?;
    Ok(())
}

async fn many_owners(
    rig: &Rig,
    store: &Store,
    file: &Path,
    model: &mut Model,
    [owners, runs, slots]: [usize; 3],
) -> Result<()> {
    queue(store, (0..owners * runs).map(|n| format!("owner{}", n / runs.max(1)))).await?;
    let _worker = Node::start(rig, file, "worker", &["--slots", &slots.to_string()]).await?;
    let began = Instant::now();
    let mut done: HashMap<String, usize> = HashMap::new();
    // A run is one request to the model; those that are being answered don't count yet.
    let half = owners * runs / 2;
    for _ in 0..half {
        *done.entry(model.next().await?.prompt).or_default() += 1;
    }
    let most = done.values().max().copied().unwrap_or(0);
    let fewest = if done.len() < owners { 0 } else { done.values().min().copied().unwrap_or(0) };
    writeln!(
        std::io::stdout(),
        "{owners} owners of {runs} runs each, half of them begun after {:.1} s: most {most}, fewest {fewest} an owner, ratio {:.2}",
        began.elapsed().as_secs_f64(),
        most as f64 / fewest as f64
    )?;
    Ok(())
}

/// Queues a run for each of these owners, in about this order; the prompt says whose it is.
async fn queue(store: &Store, owners: impl Iterator<Item = String>) -> Result<()> {
    let creating = owners.map(|owner| async move {
        let new = NewSession {
            owner: owner.clone(),
            agent: nodes::AGENT.to_owned(),
            ..new_session(Some(message(&owner)), Mode::UntilBlocked)
        };
        let caller = Caller { owner: Some(owner), traceparent: None, key: None };
        Box::pin(create::create(store, &caller, new.clone())).await?;
        Ok(())
    });
    stream::iter(creating).buffer_unordered(CLIENTS).try_collect().await
}
