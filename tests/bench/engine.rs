//! How many steps a second, and what a step costs: sessions of ten loops through the queue at several
//! concurrencies, beside the raw limit of the same server in the same run (one fenced statement per
//! step, and 32 of them in one transaction).
//!
//! A step is one fenced commit that adds a turn; a loop is two. Usage: `bench-engine [SESSIONS]
//! [--statements]`; the latter says where the server's time went.

mod rig;

use std::{io::Write as _, time::Instant};

use anyhow::Result;
use futures::{StreamExt, TryStreamExt, stream};

/// Answers of a session's run: ten loops are nineteen turns and the last answer.
const LOOPS: usize = 10;

/// Clients that create sessions.
const CREATORS: usize = 8;

/// Clients and seconds of the raw measurements.
const RAW_CLIENTS: usize = 32;
const RAW_SECONDS: u64 = 3;

#[tokio::main]
async fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let ask_server = arguments.iter().any(|argument| argument == "--statements");
    let sessions: usize =
        arguments.iter().find(|argument| !argument.starts_with('-')).map_or(Ok(1000), |text| text.parse())?;
    let rig = rig::Rig::start().await?;
    let mut out = std::io::stdout();
    let single = raw(&rig, 1).await?;
    let batched = raw(&rig, 32).await?;
    writeln!(out, "raw, one fenced statement a step   {single:>8.0} steps/s")?;
    writeln!(out, "raw, 32 steps a transaction        {batched:>8.0} steps/s")?;
    for concurrency in [1, 16, 64, 256] {
        let count = if concurrency == 1 { sessions / 20 } else { sessions }.max(1);
        let (store, agent) = rig.store(16).await?;
        let model = rig::Asking::new(LOOPS, None);
        let sql = rig.connect().await?;
        let counters = "SELECT xact_commit, (pg_current_wal_insert_lsn() - '0/0')::bigint FROM pg_stat_database WHERE datname = current_database()";
        let before = sql.query_one(counters, &[]).await?;
        let began = Instant::now();
        let seconds = rig
            .with_worker(&store, agent, concurrency, model.clone(), async {
                // Creating has clients of its own, so that the queue is never short of work, nor ever long.
                let creating = (0..count).map(|created| {
                    let (model, store) = (&model, &store);
                    async move {
                        model.until_finished(created.saturating_sub(concurrency * 2)).await?;
                        rig::create(store).await.map(|_| ())
                    }
                });
                stream::iter(creating).buffer_unordered(CREATORS).try_collect::<Vec<()>>().await?;
                model.until_finished(count).await?;
                Ok(began.elapsed().as_secs_f64())
            })
            .await?;
        let after = sql.query_one(counters, &[]).await?;
        let steps = (count * LOOPS * 2) as f64;
        let wal = (after.get::<_, i64>(1) - before.get::<_, i64>(1)) as f64;
        writeln!(
            out,
            "concurrency {concurrency:>3}: {:>7.0} steps/s  {:>6.0} loops/s  {:.2} ms/step/run  {:.0} WAL bytes/step  {:.2} of the raw single limit",
            steps / seconds,
            steps / 2.0 / seconds,
            seconds * 1000.0 * concurrency as f64 / steps,
            wal / steps,
            steps / seconds / single,
        )?;
        if ask_server {
            statements(&rig, steps, &mut out).await?;
        }
    }
    Ok(())
}

/// Steps a second of clients that do nothing but a fenced update and an insert of 1 KiB, `batch` of
/// them a transaction.
async fn raw(rig: &rig::Rig, batch: i32) -> Result<f64> {
    let setup = rig.connect().await?;
    setup
        .batch_execute(
            "DROP TABLE IF EXISTS raw_s, raw_t; CREATE TABLE raw_s (id int PRIMARY KEY, version bigint NOT NULL) WITH (fillfactor = 50);
             CREATE TABLE raw_t (id int, version bigint, body text, PRIMARY KEY (id, version));
             INSERT INTO raw_s SELECT i, 0 FROM generate_series(0, 4095) i;",
        )
        .await?;
    let until = Instant::now() + std::time::Duration::from_secs(RAW_SECONDS);
    let clients = (0..i32::try_from(RAW_CLIENTS)?).map(|client| async move {
        let sql = rig.connect().await?;
        let step = sql
            .prepare(
                "WITH fenced AS (UPDATE raw_s s SET version = s.version + 1 FROM UNNEST($1::int[], $2::bigint[]) AS n (id, version)
                                 WHERE s.id = n.id AND s.version = n.version RETURNING s.id, s.version)
                 INSERT INTO raw_t SELECT id, version, $3 FROM fenced",
            )
            .await?;
        let ids: Vec<i32> = (0..batch).map(|member| client * 128 + member).collect();
        let body = "x".repeat(1024);
        let mut versions = vec![0_i64; ids.len()];
        let mut steps = 0_u64;
        while Instant::now() < until {
            steps += sql.execute(&step, &[&ids, &versions, &body]).await?;
            versions.iter_mut().for_each(|version| *version += 1);
        }
        Ok::<u64, anyhow::Error>(steps)
    });
    let steps: u64 = futures::future::try_join_all(clients).await?.into_iter().sum();
    Ok(steps as f64 / RAW_SECONDS as f64)
}

/// Where the server's time went since the last call: the costliest statements, per `steps` steps.
async fn statements(rig: &rig::Rig, steps: f64, out: &mut impl std::io::Write) -> Result<()> {
    let sql = rig.connect().await?;
    sql.batch_execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements").await?;
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
    sql.batch_execute("SELECT pg_stat_statements_reset()").await?;
    Ok(())
}
