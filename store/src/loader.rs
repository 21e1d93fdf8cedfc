//! Loads in groups: one loader a worker, which sends whatever has gathered as soon as it is free. Runs that
//! one claim brought are read by one set of statements.

use std::time::Duration;

use holdfast_engine::ids::SessionId;
use tokio::sync::{mpsc, oneshot};

use crate::{
    Store,
    errors::StoreError,
    load::{self, Loaded},
};

/// Sessions that are loaded together at the most.
const MAX_GROUP: usize = 16;

/// How long a group may take before its members go their own ways.
const PATIENCE: Duration = Duration::from_secs(5);

/// Loads that may wait for the loader; more wait for their turn to wait.
const QUEUE: usize = 1024;

/// Loads sessions in groups.
#[derive(Debug, Clone)]
pub struct Loader(mpsc::Sender<Request>);

#[derive(Debug)]
struct Request {
    id: SessionId,
    answer: oneshot::Sender<Result<Loaded, StoreError>>,
}

impl Loader {
    /// Starts a loader, which ends when nobody holds it any more.
    pub fn start(store: Store) -> Self {
        let (sender, requests) = mpsc::channel(QUEUE);
        tokio::spawn(run(store, requests));
        Self(sender)
    }

    /// Loads a session, as [`load::load`] does, together with others that are wanted at the same time.
    ///
    /// # Errors
    /// As [`load::load`].
    pub async fn load(&self, id: SessionId) -> Result<Loaded, StoreError> {
        let (answer, answered) = oneshot::channel();
        let gone = || StoreError::Unavailable("the loader has ended".to_owned());
        self.0.send(Request { id, answer }).await.map_err(|_| gone())?;
        answered.await.map_err(|_| gone())?
    }
}

async fn run(store: Store, mut requests: mpsc::Receiver<Request>) {
    let mut group = Vec::new();
    while requests.recv_many(&mut group, MAX_GROUP).await > 0 {
        // The other runs of the same claim get to ask.
        tokio::task::yield_now().await;
        while group.len() < MAX_GROUP
            && let Ok(request) = requests.try_recv()
        {
            group.push(request);
        }
        // A task of its own: a panic costs one group, and a long history keeps nobody else waiting.
        tokio::spawn(send(store.clone(), std::mem::take(&mut group)));
    }
}

/// Loads a group. If it can't be read together, or not soon, each is read alone and learns its own error: a
/// history that takes the server long keeps nobody else waiting.
async fn send(store: Store, group: Vec<Request>) {
    let ids: Vec<SessionId> = group.iter().map(|request| request.id).collect();
    // In a task of its own, which goes on past our patience: its connection isn't free before it is done.
    let reading = store.clone();
    let loading = tokio::spawn(async move { load::load_group(&reading, &ids).await });
    match tokio::time::timeout(PATIENCE, loading).await {
        Ok(Ok(Ok(loaded))) => {
            for (request, loaded) in group.into_iter().zip(loaded) {
                // Nobody may be waiting any more.
                let _ = request.answer.send(loaded);
            }
        }
        _ => {
            for request in group.into_iter().filter(|request| !request.answer.is_closed()) {
                let store = store.clone();
                tokio::spawn(async move {
                    let _ = request.answer.send(load::load(&store, request.id).await);
                });
            }
        }
    }
}
