//! An agent: which model, which prompt, which tools, and how its calls are handled.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    builtin::{self, Builtin, BuiltinToolbox, ExtraAgent, Helper},
    conduct::Conduct,
    model::{Flavor, ModelTarget},
    offer::Offer,
    policy::{Policy, PolicyConfig, PolicyError},
    tool::ToolSpec,
    waking::{self, WakeClass, Waking},
    webhook::{WebhookConfig, WebhookError},
};

/// An agent file's contents.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentConfig {
    /// The name by which sessions name the agent.
    pub slug: String,
    /// Which model key is used; empty for models that want none.
    #[serde(default)]
    pub api_key_id: String,
    /// The model API's dialect, in any case.
    pub flavor: String,
    /// Base URL of the model API.
    pub model_url: String,
    /// The model.
    pub model_name: String,
    /// What the agent is for, for people and other agents.
    #[serde(default)]
    pub announce: String,
    /// The system prompt, in parts.
    #[serde(default)]
    pub system_prompt: Vec<String>,
    /// A directory of executable tools, relative to the file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_directory: Option<String>,
    /// More executable tools.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bash_toolboxes: Vec<BashToolbox>,
    /// Tools that the engine itself carries out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub builtin_toolboxes: Vec<BuiltinToolbox>,
    /// Agents elsewhere that it may call.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub extra_agents: Vec<ExtraAgent>,
    /// How its sessions behave towards open calls and mail.
    #[serde(flatten)]
    pub conduct: Conduct,
    /// How calls are handled.
    #[serde(default)]
    pub tool_call_policy_config: PolicyConfig,
    /// How many calls of a session run at once.
    #[serde(default = "default_concurrency")]
    pub max_concurrency: usize,
    /// Seconds after which a call is ended; none by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub async_call_timeout_seconds: Option<u64>,
    /// Sampling temperature.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f64>,
    /// Upper bound of an answer's tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_output_tokens: Option<u64>,
    /// Merged into model requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extra_body: Option<Value>,
    /// Estimated tokens above which the oldest rounds are left out of requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context_tokens: Option<u64>,
    /// Whether tools get the whole session in `AGENT_SESSION_JSON`.
    #[serde(default)]
    pub session_json: bool,
    /// Classes of mail that start a run.
    #[serde(default = "waking::wake_on")]
    pub wake_on: Vec<WakeClass>,
    /// Whether mail of any class resumes a session that is paused.
    #[serde(default)]
    pub resume_on_any_mail: bool,
    /// Where the events of its sessions are sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub webhook: Option<WebhookConfig>,
    /// Fields that are not known, or not supported yet, by name.
    #[serde(flatten)]
    pub unknown: serde_json::Map<String, Value>,
}

fn default_concurrency() -> usize {
    4
}

/// Where executable tools are found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "tag", content = "contents")]
pub enum BashToolbox {
    /// Every executable file of a directory.
    FileSystemDirectory(DirectoryToolbox),
    /// One file.
    SingleTool(SingleToolbox),
}

/// Every executable file of a directory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct DirectoryToolbox {
    /// The directory, relative to the agent file.
    pub path: String,
    /// Globs of file names or tool slugs to offer; all when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub include: Option<Vec<String>>,
    /// Globs of file names or tool slugs to hide.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exclude: Vec<String>,
}

/// One executable file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct SingleToolbox {
    /// The file, relative to the agent file.
    pub path: String,
}

/// An agent made ready: its configuration checked, its tools at hand.
#[derive(Debug, Clone)]
pub struct Agent {
    /// The name.
    pub slug: String,
    /// Hash of what it was made from; sessions name it beside the slug.
    pub revision: String,
    /// Where the model is.
    pub target: ModelTarget,
    /// Which model key is used.
    pub api_key_id: String,
    /// Its prompt and its tools.
    pub offer: Arc<Offer>,
    /// How calls are handled.
    pub policy: Policy,
    /// How many calls of a session run at once; at least 1.
    pub max_concurrency: usize,
    /// Seconds after which a call is ended.
    pub call_timeout_seconds: Option<u64>,
    /// Estimated tokens above which the oldest rounds are left out of requests.
    pub context_tokens: Option<u64>,
    /// Whether tools get the whole session in `AGENT_SESSION_JSON`.
    pub session_json: bool,
    /// Which mail starts a run.
    pub waking: Waking,
    /// How its sessions behave towards open calls and mail.
    pub conduct: Conduct,
    /// The tools among [`Self::tools()`] that the engine itself carries out.
    pub builtins: Vec<Builtin>,
    /// The agents that it may call.
    pub helpers: Vec<Helper>,
}

