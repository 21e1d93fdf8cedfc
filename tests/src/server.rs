//! A Postgres whose surroundings a test decides: a small disk of its own, or a clock that the test sets. A
//! shell keeps it going as a supervisor would: when the server ends, it is started again.

use std::{
    fs,
    net::{Ipv4Addr, TcpListener},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use holdfast_store::{
    embedded::{Cluster, EmbeddedOptions, StopMode},
    install::ensure_installed,
    migrate::migrate,
};
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, geteuid, kill_process, kill_process_group, waitid,
};
use tokio::{
    process::{Child, Command},
    time::Instant,
};

use crate::{cluster::connect, world::PATIENCE};

/// The database that a server is made with.
const DATABASE: &str = "flow";

/// What is special of a server.
#[derive(Debug, Default, Clone)]
pub struct Shape {
    /// MiB of the disk that its files lie on; none leaves them on the disk of temporary files.
    pub disk: Option<u64>,
    /// Variables of its environment.
    pub environment: Vec<(String, String)>,
    /// Its settings, as `name=value`.
    pub settings: Vec<String>,
}

/// A running server. Dropping it ends it.
pub struct Server {
    _keeper: Child,
    group: Pid,
    dir: tempfile::TempDir,
    url: String,
}

/// What the keeper does: `$1` is the size of the disk or empty, `$2` where it is mounted, `$3` the files; the
/// rest is the server's command, which is run again whenever it ends.
const KEEPER: &str = r#"
size=$1 mount=$2 files=$3; shift 3
if [ -n "$size" ]; then mount -t tmpfs -o "size=${size}m,mode=0755" none "$mount" || exit 1; fi
cp -a "$files" "$mount/data" || exit 1
trap 'exit 0' QUIT TERM
while :; do "$@"; sleep 0.2; done
"#;

impl Server {
    /// Starts a server with a migrated database.
    ///
    /// # Errors
    /// If the system doesn't let it be so.
    pub async fn start(shape: Shape) -> Result<Self> {
        ensure_installed().await?;
        let dir = tempfile::Builder::new().prefix("holdfast-server-").tempdir()?;
        fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
        let options = EmbeddedOptions { durable: false, ..EmbeddedOptions::new(dir.path()) };
        let cluster = Cluster::start(options).await?;
        cluster.create_database(DATABASE).await?;
        migrate(&cluster.url(DATABASE)).await?;
        let (files, program) = (cluster.home().join("data"), cluster.installation().bin.join("postgres"));
        let made = cluster.url(DATABASE);
        let made_on = cluster.port();
        cluster.stop(StopMode::Fast).await?;
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
        let url = made.replace(&format!("127.0.0.1:{made_on}/"), &format!("127.0.0.1:{port}/"));
        let mount = dir.path().join("disk");
        fs::create_dir(&mount)?;

        let mut command = keeper(shape.disk.is_some());
        command.arg("-c").arg(KEEPER).arg("keeper");
        command.arg(shape.disk.map(|size| size.to_string()).unwrap_or_default()).arg(&mount).arg(&files);
        as_owner(&mut command, &files, shape.disk.is_some())?;
        command.arg("env").args(shape.environment.iter().map(|(name, value)| format!("{name}={value}")));
        command.arg(program).arg("-D").arg(mount.join("data"));
        let fixed = ["listen_addresses=127.0.0.1", "unix_socket_directories=", "fsync=off", "jit=off"];
        for setting in fixed.iter().map(|&one| one.to_owned()).chain([format!("port={port}")]) {
            command.arg("-c").arg(setting);
        }
        for setting in &shape.settings {
            command.arg("-c").arg(setting);
        }
        let log = fs::File::create(dir.path().join("server.log"))?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let keeper = command.process_group(0).kill_on_drop(true).spawn()?;
        let group = keeper.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        let server = Self { _keeper: keeper, group: group.context("the keeper ended")?, dir, url };
        server.answers().await?;
        Ok(server)
    }

    /// URL of its database.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Where its files lie, as this process sees it.
    pub fn disk(&self) -> PathBuf {
        let mount = self.dir.path().join("disk");
        let inside = mount.strip_prefix("/").unwrap_or(&mount);
        Path::new("/proc").join(self.group.as_raw_nonzero().to_string()).join("root").join(inside)
    }

    /// What it has printed.
    pub fn log_text(&self) -> String {
        fs::read_to_string(self.dir.path().join("server.log")).unwrap_or_default()
    }

    /// Ends it in immediate mode, and waits until it takes connections again.
    ///
    /// # Errors
    /// If it doesn't end, or doesn't come back.
    pub async fn restart(&self) -> Result<()> {
        let noted = fs::read_to_string(self.disk().join("data/postmaster.pid"))?;
        let pid: i32 = noted.lines().next().context("no process id")?.trim().parse()?;
        kill_process(Pid::from_raw(pid).context("no process id")?, Signal::QUIT)?;
        let until = Instant::now() + PATIENCE;
        let mut pause = tokio::time::interval(Duration::from_millis(20));
        while Path::new("/proc").join(pid.to_string()).exists() {
            pause.tick().await;
            ensure!(Instant::now() < until, "the server doesn't end: {}", self.log_text());
        }
        self.answers().await
    }

    /// Waits until it takes connections.
    ///
    /// # Errors
    /// If it doesn't within [`PATIENCE`].
    pub async fn answers(&self) -> Result<()> {
        let until = Instant::now() + PATIENCE;
        let mut pause = tokio::time::interval(Duration::from_millis(50));
        loop {
            pause.tick().await;
            match connect(&self.url).await {
                Ok(_) => return Ok(()),
                Err(error) => {
                    ensure!(Instant::now() < until, "no server: {error:#}; its log: {}", self.log_text());
                }
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The keeper leaves, and the server takes its shared memory along.
        let _ = kill_process_group(self.group, Signal::QUIT);
        // An immediate stop is bounded. Somebody else may reap it, which ends the wait too.
        let wait = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        while let Err(rustix::io::Errno::INTR) = waitid(WaitId::Pid(self.group), wait) {}
    }
}

/// A shell that ends with this process, with mounts of its own if it needs them. Root may have them as it is;
/// others become root of a namespace of users.
fn keeper(mounts: bool) -> Command {
    let ends_with_us = ["setpriv", "--pdeathsig", "KILL", "sh"];
    if !mounts {
        let mut command = Command::new(ends_with_us[0]);
        command.args(&ends_with_us[1..]);
        return command;
    }
    let mut command = Command::new("unshare");
    command.arg(if geteuid().is_root() { "-m" } else { "-rm" }).args(ends_with_us);
    command
}

/// Runs what follows as the owner of the files, and ends it with the keeper: Postgres doesn't run as root, not even
/// as one of a namespace.
fn as_owner(command: &mut Command, files: &Path, mounts: bool) -> Result<()> {
    let about = fs::metadata(files)?;
    if !geteuid().is_root() && mounts {
        command.args(["unshare", "-U"]);
        command.arg(format!("--map-user={}", about.uid())).arg(format!("--map-group={}", about.gid()));
    }
    command.args(["setpriv", "--pdeathsig", "QUIT"]);
    if geteuid().is_root() {
        command.arg("--clear-groups");
        command.arg(format!("--reuid={}", about.uid())).arg(format!("--regid={}", about.gid()));
    }
    Ok(())
}
