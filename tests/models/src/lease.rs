//! A run's lease: claim, renew, expire, commit, release, and an effect that must not begin twice.
//!
//! One session has one call of a tool that no rule calls idempotent. Whoever holds the run stores that the
//! call starts, begins it, and stores its end together with the end of the run; whoever takes over a run
//! whose call had started stores that it failed. Workers may stop anywhere for any time, which needs no
//! action of its own: time passes and others act while they don't. Clocks run at one rate and are never
//! compared: all that is kept of one is how much is left until a deadline.

mod act;
mod names;

use crate::{
    actions,
    check::{Model, Promise},
};

/// Ticks that a lease lasts from its grant or renewal.
pub const TTL: u8 = 2;
/// How many workers there are.
pub const WORKERS: usize = 2;
/// Messages that may be under way to the database at once, beside claims and heartbeats.
const WIRE: usize = 2;
/// Losses, time-outs and deaths in one history.
const FAULTS: u8 = 2;
/// By how much a wrong worker's wall clock is behind the database's.
pub(crate) const SKEW: u8 = 1;

/// The protocol, or a mistake in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variant {
    /// As it is.
    Correct,
    /// A commit is fenced by the version alone.
    NoEpochInCommit,
    /// A commit's fence is read before its transaction, and nothing is checked in that.
    FenceBeforeTransaction,
    /// Heartbeats renew whatever the row says is this worker's.
    HeartbeatByWorker,
    /// A lease is given back by naming the session alone.
    ReleaseWithoutEpoch,
    /// A claim of an expired lease looks first and takes later, without looking again.
    ClaimWithoutRecheck,
    /// Runs are claimed where they are queued, and nobody looks for leases that have expired.
    NoTakeover,
    /// A step that lost its lease is loaded anew and stored as if it were the new holder's.
    LostLeaseTriedAnew,
    /// A step whose answer was lost is sent again under a new id and the newest version.
    ResentUnderNewId,
    /// A step whose answer was lost is taken for stored.
    DoubtTakenForSuccess,
    /// The effect begins before the commit that records its start.
    EffectBeforeCommit,
    /// A call that was running when its worker died begins again.
    RunningCallBeginsAgain,
    /// An effect begins without a look at the lease's deadline.
    NoDeadline,
    /// The deadline is counted from when the answer arrives.
    DeadlineFromAnswer,
    /// The deadline is the database's time, read by a wall clock that is behind.
    DeadlineByWallClock,
}

/// What is stored of the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Call {
    /// Nobody began it.
    Ready,
    /// It is recorded as begun.
    Running,
    /// It has a result.
    Completed,
    /// It began and nobody knows how far it got.
    Orphaned,
}

/// The run's row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Row {
    /// It waits to be claimed.
    Queued,
    /// Somebody holds it.
    Claimed {
        /// The lease.
        epoch: u8,
        /// Who holds it.
        worker: u8,
        /// What is left of it by the database's clock.
        left: u8,
    },
    /// The run has ended.
    Gone,
}

/// What a commit stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Step {
    /// The call begins.
    Start,
    /// It has its result, and the run ends.
    Finish,
    /// It was begun under a lease that is gone, and the run ends.
    Orphan,
}

/// A message to the database that nobody can call back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Message {
    /// Store a step. Lease and version are also its id.
    Commit {
        /// Whose.
        worker: u8,
        /// The lease.
        epoch: u8,
        /// The version that the step read.
        version: u8,
        /// What.
        step: Step,
        /// Whether its fence was found to hold ahead of its transaction: a mistake.
        passed: bool,
    },
    /// Give the lease back.
    Release {
        /// Which.
        epoch: u8,
    },
}

/// Where a worker is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Phase {
    /// It has nothing.
    Idle,
    /// Its claim is on its way, and so much is left of the TTL since it was sent.
    Asking(u8),
    /// The answer is on its way: the lease's epoch, and what is left.
    Granted(u8, u8),
    /// It holds the run and has yet to load the session.
    Loading,
    /// The commit of a step that read this version is on its way.
    Committing(u8, Step),
    /// The connection died under that commit.
    Doubting(u8, Step),
    /// The start is stored, this is the version now: the effect may begin.
    Started(u8),
    /// The effect is under way.
    Acting(u8),
}

/// A heartbeat on its way to the database.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Beat {
    /// The lease that it names.
    pub epoch: u8,
    /// What is left of the TTL since it was sent.
    pub left: u8,
}

/// A worker's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Worker {
    /// Where it is.
    pub phase: Phase,
    /// The lease it holds, or 0.
    pub epoch: u8,
    /// What is left of the lease by its own clock.
    pub left: u8,
    /// Whether a heartbeat said that it is gone.
    pub lost: bool,
    /// Its heartbeat.
    pub beat: Option<Beat>,
}

