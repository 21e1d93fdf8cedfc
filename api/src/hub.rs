//! What waiting requests and event streams are woken by.
//!
//! One task hears the hints of other processes and, in one statement a second for all that this node
//! serves, reads where the watched sessions stand. A hint only hastens that: whoever waits holds no
//! database connection, and learns of everything within a second if every hint is lost.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use holdfast_engine::ids::SessionId;
use holdfast_store::{
    Store,
    listen::{Heard, Listener, Subscription},
    notify::Channel,
    sessions::{self, Pulse},
};
use tokio::{
    sync::{Notify, broadcast, watch},
    time::{MissedTickBehavior, interval},
};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::limits;

/// Deltas that a stream may lag behind before it loses the oldest; they are ephemeral.
const DELTAS: usize = 64;

/// Where a watched session was last seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Seen {
    /// Not yet.
    Nowhere,
    /// Here.
    At(Pulse),
    /// Its row is gone.
    Gone,
}

/// Wakes whoever waits on this node.
#[derive(Debug)]
pub(crate) struct Hub {
    watched: Mutex<HashMap<Uuid, Entry>>,
    /// Sessions to look at before the next scan.
    dirty: Mutex<HashSet<Uuid>>,
    hurry: Notify,
    /// Counts whatever may have changed anywhere.
    ticks: watch::Sender<u64>,
}

#[derive(Debug)]
struct Entry {
    seen: watch::Sender<Seen>,
    deltas: broadcast::Sender<Arc<str>>,
}

/// One watcher's place. The session is looked at as long as it lives.
#[derive(Debug)]
pub(crate) struct Watch {
    hub: Arc<Hub>,
    id: Uuid,
    seen: watch::Receiver<Seen>,
    deltas: broadcast::Receiver<Arc<str>>,
}

impl Hub {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            watched: Mutex::default(),
            dirty: Mutex::default(),
            hurry: Notify::new(),
            ticks: watch::channel(0).0,
        })
    }

    /// Watches a session from now on: every look at it that ends after this call is told.
    pub(crate) fn watch(self: &Arc<Self>, id: SessionId) -> Watch {
        let mut watched = lock(&self.watched);
        let entry = watched.entry(id.0).or_insert_with(|| Entry {
            seen: watch::channel(Seen::Nowhere).0,
            deltas: broadcast::channel(DELTAS).0,
        });
        let mut seen = entry.seen.subscribe();
        seen.mark_unchanged();
        Watch { hub: Arc::clone(self), id: id.0, seen, deltas: entry.deltas.subscribe() }
    }

    /// Changes whenever something may have happened to any session, and at least once a second.
    pub(crate) fn ticks(&self) -> watch::Receiver<u64> {
        self.ticks.subscribe()
    }

    /// How many sessions are watched.
    pub(crate) fn watched(&self) -> usize {
        lock(&self.watched).len()
    }

    /// Hears and looks until `closing`.
    pub(crate) async fn run(self: Arc<Self>, store: Store, listener: Listener, closing: CancellationToken) {
        let hearing = self.hear(listener.subscribe());
        let looking = self.look(&store);
        closing.run_until_cancelled(async { tokio::join!(hearing, looking) }).await;
    }

    async fn hear(&self, mut heard: Subscription) {
        while let Some(heard) = heard.recv().await {
            match heard {
                Heard::Item { channel: Channel::Events, item } => {
                    self.tick();
                    let Ok(id) = item.parse::<Uuid>() else { continue };
                    if lock(&self.watched).contains_key(&id) && lock(&self.dirty).insert(id) {
                        self.hurry.notify_one();
                    }
                }
                Heard::Item { channel: Channel::Deltas, item } => self.pass_on(&item),
                Heard::Item { .. } => {}
                Heard::Resync => {
                    lock(&self.dirty).extend(lock(&self.watched).keys());
                    self.tick();
                    self.hurry.notify_one();
                }
            }
        }
    }

    async fn look(&self, store: &Store) {
        let mut scan = interval(limits::SCAN);
        scan.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = scan.tick() => {
                    self.tick();
                    lock(&self.dirty).extend(lock(&self.watched).keys());
                }
                () = self.hurry.notified() => {}
            }
            let ids: Vec<Uuid> = std::mem::take(&mut *lock(&self.dirty)).into_iter().collect();
            for chunk in ids.chunks(limits::SCAN_CHUNK) {
                match sessions::pulses(store, chunk).await {
                    Ok(pulses) => self.tell(chunk, &pulses),
                    // The next scan looks again; those who wait keep waiting until then.
                    Err(error) => tracing::debug!(%error, "watched sessions couldn't be looked at"),
                }
            }
        }
    }

    fn tell(&self, ids: &[Uuid], pulses: &[Pulse]) {
        let pulses: HashMap<Uuid, Pulse> = pulses.iter().map(|pulse| (pulse.id, *pulse)).collect();
        let watched = lock(&self.watched);
        for id in ids {
            let Some(entry) = watched.get(id) else { continue };
            // Told even if nothing changed: a watcher may have missed why it wanted to know.
            entry.seen.send_replace(pulses.get(id).map_or(Seen::Gone, |pulse| Seen::At(*pulse)));
        }
    }

    fn pass_on(&self, item: &Arc<str>) {
        #[derive(serde::Deserialize)]
        struct Delta {
            session_id: Uuid,
        }
        let Ok(delta) = serde_json::from_str::<Delta>(item) else { return };
        if let Some(entry) = lock(&self.watched).get(&delta.session_id) {
            // Nobody streaming is no error.
            let _ = entry.deltas.send(Arc::clone(item));
        }
    }

    fn tick(&self) {
        self.ticks.send_modify(|count| *count = count.wrapping_add(1));
    }
}

