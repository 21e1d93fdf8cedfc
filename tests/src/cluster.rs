//! A Postgres for the test run, and a fresh database for each test.
//!
//! `HOLDFAST_TEST_SERVER`, the URL of a superuser, names a server that is there already: the test
//! command starts one with `holdfast-test-server`, because nextest runs every test in a process of its
//! own. Without it each process starts one for itself.

use std::{
    io::Write as _,
    path::{Path, PathBuf},
    sync::{OnceLock, mpsc},
};

use anyhow::{Context as _, Result, ensure};
use holdfast_store::{
    embedded::{Cluster, EmbeddedOptions},
    install::ensure_installed,
    migrate::migrate,
};
use sha2::{Digest as _, Sha256, Sha384};
use tokio_postgres::{Client, NoTls, config::Host};
use uuid::Uuid;

/// The variable that names a running server.
pub const SERVER_VARIABLE: &str = "HOLDFAST_TEST_SERVER";

/// The advisory lock under which the template is made.
const TEMPLATE_LOCK: i64 = 0x0068_6f6c_6466_6173;

/// Starts a cluster for tests in `dir`: nothing is flushed to disk, and deadlocks are found quickly.
///
/// # Errors
/// If no server can be installed or started.
pub async fn start(dir: &Path) -> Result<Cluster> {
    ensure_installed().await?;
    let settings = [("max_connections", "400"), ("deadlock_timeout", "100ms"), ("shared_buffers", "64MB")];
    let settings = settings.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
    let options = EmbeddedOptions { durable: false, settings, ..EmbeddedOptions::new(dir) };
    Ok(Cluster::start(options).await?)
}

/// The URL of this run's server, of a superuser and its `postgres` database. Blocks on the first call
/// of a process that has to start one.
///
/// # Panics
/// If there is no server and none can be started.
pub fn server_url() -> &'static str {
    static URL: OnceLock<String> = OnceLock::new();
    URL.get_or_init(|| std::env::var(SERVER_VARIABLE).unwrap_or_else(|_| own_server()))
}

/// A server that lives as long as this process does, kept by a thread with a runtime of its own: the
/// runtimes of tests come and go.
fn own_server() -> String {
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime for the test server");
        runtime.block_on(async {
            sweep();
            let dir = std::env::temp_dir().join(format!("{DIR_PREFIX}{}", std::process::id()));
            let cluster = start(&dir).await.expect("a Postgres for the tests");
            tell.send(cluster.url("postgres")).expect("somebody asked for the server");
            std::future::pending::<()>().await;
        });
    });
    told.recv().expect("the test server has started")
}

const DIR_PREFIX: &str = "holdfast-tests-";

/// How long the end of a test waits for its database's.
const DROP_PATIENCE: std::time::Duration = std::time::Duration::from_secs(1);

/// Removes what test processes that are gone have left behind: a process can't clean up after its end.
fn sweep() {
    let Ok(entries) = std::fs::read_dir(std::env::temp_dir()) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|name| name.strip_prefix(DIR_PREFIX)).map(str::to_owned);
        let Some(pid) = pid.filter(|pid| pid.parse::<u32>().is_ok()) else { continue };
        if Path::new("/proc/self").exists() && !Path::new("/proc").join(pid).exists() {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// Opens a plain connection, driven by a task of the current runtime.
///
/// # Errors
/// As the server has it.
pub async fn connect(url: &str) -> Result<Client> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}

/// A database's URL by another address that leads there; never with TLS, which what stands between couldn't read.
///
/// # Errors
/// If the URL can't be read.
pub(crate) fn url_by(url: &str, address: std::net::SocketAddr) -> Result<String> {
    let config: tokio_postgres::Config = url.parse()?;
    let user = config.get_user().unwrap_or_default();
    let password = String::from_utf8_lossy(config.get_password().unwrap_or_default());
    let database = config.get_dbname().unwrap_or_default();
    Ok(format!("postgres://{user}:{password}@{address}/{database}?sslmode=disable"))
}

/// The same URL with another database.
///
/// # Errors
/// If the URL has no database part.
fn with_database(url: &str, database: &str) -> Result<String> {
    let (base, query) = url.split_once('?').map_or((url, None), |(base, query)| (base, Some(query)));
    let at = base.rfind('/').context("the server's URL has no database")?;
    let query = query.map(|query| format!("?{query}")).unwrap_or_default();
    Ok(format!("{}/{database}{query}", &base[..at]))
}

/// The directory of migrations.
pub fn migrations_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../migrations")
}

/// The files of migrations, in order.
///
/// # Errors
/// If the directory can't be read.
pub fn migration_files() -> Result<Vec<PathBuf>> {
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(migrations_dir())?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    files.retain(|file| file.extension().is_some_and(|kind| kind == "sql"));
    files.sort();
    Ok(files)
}

/// Names the template after what the migrations say.
fn template_name() -> Result<String> {
    let mut hash = Sha256::new();
    for file in migration_files()? {
        hash.update(file.file_name().map(|name| name.as_encoded_bytes()).unwrap_or_default());
        hash.update([0]);
        hash.update(std::fs::read(&file)?);
    }
    let digest: String = hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    Ok(format!("holdfast_template_{digest}"))
}

