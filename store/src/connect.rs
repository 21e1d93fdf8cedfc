//! Connections: a pool for the hot path, a pool for the read side, and what errors mean.
//!
//! Every session runs in UTC with `statement_timeout` 30 s, `lock_timeout` 10 s and
//! `idle_in_transaction_session_timeout` 5 s, sent as start-up options; those of the hot path also plan each
//! statement once and by indexes. The URL's own `options` come later and win. `search_path` stays as the role or the URL has it. Behind a transaction-mode pooler no options
//! are sent (see [`ConnectOptions::transaction_pooler`]): give the database role these settings instead.
//!
//! sqlx leaves a pooled connection inside a transaction when its `begin()` is cancelled (sqlx#4393). Never
//! put `begin()` under `timeout` or `select!`, nor in a handler that a disconnect cancels: spawn it. Plain
//! queries may be cancelled.

mod backoff;
mod fault;
mod target;
mod tls;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use deadpool_postgres::{
    Hook, HookError, Manager, ManagerConfig, Pool, PoolError, QueueMode, RecyclingMethod, Runtime,
    TimeoutType,
};
use sqlx::{
    Connection as _,
    postgres::{PgPool, PgPoolOptions},
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use crate::counters::{COUNTERS, Histogram, micros};

use crate::outage;

pub(crate) use backoff::Backoff;
pub use fault::{Fault, is_retryable, is_transient};
pub(crate) use target::{RawConnection, Session, Target};

/// Bound on opening a socket; the handshake may take as long again.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a pooled connection may have lain idle before it is asked whether it still works.
const TRUSTED_IDLE: Duration = Duration::from_secs(1);
/// Bound on that question.
const RECYCLE_TIMEOUT: Duration = Duration::from_secs(3);

/// How to connect.
#[derive(Clone)]
pub struct ConnectOptions {
    /// `postgres://` URL for the pools. `sslmode` is `disable`, `prefer` (the default), `require`,
    /// `verify-ca` or `verify-full`; the verifying ones trust the public authorities or `sslrootcert`.
    pub url: String,
    /// URL for what needs a session of its own: LISTEN, migrations. None takes `url`.
    pub listen_url: Option<String>,
    /// Names the sessions on the server: `holdfast-<role>`.
    pub role: String,
    /// Connections of the hot path.
    pub hot_connections: usize,
    /// Connections of the read side.
    pub read_connections: u32,
    /// How long a caller waits for a free connection of either pool.
    pub wait: Duration,
    /// `url` leads through a pooler in transaction mode: no start-up options, no named statements on the
    /// read side. Then `listen_url` must be given.
    pub transaction_pooler: bool,
}

impl ConnectOptions {
    /// Eight hot and eight read connections, five seconds of waiting, no pooler.
    pub fn new(url: impl Into<String>, role: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            listen_url: None,
            role: role.into(),
            hot_connections: 8,
            read_connections: 8,
            wait: Duration::from_secs(5),
            transaction_pooler: false,
        }
    }
}

// URLs hold passwords.
impl fmt::Debug for ConnectOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectOptions")
            .field("role", &self.role)
            .field("hot_connections", &self.hot_connections)
            .field("read_connections", &self.read_connections)
            .field("wait", &self.wait)
            .field("transaction_pooler", &self.transaction_pooler)
            .finish_non_exhaustive()
    }
}

