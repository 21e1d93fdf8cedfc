//! A Postgres cluster of our own, from the server programs that the system has installed: for
//! development, the demo and the tests. It listens on loopback and on a private Unix socket, asks for a
//! random password on both, and stops with the process that started it, however that ends.
//!
//! Layout under `<data_dir>/postgres`: `data` (the database files), `password` (mode 0600), `port`,
//! `postgres.log` and `start.lock`.

mod discover;
mod home;
mod init;
mod launch;
mod postmaster;

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::process::Signal;

pub use discover::{Installation, MIN_MAJOR, installations, usable};
use home::Home;
use postmaster::{PidFile, Postmaster};

/// The role that owns the cluster.
const SUPERUSER: &str = "holdfast";
/// Bound on a fast stop, which waits for transactions to be rolled back and for a checkpoint.
const FAST_STOP: Duration = Duration::from_secs(30);
/// Bound on an immediate stop; the server itself kills what lingers for five seconds.
const IMMEDIATE_STOP: Duration = Duration::from_secs(15);

/// What [`Cluster::start`] needs to know.
#[derive(Debug, Clone)]
pub struct EmbeddedOptions {
    /// Directory of the whole installation; the cluster takes `postgres` in it. Created if absent.
    pub data_dir: PathBuf,
    /// True keeps what was committed through a power failure. False skips the disk's flushes, which
    /// survives any crash of processes but not one of the machine: for tests.
    pub durable: bool,
    /// Server settings as `(name, value)`, over the defaults.
    pub settings: Vec<(String, String)>,
    /// TCP port on 127.0.0.1. None takes the port of the last start if it is free, else any free one.
    pub port: Option<u16>,
}

impl EmbeddedOptions {
    /// A durable cluster under `data_dir` with default settings, on whatever port is free.
    pub fn new(data_dir: impl Into<PathBuf>) -> Self {
        Self { data_dir: data_dir.into(), durable: true, settings: Vec::new(), port: None }
    }
}

/// How a server is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopMode {
    /// Rolls back what is open, writes a checkpoint, closes every connection.
    Fast,
    /// As a crash: every process ends at once, and the next start recovers from the log.
    Immediate,
}

