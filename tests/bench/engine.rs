//! How many steps a second, and what a step costs: sessions of ten loops through the queue at several
//! concurrencies, workers in processes of their own, beside the raw limit of the same server in the same
//! run (one fenced statement per step, and 32 of them in one transaction).
//!
//! A step is a turn that a fenced commit adds; a loop is two. Usage: `bench engine [SESSIONS] [--statements]
//! [--only=CONCURRENCY] [--reads] [--prompt=KIB]`; `--statements` says where the server's time went, `--reads` has an
//! agent whose tools only read, so that one commit adds both turns of a loop, `--prompt` one with so long a prompt.

use std::{io::Write as _, time::Duration, time::Instant};

use anyhow::Result;
use futures::{StreamExt, TryStreamExt, stream};
use tokio_postgres::Client;

use crate::{processes, raw, rig, workers};
use crate::{rig::Rig, workers::Workers};

/// Answers of a session's run: ten loops are nineteen turns and the last answer.
const LOOPS: usize = 10;

/// Clients that create sessions.
const CREATORS: usize = 8;

/// Worker processes, where there are slots for them.
const WORKERS: usize = 2;

/// Seconds of the raw measurements.
const RAW_SECONDS: u32 = 3;

pub(crate) async fn measure(arguments: &[String]) -> Result<()> {
    let ask_server = arguments.iter().any(|argument| argument == "--statements");
    let only = arguments.iter().find_map(|argument| argument.strip_prefix("--only="));
    let sessions: usize =
        arguments.iter().find(|argument| !argument.starts_with('-')).map_or(Ok(1000), |text| text.parse())?;
    let mut rig = Rig::start().await?;
    rig.tools_only_read = arguments.iter().any(|argument| argument == "--reads");
    let prompt = arguments.iter().find_map(|argument| argument.strip_prefix("--prompt="));
    rig.prompt_kib = prompt.map_or(Ok(0), str::parse)?;
    let mut out = std::io::stdout();
    let serial = raw::single(&rig, 1, RAW_SECONDS).await?;
    let single = raw::single(&rig, raw::CLIENTS, RAW_SECONDS).await?;
    let batched = raw::batched(&rig, RAW_SECONDS).await?;
    writeln!(
        out,
        "raw, one client, a statement a step {serial:>8.0} steps/s  {:.2} ms/step",
        1000.0 / serial
    )?;
    writeln!(out, "raw, one fenced statement a step    {single:>8.0} steps/s")?;
    writeln!(out, "raw, 32 steps a transaction         {batched:>8.0} steps/s")?;
    rig.connect().await?.batch_execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements").await?;
    for concurrency in [1, 16, 64, 256] {
        if only.is_some_and(|only| only != concurrency.to_string()) {
            continue;
        }
        let count = if concurrency == 1 { sessions / 20 } else { sessions }.max(1);
        let run = through_the_queue(&rig, concurrency, count).await?;
        let steps = (count * LOOPS * 2) as f64;
        let (per_second, us) = (steps / run.seconds, |time: Duration| time.as_secs_f64() * 1e6 / steps);
        let limit = if concurrency == 1 { serial } else { single };
        writeln!(
            out,
            "concurrency {concurrency:>3}: {per_second:>7.0} steps/s {:>6.0} loops/s  {:.2} ms/step/run  {:.2} of the raw single limit\n\
             \x20                CPU/step: server {:.0} µs, workers {:.0} µs, clients {:.0} µs; {:.0} bytes WAL/step, {:.2} commits/step, {:.1} turns/group",
            per_second / 2.0,
            run.seconds * 1000.0 * concurrency as f64 / steps,
            per_second / limit,
            us(run.server),
            us(run.workers),
            us(run.clients),
            run.wal / steps,
            run.commits / steps,
            run.group,
        )?;
        if ask_server {
            statements(&rig, steps, &mut out).await?;
        }
    }
    Ok(())
}

/// What a run took.
struct Run {
    seconds: f64,
    server: Duration,
    workers: Duration,
    clients: Duration,
    wal: f64,
    commits: f64,
    /// Turns that one statement stored, on average.
    group: f64,
}

