//! Schema migrations: `migrations/` compiled in, run under sqlx's advisory lock on a direct connection.
//!
//! Migrations expand before they contract, so a build runs on a schema that is newer than it. A schema
//! that lacks a migration the build knows is refused.

use std::fmt;

use sqlx::migrate::{MigrateError as SqlxMigrateError, Migrator};
use sqlx::postgres::PgConnection;
use sqlx::{ConnectOptions as _, Connection as _};

use crate::connect::{CONNECT_TIMEOUT, ConnectError, Fault, Session, Target};

/// How often migrations are begun that the server ends for the sake of others.
const ATTEMPTS: usize = 20;

/// A migration that the build knows and the database lacks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pending {
    /// Number at the head of its file's name.
    pub version: i64,
    /// The rest of its file's name.
    pub description: String,
}

/// How the database's schema stands to this build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchemaStatus {
    /// The newest applied migration; 0 if none.
    pub current: i64,
    /// The newest migration that this build knows; 0 if none.
    pub expected: i64,
    /// Known and not applied, oldest first.
    pub pending: Vec<Pending>,
    /// Migrations newer than this build's are applied; it runs on them.
    pub unknown_newer: bool,
}

impl SchemaStatus {
    /// Whether this build can run on the schema.
    pub fn is_ready(&self) -> bool {
        self.pending.is_empty()
    }
}

impl fmt::Display for SchemaStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { current, expected, pending, unknown_newer } = self;
        match (pending.first(), unknown_newer) {
            (None, false) => write!(f, "database is at migration {current}"),
            (None, true) => {
                write!(
                    f,
                    "database is at migration {current}, newer than this build's {expected}, which runs on it"
                )
            }
            (Some(_), false) if *current == 0 => {
                write!(
                    f,
                    "database has no schema yet, this build needs migration {expected}: run `holdfast migrate`"
                )
            }
            (Some(_), false) if current < expected => {
                write!(
                    f,
                    "database is at migration {current}, this build needs {expected}: run `holdfast migrate`"
                )
            }
            (Some(first), _) => {
                write!(
                    f,
                    "database is at migration {current} but lacks {}: run `holdfast migrate`",
                    first.version
                )
            }
        }
    }
}

/// What [`migrate`] did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// Migrations that were pending when it began, oldest first. Another process that migrated at the
    /// same time may have applied some of them.
    pub applied: Vec<Pending>,
    /// The schema afterwards.
    pub status: SchemaStatus,
}

/// Why the schema can't be brought or isn't up to date.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MigrateError {
    /// No connection, or a question on it failed.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The schema lacks migrations.
    #[error("{0}")]
    Outdated(SchemaStatus),
    /// An applied migration is unknown although this build knows later ones: another product's or
    /// another branch's schema.
    #[error(
        "the database has migration {version}, which this build (at {expected}) doesn't know: is this another branch's database?"
    )]
    Diverged {
        /// The unknown migration.
        version: i64,
        /// The newest migration that this build knows.
        expected: i64,
    },
    /// A migration was edited after it had been applied.
    #[error("migration {version} was changed after it had been applied")]
    Changed {
        /// The edited migration.
        version: i64,
    },
    /// A migration failed; it was rolled back, those before it stay.
    #[error("{0}")]
    Run(#[source] SqlxMigrateError),
}

/// Applies every pending migration, one transaction each, waiting for other processes that migrate the
/// same database. `url` must lead to the server directly, not through a transaction-mode pooler.
///
/// # Errors
/// See [`MigrateError`]; what was applied before a failure stays applied.
pub async fn migrate(url: &str) -> Result<Report, MigrateError> {
    migrate_with(&known(), url).await
}

/// Compares the schema with this build; changes nothing.
///
/// # Errors
/// [`MigrateError::Connect`], [`MigrateError::Diverged`] and [`MigrateError::Changed`].
pub async fn status(url: &str) -> Result<SchemaStatus, MigrateError> {
    status_with(&known(), url).await
}

/// As [`status`], and a schema that this build can't run on is an error that says what to do.
///
/// # Errors
/// As [`status`], and [`MigrateError::Outdated`].
pub async fn require(url: &str) -> Result<SchemaStatus, MigrateError> {
    let status = status(url).await?;
    if status.is_ready() { Ok(status) } else { Err(MigrateError::Outdated(status)) }
}

fn known() -> Migrator {
    sqlx::migrate!("../migrations")
}

