//! `chaos small|large`: plays sessions over nodes and a Postgres in trouble, checks what is promised, and
//! prints what there was as tables. Exits with 1 if a promise was broken.

use std::{
    io::Write as _,
    process::{Command, ExitCode},
    time::{Duration, Instant},
};

use anyhow::Result;
use clap::{Parser, ValueEnum};
use holdfast_tests::chaos::{Outcome, Size, run};

/// How large a run is by itself.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Preset {
    /// 60 sessions in half a minute: what every change can afford.
    Small,
    /// 10,000 sessions in an hour.
    Large,
}

/// Sessions over nodes that are killed, stopped, drained and cut off, and a Postgres that restarts and fills up.
#[derive(Debug, Parser)]
#[command(name = "chaos")]
struct Arguments {
    /// How large the run is, where nothing else is said.
    preset: Preset,
    /// Decides everything that is left to chance; drawn and printed by default.
    #[arg(long)]
    seed: Option<u64>,
    /// Seconds in which nodes have trouble.
    #[arg(long)]
    seconds: Option<u64>,
    /// Sessions.
    #[arg(long)]
    sessions: Option<usize>,
    /// Sessions at once.
    #[arg(long)]
    at_once: Option<usize>,
    /// Workers.
    #[arg(long)]
    workers: Option<usize>,
    /// API nodes.
    #[arg(long)]
    apis: Option<usize>,
}

impl Arguments {
    fn size(&self) -> Size {
        let preset = match self.preset {
            Preset::Small => Size::small(0),
            Preset::Large => Size::large(0),
        };
        Size {
            seed: self.seed.unwrap_or_else(|| uuid::Uuid::new_v4().as_u64_pair().0),
            seconds: self.seconds.unwrap_or(preset.seconds),
            sessions: self.sessions.unwrap_or(preset.sessions),
            at_once: self.at_once.unwrap_or(preset.at_once),
            workers: self.workers.unwrap_or(preset.workers),
            apis: self.apis.unwrap_or(preset.apis),
        }
    }
}

fn main() -> Result<ExitCode> {
    let size = Arguments::parse().size();
    let _ = writeln!(std::io::stderr(), "{size:?}");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    // Now: somebody may check out something else meanwhile.
    let (began, commit) = (Instant::now(), commit());
    let outcome = runtime.block_on(run(size))?;
    print(&mut std::io::stdout(), (size, &commit), &outcome, began.elapsed())?;
    Ok(if outcome.violations.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn print(
    out: &mut impl std::io::Write,
    (size, commit): (Size, &str),
    outcome: &Outcome,
    took: Duration,
) -> Result<()> {
    let Size { seed, seconds, sessions, at_once, workers, apis } = size;
    writeln!(
        out,
        "Seed {seed}, commit {commit}: {sessions} sessions, {at_once} at once, over {workers} workers, {apis} API nodes and a scheduler with faults for {seconds} s; {} s in all.\n",
        took.as_secs()
    )?;
    writeln!(out, "| fault | times |\n|---|--:|")?;
    for (fault, count) in &outcome.faults {
        writeln!(out, "| {fault} | {count} |")?;
    }
    writeln!(out, "\n| seen and checked | count |\n|---|--:|")?;
    for (what, count) in &outcome.seen {
        writeln!(out, "| {what} | {count} |")?;
    }
    writeln!(out, "| **violations** | **{}** |", outcome.violations.len())?;
    for violation in &outcome.violations {
        writeln!(out, "\n{violation}")?;
    }
    Ok(())
}

/// What was checked out, for the record.
fn commit() -> String {
    let asked = Command::new("git").args(["describe", "--always", "--dirty", "--abbrev=10"]).output();
    let said = asked.ok().filter(|output| output.status.success());
    said.map_or_else(
        || "unknown".to_owned(),
        |output| String::from_utf8_lossy(&output.stdout).trim().to_owned(),
    )
}
