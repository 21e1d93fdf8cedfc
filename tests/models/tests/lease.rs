//! The lease's model: the protocol as it is keeps every promise in every state, and each classic mistake
//! breaks the promise that is there to prevent it.

mod proof;

use holdfast_models::lease::{Lease, Variant};

/// More states than a search may visit.
const LIMIT: usize = 2_000_000;

#[test]
fn the_lease_keeps_its_promises_in_every_state() {
    proof::keeps(&Lease(Variant::Correct), LIMIT, 1_240_924);
}

fn breaks(variant: Variant, promise: &str) {
    proof::breaks(&Lease(variant), variant, LIMIT, promise);
}

#[test]
fn a_commit_without_its_epoch_is_stored_under_anothers_lease() {
    breaks(Variant::NoEpochInCommit, "a stale holder stores nothing");
}

#[test]
fn a_fence_read_before_the_transaction_lets_two_write_one_version() {
    breaks(Variant::FenceBeforeTransaction, "a version has one writer");
}

#[test]
fn a_heartbeat_by_worker_keeps_a_claim_that_nobody_heard_of() {
    breaks(Variant::HeartbeatByWorker, "a claim that nobody heard of ends within a TTL");
}

#[test]
fn a_release_without_its_epoch_takes_the_successors_lease() {
    breaks(Variant::ReleaseWithoutEpoch, "an effect begins under its lease");
}

#[test]
fn a_claim_that_doesnt_look_again_takes_a_lease_that_stands() {
    breaks(Variant::ClaimWithoutRecheck, "an effect begins under its lease");
}

#[test]
fn expired_leases_that_nobody_looks_for_leave_a_run_unfinished() {
    breaks(Variant::NoTakeover, "the run can be finished");
}

#[test]
fn a_lost_lease_tried_anew_stores_under_the_successors_lease() {
    breaks(Variant::LostLeaseTriedAnew, "a stale holder stores nothing");
}

#[test]
fn a_commit_sent_again_under_a_new_id_is_stored_twice() {
    breaks(Variant::ResentUnderNewId, "a step is stored once");
}

#[test]
fn a_doubtful_commit_taken_for_stored_begins_an_effect_that_nothing_recorded() {
    breaks(Variant::DoubtTakenForSuccess, "an effect begins after its start is stored");
}

#[test]
fn an_effect_before_its_commit_isnt_recorded() {
    breaks(Variant::EffectBeforeCommit, "an effect begins after its start is stored");
}

#[test]
fn an_effect_before_its_commit_begins_again_after_a_death() {
    breaks(Variant::EffectBeforeCommit, "an effect begins at most once");
}

#[test]
fn a_running_call_that_begins_again_begins_twice() {
    breaks(Variant::RunningCallBeginsAgain, "an effect begins at most once");
}

#[test]
fn without_a_deadline_an_effect_begins_under_anothers_lease() {
    breaks(Variant::NoDeadline, "an effect begins under its lease");
}

#[test]
fn a_deadline_counted_from_the_answer_is_too_late() {
    breaks(Variant::DeadlineFromAnswer, "an effect begins under its lease");
}

#[test]
fn a_deadline_by_a_wall_clock_that_is_behind_is_too_late() {
    breaks(Variant::DeadlineByWallClock, "an effect begins under its lease");
}
