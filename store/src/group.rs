//! Group commit: one committer a worker. It sends whatever has gathered as soon as it is free, never by
//! a timer: a lone step waits for nobody, and under load a transaction carries many.

use std::{
    collections::{HashSet, VecDeque},
    time::Duration,
};

use tokio::{
    sync::{mpsc, oneshot},
    time::Instant,
};

use crate::{
    Store,
    commit::{self, Commit, Outcome},
    counters::COUNTERS,
    errors::StoreError,
};

/// Steps that one transaction carries at the most.
pub const MAX_GROUP: usize = 64;

/// How long a group may take before its members go their own ways: one row that somebody holds must not
/// keep the steps of all others.
const PATIENCE: Duration = Duration::from_secs(5);

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
        let gone = || StoreError::Unavailable("the committer has ended".to_owned());
        self.0.send(Request { work, deadline, answer }).await.map_err(|_| gone())?;
        answered.await.map_err(|_| gone())?
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
        // Runs that the last group has just answered get to speak: their next steps may join this one.
        tokio::task::yield_now().await;
        while waiting.len() < QUEUE
            && let Ok(request) = requests.try_recv()
        {
            waiting.push_back(request);
        }
        // A task of its own, so that a panic costs one group and not the committer.
        let sending = tokio::spawn(send(store.clone(), next_group(&mut waiting)));
        if let Err(error) = sending.await {
            tracing::error!(%error, "storing a group of steps panicked");
        }
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

/// Stores a group. If it fails as a whole, or has to wait for somebody's lock or for a connection that
/// has died, its members are stored singly: only the culprit fails or waits, and each unknown outcome is
/// found out.
async fn send(store: Store, group: Vec<Request>) {
    COUNTERS.group_steps.observe(group.len() as u64);
    let stored = {
        let works: Vec<&Commit> = group.iter().map(|request| &request.work).collect();
        tokio::time::timeout(PATIENCE, commit::store_group(&store, &works)).await
    };
    match stored {
        Ok(Ok(outcomes)) => {
            for (request, outcome) in group.into_iter().zip(outcomes) {
                commit::announce(&store, &request.work, outcome);
                // Nobody may be waiting any more.
                let _ = request.answer.send(Ok(outcome));
            }
        }
        failed => {
            COUNTERS.groups_split.add(1);
            let why = match failed {
                Ok(Err(error)) => error.to_string(),
                _ => format!("not stored within {PATIENCE:?}"),
            };
            tracing::debug!(why, members = group.len(), "a group is stored singly");
            for Request { work, deadline, answer } in group {
                let store = store.clone();
                tokio::spawn(async move {
                    let _ = answer.send(commit::commit(&store, &work, deadline).await);
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use holdfast_engine::{
        ids::{MailId, SessionId},
        mail::{Control, MailBody, Priority, Sender},
        session::Session,
    };
    use uuid::Uuid;

    use super::*;
    use crate::{commit::RunAfter, letters::Letter};

    fn session(n: u128) -> SessionId {
        SessionId(Uuid::from_u128(n))
    }

    /// A step of session `n`, marked by its epoch, that tells `parent`.
    fn request(n: u128, mark: i64, parent: Option<u128>) -> Request {
        let letter = Letter {
            id: MailId(Uuid::from_u128(n)),
            from: Sender::System { source: "test".to_owned() },
            priority: Priority::Normal,
            hops: 0,
            body: MailBody::Control { message: Control::Resume },
        };
        let work = Commit {
            id: Uuid::from_u128(n),
            epoch: mark,
            agent: String::new(),
            agent_revision: String::new(),
            session: Session::new(session(n)),
            happened: Vec::new(),
            blobs: Vec::new(),
            run: RunAfter::Keep,
            to_parent: parent.map(|parent| (session(parent), letter)),
            spawns: Vec::new(),
            dismissed: Vec::new(),
            traceparent: None,
        };
        Request { work, deadline: Instant::now(), answer: oneshot::channel().0 }
    }

    fn marks<'a>(requests: impl IntoIterator<Item = &'a Request>) -> Vec<i64> {
        requests.into_iter().map(|request| request.work.epoch).collect()
    }

    #[tokio::test]
    async fn no_session_stands_twice_in_a_group_and_each_keeps_its_order() {
        let mut waiting = VecDeque::from([
            request(1, 1, None),
            request(1, 2, None),
            request(2, 3, Some(1)),
            request(3, 4, Some(9)),
            request(9, 5, None),
            request(4, 6, None),
            request(1, 7, None),
        ]);
        assert_eq!(marks(&next_group(&mut waiting)), [1, 4, 6]);
        assert_eq!(marks(&waiting), [2, 3, 5, 7]);
        assert_eq!(marks(&next_group(&mut waiting)), [2, 5]);
        assert_eq!(marks(&next_group(&mut waiting)), [3], "7 waits behind it for session 1");
        assert_eq!(marks(&next_group(&mut waiting)), [7]);
        assert!(waiting.is_empty());
    }

    #[tokio::test]
    async fn a_group_is_bounded() {
        let mut waiting: VecDeque<Request> =
            (0..200).map(|n| request(n, i64::try_from(n).unwrap_or_default(), None)).collect();
        assert_eq!(next_group(&mut waiting).len(), MAX_GROUP);
        assert_eq!(waiting.len(), 200 - MAX_GROUP);
        assert_eq!(waiting[0].work.epoch, i64::try_from(MAX_GROUP).unwrap_or_default());
    }
}
