//! Creating a cluster's files, once.

use std::fs::{self, File};
use std::io::Write;
use std::process::{Command, Output};

use uuid::Uuid;

use super::discover::{Installation, MIN_MAJOR, installations};
use super::home::Home;
use super::{EmbeddedError, SUPERUSER, tail};

/// Picks the server for a home: the major version that made its files, or the preferred one for a new home.
pub(super) fn choose(home: &Home, found: Vec<Installation>) -> Result<Installation, EmbeddedError> {
    let Some(major) = major_of(home)? else {
        return first_usable(found);
    };
    let installed = found.iter().map(|one| one.major).collect();
    found.into_iter().find(|one| one.major == major).ok_or_else(|| EmbeddedError::DataVersion {
        dir: home.data(),
        major,
        installed,
    })
}

/// Any server that is new enough.
pub(super) fn first_usable(found: Vec<Installation>) -> Result<Installation, EmbeddedError> {
    let newest = found.iter().map(|one| one.major).max();
    match (found.into_iter().find(|one| one.major >= MIN_MAJOR), newest) {
        (Some(one), _) => Ok(one),
        (None, Some(newest)) => Err(EmbeddedError::TooOld { newest }),
        (None, None) => Err(EmbeddedError::NotInstalled),
    }
}

/// All installed servers; blocks for some milliseconds.
pub(super) fn discover() -> Vec<Installation> {
    installations()
}

fn major_of(home: &Home) -> Result<Option<u32>, EmbeddedError> {
    let path = home.data().join("PG_VERSION");
    match fs::read_to_string(&path) {
        Ok(text) => {
            let major = text.trim().split('.').next().and_then(|major| major.parse().ok());
            major.map(Some).ok_or_else(|| EmbeddedError::dir(&path, std::io::ErrorKind::InvalidData.into()))
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(EmbeddedError::dir(&path, error)),
    }
}

/// Returns the superuser's password, creating the cluster's files first if there are none. The caller
/// holds the start lock. `initdb` works in a staging directory that is renamed when whole, so a crash in
/// the middle leaves nothing that looks like a cluster.
pub(super) fn ensure(home: &Home, install: &Installation, durable: bool) -> Result<String, EmbeddedError> {
    if major_of(home)?.is_some() {
        return read_password(home);
    }
    let password = format!("{}{}", Uuid::new_v4().simple(), Uuid::new_v4().simple());
    let path = home.password_file();
    let written = home.create_file(&path).and_then(|mut file| {
        file.write_all(password.as_bytes())?;
        if durable { file.sync_all() } else { Ok(()) }
    });
    written.map_err(|source| EmbeddedError::dir(&path, source))?;

    let output = match initdb(home, install, durable, "C.UTF-8")? {
        output if output.status.success() => output,
        // Some systems don't have this locale; `C` sorts the same way.
        _ => initdb(home, install, durable, "C")?,
    };
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(EmbeddedError::Initdb { status: output.status, output: tail(&text) });
    }
    let moved = fs::rename(home.staging(), home.data());
    moved.map_err(|source| EmbeddedError::dir(&home.data(), source))?;
    if durable {
        let synced = File::open(&home.dir).and_then(|dir| dir.sync_all());
        synced.map_err(|source| EmbeddedError::dir(&home.dir, source))?;
    }
    Ok(password)
}

fn initdb(home: &Home, install: &Installation, durable: bool, locale: &str) -> Result<Output, EmbeddedError> {
    let staging = home.staging();
    match fs::remove_dir_all(&staging) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(EmbeddedError::dir(&staging, error));
        }
        _ => {}
    }
    let mut command: Command = home.command(&install.initdb());
    command.arg("--pgdata").arg(&staging);
    command.arg("--pwfile").arg(home.password_file());
    command.args(["--username", SUPERUSER, "--encoding", "UTF8", "--locale", locale]);
    command.args(["--auth", "scram-sha-256", "--no-instructions"]);
    if !durable {
        command.arg("--no-sync");
    }
    command.output().map_err(|source| EmbeddedError::Spawn { program: install.initdb(), source })
}

/// The password that an earlier start wrote.
pub(super) fn read_password(home: &Home) -> Result<String, EmbeddedError> {
    let path = home.password_file();
    let text = fs::read_to_string(&path).map_err(|source| EmbeddedError::dir(&path, source))?;
    let password = text.trim().to_owned();
    // It goes into URLs as it is.
    if password.is_empty() || !password.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        return Err(EmbeddedError::dir(&path, std::io::ErrorKind::InvalidData.into()));
    }
    Ok(password)
}
