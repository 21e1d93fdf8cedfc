//! One statement renews all leases of a worker; its answer says which are gone and what woke the rest.

use std::{collections::HashSet, sync::Arc};

use futures::FutureExt;
use holdfast_engine::ids::SessionId;
use holdfast_store::{
    claim,
    listen::{Heard, Listener, Subscription},
    notify::Channel,
};
use tokio::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

use crate::{Shared, held::beat_every, metrics};

/// How soon a failed heartbeat is tried again.
const RETRY: Duration = Duration::from_millis(250);

/// How long looking into hints may keep the beat waiting.
const LOOK_LIMIT: Duration = Duration::from_millis(500);

/// Renews leases until `stop`. Notifications about sessions that are held here are looked into at
/// once, so that orders are obeyed within milliseconds.
pub(crate) async fn run(shared: Arc<Shared>, listener: Listener, stop: CancellationToken) {
    let mut hints = listener.subscribe();
    let every = beat_every(shared.lease_ttl);
    let mut next = Instant::now() + every;
    // Leases that the last beat passed over because their rows were locked.
    let mut passed: Vec<(SessionId, i64)> = Vec::new();
    loop {
        let again = if passed.is_empty() { next } else { next.min(Instant::now() + RETRY) };
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep_until(again) => {
                let full = again == next;
                let asked = if full { shared.held.list() } else { std::mem::take(&mut passed) };
                match beat(&shared, asked).await {
                    Some((sent, left)) => {
                        passed = left;
                        if full {
                            next = sent + every;
                        }
                    }
                    None => next = Instant::now() + RETRY,
                }
            }
            heard = hints.recv() => match heard {
                Some(heard) => look(&shared, heard, &mut hints).await,
                // The listener is gone, which only ends with the process: the beat goes on.
                None => tokio::time::sleep_until(next).await,
            }
        }
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

/// One heartbeat for the leases `asked`. Returns when it was sent and which leases it passed over, or
/// nothing if it failed.
async fn beat(shared: &Shared, asked: Vec<(SessionId, i64)>) -> Option<(Instant, Vec<(SessionId, i64)>)> {
    let sent = Instant::now();
    let answer = tokio::time::timeout(
        beat_every(shared.lease_ttl),
        claim::heartbeat(&shared.store, &asked, shared.lease_ttl),
    );
    let result = match answer.await {
        Ok(Ok(beats)) => {
            for session in shared.held.renewed(&asked, &beats, sent + shared.lease_ttl) {
                metrics::lease_lost();
                tracing::warn!(kind = "run.lease_lost", session_id = %session, worker_id = %shared.id, "another worker holds the run, or nobody may");
            }
            let passed = beats.iter().filter(|beat| !beat.renewed);
            Some((sent, passed.map(|beat| (beat.session, beat.epoch)).collect()))
        }
        Ok(Err(error)) => {
            tracing::warn!(kind = "worker.heartbeat_failed", %error, leases = asked.len(), "leases can't be renewed");
            None
        }
        Err(_) => {
            tracing::warn!(
                kind = "worker.heartbeat_failed",
                leases = asked.len(),
                "the database doesn't answer a heartbeat"
            );
            None
        }
    };
    for session in shared.held.expire(Instant::now()) {
        metrics::lease_lost();
        tracing::warn!(kind = "run.lease_lost", session_id = %session, worker_id = %shared.id, "the lease ended before it could be renewed");
    }
    result
}
