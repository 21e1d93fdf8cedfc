//! Agent files: an agent's configuration with the tools that stand beside it.

use std::{
    collections::HashMap,
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use holdfast_engine::{
    agent::{Agent, AgentConfig, AgentError, BashToolbox},
    policy::{Policy, PolicyConfig, PolicyError},
    tool::ToolSpec,
};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::{
    scan::{FilterError, Source},
    toolbox::Toolbox,
};

/// The largest agent file, in bytes.
pub const MAX_AGENT_FILE: u64 = 4 * 1024 * 1024;

/// Fields without which an agent isn't the one that its file describes, and which aren't carried out yet.
const REFUSED: [&str; 4] = ["builtinToolboxes", "extraAgents", "mcpServers", "parameters"];

/// A field of a toolbox that binds arguments, which isn't carried out yet: the model would be shown them.
const BINDINGS: &str = "Bindings";

/// A field that only changes how long calls take, and that isn't carried out yet.
const NOT_YET: &str = "asyncYieldStrategy";

/// An agent, ready to be asked, with its tools.
#[derive(Debug, Clone)]
pub struct LoadedAgent {
    /// What the file says.
    pub config: AgentConfig,
    /// The agent with the tools that it had when it was loaded.
    pub agent: Agent,
    /// Its tools, which follow their files.
    pub toolbox: Arc<Toolbox>,
    /// The file, as an absolute path.
    pub path: PathBuf,
    /// What is odd, in words.
    pub warnings: Vec<String>,
    /// The configuration as it is recorded: one line of JSON with sorted keys.
    pub config_text: String,
}

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
    /// Two files of a directory describe agents of the same slug.
    #[error("{} and {} both describe the agent {slug:?}", first.display(), second.display())]
    SameSlug {
        /// The slug.
        slug: String,
        /// The file that came first.
        first: PathBuf,
        /// The other.
        second: PathBuf,
    },
}

/// Reads an agent file and describes its tools. What is wrong with a tool, or unknown in the file, is
/// a warning of the result.
///
/// # Errors
/// See [`LoadError`].
pub async fn load_agent(path: &Path) -> Result<LoadedAgent, LoadError> {
    let path = std::path::absolute(path).map_err(read_error(path))?;
    let bytes = read(&path).await?;
    let refuse = |source| LoadError::Agent { path: path.clone(), source };
    let text = std::str::from_utf8(&bytes)
        .map_err(|error| refuse(AgentError::Malformed(format!("it is not UTF-8: {error}"))))?;
    let config = AgentConfig::parse(text).map_err(refuse)?;
    // Checked before any program is started.
    let mut agent = config.prepare(revision(&bytes), Vec::new()).map_err(refuse)?;
    let root = contents(text);
    if let Some(field) = unsupported(&root) {
        return Err(LoadError::Unsupported { path, field });
    }
    let mut warnings = unknown_fields(&config, &root);
    let (toolbox, of_tools) = Toolbox::open(sources(&config, &path)?).await;
    warnings.extend(of_tools);
    agent.tools = toolbox.specs();
    let idle = idle_rules(&config, &agent.tools).map_err(|source| refuse(AgentError::Policy(source)))?;
    warnings.extend(idle);
    let config_text = canonical(&config).map_err(|error| refuse(AgentError::Malformed(error.to_string())))?;
    Ok(LoadedAgent { config, agent, toolbox: Arc::new(toolbox), path, warnings, config_text })
}

/// Reads every `*.json` of a directory as an agent file, in the order of their names. Names that
/// start with `.` are passed over.
///
/// # Errors
/// The first file that can't be used, or two agents of the same slug.
pub async fn load_dir(dir: &Path) -> Result<Vec<LoadedAgent>, LoadError> {
    let mut paths = Vec::new();
    let mut entries = tokio::fs::read_dir(dir).await.map_err(read_error(dir))?;
    while let Some(entry) = entries.next_entry().await.map_err(read_error(dir))? {
        let path = entry.path();
        let hidden = entry.file_name().to_string_lossy().starts_with('.');
        if !hidden && path.extension().is_some_and(|extension| extension == "json") {
            paths.push(path);
        }
    }
    paths.sort();
    let mut agents = Vec::with_capacity(paths.len());
    let mut slugs: HashMap<String, PathBuf> = HashMap::new();
    for path in paths {
        let loaded = load_agent(&path).await?;
        let slug = loaded.config.slug.clone();
        if let Some(first) = slugs.insert(slug.clone(), loaded.path.clone()) {
            return Err(LoadError::SameSlug { slug, first, second: loaded.path });
        }
        agents.push(loaded);
    }
    Ok(agents)
}

fn read_error(path: &Path) -> impl FnOnce(io::Error) -> LoadError {
    let path = path.to_owned();
    move |source| LoadError::Read { path, source }
}

async fn read(path: &Path) -> Result<Vec<u8>, LoadError> {
    let size = tokio::fs::metadata(path).await.map_err(read_error(path))?.len();
    if size > MAX_AGENT_FILE {
        return Err(LoadError::TooLarge { path: path.to_owned(), size });
    }
    tokio::fs::read(path).await.map_err(read_error(path))
}

