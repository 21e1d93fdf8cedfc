//! A session as clients read it, at one moment: its row, its newest turns and its open calls, read in one round trip.

use futures::try_join;
use holdfast_engine::{ids::SessionId, turn::Turn};

use crate::{
    Store,
    errors::StoreError,
    history::{DeferredCall, PAGE_BYTES, UntoldCall, deferred_call, untold_call},
    load::turn,
    sessions::{SessionRow, session_row},
    sql,
    transaction::Parameters,
};

/// A session, all of it as it was at one moment.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// Its row.
    pub row: SessionRow,
    /// Its newest turns, newest first: as many as were asked for, and no more than the first two that come to more than
    /// [`PAGE_BYTES`].
    pub turns: Vec<Turn>,
    /// Its open deferred calls, in the order in which they were asked for.
    pub pending: Vec<DeferredCall>,
    /// The calls that the model hasn't been told the end of, in the same order.
    pub untold: Vec<UntoldCall>,
}

/// Reads a session of an owner, with at most `limit` turns.
///
/// # Errors
/// [`StoreError::UnknownSession`], also for another owner's and a deleted one; [`StoreError::Corrupt`] if this build
/// can't read a turn or a call.
pub async fn read(store: &Store, owner: &str, id: SessionId, limit: i64) -> Result<Snapshot, StoreError> {
    let client = store.client().await?;
    // Prepared first, so that all is sent at once: whoever goes away then leaves no transaction open.
    let (session, turns) =
        (client.prepare_cached(sql::VIEW_SESSION).await?, client.prepare_cached(sql::VIEW_TURNS).await?);
    let (pending, calls) =
        (client.prepare_cached(sql::VIEW_PENDING).await?, client.prepare_cached(sql::VIEW_CALLS).await?);
    let of_session: Parameters<'_> = &[&id.0, &Some(owner)];
    let of_calls: Parameters<'_> = &[&id.0];
    let of_turns: Parameters<'_> = &[&id.0, &i64::MAX, &limit, &PAGE_BYTES];
    let ((), row, turns, pending, calls, ()) = try_join!(
        client.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"),
        client.query_opt(&session, of_session),
        client.query(&turns, of_turns),
        client.query(&pending, of_calls),
        client.query(&calls, of_calls),
        client.batch_execute("COMMIT"),
    )?;
    let row = row.ok_or(StoreError::UnknownSession)?;
    Ok(Snapshot {
        row: session_row(&row)?,
        turns: turns.iter().map(turn).collect::<Result<_, _>>()?,
        pending: pending.iter().map(deferred_call).collect::<Result<_, _>>()?,
        untold: calls.iter().map(untold_call).collect::<Result<_, _>>()?,
    })
}
