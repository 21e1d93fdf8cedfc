//! Bringing a cluster up: attach to it if it runs, else start it and wait until it is ready.

use std::fs::{self, File, TryLockError};
use std::io::Write;
use std::net::{Ipv4Addr, TcpListener};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tokio_postgres::NoTls;

use super::discover::Installation;
use super::home::Home;
use super::postmaster::{PidFile, Postmaster, Status};
use super::{Cluster, EmbeddedError, EmbeddedOptions, SUPERUSER, init, tail};

/// Bound on a start, crash recovery included.
const READY: Duration = Duration::from_secs(60);
/// Bound on waiting for another process's start: its `initdb` and its recovery.
const LOCKED: Duration = Duration::from_secs(120);
/// How long a dead server's children may keep its shared memory before a start gives up on them.
const REMAINS: Duration = Duration::from_secs(20);
/// How long a live pid that doesn't answer on its port is given before it counts as not being a server.
const SILENT: Duration = Duration::from_secs(5);
/// Settings that the caller can't give.
const RESERVED: [&str; 6] = [
    "port",
    "listen_addresses",
    "unix_socket_directories",
    "data_directory",
    "hba_file",
    "external_pid_file",
];

pub(super) async fn start(options: EmbeddedOptions) -> Result<Cluster, EmbeddedError> {
    if let Some((name, _)) = options.settings.iter().find(|(name, _)| !settable(name)) {
        return Err(EmbeddedError::ReservedSetting(name.clone()));
    }
    let found = blocking(|| Ok(init::discover())).await?;
    let any = init::first_usable(found.clone())?;
    let data_dir = options.data_dir.clone();
    let home = blocking(move || Home::open(&data_dir, &any.postgres())).await?;
    let lock = lock(&home).await?;
    let install = init::choose(&home, found)?;
    if let Some((password, port)) = attach(&home).await? {
        tracing::info!(dir = %home.dir.display(), port, "using the embedded Postgres that another process runs");
        return Ok(Cluster { home, install, options, password, port, owned: None });
    }
    let (files, server, durable) = (home.clone(), install.clone(), options.durable);
    let password = blocking(move || init::ensure(&files, &server, durable)).await?;
    let (server, port) = match options.port {
        Some(port) => (launch_on(&home, &install, &options, port).await?, port),
        None => launch_anywhere(&home, &install, &options).await?,
    };
    remember_port(&home, port);
    drop(lock);
    tracing::info!(dir = %home.dir.display(), port, pid = server.pid(), version = install.major,
        "the embedded Postgres is ready");
    let owned = Some(Mutex::new(Some(Arc::new(server))));
    Ok(Cluster { home, install, options, password, port, owned })
}

/// Settings are identifiers, with a dot for those of extensions.
fn settable(name: &str) -> bool {
    let known = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.'));
    known && !name.is_empty() && !RESERVED.contains(&name.to_ascii_lowercase().as_str())
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, EmbeddedError> + Send + 'static,
) -> Result<T, EmbeddedError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
        // The runtime is shutting down.
        Err(error) => Err(EmbeddedError::dir("embedded cluster".as_ref(), std::io::Error::other(error))),
    }
}

/// Takes the lock under which one process at a time starts, attaches or restarts.
pub(super) async fn lock(home: &Home) -> Result<File, EmbeddedError> {
    let file = home.lock_file().map_err(|source| EmbeddedError::dir(&home.dir, source))?;
    let deadline = Instant::now() + LOCKED;
    let mut tick = ticks(50);
    loop {
        tick.tick().await;
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => {}
            Err(TryLockError::WouldBlock) => {
                return Err(EmbeddedError::Locked { dir: home.dir.clone(), waited: LOCKED });
            }
            Err(TryLockError::Error(source)) => return Err(EmbeddedError::dir(&home.dir, source)),
        }
    }
}

fn ticks(millis: u64) -> tokio::time::Interval {
    let mut tick = interval(Duration::from_millis(millis));
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    tick
}