/// The first 16 hex digits of the content's SHA-256.
fn revision(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

/// Paths in the file are relative to it.
fn sources(config: &AgentConfig, file: &Path) -> Result<Vec<Source>, LoadError> {
    let beside = |path: &str| file.parent().unwrap_or(Path::new("/")).join(path);
    let mut sources = Vec::new();
    if let Some(directory) = &config.tool_directory {
        sources.push(Source::Directory { path: beside(directory), filter: Default::default() });
    }
    for (index, toolbox) in config.bash_toolboxes.iter().enumerate() {
        sources.push(match toolbox {
            BashToolbox::SingleTool(single) => Source::File(beside(&single.path)),
            BashToolbox::FileSystemDirectory(directory) => {
                Source::directory(beside(&directory.path), directory.include.as_deref(), &directory.exclude)
                    .map_err(|source| LoadError::Filter { path: file.to_owned(), index, source })?
            }
        });
    }
    Ok(sources)
}

/// The agent's object as the file has it, without its tag.
fn contents(text: &str) -> Value {
    let mut root: Value = serde_json::from_str(text).unwrap_or_default();
    if root.get("tag").is_some() { root["contents"].take() } else { root }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(values) => values.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    }
}

/// The first field that isn't empty and that the agent can't do without.
fn unsupported(root: &Value) -> Option<String> {
    if let Some(field) = REFUSED.iter().find(|field| !is_empty(&root[**field])) {
        return Some((*field).to_owned());
    }
    let toolboxes = root["bashToolboxes"].as_array().into_iter().flatten();
    let bound = toolboxes.map(|toolbox| !is_empty(&toolbox["contents"][BINDINGS]));
    bound.enumerate().find_map(|(index, bound)| bound.then(|| format!("bashToolboxes[{index}].{BINDINGS}")))
}

/// A warning for each rule that no tool of the agent's falls under.
fn idle_rules(config: &AgentConfig, tools: &[ToolSpec]) -> Result<Vec<String>, PolicyError> {
    let mut warnings = Vec::new();
    for (index, rule) in config.tool_call_policy_config.rules.iter().enumerate() {
        let alone = Policy::new(&PolicyConfig { rules: vec![rule.clone()], ..PolicyConfig::default() })?;
        if !tools.iter().any(|tool| alone.apply(&tool.name).decided_by != "default") {
            let tool = &rule.tool;
            warnings
                .push(format!("toolCallPolicyConfig.rules[{index}]: {tool:?} matches no tool of the agent"));
        }
    }
    Ok(warnings)
}

/// A warning for each field that has no effect, at the top and where the file has objects of its own.
fn unknown_fields(config: &AgentConfig, root: &Value) -> Vec<String> {
    let mut warnings = Vec::new();
    for (name, value) in &config.unknown {
        if name == NOT_YET && !is_empty(value) {
            warnings.push(format!("field {name:?} is not supported yet and has no effect"));
        } else if name != NOT_YET && !REFUSED.contains(&name.as_str()) {
            warnings.push(format!("field {name:?} is unknown and has no effect"));
        }
    }
    let mut look = |place: String, value: &Value, known: &[&str]| {
        let fields = value.as_object().into_iter().flat_map(Map::keys);
        let unknown = fields.filter(|field| !known.contains(&field.as_str()));
        warnings
            .extend(unknown.map(|field| format!("field {field:?} of {place} is unknown and has no effect")));
    };
    for (index, toolbox) in root["bashToolboxes"].as_array().into_iter().flatten().enumerate() {
        let known: &[&str] = if toolbox["tag"] == "SingleTool" {
            &["Path", BINDINGS]
        } else {
            &["Path", "Include", "Exclude", BINDINGS]
        };
        look(format!("bashToolboxes[{index}]"), &toolbox["contents"], known);
    }
    let policy = &root["toolCallPolicyConfig"];
    look("toolCallPolicyConfig".to_owned(), policy, &["default", "rules"]);
    disposition("toolCallPolicyConfig.default".to_owned(), &policy["default"], &mut look);
    for (index, rule) in policy["rules"].as_array().into_iter().flatten().enumerate() {
        let known = ["tool", "disposition", "idempotent", "deadlineSeconds"];
        let place = format!("toolCallPolicyConfig.rules[{index}]");
        disposition(format!("{place}.disposition"), &rule["disposition"], &mut look);
        look(place, rule, &known);
    }
    warnings
}

/// Looks at a disposition and at what it decorates.
fn disposition(place: String, value: &Value, look: &mut impl FnMut(String, &Value, &[&str])) {
    let known: &[&str] = match value["tag"].as_str() {
        Some("runAsync") => &["tag", "attachSeconds"],
        Some("runIsolated") => &["tag", "spec"],
        Some("defer") => &["tag", "reason"],
        Some("decorate") => &["tag", "decorators", "inner"],
        _ => &["tag"],
    };
    for (index, decorator) in value["decorators"].as_array().into_iter().flatten().enumerate() {
        look(format!("{place}.decorators[{index}]"), decorator, &["tag", "contents"]);
    }
    if value["inner"].is_object() {
        disposition(format!("{place}.inner"), &value["inner"], look);
    }
    look(place, value, known);
}

/// JSON on one line with sorted keys, whatever order the JSON library keeps.
fn canonical(config: &AgentConfig) -> serde_json::Result<String> {
    fn sorted(value: Value) -> Value {
        match value {
            Value::Object(object) => {
                let mut entries: Vec<_> =
                    object.into_iter().map(|(key, value)| (key, sorted(value))).collect();
                entries.sort_by(|(a, _), (b, _)| a.cmp(b));
                Value::Object(entries.into_iter().collect())
            }
            Value::Array(values) => Value::Array(values.into_iter().map(sorted).collect()),
            other => other,
        }
    }
    serde_json::to_string(&sorted(serde_json::to_value(config)?))
}
