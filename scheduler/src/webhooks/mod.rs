//! Sending webhooks: every endpoint has a lane of its own, so that one that hangs delays nobody else.
//!
//! A delivery is claimed, sent and settled, in three short statements around the request; no transaction is open while
//! it is under way. What a scheduler that dies had claimed comes due again when the claim is over.

mod secrets;
mod send;

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use chrono::Utc;
use holdfast_store::{
    Store, StoreError,
    webhooks::{self, After, Delivery, Endpoint},
};
use reqwest::Client;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, MissedTickBehavior, interval},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

pub use secrets::{MAX_SECRETS_FILE, MOST_SECRETS, Secrets, SecretsError};

use crate::metrics;
pub(crate) use send::Outcome;
use send::send;

/// Requests that one scheduler has under way to one endpoint.
pub const AT_ONCE: usize = 16;

/// How often a scheduler looks for what is due.
const LOOK: Duration = Duration::from_millis(500);

/// Within which time of its claim a delivery is sent, or left to whoever claims it next.
const SEND_WITHIN: Duration = Duration::from_secs(15);

/// Deliveries that follow one another before the endpoint's settings are read again.
const CHAIN: usize = 100;

const _: () = assert!(
    SEND_WITHIN.as_secs() + send::TIMEOUT.as_secs() < webhooks::CLAIM.as_secs(),
    "an attempt ends before its claim does"
);

/// What a scheduler is told of webhooks.
#[derive(Debug, Clone)]
pub struct Webhooks {
    /// The endpoint that the server's own settings name.
    pub server: Option<Endpoint>,
    /// The secrets. An endpoint whose secrets aren't here is left to other schedulers.
    pub secrets: Secrets,
    /// After how long a delivery is given up.
    pub give_up: Duration,
}

impl Webhooks {
    /// Whether this scheduler sends to an endpoint: it can sign, and of the server's endpoint it was told.
    fn serves(&self, endpoint: &Endpoint) -> bool {
        (endpoint.name != webhooks::SERVER || self.server.is_some()) && self.secrets.has(&endpoint.secret_id)
    }
}

/// Lays up the next page of events of every endpoint that is served. Returns how many events were looked at.
pub(crate) async fn queue(store: &Store, config: &Webhooks) -> Result<u64, StoreError> {
    let mut read = 0;
    for endpoint in webhooks::endpoints(store).await?.iter().filter(|one| config.serves(one)) {
        let done = webhooks::queue(store, &endpoint.name).await?;
        if done.renewed {
            tracing::warn!(
                kind = "webhook.feed_renewed",
                endpoint = endpoint.name,
                "the database numbers its transactions anew: events from before aren't sent"
            );
        }
        read += u64::try_from(done.read).unwrap_or(0);
    }
    Ok(read)
}

/// One endpoint's requests.
struct Lane {
    free: Arc<Semaphore>,
    /// Whether the last attempt failed, so that only changes are logged.
    failing: AtomicBool,
}

/// What all lanes share.
struct Desk {
    store: Store,
    config: Webhooks,
    client: Client,
    shutdown: CancellationToken,
}

/// Sends until `shutdown`, and lets requests under way end.
pub(crate) async fn run(store: Store, config: Webhooks, shutdown: CancellationToken) {
    let client = match send::client() {
        Ok(client) => client,
        Err(error) => {
            tracing::error!(kind = "webhook.no_client", %error, "no webhook is sent");
            return;
        }
    };
    let desk = Arc::new(Desk { store, config, client, shutdown });
    let (tasks, mut lanes) = (TaskTracker::new(), HashMap::new());
    let mut declared = desk.config.server.is_none();
    let mut looks = interval(LOOK);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while desk.shutdown.run_until_cancelled(looks.tick()).await.is_some() {
        let looked = async {
            if let Some(server) = desk.config.server.as_ref().filter(|_| !declared) {
                webhooks::declare(&desk.store, server).await?;
                declared = true;
            }
            look(&desk, &mut lanes, &tasks).await
        };
        match looked.await {
            Ok(()) => {}
            Err(error) if error.is_unavailable() => {}
            Err(error) => tracing::warn!(kind = "webhook.look_failed", %error, "looked again soon"),
        }
    }
    tasks.close();
    tasks.wait().await;
}

