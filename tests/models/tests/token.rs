//! The token's model: the protocol as it is keeps every promise in every state, and each classic mistake
//! breaks the promise that is there to prevent it.

mod proof;

use holdfast_models::token::{Tokens, Variant};

/// More states than a search may visit.
const LIMIT: usize = 1_000_000;

#[test]
fn tokens_keep_their_promises_in_every_state() {
    proof::keeps(&Tokens(Variant::Correct), LIMIT, 158_036);
}

fn breaks(variant: Variant, promise: &str) {
    proof::breaks(&Tokens(variant), variant, LIMIT, promise);
}

#[test]
fn a_look_before_the_settling_transaction_lets_two_settle() {
    breaks(Variant::LookBeforeSettle, "a token is settled once");
}

#[test]
fn a_look_before_the_settling_transaction_goes_back_on_its_word() {
    breaks(Variant::LookBeforeSettle, "what a program was told stands");
}

#[test]
fn a_cancel_that_overwrites_goes_back_on_a_completion() {
    breaks(Variant::CancelOverwrites, "what a program was told stands");
}

#[test]
fn an_expiry_without_another_look_settles_again() {
    breaks(Variant::ExpiryWithoutRecheck, "a token is settled once");
}

#[test]
fn a_key_before_its_effect_accepts_what_never_took_place() {
    breaks(Variant::KeyBeforeSettle, "an accepted result is kept");
}

#[test]
fn a_key_after_its_effect_refuses_the_retry() {
    breaks(Variant::KeyAfterSettle, "a program whose completion took place hears so");
}

#[test]
fn a_letter_after_its_settlement_is_lost() {
    breaks(Variant::LetterAfterSettle, "a settled token's end is in the mail or stored");
}

#[test]
fn a_letter_after_its_settlement_leaves_a_call_without_its_message() {
    breaks(Variant::LetterAfterSettle, "an accepted result is kept");
}

#[test]
fn a_cancel_of_open_tokens_misses_the_one_that_a_step_is_about_to_open() {
    breaks(Variant::CancelOfOpenOnly, "a cancel that was obeyed reached the call");
}

#[test]
fn a_result_beaten_by_a_cancel_and_dropped_is_lost() {
    breaks(Variant::BeatenResultDropped, "an accepted result is kept");
}

#[test]
fn a_completion_that_wakes_nobody_leaves_its_letter() {
    breaks(Variant::CompletionWithoutWake, "unread mail has a run that is due");
}

#[test]
fn a_result_that_answers_its_call_and_is_said_too_is_told_twice() {
    breaks(Variant::ResultToldBothWays, "a result is told at most once");
}

#[test]
fn a_late_result_as_an_answer_is_a_second_tool_message() {
    breaks(Variant::LateResultAsAnswer, "a call has at most one tool message");
}

#[test]
fn who_met_an_overdue_token_and_didnt_look_again_hears_what_isnt_so() {
    breaks(Variant::MetOverdueMeansExpired, "what a program was told stands");
}

#[test]
fn a_commit_that_ignores_the_mark_stores_in_a_deleted_session() {
    breaks(Variant::CommitIgnoresDelete, "nothing is stored in a deleted session");
}

#[test]
fn a_cancelled_call_that_keeps_its_token_can_still_be_completed() {
    breaks(Variant::CancelledCallKeepsToken, "a call that has ended has no open token");
}
