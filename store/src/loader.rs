//! Reads in groups: one loader a worker, which sends whatever has gathered as soon as it is free. Runs that one claim
//! brought are read by one set of statements, and so is the mail of runs that one group of letters woke.

use std::time::Duration;

use futures::future::BoxFuture;
use holdfast_engine::{decide::Mode, ids::SessionId, mail::Envelope};
use tokio::sync::{mpsc, oneshot};

use crate::{
    Store,
    errors::StoreError,
    load::{self, Loaded},
};

/// Sessions that are loaded together at the most.
const MAX_SESSIONS: usize = 16;

/// Sessions whose mail is read together at the most.
const MAX_MAILBOXES: usize = 64;

/// How long a group may take before its members go their own ways.
const PATIENCE: Duration = Duration::from_secs(5);

/// Reads that may wait for the loader; more wait for their turn to wait.
const QUEUE: usize = 1024;

/// Mail of a session, in order, and how far its run goes by then.
pub type News = (Vec<Envelope>, Option<Mode>);

/// Reads sessions and their mail in groups.
#[derive(Debug, Clone)]
pub struct Loader {
    sessions: Gatherer<SessionId, Loaded>,
    mail: Gatherer<(SessionId, i64), News>,
}

impl Loader {
    /// Starts a loader, which ends when nobody holds it any more.
    pub fn start(store: &Store) -> Self {
        let sessions = |store: Store, ids: Vec<SessionId>| -> Reading<Loaded> {
            Box::pin(async move { load::load_group(&store, &ids).await })
        };
        let mail = |store: Store, above: Vec<(SessionId, i64)>| -> Reading<News> {
            Box::pin(async move { Ok(load::mail_of(&store, &above).await?.into_iter().map(Ok).collect()) })
        };
        Self {
            sessions: Gatherer::start(store.clone(), MAX_SESSIONS, sessions),
            mail: Gatherer::start(store.clone(), MAX_MAILBOXES, mail),
        }
    }

    /// Loads a session, as [`load::load`] does, together with others that are wanted at the same time.
    ///
    /// # Errors
    /// As [`load::load`].
    pub async fn load(&self, id: SessionId) -> Result<Loaded, StoreError> {
        self.sessions.read(id).await
    }

    /// Reads mail, as [`load::mail_above`] does, together with that of others that is wanted at the same time.
    ///
    /// # Errors
    /// As [`load::mail_above`].
    pub async fn mail_above(&self, id: SessionId, cursor: i64) -> Result<News, StoreError> {
        self.mail.read((id, cursor)).await
    }
}

/// What reading a group comes to: an answer for each that was asked for, in order.
type Reading<A> = BoxFuture<'static, Result<Vec<Result<A, StoreError>>, StoreError>>;

/// Reads a group.
type Read<K, A> = fn(Store, Vec<K>) -> Reading<A>;

/// Gathers what is to be read by one kind of statements.
#[derive(Debug)]
struct Gatherer<K, A>(mpsc::Sender<Request<K, A>>);

impl<K, A> Clone for Gatherer<K, A> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

#[derive(Debug)]
struct Request<K, A> {
    key: K,
    answer: oneshot::Sender<Result<A, StoreError>>,
}

impl<K: Copy + Send + 'static, A: Send + 'static> Gatherer<K, A> {
    fn start(store: Store, most: usize, read: Read<K, A>) -> Self {
        let (sender, requests) = mpsc::channel(QUEUE);
        tokio::spawn(run(store, most, read, requests));
        Self(sender)
    }

    async fn read(&self, key: K) -> Result<A, StoreError> {
        let (answer, answered) = oneshot::channel();
        let gone = || StoreError::Unavailable("the loader has ended".to_owned());
        self.0.send(Request { key, answer }).await.map_err(|_| gone())?;
        answered.await.map_err(|_| gone())?
    }
}

async fn run<K: Copy + Send + 'static, A: Send + 'static>(
    store: Store,
    most: usize,
    read: Read<K, A>,
    mut requests: mpsc::Receiver<Request<K, A>>,
) {
    let mut group = Vec::new();
    while requests.recv_many(&mut group, most).await > 0 {
        // Others that the same news reached get to ask.
        tokio::task::yield_now().await;
        while group.len() < most
            && let Ok(request) = requests.try_recv()
        {
            group.push(request);
        }
        // A task of its own: a panic costs one group, and a long history keeps nobody else waiting.
        tokio::spawn(send(store.clone(), read, std::mem::take(&mut group)));
    }
}

/// Reads a group. If it can't be read together, or not soon, each is read alone and learns its own error: a
/// history that takes the server long keeps nobody else waiting.
async fn send<K: Copy + Send + 'static, A: Send + 'static>(
    store: Store,
    read: Read<K, A>,
    mut group: Vec<Request<K, A>>,
) {
    group.retain(|request| !request.answer.is_closed());
    if group.is_empty() {
        return;
    }
    let keys: Vec<K> = group.iter().map(|request| request.key).collect();
    // In a task of its own, which goes on past our patience: its connection isn't free before it is done.
    let reading = tokio::spawn(read(store.clone(), keys));
    match tokio::time::timeout(PATIENCE, reading).await {
        Ok(Ok(Ok(answers))) => {
            for (request, answer) in group.into_iter().zip(answers) {
                // Nobody may be waiting any more.
                let _ = request.answer.send(answer);
            }
        }
        _ => {
            for request in group.into_iter().filter(|request| !request.answer.is_closed()) {
                let reading = read(store.clone(), vec![request.key]);
                tokio::spawn(async move {
                    let alone = reading.await.and_then(|mut answers| {
                        let missing = || StoreError::Corrupt("a read without an answer".to_owned());
                        answers.pop().unwrap_or_else(|| Err(missing()))
                    });
                    let _ = request.answer.send(alone);
                });
            }
        }
    }
}
