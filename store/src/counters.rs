//! What the store counts in this process, for whoever watches it: plain numbers, so that the store depends on
//! no library of metrics. One observation is one or two atomic additions.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use crate::notify::Channel;

/// Why a call of the database failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// 40001; the transaction is tried again.
    Serialization,
    /// 40P01; the transaction is tried again.
    Deadlock,
    /// 55P03: a lock wasn't granted in time; the transaction is tried again.
    LockTimeout,
    /// 57014: a statement took too long, or was cancelled.
    StatementTimeout,
    /// No connection of the pool became free in time.
    PoolTimeout,
    /// The server can't be reached, went away, is starting or closes.
    Connection,
    /// 53300.
    TooManyConnections,
    /// 53100.
    DiskFull,
    /// 53200.
    OutOfMemory,
    /// 25006: a primary has become a standby.
    ReadOnly,
    /// Class 23: what was written contradicts a constraint.
    Constraint,
    /// Anything else.
    Other,
}

impl ErrorKind {
    /// All of them, in the order of their declaration.
    pub const ALL: [Self; 12] = [
        Self::Serialization,
        Self::Deadlock,
        Self::LockTimeout,
        Self::StatementTimeout,
        Self::PoolTimeout,
        Self::Connection,
        Self::TooManyConnections,
        Self::DiskFull,
        Self::OutOfMemory,
        Self::ReadOnly,
        Self::Constraint,
        Self::Other,
    ];

    /// Its name as a label.
    pub fn word(self) -> &'static str {
        match self {
            Self::Serialization => "serialization",
            Self::Deadlock => "deadlock",
            Self::LockTimeout => "lock_timeout",
            Self::StatementTimeout => "statement_timeout",
            Self::PoolTimeout => "pool_timeout",
            Self::Connection => "connection",
            Self::TooManyConnections => "too_many_connections",
            Self::DiskFull => "disk_full",
            Self::OutOfMemory => "out_of_memory",
            Self::ReadOnly => "read_only",
            Self::Constraint => "constraint",
            Self::Other => "other",
        }
    }

    /// What an SQLSTATE is counted as. `None` of the code that statements get which were sent behind a failed
    /// one: that one is counted.
    pub fn of_code(code: &str) -> Option<Self> {
        Some(match code {
            "25P02" => return None,
            "40001" => Self::Serialization,
            "40P01" => Self::Deadlock,
            "55P03" => Self::LockTimeout,
            "57014" => Self::StatementTimeout,
            "53300" => Self::TooManyConnections,
            "53100" => Self::DiskFull,
            "53200" => Self::OutOfMemory,
            "25006" => Self::ReadOnly,
            "57P01" | "57P02" | "57P03" | "57P05" | "25P03" => Self::Connection,
            code if code.starts_with("08") => Self::Connection,
            code if code.starts_with("23") => Self::Constraint,
            _ => Self::Other,
        })
    }
}

/// A count that only rises.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    pub(crate) fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Buckets of a histogram at the most, that of everything larger included.
const BUCKETS: usize = 16;

/// Whole numbers by size.
#[derive(Debug)]
pub(crate) struct Histogram {
    bounds: &'static [u64],
    counts: [Counter; BUCKETS],
    sum: Counter,
}

/// What a histogram has observed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Observed {
    /// Each bucket's upper bound, included, and how many observations it and those before it have.
    pub buckets: Vec<(u64, u64)>,
    /// How many observations there are.
    pub count: u64,
    /// Their sum.
    pub sum: u64,
}

impl Histogram {
    const fn new(bounds: &'static [u64]) -> Self {
        assert!(bounds.len() < BUCKETS, "one bucket is for what is larger");
        Self { bounds, counts: [const { Counter::new() }; BUCKETS], sum: Counter::new() }
    }

    pub(crate) fn observe(&self, value: u64) {
        let bucket = self.bounds.partition_point(|bound| *bound < value);
        self.counts[bucket].add(1);
        self.sum.add(value);
    }

    fn get(&self) -> Observed {
        let mut count = 0;
        let mut buckets = Vec::with_capacity(self.bounds.len());
        for (bound, counter) in self.bounds.iter().zip(&self.counts) {
            count += counter.get();
            buckets.push((*bound, count));
        }
        count += self.counts[self.bounds.len()].get();
        Observed { buckets, count, sum: self.sum.get() }
    }
}

/// Bounds of waits for a connection, in microseconds.
const WAITS: &[u64] =
    &[50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000, 5_000_000];

/// Bounds of the sizes of groups; the last is the largest that there is.
const GROUPS: &[u64] = &[1, 2, 4, 8, 16, 32, 64];

/// The counters of this process, whichever of its stores counts.
pub(crate) static COUNTERS: Counters = Counters::new();