/// Makes the template if it isn't there. It gets its name when it is complete, so whoever finds the
/// name finds a migrated database.
async fn ensure_template(admin: &Client) -> Result<String> {
    let template = template_name()?;
    if exists(admin, &template).await? {
        return Ok(template);
    }
    admin.execute("SELECT pg_advisory_lock($1)", &[&TEMPLATE_LOCK]).await?;
    if !exists(admin, &template).await? {
        let draft = format!("{template}_draft");
        admin.batch_execute(&format!("DROP DATABASE IF EXISTS {draft} WITH (FORCE)")).await?;
        admin.batch_execute(&format!("CREATE DATABASE {draft} TEMPLATE template0")).await?;
        let url = with_database(server_url(), &draft)?;
        migrate(&url).await?;
        check_applied(&url).await?;
        admin.batch_execute(&format!("ALTER DATABASE {draft} RENAME TO {template}")).await?;
    }
    admin.execute("SELECT pg_advisory_unlock($1)", &[&TEMPLATE_LOCK]).await?;
    Ok(template)
}

/// A store that was built before the migrations changed would give the template a schema that its name
/// doesn't stand for.
async fn check_applied(url: &str) -> Result<()> {
    let client = connect(url).await?;
    let rows = client.query("SELECT checksum FROM _sqlx_migrations ORDER BY version", &[]).await?;
    let applied: Vec<Vec<u8>> = rows.iter().map(|row| row.get(0)).collect();
    let files = migration_files()?;
    let wanted: Vec<Vec<u8>> =
        files.iter().map(|file| Ok(Sha384::digest(std::fs::read(file)?).to_vec())).collect::<Result<_>>()?;
    ensure!(
        applied == wanted,
        "this test was built with other migrations than there are now: build it again"
    );
    Ok(())
}

async fn exists(admin: &Client, database: &str) -> Result<bool> {
    let sql = "SELECT EXISTS (SELECT 1 FROM pg_database WHERE datname = $1)";
    Ok(admin.query_one(sql, &[&database]).await?.try_get(0)?)
}

/// A database of one test's own; dropped with this value.
#[derive(Debug)]
pub struct Database {
    name: String,
    url: String,
}

impl Database {
    /// Its URL.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Its URL by another address, such as a proxy's; never with TLS, which a proxy couldn't read.
    pub fn url_by(&self, address: std::net::SocketAddr) -> String {
        url_by(&self.url, address).expect("a URL that has been used")
    }

    /// Host and port of its server.
    ///
    /// # Panics
    /// If the server is reached by a Unix socket, which the proxy doesn't speak.
    pub fn address(&self) -> (String, u16) {
        let config: tokio_postgres::Config = self.url.parse().expect("a URL that has been used");
        let port = config.get_ports().first().copied().unwrap_or(5432);
        match config.get_hosts().first() {
            Some(Host::Tcp(host)) => (host.clone(), port),
            other => panic!("the proxy needs a TCP address, not {other:?}"),
        }
    }

    /// A plain connection to it, for what a test looks at or holds by itself.
    ///
    /// # Panics
    /// If the server refuses.
    pub async fn connect(&self) -> Client {
        connect(&self.url).await.expect("a connection to the test's database")
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        // The test's runtime may be ending; what can't be dropped goes with the cluster.
        let name = std::mem::take(&mut self.name);
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let Ok(runtime) = runtime else { return };
            let _: Result<()> = runtime.block_on(async {
                let admin = connect(server_url()).await?;
                admin.batch_execute(&format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)")).await?;
                Ok(())
            });
            let _ = tell.send(());
        });
        // Not for long: the server waits with it for connections that are just being made, and one of them may be
        // this task's own, which goes on only when this returns.
        let _ = told.recv_timeout(DROP_PATIENCE);
    }
}

/// Makes a migrated database of this name anew, which stays. Returns its URL.
///
/// # Errors
/// If the name isn't one of lower-case letters, digits and `_`, or the server refuses.
pub async fn named_database(name: &str) -> Result<String> {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
    ensure!(!name.is_empty() && name.bytes().all(plain), "{name:?} is no plain database name");
    ensure!(std::env::var_os(SERVER_VARIABLE).is_some(), "{SERVER_VARIABLE} names no server");
    let admin = connect(server_url()).await?;
    let template = ensure_template(&admin).await?;
    admin.batch_execute(&format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)")).await?;
    admin.batch_execute(&format!("CREATE DATABASE {name} TEMPLATE {template}")).await?;
    with_database(server_url(), name)
}

/// As [`make_once`], again where the server ends the connection: beside suites that load it to its limits
/// it may.
async fn make(migrated: bool) -> Result<Database> {
    let mut pause = tokio::time::interval(std::time::Duration::from_millis(300));
    for _ in 0..10 {
        pause.tick().await;
        match make_once(migrated).await {
            Err(error)
                if error
                    .downcast_ref::<tokio_postgres::Error>()
                    .is_some_and(tokio_postgres::Error::is_closed) =>
            {
                let _ = writeln!(std::io::stderr(), "a database is made again: {error}");
            }
            made => return made,
        }
    }
    make_once(migrated).await
}

async fn make_once(migrated: bool) -> Result<Database> {
    let server = tokio::task::spawn_blocking(server_url).await?;
    let admin = connect(server).await?;
    let template = if migrated { ensure_template(&admin).await? } else { "template0".to_owned() };
    let name = format!("holdfast_test_{}", Uuid::now_v7().simple());
    admin.batch_execute(&format!("CREATE DATABASE {name} TEMPLATE {template}")).await?;
    let url = with_database(server, &name)?;
    Ok(Database { name, url })
}

/// A migrated database of its own.
///
/// # Panics
/// If there is no server, or it refuses.
pub async fn fresh_database() -> Database {
    make(true).await.expect("a fresh database")
}

/// A database without a schema.
///
/// # Panics
/// As [`fresh_database`].
pub async fn empty_database() -> Database {
    make(false).await.expect("an empty database")
}
