//! The check of the suites themselves: with a classic mistake planted, the test that is there to catch it has to
//! fail. A suite that can't see a mistake proves nothing.

use anyhow::{Context as _, Result, bail, ensure};
use holdfast_store::plant::{Mistake, PLANTED};
use tokio::process::Command;

/// A test program. Each checks the tests in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Suite {
    /// `store_interleavings`.
    Interleavings,
    /// `store_races`.
    Races,
    /// `flow_canonical`.
    Flow,
}

/// How often a test may be run until it catches its mistake: a race that is on may still be won.
const TRIES: usize = 10;

/// Which test catches a mistake, and in which program it is.
fn catcher(mistake: Mistake) -> (Suite, &'static str) {
    use Suite::{Flow, Interleavings, Races};
    match mistake {
        Mistake::NoEpochCheck => {
            (Interleavings, "fencing::an_old_holders_commit_after_a_takeover_stores_nothing")
        }
        Mistake::RetryAfterLeaseLost => {
            (Interleavings, "fencing::epochs_are_never_used_again_after_run_rows_go")
        }
        Mistake::WakeDoNothing => (Interleavings, "mail::mail_before_a_parks_lock_lets_the_run_go_on"),
        Mistake::EndIgnoresWake => (Interleavings, "mail::mail_before_an_ends_lock_lets_the_run_go_on"),
        Mistake::CursorBeforeEffect => {
            (Interleavings, "mail::mail_during_a_step_is_there_for_whoever_takes_over")
        }
        Mistake::HeartbeatBySession => {
            (Interleavings, "fencing::an_old_epoch_neither_renews_nor_releases_its_successors_lease")
        }
        Mistake::NumbersOutsideLock => (Races, "numbers_stay_dense_under_many_producers_and_a_worker"),
        Mistake::TokenBeforeLock => {
            (Interleavings, "tokens::a_cancel_before_the_completion_settles_the_call")
        }
        Mistake::CancelOverwrites => {
            (Interleavings, "tokens::a_completion_before_the_cancel_stands_and_is_told_late_once")
        }
        Mistake::ExpireBlindly => {
            (Interleavings, "tokens::an_overdue_token_is_expired_by_whoever_meets_it_first")
        }
        Mistake::EffectBeforeCommit => (Flow, "a_stopped_worker_that_comes_back_stores_nothing"),
        Mistake::ClaimStanding => {
            (Interleavings, "fencing::an_expired_lease_is_claimed_by_exactly_one_of_sixteen")
        }
        Mistake::ClaimUnlocked => (Races, "many_claimers_share_many_runs_without_overlap"),
        Mistake::ForgetKey => {
            (Interleavings, "tokens::a_repeated_completion_with_its_key_is_the_same_success")
        }
        Mistake::RestartOrphans => (Flow, "a_call_that_its_worker_left_behind_is_not_started_again"),
        Mistake::UnknownIsStored => {
            (Interleavings, "commits::a_commit_that_never_reached_the_server_is_sent_again")
        }
    }
}

/// Makes sure that each mistake which a test of this program is there to catch makes that test fail.
///
/// # Errors
/// If one of them doesn't, or can't be run.
pub async fn check(suite: Suite) -> Result<()> {
    ensure!(PLANTED, "mistakes are planted by builds with `--features holdfast/fault-injection`");
    let mut missed = Vec::new();
    for mistake in Mistake::ALL {
        let (place, test) = catcher(mistake);
        if place != suite {
            continue;
        }
        ensure!(!fails(test, None).await?, "{test} fails without any mistake");
        let mut tries = 0;
        while tries < TRIES && !fails(test, Some(mistake)).await.with_context(|| format!("{mistake:?}"))? {
            tries += 1;
        }
        if tries == TRIES {
            missed.push((mistake, test));
        }
    }
    ensure!(missed.is_empty(), "these mistakes were made, and their tests passed: {missed:?}");
    Ok(())
}

/// Whether a test of this program fails if its process, and those that it starts, make a mistake or none.
async fn fails(test: &str, mistake: Option<Mistake>) -> Result<bool> {
    let output = Command::new(std::env::current_exe()?)
        .args(["--exact", test])
        .env("HOLDFAST_PLANT", mistake.map_or("", Mistake::name))
        .kill_on_drop(true)
        .output()
        .await?;
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    // A mistake that can't be made any more fails everything, and is caught by nothing.
    ensure!(!complained.contains("isn't in the statement"), "the mistake can't be made: {complained}");
    if said.contains("test result: FAILED. 0 passed; 1 failed") {
        return Ok(true);
    }
    if said.contains("test result: ok. 1 passed") {
        return Ok(false);
    }
    bail!("{test} wasn't run: {said}{complained}")
}
