//! Faults that pass by themselves, whatever else goes on meanwhile.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};
use tokio::time::Instant;
use tokio_postgres::Client as Postgres;
use tokio_util::task::AbortOnDropHandle;

use crate::wire::{Weather, Wire};

/// How often it is seen to whose time has come.
const LOOK: Duration = Duration::from_millis(50);

/// What passes by itself.
pub(super) enum Spell {
    /// A node stands still: the place of it, and its process.
    Frozen(usize, Pid),
    /// A wire has bad weather.
    Weather(Arc<Wire>),
    /// The server's connections are taken.
    Full(Vec<Postgres>),
}

impl Spell {
    fn end(self) {
        match self {
            // A process that was killed meanwhile needs nothing.
            Self::Frozen(_, pid) => drop(kill_process(pid, Signal::CONT)),
            Self::Weather(wire) => wire.set(Weather::Fair),
            Self::Full(taken) => drop(taken),
        }
    }
}

type Running = Arc<Mutex<Vec<(Instant, Spell)>>>;

/// The spells that last.
pub(super) struct Spells {
    running: Running,
    _ending: AbortOnDropHandle<()>,
}

impl Spells {
    /// None yet.
    pub(super) fn none() -> Self {
        let running = Running::default();
        let shared = Arc::clone(&running);
        let ending = tokio::spawn(async move {
            let mut tick = tokio::time::interval(LOOK);
            loop {
                let now = tick.tick().await;
                lift(&shared, |until, _| until <= now);
            }
        });
        Self { running, _ending: AbortOnDropHandle::new(ending) }
    }

    /// Begins one that lasts for a while.
    pub(super) fn cast(&self, lasts: Duration, spell: Spell) {
        lock(&self.running).push((Instant::now() + lasts, spell));
    }

    /// Ends those of a kind now.
    pub(super) fn lift(&self, which: impl Fn(&Spell) -> bool) {
        lift(&self.running, |_, spell| which(spell));
    }

    /// Whether the node of a place stands still.
    pub(super) fn is_frozen(&self, place: usize) -> bool {
        lock(&self.running).iter().any(|(_, spell)| matches!(spell, Spell::Frozen(at, _) if *at == place))
    }
}

fn lock(running: &Running) -> MutexGuard<'_, Vec<(Instant, Spell)>> {
    running.lock().unwrap_or_else(PoisonError::into_inner)
}

fn lift(running: &Running, which: impl Fn(Instant, &Spell) -> bool) {
    let over = {
        let mut running = lock(running);
        let (over, rest) = std::mem::take(&mut *running)
            .into_iter()
            .partition::<Vec<_>, _>(|(until, spell)| which(*until, spell));
        *running = rest;
        over
    };
    for (_, spell) in over {
        spell.end();
    }
}