impl Watch {
    /// Waits for the next look at the session. May be cancelled without losing anything.
    pub(crate) async fn next(&mut self) -> Seen {
        // The sender lives in the hub for as long as this watch does.
        let _ = self.seen.changed().await;
        *self.seen.borrow_and_update()
    }

    /// Waits for the next look or the next text delta; deltas that are there come first, since the news may
    /// be that the text is whole.
    pub(crate) async fn next_or_delta(&mut self) -> Result<Seen, Arc<str>> {
        loop {
            tokio::select! {
                biased;
                delta = self.deltas.recv() => if let Ok(delta) = delta {
                    return Err(delta);
                },
                _ = self.seen.changed() => return Ok(*self.seen.borrow_and_update()),
            }
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let mut watched = lock(&self.hub.watched);
        // This one's receiver is still counted.
        if watched.get(&self.id).is_some_and(|entry| entry.seen.receiver_count() <= 1) {
            watched.remove(&self.id);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pulse(id: Uuid, event_seq: i64) -> Pulse {
        Pulse { id, event_seq, active: true, busy: true, deleted: false, wakes_at: None }
    }

    #[tokio::test]
    async fn watchers_are_told_of_looks_that_end_after_they_came() {
        let (hub, id) = (Hub::new(), Uuid::now_v7());
        let mut first = hub.watch(SessionId(id));
        hub.tell(&[id], &[pulse(id, 1)]);
        let mut second = hub.watch(SessionId(id));
        assert_eq!(first.next().await, Seen::At(pulse(id, 1)));
        hub.tell(&[id], &[]);
        assert_eq!(first.next().await, Seen::Gone);
        assert_eq!(second.next().await, Seen::Gone, "not the look from before it came");
        hub.tell(&[id], &[]);
        assert_eq!(first.next().await, Seen::Gone, "told again although nothing changed");
    }

    #[tokio::test]
    async fn sessions_are_forgotten_with_their_last_watcher() {
        let (hub, id) = (Hub::new(), Uuid::now_v7());
        let (first, second) = (hub.watch(SessionId(id)), hub.watch(SessionId(id)));
        drop(first);
        assert_eq!(hub.watched(), 1);
        drop(second);
        assert_eq!(hub.watched(), 0);
    }

    #[tokio::test]
    async fn deltas_reach_the_streams_of_their_session() {
        let (hub, id) = (Hub::new(), Uuid::now_v7());
        let mut watch = hub.watch(SessionId(id));
        hub.pass_on(&format!(r#"{{"session_id": "{}", "text": "no"}}"#, Uuid::now_v7()).into());
        hub.pass_on(&"not JSON".into());
        let delta: Arc<str> = format!(r#"{{"session_id": "{id}", "text": "yes"}}"#).into();
        hub.tell(&[id], &[pulse(id, 1)]);
        hub.pass_on(&delta);
        assert_eq!(watch.next_or_delta().await, Err(delta), "before the news, although it came later");
        assert_eq!(watch.next_or_delta().await, Ok(Seen::At(pulse(id, 1))));
    }
}
