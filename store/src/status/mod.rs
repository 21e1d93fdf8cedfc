//! What a person on call asks of the database: what waits and why, who holds what, what fails, and what may go.
//!
//! Every section is read in a read-only transaction of its own, whose statements may take [`SECTION_LIMIT`] each
//! and look at no more rows than they say. A section that takes longer is `None`, and the others are told.

mod database;
mod deferred;
mod failures;
mod feed;
mod leases;
mod queue;
mod retention;
mod session;
mod sql;
mod webhooks;

use std::time::Duration;

use sqlx::PgConnection;

use crate::{Store, errors::StoreError};

pub use database::{Connections, Database, Horizon, LockWait, Table, Totals, Transaction, database};
pub use deferred::{Deferred, Group, OldestCall, deferred};
pub use failures::{EVENTS_LOOKED_AT, FAILURES_SHOWN, Failed, Failures, failures};
pub use feed::{FeedState, HELD_BACK_COUNTED, Writer, feed, feed_within};
pub use leases::{
    Held, LIVE_WITHIN, Leases, Step, StepKind, TakenOver, Worker, agents, leases, steps, workers,
};
pub use queue::{Counts, OwnerLoad, Queue, Unserved, Waiting, counts, owner, queue, unserved};
pub use retention::{Ages, Closed, OldEvents, Rest, Retention, SESSIONS_LOOKED_AT, retention};
pub use session::{Happened, OneCall, OneRun, OneSession, session};
pub use sql::ALL;
pub use webhooks::{EndpointState, webhooks};

/// How long one statement of a report may take.
pub const SECTION_LIMIT: Duration = Duration::from_secs(2);

/// How far rows are counted where a number is told.
pub const COUNTED: i64 = 100_000;

/// How many queued runs are looked at to find the owners that have the most.
pub const QUEUED_LOOKED_AT: i64 = 1_000_000;

/// Reads a section of a report; `None` if a statement took longer than [`SECTION_LIMIT`].
pub(crate) async fn within<T>(
    store: &Store,
    read: impl AsyncFnOnce(&mut PgConnection) -> Result<T, sqlx::Error>,
) -> Result<Option<T>, StoreError> {
    let mut tx = store.read().begin().await?;
    let limit = SECTION_LIMIT.as_millis().to_string();
    // Compiling a plan for a statement that runs once costs more than it brings.
    sqlx::query!(
        r#"SELECT set_config('statement_timeout', $1, true) AS "limit!", set_config('jit', 'off', true) AS "jit!",
                  set_config('transaction_read_only', 'on', true) AS "reads!""#,
        limit
    )
    .fetch_one(&mut *tx)
    .await?;
    match read(&mut tx).await {
        Ok(section) => {
            tx.rollback().await?;
            Ok(Some(section))
        }
        Err(error) if took_too_long(&error) => {
            tx.rollback().await?;
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

/// Whether the server ended the statement, for its time or because somebody asked it to.
fn took_too_long(error: &sqlx::Error) -> bool {
    error.as_database_error().and_then(|error| error.code()).is_some_and(|code| code == "57014")
}
