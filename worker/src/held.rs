//! The leases that a worker holds in memory, and how their tasks hear of what becomes of them.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use holdfast_engine::ids::SessionId;
use holdfast_store::claim::{self, Arriving, Beat, Lease};
use tokio::{
    sync::{OwnedSemaphorePermit, watch},
    time::Instant,
};

use crate::{Shared, metrics};

/// What a task knows of its lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Standing {
    /// The lease ends here, by this process's clock, unless it is renewed.
    pub(crate) until: Instant,
    /// The newest mail that woke the run.
    pub(crate) wake_seq: i64,
    /// Whether it is gone.
    pub(crate) lost: bool,
}

struct Entry {
    epoch: i64,
    /// A commit that releases the run is under way: its fence decides whether the lease stands, and a
    /// heartbeat that finds the row gone has nothing to say.
    releasing: bool,
    standing: watch::Sender<Standing>,
}

/// All leases of a worker, by session.
#[derive(Default, Clone)]
pub(crate) struct Held(Arc<Mutex<HashMap<SessionId, Entry>>>);

/// A lease with its slot. Dropping it ends the heartbeats for it and, unless the run is known to be
/// over here, gives the lease back.
pub(crate) struct Slot {
    pub(crate) lease: Lease,
    pub(crate) standing: watch::Receiver<Standing>,
    /// When the claim that brought it was sent, and when it was answered.
    pub(crate) claimed: (Instant, Instant),
    /// The session, if it was read along with the claim.
    pub(crate) arriving: Option<Arriving>,
    shared: Arc<Shared>,
    over: bool,
    delay: Duration,
    // Returned last: a slot is free when nothing is left of its lease.
    _permit: OwnedSemaphorePermit,
}

impl Held {
    fn lock(&self) -> MutexGuard<'_, HashMap<SessionId, Entry>> {
        // A panic while it is locked can't leave it half changed: every change is one call.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a claimed lease into memory. `asked_at` is when the claim was sent: the lease can't end
    /// later than one TTL from there.
    pub(crate) fn take(
        shared: &Arc<Shared>,
        (lease, arriving): (Lease, Option<Arriving>),
        asked_at: Instant,
        permit: OwnedSemaphorePermit,
    ) -> Slot {
        let standing = Standing { until: asked_at + shared.lease_ttl, wake_seq: lease.wake_seq, lost: false };
        let receiver = shared.held.enter(lease.session, lease.epoch, standing);
        metrics::slot_taken();
        Slot {
            lease,
            standing: receiver,
            claimed: (asked_at, Instant::now()),
            arriving,
            shared: Arc::clone(shared),
            over: false,
            delay: Duration::ZERO,
            _permit: permit,
        }
    }

    /// Holds a lease from now on. An older one of the same run is gone, unless the commit that ends its run is under
    /// way or done: then that commit's fence decides, and the run that it ended may be here again before its task
    /// has gone.
    fn enter(&self, session: SessionId, epoch: i64, standing: Standing) -> watch::Receiver<Standing> {
        let (sender, receiver) = watch::channel(standing);
        let entry = Entry { epoch, releasing: false, standing: sender };
        if let Some(older) = self.lock().insert(session, entry).filter(|older| !older.releasing) {
            older.standing.send_modify(|standing| standing.lost = true);
        }
        receiver
    }

    /// Says whether a commit that releases a run is under way.
    fn releasing(&self, session: SessionId, epoch: i64, releasing: bool) {
        let mut held = self.lock();
        if let Some(entry) = held.get_mut(&session).filter(|entry| entry.epoch == epoch) {
            entry.releasing = releasing;
        }
    }

    /// Holds a lease no longer.
    fn forget(&self, session: SessionId, epoch: i64) {
        let mut held = self.lock();
        if held.get(&session).is_some_and(|entry| entry.epoch == epoch) {
            held.remove(&session);
        }
    }

    /// Names of all leases.
    pub(crate) fn list(&self) -> Vec<(SessionId, i64)> {
        self.lock().iter().map(|(session, entry)| (*session, entry.epoch)).collect()
    }

    /// Whether a session's run is held here, and not about to be released.
    pub(crate) fn keeps(&self, session: SessionId) -> bool {
        self.lock().get(&session).is_some_and(|entry| !entry.releasing)
    }

    /// Whether a session's run is held here.
    pub(crate) fn has(&self, session: SessionId) -> bool {
        self.lock().contains_key(&session)
    }

    /// Tells the tasks what a heartbeat learned: the leases in `asked` that are missing from `beats`
    /// are gone.
    pub(crate) fn renewed(
        &self,
        asked: &[(SessionId, i64)],
        beats: &[Beat],
        until: Instant,
    ) -> Vec<SessionId> {
        let beats: HashMap<(SessionId, i64), &Beat> =
            beats.iter().map(|beat| ((beat.session, beat.epoch), beat)).collect();
        let held = self.lock();
        let mut lost = Vec::new();
        for (session, epoch) in asked {
            let Some(entry) = held.get(session).filter(|entry| entry.epoch == *epoch) else { continue };
            match beats.get(&(*session, *epoch)) {
                Some(beat) => entry.standing.send_modify(|standing| {
                    if beat.renewed {
                        standing.until = until;
                    }
                    standing.wake_seq = standing.wake_seq.max(beat.wake_seq);
                }),
                None if entry.releasing => {}
                None => {
                    entry.standing.send_modify(|standing| standing.lost = true);
                    lost.push(*session);
                }
            }
        }
        lost
    }

