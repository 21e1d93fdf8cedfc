//! What may happen in the token's model from outside the run, and what it changes.

use super::{
    Action, Answer, Call, KEYED, Letter, PROGRAMS, Program, Row, State, Token, Tokens, Variant, Worker,
};

impl Tokens {
    pub(super) fn possible(&self, state: &State) -> Vec<Action> {
        let mut may = Vec::new();
        match state.worker {
            Worker::Idle if state.row == Row::Due => may.push(Action::Claim),
            Worker::Idle => {}
            Worker::Reading => may.push(Action::Read),
            Worker::Ready(_) => may.extend([Action::CommitAndKeep, Action::CommitAndEnd]),
        }
        if state.worker != Worker::Idle && state.faults > 0 {
            may.push(Action::Die);
        }
        for number in 0..PROGRAMS {
            self.possible_of_program(state, number, &mut may);
        }
        let active = state.row != Row::None || state.token == Token::Open;
        if state.cancelled_at.is_none() && active && !state.deleted {
            may.push(Action::Cancel);
        }
        if !state.overdue && state.token != Token::None {
            may.push(Action::DeadlinePasses);
        }
        if state.is_overdue() && !state.found_overdue {
            may.push(Action::FindOverdue);
        }
        if state.found_overdue {
            may.push(Action::Expire);
        }
        if !state.spoken && !state.deleted {
            may.push(Action::Speak);
        }
        if !state.deleted {
            may.push(Action::Delete);
        }
        may
    }

    /// Whether a program's completion takes two transactions.
    fn halves(&self, number: usize) -> bool {
        match self.0 {
            Variant::LookBeforeSettle | Variant::LetterAfterSettle => true,
            Variant::KeyBeforeSettle | Variant::KeyAfterSettle => number == KEYED,
            _ => false,
        }
    }

    fn possible_of_program(&self, state: &State, number: usize, may: &mut Vec<Action>) {
        let faulty = state.faults > 0;
        match state.programs[number] {
            Program::Wants | Program::Doubts if self.halves(number) => may.push(Action::FirstHalf(number)),
            Program::Wants | Program::Doubts => {
                may.push(Action::Complete(number));
                if faulty {
                    may.push(Action::CompleteUnheard(number));
                    if !state.copies[number] {
                        may.push(Action::TimeOut(number));
                    }
                }
            }
            Program::MetOverdue => may.push(Action::ExpireMet(number)),
            Program::Halfway => {
                may.push(Action::SecondHalf(number));
                if faulty {
                    may.push(Action::DieBetween(number));
                }
            }
            Program::Told(_) => {}
        }
        if state.copies[number] {
            may.push(Action::LateCopy(number));
        }
    }

    pub(super) fn happen(&self, state: &mut State, action: Action) {
        match action {
            Action::Claim => {
                state.row = Row::Held;
                state.worker = Worker::Reading;
            }
            Action::Read => state.worker = Worker::Ready(state.mail.len() as u8),
            Action::CommitAndKeep => self.commit(state, false),
            Action::CommitAndEnd => self.commit(state, true),
            Action::Die => {
                state.faults -= 1;
                state.lose_worker();
            }
            Action::Complete(number) => state.programs[number] = self.complete(state, number),
            Action::CompleteUnheard(number) => {
                state.faults -= 1;
                self.complete(state, number);
                state.programs[number] = Program::Doubts;
            }
            Action::TimeOut(number) => {
                state.faults -= 1;
                state.copies[number] = true;
                state.programs[number] = Program::Doubts;
            }
            Action::LateCopy(number) => {
                state.copies[number] = false;
                self.complete(state, number);
            }
            Action::ExpireMet(number) => {
                let expired = state.expire() || self.0 == Variant::MetOverdueMeansExpired;
                // Whoever settled it meanwhile gives the answer, in another look.
                state.programs[number] =
                    if expired { Program::Told(Answer::Expired) } else { Program::Wants };
            }
            Action::Cancel => self.cancel(state),
            Action::DeadlinePasses => state.overdue = true,
            Action::FindOverdue => state.found_overdue = true,
            Action::Expire => {
                state.found_overdue = false;
                if self.0 == Variant::ExpiryWithoutRecheck && !state.deleted {
                    state.settle(Token::Expired);
                    state.take_in(&[Letter::Expired]);
                } else {
                    let _ = state.expire();
                }
            }
            Action::Speak => {
                state.spoken = true;
                state.take_in(&[Letter::Said]);
            }
            Action::Delete => {
                state.deleted = true;
                (state.token, state.row) = (Token::None, Row::None);
            }
            Action::FirstHalf(number) => state.programs[number] = self.first_half(state, number),
            Action::SecondHalf(number) => state.programs[number] = self.second_half(state, number),
            Action::DieBetween(number) => {
                state.faults -= 1;
                state.programs[number] = Program::Doubts;
            }
        }
    }

