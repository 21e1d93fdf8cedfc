//! Why agents don't load.

use std::{
    io,
    path::{Path, PathBuf},
};

use holdfast_engine::agent::AgentError;

use super::{MAX_AGENT_FILE, MAX_LEVELS, MAX_REACHED};
use crate::scan::FilterError;

/// Why an agent file can't be used.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A file or directory can't be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// The file or directory.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The file is larger than [`MAX_AGENT_FILE`].
    #[error("{}: {size} bytes are too many for an agent file; at most {MAX_AGENT_FILE} are read", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its size in bytes.
        size: u64,
    },
    /// The file is no usable agent.
    #[error("{}: {source}", path.display())]
    Agent {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: AgentError,
    },
    /// The file asks for something that isn't carried out yet and that the agent can't do without.
    #[error("{}: {field} is not supported yet; remove it or leave it empty", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The field, with its place.
        field: String,
    },
    /// A toolbox's filter is no glob.
    #[error("{}: bashToolboxes[{index}]: {source}", path.display())]
    Filter {
        /// The file.
        path: PathBuf,
        /// Which toolbox, from 0.
        index: usize,
        /// What is wrong.
        source: FilterError,
    },
    /// Two files describe agents of the same slug.
    #[error("{} and {} both describe the agent {slug:?}", first.display(), second.display())]
    SameSlug {
        /// The slug.
        slug: String,
        /// The file that came first.
        first: PathBuf,
        /// The other.
        second: PathBuf,
    },
    /// The file of an agent that another calls can't be used.
    #[error("{}: helper: {source}", from.display())]
    Helper {
        /// The file of the agent that calls it.
        from: PathBuf,
        /// What is wrong.
        source: Box<LoadError>,
    },
    /// A file describes another agent than the one that it is named for.
    #[error("{}: extraAgents[{index}]: {} describes the agent {found:?}, not {slug:?}", path.display(), target.display())]
    OtherSlug {
        /// The file that names it.
        path: PathBuf,
        /// Which entry, from 0.
        index: usize,
        /// What the entry says.
        slug: String,
        /// The file that is named.
        target: PathBuf,
        /// What that says.
        found: String,
    },
    /// An agent that is named without its file isn't loaded.
    #[error("{}: extraAgents[{index}]: no path is given, and there is no agent {slug:?} among: {known}", path.display())]
    UnknownHelper {
        /// The file that names it.
        path: PathBuf,
        /// Which entry, from 0.
        index: usize,
        /// What the entry says.
        slug: String,
        /// The slugs of all that are loaded.
        known: String,
    },
    /// More than [`MAX_REACHED`] agents are reached.
    #[error("{}: at most {MAX_REACHED} agents may be reached from those that are asked for", path.display())]
    TooMany {
        /// The file that is one too many.
        path: PathBuf,
    },
    /// A file is more than [`MAX_LEVELS`] files deep.
    #[error("{}: at most {MAX_LEVELS} levels of agent files may be reached", path.display())]
    TooDeep {
        /// The file that is too deep.
        path: PathBuf,
    },
}

pub(super) fn read_error(path: &Path) -> impl FnOnce(io::Error) -> LoadError {
    let path = path.to_owned();
    move |source| LoadError::Read { path, source }
}
