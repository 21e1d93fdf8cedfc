//! The compiled-in migrations on an empty database.

use holdfast_store::embedded::{Cluster, EmbeddedOptions, StopMode};
use holdfast_store::migrate::{MigrateError, migrate, require, status};

#[tokio::test]
async fn an_empty_database_is_refused_until_it_is_migrated() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let options = EmbeddedOptions { durable: false, ..EmbeddedOptions::new(dir.path()) };
    let cluster = Cluster::start(options).await.expect("a cluster");
    cluster.create_database("holdfast").await.expect("created");
    let url = cluster.url("holdfast");
    let error = require(&url).await.expect_err("no schema yet");
    assert!(matches!(&error, MigrateError::Outdated(status) if status.current == 0), "{error}");
    assert!(error.to_string().ends_with("run `holdfast migrate`"), "{error}");
    let report = migrate(&url).await.expect("migrated");
    assert!(!report.applied.is_empty() && report.status.is_ready());
    assert_eq!(require(&url).await.expect("ready"), status(&url).await.expect("a status"));
    assert_eq!(migrate(&url).await.expect("nothing to do").applied, []);
    cluster.stop(StopMode::Fast).await.expect("stopped");
    assert!(matches!(status(&url).await, Err(MigrateError::Connect(_))));
    cluster.destroy().await.expect("destroyed");
}
