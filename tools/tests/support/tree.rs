//! Agent files and tools in a directory, and what is loaded from them.

use std::{fs, path::PathBuf};

use holdfast_tools::{LoadError, LoadedAgent, load_agents};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{description, directory, script_text, write};

pub(crate) fn agent(slug: &str, more: &Value) -> Value {
    let mut agent = json!({"slug": slug, "flavor": "OpenAIv1", "modelUrl": "http://m", "modelName": "x"});
    agent.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    agent
}

pub(crate) fn extra(helpers: &[(&str, &str)]) -> Value {
    let one = |(slug, path): &(&str, &str)| json!({"slug": slug, "path": path});
    json!({"extraAgents": helpers.iter().map(one).collect::<Vec<_>>()})
}

pub(crate) fn system(name: &str, capabilities: &[&str]) -> Value {
    json!({"tag": "SystemToolbox", "contents": {"Name": name, "Capabilities": capabilities}})
}

/// Files in a directory of their own.
pub(crate) struct Tree(pub(crate) TempDir);

impl Tree {
    pub(crate) fn new() -> Self {
        Self(directory())
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn put(&self, name: &str, content: impl ToString) -> &Self {
        let path = self.path(name);
        fs::create_dir_all(path.parent().expect("a parent")).expect("created");
        fs::write(path, content.to_string()).expect("written");
        self
    }

    pub(crate) fn tool(&self, name: &str, slug: &str) -> &Self {
        fs::create_dir_all(self.path(name).parent().expect("a parent")).expect("created");
        write(&self.path(name), &script_text(&description(slug), ""));
        self
    }

    pub(crate) async fn try_load(&self, names: &[&str]) -> Result<Vec<LoadedAgent>, LoadError> {
        let files: Vec<PathBuf> = names.iter().map(|name| self.path(name)).collect();
        load_agents(&files, &[]).await
    }

    pub(crate) async fn load(&self, names: &[&str]) -> Vec<LoadedAgent> {
        self.try_load(names).await.expect("loads")
    }

    pub(crate) async fn refused(&self, name: &str) -> LoadError {
        self.try_load(&[name]).await.expect_err("refused")
    }
}

pub(crate) fn slugs(loaded: &[LoadedAgent]) -> Vec<&str> {
    loaded.iter().map(|one| one.agent.slug.as_str()).collect()
}

pub(crate) fn helpers(one: &LoadedAgent) -> Vec<&str> {
    one.agent.helpers.iter().map(|helper| helper.slug.as_str()).collect()
}

pub(crate) fn tools(one: &LoadedAgent) -> Vec<&str> {
    one.agent.tools().iter().map(|tool| tool.name.as_str()).collect()
}

pub(crate) fn all_warnings(loaded: &[LoadedAgent]) -> Vec<&str> {
    loaded.iter().flat_map(|one| &one.warnings).map(String::as_str).collect()
}
