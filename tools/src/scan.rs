//! Which files are an agent's programs, and whether they are still the same.

use std::{
    collections::HashSet,
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use globset::{Glob, GlobSet, GlobSetBuilder};

/// Where programs are looked for.
#[derive(Debug, Clone)]
pub enum Source {
    /// Every executable file of a directory, not of those below it. Names that start with `.` or end
    /// in `~` are passed over, and so are JSON objects, which may be marked executable but are agents or
    /// data.
    Directory {
        /// The directory.
        path: PathBuf,
        /// Which of its programs are offered.
        filter: Filter,
        /// Whether agents are found in it too, so that it isn't odd if it has no programs.
        agents: bool,
    },
    /// One file.
    File(PathBuf),
}

/// Include and exclude globs, matched with file names and slugs. Excluding wins.
#[derive(Debug, Clone, Default)]
pub struct Filter {
    include: Option<(Vec<String>, GlobSet)>,
    exclude: GlobSet,
}

/// A filter pattern is no glob.
#[derive(Debug, thiserror::Error)]
#[error("{pattern:?} is not a valid glob: {reason}")]
pub struct FilterError {
    /// The pattern.
    pub pattern: String,
    /// What is wrong with it.
    pub reason: String,
}

impl Source {
    /// A directory with its filter; no `include` means everything.
    ///
    /// # Errors
    /// When a pattern is no glob.
    pub fn directory(
        path: PathBuf,
        include: Option<&[String]>,
        exclude: &[String],
    ) -> Result<Self, FilterError> {
        let include = include.map(|patterns| Ok((patterns.to_vec(), globs(patterns)?))).transpose()?;
        let filter = Filter { include, exclude: globs(exclude)? };
        Ok(Self::Directory { path, filter, agents: false })
    }
}

fn globs(patterns: &[String]) -> Result<GlobSet, FilterError> {
    let refuse = |pattern: &str, error: &globset::Error| FilterError {
        pattern: pattern.to_owned(),
        reason: error.kind().to_string(),
    };
    let mut set = GlobSetBuilder::new();
    for pattern in patterns {
        set.add(Glob::new(pattern).map_err(|error| refuse(pattern, &error))?);
    }
    set.build().map_err(|error| refuse(&patterns.join(", "), &error))
}

impl Filter {
    /// Whether a program may be asked to describe itself; its slug isn't known yet.
    fn admits_file(&self, file: &str) -> bool {
        !self.exclude.is_match(file)
    }

    /// Whether a program is offered.
    pub(crate) fn offers(&self, file: &str, slug: &str) -> bool {
        let included = |(_, set): &(_, GlobSet)| set.is_match(file) || set.is_match(slug);
        self.include.as_ref().is_none_or(included)
            && !self.exclude.is_match(file)
            && !self.exclude.is_match(slug)
    }

    /// Include patterns that match nothing of `names`, which are file names and slugs.
    fn idle_patterns<'a>(&'a self, names: &HashSet<&str>) -> impl Iterator<Item = &'a str> {
        let patterns = self.include.as_ref().map_or(&[][..], |(patterns, _)| patterns);
        let matches = |pattern: &str| {
            Glob::new(pattern)
                .map(|glob| glob.compile_matcher())
                .is_ok_and(|glob| names.iter().any(|name| glob.is_match(name)))
        };
        patterns
            .iter()
            .map(String::as_str)
            .filter(|pattern| !matches(pattern))
            .collect::<Vec<_>>()
            .into_iter()
    }
}

/// What tells one state of a file from another without reading it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fingerprint {
    file: (u64, u64),
    size: u64,
    mode: u32,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Fingerprint {
    pub(crate) fn of(path: &Path) -> io::Result<Self> {
        fs::metadata(path).map(|metadata| Self::from(&metadata))
    }
}

