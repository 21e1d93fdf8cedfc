//! What parked sessions cost: claims, wakes, plans and memory beside a few sessions that wait for somebody,
//! and beside many.
//!
//! One session is brought to `waiting_external` through the store; copies of its rows, with ids and owners
//! of their own, are loaded by COPY. Claims and wakes are timed by a worker's hand in this process (hint,
//! claim of one slot); a worker and an API node, processes of their own, serve another agent. Plans are
//! those of the hot path's connections, generic as there. Usage: `bench parked [--sessions=200000]
//! [--before=1000] [--samples=100] [--owners=1000]`.

use std::{
    collections::BTreeMap,
    io::Write as _,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use holdfast_engine::{
    agent::Agent,
    content::ToolResult,
    decide::Mode,
    ids::{SessionId, Token},
    session::Status,
};
use holdfast_store::{
    Store,
    accept::Caller,
    claim::{self, Lease, Rotation},
    create,
    listen::{Listener, Subscription},
    notify::Channel,
    settle::{self, Report},
    sql,
};
use holdfast_tests::{
    step::{Holder, calls, says},
    store::{AGENT, OWNER, agent, message, new_session, record, roster, worker},
    world,
};
use serde_json::json;
use tokio_postgres::SimpleQueryMessage;

use crate::{
    copies::{Copy, Template},
    flags,
    model::Model,
    nodes,
    nodes::Node,
    processes, rig,
    rig::Rig,
    samples::Samples,
};

pub(crate) async fn measure(arguments: &[String]) -> Result<()> {
    let known = [("sessions", 200_000), ("before", 1000), ("samples", 100), ("owners", 1000)];
    let [sessions, few, samples, owners] = flags::numbers(arguments, known)?;
    ensure!(
        few >= samples * 2 && sessions >= few + samples,
        "give --samples less, or --before and --sessions more"
    );
    let rig = Rig::start().await?;
    let model = Model::start(Duration::ZERO, 0).await?;
    let file = nodes::agent_file(&rig, &model)?;
    let worker = Node::start(&rig, &file, "worker", &[]).await?;
    let api = Node::start(&rig, &file, "api", &[]).await?;
    let hand = Hand::new(&rig).await?;
    let mut bench = Bench { hand, api, worker, model, http: world::client(), rig };
    let template = bench.hand.template().await?;
    let template = Template::read(&bench.rig, template.0, template.1, OWNER).await?;

    let mut out = std::io::stdout();
    let copies = template.load(&bench.rig, few, owners).await?;
    let (warm_up, rest) = copies.split_at(samples);
    bench.look(warm_up, samples).await?;
    let before = bench.look(rest, samples).await?;
    let began = Instant::now();
    let copies = template.load(&bench.rig, sessions - few, owners).await?;
    writeln!(
        out,
        "{sessions} parked sessions, the last {} loaded in {:.0} s",
        copies.len(),
        began.elapsed().as_secs_f64()
    )?;
    let after = bench.look(&copies, samples).await?;
    report(&mut out, (few, &before), (sessions, &after))
}

/// What is seen beside one number of parked sessions.
struct Look {
    /// By name.
    times: [(&'static str, Samples); 5],
    /// Peak and current resident bytes, by role.
    memory: [(&'static str, (u64, u64)); 2],
    /// By the statement's name.
    plans: BTreeMap<&'static str, String>,
}

fn report(out: &mut impl std::io::Write, before: (usize, &Look), after: (usize, &Look)) -> Result<()> {
    let ((few, before), (many, after)) = (before, after);
    for ((name, early), (_, late)) in before.times.iter().zip(&after.times) {
        let ratio = |percent| late.percentile(percent) / early.percentile(percent);
        writeln!(out, "{name:<26} beside {few:>8}: {early}")?;
        writeln!(
            out,
            "{:<26} beside {many:>8}: {late}  ratio p50 {:.2} p99 {:.2}",
            "",
            ratio(50),
            ratio(99)
        )?;
    }
    let mib = |bytes: u64| bytes as f64 / 1_048_576.0;
    for ((role, (_, early)), (_, (peak, late))) in before.memory.iter().zip(&after.memory) {
        writeln!(
            out,
            "{role:<6} resident: {:.1} MiB, then {:.1} MiB (peak {:.1} MiB)  ratio {:.2}",
            mib(*early),
            mib(*late),
            mib(*peak),
            *late as f64 / *early as f64
        )?;
    }
    let changed: Vec<_> =
        before.plans.iter().filter(|(name, plan)| after.plans.get(*name) != Some(plan)).collect();
    writeln!(out, "plans: {} of {} statements changed", changed.len(), before.plans.len())?;
    let whole: Vec<&str> =
        after.plans.iter().filter(|(_, plan)| plan.contains("Seq Scan")).map(|(name, _)| *name).collect();
    writeln!(out, "plans that read a whole table: {}", whole.join(", "))?;
    for (name, plan) in changed {
        let now = after.plans.get(name).map(String::as_str).unwrap_or_default();
        writeln!(out, "  {name}, beside {few}:\n{plan}  {name}, beside {many}:\n{now}")?;
    }
    Ok(())
}

struct Bench {
    hand: Hand,
    api: Node,
    worker: Node,
    model: Model,
    http: reqwest::Client,
    /// Last, so that the server outlives its clients.
    rig: Rig,
}

impl Bench {
    /// Measures everything, the wakes by sessions spread over `copies`.
    async fn look(&mut self, copies: &[Copy], samples: usize) -> Result<Look> {
        // As autovacuum would have it after a while, and nothing of it while the clock runs.
        self.rig.connect().await?.batch_execute("VACUUM (ANALYZE)").await?;
        self.rig.connect().await?.batch_execute("CHECKPOINT").await?;
        let mut times =
            ["create", "created → claimed", "complete", "completed → claimed", "POST → model asked"]
                .map(|name| (name, Samples::default()));
        for copy in copies.iter().step_by((copies.len() / samples.max(1)).max(1)).take(samples) {
            let (create, claimed) = self.hand.new_session().await?;
            times[0].1.add(create);
            times[1].1.add(claimed);
            let (complete, claimed) = self.hand.wake(copy).await?;
            times[2].1.add(complete);
            times[3].1.add(claimed);
            times[4].1.add(self.through_the_nodes().await?);
        }
        let memory = [("api", self.api.pid), ("worker", self.worker.pid)];
        let [api, worker] = memory.map(|(role, pid)| processes::resident(pid).map(|bytes| (role, bytes)));
        Ok(Look { times, memory: [api?, worker?], plans: plans(&self.hand.store).await? })
    }

    /// A session by HTTP, and the request that the worker sends for it.
    async fn through_the_nodes(&mut self) -> Result<Duration> {
        let began = Instant::now();
        let body = json!({"agent": nodes::AGENT, "prompt": "go on"});
        let post = self.http.post(format!("{}/v1/sessions?wait=true", self.api.url)).json(&body).send();
        let (answer, asked) =
            tokio::try_join!(async { Ok(post.await?.error_for_status()?) }, self.model.next())?;
        answer.bytes().await?;
        Ok(asked.at.duration_since(began))
    }
}

/// A worker's hand: it hears hints and claims, one slot at a time, as workers do.
struct Hand {
    store: Store,
    agent: Agent,
    agents: Vec<String>,
    rotation: Rotation,
    hints: Subscription,
}

impl Hand {
    async fn new(rig: &Rig) -> Result<Self> {
        let (store, agent) = (rig::store(&rig.url, "bench", 8).await?, agent("r1"));
        record(&store, AGENT, &agent).await?;
        let listener = Listener::start(&rig.url, "bench", &[Channel::Runs])?;
        listener.connected().await;
        let (agents, hints) = (roster(&agent), listener.subscribe());
        Ok(Self { store, agent, agents, rotation: Rotation::default(), hints })
    }

    /// A session that waits for one call, its run ended; and the call's token.
    async fn template(&mut self) -> Result<(SessionId, Token)> {
        let new = new_session(Some(message("please decide")), Mode::UntilBlocked);
        let lease = self.created(&new).await?.1;
        let mut holder = Holder::load(&self.store, &self.agent, lease).await;
        let status = Box::pin(holder.drive_with(vec![calls(&[("ask_anna", "{}")])])).await;
        ensure!(status == Status::WaitingExternal, "the template ended as {status:?}");
        Ok((new.id, holder.session.calls[0].token.context("a deferred call has no token")?))
    }

    /// Times the creation of a session, then its claim.
    async fn new_session(&mut self) -> Result<(Duration, Duration)> {
        let new = new_session(Some(message("please")), Mode::UntilBlocked);
        let began = Instant::now();
        let (accepted, lease) = self.created(&new).await?;
        let times = (accepted - began, accepted.elapsed());
        self.finish(lease, new.id).await?;
        Ok(times)
    }

    async fn created(&mut self, new: &create::NewSession) -> Result<(Instant, Lease)> {
        Box::pin(create::create(&self.store, &caller(&new.owner), new.clone())).await?;
        Ok((Instant::now(), self.lease().await?))
    }

    /// Times the completion of a parked session's call, then the session's claim.
    async fn wake(&mut self, parked: &Copy) -> Result<(Duration, Duration)> {
        let report = Report::Result(ToolResult::text("yes"));
        let began = Instant::now();
        let caller = caller(&parked.owner);
        Box::pin(settle::complete(&self.store, &caller, parked.token, &report, true)).await?;
        let accepted = Instant::now();
        let lease = self.lease().await?;
        let times = (accepted - began, accepted.elapsed());
        self.finish(lease, parked.session).await?;
        Ok(times)
    }

    /// Claims when there is a hint, or once in a while.
    async fn lease(&mut self) -> Result<Lease> {
        let ttl = Duration::from_secs(60);
        for _ in 0..100 {
            // Without a hint it looks all the same, as workers do.
            let _ = tokio::time::timeout(holdfast_worker::SCAN_EVERY, self.hints.recv()).await;
            let claimed = claim::claim(&self.store, worker(), 1, ttl, &self.agents, false, &self.rotation);
            if let Some(lease) = claimed.await?.pop() {
                return Ok(lease);
            }
        }
        anyhow::bail!("no run became due")
    }

    async fn finish(&self, lease: Lease, expected: SessionId) -> Result<()> {
        ensure!(lease.session == expected, "another session was claimed");
        let mut holder = Holder::load(&self.store, &self.agent, lease).await;
        let status = Box::pin(holder.drive_with(vec![says("done")])).await;
        ensure!(status == Status::Idle, "the session ended as {status:?}");
        Ok(())
    }
}

fn caller(owner: &str) -> Caller {
    Caller { owner: Some(owner.to_owned()), traceparent: None, key: None }
}

/// The generic plan of every hot statement, as connections of the hot path make it.
async fn plans(store: &Store) -> Result<BTreeMap<&'static str, String>> {
    let client = store.db().client().await?;
    let mut plans = BTreeMap::new();
    for (name, text) in sql::ALL {
        let nulls = vec!["NULL"; client.prepare(text).await?.params().len()].join(", ");
        let arguments = if nulls.is_empty() { String::new() } else { format!("({nulls})") };
        client.batch_execute(&format!("PREPARE planned AS {text}")).await?;
        let rows = client.simple_query(&format!("EXPLAIN (COSTS OFF) EXECUTE planned{arguments}")).await?;
        client.batch_execute("DEALLOCATE planned").await?;
        let lines = rows.iter().filter_map(|row| match row {
            SimpleQueryMessage::Row(row) => row.get(0).map(|line| format!("    {line}\n")),
            _ => None,
        });
        plans.insert(*name, lines.collect());
    }
    Ok(plans)
}
