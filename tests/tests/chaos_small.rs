//! Chaos at a size that every change can afford. `HOLDFAST_CHAOS_SECONDS`, `HOLDFAST_CHAOS_SESSIONS` and
//! `HOLDFAST_CHAOS_AT_ONCE` make it as large as you like, `HOLDFAST_CHAOS_SEED` plays a run again, and
//! `HOLDFAST_CHAOS_LOGS` names a directory for the logs of all nodes.

use std::{str::FromStr, time::Duration};

use anyhow::{Context, Result, ensure};
use holdfast_tests::{
    chaos::{Size, run},
    cluster::fresh_database,
};

/// A number that the environment may give.
fn given<T: FromStr>(name: &str, default: T) -> Result<T>
where
    T::Err: std::error::Error + Send + Sync + 'static,
{
    match std::env::var(name) {
        Ok(text) => text.parse().with_context(|| format!("{name}={text:?}")),
        Err(_) => Ok(default),
    }
}

#[tokio::test(flavor = "multi_thread")]
#[expect(clippy::print_stderr, reason = "a run that was left to chance says what it was")]
async fn what_is_promised_holds_in_chaos() -> Result<()> {
    let chance = uuid::Uuid::new_v4().as_u64_pair().0;
    let size = Size {
        seed: given("HOLDFAST_CHAOS_SEED", chance)?,
        seconds: given("HOLDFAST_CHAOS_SECONDS", 25)?,
        sessions: given("HOLDFAST_CHAOS_SESSIONS", 60)?,
        at_once: given("HOLDFAST_CHAOS_AT_ONCE", 12)?,
    };
    eprintln!("{size:?}");
    let database = fresh_database().await;
    let began = tokio::time::Instant::now();
    let outcome = run(&database, size).await.with_context(|| format!("{size:?}"))?;
    let took = Duration::from_secs(began.elapsed().as_secs());
    eprintln!("{took:?}: {outcome}");
    ensure!(outcome.violations.is_empty(), "{size:?} {outcome}\n{}", outcome.violations.join("\n"));
    Ok(())
}