/// Why an embedded cluster can't be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EmbeddedError {
    /// No server programs on this machine.
    #[error(
        "no Postgres server is installed (looked for initdb and postgres); version {MIN_MAJOR} or newer is needed"
    )]
    NotInstalled,
    /// Only servers older than [`MIN_MAJOR`].
    #[error("the newest installed Postgres is {newest}; version {MIN_MAJOR} or newer is needed")]
    TooOld {
        /// The newest major version found.
        newest: u32,
    },
    /// The files were made by a version that is not installed.
    #[error("{} was made by Postgres {major}, but installed are: {installed:?}", dir.display())]
    DataVersion {
        /// The cluster's data directory.
        dir: PathBuf,
        /// Major version of the files.
        major: u32,
        /// Major versions of the installed servers.
        installed: Vec<u32>,
    },
    /// Running as root, and the system has neither a `postgres` nor a `nobody` user.
    #[error("Postgres doesn't run as root, and /etc/passwd has neither a postgres nor a nobody user")]
    NoServerUser,
    /// A file or directory of the cluster can't be used.
    #[error("{}: {source}", path.display())]
    Dir {
        /// What was touched.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A server program doesn't start.
    #[error("can't run {}: {source}", program.display())]
    Spawn {
        /// The program.
        program: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Creating the files failed.
    #[error("initdb failed ({status}): {output}")]
    Initdb {
        /// How it ended.
        status: ExitStatus,
        /// The end of what it printed.
        output: String,
    },
    /// The server ended or wasn't ready in time.
    #[error("Postgres {what}; the end of {}:\n{log}", path.display())]
    NotReady {
        /// What happened.
        what: String,
        /// The log file.
        path: PathBuf,
        /// The end of the log.
        log: String,
    },
    /// The port that was asked for is taken.
    #[error("port {0} on 127.0.0.1 is taken by another program")]
    PortTaken(u16),
    /// A setting that the cluster decides itself.
    #[error("the setting {0:?} belongs to the embedded cluster and can't be given")]
    ReservedSetting(String),
    /// A running server on these files doesn't accept the stored password.
    #[error("a Postgres is running on {} but doesn't accept the password in {}", dir.display(), password.display())]
    ForeignServer {
        /// The cluster's data directory.
        dir: PathBuf,
        /// The file with the password that was tried.
        password: PathBuf,
    },
    /// Another process has been starting the same cluster for too long.
    #[error("another process has been starting the cluster in {} for {} s", dir.display(), waited.as_secs())]
    Locked {
        /// The cluster's directory.
        dir: PathBuf,
        /// How long this one waited.
        waited: Duration,
    },
    /// The server outlived its stop.
    #[error("Postgres (pid {pid}) didn't stop within {} s", waited.as_secs())]
    StopTimeout {
        /// The server's pid.
        pid: u32,
        /// How long this process waited.
        waited: Duration,
    },
    /// Restarting a cluster that another process started.
    #[error("the cluster belongs to another process")]
    NotOwner,
    /// A name that Postgres would cut or refuse.
    #[error("{0:?} is no usable database name (1 to 63 bytes, no NUL)")]
    DatabaseName(String),
    /// A statement of the cluster's own failed.
    #[error("{what}: {source}")]
    Sql {
        /// What was being done.
        what: &'static str,
        /// What the server or the connection said.
        source: tokio_postgres::Error,
    },
}

impl EmbeddedError {
    fn dir(path: &Path, source: io::Error) -> Self {
        Self::Dir { path: path.to_path_buf(), source }
    }

    fn sql(what: &'static str) -> impl FnOnce(tokio_postgres::Error) -> Self {
        move |source| Self::Sql { what, source }
    }
}

/// A running cluster. Dropping the owner stops the server at once, as a crash would
/// (see [`Cluster::stop`] for better); the files stay.
#[derive(Debug)]
pub struct Cluster {
    home: Home,
    install: Installation,
    options: EmbeddedOptions,
    password: String,
    port: u16,
    /// The server, if this process started it; none inside while it is stopped.
    owned: Option<Mutex<Option<Arc<Postmaster>>>>,
}

impl Cluster {
    /// Starts the cluster of `options.data_dir`, creating it first if need be; waits until it accepts
    /// connections (at most 60 s). If another process, or another `Cluster` of this one, runs it already,
    /// the result is attached to it instead, and options other than the directory have no effect.
    ///
    /// # Errors
    /// See [`EmbeddedError`]; [`EmbeddedError::NotReady`] carries the end of the server's log.
    pub async fn start(options: EmbeddedOptions) -> Result<Cluster, EmbeddedError> {
        launch::start(options).await
    }

    /// Connection URL of a database, over TCP on loopback. It contains the password.
    pub fn url(&self, database: &str) -> String {
        let database: String = database.bytes().map(url_byte).collect();
        format!("postgres://{SUPERUSER}:{}@127.0.0.1:{}/{database}", self.password, self.port)
    }

    /// TCP port on 127.0.0.1; the same over restarts.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Directory of the Unix socket, for `psql -h`; none where no short enough path could be had.
    pub fn socket_dir(&self) -> Option<&Path> {
        self.home.sockets.as_deref()
    }

    /// Where the cluster lives: `<data_dir>/postgres`, or elsewhere if the server's user can't go there.
    pub fn home(&self) -> &Path {
        &self.home.dir
    }

    /// The server programs in use.
    pub fn installation(&self) -> &Installation {
        &self.install
    }

    /// Whether this value started the server and stops it.
    pub fn is_owner(&self) -> bool {
        self.owned.is_some()
    }

    /// The server's pid, while it runs.
    pub fn pid(&self) -> Option<u32> {
        match &self.owned {
            Some(_) => self.postmaster().filter(|one| one.is_alive()).map(|one| one.pid()),
            None => {
                let file = PidFile::read(&self.home.data()).filter(PidFile::process_exists)?;
                u32::try_from(file.pid).ok()
            }
        }
    }

    /// Stops the server and waits for it: a fast stop that takes over 30 s becomes an immediate one.
    /// Does nothing on an attached cluster or on one that has stopped.
    ///
    /// # Errors
    /// [`EmbeddedError::StopTimeout`] if even an immediate stop doesn't end it.
    pub async fn stop(&self, mode: StopMode) -> Result<(), EmbeddedError> {
        let Some(server) = self.postmaster() else { return Ok(()) };
        if mode == StopMode::Fast {
            server.signal(Signal::INT);
            if tokio::time::timeout(FAST_STOP, server.wait()).await.is_ok() {
                self.replace(None);
                return Ok(());
            }
            tracing::warn!(
                pid = server.pid(),
                "the embedded Postgres didn't stop in time: stopping it at once"
            );
        }
        server.signal(Signal::QUIT);
        match tokio::time::timeout(IMMEDIATE_STOP, server.wait()).await {
            Ok(()) => {
                self.replace(None);
                Ok(())
            }
            Err(_) => Err(EmbeddedError::StopTimeout { pid: server.pid(), waited: IMMEDIATE_STOP }),
        }
    }

    /// Stops the server if it runs, and starts it again on the same port.
    ///
    /// # Errors
    /// [`EmbeddedError::NotOwner`] on an attached cluster, else as [`Cluster::start`] and [`Cluster::stop`].
    pub async fn restart(&self, mode: StopMode) -> Result<(), EmbeddedError> {
        if !self.is_owner() {
            return Err(EmbeddedError::NotOwner);
        }
        self.stop(mode).await?;
        let lock = launch::lock(&self.home).await?;
        let server = launch::launch_on(&self.home, &self.install, &self.options, self.port).await?;
        self.replace(Some(Arc::new(server)));
        drop(lock);
        Ok(())
    }

    /// Stops the cluster and deletes its files. An attached cluster is left alone.
    ///
    /// # Errors
    /// As [`Cluster::stop`], and [`EmbeddedError::Dir`] if something can't be deleted.
    pub async fn destroy(self) -> Result<(), EmbeddedError> {
        if !self.is_owner() {
            return Ok(());
        }
        self.stop(StopMode::Immediate).await?;
        if let Some(sockets) = self.home.sockets.as_deref().filter(|dir| *dir != self.home.dir) {
            std::fs::remove_dir_all(sockets).map_err(|source| EmbeddedError::dir(sockets, source))?;
        }
        std::fs::remove_dir_all(&self.home.dir).map_err(|source| EmbeddedError::dir(&self.home.dir, source))
    }

    /// Creates an empty UTF-8 database; true if it is new, false if it was there.
    ///
    /// # Errors
    /// [`EmbeddedError::DatabaseName`] and [`EmbeddedError::Sql`].
    pub async fn create_database(&self, name: &str) -> Result<bool, EmbeddedError> {
        self.create(&format!("CREATE DATABASE {} TEMPLATE template0", identifier(name)?)).await
    }

    /// Creates a database as a copy of another, which nobody may be connected to; true if it is new.
    ///
    /// # Errors
    /// As [`Cluster::create_database`].
    pub async fn create_database_from(&self, name: &str, template: &str) -> Result<bool, EmbeddedError> {
        self.create(&format!("CREATE DATABASE {} TEMPLATE {}", identifier(name)?, identifier(template)?))
            .await
    }

    /// Drops a database and closes the connections to it; nothing happens if there is none.
    ///
    /// # Errors
    /// As [`Cluster::create_database`].
    pub async fn drop_database(&self, name: &str) -> Result<(), EmbeddedError> {
        let sql = format!("DROP DATABASE IF EXISTS {} WITH (FORCE)", identifier(name)?);
        self.execute(&sql).await.map_err(EmbeddedError::sql("dropping a database"))
    }

    async fn create(&self, sql: &str) -> Result<bool, EmbeddedError> {
        use tokio_postgres::error::SqlState;
        match self.execute(sql).await {
            Ok(()) => Ok(true),
            Err(error) if error.code() == Some(&SqlState::DUPLICATE_DATABASE) => Ok(false),
            // Two creators of one name can also meet in the catalog's unique index.
            Err(error) if error.code() == Some(&SqlState::UNIQUE_VIOLATION) => Ok(false),
            Err(error) => Err(EmbeddedError::sql("creating a database")(error)),
        }
    }

    async fn execute(&self, sql: &str) -> Result<(), tokio_postgres::Error> {
        let (client, connection) =
            tokio_postgres::connect(&self.url("postgres"), tokio_postgres::NoTls).await?;
        let running = tokio::spawn(connection);
        let done = client.batch_execute(sql).await;
        drop(client);
        running.abort();
        done
    }

    fn postmaster(&self) -> Option<Arc<Postmaster>> {
        self.owned.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn replace(&self, server: Option<Arc<Postmaster>>) {
        if let Some(slot) = &self.owned {
            *slot.lock().unwrap_or_else(PoisonError::into_inner) = server;
        }
    }
}

/// Quotes a database name.
fn identifier(name: &str) -> Result<String, EmbeddedError> {
    if name.is_empty() || name.len() > 63 || name.contains('\0') {
        return Err(EmbeddedError::DatabaseName(name.to_owned()));
    }
    Ok(format!("\"{}\"", name.replace('"', "\"\"")))
}

fn url_byte(byte: u8) -> String {
    if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b'~') {
        char::from(byte).to_string()
    } else {
        format!("%{byte:02X}")
    }
}

/// The last 2,000 bytes or so of a text, from a line's start.
fn tail(text: &str) -> String {
    let text = text.trim_end();
    let from = text.len().saturating_sub(2_000);
    if from == 0 {
        return text.to_owned();
    }
    let rest = text.get(text.ceil_char_boundary(from)..).unwrap_or_default();
    rest.split_once('\n').map_or(rest, |(_, lines)| lines).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_quoted_and_bounded() {
        assert_eq!(identifier("a\"b").expect("fine"), "\"a\"\"b\"");
        assert!(identifier("").is_err());
        assert!(identifier(&"x".repeat(64)).is_err());
        assert!(identifier("a\0b").is_err());
    }

    #[test]
    fn a_tail_starts_at_a_line() {
        assert_eq!(tail("short\n"), "short");
        let long: String = (0..500).map(|n| format!("line {n} é\n")).collect();
        let cut = tail(&long);
        assert!(cut.len() <= 2_000 && cut.starts_with("line ") && cut.ends_with("line 499 é"));
    }
}
