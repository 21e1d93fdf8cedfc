//! The embedded cluster: starting, stopping, attaching, dying.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use holdfast_store::embedded::{Cluster, EmbeddedError, EmbeddedOptions, StopMode};
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::time::{interval, timeout};
use tokio_postgres::NoTls;

fn volatile(dir: &Path) -> EmbeddedOptions {
    EmbeddedOptions { durable: false, ..EmbeddedOptions::new(dir) }
}

async fn ask(url: &str, sql: &str) -> Result<String, tokio_postgres::Error> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
    let running = tokio::spawn(connection);
    let row = client.query_one(sql, &[]).await;
    running.abort();
    row?.try_get(0)
}

async fn run(url: &str, sql: &str) {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.expect("a connection");
    let running = tokio::spawn(connection);
    client.batch_execute(sql).await.expect("done");
    running.abort();
}

/// Waits until nothing accepts connections on the port any more.
async fn until_gone(port: u16) {
    let mut tick = interval(Duration::from_millis(20));
    let refused = async {
        while tokio::net::TcpStream::connect(("127.0.0.1", port)).await.is_ok() {
            tick.tick().await;
        }
    };
    timeout(Duration::from_secs(20), refused).await.expect("the server ends with its owner");
}

#[tokio::test]
async fn a_cluster_keeps_its_data_and_port_over_restarts() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let settings = vec![("max_connections".to_owned(), "33".to_owned())];
    let cluster =
        Cluster::start(EmbeddedOptions { settings, ..volatile(dir.path()) }).await.expect("a cluster");
    assert!(cluster.is_owner() && cluster.pid().is_some());
    assert_eq!(ask(&cluster.url("postgres"), "SHOW max_connections").await.expect("an answer"), "33");
    assert_eq!(ask(&cluster.url("postgres"), "SHOW server_encoding").await.expect("an answer"), "UTF8");
    assert!(cluster.create_database("odd \"name\"/?%").await.expect("created"));
    assert!(!cluster.create_database("odd \"name\"/?%").await.expect("there already"));
    assert!(cluster.create_database_from("copy", "odd \"name\"/?%").await.expect("copied"));
    let url = cluster.url("odd \"name\"/?%");
    run(&url, "CREATE TABLE kept AS SELECT 'kept'::text AS word").await;

    let before = (cluster.port(), cluster.pid());
    for mode in [StopMode::Fast, StopMode::Immediate] {
        cluster.restart(mode).await.expect("restarted");
        assert_eq!(cluster.port(), before.0);
        assert_ne!(cluster.pid(), before.1);
        assert_eq!(ask(&url, "SELECT word FROM kept").await.expect("an answer"), "kept");
    }
    cluster.drop_database("copy").await.expect("dropped");
    cluster.drop_database("copy").await.expect("nothing to drop");
    cluster.stop(StopMode::Fast).await.expect("stopped");
    cluster.stop(StopMode::Fast).await.expect("stopped already");
    assert_eq!(cluster.pid(), None);
    ask(&url, "SELECT 'x'").await.expect_err("no server");
    drop(cluster);

    let again = Cluster::start(volatile(dir.path())).await.expect("the same files");
    assert!(again.is_owner());
    assert_eq!(again.port(), before.0, "the port of the last start");
    assert_eq!(ask(&url, "SELECT word FROM kept").await.expect("the same password"), "kept");
    again.destroy().await.expect("destroyed");
    assert!(!dir.path().join("postgres").exists());
}

#[tokio::test]
async fn secrets_are_private_and_required() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let cluster = Cluster::start(volatile(dir.path())).await.expect("a cluster");
    let mode = |path: PathBuf| std::fs::metadata(path).expect("there").permissions().mode() & 0o777;
    assert_eq!(mode(cluster.home().to_path_buf()), 0o700);
    assert_eq!(mode(cluster.home().join("password")), 0o600);
    let url = cluster.url("postgres");
    let (head, tail) = url.split_once("holdfast:").expect("a user");
    let (_, tail) = tail.split_once('@').expect("a host");
    let error =
        ask(&format!("{head}holdfast:guess@{tail}"), "SELECT 'x'").await.expect_err("a wrong password");
    assert_eq!(error.code().map(|code| code.code()), Some("28P01"));
    let socket = cluster.socket_dir().expect("a short path").to_path_buf();
    let mut config = tokio_postgres::Config::new();
    config.host_path(&socket).port(cluster.port()).user("holdfast").password("guess").dbname("postgres");
    let error = config.connect(NoTls).await.err().expect("a wrong password on the socket");
    assert_eq!(error.code().map(|code| code.code()), Some("28P01"));
    let log = std::fs::read_to_string(cluster.home().join("postgres.log")).expect("a log");
    ask(&url, "SELECT ('canary' || 4711)::int::text").await.expect_err("no number");
    let after = std::fs::read_to_string(cluster.home().join("postgres.log")).expect("a log");
    assert!(!after[log.len()..].contains("STATEMENT"), "statements stay out of the log: {after}");
    cluster.destroy().await.expect("destroyed");
}