impl From<&fs::Metadata> for Fingerprint {
    fn from(metadata: &fs::Metadata) -> Self {
        Self {
            file: (metadata.dev(), metadata.ino()),
            size: metadata.size(),
            mode: metadata.mode(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

/// A file that may be a tool.
#[derive(Debug, Clone)]
pub(crate) struct Candidate {
    pub(crate) path: PathBuf,
    pub(crate) file_name: String,
    pub(crate) fingerprint: Fingerprint,
    /// Index of the source that it is of.
    pub(crate) source: usize,
}

/// Lists the candidates of all sources, in order, each file once. Reads directories: blocking.
pub(crate) fn scan(sources: &[Source]) -> (Vec<Candidate>, Vec<String>) {
    let mut candidates = Vec::new();
    let mut warnings = Vec::new();
    let mut seen = HashSet::new();
    for (index, source) in sources.iter().enumerate() {
        let paths = match source {
            Source::File(path) => vec![path.clone()],
            Source::Directory { path, filter, .. } => match list(path, filter) {
                Ok(paths) => paths,
                Err(error) => {
                    warnings.push(format!("tool directory {}: {error}", path.display()));
                    continue;
                }
            },
        };
        let before = candidates.len();
        for path in paths {
            match candidate(&path, index) {
                Ok(Some(_)) if matches!(source, Source::Directory { .. }) && is_json_object(&path) => {}
                Ok(Some(_)) if !seen.insert(fs::canonicalize(&path).unwrap_or_else(|_| path.clone())) => {
                    warnings
                        .push(format!("tool {} is named more than once; it is offered once", path.display()));
                }
                Ok(Some(candidate)) => candidates.push(candidate),
                Ok(None) if matches!(source, Source::File(_)) => {
                    warnings.push(format!("tool {} is not an executable file", path.display()));
                }
                Ok(None) => {}
                Err(error) => warnings.push(format!("tool {}: {error}", path.display())),
            }
        }
        if let Source::Directory { path, agents: false, .. } = source
            && candidates.len() == before
        {
            warnings.push(format!("tool directory {} has no executable files to offer", path.display()));
        }
    }
    (candidates, warnings)
}

/// Warnings about include patterns that match none of the described programs `(source, file, slug)`.
pub(crate) fn idle_filters(sources: &[Source], described: &[(usize, &str, &str)]) -> Vec<String> {
    let mut warnings = Vec::new();
    for (index, source) in sources.iter().enumerate() {
        let Source::Directory { path, filter, .. } = source else { continue };
        let own = described.iter().filter(|(source, ..)| *source == index);
        let names: HashSet<&str> = own.flat_map(|(_, file, slug)| [*file, *slug]).collect();
        for pattern in filter.idle_patterns(&names) {
            warnings.push(format!("tool directory {}: Include {pattern:?} matches no tool", path.display()));
        }
    }
    warnings
}

fn list(directory: &Path, filter: &Filter) -> io::Result<Vec<PathBuf>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(directory)? {
        let name = entry?.file_name();
        let text = name.to_string_lossy();
        if !text.starts_with('.') && !text.ends_with('~') && filter.admits_file(&text) {
            names.push(name);
        }
    }
    names.sort();
    Ok(names.into_iter().map(|name| directory.join(name)).collect())
}

/// Whether a file is named as JSON and starts as an object does, which no program does.
fn is_json_object(path: &Path) -> bool {
    if path.extension().is_none_or(|extension| extension != "json") {
        return false;
    }
    let mut head = [0; 64];
    let read = fs::File::open(path).and_then(|mut file| io::Read::read(&mut file, &mut head));
    read.is_ok_and(|length| head[..length].trim_ascii_start().starts_with(b"{"))
}

fn candidate(path: &Path, source: usize) -> io::Result<Option<Candidate>> {
    let metadata = fs::metadata(path)?;
    if !metadata.is_file() || metadata.mode() & 0o111 == 0 {
        return Ok(None);
    }
    let file_name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Ok(Some(Candidate {
        path: path.to_owned(),
        file_name,
        fingerprint: Fingerprint::from(&metadata),
        source,
    }))
}