/// Password and port of the server that runs on this home, if one does. Waits out one that is stopping,
/// and leaves a pid that belongs to something else for Postgres to judge.
async fn attach(home: &Home) -> Result<Option<(String, u16)>, EmbeddedError> {
    let begun = Instant::now();
    let mut tick = ticks(50);
    loop {
        tick.tick().await;
        let Some(running) = PidFile::read(&home.data()).filter(PidFile::process_exists) else {
            return Ok(None);
        };
        let waited = begun.elapsed();
        if let (Status::Ready, Some(port)) = (running.status, running.port) {
            let password = init::read_password(home)?;
            match knock(home, &password, port).await {
                Knock::Ours => return Ok(Some((password, port))),
                Knock::Foreign => {
                    let (dir, password) = (home.data(), home.password_file());
                    return Err(EmbeddedError::ForeignServer { dir, password });
                }
                Knock::Silent if waited > SILENT => return Ok(None),
                Knock::Silent => {}
            }
        } else if waited > READY {
            return Ok(None);
        }
    }
}

enum Knock {
    /// It accepts our password and serves our files.
    Ours,
    /// It answers, but isn't ours: another password.
    Foreign,
    /// Nothing answers, or something that serves other files.
    Silent,
}

async fn knock(home: &Home, password: &str, port: u16) -> Knock {
    let mut config = tokio_postgres::Config::new();
    config.host("127.0.0.1").port(port).user(SUPERUSER).password(password).dbname("postgres");
    let asking = async {
        let (client, connection) = config.connect(NoTls).await?;
        let running = tokio::spawn(connection);
        let row = client.query_one("SELECT current_setting('data_directory')", &[]).await;
        running.abort();
        row?.try_get::<_, String>(0)
    };
    match timeout(Duration::from_secs(5), asking).await {
        Ok(Ok(dir)) if home.data().as_os_str() == dir.as_str() => Knock::Ours,
        Ok(Err(error)) if error.code() == Some(&tokio_postgres::error::SqlState::INVALID_PASSWORD) => {
            Knock::Foreign
        }
        _ => Knock::Silent,
    }
}

/// Starts on the port of the last start or on any free one; somebody may take it in between, so this
/// tries a few.
async fn launch_anywhere(
    home: &Home,
    install: &Installation,
    options: &EmbeddedOptions,
) -> Result<(Postmaster, u16), EmbeddedError> {
    let last = fs::read_to_string(home.port_file()).ok().and_then(|text| text.trim().parse().ok());
    let mut candidate = last.filter(|port| port_is_free(*port));
    let mut attempts = 0;
    loop {
        attempts += 1;
        let port = match candidate.take() {
            Some(port) => port,
            None => free_port().map_err(|source| EmbeddedError::dir(&home.dir, source))?,
        };
        match launch_on(home, install, options, port).await {
            Ok(server) => return Ok((server, port)),
            Err(EmbeddedError::PortTaken(_)) if attempts < 5 => {}
            Err(error) => return Err(error),
        }
    }
}

fn port_is_free(port: u16) -> bool {
    TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok()
}

fn free_port() -> std::io::Result<u16> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr().map(|address| address.port())
}

fn remember_port(home: &Home, port: u16) {
    let written = home.create_file(&home.port_file()).and_then(|mut file| write!(file, "{port}"));
    if let Err(error) = written {
        tracing::warn!(dir = %home.dir.display(), %error, "can't remember the embedded Postgres's port");
    }
}

/// Starts the server on one port and waits until it is ready. A server that was killed may leave
/// children that hold its shared memory for a moment; the start is repeated until they are gone.
pub(super) async fn launch_on(
    home: &Home,
    install: &Installation,
    options: &EmbeddedOptions,
    port: u16,
) -> Result<Postmaster, EmbeddedError> {
    let begun = Instant::now();
    let mut tick = ticks(200);
    loop {
        tick.tick().await;
        if !port_is_free(port) {
            return Err(EmbeddedError::PortTaken(port));
        }
        match launch_once(home, install, options, port).await {
            Err(EmbeddedError::NotReady { log, .. })
                if log.contains("pre-existing shared memory block") && begun.elapsed() < REMAINS => {}
            Err(EmbeddedError::NotReady { .. }) if !port_is_free(port) => {
                return Err(EmbeddedError::PortTaken(port));
            }
            other => return other,
        }
    }
}