impl Agent {
    /// The tools on offer.
    pub fn tools(&self) -> &[ToolSpec] {
        &self.offer.tools.value
    }

    /// Offers these tools from now on.
    pub fn offer_tools(&mut self, tools: Vec<ToolSpec>) {
        self.offer = Arc::new(self.offer.with_tools(tools));
    }

    /// What carries a tool out, if the engine does.
    pub fn builtin(&self, tool: &str) -> Option<&Builtin> {
        self.builtins.iter().find(|builtin| builtin.spec.name == tool)
    }
}

/// Why an agent can't be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AgentError {
    /// The file is no agent: the text says where and why.
    #[error("not an agent: {0}")]
    Malformed(String),
    /// The slug isn't a name.
    #[error("slug {0:?} must be 1 to 100 letters, digits, `-`, `_` or `.`")]
    BadSlug(String),
    /// No such model API.
    #[error("flavor {given:?} is unknown; known are {known}")]
    UnknownFlavor {
        /// What the file says.
        given: String,
        /// What it may say.
        known: String,
    },
    /// The model URL isn't one.
    #[error("modelUrl {0:?} must start with http:// or https://")]
    BadModelUrl(String),
    /// A number is out of range.
    #[error("{field} must be {range}")]
    OutOfRange {
        /// The field.
        field: &'static str,
        /// What it may be.
        range: &'static str,
    },
    /// A toolbox of the engine's can't be what the file says.
    #[error("builtinToolboxes[{index}]: {problem}")]
    Toolbox {
        /// Which, from 0.
        index: usize,
        /// What is wrong.
        problem: String,
    },
    /// The policy can't be used.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// The webhook can't be used.
    #[error("webhook: {0}")]
    Webhook(#[from] WebhookError),
}

impl AgentConfig {
    /// Reads an agent file: a bare object, or one inside
    /// `{"tag": "OpenAIAgentDescription", "contents": …}`. A field that is null is as good as absent.
    ///
    /// # Errors
    /// [`AgentError::Malformed`] for anything else.
    pub fn parse(text: &str) -> Result<Self, AgentError> {
        let malformed = |error: serde_json::Error| AgentError::Malformed(error.to_string());
        let value: Value = serde_json::from_str(text).map_err(malformed)?;
        let mut bare = match value {
            Value::Object(mut object) if object.contains_key("tag") => {
                let tag = object.get("tag").and_then(Value::as_str).unwrap_or_default().to_owned();
                if tag != "OpenAIAgentDescription" {
                    return Err(AgentError::Malformed(format!(
                        "tag {tag:?} is unknown; expected \"OpenAIAgentDescription\""
                    )));
                }
                object.remove("contents").unwrap_or(Value::Null)
            }
            other => other,
        };
        // Writers that have a value for "none" write it.
        if let Value::Object(fields) = &mut bare {
            fields.retain(|_, value| !value.is_null());
        }
        serde_json::from_value(bare).map_err(malformed)
    }