    /// Tells the tasks what woke their runs, and nothing of their leases.
    pub(crate) fn heard(&self, beats: &[Beat]) {
        let held = self.lock();
        for beat in beats {
            if let Some(entry) = held.get(&beat.session).filter(|entry| entry.epoch == beat.epoch) {
                entry
                    .standing
                    .send_modify(|standing| standing.wake_seq = standing.wake_seq.max(beat.wake_seq));
            }
        }
    }

    /// Ends the leases whose time is over by this process's clock. Returns whose.
    pub(crate) fn expire(&self, now: Instant) -> Vec<SessionId> {
        let held = self.lock();
        let over = held.iter().filter(|(_, entry)| {
            let standing = *entry.standing.borrow();
            !standing.lost && standing.until <= now
        });
        over.map(|(session, entry)| {
            entry.standing.send_modify(|standing| standing.lost = true);
            *session
        })
        .collect()
    }
}

impl Slot {
    /// What the worker's tasks share.
    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// The run has ended, is parked or belongs to somebody else: there is nothing to give back.
    pub(crate) fn over(mut self) {
        self.over = true;
    }

    /// Whether an effect may begin: the lease still stands by this process's clock.
    pub(crate) fn stands(&self) -> bool {
        let standing = *self.standing.borrow();
        !standing.lost && Instant::now() < standing.until
    }

    /// Until when the lease stands, as far as is known.
    pub(crate) fn until(&self) -> Instant {
        self.standing.borrow().until
    }

    /// Waits until the lease is gone.
    pub(crate) async fn lost(&self) {
        let mut standing = self.standing.clone();
        loop {
            let now = *standing.borrow_and_update();
            if now.lost || now.until <= Instant::now() {
                return;
            }
            tokio::select! {
                changed = standing.changed() => if changed.is_err() {
                    // The sender goes with the entry, which goes with the slot.
                    std::future::pending::<()>().await;
                },
                () = tokio::time::sleep_until(now.until) => {}
            }
        }
    }

    /// Says whether a commit that releases the run is under way.
    pub(crate) fn releasing(&self, releasing: bool) {
        self.shared.held.releasing(self.lease.session, self.lease.epoch, releasing);
    }

    /// Gives the lease back, but so that the run waits before it is claimed again.
    pub(crate) fn put_off(mut self, delay: Duration) {
        self.delay = delay;
    }

    /// Another process renews the lease from here on, and gives it back: what is kept is the place.
    pub(crate) fn hand_over(&mut self) {
        self.shared.held.forget(self.lease.session, self.lease.epoch);
        self.over = true;
    }

    /// Waits for mail above `cursor` that woke the run.
    pub(crate) async fn woken(&self, cursor: i64) {
        let mut standing = self.standing.clone();
        if standing.wait_for(|standing| standing.wake_seq > cursor).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        metrics::slot_freed();
        let name = (self.lease.session, self.lease.epoch);
        self.shared.held.forget(name.0, name.1);
        if self.lease.throttled {
            self.shared.freed.notify_one();
        }
        if self.over || self.standing.borrow().lost {
            return;
        }
        // What made this task panic may do so again: not at once, then.
        let panic = std::thread::panicking();
        let delay = if panic { AFTER_FAULT } else { self.delay };
        let store = self.shared.store.clone();
        self.shared.drives.spawn(async move {
            match claim::release(&store, &[name], delay, panic).await {
                Ok(_) => store.at("run.released").await,
                Err(error) if error.is_unavailable() => {
                    tracing::debug!(%error, session_id = %name.0, "couldn't give a lease back; it expires");
                }
                Err(error) => {
                    tracing::warn!(%error, session_id = %name.0, "couldn't give a lease back; it expires");
                }
            }
        });
    }
}

/// How long a run waits whose task panicked, or that can't be driven here.
pub(crate) const AFTER_FAULT: Duration = Duration::from_secs(5);

/// How often leases are renewed.
pub(crate) fn beat_every(ttl: Duration) -> Duration {
    ttl / 3
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    #[tokio::test]
    async fn a_run_that_ended_here_is_not_lost_to_its_successor() {
        let (held, session) = (Held::default(), SessionId(Uuid::from_u128(1)));
        let until = Instant::now() + Duration::from_secs(1);
        let standing = Standing { until, wake_seq: 1, lost: false };
        let first = held.enter(session, 1, standing);
        held.releasing(session, 1, true);
        // The commit has ended the run, mail has brought the next one, and the claim is quicker than the task.
        let second = held.enter(session, 2, standing);
        assert!(!first.borrow().lost && !second.borrow().lost);
        assert_eq!(held.list(), [(session, 2)]);
        // A lease that nothing releases is gone when another claim brings the run again.
        let _third = held.enter(session, 3, standing);
        assert!(second.borrow().lost);
    }

    #[tokio::test]
    async fn a_run_about_to_be_released_is_kept_no_longer() {
        let (held, session) = (Held::default(), SessionId(Uuid::from_u128(1)));
        assert!(!held.keeps(session) && !held.has(session));
        let until = Instant::now() + Duration::from_secs(1);
        let _first = held.enter(session, 1, Standing { until, wake_seq: 1, lost: false });
        assert!(held.keeps(session), "what is hinted of it, its task hears from its own reads");
        held.releasing(session, 1, true);
        assert!(!held.keeps(session) && held.has(session), "it may be back as another run");
        // The commit found mail that came in between.
        held.releasing(session, 1, false);
        assert!(held.keeps(session));
        held.forget(session, 1);
        assert!(!held.keeps(session) && !held.has(session));
    }
}
