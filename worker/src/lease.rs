//! A lease from its claim to its end: one task, whatever becomes of the run.

use std::sync::Arc;

use holdfast_engine::session::Status;
use holdfast_store::{StoreError, commit};
use tokio::time::Instant;
use tracing::Instrument;

use crate::{
    Shared, alone,
    claims::Claimed,
    drive::{Gone, drive},
    held::{AFTER_FAULT, Slot},
    metrics, trace,
};

/// The detail of a session that was given up because its run ended its workers.
pub(crate) const POISON: &str = "poison";

/// Drives a claimed lease. What apalis calls for every task.
pub(crate) async fn execute(claimed: Claimed) -> Result<(), std::convert::Infallible> {
    let Some(slot) = claimed.take() else { return Ok(()) };
    let shared = Arc::clone(slot.shared());
    let _counted = shared.drives.token();
    let span = trace::run(&shared, &slot.lease);
    let (asked_at, answered_at) = slot.claimed;
    trace::claimed(&span, asked_at, answered_at, slot.lease.taken_over);
    let began = Instant::now();
    let slot = match alone::places(&shared, &slot.lease) {
        Some(places) => alone::send(&shared, places, slot).instrument(span.clone()).await,
        None => Some(slot),
    };
    let outcome = match slot {
        Some(slot) => run(&shared, slot).instrument(span.clone()).await,
        None => "alone",
    };
    span.record("holdfast.outcome", outcome);
    if matches!(outcome, "failed" | "lease_lost" | "poison" | "broken") {
        span.record("otel.status_code", "ERROR");
    }
    metrics::ended(outcome, began.elapsed());
    Ok(())
}

/// Drives a lease in this process. Returns what became of it, as metrics say it.
pub(crate) async fn run(shared: &Arc<Shared>, mut slot: Slot) -> &'static str {
    let began = Instant::now();
    let (session, epoch) = (slot.lease.session, slot.lease.epoch);
    tracing::info!(kind = "run.started", session_id = %session, run_epoch = epoch, worker_id = %shared.id, mode = slot.lease.mode.word(), taken_over = slot.lease.taken_over);
    let arriving = slot.arriving.take();
    let driven = tokio::select! {
        driven = drive(shared, &slot, arriving) => driven,
        () = slot.lost() => Err(Gone::LeaseLost),
    };
    let took = began.elapsed().as_millis();
    match driven {
        Ok(status) => {
            tracing::info!(kind = "run.stopped", session_id = %session, run_epoch = epoch, worker_id = %shared.id, status = status.word(), ms = took);
            slot.over();
            // It goes on, but not here.
            if status == Status::Running { "parked" } else { status.word() }
        }
        Err(Gone::LeaseLost) => {
            tracing::warn!(kind = "run.lease_lost", session_id = %session, run_epoch = epoch, worker_id = %shared.id, "what the last step did is not stored");
            slot.over();
            "lease_lost"
        }
        Err(Gone::Deleted) => {
            tracing::info!(kind = "run.deleted", session_id = %session, run_epoch = epoch, "the session was deleted");
            slot.over();
            "deleted"
        }
        Err(Gone::Leaving) => {
            tracing::info!(kind = "run.released", session_id = %session, run_epoch = epoch, ms = took);
            "handed_over"
        }
        Err(Gone::Poison(takeovers)) => {
            tracing::error!(kind = "run.poison", session_id = %session, run_epoch = epoch, takeovers, "a run that ends its workers is given up");
            give_up(shared, slot, POISON).await;
            "poison"
        }
        Err(Gone::Store(error @ StoreError::Rival)) => {
            tracing::warn!(kind = "run.put_off", session_id = %session, run_epoch = epoch, %error);
            slot.put_off(AFTER_FAULT);
            "put_off"
        }
        Err(error @ (Gone::Store(_) | Gone::Illegal(_))) => {
            tracing::error!(kind = "run.broken", session_id = %session, run_epoch = epoch, %error, "the run can't go on here");
            give_up(shared, slot, &format!("internal: {error}")).await;
            "broken"
        }
    }
}

/// Ends a run that can't be driven. If not even that can be stored, the run is put off.
async fn give_up(shared: &Shared, slot: Slot, why: &str) {
    slot.releasing(true);
    match commit::fail(&shared.store, slot.lease.session, slot.lease.epoch, why).await {
        Ok(_) => slot.over(),
        Err(error) => {
            tracing::error!(%error, session_id = %slot.lease.session, "couldn't store that the run failed");
            slot.put_off(AFTER_FAULT);
        }
    }
}
