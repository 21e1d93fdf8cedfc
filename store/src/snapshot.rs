//! A session as clients read it, at one moment: its row, its newest turns and its open calls, read in one round trip.

use deadpool_postgres::Client;
use futures::{FutureExt, future::BoxFuture, try_join};
use holdfast_engine::{ids::SessionId, turn::Turn};
use tokio_postgres::{Row, types::ToSql};

use crate::{
    Store,
    errors::StoreError,
    history::{DeferredCall, PAGE_BYTES, UntoldCall, deferred_call, untold_call},
    load::turn,
    sessions::{SessionRow, session_row},
    sql,
    transaction::{Parameter, Parameters},
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
    let owner = Some(owner.to_owned());
    let Rows { row, turns, pending, calls } =
        aside(store, move |client| async move { rows(&client, owner, id, limit).await }.boxed()).await?;
    let row = row.ok_or(StoreError::UnknownSession)?;
    Ok(Snapshot {
        row: session_row(&row)?,
        turns: turns.iter().map(turn).collect::<Result<_, _>>()?,
        pending: pending.iter().map(deferred_call).collect::<Result<_, _>>()?,
        untold: calls.iter().map(untold_call).collect::<Result<_, _>>()?,
    })
}

/// What a snapshot is made of. Each statement asks for itself whose the session is: nothing of another owner's is read.
struct Rows {
    row: Option<Row>,
    turns: Vec<Row>,
    pending: Vec<Row>,
    calls: Vec<Row>,
}

async fn rows(client: &Client, owner: Option<String>, id: SessionId, limit: i64) -> Result<Rows, StoreError> {
    // Prepared first, so that all is sent at once.
    let (session, turns) =
        (client.prepare_cached(sql::VIEW_SESSION).await?, client.prepare_cached(sql::VIEW_TURNS).await?);
    let (pending, calls) =
        (client.prepare_cached(sql::VIEW_PENDING).await?, client.prepare_cached(sql::VIEW_CALLS).await?);
    let of_owner: Parameters<'_> = &[&id.0, &owner];
    let of_turns: Parameters<'_> = &[&id.0, &i64::MAX, &limit, &PAGE_BYTES, &owner];
    let ((), row, turns, pending, calls, ()) = try_join!(
        client.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"),
        client.query_opt(&session, of_owner),
        client.query(&turns, of_turns),
        client.query(&pending, of_owner),
        client.query(&calls, of_owner),
        client.batch_execute("COMMIT"),
    )?;
    Ok(Rows { row, turns, pending, calls })
}

/// Reads for a client, who may go away: in a task of its own, since a connection isn't free before everything that it
/// was asked has been answered. Rows are taken apart by the caller, when the connection is free again.
///
/// # Errors
/// As `read`; [`StoreError::Unavailable`] where too many read at once for too long.
pub(crate) async fn aside<T: Send + 'static>(
    store: &Store,
    read: impl FnOnce(Client) -> BoxFuture<'static, Result<T, StoreError>> + Send + 'static,
) -> Result<T, StoreError> {
    let (client, place) = store.db().view_client().await?;
    let reading = tokio::spawn(async move {
        let rows = read(client).await;
        drop(place);
        rows
    });
    reading.await.map_err(|_| StoreError::Unavailable("a read has ended early".to_owned()))?
}

/// The rows of one statement, read [aside](aside).
pub(crate) async fn aside_rows(
    store: &Store,
    statement: &'static str,
    parameters: Vec<Parameter<'static>>,
) -> Result<Vec<Row>, StoreError> {
    let read = move |client: Client| {
        async move {
            let statement = client.prepare_cached(statement).await?;
            let parameters: Vec<&(dyn ToSql + Sync)> =
                parameters.iter().map(|parameter| &**parameter as &(dyn ToSql + Sync)).collect();
            Ok(client.query(&statement, &parameters).await?)
        }
        .boxed()
    };
    aside(store, read).await
}
