//! Mail against the end and the parking of a run: every accepted letter is folded once, and no session
//! comes to rest with mail that nobody will read.
//!
//! Producers each send one letter, and send it again under its id when they didn't hear that it was
//! accepted. Workers claim, load, fold, and then let the run go on, end it or park it. Accepts and commits
//! are transactions that hold the session's row from their first statement to their last; what they read
//! before that they read from outside. Leases have no clock here: a takeover may come at any time.

mod act;

use crate::{
    actions,
    check::{Model, Promise},
};

/// How many send a letter.
pub const PRODUCERS: usize = 3;
/// How many workers there are.
pub const WORKERS: usize = 2;
/// Lost answers, deaths and takeovers from the living in one history.
const FAULTS: u8 = 2;
/// Places in the mailbox: one more than there are letters.
const PLACES: usize = PRODUCERS + 1;

/// The protocol, or a mistake in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variant {
    /// As it is.
    Correct,
    /// The wake is an INSERT that does nothing where there is a run.
    WakeDoesNothing,
    /// The wake raises the number of a parked run and leaves it parked.
    WakeLeavesParked,
    /// Whether mail woke an ending run is read before its row is locked.
    EndLooksBeforeLock,
    /// Whether mail woke a parking run is read before its row is locked.
    ParkLooksBeforeLock,
    /// The cursor moves, in a transaction of its own, before what was read is stored.
    CursorBeforeFold,
    /// The cursor moves in a transaction of its own after what was read is stored.
    CursorAfterFold,
    /// The commit moves the cursor to the newest letter there is, not to the newest that was read.
    CursorFromCounter,
    /// A letter that comes again isn't looked for by its id.
    RepeatIsNew,
    /// A letter's number is read before the session is locked.
    MailNumberBeforeLock,
    /// A letter's number comes from a sequence, before the session is locked.
    MailNumberFromSequence,
    /// An event's number is read before the session is locked.
    EventNumberBeforeLock,
    /// An event's number comes from a sequence, before the session is locked.
    EventNumberFromSequence,
    /// A commit is stored whoever holds the run.
    NoFence,
}

/// The run's row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Row {
    /// There is none.
    None,
    /// It waits to be claimed.
    Queued,
    /// A worker holds it, or held it when it died.
    Claimed,
    /// It waits for a wake.
    Parked,
}

/// Who has the session's row locked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Lock {
    /// A producer.
    Producer(usize),
    /// A worker.
    Worker(usize),
}

/// Where a producer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Producer {
    /// It has yet to send its letter.
    Wants,
    /// It has taken this number from outside: a mistake.
    Numbered(u8),
    /// Its transaction has the lock, and a number from before if that was taken.
    Locked(u8),
    /// It didn't hear what became of its letter.
    Doubts,
    /// It was told that its letter is accepted.
    Told,
}

/// What a commit makes of the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RunAfter {
    /// It goes on.
    Keep,
    /// It ends.
    End,
    /// It is parked.
    Park,
}

/// What a worker has read: the session's version, its cursor, the newest letter, and the run's wake number
/// if that is looked at from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct View {
    /// The version that the next commit names.
    pub version: u8,
    /// Letters up to here were folded before.
    pub cursor: u8,
    /// Letters up to here are to be folded.
    pub newest: u8,
    /// The wake number, as it was before the lock: a mistake.
    pub woken: u8,
}

/// Where a worker is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// It has nothing.
    Idle,
    /// It holds the run and has yet to load the session.
    Loading,
    /// It has loaded, and has yet to move the cursor in a transaction of its own: a mistake.
    MovingFirst(View),
    /// It knows what to fold.
    Ready(View),
    /// Its commit has the lock.
    Locked(View, RunAfter),
    /// It has stored what it folded, and has yet to move the cursor: a mistake.
    MovingLast(View, RunAfter),
    /// Its commit was stored, the run goes on, and there is mail to fetch.
    Fetching(View),
}

/// A worker's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Worker {
    /// Where it is.
    pub phase: Phase,
    /// Whether the run's row names its lease.
    pub holds: bool,
}

