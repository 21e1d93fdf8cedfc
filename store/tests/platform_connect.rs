//! The pools: sessions, bounds, faults, a server that goes away and comes back.

use std::time::Duration;

use holdfast_store::connect::{ConnectError, ConnectOptions, Db, Fault, connect};
use holdfast_store::embedded::{Cluster, EmbeddedOptions, StopMode};
use tempfile::TempDir;

async fn cluster() -> (TempDir, Cluster) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let options = EmbeddedOptions { durable: false, ..EmbeddedOptions::new(dir.path()) };
    let cluster = Cluster::start(options).await.expect("a cluster");
    (dir, cluster)
}

async fn both(db: &Db, setting: &str) -> (String, String) {
    let sql = "SELECT current_setting($1)";
    let client = db.client().await.expect("a connection");
    let hot = client.query_one(sql, &[&setting]).await.expect("an answer").get(0);
    let read = sqlx::query_scalar(sql).bind(setting).fetch_one(db.read()).await.expect("an answer");
    (hot, read)
}

#[tokio::test]
async fn both_pools_run_bounded_sessions_in_utc() {
    let (_dir, cluster) = cluster().await;
    let url = format!("{}?options=-c%20search_path%3Dhere", cluster.url("postgres"));
    let db = connect(ConnectOptions::new(url, "test")).await.expect("connected");
    for (setting, wanted) in [
        ("TimeZone", "UTC"),
        ("statement_timeout", "30s"),
        ("lock_timeout", "10s"),
        ("idle_in_transaction_session_timeout", "5s"),
        ("application_name", "holdfast-test"),
        ("search_path", "here"),
    ] {
        assert_eq!(both(&db, setting).await, (wanted.to_owned(), wanted.to_owned()), "{setting}");
    }
    assert!(!format!("{db:?}").contains("postgres://"));
    db.close().await;
    assert_eq!(db.ping().await.expect_err("closed").fault(), Fault::Unavailable);
    cluster.destroy().await.expect("destroyed");
}

#[tokio::test]
async fn a_pooler_gets_no_session_settings_and_needs_a_direct_url() {
    let (_dir, cluster) = cluster().await;
    let url = cluster.url("postgres");
    let pooled = ConnectOptions { transaction_pooler: true, ..ConnectOptions::new(url.clone(), "test") };
    assert!(matches!(connect(pooled.clone()).await, Err(ConnectError::Url(_))));
    let db = connect(ConnectOptions { listen_url: Some(url.clone()), ..pooled }).await.expect("connected");
    let (hot, read) = both(&db, "statement_timeout").await;
    assert_eq!((hot.as_str(), read.as_str()), ("0", "0"));
    assert_eq!(db.listen_url(), url);
    cluster.destroy().await.expect("destroyed");
}

#[tokio::test]
async fn a_full_pool_has_an_error_of_its_own() {
    let (_dir, cluster) = cluster().await;
    let wait = Duration::from_millis(50);
    let options = ConnectOptions::new(cluster.url("postgres"), "test");
    let db = connect(ConnectOptions { hot_connections: 1, wait, ..options }).await.expect("connected");
    let held = db.client().await.expect("the only connection");
    let error = db.client().await.expect_err("none is free");
    assert!(matches!(error, ConnectError::PoolTimeout { waited } if waited == wait), "{error}");
    assert_eq!(error.fault(), Fault::Unavailable);
    drop(held);
    drop(db.client().await.expect("free again"));
    cluster.destroy().await.expect("destroyed");
}

#[tokio::test]
async fn a_server_that_goes_away_is_unavailable_until_it_is_back() {
    let (_dir, cluster) = cluster().await;
    let url = cluster.url("postgres");
    let db = connect(ConnectOptions::new(url.clone(), "test")).await.expect("connected");
    let client = db.client().await.expect("a connection");
    cluster.stop(StopMode::Immediate).await.expect("stopped");
    let error = client.simple_query("SELECT 1").await.expect_err("the server is gone");
    assert_eq!(Fault::of(&error), Fault::Unavailable, "{error:?}");
    drop(client);
    assert_eq!(db.ping().await.expect_err("away").fault(), Fault::Unavailable);
    let error = sqlx::query("SELECT 1").execute(db.read()).await.expect_err("away");
    assert_eq!(Fault::of_sqlx(&error), Fault::Unavailable, "{error:?}");
    let late = connect(ConnectOptions::new(url.clone(), "late")).await.expect("no error at the start");

    cluster.restart(StopMode::Fast).await.expect("started");
    for db in [&db, &late] {
        db.ping().await.expect("back");
        sqlx::query("SELECT 1").execute(db.read()).await.expect("back");
    }
    let wrong = url.replace("holdfast:", "holdfast:wrong");
    let error = connect(ConnectOptions::new(wrong, "test")).await.expect_err("waiting doesn't help");
    assert_eq!(error.fault(), Fault::Permanent);
    assert!(error.to_string().contains("28P01"), "{error}");
    cluster.destroy().await.expect("destroyed");
}