/// Why there is no connection, or why a simple call on it failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The URL can't be used; the text doesn't quote it.
    #[error("the database URL is wrong: {0}")]
    Url(String),
    /// TLS can't be set up as the URL asks.
    #[error("TLS for the database: {0}")]
    Tls(String),
    /// Every connection of the hot pool stayed busy.
    #[error("no database connection became free within {} ms", waited.as_millis())]
    PoolTimeout {
        /// How long the caller waited.
        waited: Duration,
    },
    /// The server didn't answer in time.
    #[error("the database took over {} ms for {what}", limit.as_millis())]
    Slow {
        /// What was being done.
        what: &'static str,
        /// The bound.
        limit: Duration,
    },
    /// The pool can't give a connection for another reason.
    #[error("database pool: {0}")]
    Pool(#[source] PoolError),
    /// The hot path's driver failed.
    #[error("database: {}", described(.0))]
    Postgres(#[from] tokio_postgres::Error),
    /// The read side's driver failed.
    #[error("database: {0}")]
    Sqlx(#[from] sqlx::Error),
}

impl ConnectError {
    /// What the caller should do about it.
    pub fn fault(&self) -> Fault {
        match self {
            Self::Url(_) | Self::Tls(_) => Fault::Permanent,
            Self::PoolTimeout { .. } | Self::Slow { .. } => Fault::Unavailable,
            Self::Pool(error) => Fault::of_pool(error),
            Self::Postgres(error) => Fault::of(error),
            Self::Sqlx(error) => Fault::of_sqlx(error),
        }
    }

    /// The SQLSTATE, or one that says as much: a server that is too slow.
    pub(crate) fn code(&self) -> Option<&str> {
        match self {
            Self::PoolTimeout { .. } | Self::Slow { .. } => Some("57014"),
            Self::Postgres(error) => error.code().map(tokio_postgres::error::SqlState::code),
            _ => None,
        }
    }
}

/// The driver's text names only the step; the server's message or the system's error is the cause. A
/// server's detail is left out, as it quotes row values.
fn described(error: &tokio_postgres::Error) -> String {
    use std::error::Error as _;
    match (error.as_db_error(), error.source()) {
        (Some(db), _) => format!("{} ({})", db.message(), db.code().code()),
        (None, Some(cause)) => format!("{error}: {cause}"),
        (None, None) => error.to_string(),
    }
}

/// Connections kept for claims, heartbeats and releases, opened when they are first needed.
const LEASE_CONNECTIONS: usize = 2;

/// The connections of one process. Cheap to clone; all clones share the pools.
#[derive(Clone)]
pub struct Db {
    hot: Pool,
    leases: Pool,
    /// Places for views on connections of the hot path.
    views: Arc<Semaphore>,
    read: PgPool,
    listen_url: String,
    role: String,
    wait: Duration,
}

impl fmt::Debug for Db {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Db")
            .field("role", &self.role)
            .field("hot", &self.hot.status())
            .finish_non_exhaustive()
    }
}

/// Builds the pools and tries them once. A server that is away is no error: connections are opened as
/// they are needed, and [`Db::ping`] tells whether that works.
///
/// # Errors
/// [`ConnectError::Url`] and [`ConnectError::Tls`] for options that can't work, and what the server
/// answers when waiting doesn't help, such as a wrong password.
pub async fn connect(options: ConnectOptions) -> Result<Db, ConnectError> {
    let ConnectOptions { url, listen_url, role, wait, transaction_pooler, .. } = &options;
    if *transaction_pooler && listen_url.is_none() {
        return Err(ConnectError::Url("a transaction-mode pooler needs a direct URL beside it".to_owned()));
    }
    let of = |session| Target::parse(url, role, if *transaction_pooler { Session::Plain } else { session });
    let (hot, read) = (of(Session::Hot)?, of(Session::Bounded)?);
    let listen_url = listen_url.clone().unwrap_or_else(|| url.clone());
    Target::parse(&listen_url, role, Session::Bounded)?;

    let recycling = ManagerConfig { recycling_method: RecyclingMethod::Fast };
    let pool = |size: usize| {
        Pool::builder(Manager::from_config(hot.config.clone(), hot.tls.clone(), recycling.clone()))
            .max_size(size.max(1))
            .runtime(Runtime::Tokio1)
            .wait_timeout(Some(*wait))
            .create_timeout(Some(CONNECT_TIMEOUT * 2))
            .queue_mode(QueueMode::Lifo)
            .pre_recycle(Hook::async_fn(|client, metrics| {
                let idle = metrics.last_used();
                Box::pin(async move {
                    if idle < TRUSTED_IDLE {
                        return Ok(());
                    }
                    match tokio::time::timeout(RECYCLE_TIMEOUT, client.simple_query("")).await {
                        Ok(Ok(_)) => Ok(()),
                        _ => Err(HookError::message("it doesn't answer")),
                    }
                })
            }))
            .build()
            .map_err(|error| ConnectError::Url(error.to_string()))
    };
    let (hot, leases) = (pool(options.hot_connections)?, pool(LEASE_CONNECTIONS)?);
    let read = PgPoolOptions::new()
        .max_connections(options.read_connections.max(1))
        .acquire_timeout(*wait)
        .idle_timeout(Some(Duration::from_secs(300)))
        .max_lifetime(Some(Duration::from_secs(1800)))
        .test_before_acquire(false)
        .before_acquire(|connection, about| {
            Box::pin(async move {
                if about.idle_for >= TRUSTED_IDLE {
                    tokio::time::timeout(RECYCLE_TIMEOUT, connection.ping()).await.map_err(timed_out)??;
                }
                Ok(true)
            })
        })
        .connect_lazy_with(read.sqlx);
    let views = Arc::new(Semaphore::new((options.hot_connections / 2).max(1)));
    let db = Db { hot, leases, views, read, listen_url, role: options.role, wait: options.wait };
    match db.ping().await {
        Err(error) if error.fault() == Fault::Permanent => Err(error),
        Err(error) => {
            tracing::warn!(%error, "the database is away; connecting when it returns");
            Ok(db)
        }
        Ok(()) => Ok(db),
    }
}

fn timed_out(_: tokio::time::error::Elapsed) -> sqlx::Error {
    sqlx::Error::PoolTimedOut
}

impl Db {
    /// A connection of the hot path; one that lay idle has been proved to work by an empty statement. Return
    /// it by dropping it;
    /// statements prepared through its cache stay with it.
    ///
    /// # Errors
    /// [`ConnectError::PoolTimeout`] if none becomes free in time, else what connecting gave.
    pub async fn client(&self) -> Result<deadpool_postgres::Client, ConnectError> {
        self.of(&self.hot, &COUNTERS.hot_waits).await
    }

    /// A connection of the hot path for what a client reads, and a place among those who read: they have no more than
    /// half of the connections, so that what is stored doesn't wait behind what is read.
    ///
    /// # Errors
    /// As [`Db::client`].
    pub(crate) async fn view_client(
        &self,
    ) -> Result<(deadpool_postgres::Client, OwnedSemaphorePermit), ConnectError> {
        let place = tokio::time::timeout(self.wait, Arc::clone(&self.views).acquire_owned());
        let busy = || ConnectError::PoolTimeout { waited: self.wait };
        // The semaphore is never closed.
        let place = place.await.map_err(|_| busy())?.map_err(|_| busy())?;
        Ok((self.client().await?, place))
    }

    /// A connection for claims and heartbeats, which must not wait behind commands of clients.
    ///
    /// # Errors
    /// As [`Db::client`].
    pub async fn lease_client(&self) -> Result<deadpool_postgres::Client, ConnectError> {
        self.of(&self.leases, &COUNTERS.lease_waits).await
    }

    async fn of(&self, pool: &Pool, waits: &Histogram) -> Result<deadpool_postgres::Client, ConnectError> {
        let began = Instant::now();
        let got = pool.get().await;
        waits.observe(micros(began.elapsed()));
        got.map_err(|error| match error {
            PoolError::Timeout(TimeoutType::Wait) => ConnectError::PoolTimeout { waited: self.wait },
            PoolError::Timeout(TimeoutType::Create) => {
                ConnectError::Slow { what: "connecting", limit: CONNECT_TIMEOUT * 2 }
            }
            PoolError::Backend(error) => ConnectError::Postgres(error),
            other => ConnectError::Pool(other),
        })
    }

    /// The read side's pool.
    pub fn read(&self) -> &PgPool {
        &self.read
    }

    /// URL for connections with a session of their own: LISTEN and migrations. It contains the password.
    pub fn listen_url(&self) -> &str {
        &self.listen_url
    }

    /// The role given at the start, as in `holdfast-<role>`.
    pub fn role(&self) -> &str {
        &self.role
    }

    /// Size and use of the hot pool, for metrics.
    pub fn hot_status(&self) -> deadpool_postgres::Status {
        self.hot.status()
    }

    /// Size and use of the pool that is kept for leases, for metrics.
    pub fn lease_status(&self) -> deadpool_postgres::Status {
        self.leases.status()
    }

    /// Asks the server for a sign of life on the hot path.
    ///
    /// # Errors
    /// As [`Db::client`], and [`ConnectError::Slow`] after five seconds without an answer.
    pub async fn ping(&self) -> Result<(), ConnectError> {
        let client = self.client().await?;
        match tokio::time::timeout(CONNECT_TIMEOUT, client.simple_query("SELECT 1")).await {
            Ok(answer) => {
                answer?;
                outage::worked();
                Ok(())
            }
            Err(_) => Err(ConnectError::Slow { what: "a ping", limit: CONNECT_TIMEOUT }),
        }
    }

    /// Closes both pools: later calls fail, connections in use close when they come back.
    pub async fn close(&self) {
        self.hot.close();
        self.leases.close();
        self.read.close().await;
    }
}
