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
pub(crate) struct Board(Arc<Mutex<Kept>>);

#[derive(Default)]
struct Kept {
    reports: HashMap<CallId, VecDeque<Value>>,
    /// While it isn't stored that calls run: what is to be told of them then.
    early: Option<HashMap<CallId, (Teller, Entry)>>,
}

impl Board {
    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells nobody of progress until it is [opened](Self::open).
    pub(crate) fn close(&self) {
        self.lock().early.get_or_insert_default();
    }

    /// Tells the newest report of each call that was to be told while it was closed.
    pub(crate) fn open(&self) {
        for (teller, entry) in self.lock().early.take().into_iter().flat_map(HashMap::into_values) {
            teller.tell(entry);
        }
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
        self.lock().reports.get(&call).map(|kept| kept.iter().cloned().collect()).unwrap_or_default()
    }

    /// Forgets a call that has ended.
    pub(crate) fn wipe(&self, call: CallId) {
        let mut kept = self.lock();
        kept.reports.remove(&call);
        if let Some(early) = &mut kept.early {
            early.remove(&call);
        }
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
        let mut board = self.board.lock();
        let kept = board.reports.entry(self.entry.call).or_default();
        if kept.len() == KEPT {
            kept.pop_front();
        }
        kept.push_back(progress.clone());
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if told.is_some_and(|told| told.elapsed() < PROGRESS_EVERY) {
            return;
        }
        *told = Some(Instant::now());
        let entry = Entry { news: News::Progress(progress), ..self.entry.clone() };
        match &mut board.early {
            Some(early) => {
                early.insert(self.entry.call, (self.teller.clone(), entry));
            }
            None => self.teller.tell(entry),
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

#[cfg(test)]
mod tests {
    use holdfast_engine::ids::SessionId;
    use serde_json::json;
    use uuid::Uuid;

    use super::*;

    fn reporter(board: &Board, teller: &mpsc::Sender<Entry>, n: u128) -> Reporter {
        let (session, call) = (SessionId(Uuid::nil()), CallId(Uuid::from_u128(n)));
        let news = News::Progress(Value::Null);
        let entry = Entry { session, epoch: 1, call, tool: "look".to_owned(), news };
        Reporter { board: board.clone(), teller: Teller(teller.clone()), told: Mutex::new(None), entry }
    }

    #[test]
    fn nobody_is_told_of_the_progress_of_calls_that_are_not_stored() {
        let (sender, mut told) = mpsc::channel(8);
        let board = Board::default();
        board.close();
        let (first, second) = (reporter(&board, &sender, 1), reporter(&board, &sender, 2));
        first.tell(&json!({"line": "one"}));
        first.tell(&json!({"line": "two"}));
        second.tell(&json!({"line": "three"}));
        assert!(told.try_recv().is_err(), "others don't know of the calls yet");
        assert_eq!(board.read(CallId(Uuid::from_u128(1))).len(), 2, "the model may ask all the same");
        // The second one ends before it is stored that it began.
        board.wipe(CallId(Uuid::from_u128(2)));
        board.open();
        let entry = told.try_recv().expect("it is told now");
        assert_eq!((entry.call, entry.news), (first.entry.call, News::Progress(json!({"line": "one"}))));
        assert!(told.try_recv().is_err());
        reporter(&board, &sender, 3).tell(&json!({"line": "four"}));
        assert!(told.try_recv().is_ok(), "what is stored is told of at once");
    }
}