async fn launch_once(
    home: &Home,
    install: &Installation,
    options: &EmbeddedOptions,
    port: u16,
) -> Result<Postmaster, EmbeddedError> {
    let path = home.log_file();
    let mut earlier = path.clone().into_os_string();
    earlier.push(".1");
    let _ = fs::rename(&path, earlier);
    let log = home.create_file(&path).map_err(|source| EmbeddedError::dir(&path, source))?;
    let output = log.try_clone().map_err(|source| EmbeddedError::dir(&path, source))?;

    let program = install.postgres();
    let mut command = home.command(&program);
    command.arg("-D").arg(home.data()).stdout(output).stderr(log);
    let sockets = home.sockets.as_deref().map(|dir| dir.to_string_lossy()).unwrap_or_default();
    let ours = [("port", port.to_string()), ("unix_socket_directories", sockets.into_owned())];
    let fixed = DEFAULTS.iter().chain(if options.durable { &[][..] } else { VOLATILE });
    for (name, value) in fixed {
        command.arg("-c").arg(format!("{name}={value}"));
    }
    for (name, value) in
        options.settings.iter().map(|(n, v)| (n.as_str(), v)).chain(ours.iter().map(|(n, v)| (*n, v)))
    {
        command.arg("-c").arg(format!("{name}={value}"));
    }
    let server =
        Postmaster::spawn(command).await.map_err(|source| EmbeddedError::Spawn { program, source })?;
    match await_ready(home, &server).await {
        Ok(()) => Ok(server),
        Err(what) => {
            server.signal(rustix::process::Signal::QUIT);
            let log = fs::read(&path).map(|bytes| tail(&String::from_utf8_lossy(&bytes))).unwrap_or_default();
            Err(EmbeddedError::NotReady { what, path, log })
        }
    }
}

/// Polls `postmaster.pid`: the server tells readiness nowhere else without a connection.
async fn await_ready(home: &Home, server: &Postmaster) -> Result<(), String> {
    let deadline = tokio::time::sleep(READY);
    tokio::pin!(deadline);
    let mut tick = ticks(10);
    loop {
        tokio::select! {
            () = server.wait() => return Err("ended while starting".to_owned()),
            () = &mut deadline => return Err(format!("wasn't ready within {} s", READY.as_secs())),
            _ = tick.tick() => {}
        }
        let ready = PidFile::read(&home.data())
            .is_some_and(|file| file.status == Status::Ready && u32::try_from(file.pid) == Ok(server.pid()));
        if ready {
            return Ok(());
        }
    }
}

/// The settings of every embedded cluster. The log keeps neither statements nor the details of errors,
/// which quote row values.
const DEFAULTS: &[(&str, &str)] = &[
    ("listen_addresses", "127.0.0.1"),
    ("cluster_name", "holdfast"),
    ("max_connections", "200"),
    ("jit", "off"),
    ("timezone", "UTC"),
    ("log_timezone", "UTC"),
    ("lc_messages", "C"),
    ("logging_collector", "off"),
    ("log_destination", "stderr"),
    ("log_checkpoints", "off"),
    ("log_statement", "none"),
    ("log_min_duration_statement", "-1"),
    ("log_min_error_statement", "panic"),
    ("log_error_verbosity", "terse"),
];

/// What a cluster without durability adds. Commits still reach the log before they are answered, so a
/// killed server loses none: only the machine's own crash would.
const VOLATILE: &[(&str, &str)] = &[("fsync", "off"), ("full_page_writes", "off")];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clusters_own_settings_are_refused() {
        assert!(settable("max_connections") && settable("auto_explain.log_min_duration"));
        assert!(!settable("Port") && !settable("listen_addresses") && !settable("") && !settable("a=b"));
    }
}
