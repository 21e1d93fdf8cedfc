//! Webhooks: what waits for each endpoint, and what was given up.

use chrono::{DateTime, Utc};

use super::{COUNTED, within};
use crate::{Store, errors::StoreError};

/// An endpoint and what there is for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndpointState {
    /// Its name: `server`, or `agent:` and the slug.
    pub name: String,
    /// Since when its receiver wants nothing more.
    pub disabled_at: Option<DateTime<Utc>>,
    /// Deliveries that wait, up to [`COUNTED`].
    pub pending: i64,
    /// Since when the oldest of them waits.
    pub oldest: Option<DateTime<Utc>>,
    /// Deliveries that were given up, up to [`COUNTED`].
    pub dead: i64,
    /// When the first event happened that nobody has looked at for it yet.
    pub unread_since: Option<DateTime<Utc>>,
    /// How the last attempt of one that waits failed.
    pub last_error: Option<String>,
}

/// Every endpoint, by name, up to a thousand.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn webhooks(store: &Store) -> Result<Option<Vec<EndpointState>>, StoreError> {
    within(store, async |tx| {
        sqlx::query_file_as!(EndpointState, "src/status/sql/webhooks.sql", COUNTED).fetch_all(&mut *tx).await
    })
    .await
}
