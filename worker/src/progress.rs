//! What running calls say of their progress: kept for the model that asks, and told to those who watch.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use holdfast_engine::{decide::Start, ids::CallId};
use holdfast_store::{
    Store,
    progress::{Entry, News, record},
};
use holdfast_tools::PROGRESS_EVERY;
use serde::Serialize;
use serde_json::Value;
use tokio::{sync::mpsc, time::Instant};

use crate::calls::Scope;

/// How many reports of a call are kept.
const KEPT: usize = 50;

/// Reports that may wait to be told; more are only kept.
const QUEUE: usize = 1024;

/// Reports that are told together.
const BATCH: usize = 64;

/// The newest reports of the calls of a run.
#[derive(Clone, Default)]
pub(crate) struct Board(Arc<Mutex<HashMap<CallId, VecDeque<Value>>>>);

impl Board {
    fn lock(&self) -> MutexGuard<'_, HashMap<CallId, VecDeque<Value>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where a call reports.
    pub(crate) fn of(&self, scope: &Scope, start: &Start) -> Reporter {
        Reporter {
            board: self.clone(),
            teller: scope.shared.teller.clone(),
            told: Mutex::new(None),
            entry: Entry {
                session: scope.session,
                epoch: scope.epoch,
                call: start.call,
                tool: start.name.clone(),
                news: News::Progress(Value::Null),
            },
        }
    }

    /// What a call has reported, oldest first.
    pub(crate) fn read(&self, call: CallId) -> Vec<Value> {
        self.lock().get(&call).map(|kept| kept.iter().cloned().collect()).unwrap_or_default()
    }

    /// Forgets a call that has ended.
    pub(crate) fn wipe(&self, call: CallId) {
        self.lock().remove(&call);
    }
}

/// Where one call reports.
pub(crate) struct Reporter {
    board: Board,
    teller: Teller,
    /// When it was last told to those who watch.
    told: Mutex<Option<Instant>>,
    entry: Entry,
}

impl Reporter {
    /// Keeps a report and, unless one was told just now, tells it.
    pub(crate) fn tell(&self, news: &impl Serialize) {
        let progress = serde_json::to_value(news).unwrap_or_default();
        {
            let mut board = self.board.lock();
            let kept = board.entry(self.entry.call).or_default();
            if kept.len() == KEPT {
                kept.pop_front();
            }
            kept.push_back(progress.clone());
        }
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if told.is_none_or(|told| told.elapsed() >= PROGRESS_EVERY) {
            *told = Some(Instant::now());
            self.teller.tell(Entry { news: News::Progress(progress), ..self.entry.clone() });
        }
    }
}

/// Tells reports as they come, in groups, to those who watch.
#[derive(Clone)]
pub(crate) struct Teller(mpsc::Sender<Entry>);

impl Teller {
    /// Starts telling, which ends when nobody has anything to report any more.
    pub(crate) fn start(store: Store) -> Self {
        let (sender, mut reports) = mpsc::channel(QUEUE);
        tokio::spawn(async move {
            let mut batch = Vec::new();
            while reports.recv_many(&mut batch, BATCH).await > 0 {
                if let Err(error) = record(&store, &batch).await {
                    tracing::debug!(%error, reports = batch.len(), "progress isn't told");
                }
                batch.clear();
            }
        });
        Self(sender)
    }

    /// Tells something. Nobody waits for it, and it costs no step anything: what doesn't fit isn't told.
    pub(crate) fn tell(&self, entry: Entry) {
        let _ = self.0.try_send(entry);
    }
}