async fn migrate_with(migrator: &Migrator, url: &str) -> Result<Report, MigrateError> {
    let mut connection = open(url).await?;
    let before = read(migrator, &mut connection).await?;
    // The check above has refused what is unknown but not newer.
    let mut tolerant = Migrator::with_migrations(migrator.iter().cloned().collect());
    tolerant.set_ignore_missing(true);
    let mut attempts = 0;
    while let Err(error) = tolerant.run(&mut connection).await {
        attempts += 1;
        if attempts == ATTEMPTS || !lost_to_a_neighbour(&error) {
            return Err(match error {
                SqlxMigrateError::VersionMismatch(version) => MigrateError::Changed { version },
                other => MigrateError::Run(other),
            });
        }
        tracing::info!(kind = "migration.again", %error, "a migration met those who are at work, and is tried again");
    }
    let status = read(migrator, &mut connection).await?;
    close(connection).await;
    Ok(Report { applied: before.pending, status })
}

/// Whether the server has ended a migration for the sake of somebody else's transaction: it changes several tables that
/// are in use, and may meet those who use them in another order.
fn lost_to_a_neighbour(error: &SqlxMigrateError) -> bool {
    match error {
        SqlxMigrateError::Execute(error) | SqlxMigrateError::ExecuteMigration(error, _) => {
            Fault::of_sqlx(error) == Fault::Retryable
        }
        _ => false,
    }
}

async fn status_with(migrator: &Migrator, url: &str) -> Result<SchemaStatus, MigrateError> {
    let mut connection = open(url).await?;
    let status = read(migrator, &mut connection).await?;
    close(connection).await;
    Ok(status)
}

async fn open(url: &str) -> Result<PgConnection, ConnectError> {
    let options = Target::parse(url, "migrate", Session::Migrating)?.sqlx.disable_statement_logging();
    let limit = CONNECT_TIMEOUT * 2;
    match tokio::time::timeout(limit, PgConnection::connect_with(&options)).await {
        Ok(done) => Ok(done?),
        Err(_) => Err(ConnectError::Slow { what: "connecting", limit }),
    }
}

async fn close(connection: PgConnection) {
    if let Err(error) = connection.close().await {
        tracing::debug!(%error, "closing the migration's connection");
    }
}

async fn read(migrator: &Migrator, connection: &mut PgConnection) -> Result<SchemaStatus, MigrateError> {
    compare(migrator, &applied(connection).await.map_err(ConnectError::Sqlx)?)
}

/// Versions and checksums in the database, oldest first; none before the first migration.
async fn applied(connection: &mut PgConnection) -> Result<Vec<(i64, Vec<u8>)>, sqlx::Error> {
    let table: Option<String> = sqlx::query_scalar("SELECT to_regclass('_sqlx_migrations')::text")
        .fetch_one(&mut *connection)
        .await?;
    if table.is_none() {
        return Ok(Vec::new());
    }
    sqlx::query_as("SELECT version, checksum FROM _sqlx_migrations ORDER BY version")
        .fetch_all(connection)
        .await
}

