//! Claims that bring along what is read next: the statements of a load are sent right behind the claim, before it is
//! known which runs it got, so that a run begins one round trip earlier.

use std::collections::HashMap;

use holdfast_engine::ids::SessionId;
use tokio::sync::oneshot;

use super::{
    Lease,
    due::{Order, claim_named},
};
use crate::{
    Store,
    errors::StoreError,
    load::{Loaded, Reads},
    plant::altered,
    sql,
};

/// Sessions that are read along with their claim at the most.
pub(super) const MAX_ALONG: usize = 16;

/// A session on its way to the worker that has claimed its run; nothing comes if it can't be read.
pub type Arriving = oneshot::Receiver<Loaded>;

/// Claims runs by their names, and reads their sessions.
pub(super) async fn claim(
    store: &Store,
    order: Order<'_>,
    hinted: &[SessionId],
) -> Result<Vec<(Lease, Option<Arriving>)>, StoreError> {
    // Not one of the connections that are kept for leases: a long history would keep heartbeats waiting.
    let client = store.client().await?;
    client.prepare_cached(altered(sql::CLAIM_NAMED)).await?;
    let reads = Reads::prepare(&client).await?;
    let (answer, answered) = oneshot::channel();
    let (agents, hinted) = (order.agents.to_vec(), hinted.to_vec());
    let Order { worker, free, ttl, .. } = order;
    // A task of its own: the claim is answered before the sessions have been read.
    tokio::spawn(async move {
        let claiming = async {
            let order = Order { worker, free, ttl, agents: &agents };
            let mut awaiting = HashMap::new();
            let leases = claim_named(&client, order, &hinted).await.map(|leases| {
                let awaited = leases.into_iter().map(|lease| {
                    let (arriving, arrives) = oneshot::channel();
                    awaiting.insert(lease.session, arriving);
                    (lease, Some(arrives))
                });
                awaited.collect::<Vec<_>>()
            });
            // Who asked may have gone; the leases then expire.
            let _ = answer.send(leases);
            awaiting
        };
        // Polled, and so sent, in this order: what is read is read after the claim was committed.
        let (mut awaiting, read) = futures::join!(claiming, reads.of(&client, &hinted, Some(worker)));
        for loaded in read.into_iter().flatten().flatten() {
            if let Some(arriving) = awaiting.remove(&loaded.session.id) {
                // Its task may have gone.
                let _ = arriving.send(loaded);
            }
        }
    });
    answered.await.map_err(|_| StoreError::Unavailable("the task of the claim has ended".to_owned()))?
}
