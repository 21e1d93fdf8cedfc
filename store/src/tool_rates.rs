//! How fast calls of a tool may begin: one bucket for each owner, tool and limit, kept for all workers.
//!
//! A turn is taken before it is waited for, so that calls begin in the order in which they asked. One that is
//! given up meanwhile is lost: the limit is never exceeded, but may not be used up.

use std::time::Duration;

use crate::{Store, errors::StoreError, sql};

/// The longest that a turn is waited for.
pub const MAX_WAIT: Duration = Duration::from_secs(600);

/// How much later than its statement's time a turn may have been taken, having waited for the row.
const SLACK: Duration = Duration::from_secs(60);

/// A limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// Calls a minute, at least 1.
    pub per_minute: u32,
    /// Calls that may begin at once after a silence, at least 1.
    pub burst: u32,
}

/// Takes the next turn of an owner's bucket for a tool. Returns how long it has to be waited for, or `None`,
/// having taken none, if that is longer than `longest`, or than [`MAX_WAIT`].
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn take(
    store: &Store,
    owner: &str,
    tool: &str,
    rate: Rate,
    longest: Duration,
) -> Result<Option<Duration>, StoreError> {
    let client = store.client().await?;
    let statement = client.prepare_cached(sql::TAKE_TURN).await?;
    let number = |number: u32| i32::try_from(number.max(1)).unwrap_or(i32::MAX);
    let row = client
        .query_opt(
            &statement,
            &[
                &owner,
                &tool,
                &number(rate.per_minute),
                &number(rate.burst),
                &longest.min(MAX_WAIT).as_secs_f64(),
                &(MAX_WAIT + SLACK).as_secs_f64(),
            ],
        )
        .await?;
    let wait: Option<f64> = row.map(|row| row.try_get("wait")).transpose()?;
    Ok(wait.map(|wait| Duration::try_from_secs_f64(wait).unwrap_or_default()))
}