#[derive(Debug)]
pub(crate) struct Counters {
    errors: [Counter; ErrorKind::ALL.len()],
    pub(crate) events_written: Counter,
    pub(crate) group_steps: Histogram,
    pub(crate) groups_split: Counter,
    pub(crate) continuations_expired: Counter,
    pub(crate) refused_backlog: Counter,
    pub(crate) refused_mailbox: Counter,
    pub(crate) hot_waits: Histogram,
    pub(crate) lease_waits: Histogram,
    heard: [Counter; Channel::ALL.len()],
    pub(crate) listener_connections: Counter,
}

impl Counters {
    const fn new() -> Self {
        Self {
            errors: [const { Counter::new() }; ErrorKind::ALL.len()],
            events_written: Counter::new(),
            group_steps: Histogram::new(GROUPS),
            groups_split: Counter::new(),
            continuations_expired: Counter::new(),
            refused_backlog: Counter::new(),
            refused_mailbox: Counter::new(),
            hot_waits: Histogram::new(WAITS),
            lease_waits: Histogram::new(WAITS),
            heard: [const { Counter::new() }; Channel::ALL.len()],
            listener_connections: Counter::new(),
        }
    }

    pub(crate) fn failed(&self, kind: ErrorKind) {
        self.errors[kind as usize].add(1);
    }

    pub(crate) fn heard(&self, channel: Channel) {
        self.heard[channel as usize].add(1);
    }
}

/// A duration as histograms of waits take it.
pub(crate) fn micros(took: Duration) -> u64 {
    u64::try_from(took.as_micros()).unwrap_or(u64::MAX)
}

/// Everything that was counted up to now.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// Failed calls of the database, of every kind.
    pub errors: [(ErrorKind, u64); ErrorKind::ALL.len()],
    /// Events of sessions that were committed.
    pub events_written: u64,
    /// Steps that each transaction of a committer carried.
    pub group_steps: Observed,
    /// Groups of steps that had to be stored singly.
    pub groups_split: u64,
    /// Deferred calls that were expired here.
    pub continuations_expired: u64,
    /// Requests for runs that a full queue refused.
    pub refused_backlog: u64,
    /// Letters that a full mailbox refused.
    pub refused_mailbox: u64,
    /// Microseconds that connections of the hot path were waited for.
    pub hot_waits: Observed,
    /// Microseconds that connections for leases were waited for.
    pub lease_waits: Observed,
    /// Hints heard, by channel.
    pub heard: [(Channel, u64); Channel::ALL.len()],
    /// Connections that listeners opened.
    pub listener_connections: u64,
}

/// Reads the counters. They are read one after the other: what happens meanwhile may be in some of them.
pub fn snapshot() -> Snapshot {
    let of = &COUNTERS;
    Snapshot {
        errors: ErrorKind::ALL.map(|kind| (kind, of.errors[kind as usize].get())),
        events_written: of.events_written.get(),
        group_steps: of.group_steps.get(),
        groups_split: of.groups_split.get(),
        continuations_expired: of.continuations_expired.get(),
        refused_backlog: of.refused_backlog.get(),
        refused_mailbox: of.refused_mailbox.get(),
        hot_waits: of.hot_waits.get(),
        lease_waits: of.lease_waits.get(),
        heard: Channel::ALL.map(|channel| (channel, of.heard[channel as usize].get())),
        listener_connections: of.listener_connections.get(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_belongs_to_its_bucket_and_buckets_add_up() {
        let histogram = Histogram::new(&[1, 2, 4]);
        for value in [0, 1, 2, 3, 4, 5, 100] {
            histogram.observe(value);
        }
        let seen = histogram.get();
        assert_eq!(seen.buckets, [(1, 2), (2, 3), (4, 5)]);
        assert_eq!((seen.count, seen.sum), (7, 115));
    }

    #[test]
    fn kinds_stand_in_the_order_that_counts_them() {
        for (place, kind) in ErrorKind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, place, "{kind:?}");
        }
        for (place, channel) in Channel::ALL.into_iter().enumerate() {
            assert_eq!(channel as usize, place, "{channel:?}");
        }
    }

    #[test]
    fn codes_are_counted_by_what_they_ask_of_an_operator() {
        for (code, kind) in [
            ("40001", ErrorKind::Serialization),
            ("53100", ErrorKind::DiskFull),
            ("08006", ErrorKind::Connection),
            ("57P01", ErrorKind::Connection),
            ("23505", ErrorKind::Constraint),
            ("42P01", ErrorKind::Other),
        ] {
            assert_eq!(ErrorKind::of_code(code), Some(kind), "{code}");
        }
        assert_eq!(ErrorKind::of_code("25P02"), None, "the statement before it is counted");
    }
}
