//! A tool as the model sees it, and how a call of one went.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::content::ToolResult;

/// What the model is told of a tool.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ToolSpec {
    /// The name that the model uses; [`crate::naming`] makes it.
    pub name: String,
    /// The name at its source, before it was made fit for a model.
    pub original: String,
    /// What the tool does.
    pub description: String,
    /// JSON Schema of the arguments object.
    pub parameters: Value,
}

/// How a finished call ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "outcome", content = "result", rename_all = "lowercase")]
pub enum Outcome {
    /// The tool answered.
    Completed(ToolResult),
    /// The tool, or what runs it, reports a failure; the text is for the model.
    Failed(String),
    /// Somebody ended the call before it had a result; the text is for the model.
    Cancelled(String),
}

impl Outcome {
    /// Whether the tool did what it was asked.
    pub fn succeeded(&self) -> bool {
        matches!(self, Self::Completed(_))
    }
}
