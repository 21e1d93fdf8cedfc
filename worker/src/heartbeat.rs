//! One statement renews all leases of a worker; its answer says which are gone and what woke the rest.

use std::{collections::HashSet, sync::Arc};

use futures::FutureExt;
use holdfast_engine::ids::SessionId;
use holdfast_store::{
    StoreError, claim,
    listen::{Heard, Listener, Subscription},
    notify::Channel,
};
use tokio::{
    task::JoinSet,
    time::{Duration, Instant},
};
use tokio_util::sync::CancellationToken;

use crate::{
    Shared,
    held::beat_every,
    metrics::{self, Beat},
};

/// How soon a failed heartbeat is tried again.
const RETRY: Duration = Duration::from_millis(250);

/// How long looking into hints may keep the beat waiting.
const LOOK_LIMIT: Duration = Duration::from_millis(500);

/// Rows that are waited for at once.
const WAITED_FOR: usize = 4;

/// Leases whose rows were locked at two looks in a row, each of which is waited for: a session that many write to
/// may be locked at every look for as long as its lease lasts.
#[derive(Default)]
struct Stubborn {
    names: HashSet<(SessionId, i64)>,
    waiting: JoinSet<(SessionId, i64)>,
}

impl Stubborn {
    /// Waits for more of them. Returns those for which there is no room.
    fn wait_for(&mut self, shared: &Arc<Shared>, leases: Vec<(SessionId, i64)>) -> Vec<(SessionId, i64)> {
        let mut left = Vec::new();
        for lease in leases {
            if self.names.contains(&lease) {
                continue;
            }
            if self.names.len() >= WAITED_FOR {
                left.push(lease);
                continue;
            }
            self.names.insert(lease);
            let shared = Arc::clone(shared);
            self.waiting.spawn(async move {
                let sent = Instant::now();
                let renewing = claim::renew(&shared.store, lease, shared.lease_ttl);
                // Of what fails nothing is known: the next beat looks again.
                if let Ok(Ok(beats)) = tokio::time::timeout(shared.lease_ttl, renewing).await {
                    tell(&shared, &[lease], &beats, sent);
                }
                lease
            });
        }
        left
    }

    /// Waits until one of them has been renewed, or not; for ever without any.
    async fn ended(&mut self) {
        match self.waiting.join_next().await {
            Some(Ok(lease)) => drop(self.names.remove(&lease)),
            // Nobody knows whose: all of them may be waited for anew.
            Some(Err(_)) => self.names.clear(),
            None => std::future::pending().await,
        }
    }
}

/// How well leases are kept.
struct Keeping {
    /// When a heartbeat that succeeded was last sent.
    since: Instant,
    /// Whether the last one failed.
    failing: bool,
    /// The most leases that heartbeats have failed for since.
    at_risk: usize,
    /// Whether it was said that leases can't be kept.
    told: bool,
}

impl Keeping {
    fn new() -> Self {
        Self { since: Instant::now(), failing: false, at_risk: 0, told: false }
    }

    fn succeeded(&mut self, shared: &Shared, sent: Instant) {
        if self.told {
            tracing::info!(kind = "worker.leases_kept", worker_id = %shared.id, "leases can be renewed again");
        }
        metrics::beaten(sent);
        *self = Self { since: sent, ..Self::new() };
    }

    /// Notes that `leases` couldn't be renewed, and says so of the first that failed; once they have ended for
    /// that, says so too.
    fn failed(&mut self, shared: &Shared, leases: usize, why: &str) {
        let first = !std::mem::replace(&mut self.failing, true);
        self.at_risk = self.at_risk.max(leases);
        let since = self.since.elapsed();
        if leases > 0 && first {
            tracing::warn!(
                kind = "worker.heartbeat_failed",
                worker_id = %shared.id,
                error = why,
                leases,
                since_ms = since.as_millis(),
                "leases can't be renewed"
            );
        }
        if since >= shared.lease_ttl && self.at_risk > 0 && !self.told {
            self.told = true;
            tracing::error!(
                kind = "worker.leases_not_kept",
                worker_id = %shared.id,
                leases = self.at_risk,
                since_ms = since.as_millis(),
                lease_ttl_ms = shared.lease_ttl.as_millis(),
                "this worker can't keep its leases: others may take its runs"
            );
        }
    }
}

