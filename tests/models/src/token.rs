//! A deferred call's token: completed, cancelled, expired or deleted, and told to the model once.
//!
//! One session has one call that is about to be deferred. The commit that defers it opens its token. Two
//! programs complete it with different results, one with an idempotency key and one without, and ask again
//! when they didn't hear the answer. Somebody cancels, somebody speaks (so that the model is shown a
//! placeholder), somebody deletes the session, and the scheduler looks for overdue tokens. All of these are
//! single transactions under the session's lock, so each is one action here, unless a mistake makes it two.

mod act;
mod step;

use crate::{
    actions,
    check::{Model, Promise},
};

/// Programs that complete the call. The first has an idempotency key.
pub const PROGRAMS: usize = 2;
/// Which of them has a key.
const KEYED: usize = 0;
/// Lost answers and deaths in one history.
const FAULTS: u8 = 2;

/// The protocol, or a mistake in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variant {
    /// As it is.
    Correct,
    /// The token is looked at before the transaction that settles it, and not again.
    LookBeforeSettle,
    /// A cancel closes tokens whatever their state.
    CancelOverwrites,
    /// The scheduler expires what it found overdue without another look.
    ExpiryWithoutRecheck,
    /// The key is remembered in a transaction before the one that settles.
    KeyBeforeSettle,
    /// The key is remembered in a transaction after the one that settles.
    KeyAfterSettle,
    /// The letter is sent in a transaction after the one that settles.
    LetterAfterSettle,
    /// A cancel closes open tokens and says nothing to the run that is about to open one.
    CancelOfOpenOnly,
    /// A result that comes after its call was cancelled is dropped.
    BeatenResultDropped,
    /// A completion's letter wakes nobody.
    CompletionWithoutWake,
    /// A result that answers its call is also said as mail.
    ResultToldBothWays,
    /// A result that comes after its placeholder is shown as another tool message.
    LateResultAsAnswer,
    /// Who met an overdue token is told that it expired, whatever became of it until it was expired.
    MetOverdueMeansExpired,
    /// A delete takes the session's tokens, and the mark isn't looked at by commits.
    CommitIgnoresDelete,
    /// A step that cancels a call leaves its token open.
    CancelledCallKeepsToken,
}

/// What is stored of the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Call {
    /// The model asked for it.
    Ready,
    /// It is outside.
    Deferred,
    /// It has a program's result.
    Completed(u8),
    /// It expired.
    Failed,
    /// It was cancelled.
    Cancelled,
}

/// The token's row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Token {
    /// There is none.
    None,
    /// It may be settled.
    Open,
    /// A program settled it.
    Completed(u8),
    /// A cancel did.
    Cancelled,
    /// Its deadline did.
    Expired,
}

/// A letter of the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Letter {
    /// A program's result.
    Result(u8),
    /// The call's failure, since it expired.
    Expired,
    /// The order to cancel all deferred calls.
    CancelDeferred,
    /// The order to stop the run.
    StopRun,
    /// Somebody speaks.
    Said,
}

/// The run's row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Row {
    /// There is none.
    None,
    /// It is due, or will be when its dead holder's lease has expired.
    Due,
    /// The worker holds it.
    Held,
}

/// Where the worker is. Only it changes what it has read, except for the newest letter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Worker {
    /// It has nothing.
    Idle,
    /// It holds the run and has yet to read the mail.
    Reading,
    /// It has read so many letters and is about to commit.
    Ready(u8),
}

/// What a program was told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Answer {
    /// Its result is accepted.
    Accepted,
    /// The token was completed before, with the same result.
    Same,
    /// The token was completed before, with another result.
    Rival,
    /// The token was cancelled.
    Cancelled,
    /// The token expired.
    Expired,
    /// There is no such token.
    Unknown,
}

/// Where a program is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Program {
    /// It has yet to complete the call.
    Wants,
    /// It met an overdue token, and has yet to expire it.
    MetOverdue,
    /// The first of two transactions has been carried out for it: a mistake.
    Halfway,
    /// It doesn't know what became of its request.
    Doubts,
    /// It was told.
    Told(Answer),
}

/// Everything at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct State {
    /// Whether the session is deleted.
    pub deleted: bool,
    /// The call.
    pub call: Call,
    /// The token.
    pub token: Token,
    /// Whether the token's deadline has passed.
    pub overdue: bool,
    /// The mailbox.
    pub mail: Vec<Letter>,
    /// How many letters have been considered.
    pub cursor: u8,
    /// The run.
    pub row: Row,
    /// The worker.
    pub worker: Worker,
    /// How many tool messages there are for the call.
    pub messages: u8,
    /// How often each program's result was told, be it in the tool message or later.
    pub told: [u8; PROGRAMS],
    /// The programs.
    pub programs: [Program; PROGRAMS],
    /// Whether a copy of a program's request is still on its way, whose answer nobody waits for.
    pub copies: [bool; PROGRAMS],
    /// Whether the key is remembered.
    pub key: bool,
    /// Whose completion took place.
    pub took_place: [bool; PROGRAMS],
    /// How often the token was settled.
    pub settled: u8,
    /// How many letters there were when a cancel had been accepted.
    pub cancelled_at: Option<u8>,
    /// Whether the scheduler has found the token overdue.
    pub found_overdue: bool,
    /// Whether somebody has spoken.
    pub spoken: bool,
    /// Whether a commit was stored in a deleted session.
    pub stored_in_deleted: bool,
    /// Faults that may still happen.
    pub faults: u8,
}

