//! Chaos at a size that every change can afford; `chaos small|large --help` is the same at any size.
//! `HOLDFAST_CHAOS_SEED` plays a run again, and `HOLDFAST_CHAOS_LOGS` names a directory for the logs of all nodes.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use holdfast_tests::chaos::{Size, run};

#[tokio::test(flavor = "multi_thread")]
#[expect(clippy::print_stderr, reason = "a run that was left to chance says what it was")]
async fn what_is_promised_holds_in_chaos() -> Result<()> {
    let seed = match std::env::var("HOLDFAST_CHAOS_SEED") {
        Ok(text) => text.parse().with_context(|| format!("HOLDFAST_CHAOS_SEED={text:?}"))?,
        Err(_) => uuid::Uuid::new_v4().as_u64_pair().0,
    };
    let size = Size::small(seed);
    eprintln!("{size:?}");
    let began = Instant::now();
    let outcome = run(size).await.with_context(|| format!("{size:?}"))?;
    let took = Duration::from_secs(began.elapsed().as_secs());
    eprintln!("{took:?}: {outcome}");
    ensure!(outcome.violations.is_empty(), "{size:?} {outcome}\n{}", outcome.violations.join("\n"));
    Ok(())
}