    /// Checks the configuration and joins it with the tools that were found for it.
    ///
    /// # Errors
    /// The first thing that is wrong; see [`AgentError`].
    pub fn prepare(&self, revision: String, tools: Vec<ToolSpec>) -> Result<Agent, AgentError> {
        let slug_ok = (1..=100).contains(&self.slug.len())
            && self.slug.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'));
        if !slug_ok {
            return Err(AgentError::BadSlug(self.slug.clone()));
        }
        let flavor = Flavor::parse(&self.flavor).ok_or_else(|| AgentError::UnknownFlavor {
            given: self.flavor.clone(),
            known: Flavor::ALL.map(Flavor::name).join(", "),
        })?;
        if !self.model_url.starts_with("http://") && !self.model_url.starts_with("https://") {
            return Err(AgentError::BadModelUrl(self.model_url.clone()));
        }
        if self.max_concurrency == 0 || self.max_concurrency > 256 {
            return Err(AgentError::OutOfRange { field: "maxConcurrency", range: "1 to 256" });
        }
        if self.async_call_timeout_seconds == Some(0) {
            return Err(AgentError::OutOfRange { field: "asyncCallTimeoutSeconds", range: "at least 1" });
        }
        if self.context_tokens == Some(0) {
            return Err(AgentError::OutOfRange { field: "contextTokens", range: "at least 1" });
        }
        if self.extra_body.as_ref().is_some_and(|body| !body.is_object()) {
            return Err(AgentError::OutOfRange { field: "extraBody", range: "an object" });
        }
        self.conduct.check()?;
        let builtins = builtin::of_toolboxes(&self.builtin_toolboxes)?;
        self.webhook.as_ref().map_or(Ok(()), WebhookConfig::check)?;
        Ok(Agent {
            slug: self.slug.clone(),
            revision,
            target: ModelTarget {
                flavor,
                base_url: self.model_url.trim_end_matches('/').to_owned(),
                model: self.model_name.clone(),
                temperature: self.temperature,
                max_output_tokens: self.max_output_tokens,
                extra_body: self.extra_body.clone(),
            },
            api_key_id: self.api_key_id.clone(),
            offer: Arc::new(Offer::new(self.system_prompt.clone(), tools)),
            policy: Policy::new(&self.tool_call_policy_config)?,
            max_concurrency: self.max_concurrency,
            call_timeout_seconds: self.async_call_timeout_seconds,
            context_tokens: self.context_tokens,
            session_json: self.session_json,
            conduct: self.conduct.clone(),
            builtins,
            helpers: Vec::new(),
            waking: Waking { wake_on: self.wake_on.clone(), resume_on_any_mail: self.resume_on_any_mail },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BARE: &str = r#"{"slug": "a", "flavor": "openaiV1", "modelUrl": "http://m/", "modelName": "x"}"#;

    #[test]
    fn bare_and_tagged_files_are_the_same_agent() {
        let tagged = format!(r#"{{"tag": "OpenAIAgentDescription", "contents": {BARE}}}"#);
        let bare = AgentConfig::parse(BARE).expect("bare");
        assert_eq!(bare, AgentConfig::parse(&tagged).expect("tagged"));
        let agent = bare.prepare("r1".into(), Vec::new()).expect("a valid agent");
        assert_eq!(agent.target.flavor, Flavor::OpenAIv1);
        assert_eq!(agent.target.base_url, "http://m");
        assert_eq!(agent.max_concurrency, 4);
    }

    #[test]
    fn a_field_that_is_null_is_absent() {
        let nulls =
            r#""extraAgents": null, "builtinToolboxes": null, "bashToolboxes": null, "executionMode": null"#;
        let text = BARE.replacen('{', &format!("{{{nulls},"), 1);
        assert_eq!(AgentConfig::parse(&text).expect("an agent"), AgentConfig::parse(BARE).expect("bare"));
    }

    #[test]
    fn unknown_fields_are_kept_by_name() {
        let text = BARE.replace(r#""slug""#, r#""sulg": 1, "slug""#);
        let config = AgentConfig::parse(&text).expect("still an agent");
        assert_eq!(config.unknown.keys().collect::<Vec<_>>(), ["sulg"]);
    }

    #[test]
    fn an_unknown_flavor_lists_the_known_ones() {
        let text = BARE.replace("openaiV1", "telepathy");
        let error = AgentConfig::parse(&text).expect("parses").prepare(String::new(), Vec::new());
        let message = error.expect_err("no such flavour").to_string();
        assert!(message.contains("telepathy") && message.contains("Anthropic"), "{message}");
    }
}
