//! Which database a process uses, and waiting for it.

use std::{fmt, path::Path, time::Duration};

use holdfast_store::{
    StoreError,
    connect::{ConnectError, ConnectOptions, Fault},
    embedded::{Cluster, EmbeddedOptions, StopMode},
    install,
    migrate::MigrateError,
};
use tokio::time::{Instant, sleep, timeout};

use crate::{
    args::DatabaseArgs,
    failure::{Failure, chain},
};

/// How long a starting process waits for a database that is away.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// The longest pause between two tries.
const MAX_PAUSE: Duration = Duration::from_secs(3);
/// Connections of each pool where no flag says otherwise.
const CONNECTIONS: u32 = 8;
/// The embedded cluster's database.
const EMBEDDED: &str = "holdfast";

/// The database of a process: one that it was told of, or an embedded one.
pub(crate) struct Database {
    url: String,
    listen_url: Option<String>,
    connections: u32,
    cluster: Option<Cluster>,
}

impl Database {
    /// Finds the database; starts and creates an embedded one, installing the server programs if the
    /// system has none.
    pub(crate) async fn open(args: &DatabaseArgs) -> Result<Self, Failure> {
        match (&args.database_url, &args.listen_database_url) {
            (Some(url), listen_url) => Ok(Self {
                url: url.clone(),
                listen_url: listen_url.clone(),
                connections: args.db_connections,
                cluster: None,
            }),
            (None, Some(_)) => Err(Failure::Config(
                "--listen-database-url needs --database-url beside it; the embedded database has no pooler"
                    .into(),
            )),
            (None, None) => {
                Ok(Self { connections: args.db_connections, ..Self::embedded(&args.data_dir).await? })
            }
        }
    }

    /// As [`Self::open`], but an embedded database must have been created before.
    pub(crate) async fn existing(args: &DatabaseArgs) -> Result<Self, Failure> {
        if args.database_url.is_none()
            && args.listen_database_url.is_none()
            && !args.data_dir.join("postgres").is_dir()
        {
            return Err(Failure::Config(format!(
                "no database is given and there is no embedded one in {}: give --database-url or --data-dir",
                args.data_dir.display()
            )));
        }
        Self::open(args).await
    }

    /// The embedded database of a directory.
    pub(crate) async fn embedded(data_dir: &Path) -> Result<Self, Failure> {
        let failed = Failure::during("the embedded database");
        install::ensure_installed().await.map_err(|error| failed(&error))?;
        let cluster = Cluster::start(EmbeddedOptions::new(data_dir)).await.map_err(|error| failed(&error))?;
        cluster.create_database(EMBEDDED).await.map_err(|error| failed(&error))?;
        let (url, connections) = (cluster.url(EMBEDDED), CONNECTIONS);
        Ok(Self { url, listen_url: None, connections, cluster: Some(cluster) })
    }

    /// The URL, which contains the password.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// The URL that leads to the server directly.
    pub(crate) fn direct_url(&self) -> &str {
        self.listen_url.as_deref().unwrap_or(&self.url)
    }

    /// The embedded cluster, where it is one.
    pub(crate) fn cluster(&self) -> Option<&Cluster> {
        self.cluster.as_ref()
    }

    /// How to connect in a role.
    pub(crate) fn options(&self, role: &str) -> ConnectOptions {
        ConnectOptions {
            listen_url: self.listen_url.clone(),
            transaction_pooler: self.listen_url.is_some(),
            hot_connections: self.connections as usize,
            read_connections: self.connections,
            ..ConnectOptions::new(self.url.clone(), role)
        }
    }

    /// Stops an embedded cluster that this process started.
    pub(crate) async fn close(self) {
        if let Some(cluster) = self.cluster
            && let Err(error) = cluster.stop(StopMode::Fast).await
        {
            tracing::warn!(%error, "the embedded database didn't stop cleanly");
        }
    }
}

impl fmt::Display for Database {
    /// Where the database is, without credentials.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&shown(&self.url))
    }
}

// The URL holds a password.
impl fmt::Debug for Database {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Database({self})")
    }
}

/// A URL without credentials and options; something that is no URL isn't shown at all.
fn shown(url: &str) -> String {
    let Ok(mut url) = reqwest::Url::parse(url) else { return "postgres".to_owned() };
    // These fail on URLs without a host, which hold no credentials there either.
    let _ = url.set_username("");
    let _ = url.set_password(None);
    url.set_query(None);
    url.set_fragment(None);
    url.to_string()
}

/// What a failed try at the start means.
pub(crate) trait Attempt: std::error::Error {
    /// Whether trying again may help.
    fn may_pass(&self) -> bool;
    /// What ends the process.
    fn failure(&self) -> Failure {
        Failure::Failed(chain_of(self))
    }
}

