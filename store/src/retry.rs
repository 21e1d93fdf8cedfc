//! Trying again where Postgres chose another transaction, and nowhere else.

use crate::errors::StoreError;

/// How often a transaction is tried again that Postgres ended for another one.
const MAX_RIVALS: usize = 10;

/// Runs `attempt` until it isn't ended by a deadlock or a serialization failure. What it does must
/// be one transaction: an attempt that failed has left nothing.
///
/// # Errors
/// Whatever `attempt` fails with, or [`StoreError::Rival`] after too many tries.
pub(crate) async fn against_rivals<T, F, Fut>(mut attempt: F) -> Result<T, StoreError>
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Result<T, StoreError>>,
{
    for _ in 0..MAX_RIVALS {
        match attempt().await {
            Err(StoreError::Rival) => {}
            other => return other,
        }
    }
    Err(StoreError::Rival)
}