#[tokio::test]
async fn a_second_start_attaches_and_leaves_the_server_alone() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let (one, two) = tokio::join!(Cluster::start(volatile(dir.path())), Cluster::start(volatile(dir.path())));
    let (one, two) = (one.expect("a cluster"), two.expect("a cluster"));
    let (owner, guest) = if one.is_owner() { (one, two) } else { (two, one) };
    assert!(owner.is_owner() && !guest.is_owner());
    assert_eq!(owner.url("postgres"), guest.url("postgres"));
    assert_eq!(owner.pid(), guest.pid());
    assert!(matches!(guest.restart(StopMode::Fast).await, Err(EmbeddedError::NotOwner)));
    guest.stop(StopMode::Immediate).await.expect("nothing to do");
    drop(guest);
    assert_eq!(ask(&owner.url("postgres"), "SELECT 'x'").await.expect("still there"), "x");

    std::fs::write(owner.home().join("password"), "another").expect("written");
    let error = Cluster::start(volatile(dir.path())).await.expect_err("the password doesn't match");
    assert!(matches!(error, EmbeddedError::ForeignServer { .. }), "{error}");
    owner.destroy().await.expect("destroyed");
}

#[tokio::test]
async fn a_killed_server_starts_again_with_what_was_committed() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let cluster = Cluster::start(volatile(dir.path())).await.expect("a cluster");
    let url = cluster.url("postgres");
    let (client, connection) = tokio_postgres::connect(&url, NoTls).await.expect("a connection");
    let running = tokio::spawn(connection);
    client.batch_execute("CREATE TABLE kept AS SELECT 'kept'::text AS word").await.expect("created");
    for restart in [true, false] {
        let pid = cluster.pid().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
        kill_process(pid.expect("a running server"), Signal::KILL).expect("killed");
        if restart {
            cluster.restart(StopMode::Fast).await.expect("started over the remains");
            assert_eq!(ask(&url, "SELECT word FROM kept").await.expect("recovered"), "kept");
        } else {
            let other = Cluster::start(volatile(dir.path())).await.expect("started over the remains");
            assert!(other.is_owner());
            assert_eq!(
                ask(&other.url("postgres"), "SELECT word FROM kept").await.expect("recovered"),
                "kept"
            );
            other.destroy().await.expect("destroyed");
        }
    }
    assert!(running.await.expect("not cancelled").is_err(), "the first connection died with its server");
}

#[tokio::test]
async fn what_can_not_start_says_why() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let settings = vec![("shared_buffers".to_owned(), "many".to_owned())];
    let error =
        Cluster::start(EmbeddedOptions { settings, ..volatile(dir.path()) }).await.expect_err("no number");
    let text = error.to_string();
    assert!(text.contains("ended while starting") && text.contains("shared_buffers"), "{text}");
    let settings = vec![("port".to_owned(), "1".to_owned())];
    let error =
        Cluster::start(EmbeddedOptions { settings, ..volatile(dir.path()) }).await.expect_err("reserved");
    assert!(matches!(error, EmbeddedError::ReservedSetting(name) if name == "port"));

    let taken = std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let port = taken.local_addr().expect("an address").port();
    let error = Cluster::start(EmbeddedOptions { port: Some(port), ..volatile(dir.path()) }).await;
    assert!(matches!(error, Err(EmbeddedError::PortTaken(number)) if number == port));
    drop(taken);
    let cluster =
        Cluster::start(EmbeddedOptions { port: Some(port), ..volatile(dir.path()) }).await.expect("free now");
    assert_eq!(cluster.port(), port);

    cluster.stop(StopMode::Fast).await.expect("stopped");
    std::fs::write(cluster.home().join("data/PG_VERSION"), "13\n").expect("written");
    let error = Cluster::start(volatile(dir.path())).await.expect_err("made by an older server");
    assert!(matches!(error, EmbeddedError::DataVersion { major: 13, .. }), "{error}");
    cluster.destroy().await.expect("destroyed");
}

