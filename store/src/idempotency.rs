//! Idempotency keys: remembered in the transaction of the effect that they stand for.

use crate::{
    errors::StoreError,
    plant::{self, Mistake},
    sql,
    transaction::{Parameters, Transaction},
};

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

/// Begins a command's transaction with its first reads and locks. If it has a key, that comes first: a
/// repeat reads nothing, and its transaction has ended.
///
/// # Errors
/// [`StoreError::IdempotencyMismatch`] if the key was sent with another request; what `reads` fail with.
pub(crate) async fn begin<T>(
    tx: &Transaction,
    key: Option<&Key>,
    resource: &str,
    reads: impl Future<Output = Result<T, StoreError>>,
) -> Result<Done<T>, StoreError> {
    let Some(key) = key.filter(|_| !plant::made(Mistake::ForgetKey)) else {
        let ((), read) = futures::try_join!(tx.begin(), reads)?;
        return Ok(Done::Now(read));
    };
    tx.begin().await?;
    match remember(tx, key, resource).await? {
        Some((code, resource)) => {
            tx.rollback().await?;
            Ok(Done::Before { code, resource })
        }
        None => Ok(Done::Now(reads.await?)),
    }
}

/// Remembers a key, or finds what it stood for. A rival with the same key waits here until the
/// first one's transaction ends.
async fn remember(tx: &Transaction, key: &Key, resource: &str) -> Result<Option<(i16, String)>, StoreError> {
    tx.prepare(&[sql::FORGET_OLD_KEY, sql::REMEMBER_KEY]).await?;
    let hash = key.hash.as_slice();
    let forget: Parameters<'_> = &[&key.principal, &key.key];
    let remember: Parameters<'_> = &[&key.principal, &key.key, &hash, &key.code, &resource];
    let (_, fresh) =
        futures::try_join!(tx.execute(sql::FORGET_OLD_KEY, forget), tx.execute(sql::REMEMBER_KEY, remember))?;
    if fresh == 1 {
        return Ok(None);
    }
    let row = tx.query_opt(sql::RECALL_KEY, &[&key.principal, &key.key]).await?.ok_or(StoreError::Rival)?;
    if row.try_get::<_, &[u8]>("hash")? != hash {
        return Err(StoreError::IdempotencyMismatch);
    }
    Ok(Some((row.try_get("code")?, row.try_get("resource")?)))
}
