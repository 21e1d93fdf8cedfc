//! Waiting for a session without holding a database connection.

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use holdfast_engine::ids::SessionId;
use holdfast_store::sessions::{Pulse, pulses};
use tokio::time::{Instant, sleep_until};

use crate::{
    error::Answer,
    hub::{Seen, Watch},
    limits,
    metrics::Counted,
    state::Api,
};

/// What is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Until {
    /// No run is active, or it sleeps for longer than the waiting would last.
    Stopped,
    /// Nothing at all is being worked on.
    Quiet,
}

impl Until {
    fn reached(self, pulse: &Pulse, patience_ends: DateTime<Utc>) -> bool {
        match self {
            _ if pulse.deleted => true,
            Self::Stopped => !pulse.active || pulse.wakes_at.is_some_and(|at| at > patience_ends),
            Self::Quiet => !pulse.busy,
        }
    }
}

/// Waits until a session is where it should be, `patience` is over or the node closes.
///
/// What is already on its way here may be from before the command that is waited for, so being there
/// counts only once the database has said so after this began.
pub(crate) async fn until(api: &Api, id: SessionId, until: Until, patience: Duration) -> Answer<()> {
    // What is waited for has been accepted, so one waiter too many is answered at once, not refused.
    let Ok(_counted) = Counted::up(&api.metrics.waiters, limits::WAITERS) else { return Ok(()) };
    let mut watch = api.hub.watch(id);
    let deadline = Instant::now() + patience;
    let patience_ends = TimeDelta::from_std(patience)
        .ok()
        .and_then(|patience| Utc::now().checked_add_signed(patience))
        .unwrap_or(DateTime::<Utc>::MAX_UTC);
    loop {
        let there = match pulses(&api.store, &[id.0]).await?.first() {
            Some(pulse) => until.reached(pulse, patience_ends),
            None => true,
        };
        if there {
            return Ok(());
        }
        tokio::select! {
            () = likely(&mut watch, until, patience_ends) => {}
            () = sleep_until(deadline) => return Ok(()),
            () = api.closing.cancelled() => return Ok(()),
        }
    }
}

/// Waits until the hub has seen the session where it should be.
async fn likely(watch: &mut Watch, until: Until, patience_ends: DateTime<Utc>) {
    loop {
        match watch.next().await {
            Seen::At(pulse) if !until.reached(&pulse, patience_ends) => {}
            Seen::Nowhere => {}
            Seen::At(_) | Seen::Gone => return,
        }
    }
}
