//! The mail's model: the protocol as it is keeps every promise in every state, and each classic mistake
//! breaks the promise that is there to prevent it.

mod proof;

use holdfast_models::mail::{Mail, Variant};

/// More states than a search may visit.
const LIMIT: usize = 1_000_000;

#[test]
fn mail_keeps_its_promises_in_every_state() {
    proof::keeps(&Mail(Variant::Correct), LIMIT, 233_488);
}

fn breaks(variant: Variant, promise: &str) {
    proof::breaks(&Mail(variant), variant, LIMIT, promise);
}

#[test]
fn a_wake_that_does_nothing_leaves_mail_behind_an_end() {
    breaks(Variant::WakeDoesNothing, "unread mail has a run that is due");
}

#[test]
fn a_wake_that_leaves_a_run_parked_leaves_its_mail() {
    breaks(Variant::WakeLeavesParked, "unread mail has a run that is due");
}

#[test]
fn an_end_that_looks_before_its_lock_leaves_mail_behind() {
    breaks(Variant::EndLooksBeforeLock, "unread mail has a run that is due");
}

#[test]
fn a_park_that_looks_before_its_lock_leaves_mail_behind() {
    breaks(Variant::ParkLooksBeforeLock, "unread mail has a run that is due");
}

#[test]
fn a_cursor_that_moves_before_the_fold_loses_a_letter() {
    breaks(Variant::CursorBeforeFold, "what the cursor has passed is folded");
}

#[test]
fn a_letter_that_a_cursor_passed_before_the_fold_is_never_read() {
    breaks(Variant::CursorBeforeFold, "all mail can be read and the session come to rest");
}

#[test]
fn a_cursor_that_moves_after_the_fold_folds_twice() {
    breaks(Variant::CursorAfterFold, "a letter is folded at most once");
}

#[test]
fn a_cursor_from_the_counter_passes_what_wasnt_read() {
    breaks(Variant::CursorFromCounter, "what the cursor has passed is folded");
}

#[test]
fn a_repeat_taken_for_new_is_folded_twice() {
    breaks(Variant::RepeatIsNew, "a letter is folded at most once");
}

#[test]
fn a_mail_number_from_before_the_lock_takes_anothers_place() {
    breaks(Variant::MailNumberBeforeLock, "an accepted letter has its place");
}

#[test]
fn a_mail_number_from_a_sequence_leaves_a_gap() {
    breaks(Variant::MailNumberFromSequence, "letters are seen without a gap");
}

#[test]
fn an_event_number_from_before_the_lock_is_given_twice() {
    breaks(Variant::EventNumberBeforeLock, "an event's number is given once");
}

#[test]
fn an_event_number_from_a_sequence_leaves_a_gap() {
    breaks(Variant::EventNumberFromSequence, "events are seen without a gap");
}

#[test]
fn a_commit_without_a_fence_folds_again() {
    breaks(Variant::NoFence, "a letter is folded at most once");
}