async fn through_the_queue(rig: &Rig, concurrency: usize, count: usize) -> Result<Run> {
    let (store, _) = rig.store(CREATORS).await?;
    let processes = WORKERS.min(concurrency);
    let orders = workers::Orders {
        url: rig.url.clone(),
        agent: rig.agent_file()?.display().to_string(),
        slots: concurrency / processes,
        loops: LOOPS,
    };
    let workers = Workers::start(processes, &orders).await?;
    let sql = rig.connect().await?;
    sql.batch_execute("SELECT pg_stat_statements_reset(); CHECKPOINT").await?;
    let (before, cpu_before) = (counters(&sql).await?, cpu(rig, &workers)?);
    let began = Instant::now();
    // Creating has clients of its own, so that the queue is never short of work, nor ever long.
    let creating = (0..count).map(|created| {
        let (workers, store) = (&workers, &store);
        async move {
            workers.until_finished(created.saturating_sub(concurrency * 2)).await?;
            rig::create(store).await.map(|_| ())
        }
    });
    stream::iter(creating).buffer_unordered(CREATORS).try_collect::<Vec<()>>().await?;
    workers.until_finished(count).await?;
    let seconds = began.elapsed().as_secs_f64();
    let (after, cpu_after) = (counters(&sql).await?, cpu(rig, &workers)?);
    let group = sql
        .query_one("SELECT coalesce(sum(rows) / sum(calls), 0)::float8 FROM pg_stat_statements WHERE query LIKE 'INSERT INTO turns%'", &[])
        .await?
        .get(0);
    workers.stop().await?;
    Ok(Run {
        seconds,
        server: cpu_after[0] - cpu_before[0],
        workers: cpu_after[1] - cpu_before[1],
        clients: cpu_after[2] - cpu_before[2],
        wal: after.1 - before.1,
        commits: after.0 - before.0,
        group,
    })
}

/// CPU time so far of the server, the workers and this process.
fn cpu(rig: &Rig, workers: &Workers) -> Result<[Duration; 3]> {
    let (server, own) = (processes::cpu(rig.server()?)?, processes::cpu(std::process::id())?);
    let mut of_workers = Duration::ZERO;
    for pid in workers.pids() {
        of_workers += processes::cpu(pid)?;
    }
    // The workers, and the server too, were started by this process.
    Ok([server, of_workers, own.saturating_sub(of_workers).saturating_sub(own_child(rig, server)?)])
}

/// The server's CPU time, where the server stands below this process.
fn own_child(rig: &Rig, server: Duration) -> Result<Duration> {
    Ok(if processes::parent(rig.server()?)? == std::process::id() { server } else { Duration::ZERO })
}

/// Commits and bytes of WAL so far.
async fn counters(sql: &Client) -> Result<(f64, f64)> {
    let row = sql
        .query_one(
            "SELECT xact_commit::float8, (pg_current_wal_insert_lsn() - '0/0')::float8 FROM pg_stat_database
             WHERE datname = current_database()",
            &[],
        )
        .await?;
    Ok((row.get(0), row.get(1)))
}

/// Where the server's time went since the last call: the costliest statements, per `steps` steps.
async fn statements(rig: &Rig, steps: f64, out: &mut impl std::io::Write) -> Result<()> {
    let sql = rig.connect().await?;
    let rows = sql
        .query(
            "SELECT left(regexp_replace(regexp_replace(query, '--[^\n]*', '', 'g'), '\\s+', ' ', 'g'), 70), calls, total_exec_time * 1000, rows
             FROM pg_stat_statements WHERE dbid = (SELECT oid FROM pg_database WHERE datname = current_database())
             ORDER BY total_exec_time DESC LIMIT 14",
            &[],
        )
        .await?;
    for row in &rows {
        let (query, calls, micros, returned): (String, i64, f64, i64) =
            (row.get(0), row.get(1), row.get(2), row.get(3));
        writeln!(
            out,
            "    {:>7.1} µs/step {:>7.1} µs/call {calls:>7} calls {returned:>8} rows  {query}",
            micros / steps,
            micros / calls as f64
        )?;
    }
    Ok(())
}
