//! What every handler can reach.

use std::{
    sync::{Arc, Mutex, PoisonError, atomic::AtomicBool},
    time::Instant,
};

use holdfast_store::{
    Store, StoreError,
    listen::Listener,
    sessions::{Census, census},
};
use prometheus::proto::MetricFamily;
use tokio_util::sync::CancellationToken;

use crate::{
    auth::{Tokens, TokensError, Who},
    blobs::Kept,
    config::Config,
    hub::Hub,
    limits,
    metrics::Metrics,
    origin::Origins,
};

/// One API node: its store, its configuration, and those who wait on it.
pub struct Api {
    pub(crate) store: Store,
    pub(crate) config: Config,
    pub(crate) tokens: Option<Tokens>,
    pub(crate) origins: Origins,
    pub(crate) hub: Arc<Hub>,
    pub(crate) metrics: Metrics,
    pub(crate) kept: Kept,
    /// Cancelled when the node closes: streams end, waiting requests answer.
    pub(crate) closing: CancellationToken,
    /// Whether the schema was found current once. Migrations only go forward.
    pub(crate) migrated: AtomicBool,
    counted: Mutex<Option<(Instant, Census)>>,
}

/// How handlers hold it.
pub type Shared = Arc<Api>;

impl Api {
    /// Whether a caller may do what only admins may; where there are no tokens, nobody is one.
    pub(crate) fn is_admin(&self, who: &Who) -> bool {
        self.config.admin_owners.iter().any(|admin| **admin == *who.owner)
    }

    /// Reads the tokens and starts the task that wakes whoever waits; it ends with `closing`.
    ///
    /// # Errors
    /// [`TokensError`] if the token file can't be used.
    pub fn start(
        store: Store,
        listener: Listener,
        config: Config,
        closing: CancellationToken,
    ) -> Result<Shared, TokensError> {
        let tokens = config.auth_tokens.as_deref().map(Tokens::read).transpose()?;
        let metrics = Metrics::new(&config.registry);
        let hub = Hub::new();
        tokio::spawn(Arc::clone(&hub).run(store.clone(), listener, closing.clone()));
        Ok(Arc::new(Self {
            store,
            tokens,
            origins: Origins::new(&config),
            config,
            hub,
            metrics,
            kept: Kept::new(limits::KEPT_BLOBS),
            closing,
            migrated: AtomicBool::new(false),
            counted: Mutex::new(None),
        }))
    }

    /// Everything that the process counts, cluster-wide numbers included, read anew if they are older than a
    /// second; they are missing while the database is away or slow.
    pub async fn gather(&self) -> Vec<MetricFamily> {
        self.metrics.refresh(self).await;
        self.config.registry.gather()
    }

    /// Counts of the queue, at most a second old.
    pub(crate) async fn census(&self) -> Result<Census, StoreError> {
        let kept = *self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((at, counts)) = kept
            && at.elapsed() < limits::CENSUS_AGE
        {
            return Ok(counts);
        }
        let counts = census(&self.store).await?;
        *self.counted.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), counts));
        Ok(counts)
    }
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Api").field("config", &self.config).finish_non_exhaustive()
    }
}

/// Runs a command to its end even if the client goes away in the middle of it, so that what was stored is
/// also announced.
pub(crate) async fn to_the_end<T: Send + 'static>(command: impl Future<Output = T> + Send + 'static) -> T {
    match tokio::spawn(command).await {
        Ok(done) => done,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // Only a runtime that shuts down ends the task, and this one with it.
            Err(_) => std::future::pending().await,
        },
    }
}
