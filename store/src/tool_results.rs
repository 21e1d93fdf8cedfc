//! Results of calls that are given again to later calls of the same owner, whichever worker has them.

use std::time::Duration;

use holdfast_engine::content::{Digest, ToolResult};

use tokio_postgres::Row;

use crate::{Store, errors::StoreError, sql};

/// The longest result that is kept, in bytes of its JSON.
pub const MAX_RESULT: usize = 256 * 1024;

/// The result of an earlier call, if one is kept that is no older than `ttl`.
///
/// # Errors
/// [`StoreError`] as the database has it, and for a row that this build can't read.
pub async fn recall(
    store: &Store,
    owner: &str,
    key: &Digest,
    ttl: Duration,
) -> Result<Option<ToolResult>, StoreError> {
    let client = store.client().await?;
    let statement = client.prepare_cached(sql::RECALL_RESULT).await?;
    let row = client.query_opt(&statement, &[&owner, &key.0.as_slice(), &ttl.as_secs_f64()]).await?;
    let result = |row: Row| Ok(serde_json::from_str::<ToolResult>(row.try_get("result")?)?.bounded());
    row.map(result).transpose()
}

/// Keeps a result for `ttl`, in place of an earlier one. Returns whether it is kept: one that is longer than
/// [`MAX_RESULT`] isn't.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn remember(
    store: &Store,
    owner: &str,
    key: &Digest,
    result: &ToolResult,
    ttl: Duration,
) -> Result<bool, StoreError> {
    let text = serde_json::to_string(result)?;
    if text.len() > MAX_RESULT {
        return Ok(false);
    }
    let client = store.client().await?;
    let statement = client.prepare_cached(sql::REMEMBER_RESULT).await?;
    client.execute(&statement, &[&owner, &key.0.as_slice(), &text, &ttl.as_secs_f64()]).await?;
    Ok(true)
}