/// What is true of the history so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct History {
    /// How often the effect began.
    pub begun: u8,
    /// It began although its start wasn't stored.
    pub begun_unrecorded: bool,
    /// It began when the row no longer named its worker's lease.
    pub begun_without_lease: bool,
    /// A step was stored under a lease that the row didn't name.
    pub stored_without_lease: bool,
    /// Two steps were stored on the same version.
    pub version_written_twice: bool,
    /// How often the start was stored.
    pub starts: u8,
    /// Ticks since a claim was granted whose answer nobody heard, while its lease is in the row.
    pub unheard: Option<u8>,
}

/// Everything at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct State {
    /// The session's version.
    pub version: u8,
    /// Its call.
    pub call: Call,
    /// Which commit was stored last: lease and the version that it read.
    pub last_commit: Option<(u8, u8)>,
    /// Its run.
    pub row: Row,
    /// The workers.
    pub workers: [Worker; WORKERS],
    /// Messages to the database, in no order.
    pub wire: Vec<Message>,
    /// Faults that may still happen.
    pub faults: u8,
    /// Whether a worker may still be told to leave.
    pub leave: bool,
    /// What happened.
    pub history: History,
}

actions! {
    /// What may happen. Numbers are those of workers, or of places in the wire.
    pub enum Action {
        real {
            /// A tick of everybody's clock.
            Tick,
            /// A worker sends a claim.
            AskForRun(usize),
            /// The database grants it: one statement that locks, looks and takes.
            GrantRun(usize),
            /// The answer to a granted claim is lost.
            LoseGrant(usize),
            /// The answer arrives.
            TakeLease(usize),
            /// The holder loads the session and sends the commit of what it decides.
            Load(usize),
            /// The database carries a message out, and its sender hears of it.
            Deliver(usize),
            /// The database carries a commit out, and the answer is lost.
            LoseAnswer(usize),
            /// A commit is lost.
            LoseCommit(usize),
            /// The sender gives up waiting for a commit that is still on its way.
            TimeOut(usize),
            /// The sender looks at what became of it.
            Inquire(usize),
            /// The effect begins, after a look at the lease's deadline.
            Begin(usize),
            /// The effect ends, and the commit of its end is sent.
            End(usize),
            /// A heartbeat is sent.
            SendBeat(usize),
            /// The database renews the lease that it names, or says that it is gone. When the worker hears
            /// of that changes nothing, since the new deadline counts from when it was sent.
            Renew(usize),
            /// The same, and the answer is lost.
            RenewUnheard(usize),
            /// A heartbeat is lost.
            LoseBeat(usize),
            /// The holder notices that its lease is gone.
            Drop(usize),
            /// The holder is told to leave and sends its lease back.
            Leave(usize),
            /// A worker's process dies.
            Die(usize),
        }
        mistaken {
            /// A commit's fence is looked at ahead of its transaction.
            LookAtFence(usize),
        }
    }
}

/// The model.
#[derive(Debug, Clone, Copy)]
pub struct Lease(pub Variant);

impl Model for Lease {
    type State = State;
    type Action = Action;

    fn start(&self) -> State {
        let idle = Worker { phase: Phase::Idle, epoch: 0, left: 0, lost: false, beat: None };
        State {
            version: 1,
            call: Call::Ready,
            last_commit: None,
            row: Row::Queued,
            workers: [idle; WORKERS],
            wire: Vec::new(),
            faults: FAULTS,
            leave: true,
            history: History::default(),
        }
    }

    fn actions(&self, state: &State) -> Vec<Action> {
        self.possible(state)
    }

    fn after(&self, state: &State, action: Action) -> State {
        let mut after = state.clone();
        self.happen(&mut after, action);
        if self.0 == Variant::Correct {
            // Nothing tells one worker from the other. Traces of mistakes are for reading, and keep their names.
            after.order_workers();
        }
        after.number_anew();
        after
    }

    fn promises(&self) -> Vec<Promise<State>> {
        vec![
            Promise::always("a version has one writer", |state| !state.history.version_written_twice),
            Promise::always("a stale holder stores nothing", |state| !state.history.stored_without_lease),
            Promise::always("a step is stored once", |state| state.history.starts <= 1),
            Promise::always("an effect begins at most once", |state| state.history.begun <= 1),
            Promise::always("an effect begins after its start is stored", |state| {
                !state.history.begun_unrecorded
            }),
            Promise::always("an effect begins under its lease", |state| !state.history.begun_without_lease),
            Promise::always("a claim that nobody heard of ends within a TTL", |state| {
                match (state.row, state.history.unheard) {
                    (Row::Claimed { left, .. }, Some(ticks)) => left == 0 || left + ticks <= TTL,
                    _ => true,
                }
            }),
            Promise::always_possible("the run can be finished", |state| state.row == Row::Gone),
        ]
    }
}