fn compare(migrator: &Migrator, applied: &[(i64, Vec<u8>)]) -> Result<SchemaStatus, MigrateError> {
    let known: Vec<_> = migrator.iter().filter(|one| !one.migration_type.is_down_migration()).collect();
    let expected = known.iter().map(|one| one.version).max().unwrap_or(0);
    for (version, checksum) in applied {
        match known.iter().find(|one| one.version == *version) {
            Some(one) if *one.checksum != checksum[..] => {
                return Err(MigrateError::Changed { version: *version });
            }
            None if *version <= expected => {
                return Err(MigrateError::Diverged { version: *version, expected });
            }
            _ => {}
        }
    }
    let current = applied.iter().map(|(version, _)| *version).max().unwrap_or(0);
    let pending = known
        .iter()
        .filter(|one| !applied.iter().any(|(version, _)| *version == one.version))
        .map(|one| Pending { version: one.version, description: one.description.to_string() })
        .collect();
    Ok(SchemaStatus { current, expected, pending, unknown_newer: current > expected })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::embedded::{Cluster, EmbeddedOptions};

    async fn migrator(dir: &Path, files: &[(&str, &str)]) -> Migrator {
        std::fs::create_dir_all(dir).expect("created");
        for (name, sql) in files {
            std::fs::write(dir.join(name), sql).expect("written");
        }
        Migrator::new(dir).await.expect("readable migrations")
    }

    #[tokio::test]
    async fn a_schema_is_brought_up_to_date_and_described() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let options = EmbeddedOptions { durable: false, ..EmbeddedOptions::new(dir.path()) };
        let cluster = Cluster::start(options).await.expect("a cluster");
        let url = cluster.url("postgres");
        let first = ("0001_first.sql", "CREATE TABLE one (id int); DROP TABLE IF EXISTS nothing;");
        let second = ("0002_second.sql", "CREATE TABLE two (id int);");
        let old = migrator(&dir.path().join("old"), &[first]).await;
        let new = migrator(&dir.path().join("new"), &[first, second]).await;

        let empty = status_with(&new, &url).await.expect("a status");
        assert_eq!(
            empty.to_string(),
            "database has no schema yet, this build needs migration 2: run `holdfast migrate`"
        );
        let report = migrate_with(&old, &url).await.expect("migrated");
        assert_eq!(report.applied, [Pending { version: 1, description: "first".to_owned() }]);
        assert_eq!(report.status.to_string(), "database is at migration 1");
        let outdated = status_with(&new, &url).await.expect("a status");
        assert!(!outdated.is_ready());
        assert_eq!(
            outdated.to_string(),
            "database is at migration 1, this build needs 2: run `holdfast migrate`"
        );

        let (one, other) = tokio::join!(migrate_with(&new, &url), migrate_with(&new, &url));
        assert!(one.expect("migrated").status.is_ready() && other.expect("migrated").status.is_ready());
        let again = migrate_with(&new, &url).await.expect("nothing to do");
        assert_eq!(again.applied, []);

        let ahead = migrate_with(&old, &url).await.expect("a newer schema is tolerated").status;
        assert!(ahead.is_ready() && ahead.unknown_newer);
        assert_eq!(
            ahead.to_string(),
            "database is at migration 2, newer than this build's 1, which runs on it"
        );

        // Numbers of a sequence stay drawn when a transaction is rolled back.
        let counted = "CREATE SEQUENCE tries;";
        let lost =
            "DO $$ BEGIN IF nextval('tries') < 3 THEN RAISE 'met' USING ERRCODE = '40P01'; END IF; END $$;";
        let files = [first, second, ("0003_counted.sql", counted), ("0004_lost.sql", lost)];
        let unlucky = migrator(&dir.path().join("unlucky"), &files).await;
        let report = migrate_with(&unlucky, &url).await.expect("the third attempt succeeds");
        assert_eq!((report.applied.len(), report.status.current), (2, 4));
        let broken = [&files[..], &[("0005_broken.sql", "SELECT 1 / 0;")]].concat();
        let broken = migrator(&dir.path().join("broken"), &broken).await;
        let error = migrate_with(&broken, &url).await.expect_err("nobody else is at fault");
        assert!(matches!(error, MigrateError::Run(_)), "{error}");
        let mut clean = open(&url).await.expect("a connection");
        sqlx::query("DELETE FROM _sqlx_migrations WHERE version > 2")
            .execute(&mut clean)
            .await
            .expect("forgotten");
        close(clean).await;

        let changed = ("0001_first.sql", "CREATE TABLE one (id bigint);");
        let edited = migrator(&dir.path().join("edited"), &[changed, second]).await;
        let error = migrate_with(&edited, &url).await.expect_err("an edited migration");
        assert!(matches!(error, MigrateError::Changed { version: 1 }), "{error}");
        let third = ("0003_third.sql", "SELECT 1;");
        let branch = migrator(&dir.path().join("branch"), &[first, third]).await;
        let error = migrate_with(&branch, &url).await.expect_err("another branch");
        assert!(matches!(error, MigrateError::Diverged { version: 2, expected: 3 }), "{error}");
        cluster.destroy().await.expect("destroyed");
    }

    #[tokio::test]
    async fn a_failing_migration_leaves_what_came_before() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let options = EmbeddedOptions { durable: false, ..EmbeddedOptions::new(dir.path()) };
        let cluster = Cluster::start(options).await.expect("a cluster");
        let url = cluster.url("postgres");
        let files =
            [("1_good.sql", "CREATE TABLE good ();"), ("2_bad.sql", "CREATE TABLE bad (); SELECT 1/0;")];
        let broken = migrator(&dir.path().join("broken"), &files).await;
        let error = migrate_with(&broken, &url).await.expect_err("division by zero");
        assert!(error.to_string().contains("migration 2") && error.to_string().contains("zero"), "{error}");
        let status = status_with(&broken, &url).await.expect("a status");
        assert_eq!((status.current, status.pending.len()), (1, 1));
        cluster.destroy().await.expect("destroyed");
    }

    #[test]
    fn a_gap_below_a_newer_schema_is_named() {
        let status = SchemaStatus {
            current: 9,
            expected: 5,
            pending: vec![Pending { version: 4, description: "late".to_owned() }],
            unknown_newer: true,
        };
        assert_eq!(status.to_string(), "database is at migration 9 but lacks 4: run `holdfast migrate`");
    }
}
