//! Where a cluster lives on disk, and as whom its server runs.
//!
//! Postgres refuses to run as root, so a root process gives the server to `postgres` or `nobody`. That
//! user must be able to walk to the directory, which it can't below a private parent such as `/root`;
//! then the cluster lives elsewhere, under a name made from the asked-for path, so that every process
//! that asks for the same directory finds the same cluster.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::{Gid, OFlags, Uid};
use sha2::{Digest, Sha256};

use super::EmbeddedError;

/// Longest path that a Unix socket address holds, without the closing NUL.
const MAX_SOCKET_PATH: usize = 107;
/// Roots for clusters whose asked-for directory the server's user can't reach.
const FALLBACKS: [&str; 2] = ["/var/lib/holdfast", "/tmp"];

/// The user a server runs as when this process is root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ServerUser {
    pub(super) uid: u32,
    pub(super) gid: u32,
}

/// A cluster's directory: database files, password, log and lock.
#[derive(Debug, Clone)]
pub(super) struct Home {
    pub(super) dir: PathBuf,
    pub(super) user: Option<ServerUser>,
    /// Directory for the Unix socket, where a path short enough exists.
    pub(super) sockets: Option<PathBuf>,
}

impl Home {
    /// Makes the directory for the cluster of `data_dir`, owned by the server's user, or finds it again.
    /// `postgres` is the program that must be able to run there.
    pub(super) fn open(data_dir: &Path, postgres: &Path) -> Result<Home, EmbeddedError> {
        fs::create_dir_all(data_dir).map_err(|source| EmbeddedError::dir(data_dir, source))?;
        let data_dir = data_dir.canonicalize().map_err(|source| EmbeddedError::dir(data_dir, source))?;
        let wanted = data_dir.join("postgres");
        let user = server_user()?;
        let Some(as_user) = user else {
            private_dir(&wanted, None).map_err(|source| EmbeddedError::dir(&wanted, source))?;
            return Ok(Home { sockets: socket_dir(&wanted, None), dir: wanted, user });
        };
        let first = match claim(&wanted, as_user, postgres) {
            Ok(()) => return Ok(Home { sockets: socket_dir(&wanted, user), dir: wanted, user }),
            Err(error) => error,
        };
        // A cluster that lies there must not seem to be lost because another one starts empty elsewhere.
        if wanted.join("data/PG_VERSION").exists() {
            return Err(EmbeddedError::dir(&wanted, first));
        }
        let name = format!("cluster-{}", path_hash(&wanted));
        for root in FALLBACKS.map(Path::new) {
            let dir = if root == Path::new("/tmp") {
                root.join(format!("holdfast-{name}"))
            } else {
                if fs::create_dir_all(root).is_err() {
                    continue;
                }
                root.join(&name)
            };
            if claim(&dir, as_user, postgres).is_ok() {
                // The empty directory at the wanted place would only mislead.
                let _ = fs::remove_dir(&wanted);
                tracing::info!(wanted = %wanted.display(), used = %dir.display(), reason = %first,
                    "the Postgres user can't use the data directory, so the embedded cluster lives elsewhere");
                return Ok(Home { sockets: socket_dir(&dir, user), dir, user });
            }
        }
        Err(EmbeddedError::dir(&wanted, first))
    }

    /// The database files (`PGDATA`).
    pub(super) fn data(&self) -> PathBuf {
        self.dir.join("data")
    }

    /// Where `initdb` works until its result is whole.
    pub(super) fn staging(&self) -> PathBuf {
        self.dir.join("data.new")
    }

    pub(super) fn password_file(&self) -> PathBuf {
        self.dir.join("password")
    }

    /// Remembers the TCP port, so that clients find a restarted cluster where it was.
    pub(super) fn port_file(&self) -> PathBuf {
        self.dir.join("port")
    }

    pub(super) fn log_file(&self) -> PathBuf {
        self.dir.join("postgres.log")
    }

    /// Opens a file of this home for writing from the start, private to the server's user. A symbolic
    /// link is refused: the directory belongs to that user, and root must not be led elsewhere by it.
    pub(super) fn create_file(&self, path: &Path) -> io::Result<File> {
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .custom_flags(no_follow())
            .open(path)?;
        file.set_permissions(Permissions::from_mode(0o600))?;
        if let Some(user) = self.user {
            std::os::unix::fs::fchown(&file, Some(user.uid), Some(user.gid))?;
        }
        Ok(file)
    }

    /// Opens the file whose lock serializes starts.
    pub(super) fn lock_file(&self) -> io::Result<File> {
        let path = self.dir.join("start.lock");
        OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(no_follow())
            .open(path)
    }

    /// A command that runs as the server's user with an environment of its own: this process's
    /// environment may hold keys, and `PG*` variables would change what the programs do.
    pub(super) fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.env_clear().current_dir(&self.dir).stdin(Stdio::null());
        for name in ["PATH", "LD_LIBRARY_PATH", "TZDIR"] {
            if let Some(value) = std::env::var_os(name) {
                command.env(name, value);
            }
        }
        command.env("LC_ALL", "C").env("HOME", &self.dir);
        if let Some(user) = self.user {
            run_as(&mut command, user);
        }
        command
    }
}

fn no_follow() -> i32 {
    i32::try_from(OFlags::NOFOLLOW.bits()).unwrap_or(0)
}

/// Drops to `user`. The standard library empties the supplementary groups when root sets a uid, so
/// none of root's groups stay with the server.
fn run_as(command: &mut Command, user: ServerUser) {
    command.uid(user.uid).gid(user.gid);
}

