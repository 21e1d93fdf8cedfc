//! Rooms: tasks that serve in groups what comes to them. Whatever comes while a group is served shares the next one;
//! what comes alone waits for nobody.

use std::sync::{Arc, OnceLock};

use tokio::sync::{mpsc, oneshot};

use crate::errors::StoreError;

/// Requests that may wait for a room; more wait for their turn to wait.
const QUEUE: usize = 1024;

/// The way into a room. Its task begins with the first request, and ends when nobody holds the way in any more.
#[derive(Debug)]
pub(crate) struct Room<R, A>(Arc<OnceLock<mpsc::Sender<Waiting<R, A>>>>);

/// A request, and where its answer goes.
#[derive(Debug)]
pub(crate) struct Waiting<R, A> {
    pub(crate) request: R,
    pub(crate) answer: oneshot::Sender<Result<A, StoreError>>,
}

impl<R, A> Clone for Room<R, A> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<R, A> Default for Room<R, A> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<R, A> Room<R, A> {
    /// Has a request served, together with others that come at the same time. `open` begins the task with what
    /// arrives. Whoever goes away before the request's group begins leaves nothing behind.
    pub(crate) async fn ask<F>(
        &self,
        request: R,
        open: impl FnOnce(mpsc::Receiver<Waiting<R, A>>) -> F,
    ) -> Result<A, StoreError>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let sender = self.0.get_or_init(|| {
            let (sender, arriving) = mpsc::channel(QUEUE);
            tokio::spawn(open(arriving));
            sender
        });
        let (answer, answered) = oneshot::channel();
        let gone = || StoreError::Unavailable("requests aren't taken any more".to_owned());
        sender.send(Waiting { request, answer }).await.map_err(|_| gone())?;
        answered.await.map_err(|_| gone())?
    }
}