fn chain_of<E: std::error::Error + ?Sized>(error: &E) -> String {
    let mut text = error.to_string();
    if let Some(cause) = error.source() {
        let more = chain(cause);
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
    }
    text
}

impl Attempt for ConnectError {
    fn may_pass(&self) -> bool {
        self.fault() != Fault::Permanent
    }

    fn failure(&self) -> Failure {
        match self {
            Self::Url(_) | Self::Tls(_) => Failure::Config(self.to_string()),
            other => Failure::Failed(chain_of(other)),
        }
    }
}

impl Attempt for MigrateError {
    fn may_pass(&self) -> bool {
        match self {
            Self::Connect(error) => error.may_pass(),
            _ => false,
        }
    }

    fn failure(&self) -> Failure {
        match self {
            Self::Connect(error) => error.failure(),
            Self::Outdated(_) | Self::Diverged { .. } | Self::Changed { .. } => {
                Failure::Config(self.to_string())
            }
            other => Failure::Failed(chain_of(other)),
        }
    }
}

impl Attempt for StoreError {
    fn may_pass(&self) -> bool {
        matches!(self, Self::Unavailable(_) | Self::Rival)
    }
}

/// Tries until it works, a failure can't pass, or [`PATIENCE`] is at its end.
pub(crate) async fn patiently<T, E: Attempt>(
    what: &str,
    mut attempt: impl AsyncFnMut() -> Result<T, E>,
) -> Result<T, Failure> {
    let deadline = Instant::now() + PATIENCE;
    let mut pause = Duration::from_millis(200);
    loop {
        let error = match attempt().await {
            Ok(done) => return Ok(done),
            Err(error) => error,
        };
        if !error.may_pass() || Instant::now() + pause > deadline {
            return Err(error.failure());
        }
        tracing::warn!(kind = "database.awaited", error = %error, "{what}: the database is away, trying again");
        sleep(pause).await;
        pause = (pause * 2).min(MAX_PAUSE);
    }
}

/// Tries once, for so long at most.
pub(crate) async fn once<T, E: Attempt>(
    what: &str,
    limit: Duration,
    attempt: impl Future<Output = Result<T, E>>,
) -> Result<T, Failure> {
    match timeout(limit, attempt).await {
        Ok(done) => done.map_err(|error| error.failure()),
        Err(_) => Err(Failure::Failed(format!("{what}: no answer within {} s", limit.as_secs()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_secret_is_shown_of_a_url() {
        assert_eq!(shown("postgres://u:secret@h:5/db?password=x#y"), "postgres://h:5/db");
        assert_eq!(shown("postgres:///db?host=/run&password=x"), "postgres:///db");
        assert_eq!(shown("host=h password=secret"), "postgres");
    }

    #[derive(Debug, thiserror::Error)]
    #[error("away")]
    struct Away(bool);

    impl Attempt for Away {
        fn may_pass(&self) -> bool {
            self.0
        }
    }

    #[tokio::test]
    async fn a_database_that_comes_late_is_waited_for() {
        let mut tries = 0;
        let done = patiently("test", async || {
            tries += 1;
            if tries < 3 { Err(Away(true)) } else { Ok(tries) }
        });
        assert_eq!(done.await, Ok(3));
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_tried_once_neither_repeats_nor_lasts() {
        let limit = Duration::from_secs(10);
        let done = once("test", limit, std::future::ready(Err::<(), _>(Away(true)))).await;
        assert_eq!(done, Err(Failure::Failed("away".into())), "though it may pass");
        let before = Instant::now();
        let done = once("test", limit, std::future::pending::<Result<(), Away>>()).await;
        assert_eq!(done, Err(Failure::Failed("test: no answer within 10 s".into())));
        assert_eq!(before.elapsed(), limit);
        assert_eq!(once("test", limit, std::future::ready(Ok::<_, Away>(7))).await, Ok(7));
    }

    #[tokio::test]
    async fn what_cannot_pass_ends_the_start_at_once() {
        let mut tries = 0;
        let done = patiently("test", async || {
            tries += 1;
            Err::<(), _>(Away(false))
        })
        .await;
        assert_eq!(done, Err(Failure::Failed("away".into())));
        assert_eq!(tries, 1);
    }

    #[tokio::test]
    async fn a_direct_url_alone_is_a_configuration_error() {
        let args = DatabaseArgs {
            database_url: None,
            listen_database_url: Some("postgres://h/db".into()),
            db_connections: 8,
            data_dir: "nowhere".into(),
        };
        assert_eq!(Database::open(&args).await.expect_err("refused").code(), 3);
        let none = DatabaseArgs { listen_database_url: None, ..args };
        assert_eq!(Database::existing(&none).await.expect_err("refused").code(), 3);
    }
}