#[tokio::test]
async fn a_directory_out_of_the_servers_reach_is_replaced_by_one_that_every_start_finds() {
    let outer = tempfile::tempdir().expect("a temporary directory");
    if !rustix::process::geteuid().is_root() {
        return;
    }
    std::fs::set_permissions(outer.path(), std::fs::Permissions::from_mode(0o700)).expect("closed");
    // Private above the data directory's parent, as a clone under /root is: nothing up there may be opened.
    let dir = outer.path().join("clone").join(".holdfast");
    std::fs::create_dir_all(&dir).expect("created");
    let cluster = Cluster::start(volatile(&dir)).await.expect("a cluster elsewhere");
    let home = cluster.home().to_path_buf();
    assert!(!home.starts_with(outer.path()), "{}", home.display());
    assert_eq!(std::fs::metadata(outer.path()).expect("there").permissions().mode() & 0o777, 0o700);
    let guest = Cluster::start(volatile(&dir)).await.expect("the same cluster");
    assert!(!guest.is_owner() && guest.home() == home);
    assert_eq!(ask(&guest.url("postgres"), "SELECT 'x'").await.expect("an answer"), "x");
    cluster.destroy().await.expect("destroyed");
    assert!(!home.exists());

    std::fs::create_dir_all(dir.join("postgres/data")).expect("created");
    std::fs::write(dir.join("postgres/data/PG_VERSION"), "15\n").expect("written");
    let error = Cluster::start(volatile(&dir)).await.expect_err("the cluster there can't be reached");
    assert!(matches!(error, EmbeddedError::Dir { .. }), "{error}");
}

#[tokio::test]
async fn a_private_data_directory_is_opened_to_the_servers_group_alone() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o700)).expect("closed");
    let cluster = Cluster::start(volatile(dir.path())).await.expect("a cluster");
    assert!(
        cluster.home().starts_with(dir.path().canonicalize().expect("there")),
        "{}",
        cluster.home().display()
    );
    let mode = std::fs::metadata(dir.path()).expect("there").permissions().mode() & 0o777;
    assert_eq!(mode, if rustix::process::geteuid().is_root() { 0o710 } else { 0o700 });
    cluster.destroy().await.expect("destroyed");
}

#[tokio::test]
async fn a_long_path_gets_its_socket_elsewhere() {
    let outer = tempfile::tempdir().expect("a temporary directory");
    std::fs::set_permissions(outer.path(), std::fs::Permissions::from_mode(0o711)).expect("opened");
    let dir = outer.path().join("x".repeat(100));
    let cluster = Cluster::start(volatile(&dir)).await.expect("a cluster");
    let sockets = cluster.socket_dir().expect("another place").to_path_buf();
    assert!(!sockets.starts_with(&dir));
    assert!(sockets.join(format!(".s.PGSQL.{}", cluster.port())).exists());
    cluster.destroy().await.expect("destroyed");
    assert!(!sockets.exists());
}

/// Not a test of its own: the process that the next test kills.
#[tokio::test]
async fn owner_process() {
    let Some(dir) = std::env::var_os("HOLDFAST_TEST_OWNER_DIR") else { return };
    let cluster = Cluster::start(volatile(Path::new(&dir))).await.expect("a cluster");
    let mut out = std::io::stdout();
    writeln!(out, "\nport {}", cluster.port()).and_then(|()| out.flush()).expect("written");
    std::future::pending::<()>().await;
}

#[tokio::test]
async fn the_server_dies_with_a_killed_owner() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let mut owner = tokio::process::Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "owner_process", "--nocapture"])
        .env("HOLDFAST_TEST_OWNER_DIR", dir.path())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("started");
    let mut lines = BufReader::new(owner.stdout.take().expect("piped")).lines();
    let told = async {
        loop {
            let line = lines.next_line().await.expect("readable").expect("a port before the end");
            if let Some(port) = line.strip_prefix("port ") {
                break port.parse::<u16>().expect("a number");
            }
        }
    };
    let port = timeout(Duration::from_secs(60), told).await.expect("a started owner");
    let guest = Cluster::start(volatile(dir.path())).await.expect("attached to another process's");
    assert!(!guest.is_owner() && guest.port() == port);
    assert_eq!(ask(&guest.url("postgres"), "SELECT 'x'").await.expect("an answer"), "x");

    owner.start_kill().expect("killed");
    owner.wait().await.expect("reaped");
    until_gone(port).await;
    let heir = Cluster::start(volatile(dir.path())).await.expect("started over the remains");
    assert!(heir.is_owner());
    assert_eq!(ask(&guest.url("postgres"), "SELECT 'x'").await.expect("the guest's URL is still good"), "x");
    heir.destroy().await.expect("destroyed");
}
