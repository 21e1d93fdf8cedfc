//! Finding an installed Postgres server.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The oldest server that Holdfast's SQL runs on.
pub const MIN_MAJOR: u32 = 14;

/// The programs of one installed server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Installation {
    /// Directory that holds `initdb` and `postgres`.
    pub bin: PathBuf,
    /// Major version, as in `15`.
    pub major: u32,
}

impl Installation {
    pub(super) fn postgres(&self) -> PathBuf {
        self.bin.join("postgres")
    }

    pub(super) fn initdb(&self) -> PathBuf {
        self.bin.join("initdb")
    }
}

/// Every installed server, whatever its version, in the order of preference: the one that
/// `pg_config` names, then the packaged ones from the newest down, then what is on the PATH.
/// Starts `pg_config` and each `postgres --version`, so it blocks for some milliseconds.
pub fn installations() -> Vec<Installation> {
    let mut seen = BTreeSet::new();
    let mut found = Vec::new();
    for bin in candidates() {
        let Ok(bin) = bin.canonicalize() else { continue };
        if !seen.insert(bin.clone()) || !bin.join("initdb").is_file() {
            continue;
        }
        if let Some(major) = version_of(&bin.join("postgres")) {
            found.push(Installation { bin, major });
        }
    }
    found
}

/// The server that a new cluster would use: the first of [`installations`] that is new enough.
pub fn usable() -> Option<Installation> {
    installations().into_iter().find(|found| found.major >= MIN_MAJOR)
}

fn candidates() -> Vec<PathBuf> {
    let mut bins = Vec::new();
    bins.extend(pg_config_bindir());
    bins.extend(numbered("/usr/lib/postgresql", "", "bin"));
    bins.extend(numbered("/usr", "pgsql-", "bin"));
    bins.extend(numbered("/usr/libexec", "postgresql", ""));
    bins.push(PathBuf::from("/usr/local/pgsql/bin"));
    if let Some(path) = std::env::var_os("PATH") {
        bins.extend(std::env::split_paths(&path).filter(|dir| dir.is_absolute()));
    }
    bins
}

fn pg_config_bindir() -> Option<PathBuf> {
    let output = Command::new("pg_config").arg("--bindir").output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let path = PathBuf::from(text.trim());
    (output.status.success() && path.is_absolute()).then_some(path)
}

/// Directories `<parent>/<prefix><number>/<tail>`, the highest number first.
fn numbered(parent: &str, prefix: &str, tail: &str) -> Vec<PathBuf> {
    let Ok(entries) = Path::new(parent).read_dir() else { return Vec::new() };
    let mut dirs: Vec<(u32, PathBuf)> = entries
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name();
            let number = name.to_str()?.strip_prefix(prefix)?.parse().ok()?;
            Some((number, entry.path().join(tail)))
        })
        .collect();
    dirs.sort_by_key(|(number, _)| std::cmp::Reverse(*number));
    dirs.into_iter().map(|(_, dir)| dir).collect()
}

fn version_of(postgres: &Path) -> Option<u32> {
    let output = Command::new(postgres).arg("--version").output().ok()?;
    parse_major(&String::from_utf8_lossy(&output.stdout))
}

/// Reads the major version from `postgres (PostgreSQL) 15.14 (Debian …)`; betas count as their release.
fn parse_major(text: &str) -> Option<u32> {
    let version = text.strip_prefix("postgres (PostgreSQL) ")?;
    let digits: String = version.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_release_beta_and_development_builds() {
        assert_eq!(parse_major("postgres (PostgreSQL) 15.14 (Debian 15.14-0+deb12u1)\n"), Some(15));
        assert_eq!(parse_major("postgres (PostgreSQL) 18beta2\n"), Some(18));
        assert_eq!(parse_major("postgres (PostgreSQL) 19devel\n"), Some(19));
        assert_eq!(parse_major("postgres (PostgreSQL) 9.6.24\n"), Some(9));
        assert_eq!(parse_major("something else 15\n"), None);
    }

    #[test]
    fn the_highest_number_comes_first() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        for name in ["9", "14", "16", "doc", "100"] {
            std::fs::create_dir_all(dir.path().join(name).join("bin")).expect("created");
        }
        let parent = dir.path().to_str().expect("UTF-8");
        let names: Vec<_> = numbered(parent, "", "bin")
            .iter()
            .map(|bin| bin.strip_prefix(dir.path()).expect("inside").to_string_lossy().into_owned())
            .collect();
        assert_eq!(names, ["100/bin", "16/bin", "14/bin", "9/bin"]);
    }
}