/// Who the server runs as: nobody else unless this process is root.
fn server_user() -> Result<Option<ServerUser>, EmbeddedError> {
    if !rustix::process::geteuid().is_root() {
        return Ok(None);
    }
    let passwd = fs::read_to_string("/etc/passwd").map_err(|_| EmbeddedError::NoServerUser)?;
    let found = ["postgres", "nobody"].iter().find_map(|name| passwd_entry(&passwd, name));
    found.map(Some).ok_or(EmbeddedError::NoServerUser)
}

fn passwd_entry(passwd: &str, name: &str) -> Option<ServerUser> {
    passwd.lines().find_map(|line| {
        let fields: Vec<&str> = line.split(':').collect();
        if fields.first() != Some(&name) {
            return None;
        }
        let uid = fields.get(2)?.parse().ok()?;
        let gid = fields.get(3)?.parse().ok()?;
        (uid != 0).then_some(ServerUser { uid, gid })
    })
}

/// Makes `dir` the server user's own and proves that it can run there.
fn claim(dir: &Path, user: ServerUser, postgres: &Path) -> io::Result<()> {
    private_dir(dir, Some(user))?;
    match probe(dir, user, postgres) {
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {}
        other => return other,
    }
    // Often only the parent is private, as a fresh temporary directory is: let the server's group walk
    // through it, not read it. Anything above belongs to others and stays as it is.
    let parent = dir.parent().ok_or(ErrorKind::PermissionDenied)?;
    let metadata = fs::metadata(parent)?;
    if metadata.uid() != 0 || metadata.mode() & 0o077 != 0 {
        return Err(ErrorKind::PermissionDenied.into());
    }
    std::os::unix::fs::chown(parent, None, Some(user.gid))?;
    fs::set_permissions(parent, Permissions::from_mode(metadata.mode() & 0o7777 | 0o010))?;
    probe(dir, user, postgres)
}

/// Runs `postgres --version` as the user, in the directory.
fn probe(dir: &Path, user: ServerUser, postgres: &Path) -> io::Result<()> {
    let mut command = Command::new(postgres);
    command.arg("--version").current_dir(dir).env_clear();
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    run_as(&mut command, user);
    let status = command.status()?;
    if status.success() { Ok(()) } else { Err(io::Error::other(format!("postgres --version: {status}"))) }
}

/// A directory with mode 0700 that belongs to the server's user. One that is there already must be a
/// real directory of that user or of root, so that nobody else prepared it.
fn private_dir(dir: &Path, user: Option<ServerUser>) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(dir) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let metadata = fs::symlink_metadata(dir)?;
    let me = rustix::process::geteuid().as_raw();
    let owner_is_ours = metadata.uid() == me || user.is_some_and(|user| user.uid == metadata.uid());
    if !metadata.is_dir() || !owner_is_ours {
        return Err(io::Error::new(ErrorKind::PermissionDenied, "it exists and belongs to somebody else"));
    }
    if let Some(user) = user {
        let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
        let flags = OFlags::NOFOLLOW | OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        let handle = rustix::fs::open(dir, flags, rustix::fs::Mode::empty())?;
        rustix::fs::fchown(&handle, Some(uid), Some(gid))?;
        rustix::fs::fchmod(&handle, rustix::fs::Mode::from_raw_mode(0o700))?;
    } else {
        fs::set_permissions(dir, Permissions::from_mode(0o700))?;
    }
    Ok(())
}

/// The home itself where its path is short enough for any port, else a directory under `/tmp`, else none.
fn socket_dir(home: &Path, user: Option<ServerUser>) -> Option<PathBuf> {
    if fits_a_socket(home) {
        return Some(home.to_path_buf());
    }
    let dir = Path::new("/tmp").join(format!("holdfast-socket-{}", path_hash(home)));
    match private_dir(&dir, user) {
        Ok(()) => Some(dir),
        Err(error) => {
            tracing::warn!(dir = %dir.display(), %error, "no place for a Unix socket: only TCP on loopback");
            None
        }
    }
}

fn fits_a_socket(dir: &Path) -> bool {
    // The server splits this setting at commas and quotes, which no escape gets past the command line.
    let text = dir.as_os_str().as_encoded_bytes();
    dir.join(".s.PGSQL.65535").as_os_str().len() <= MAX_SOCKET_PATH
        && !text.contains(&b',')
        && !text.contains(&b'"')
}

fn path_hash(path: &Path) -> String {
    let digest = Sha256::digest(path.as_os_str().as_encoded_bytes());
    digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_server_user_is_never_root() {
        let passwd =
            "root:x:0:0::/root:/bin/sh\npostgres:x:0:0::/:/bin/sh\nnobody:x:65534:65533::/:/bin/false\n";
        assert_eq!(passwd_entry(passwd, "postgres"), None);
        assert_eq!(passwd_entry(passwd, "nobody"), Some(ServerUser { uid: 65534, gid: 65533 }));
        assert_eq!(passwd_entry(passwd, "post"), None);
    }

    #[test]
    fn long_or_quoted_paths_get_no_socket_of_their_own() {
        assert!(fits_a_socket(Path::new("/srv/data")));
        let room = MAX_SOCKET_PATH - "/.s.PGSQL.65535".len();
        assert!(fits_a_socket(Path::new(&format!("/{}", "x".repeat(room - 1)))));
        assert!(!fits_a_socket(Path::new(&format!("/{}", "x".repeat(room)))));
        assert!(!fits_a_socket(Path::new("/srv/a,b")));
    }

    #[test]
    fn a_prepared_symbolic_link_is_refused() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let target = dir.path().join("target");
        fs::create_dir(&target).expect("created");
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&target, &link).expect("linked");
        let error = private_dir(&link, None).expect_err("a link is no directory of ours");
        assert_eq!(error.kind(), ErrorKind::PermissionDenied);
    }
}
