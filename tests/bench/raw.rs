//! What the server does with steps and nothing else, by pgbench: the limit that the engine is held against.

use std::{path::Path, process::Stdio};

use anyhow::{Context as _, Result, ensure};

use crate::rig::Rig;

/// Clients of the measurements that aren't serial.
pub(crate) const CLIENTS: usize = 32;

/// A step is a fenced update of a session's row and a turn of 1 KiB.
const TABLES: &str = "
    DROP TABLE IF EXISTS raw_sessions, raw_turns;
    CREATE TABLE raw_sessions (id bigint PRIMARY KEY, version bigint NOT NULL, updated_at timestamptz NOT NULL DEFAULT now(),
                               state text NOT NULL) WITH (fillfactor = 70);
    CREATE TABLE raw_turns (session_id bigint, seq bigint, body text NOT NULL, at timestamptz NOT NULL DEFAULT now(),
                            PRIMARY KEY (session_id, seq));
    INSERT INTO raw_sessions SELECT n, 0, now(), 'active' FROM generate_series(0, 65535) n;
    ANALYZE raw_sessions;
    CHECKPOINT;";

/// One statement a step.
const SINGLE: &str = "
\\set k :k + 1
\\set id :client_id * 1024 + :k % 1024
\\set version :k / 1024
WITH fenced AS (UPDATE raw_sessions SET version = version + 1, updated_at = now() WHERE id = :id AND version = :version RETURNING id, version) INSERT INTO raw_turns (session_id, seq, body) SELECT id, version, :body FROM fenced;
";

/// One statement for 32 steps.
const BATCHED: &str = "
\\set k :k + 1
\\set base :client_id * 1024 + (:k % 32) * 32
\\set version :k / 32
WITH batch AS MATERIALIZED (SELECT :base::bigint + n AS id, :version::bigint AS version FROM generate_series(0, 31) n), fenced AS (UPDATE raw_sessions s SET version = s.version + 1, updated_at = now() FROM batch b WHERE s.id = b.id AND s.version = b.version RETURNING s.id, s.version) INSERT INTO raw_turns (session_id, seq, body) SELECT id, version, :body FROM fenced;
";

/// Steps a second, one transaction a step.
pub(crate) async fn single(rig: &Rig, clients: usize, seconds: u32) -> Result<f64> {
    measure(rig, SINGLE, clients, seconds).await
}

/// Steps a second, 32 of them a transaction.
pub(crate) async fn batched(rig: &Rig, seconds: u32) -> Result<f64> {
    Ok(measure(rig, BATCHED, CLIENTS, seconds).await? * 32.0)
}

async fn measure(rig: &Rig, script: &str, clients: usize, seconds: u32) -> Result<f64> {
    rig.connect().await?.batch_execute(TABLES).await?;
    let file = rig.dir().join("raw.sql");
    std::fs::write(&file, script)?;
    pgbench(&rig.bin_dir().join("pgbench"), &rig.url, &file, clients, seconds).await
}

async fn pgbench(program: &Path, url: &str, script: &Path, clients: usize, seconds: u32) -> Result<f64> {
    let threads = if clients > 1 { "2" } else { "1" };
    let output = tokio::process::Command::new(program)
        .args(["-n", "-M", "prepared", "-c", &clients.to_string(), "-j", threads, "-T", &seconds.to_string()])
        .args(["-D", "k=-1", "-D", &format!("body={}", "x".repeat(1024)), "-f"])
        .arg(script)
        .arg(url)
        .stdin(Stdio::null())
        .output()
        .await
        .with_context(|| format!("running {}", program.display()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "pgbench: {text}{}", String::from_utf8_lossy(&output.stderr));
    let tps = text.lines().find_map(|line| line.strip_prefix("tps = ")).context("pgbench says no tps")?;
    Ok(tps.split_whitespace().next().context("pgbench says no tps")?.parse()?)
}
