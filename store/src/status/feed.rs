//! How far the feed across sessions is behind, and who keeps it.

use chrono::{DateTime, Utc};

use sqlx::PgConnection;

use super::within;
use crate::{Store, errors::StoreError};

/// How many of the events that the feed can't show yet are counted at most.
pub const HELD_BACK_COUNTED: i64 = 10_000;

/// What the feed across sessions can't show yet: whatever was written since its oldest writer began.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FeedState {
    /// How many stored events it can't show yet; [`HELD_BACK_COUNTED`] stands for that many or more.
    pub held_back: i64,
    /// For how many microseconds the oldest of them has waited; 0 if there is none.
    pub lag_micros: i64,
    /// Whose transaction it waits for, if any is open.
    pub oldest_writer: Option<Writer>,
}

/// Who holds a transaction open that may still write, in any database of the cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Writer {
    /// The server process; none for a prepared transaction, which no process holds.
    pub pid: Option<i32>,
    /// The application's name, or the prepared transaction's.
    pub name: String,
    /// The database.
    pub database: Option<String>,
    /// What the session is doing, in Postgres's words; none if this role may not know.
    pub state: Option<String>,
    /// When the transaction began; none if this role may not know.
    pub since: Option<DateTime<Utc>>,
}

/// Where the feed across sessions stands.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn feed(store: &Store) -> Result<FeedState, StoreError> {
    let mut connection = store.read().acquire().await?;
    Ok(read(&mut connection).await?)
}

/// As [`feed`], in the time that a section of a report has.
///
/// # Errors
/// As [`feed`].
pub async fn feed_within(store: &Store) -> Result<Option<FeedState>, StoreError> {
    within(store, async |tx| read(tx).await).await
}

async fn read(connection: &mut PgConnection) -> Result<FeedState, sqlx::Error> {
    // The writer first: events that it held back until the second question are no lag of the feed's.
    let oldest_writer = sqlx::query_as!(
        Writer,
        r#"SELECT pid AS "pid?", name AS "name!", database AS "database?", state AS "state?", since AS "since?"
           FROM (SELECT pid, coalesce(application_name, '') AS name, datname::text AS database, state,
                        xact_start AS since, age(backend_xid) AS age
                 FROM pg_stat_activity WHERE backend_xid IS NOT NULL
                 UNION ALL
                 SELECT NULL, gid, database::text, 'prepared', prepared, age(transaction) FROM pg_prepared_xacts) w
           ORDER BY age DESC LIMIT 1"#
    )
    .fetch_optional(&mut *connection)
    .await?;
    let held = sqlx::query!(
        r#"SELECT count(*) AS "events!",
                  coalesce((extract(epoch FROM now() - min(at)) * 1000000)::bigint, 0) AS "lag_micros!"
           FROM (SELECT at FROM events WHERE xid >= pg_snapshot_xmin(pg_current_snapshot())
                 ORDER BY xid, session_id, seq LIMIT $1) held"#,
        HELD_BACK_COUNTED
    )
    .fetch_one(&mut *connection)
    .await?;
    Ok(FeedState { held_back: held.events, lag_micros: held.lag_micros.max(0), oldest_writer })
}