/// Renews leases until `stop`. Notifications about sessions that are held here are looked into at
/// once, so that orders are obeyed within milliseconds.
pub(crate) async fn run(shared: Arc<Shared>, listener: Listener, stop: CancellationToken) {
    let mut hints = listener.subscribe();
    let every = beat_every(shared.lease_ttl);
    let mut next = Instant::now() + every;
    let mut keeping = Keeping::new();
    // Leases that the last beat passed over because their rows were locked, and when they are looked at again:
    // hints, which may come without a pause, don't put it off.
    let mut passed: Vec<(SessionId, i64)> = Vec::new();
    let mut retry_at = next;
    let mut stubborn = Stubborn::default();
    loop {
        let again = if passed.is_empty() { next } else { next.min(retry_at) };
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep_until(again) => {
                let full = again == next;
                if full {
                    warn_if_late(&shared, next.elapsed());
                }
                let asked = if full { shared.held.list() } else { std::mem::take(&mut passed) };
                match beat(&shared, asked, &mut keeping).await {
                    Some((sent, left)) => {
                        passed = if full { left } else { stubborn.wait_for(&shared, left) };
                        retry_at = Instant::now() + RETRY;
                        if full {
                            keeping.succeeded(&shared, sent);
                            next = sent + every;
                        }
                    }
                    None => next = Instant::now() + RETRY.min(every),
                }
            }
            () = stubborn.ended() => {}
            heard = hints.recv() => match heard {
                Some(heard) => look(&shared, heard, &mut hints).await,
                // The listener is gone, which only ends with the process: the beat goes on.
                None => tokio::time::sleep_until(next).await,
            }
        }
    }
}

/// A heartbeat that comes late hasn't failed yet, but says why leases may be lost: the process is starved.
fn warn_if_late(shared: &Shared, late: Duration) {
    if late > beat_every(shared.lease_ttl) / 2 {
        tracing::warn!(
            kind = "worker.heartbeat_late",
            worker_id = %shared.id,
            late_ms = late.as_millis(),
            "this process gets too little time to renew its leases"
        );
    }
}

/// Looks into the runs that hints are about, as many as have gathered, in one statement.
async fn look(shared: &Shared, first: Heard, hints: &mut Subscription) {
    let mut hinted: HashSet<SessionId> = HashSet::new();
    let mut heard = Some(first);
    while let Some(hint) = heard {
        match hint {
            Heard::Item { channel: Channel::Runs, item } => hinted.extend(item.parse::<SessionId>()),
            Heard::Item { .. } => {}
            Heard::Resync => hinted.extend(shared.held.list().into_iter().map(|(session, _)| session)),
        }
        heard = hints.recv().now_or_never().flatten();
    }
    hinted.retain(|session| shared.held.has(*session));
    if hinted.is_empty() {
        return;
    }
    let hinted: Vec<SessionId> = hinted.into_iter().collect();
    // A failure costs nothing: the next beat brings the same news.
    if let Ok(Ok(beats)) = tokio::time::timeout(LOOK_LIMIT, claim::look(&shared.store, &hinted)).await {
        shared.held.heard(&beats);
    }
}

/// Tells the tasks of the leases `asked` what a statement learned that was `sent` then.
fn tell(shared: &Shared, asked: &[(SessionId, i64)], beats: &[claim::Beat], sent: Instant) {
    for session in shared.held.renewed(asked, beats, sent + shared.lease_ttl) {
        tracing::warn!(kind = "run.lease_lost", session_id = %session, worker_id = %shared.id, "another worker holds the run, or nobody may");
    }
}

/// One heartbeat for the leases `asked`. Returns when it was sent and which leases it passed over, or
/// nothing if it failed.
async fn beat(
    shared: &Shared,
    asked: Vec<(SessionId, i64)>,
    keeping: &mut Keeping,
) -> Option<(Instant, Vec<(SessionId, i64)>)> {
    let sent = Instant::now();
    let renewing = async {
        if asked.is_empty() && keeping.failing {
            // Renewing nothing asks nobody, and would succeed while the database is away.
            return claim::look(&shared.store, &[]).await;
        }
        claim::heartbeat(&shared.store, &asked, shared.lease_ttl).await
    };
    let answer = tokio::time::timeout(beat_every(shared.lease_ttl), renewing).await;
    let outcome = match &answer {
        Ok(Ok(_)) => Beat::Renewed,
        Ok(Err(_)) => Beat::Failed,
        Err(_) => Beat::TimedOut,
    };
    metrics::beat(outcome, sent.elapsed());
    let result = match answer {
        Ok(Ok(beats)) => {
            tell(shared, &asked, &beats, sent);
            let passed = beats.iter().filter(|beat| !beat.renewed);
            Some((sent, passed.map(|beat| (beat.session, beat.epoch)).collect()))
        }
        Ok(Err(error)) => {
            keeping.failed(shared, asked.len(), &error.to_string());
            None
        }
        Err(_) => {
            keeping.failed(shared, asked.len(), &StoreError::late("a heartbeat").to_string());
            None
        }
    };
    for session in shared.held.expire(Instant::now()) {
        tracing::warn!(kind = "run.lease_lost", session_id = %session, worker_id = %shared.id, "the lease ended before it could be renewed");
    }
    result
}
