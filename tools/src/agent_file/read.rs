//! One agent file: read and checked, before any program is started.

use std::path::{Path, PathBuf};

use holdfast_engine::{
    agent::{Agent, AgentConfig, AgentError, BashToolbox},
    builtin::{BuiltinToolbox, Capability},
};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use super::error::{LoadError, read_error};
use crate::scan::{Filter, Source};

/// The largest agent file, in bytes.
pub const MAX_AGENT_FILE: u64 = 4 * 1024 * 1024;

/// Fields without which an agent isn't the one that its file describes, and which aren't carried out yet.
pub(super) const REFUSED: [&str; 2] = ["mcpServers", "parameters"];

/// As much, of an entry of `extraAgents`.
pub(super) const REFUSED_OF_HELPERS: [&str; 3] = ["with", "narrowable", "bindings"];

/// A field of a toolbox that binds arguments, which isn't carried out yet: the model would be shown them.
pub(super) const BINDINGS: &str = "Bindings";

/// The tag of agent files that have one.
const TAG: &str = "OpenAIAgentDescription";

/// The only kind of toolbox of the engine's.
const SYSTEM: &str = "SystemToolbox";

/// Fields by which a file without a tag is known to be meant as an agent: two of them do.
const MARKS: [&str; 4] = ["slug", "flavor", "modelUrl", "modelName"];

/// An agent file that can be used.
pub(super) struct AgentFile {
    /// Where it is, as an absolute path.
    pub(super) path: PathBuf,
    pub(super) config: AgentConfig,
    /// The agent with its system toolboxes, without programs and helpers.
    pub(super) agent: Agent,
    /// The agent's object as the file has it, without its tag.
    pub(super) root: Value,
    pub(super) config_text: String,
    /// Where its programs are.
    pub(super) sources: Vec<Source>,
}

impl AgentFile {
    /// Checks the content of the file at `path`, which is absolute.
    pub(super) fn new(path: &Path, bytes: &[u8]) -> Result<Self, LoadError> {
        let refuse = |source| LoadError::Agent { path: path.to_owned(), source };
        let text = std::str::from_utf8(bytes)
            .map_err(|error| refuse(AgentError::Malformed(format!("it is not UTF-8: {error}"))))?;
        let root = contents(text);
        toolboxes(&root).map_err(refuse)?;
        let config = AgentConfig::parse(text).map_err(refuse)?;
        let agent = config.prepare(revision(bytes), Vec::new()).map_err(refuse)?;
        if let Some(field) = unsupported(&root) {
            return Err(LoadError::Unsupported { path: path.to_owned(), field });
        }
        let sources = sources(&config, path)?;
        let config_text =
            canonical(&config).map_err(|error| refuse(AgentError::Malformed(error.to_string())))?;
        Ok(Self { path: path.to_owned(), config, agent, root, config_text, sources })
    }

    /// What a path in the file means: it is relative to the file.
    pub(super) fn beside(&self, path: &str) -> PathBuf {
        beside(&self.path, path)
    }

    /// Notes that agents stand among the programs of the tool directory.
    pub(super) fn has_agents_in_tool_directory(&mut self) {
        // The tool directory is the first source, if there is one.
        if let Some(Source::Directory { agents, .. }) = self.sources.first_mut() {
            *agents = true;
        }
    }
}

/// Reads a file, but not a large one.
pub(super) async fn read(path: &Path) -> Result<Vec<u8>, LoadError> {
    let size = tokio::fs::metadata(path).await.map_err(read_error(path))?.len();
    if size > MAX_AGENT_FILE {
        return Err(LoadError::TooLarge { path: path.to_owned(), size });
    }
    tokio::fs::read(path).await.map_err(read_error(path))
}

