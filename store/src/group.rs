//! Group commit: one committer a worker. It sends whatever has gathered as soon as it is free, never by
//! a timer: a lone step waits for nobody, and under load a transaction carries many.

use std::collections::{HashSet, VecDeque};

use tokio::{
    sync::{mpsc, oneshot},
    time::Instant,
};

use crate::{
    Store,
    commit::{self, Commit, Outcome},
    errors::StoreError,
    retry::against_rivals,
};

/// Steps that one transaction carries at the most.
pub const MAX_GROUP: usize = 64;

/// Steps that may wait for the committer; more wait for their turn to wait.
const QUEUE: usize = 1024;

/// Stores steps in groups.
#[derive(Debug, Clone)]
pub struct Committer(mpsc::Sender<Request>);

#[derive(Debug)]
struct Request {
    work: Commit,
    deadline: Instant,
    answer: oneshot::Sender<Result<Outcome, StoreError>>,
}

impl Committer {
    /// Starts a committer, which ends when nobody holds it any more.
    pub fn start(store: Store) -> Self {
        let (sender, requests) = mpsc::channel(QUEUE);
        tokio::spawn(run(store, requests));
        Self(sender)
    }

    /// Stores a step, as [`commit::commit`] does, together with others that come at the same time.
    ///
    /// A caller that goes away leaves its step with the committer: it is stored if its fence holds.
    ///
    /// # Errors
    /// As [`commit::commit`].
    pub async fn commit(&self, work: Commit, deadline: Instant) -> Result<Outcome, StoreError> {
        let (answer, answered) = oneshot::channel();
        let gone = |_| StoreError::Unavailable("the committer has ended".to_owned());
        self.0.send(Request { work, deadline, answer }).await.map_err(|_| gone(()))?;
        answered.await.map_err(|_| gone(()))?
    }
}

async fn run(store: Store, mut requests: mpsc::Receiver<Request>) {
    let mut waiting: VecDeque<Request> = VecDeque::new();
    loop {
        if waiting.is_empty() {
            match requests.recv().await {
                Some(request) => waiting.push_back(request),
                None => return,
            }
        }
        while waiting.len() < QUEUE
            && let Ok(request) = requests.try_recv()
        {
            waiting.push_back(request);
        }
        send(&store, next_group(&mut waiting)).await;
    }
}

/// Takes the next group: no session appears twice in it, as member or as recipient. What has to wait
/// for that keeps its place.
fn next_group(waiting: &mut VecDeque<Request>) -> Vec<Request> {
    let (mut group, mut rest) = (Vec::new(), VecDeque::new());
    let mut touched = HashSet::new();
    for request in waiting.drain(..) {
        let free =
            group.len() < MAX_GROUP && request.work.touches().all(|session| !touched.contains(&session));
        // Also what has to wait keeps later steps that touch the same sessions behind it.
        touched.extend(request.work.touches());
        if free {
            group.push(request);
        } else {
            rest.push_back(request);
        }
    }
    *waiting = rest;
    group
}

/// Stores a group. If it fails as a whole, its members are stored singly, so that only the culprit
/// fails and each unknown outcome is found out.
async fn send(store: &Store, group: Vec<Request>) {
    let stored = {
        let works: Vec<&Commit> = group.iter().map(|request| &request.work).collect();
        against_rivals(|| commit::store_group(store, &works)).await
    };
    match stored {
        Ok(outcomes) => {
            for (request, outcome) in group.into_iter().zip(outcomes) {
                commit::announce(store, &request.work, outcome);
                // Nobody may be waiting any more.
                let _ = request.answer.send(Ok(outcome));
            }
        }
        Err(error) => {
            tracing::debug!(%error, members = group.len(), "a group is stored singly");
            for Request { work, deadline, answer } in group {
                let store = store.clone();
                tokio::spawn(async move {
                    let _ = answer.send(commit::commit(&store, &work, deadline).await);
                });
            }
        }
    }
}
