//! Clocks of other processes that a test sets: libfaketime, preloaded, reads how far it is off from a file.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Stdio,
};

use anyhow::{Context as _, Result, ensure};
use tokio::process::Command;

/// Where systems keep the library.
const PLACES: [&str; 5] = [
    "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1",
    "/usr/lib/aarch64-linux-gnu/faketime/libfaketime.so.1",
    "/usr/lib64/faketime/libfaketime.so.1",
    "/usr/lib/faketime/libfaketime.so.1",
    "/usr/local/lib/faketime/libfaketime.so.1",
];

/// A wall clock for some processes; what measures time without one stays right.
pub struct Clock {
    library: PathBuf,
    dir: tempfile::TempDir,
}

impl Clock {
    /// A clock that is right yet. Installs the library if it isn't there.
    ///
    /// # Errors
    /// If it can't be installed.
    pub async fn new() -> Result<Self> {
        let library = match found() {
            Some(library) => library,
            None => install().await?,
        };
        let dir = tempfile::tempdir()?;
        // Others read it, the server's user too.
        fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
        let clock = Self { library, dir };
        clock.set(0)?;
        Ok(clock)
    }

    /// Sets it to be so many seconds ahead of the right time.
    ///
    /// # Errors
    /// If the file can't be written.
    pub fn set(&self, ahead: i64) -> Result<()> {
        // Renamed into place: whoever reads it reads all of it.
        let next = self.dir.path().join("next");
        fs::write(&next, format!("{ahead:+}s\n"))?;
        fs::rename(&next, self.file())?;
        Ok(())
    }

    fn file(&self) -> PathBuf {
        self.dir.path().join("ahead")
    }

    /// What a process that lives by this clock has in its environment.
    pub fn environment(&self) -> Vec<(String, String)> {
        let shown = |path: &Path| path.display().to_string();
        [
            ("LD_PRELOAD", shown(&self.library)),
            ("FAKETIME_TIMESTAMP_FILE", shown(&self.file())),
            ("FAKETIME_NO_CACHE", "1".to_owned()),
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1".to_owned()),
            ("DONT_FAKE_MONOTONIC", "1".to_owned()),
            ("NO_FAKE_STAT", "1".to_owned()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .to_vec()
    }
}

fn found() -> Option<PathBuf> {
    PLACES.iter().map(PathBuf::from).find(|path| path.is_file())
}

/// Installs the library, one process at a time: every test is a process of its own.
async fn install() -> Result<PathBuf> {
    let _alone = tokio::task::spawn_blocking(|| {
        let lock = fs::File::create(std::env::temp_dir().join("holdfast-tests-faketime.lock"))?;
        lock.lock()?;
        Ok::<_, std::io::Error>(lock)
    })
    .await??;
    if let Some(library) = found() {
        return Ok(library);
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("install-faketime");
    let ran = Command::new(script).stdin(Stdio::null()).output().await?;
    ensure!(ran.status.success(), "libfaketime can't be installed: {}", String::from_utf8_lossy(&ran.stderr));
    found().with_context(|| format!("libfaketime was installed and is in none of {PLACES:?}"))
}
