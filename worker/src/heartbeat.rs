//! One statement renews all leases of a worker; its answer says which are gone and what woke the rest.

use std::sync::Arc;

use holdfast_engine::ids::SessionId;
use holdfast_store::{
    claim,
    listen::{Heard, Listener},
    notify::Channel,
};
use tokio::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

use crate::{Shared, held::beat_every, metrics};

/// How soon a failed heartbeat is tried again.
const RETRY: Duration = Duration::from_millis(250);

/// Renews leases until `stop`. A notification about a session that is held here brings the next
/// heartbeat forward, so that orders are obeyed within milliseconds.
pub(crate) async fn run(shared: Arc<Shared>, listener: Listener, stop: CancellationToken) {
    let mut hints = listener.subscribe();
    let every = beat_every(shared.lease_ttl);
    let mut next = Instant::now() + every;
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep_until(next) => {}
            heard = hints.recv() => match heard {
                Some(Heard::Item { channel: Channel::Runs, item }) => {
                    let held = item.parse::<SessionId>().is_ok_and(|session| shared.held.has(session));
                    if !held {
                        continue;
                    }
                }
                Some(Heard::Resync) => {}
                Some(Heard::Item { .. }) => continue,
                None => {
                    // The listener is gone, which only ends with the process: the beat goes on.
                    tokio::time::sleep_until(next).await;
                }
            }
        }
        next = beat(&shared).await.map_or_else(|| Instant::now() + RETRY, |sent| sent + every);
    }
}

/// One heartbeat. Returns when it was sent, or nothing if it failed.
async fn beat(shared: &Shared) -> Option<Instant> {
    let asked = shared.held.list();
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
            Some(sent)
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