#[tokio::test]
async fn the_servers_errors_are_told_apart() {
    let (_dir, cluster) = cluster().await;
    let db = connect(ConnectOptions::new(cluster.url("postgres"), "test")).await.expect("connected");
    let client = db.client().await.expect("a connection");
    for (code, wanted) in
        [("40001", Fault::Retryable), ("40P01", Fault::Retryable), ("23505", Fault::Permanent)]
    {
        let sql = format!("DO $$ BEGIN RAISE EXCEPTION 'made' USING ERRCODE = '{code}'; END $$");
        let error = client.batch_execute(&sql).await.expect_err("raised");
        assert_eq!(Fault::of(&error), wanted, "{code}");
    }
    let sql = "SET statement_timeout = '20ms'; SELECT pg_sleep(10)";
    let error = client.batch_execute(sql).await.expect_err("too slow");
    assert_eq!(Fault::of(&error), Fault::Unavailable);
    let other = db.client().await.expect("another connection");
    let sql = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'holdfast-test' AND pid <> pg_backend_pid()";
    other.batch_execute(sql).await.expect("terminated");
    let error = client.batch_execute("SELECT 1").await.expect_err("terminated");
    assert_eq!(Fault::of(&error), Fault::Unavailable, "{error:?}");
    // What was used a moment ago isn't asked again whether it works; that it is closed is seen.
    while !client.is_closed() {
        tokio::task::yield_now().await;
    }
    drop(client);
    db.ping().await.expect("the dead connection is replaced");
    cluster.destroy().await.expect("destroyed");
}

#[tokio::test]
async fn tls_is_used_as_the_url_asks() {
    let (_dir, cluster) = cluster().await;
    let url = cluster.url("postgres");
    for mode in ["disable", "prefer"] {
        connect(ConnectOptions::new(format!("{url}?sslmode={mode}"), "test")).await.expect("plain text");
    }
    let error = connect(ConnectOptions::new(format!("{url}?sslmode=require"), "test")).await;
    assert!(error.is_err(), "the server has no TLS");

    let Some(home) = make_certificate(&cluster).await else { return };
    let ssl = |mode: &str| format!("{url}?sslmode={mode}&sslrootcert={}", home.display());
    let encrypted = "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()";
    for url in [ssl("verify-ca"), format!("{url}?sslmode=require"), format!("{url}?sslmode=prefer")] {
        let db =
            connect(ConnectOptions::new(url.clone(), "test")).await.unwrap_or_else(|error| panic!("{error}"));
        let client = db.client().await.expect("a connection");
        assert!(client.query_one(encrypted, &[]).await.expect("an answer").get::<_, bool>(0));
        assert!(sqlx::query_scalar::<_, bool>(encrypted).fetch_one(db.read()).await.expect("an answer"));
    }
    let error = connect(ConnectOptions::new(ssl("verify-full"), "test")).await.expect_err("another name");
    assert_eq!(error.fault(), Fault::Permanent, "{error}");
    let error = connect(ConnectOptions::new(format!("{url}?sslmode=verify-full"), "test")).await;
    assert_eq!(error.expect_err("an unknown authority").fault(), Fault::Permanent);
    cluster.destroy().await.expect("destroyed");
}

/// Switches TLS on with a certificate for another name, made by openssl; none if that isn't installed.
async fn make_certificate(cluster: &Cluster) -> Option<std::path::PathBuf> {
    let data = cluster.home().join("data");
    let (authority, key, request) = (data.join("ca.crt"), data.join("server.key"), data.join("server.csr"));
    let openssl = |args: &[&str]| {
        std::process::Command::new("openssl")
            .args(args)
            .current_dir(&data)
            .output()
            .is_ok_and(|out| out.status.success())
    };
    let made = openssl(&[
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=authority",
        "-keyout",
        "ca.key",
        "-out",
        "ca.crt",
    ]) && openssl(&[
        "req",
        "-new",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-subj",
        "/CN=elsewhere",
        "-addext",
        "subjectAltName=DNS:elsewhere.example",
        "-keyout",
        "server.key",
        "-out",
        "server.csr",
    ]) && openssl(&[
        "x509",
        "-req",
        "-in",
        "server.csr",
        "-CA",
        "ca.crt",
        "-CAkey",
        "ca.key",
        "-CAcreateserial",
        "-days",
        "2",
        "-copy_extensions",
        "copy",
        "-out",
        "server.crt",
    ]);
    if !made {
        return None;
    }
    std::fs::remove_file(request).expect("removed");
    let owner = std::fs::metadata(&data).expect("there");
    let (uid, gid) =
        (std::os::unix::fs::MetadataExt::uid(&owner), std::os::unix::fs::MetadataExt::gid(&owner));
    for file in [&key, &data.join("server.crt")] {
        std::os::unix::fs::chown(file, Some(uid), Some(gid)).expect("given to the server");
    }
    let db = connect(ConnectOptions::new(cluster.url("postgres"), "test")).await.expect("connected");
    let client = db.client().await.expect("a connection");
    client.simple_query("ALTER SYSTEM SET ssl = on").await.expect("set");
    drop(client);
    db.close().await;
    cluster.restart(StopMode::Fast).await.expect("restarted with TLS");
    Some(authority)
}