actions! {
    /// What may happen. Numbers are those of programs.
    pub enum Action {
        real {
            /// A worker claims the run.
            Claim,
            /// It loads the session and its mail, or fetches what came since.
            Read,
            /// It folds what it has read, defers, seals, and stores that; the run goes on.
            CommitAndKeep,
            /// The same, and the run ends unless mail woke it.
            CommitAndEnd,
            /// The worker dies.
            Die,
            /// A program completes the call.
            Complete(usize),
            /// The same, and the answer is lost.
            CompleteUnheard(usize),
            /// A program gives up waiting while its request is on its way.
            TimeOut(usize),
            /// That request arrives.
            LateCopy(usize),
            /// A program's request expires the overdue token that it met.
            ExpireMet(usize),
            /// Somebody cancels the run and its deferred calls.
            Cancel,
            /// The deadline of the token passes.
            DeadlinePasses,
            /// The scheduler finds the token overdue.
            FindOverdue,
            /// It expires it, after another look.
            Expire,
            /// Somebody speaks.
            Speak,
            /// Somebody deletes the session.
            Delete,
        }
        mistaken {
            /// The first transaction of a completion that takes two.
            FirstHalf(usize),
            /// The second one.
            SecondHalf(usize),
            /// The node dies between the two.
            DieBetween(usize),
        }
    }
}

/// The model.
#[derive(Debug, Clone, Copy)]
pub struct Tokens(pub Variant);

impl Model for Tokens {
    type State = State;
    type Action = Action;

    fn start(&self) -> State {
        State {
            deleted: false,
            call: Call::Ready,
            token: Token::None,
            overdue: false,
            mail: Vec::new(),
            cursor: 0,
            row: Row::Due,
            worker: Worker::Idle,
            messages: 0,
            told: [0; PROGRAMS],
            programs: [Program::Wants; PROGRAMS],
            copies: [false; PROGRAMS],
            key: false,
            took_place: [false; PROGRAMS],
            settled: 0,
            cancelled_at: None,
            found_overdue: false,
            spoken: false,
            stored_in_deleted: false,
            faults: FAULTS,
        }
    }

    fn actions(&self, state: &State) -> Vec<Action> {
        self.possible(state)
    }

    fn after(&self, state: &State, action: Action) -> State {
        let mut after = state.clone();
        self.happen(&mut after, action);
        after
    }

    fn promises(&self) -> Vec<Promise<State>> {
        vec![
            Promise::always("a token is settled once", |state| state.settled <= 1),
            Promise::always("what a program was told stands", |state| {
                state.deleted || (0..PROGRAMS).all(|number| state.answer_stands(number))
            }),
            Promise::always("a program whose completion took place hears so", |state| {
                state.deleted || (0..PROGRAMS).all(|number| state.hears_of_its_success(number))
            }),
            Promise::always("an accepted result is kept", |state| {
                state.deleted || (0..PROGRAMS).all(|number| state.keeps_result(number))
            }),
            Promise::always("a settled token's end is in the mail or stored", |state| {
                let ends = matches!(state.token, Token::Completed(_) | Token::Expired);
                let mailed =
                    state.mail.iter().any(|mail| matches!(mail, Letter::Result(_) | Letter::Expired));
                state.deleted || !ends || mailed
            }),
            Promise::always("a call has at most one tool message", |state| state.messages <= 1),
            Promise::always("a result is told at most once", |state| state.told.iter().sum::<u8>() <= 1),
            Promise::always("a call that has ended has no open token", |state| {
                state.call.is_open() || state.token != Token::Open
            }),
            Promise::always("a cancel that was obeyed reached the call", |state| {
                let obeyed = state.cancelled_at.is_some_and(|place| state.cursor >= place);
                state.deleted || !obeyed || !state.call.is_open()
            }),
            Promise::always("unread mail has a run that is due", |state| {
                state.deleted || usize::from(state.cursor) == state.mail.len() || state.row != Row::None
            }),
            Promise::always("nothing is stored in a deleted session", |state| !state.stored_in_deleted),
            Promise::always_possible("the call can end and be told", |state| {
                state.deleted || (!state.call.is_open() && state.messages == 1 && state.row == Row::None)
            }),
        ]
    }
}

impl Call {
    fn is_open(self) -> bool {
        matches!(self, Self::Ready | Self::Deferred)
    }
}

impl State {
    fn answer_stands(&self, number: usize) -> bool {
        let Program::Told(answer) = self.programs[number] else { return true };
        let mine = self.token == Token::Completed(number as u8);
        match answer {
            Answer::Accepted | Answer::Same => mine,
            Answer::Rival => matches!(self.token, Token::Completed(_)) && !mine,
            Answer::Cancelled => self.token == Token::Cancelled,
            Answer::Expired => self.token == Token::Expired,
            Answer::Unknown => false,
        }
    }

    fn hears_of_its_success(&self, number: usize) -> bool {
        match self.programs[number] {
            Program::Told(answer) if self.took_place[number] => {
                answer == Answer::Accepted || (answer == Answer::Same && number != KEYED)
            }
            _ => true,
        }
    }

    /// Whether the result of a program that was told of its acceptance is unread, stored with the call, or
    /// told to the model.
    fn keeps_result(&self, number: usize) -> bool {
        if !matches!(self.programs[number], Program::Told(Answer::Accepted | Answer::Same)) {
            return true;
        }
        let result = number as u8;
        let unread = &self.mail[usize::from(self.cursor)..];
        unread.contains(&Letter::Result(result))
            || self.call == Call::Completed(result)
            || self.told[number] > 0
    }
}
