//! What befalls the nodes.

use std::{fmt, time::Duration};

use super::dice::Dice;

/// Between two faults.
pub(super) const BETWEEN_FAULTS: Duration = Duration::from_millis(700);

/// What may befall the nodes and their database.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// A worker is killed and another one started.
    KillWorker,
    /// An API node is killed and another one started.
    KillApi,
    /// The scheduler is killed and another one started.
    KillScheduler,
    /// A worker stands still for longer than its leases last.
    FreezeWorker,
    /// An API node stands still.
    FreezeApi,
    /// The scheduler stands still.
    FreezeScheduler,
    /// A worker is told to leave, and another one started.
    DrainWorker,
    /// An API node is told to leave after another one has taken its place.
    DrainApi,
    /// Some connections to the database are ended by the server.
    EndConnections,
    /// All of them are.
    EndAllConnections,
    /// Those by which nodes hear of what happens are.
    EndListeners,
    /// All connections of one node are cut between it and the database.
    CutWire,
    /// What one node and the database send each other arrives late.
    SlowWire,
    /// What they send each other doesn't arrive until later than leases last.
    StallWire,
    /// The server has no connection left for some nodes that need one.
    FillServer,
    /// The server is restarted in order.
    RestartFast,
    /// The server crashes and recovers.
    RestartImmediate,
}

/// One round of faults: every kind befalls the nodes, the likelier ones more often.
const ROUND: [(Fault, usize); 17] = [
    (Fault::KillWorker, 4),
    (Fault::KillApi, 1),
    (Fault::KillScheduler, 1),
    (Fault::FreezeWorker, 2),
    (Fault::FreezeApi, 1),
    (Fault::FreezeScheduler, 1),
    (Fault::DrainWorker, 2),
    (Fault::DrainApi, 1),
    (Fault::EndConnections, 3),
    (Fault::EndAllConnections, 1),
    (Fault::EndListeners, 2),
    (Fault::CutWire, 3),
    (Fault::SlowWire, 2),
    (Fault::StallWire, 2),
    (Fault::FillServer, 1),
    (Fault::RestartFast, 1),
    (Fault::RestartImmediate, 1),
];

impl Fault {
    /// How tables call it.
    pub fn name(self) -> &'static str {
        match self {
            Fault::KillWorker => "worker killed (SIGKILL)",
            Fault::KillApi => "API node killed (SIGKILL)",
            Fault::KillScheduler => "scheduler killed (SIGKILL)",
            Fault::FreezeWorker => "worker stopped past its leases (SIGSTOP)",
            Fault::FreezeApi => "API node stopped (SIGSTOP)",
            Fault::FreezeScheduler => "scheduler stopped (SIGSTOP)",
            Fault::DrainWorker => "worker drained (SIGTERM)",
            Fault::DrainApi => "API node drained (SIGTERM)",
            Fault::EndConnections => "some connections ended by the server",
            Fault::EndAllConnections => "all connections ended by the server",
            Fault::EndListeners => "all listeners ended by the server",
            Fault::CutWire => "a node's connections cut",
            Fault::SlowWire => "a node's connections slowed down",
            Fault::StallWire => "a node's connections stalled past its leases",
            Fault::FillServer => "server out of connections",
            Fault::RestartFast => "Postgres restarted (fast)",
            Fault::RestartImmediate => "Postgres crashed (immediate)",
        }
    }

    /// Whether whoever brings it needs a connection to the server, which then can't be full.
    pub(super) fn needs_connection(self) -> bool {
        matches!(
            self,
            Self::EndConnections
                | Self::EndAllConnections
                | Self::EndListeners
                | Self::FillServer
                | Self::RestartFast
                | Self::RestartImmediate
        )
    }

    /// One round, in an order of chance.
    pub(super) fn round(dice: &mut Dice) -> Vec<Fault> {
        let mut deck: Vec<Fault> =
            ROUND.iter().flat_map(|(fault, times)| std::iter::repeat_n(*fault, *times)).collect();
        dice.shuffle(&mut deck);
        deck
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
