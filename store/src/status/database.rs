//! Whether the database itself is the limit.

use chrono::{DateTime, Utc};

use super::within;
use crate::{Store, errors::StoreError};

/// Connections of clients, of all databases of the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Connections {
    /// How many the server takes.
    pub limit: i32,
    /// How many of these it keeps for superusers.
    pub reserved: i32,
    /// How many there are.
    pub used: i64,
    /// Those that Holdfast's processes opened.
    pub holdfast: i64,
    /// Those that run a statement, this one apart.
    pub active: i64,
    /// Those that hold a transaction open and do nothing.
    pub idle_in_transaction: i64,
    /// Those that wait for a lock.
    pub waiting_for_locks: i64,
    /// Whether the server is a standby.
    pub standby: bool,
}

/// A transaction that is open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transaction {
    /// The server process.
    pub pid: i32,
    /// The application's name.
    pub name: String,
    /// The database.
    pub database: Option<String>,
    /// What the connection is doing; none if this role may not know.
    pub state: Option<String>,
    /// When it began.
    pub since: DateTime<Utc>,
    /// The kind of what it waits for.
    pub wait_type: Option<String>,
    /// What it waits for.
    pub wait: Option<String>,
}

/// Whose snapshot is the oldest: rows that died after it can't be removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Horizon {
    /// `session`, `slot` or `prepared`.
    pub kind: String,
    /// The application's, the slot's or the prepared transaction's name.
    pub name: String,
    /// The server process, where there is one.
    pub pid: Option<i32>,
    /// How many transactions have begun since.
    pub age: i64,
    /// Since when, where that is known.
    pub since: Option<DateTime<Utc>>,
}

/// A connection that waits for a lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LockWait {
    /// The server process.
    pub pid: i32,
    /// The application's name.
    pub name: String,
    /// The table, or the kind of lock.
    pub what: String,
    /// The lock's mode.
    pub mode: String,
    /// Since when it waits.
    pub since: Option<DateTime<Utc>>,
    /// The processes that it waits for.
    pub blocked_by: Vec<i32>,
}

/// A table with its partitions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// Its name.
    pub name: String,
    /// About how many rows it has.
    pub live: i64,
    /// About how many dead ones.
    pub dead: i64,
    /// When it was last vacuumed.
    pub vacuumed_at: Option<DateTime<Utc>>,
    /// The room that it takes, indexes included.
    pub bytes: i64,
}

/// What the database counts of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Totals {
    /// The room that it takes.
    pub bytes: i64,
    /// Blocks found in the server's memory.
    pub hits: i64,
    /// Blocks that weren't.
    pub reads: i64,
    /// Deadlocks.
    pub deadlocks: i64,
    /// Bytes of sorts and the like that went to disk.
    pub spilled_bytes: i64,
    /// Since when it counts.
    pub counted_since: Option<DateTime<Utc>>,
}

/// What the database says of itself. A role that isn't in `pg_monitor` learns little of other roles' sessions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Database {
    /// Its connections.
    pub connections: Connections,
    /// The transactions that have been open the longest, three of them.
    pub transactions: Vec<Transaction>,
    /// The oldest snapshot.
    pub horizon: Option<Horizon>,
    /// Who waits for locks, the longest first, five of them.
    pub lock_waits: Vec<LockWait>,
    /// What busy connections wait for now, and how many for each.
    pub waits: Vec<(String, i64)>,
    /// Counters; `None` if they took too long.
    pub totals: Option<Totals>,
    /// The largest tables; `None` if measuring them took too long.
    pub tables: Option<Vec<Table>>,
}

/// Asks the database about itself.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn database(store: &Store) -> Result<Option<Database>, StoreError> {
    let tables = within(store, async |tx| {
        sqlx::query_file_as!(Table, "src/status/sql/tables.sql").fetch_all(tx).await
    })
    .await?;
    let totals = within(store, async |tx| {
        sqlx::query_file_as!(Totals, "src/status/sql/totals.sql").fetch_one(tx).await
    })
    .await?;
    within(store, async |tx| {
        let connections =
            sqlx::query_file_as!(Connections, "src/status/sql/connections.sql").fetch_one(&mut *tx).await?;
        let transactions =
            sqlx::query_file_as!(Transaction, "src/status/sql/transactions.sql").fetch_all(&mut *tx).await?;
        let horizon =
            sqlx::query_file_as!(Horizon, "src/status/sql/horizon.sql").fetch_optional(&mut *tx).await?;
        let lock_waits =
            sqlx::query_file_as!(LockWait, "src/status/sql/lock_waits.sql").fetch_all(&mut *tx).await?;
        let waits = sqlx::query_file!("src/status/sql/waits.sql").fetch_all(&mut *tx).await?;
        let waits = waits.into_iter().map(|row| (row.wait, row.connections)).collect();
        Ok(Database { connections, transactions, horizon, lock_waits, waits, totals, tables })
    })
    .await
}