/// Whether a file is meant to be an agent, rather than data of a program: it has the tag, or two of the
/// fields that every agent has. A file that is no JSON is judged by its text, so that a broken agent isn't
/// taken for data.
pub(super) fn is_meant(bytes: &[u8]) -> bool {
    let enough = |has: &dyn Fn(&str) -> bool| MARKS.iter().filter(|mark| has(mark)).count() >= 2;
    let marked = |object: &Map<String, Value>| enough(&|mark| object.contains_key(mark));
    match serde_json::from_slice::<Value>(bytes) {
        Ok(Value::Object(object)) => {
            let inner = object.get("contents").and_then(Value::as_object);
            object.get("tag").is_some_and(|tag| tag == TAG) || marked(&object) || inner.is_some_and(marked)
        }
        Ok(_) => false,
        Err(_) => {
            let text = String::from_utf8_lossy(bytes);
            let quoted = |word: &str| text.contains(&format!("\"{word}\""));
            quoted(TAG) || enough(&quoted)
        }
    }
}

/// The first 16 hex digits of the content's SHA-256.
fn revision(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

fn beside(file: &Path, path: &str) -> PathBuf {
    file.parent().unwrap_or(Path::new("/")).join(path)
}

fn sources(config: &AgentConfig, file: &Path) -> Result<Vec<Source>, LoadError> {
    let mut sources = Vec::new();
    if let Some(directory) = &config.tool_directory {
        let (path, filter) = (beside(file, directory), Filter::default());
        sources.push(Source::Directory { path, filter, agents: false });
    }
    for (index, toolbox) in config.bash_toolboxes.iter().enumerate() {
        sources.push(match toolbox {
            BashToolbox::SingleTool(single) => Source::File(beside(file, &single.path)),
            BashToolbox::FileSystemDirectory(directory) => {
                let path = beside(file, &directory.path);
                Source::directory(path, directory.include.as_deref(), &directory.exclude)
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

pub(super) fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(values) => values.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    }
}

/// Objects of a list field, with their places.
pub(super) fn entries<'a>(root: &'a Value, field: &'static str) -> impl Iterator<Item = (usize, &'a Value)> {
    root[field].as_array().into_iter().flatten().enumerate()
}

/// Refuses kinds of toolboxes and capabilities that aren't there, with their places: the reader of the whole
/// file wouldn't name them.
fn toolboxes(root: &Value) -> Result<(), AgentError> {
    for (index, toolbox) in entries(root, "builtinToolboxes") {
        let refuse = |problem| Err(AgentError::Toolbox { index, problem });
        match toolbox["tag"].as_str() {
            Some(SYSTEM) => {}
            Some(tag) => return refuse(format!("there is no {tag:?}; known is {SYSTEM}")),
            None => return refuse(format!("it must have a tag; known is {SYSTEM}")),
        }
        let words = toolbox["contents"]["Capabilities"].as_array().into_iter().flatten();
        let unknown = |word: &&str| !Capability::ALL.iter().any(|capability| capability.word() == *word);
        if let Some(word) = words.filter_map(Value::as_str).find(unknown) {
            let known: Vec<&str> = Capability::ALL.iter().map(|capability| capability.word()).collect();
            return refuse(format!("there is no capability {word:?}; known are {}", known.join(", ")));
        }
        if let Err(error) = serde_json::from_value::<BuiltinToolbox>(toolbox.clone()) {
            return refuse(error.to_string());
        }
    }
    Ok(())
}

/// The first field that isn't empty and that the agent can't do without.
fn unsupported(root: &Value) -> Option<String> {
    if let Some(field) = REFUSED.iter().find(|field| !is_empty(&root[**field])) {
        return Some((*field).to_owned());
    }
    for (index, helper) in entries(root, "extraAgents") {
        if let Some(field) = REFUSED_OF_HELPERS.iter().find(|field| !is_empty(&helper[**field])) {
            return Some(format!("extraAgents[{index}].{field}"));
        }
    }
    let bound = |(_, toolbox): &(usize, &Value)| !is_empty(&toolbox["contents"][BINDINGS]);
    let (index, _) = entries(root, "bashToolboxes").find(bound)?;
    Some(format!("bashToolboxes[{index}].{BINDINGS}"))
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
