//! A policy as an agent file writes it.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::disposition::{Decorator, Disposition};
use crate::content::ToolResult;

/// A policy as an agent file writes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PolicyConfig {
    /// What calls get that no rule matches.
    #[serde(default = "run_sync")]
    pub default: Disposition,
    /// Rules; the first that matches decides.
    #[serde(default)]
    pub rules: Vec<RuleConfig>,
    /// Wrappers; all that match apply, the first outermost.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub wrappers: Vec<WrapperConfig>,
}

fn run_sync() -> Disposition {
    Disposition::RunSync
}

impl Default for PolicyConfig {
    fn default() -> Self {
        Self { default: run_sync(), rules: Vec::new(), wrappers: Vec::new() }
    }
}

/// A rule as an agent file writes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RuleConfig {
    /// Exact tool name, or a glob.
    pub tool: String,
    /// What matching calls get.
    pub disposition: Disposition,
    /// Whether the tool may run again for the same call.
    #[serde(default)]
    pub idempotent: bool,
    /// Whether the tool only reads. It may run again too, and may begin before it is stored that it does.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
    /// Seconds after which an open deferred call expires.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_seconds: Option<u64>,
    /// What an expired call ends with.
    #[serde(default, skip_serializing_if = "OnDeadline::is_fail")]
    pub on_deadline: OnDeadline,
}

/// What a deferred call ends with when its deadline passes.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum OnDeadline {
    /// A failure.
    #[default]
    Fail,
    /// This result.
    Answer(ToolResult),
}

impl RuleConfig {
    /// Whether the tool may run again for the same call.
    pub(super) fn may_repeat(&self) -> bool {
        self.idempotent || self.read_only
    }
}

impl OnDeadline {
    fn is_fail(&self) -> bool {
        *self == Self::Fail
    }

    /// The result, where there is one.
    pub(super) fn answer(&self) -> Option<&ToolResult> {
        match self {
            Self::Fail => None,
            Self::Answer(result) => Some(result),
        }
    }
}

/// A wrapper as an agent file writes it: decorators for all calls that match.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WrapperConfig {
    /// Which calls.
    #[serde(default, rename = "match")]
    pub matches: MatchConfig,
    /// What is wrapped around them, outermost first.
    pub decorators: Vec<Decorator>,
}

/// Which calls a wrapper is for: those that all of its conditions hold for.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct MatchConfig {
    /// Exact tool name, or a glob.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool: Option<String>,
    /// The toolbox that the name begins with: `bash` for `bash_*`, `mcp_github` for `mcp_github_*`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub toolbox: Option<String>,
    /// A predicate on the arguments.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub args: Option<Value>,
}
