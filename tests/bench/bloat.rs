//! What a snapshot that is held open does to a steady load: sessions of ten loops through the queue, workers
//! in processes of their own, first without and then beside a REPEATABLE READ transaction that keeps every
//! dead row from being removed.
//!
//! Prints steps a second in windows of five seconds and the ratio of the halves, then each table's rows and
//! size. Usage: `bench bloat [--seconds=60] [--slots=64] [--rate=0]`; with a rate, so many runs begin a second,
//! else as many as there are slots for. Ten minutes show what autovacuum does about it.

use std::{
    io::Write as _,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use anyhow::{Result, ensure};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use holdfast_store::Store;
use tokio_postgres::Client;

use crate::{
    flags,
    rig::{self, Rig},
    workers::{self, Workers},
};

/// Answers of a session's run; each but the last is two steps.
const LOOPS: usize = 10;

/// Clients that create sessions.
const CREATORS: usize = 8;

/// Worker processes.
const WORKERS: usize = 2;

/// Seconds of a window.
const WINDOW: usize = 5;

pub(crate) async fn measure(arguments: &[String]) -> Result<()> {
    let [seconds, slots, rate] = flags::numbers(arguments, [("seconds", 60), ("slots", 64), ("rate", 0)])?;
    let half = seconds / WINDOW / 2;
    ensure!(half >= 2, "--seconds: at least {}", 4 * WINDOW);
    let rig = Rig::start().await?;
    let (store, _) = rig.store(CREATORS).await?;
    let orders = workers::Orders {
        url: rig.url.clone(),
        agent: rig.agent_file()?.display().to_string(),
        slots: slots.div_ceil(WORKERS),
        loops: LOOPS,
    };
    let workers = Workers::start(WORKERS, &orders).await?;
    let holder = rig.connect().await?;
    let watching = watch(&workers, &holder, half);
    let windows = tokio::select! {
        windows = watching => windows?,
        failed = load(&store, &workers, slots, rate) => { failed?; Vec::new() }
    };
    workers.stop().await?;
    // A connection that ends has told all that it counted.
    store.db().close().await;
    report(&windows, half)?;
    tables(&rig).await?;
    holder.batch_execute("COMMIT").await?;
    Ok(())
}

/// Creates sessions for ever: `rate` of them a second or, if that is 0, so many that the queue is never short of
/// work, nor ever long.
async fn load(store: &Store, workers: &Workers, slots: usize, rate: usize) -> Result<()> {
    let (created, began) = (AtomicUsize::new(0), tokio::time::Instant::now());
    let create = || async {
        let before = created.fetch_add(1, Ordering::Relaxed);
        match rate {
            0 => workers.until_finished(before.saturating_sub(slots * 2)).await?,
            _ => tokio::time::sleep_until(began + Duration::from_secs_f64(before as f64 / rate as f64)).await,
        }
        rig::create(store).await.map(|_| ())
    };
    stream::repeat_with(create).buffer_unordered(CREATORS).try_collect::<()>().await
}

/// Steps a second by windows; from the middle on `holder` holds a snapshot.
async fn watch(workers: &Workers, holder: &Client, half: usize) -> Result<Vec<f64>> {
    let mut tick = tokio::time::interval(Duration::from_secs(u64::try_from(WINDOW)?));
    // One window warms up.
    tick.tick().await;
    let mut began = tick.tick().await;
    let mut before = workers.finished();
    let mut windows = Vec::new();
    for window in 0..half * 2 {
        if window == half {
            holder.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1").await?;
        }
        let ended = tick.tick().await;
        let finished = workers.finished();
        let steps = (finished - before) * LOOPS * 2;
        windows.push(steps as f64 / (ended - began).as_secs_f64());
        (began, before) = (ended, finished);
    }
    Ok(windows)
}

fn report(windows: &[f64], half: usize) -> Result<()> {
    let mut out = std::io::stdout();
    for (name, windows) in [("without", &windows[..half]), ("beside a snapshot", &windows[half..])] {
        let list: Vec<String> = windows.iter().map(|window| format!("{window:.0}")).collect();
        writeln!(out, "{name:<18} steps/s by {WINDOW} s: {}", list.join(" "))?;
    }
    let mean = |windows: &[f64]| windows.iter().sum::<f64>() / windows.len() as f64;
    let (without, beside) = (mean(&windows[..half]), mean(&windows[half..]));
    let last = windows.last().copied().unwrap_or(0.0);
    writeln!(
        out,
        "mean {without:.0}, then {beside:.0} steps/s  ratio {:.2}  last window {:.2}",
        beside / without,
        last / without
    )?;
    Ok(())
}

/// What the tables look like while the snapshot is held.
async fn tables(rig: &Rig) -> Result<()> {
    let rows = rig
        .connect()
        .await?
        .query(
            "SELECT relname::text, n_live_tup, n_dead_tup, n_tup_upd, n_tup_hot_upd, autovacuum_count,
                    pg_total_relation_size(relid)::float8 / 1048576
             FROM pg_stat_user_tables WHERE n_tup_ins > 0 AND relname <> '_sqlx_migrations' ORDER BY 7 DESC",
            &[],
        )
        .await?;
    let mut out = std::io::stdout();
    writeln!(
        out,
        "{:<16} {:>9} {:>9} {:>9} {:>6} {:>7} {:>10}",
        "table", "live", "dead", "updates", "HOT", "vacuums", "MiB"
    )?;
    for row in &rows {
        let (name, counts): (String, [i64; 5]) =
            (row.get(0), std::array::from_fn(|place| row.get(place + 1)));
        let [live, dead, updates, hot, vacuums] = counts;
        let share =
            if updates > 0 { format!("{:.0} %", hot as f64 * 100.0 / updates as f64) } else { String::new() };
        writeln!(
            out,
            "{name:<16} {live:>9} {dead:>9} {updates:>9} {share:>6} {vacuums:>7} {:>10.1}",
            row.get::<_, f64>(6)
        )?;
    }
    Ok(())
}
