//! Idempotency keys: remembered in the transaction of the effect that they stand for.

use deadpool_postgres::Transaction;

use crate::{errors::StoreError, sql};

/// A client's key, and what it was sent with.
#[derive(Debug, Clone)]
pub struct Key {
    /// Whose key it is.
    pub principal: String,
    /// The key.
    pub key: String,
    /// SHA-256 over method, path and body.
    pub hash: [u8; 32],
    /// The status code that the first success answers with.
    pub code: i16,
}

/// What became of a command that may be a repeat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Done<T> {
    /// It was carried out now.
    Now(T),
    /// It had been carried out before.
    Before {
        /// The code it was answered with.
        code: i16,
        /// What it made or changed, as the command named it.
        resource: String,
    },
}

/// Remembers a key, or finds what it stood for. A rival with the same key waits here until the
/// first one's transaction ends.
///
/// # Errors
/// [`StoreError::IdempotencyMismatch`] if the key was sent with another request.
pub(crate) async fn remember(
    tx: &Transaction<'_>,
    key: Option<&Key>,
    resource: &str,
) -> Result<Option<(i16, String)>, StoreError> {
    let Some(key) = key else { return Ok(None) };
    let forget = tx.prepare_cached(sql::FORGET_OLD_KEY).await?;
    tx.execute(&forget, &[&key.principal, &key.key]).await?;
    let insert = tx.prepare_cached(sql::REMEMBER_KEY).await?;
    let hash = key.hash.as_slice();
    let fresh = tx.execute(&insert, &[&key.principal, &key.key, &hash, &key.code, &resource]).await?;
    if fresh == 1 {
        return Ok(None);
    }
    let recall = tx.prepare_cached(sql::RECALL_KEY).await?;
    let row = tx.query_opt(&recall, &[&key.principal, &key.key]).await?.ok_or(StoreError::Rival)?;
    if row.try_get::<_, &[u8]>("hash")? != hash {
        return Err(StoreError::IdempotencyMismatch);
    }
    Ok(Some((row.try_get("code")?, row.try_get("resource")?)))
}