    /// One transaction: the key, the token, the letter and the wake, or a refusal that leaves nothing.
    fn complete(&self, state: &mut State, number: usize) -> Program {
        if number == KEYED && state.key {
            return Program::Told(Answer::Accepted);
        }
        if let Some(refused) = state.refusal(number) {
            return refused;
        }
        state.key |= number == KEYED;
        state.took_place[number] = true;
        state.settle(Token::Completed(number as u8));
        if self.0 == Variant::CompletionWithoutWake {
            state.mail.push(Letter::Result(number as u8));
        } else {
            state.take_in(&[Letter::Result(number as u8)]);
        }
        Program::Told(Answer::Accepted)
    }

    fn first_half(&self, state: &mut State, number: usize) -> Program {
        let known = number == KEYED && state.key;
        if known && self.0 != Variant::LookBeforeSettle {
            return Program::Told(Answer::Accepted);
        }
        if self.0 == Variant::KeyBeforeSettle {
            state.key = true;
            return Program::Halfway;
        }
        if let Some(refused) = state.refusal(number) {
            return refused;
        }
        if self.0 != Variant::LookBeforeSettle {
            state.took_place[number] = true;
            state.settle(Token::Completed(number as u8));
            if self.0 == Variant::KeyAfterSettle {
                state.take_in(&[Letter::Result(number as u8)]);
            }
        }
        Program::Halfway
    }

    fn second_half(&self, state: &mut State, number: usize) -> Program {
        let result = number as u8;
        match self.0 {
            Variant::KeyBeforeSettle => {
                if let Some(refused) = state.refusal(number) {
                    return refused;
                }
                state.took_place[number] = true;
                state.settle(Token::Completed(result));
                state.take_in(&[Letter::Result(result)]);
            }
            Variant::KeyAfterSettle => state.key = true,
            Variant::LookBeforeSettle if !state.deleted => {
                state.took_place[number] = true;
                state.settle(Token::Completed(result));
                state.take_in(&[Letter::Result(result)]);
            }
            Variant::LetterAfterSettle if !state.deleted => state.take_in(&[Letter::Result(result)]),
            _ => return Program::Told(Answer::Unknown),
        }
        Program::Told(Answer::Accepted)
    }

    /// One transaction: tokens, orders and the wake.
    fn cancel(&self, state: &mut State) {
        let settles = match self.0 {
            Variant::CancelOverwrites => state.token != Token::None,
            _ => state.token == Token::Open,
        };
        if settles {
            state.settle(Token::Cancelled);
        }
        match self.0 {
            // The closed token's call ends with its token, and what is about to be opened isn't thought of.
            Variant::CancelOfOpenOnly if !settles => state.take_in(&[Letter::StopRun]),
            _ => state.take_in(&[Letter::CancelDeferred, Letter::StopRun]),
        }
        state.cancelled_at = Some(state.mail.len() as u8);
    }
}

impl State {
    fn is_overdue(&self) -> bool {
        self.overdue && self.token == Token::Open
    }

    /// Why a token can't be completed, if it can't. A program that came too early comes again.
    fn refusal(&self, number: usize) -> Option<Program> {
        let answer = match self.token {
            Token::Open if self.overdue => return Some(Program::MetOverdue),
            Token::Open => return None,
            Token::None if self.deleted => Answer::Unknown,
            Token::None => return Some(Program::Wants),
            Token::Completed(by) if usize::from(by) == number => Answer::Same,
            Token::Completed(_) => Answer::Rival,
            Token::Cancelled => Answer::Cancelled,
            Token::Expired => Answer::Expired,
        };
        Some(Program::Told(answer))
    }

    fn settle(&mut self, token: Token) {
        self.token = token;
        self.settled += 1;
    }

    /// One transaction, which looks again under its locks. Returns whether it expired the token.
    fn expire(&mut self) -> bool {
        let expires = self.is_overdue();
        if expires {
            self.settle(Token::Expired);
            self.take_in(&[Letter::Expired]);
        }
        expires
    }

    /// Appends letters and wakes the run.
    fn take_in(&mut self, letters: &[Letter]) {
        self.mail.extend(letters);
        if self.row == Row::None {
            self.row = Row::Due;
        }
    }

    pub(super) fn lose_worker(&mut self) {
        self.worker = Worker::Idle;
        if self.row == Row::Held {
            self.row = Row::Due;
        }
    }

    pub(super) fn open_token(&mut self) {
        self.call = Call::Deferred;
        self.token = Token::Open;
    }
}