/// Everything at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct State {
    /// Whose letter stands at which number, from 1.
    pub mailbox: [Option<u8>; PLACES],
    /// The newest letter's number.
    pub mail_seq: u8,
    /// Letters up to here have been considered.
    pub cursor: u8,
    /// The session's version.
    pub version: u8,
    /// The newest event's number.
    pub event_seq: u8,
    /// Which events there are, a bit each.
    pub events: u32,
    /// Two events have one number.
    pub event_twice: bool,
    /// The run's row.
    pub row: Row,
    /// The newest letter that woke the run.
    pub wake_seq: u8,
    /// Who has the session's row.
    pub lock: Option<Lock>,
    /// The producers.
    pub producers: [Producer; PRODUCERS],
    /// The workers.
    pub workers: [Worker; WORKERS],
    /// How often each producer's letter was folded, as stored.
    pub folded: [u8; PRODUCERS],
    /// Faults that may still happen.
    pub faults: u8,
}

actions! {
    /// What may happen. Numbers are those of producers and workers.
    pub enum Action {
        real {
            /// A producer's transaction gets the session's row.
            LockForLetter(usize),
            /// It writes letter, event and wake, ends, and the producer hears of it.
            Accept(usize),
            /// The same, and the answer is lost.
            AcceptUnheard(usize),
            /// It is rolled back, and the producer doesn't know.
            RollBackLetter(usize),
            /// A worker claims a queued run.
            Claim(usize),
            /// A worker takes over a run whose holder is dead or was slow.
            TakeOver(usize),
            /// The holder loads the session and its mail.
            Load(usize),
            /// Its commit gets the session's row, to let the run go on.
            LockToKeep(usize),
            /// The same, to end the run.
            LockToEnd(usize),
            /// The same, to park the run.
            LockToPark(usize),
            /// The commit is written and ends.
            Commit(usize),
            /// The worker fetches the mail that its commit had not considered.
            Fetch(usize),
            /// A worker dies.
            Die(usize),
        }
        mistaken {
            /// A producer takes a number from outside.
            TakeNumber(usize),
            /// A worker moves the cursor in a transaction of its own.
            MoveCursor(usize),
        }
    }
}

/// The model.
#[derive(Debug, Clone, Copy)]
pub struct Mail(pub Variant);

impl Model for Mail {
    type State = State;
    type Action = Action;

    fn start(&self) -> State {
        State {
            mailbox: [None; PLACES],
            mail_seq: 0,
            cursor: 0,
            version: 1,
            event_seq: 0,
            events: 0,
            event_twice: false,
            row: Row::None,
            wake_seq: 0,
            lock: None,
            producers: [Producer::Wants; PRODUCERS],
            workers: [Worker { phase: Phase::Idle, holds: false }; WORKERS],
            folded: [0; PRODUCERS],
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
            Promise::always("a letter is folded at most once", |state| {
                state.folded.iter().all(|folded| *folded <= 1)
            }),
            Promise::always("what the cursor has passed is folded", |state| {
                let passed = state.mailbox.iter().take(usize::from(state.cursor)).flatten();
                passed.into_iter().all(|letter| state.folded[usize::from(*letter)] > 0)
            }),
            Promise::always("unread mail has a run that is due", |state| !state.rests() || !state.unread()),
            Promise::always("an accepted letter has its place", |state| {
                let mut told = (0..PRODUCERS).filter(|place| state.producers[*place] == Producer::Told);
                told.all(|place| state.mailbox.contains(&Some(place as u8)))
            }),
            Promise::always("letters are seen without a gap", |state| {
                state.mailbox.is_sorted_by_key(Option::is_none)
            }),
            Promise::always("an event's number is given once", |state| !state.event_twice),
            Promise::always("events are seen without a gap", |state| (state.events + 1).is_power_of_two()),
            Promise::always_possible("all mail can be read and the session come to rest", |state| {
                let told = state.producers.iter().all(|producer| *producer == Producer::Told);
                told && state.folded == [1; PRODUCERS] && state.rests() && !state.unread()
            }),
        ]
    }
}

impl State {
    /// Whether nothing will happen by itself.
    fn rests(&self) -> bool {
        matches!(self.row, Row::None | Row::Parked)
    }

    fn unread(&self) -> bool {
        self.cursor < self.mail_seq
    }
}
