//! The database that the chaos stands on: a server of its own, which is restarted and filled up.

use std::net::{Ipv4Addr, SocketAddr};

use anyhow::{Result, ensure};
use holdfast_store::{
    embedded::{Cluster, EmbeddedOptions, StopMode},
    install::ensure_installed,
    migrate::migrate,
};
use tokio_postgres::{Client as Postgres, error::SqlState};

use crate::cluster::{connect, url_by};

/// Connections that the server takes: some more than the nodes hold when nothing befalls them.
const MAX_CONNECTIONS: usize = 160;

const DATABASE: &str = "chaos";

/// The server, with its files.
pub(super) struct Ground {
    cluster: Cluster,
    _dir: tempfile::TempDir,
}

impl Ground {
    /// A server that keeps what was committed, with a migrated database.
    ///
    /// # Errors
    /// If none can be installed or started.
    pub(super) async fn start() -> Result<Self> {
        ensure_installed().await?;
        let dir = tempfile::Builder::new().prefix("holdfast-chaos-").tempdir()?;
        // A server that stops waits for connections that haven't said yet who they are: those that a stalled
        // wire holds up would keep it for a minute.
        let settings = [
            ("max_connections", MAX_CONNECTIONS.to_string()),
            ("deadlock_timeout", "100ms".to_owned()),
            ("authentication_timeout", "3s".to_owned()),
        ];
        let settings = settings.map(|(name, value)| (name.to_owned(), value)).to_vec();
        let options = EmbeddedOptions { settings, ..EmbeddedOptions::new(dir.path()) };
        let cluster = Cluster::start(options).await?;
        cluster.create_database(DATABASE).await?;
        migrate(&cluster.url(DATABASE)).await?;
        Ok(Self { cluster, _dir: dir })
    }

    /// Where it listens.
    pub(super) fn address(&self) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, self.cluster.port()))
    }

    /// The database's URL by another address that leads there; never with TLS.
    ///
    /// # Errors
    /// If the server's own URL can't be read.
    pub(super) fn url_by(&self, address: SocketAddr) -> Result<String> {
        url_by(&self.cluster.url(DATABASE), address)
    }

    /// A connection of the chaos's own.
    ///
    /// # Errors
    /// As the server has it.
    pub(super) async fn connect(&self) -> Result<Postgres> {
        connect(&self.cluster.url(DATABASE)).await
    }

    /// Restarts the server.
    ///
    /// # Errors
    /// If it doesn't come back.
    pub(super) async fn restart(&self, mode: StopMode) -> Result<()> {
        Ok(self.cluster.restart(mode).await?)
    }

    /// Ends up to `most` connections of nodes, those of listeners alone if wanted.
    ///
    /// # Errors
    /// As the server has it.
    pub(super) async fn end_connections(&self, most: i64, listeners: bool) -> Result<()> {
        let sql = "SELECT pg_terminate_backend(pid) FROM (
                       SELECT pid FROM pg_stat_activity
                       WHERE application_name LIKE 'holdfast-%' AND datname = current_database()
                         AND (application_name LIKE '%-listen' OR NOT $2)
                       ORDER BY random() LIMIT $1) AS chosen";
        self.connect().await?.query(sql, &[&most, &listeners]).await?;
        Ok(())
    }

    /// Takes every connection that the server has left, and those of some nodes first. They are free again
    /// when what is returned is dropped.
    ///
    /// # Errors
    /// If the server refuses for another reason than that it is full.
    pub(super) async fn fill(&self) -> Result<Vec<Postgres>> {
        self.end_connections(12, false).await?;
        let mut taken = Vec::new();
        while taken.len() < MAX_CONNECTIONS {
            match self.connect().await {
                Ok(connection) => taken.push(connection),
                Err(error) => {
                    let state = error.downcast_ref::<tokio_postgres::Error>().and_then(|error| error.code());
                    ensure!(state == Some(&SqlState::TOO_MANY_CONNECTIONS), "{error:#}");
                    return Ok(taken);
                }
            }
        }
        Ok(taken)
    }
}
