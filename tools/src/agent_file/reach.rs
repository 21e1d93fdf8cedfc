//! The files of the agents that agents call, and of those that these call.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use super::{
    error::{LoadError, read_error},
    json_files,
    read::{self, AgentFile},
};

/// How many agents may be reached from those that are asked for, which don't count.
pub const MAX_REACHED: usize = 256;

/// How many files deep agents may be reached; those that are asked for are the first level.
pub const MAX_LEVELS: usize = 32;

/// An agent's file with the agents that it calls.
pub(super) struct Reached {
    pub(super) file: AgentFile,
    /// The agents that it calls, each once: their places in the list of all.
    pub(super) helpers: Vec<usize>,
    pub(super) warnings: Vec<String>,
    /// How many files deep it is, from 1.
    level: usize,
}

/// An agent that another calls.
enum Wanted {
    /// Its place in the list of all.
    Found(usize),
    /// The place of the entry of `extraAgents` that names it without its file.
    Named(usize),
}

/// Reads all files that are reached from `given`, which come first. Each file is one agent, however often
/// and by whatever path it is reached; the way by which it is reached first, which is one of the shortest,
/// is its path.
pub(super) async fn reach(given: &[PathBuf]) -> Result<Vec<Reached>, LoadError> {
    let mut all = All::default();
    for path in given {
        let path = std::path::absolute(path).map_err(read_error(path))?;
        all.admit(&path, 1).await?;
    }
    all.given = all.agents.len();
    let mut wanted = Vec::new();
    while wanted.len() < all.agents.len() {
        let caller = wanted.len();
        let mut helpers = all.of_tool_directory(caller).await?;
        helpers.extend(all.of_extra_agents(caller).await?);
        wanted.push(helpers);
    }
    for (caller, wanted) in wanted.into_iter().enumerate() {
        for one in wanted {
            let helper = match one {
                Wanted::Found(helper) => helper,
                Wanted::Named(index) => all.named(caller, index)?,
            };
            let helpers = &mut all.agents[caller].helpers;
            if !helpers.contains(&helper) {
                helpers.push(helper);
            }
        }
    }
    Ok(all.agents)
}

#[derive(Default)]
struct All {
    agents: Vec<Reached>,
    /// How many of them were asked for.
    given: usize,
    /// By what a file is wherever links lead to it.
    places: HashMap<PathBuf, usize>,
    slugs: HashMap<String, usize>,
}

impl All {
    /// The place of the agent of a file, which is read if it is new.
    async fn admit(&mut self, path: &Path, level: usize) -> Result<usize, LoadError> {
        let real = tokio::fs::canonicalize(path).await.map_err(read_error(path))?;
        if let Some(known) = self.places.get(&real) {
            return Ok(*known);
        }
        let bytes = read::read(path).await?;
        self.add(path, real, &bytes, level)
    }

    fn add(&mut self, path: &Path, real: PathBuf, bytes: &[u8], level: usize) -> Result<usize, LoadError> {
        let place = self.agents.len();
        if level > MAX_LEVELS {
            return Err(LoadError::TooDeep { path: path.to_owned() });
        }
        if level > 1 && place - self.given >= MAX_REACHED {
            return Err(LoadError::TooMany { path: path.to_owned() });
        }
        let file = AgentFile::new(path, bytes)?;
        let slug = file.config.slug.clone();
        if let Some(first) = self.slugs.get(&slug) {
            let first = self.agents[*first].file.path.clone();
            return Err(LoadError::SameSlug { slug, first, second: file.path });
        }
        self.slugs.insert(slug, place);
        self.places.insert(real, place);
        self.agents.push(Reached { file, helpers: Vec::new(), warnings: Vec::new(), level });
        Ok(place)
    }

    /// The agents whose files stand in a caller's tool directory. Files that aren't meant to be agents are
    /// data of its programs; the caller's own file would be a call of itself that nobody asked for.
    async fn of_tool_directory(&mut self, caller: usize) -> Result<Vec<Wanted>, LoadError> {
        let Reached { file, level, .. } = &self.agents[caller];
        let (from, level) = (file.path.clone(), level + 1);
        let Some(directory) = file.config.tool_directory.as_deref().map(|path| file.beside(path)) else {
            return Ok(Vec::new());
        };
        // A directory that can't be read has no tools either, which is a warning.
        let paths = json_files(&directory).await.unwrap_or_default();
        let mut found = Vec::new();
        for path in paths {
            match self.meant(&path, level).await {
                Ok(Some(place)) if place == caller => {}
                Ok(Some(place)) => found.push(Wanted::Found(place)),
                Ok(None) => {}
                Err(error @ LoadError::TooLarge { .. }) => {
                    self.agents[caller].warnings.push(format!("{error}; it is passed over"));
                }
                Err(error) => return Err(of_helper(&from, error)),
            }
        }
        if !found.is_empty() {
            self.agents[caller].file.has_agents_in_tool_directory();
        }
        Ok(found)
    }

    /// The place of the agent that a file of a tool directory is meant to be, if it is.
    async fn meant(&mut self, path: &Path, level: usize) -> Result<Option<usize>, LoadError> {
        let real = tokio::fs::canonicalize(path).await.map_err(read_error(path))?;
        if let Some(known) = self.places.get(&real) {
            return Ok(Some(*known));
        }
        if !tokio::fs::metadata(path).await.map_err(read_error(path))?.is_file() {
            return Ok(None);
        }
        let bytes = read::read(path).await?;
        if !read::is_meant(&bytes) {
            return Ok(None);
        }
        self.add(path, real, &bytes, level).map(Some)
    }

    /// The agents that a caller's file names.
    async fn of_extra_agents(&mut self, caller: usize) -> Result<Vec<Wanted>, LoadError> {
        let Reached { file, level, .. } = &self.agents[caller];
        let (from, level) = (file.path.clone(), level + 1);
        let named: Vec<_> = file.config.extra_agents.clone();
        let mut found = Vec::with_capacity(named.len());
        let mut seen = HashMap::with_capacity(named.len());
        for (index, extra) in named.into_iter().enumerate() {
            if let Some(first) = seen.insert(extra.slug.clone(), index) {
                let slug = &extra.slug;
                self.agents[caller]
                    .warnings
                    .push(format!("extraAgents[{index}]: {slug:?} is named by extraAgents[{first}] already"));
            }
            let Some(target) = extra.path else {
                found.push(Wanted::Named(index));
                continue;
            };
            let target = self.agents[caller].file.beside(&target);
            let place = self.admit(&target, level).await.map_err(|error| of_helper(&from, error))?;
            let slug_of_target = &self.agents[place].file.config.slug;
            if *slug_of_target != extra.slug {
                let found = slug_of_target.clone();
                return Err(LoadError::OtherSlug { path: from, index, slug: extra.slug, target, found });
            }
            found.push(Wanted::Found(place));
        }
        Ok(found)
    }

    /// The agent that an entry names without its file.
    fn named(&self, caller: usize, index: usize) -> Result<usize, LoadError> {
        let file = &self.agents[caller].file;
        let slug = &file.config.extra_agents[index].slug;
        self.slugs.get(slug).copied().ok_or_else(|| {
            let mut known: Vec<&str> = self.slugs.keys().map(String::as_str).collect();
            known.sort_unstable();
            let (path, slug) = (file.path.clone(), slug.clone());
            LoadError::UnknownHelper { path, index, slug, known: known.join(", ") }
        })
    }
}

fn of_helper(from: &Path, error: LoadError) -> LoadError {
    LoadError::Helper { from: from.to_owned(), source: Box::new(error) }
}
