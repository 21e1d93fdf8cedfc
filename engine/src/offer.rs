//! What an agent offers a model: its prompt and its tools. They are made ready when the agent is read, and when its
//! tools change: user turns name them by their blobs, and requests share them.

use std::sync::Arc;

use serde::Serialize;

use crate::{content::Blob, tool::ToolSpec};

/// A value, and the blob that user turns name it by.
#[derive(Debug, Clone, PartialEq)]
pub struct Part<T> {
    /// The value.
    pub value: Arc<T>,
    /// The same as JSON.
    pub blob: Blob,
}

impl<T: Serialize> Part<Vec<T>> {
    fn new(value: Vec<T>) -> Self {
        let text = serde_json::to_string(&value).unwrap_or_else(|_| "[]".to_owned());
        Self { value: Arc::new(value), blob: Blob::new(text) }
    }
}

/// The prompt and the tools of an agent.
#[derive(Debug, Clone, PartialEq)]
pub struct Offer {
    /// The system prompt, in parts.
    pub system: Part<Vec<String>>,
    /// The tools on offer.
    pub tools: Part<Vec<ToolSpec>>,
}

impl Offer {
    /// What an agent with this prompt and these tools offers.
    pub fn new(system: Vec<String>, tools: Vec<ToolSpec>) -> Self {
        Self { system: Part::new(system), tools: Part::new(tools) }
    }

    /// The same prompt with other tools.
    pub fn with_tools(&self, tools: Vec<ToolSpec>) -> Self {
        Self { system: self.system.clone(), tools: Part::new(tools) }
    }
}