/// Starts as many deliveries of each endpoint as its lane has room for.
async fn look(
    desk: &Arc<Desk>,
    lanes: &mut HashMap<String, Option<Arc<Lane>>>,
    tasks: &TaskTracker,
) -> Result<(), StoreError> {
    for endpoint in webhooks::endpoints(&desk.store).await? {
        let serves = desk.config.serves(&endpoint);
        let lane = lanes.entry(endpoint.name.clone()).or_insert_with(|| {
            if !serves && endpoint.name != webhooks::SERVER {
                tracing::warn!(
                    kind = "webhook.no_secret",
                    endpoint = endpoint.name,
                    secret_id = endpoint.secret_id,
                    "this scheduler has no such secret and leaves the endpoint to others"
                );
            }
            None
        });
        if !serves {
            continue;
        }
        let lane = lane.get_or_insert_with(|| {
            Arc::new(Lane { free: Arc::new(Semaphore::new(AT_ONCE)), failing: AtomicBool::new(false) })
        });
        let mut permits = Vec::new();
        while let Ok(permit) = Arc::clone(&lane.free).try_acquire_owned() {
            permits.push(permit);
        }
        if permits.is_empty() {
            continue;
        }
        let limit = i64::try_from(permits.len()).unwrap_or(1);
        let endpoint = Arc::new(endpoint);
        let claimed = Instant::now();
        let due = webhooks::claim(&desk.store, &endpoint, limit).await?;
        for (delivery, permit) in due.into_iter().zip(permits) {
            let (desk, lane, endpoint) = (Arc::clone(desk), Arc::clone(lane), Arc::clone(&endpoint));
            tasks.spawn(async move { chain(&desk, &lane, &endpoint, (claimed, delivery), permit).await });
        }
    }
    Ok(())
}

/// Delivers one after the other, as long as something is due.
async fn chain(
    desk: &Desk,
    lane: &Lane,
    endpoint: &Endpoint,
    first: (Instant, Delivery),
    _permit: OwnedSemaphorePermit,
) {
    let mut next = Some(first);
    for _ in 0..CHAIN {
        let Some((claimed, delivery)) = next.take() else { return };
        let done = async {
            attempt(desk, lane, endpoint, claimed, &delivery).await?;
            if desk.shutdown.is_cancelled() {
                return Ok(None);
            }
            let claimed = Instant::now();
            let due = webhooks::claim(&desk.store, endpoint, 1).await?;
            Ok::<_, StoreError>(due.into_iter().next().map(|delivery| (claimed, delivery)))
        };
        match done.await {
            Ok(following) => next = following,
            // Its claim ends, and it is sent again under the same id.
            Err(error) if error.is_unavailable() => return,
            Err(error) => {
                tracing::warn!(kind = "webhook.unsettled", endpoint = endpoint.name, %error, "sent again later");
                return;
            }
        }
    }
}

async fn attempt(
    desk: &Desk,
    lane: &Lane,
    endpoint: &Endpoint,
    claimed: Instant,
    delivery: &Delivery,
) -> Result<(), StoreError> {
    let store = &desk.store;
    let document = match delivery.document(store).await {
        Ok(document) => Some(document),
        Err(StoreError::Corrupt(_)) => None,
        Err(error) => return Err(error),
    };
    if claimed.elapsed() > SEND_WITHIN {
        return Ok(());
    }
    let began = Instant::now();
    let outcome = match document {
        Some(body) => {
            let (id, timestamp) = (delivery.id(), Utc::now().timestamp());
            send(&desk.client, &desk.config.secrets, endpoint, &id, timestamp, body).await
        }
        None => Outcome::failed("the event can't be read"),
    };
    metrics::webhook(&outcome, began.elapsed());
    match outcome {
        Outcome::Delivered => {
            webhooks::delivered(store, delivery).await?;
            if lane.failing.swap(false, Ordering::Relaxed) {
                tracing::info!(kind = "webhook.recovered", endpoint = endpoint.name);
            }
        }
        Outcome::Gone => {
            if webhooks::disable(store, endpoint, delivery).await? {
                let (name, session) = (&endpoint.name, delivery.session_id);
                tracing::warn!(kind = "webhook.disabled", endpoint = name, session_id = %session, "it answered 410");
            }
        }
        Outcome::Failed { cause, asked } => {
            let after = webhooks::failed(store, delivery, &cause, asked, desk.config.give_up).await?;
            tell_failed(lane, endpoint, delivery, &cause, after);
        }
    }
    Ok(())
}

fn tell_failed(lane: &Lane, endpoint: &Endpoint, delivery: &Delivery, cause: &str, after: After) {
    let (id, attempts) = (delivery.id(), delivery.attempts + 1);
    if after == After::Dead {
        metrics::webhook_dead();
        tracing::warn!(
            kind = "webhook.dead",
            endpoint = endpoint.name,
            session_id = %delivery.session_id,
            webhook_id = id,
            attempts,
            cause,
            "given up; `holdfast webhooks retry` sends it again"
        );
    } else if !lane.failing.swap(true, Ordering::Relaxed) {
        tracing::warn!(kind = "webhook.failing", endpoint = endpoint.name, webhook_id = id, attempts, cause);
    }
}
