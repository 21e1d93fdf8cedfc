//! Agent files: an agent's configuration with the tools that stand beside it and the agents that it calls.

mod cycles;
mod error;
mod odd;
mod reach;
mod read;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use holdfast_engine::{
    agent::{Agent, AgentConfig, AgentError},
    builtin::{Builtin, Helper},
    naming,
    tool::ToolSpec,
};

use self::{
    error::read_error,
    reach::{Reached, reach},
    read::AgentFile,
};
use crate::{policy_file, toolbox::Toolbox};

pub use error::LoadError;
pub use reach::{MAX_LEVELS, MAX_REACHED};
pub use read::MAX_AGENT_FILE;

/// An agent, ready to be asked, with its tools.
#[derive(Debug, Clone)]
pub struct LoadedAgent {
    /// What the file says.
    pub config: AgentConfig,
    /// The agent with the tools that it had when it was loaded.
    pub agent: Agent,
    /// Its programs, which follow their files.
    pub toolbox: Arc<Toolbox>,
    /// The file, as an absolute path.
    pub path: PathBuf,
    /// What is odd, in words.
    pub warnings: Vec<String>,
    /// The configuration as it is recorded: one line of JSON with sorted keys.
    pub config_text: String,
}

/// Reads agent files, every `*.json` of directories (in the order of their names; those that start with `.`
/// are passed over), and the files of all agents that these reach: those of `extraAgents` and those in tool
/// directories. Describes the agents' tools. The agents asked for come first, each file once; the others
/// follow, nearest first. What is wrong with a tool, or unknown in a file, is a warning of its agent.
///
/// No program is started before all files are read and found to be usable.
///
/// # Errors
/// See [`LoadError`].
pub async fn load_agents(files: &[PathBuf], dirs: &[PathBuf]) -> Result<Vec<LoadedAgent>, LoadError> {
    let mut given = files.to_vec();
    for dir in dirs {
        given.extend(json_files(dir).await.map_err(read_error(dir))?);
    }
    // Boxed, as is the opening below: with all that programs need to describe themselves they are large.
    let reached = Box::pin(reach(&given)).await?;
    let known: Vec<Helper> = reached.iter().map(|one| helper(&one.file)).collect();
    let graph: Vec<&[usize]> = reached.iter().map(|one| one.helpers.as_slice()).collect();
    let mut circles = cycles::warnings(&graph, |agent| &known[agent].slug);
    let mut loaded = Vec::with_capacity(reached.len());
    for (index, one) in reached.into_iter().enumerate() {
        let helpers = one.helpers.iter().map(|helper| known[*helper].clone()).collect();
        let mut agent = Box::pin(open(one, helpers)).await?;
        agent.warnings.append(&mut circles[index]);
        loaded.push(agent);
    }
    Ok(loaded)
}

/// The agent of a file. Those that it reaches must load too, and are left out.
///
/// # Errors
/// See [`LoadError`].
pub async fn load_agent(path: &Path) -> Result<LoadedAgent, LoadError> {
    let mut loaded = load_agents(&[path.to_owned()], &[]).await?;
    Ok(loaded.swap_remove(0))
}

/// What a model is offered: first the programs, then what the engine carries out. Their names can't be the
/// same, since each kind has a prefix of its own.
pub fn offered(toolbox: &Toolbox, builtins: &[Builtin]) -> Vec<ToolSpec> {
    let mut tools = toolbox.specs();
    tools.extend(builtins.iter().map(|builtin| builtin.spec.clone()));
    tools
}

fn helper(file: &AgentFile) -> Helper {
    Helper { slug: file.config.slug.clone(), announce: file.config.announce.clone() }
}

/// Starts an agent's programs to learn what they are, and gives everything that it has its name.
async fn open(one: Reached, helpers: Vec<Helper>) -> Result<LoadedAgent, LoadError> {
    let Reached { file, mut warnings, .. } = one;
    let AgentFile { path, config, mut agent, root, config_text, sources } = file;
    warnings.extend(odd::fields(&config, &root));
    let (toolbox, of_tools) = Toolbox::open(sources).await;
    warnings.extend(of_tools);
    agent.builtins.extend(helpers.iter().map(Helper::tool));
    warnings.extend(name(&toolbox, &mut agent.builtins));
    agent.helpers = helpers;
    agent.offer_tools(offered(&toolbox, &agent.builtins));
    let dir = path.parent().unwrap_or(Path::new("/"));
    let rules = policy_file::idle(&config.tool_call_policy_config, agent.tools(), dir);
    warnings.extend(
        rules
            .map_err(|source| LoadError::Agent { path: path.clone(), source: AgentError::Policy(source) })?,
    );
    warnings.extend(odd::conduct(&agent));
    let toolbox = Arc::new(toolbox.beside(&agent.builtins));
    Ok(LoadedAgent { config, agent, toolbox, path, warnings, config_text })
}

/// Gives each tool of the engine's a name that no other tool of the agent has.
fn name(toolbox: &Toolbox, builtins: &mut [Builtin]) -> Vec<String> {
    let programs = toolbox.specs();
    let wanted = programs.iter().map(|spec| &spec.name);
    let wanted = wanted.chain(builtins.iter().map(|builtin| &builtin.spec.original));
    let names = naming::assign(wanted.map(String::as_str)).split_off(programs.len());
    let mut warnings = Vec::new();
    for (builtin, name) in builtins.iter_mut().zip(names) {
        if name != builtin.spec.name {
            let (wish, original) = (&builtin.spec.name, &builtin.spec.original);
            warnings.push(format!("tool {original:?}: the name {wish} is taken; it is called {name}"));
            builtin.spec.name = name;
        }
    }
    warnings
}

/// The `*.json` of a directory, in the order of their names.
async fn json_files(dir: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    let mut entries = tokio::fs::read_dir(dir).await?;
    while let Some(entry) = entries.next_entry().await? {
        let path = entry.path();
        let hidden = entry.file_name().to_string_lossy().starts_with('.');
        if !hidden && path.extension().is_some_and(|extension| extension == "json") {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}
