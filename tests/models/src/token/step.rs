//! What the run does in the token's model: the engine's fold, defer and seal, stored by one commit.

use super::{Call, Letter, Row, State, Token, Tokens, Variant, Worker};

impl Tokens {
    /// One transaction: the fence, the step, its tokens, and the end of the run unless mail woke it.
    pub(super) fn commit(&self, state: &mut State, ends: bool) {
        let Worker::Ready(newest) = state.worker else { return };
        if state.deleted && self.0 != Variant::CommitIgnoresDelete {
            state.lose_worker();
            return;
        }
        state.stored_in_deleted |= state.deleted;
        let waiting = self.fold(state, usize::from(newest));
        if state.call == Call::Ready {
            state.open_token();
        }
        self.seal(state, &waiting);
        if state.call == Call::Cancelled
            && state.token == Token::Open
            && self.0 != Variant::CancelledCallKeepsToken
        {
            state.token = Token::Cancelled;
            state.settled += 1;
        }
        state.cursor = newest;
        // Every letter wakes, so the newest letter's number is the run's wake number.
        let woken = state.mail.len() > usize::from(newest);
        (state.worker, state.row) = match (ends && !woken, woken) {
            (true, _) => (Worker::Idle, Row::None),
            (false, true) => (Worker::Reading, state.row),
            (false, false) => (Worker::Ready(newest), state.row),
        };
        if state.deleted {
            state.lose_worker();
        }
    }

    /// Considers letters in order: orders are obeyed and results settle their call. Returns those that the
    /// model has to read.
    fn fold(&self, state: &mut State, newest: usize) -> Vec<Letter> {
        let mut waiting = Vec::new();
        for place in usize::from(state.cursor)..newest {
            let letter = state.mail[place];
            // Whether the model has been shown a placeholder.
            let shown = state.messages > 0;
            let waits = match letter {
                Letter::Said => true,
                Letter::CancelDeferred => {
                    if state.call == Call::Deferred {
                        state.call = Call::Cancelled;
                    }
                    false
                }
                Letter::StopRun => {
                    if state.call == Call::Ready {
                        state.call = Call::Cancelled;
                    }
                    false
                }
                Letter::Result(_) | Letter::Expired if state.call.is_open() => {
                    state.call =
                        if let Letter::Result(by) = letter { Call::Completed(by) } else { Call::Failed };
                    shown || self.0 == Variant::ResultToldBothWays
                }
                // A result that was beaten by a cancel is told all the same; a second one says nothing.
                Letter::Result(_) | Letter::Expired => match self.0 {
                    Variant::BeatenResultDropped => false,
                    _ => state.call == Call::Cancelled && !waiting.contains(&letter),
                },
            };
            if waits {
                waiting.push(letter);
            }
        }
        waiting
    }

    /// Seals the next user turn when there is something to show: the call's answer, be it a placeholder, and
    /// after that what was said.
    fn seal(&self, state: &mut State, waiting: &[Letter]) {
        let round_over = state.messages == 0 && !state.call.is_open();
        if !round_over && waiting.is_empty() {
            return;
        }
        if state.messages == 0 {
            state.messages = 1;
            if let Call::Completed(by) = state.call {
                state.told[usize::from(by)] += 1;
            }
        }
        for letter in waiting {
            if let Letter::Result(by) = letter {
                state.told[usize::from(*by)] += 1;
                if self.0 == Variant::LateResultAsAnswer {
                    state.messages += 1;
                }
            }
        }
    }
}
