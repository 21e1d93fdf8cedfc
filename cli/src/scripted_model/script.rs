//! The script: what to answer when.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use holdfast_engine::model::Flavor;
use serde::{Deserialize, Deserializer, de::Error as _};
use serde_json::{Map, Value};

use super::template;

/// A script, read and checked.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Script {
    pub(super) rules: Vec<Rule>,
    /// A file that gets a JSON line for each request.
    #[serde(default)]
    pub(super) record: Option<PathBuf>,
    /// Requests that break a provider's rules are answered all the same.
    #[serde(default)]
    pub(super) lenient: bool,
    /// Whose rules requests for chat completions are held to.
    #[serde(default = "any_chat", deserialize_with = "chat_flavor")]
    pub(super) flavor: Flavor,
}

fn any_chat() -> Flavor {
    Flavor::OpenAI
}

fn chat_flavor<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Flavor, D::Error> {
    let name = String::deserialize(deserializer)?;
    // What speaks Anthropic's API is known by its path.
    let chat = || Flavor::ALL.into_iter().filter(|flavor| *flavor != Flavor::Anthropic);
    let names = || chat().map(Flavor::name).collect::<Vec<_>>().join(", ");
    let found = Flavor::parse(&name).filter(|flavor| *flavor != Flavor::Anthropic);
    found.ok_or_else(|| D::Error::custom(format!("flavor {name:?} is none of {}", names())))
}

/// Why a script can't be used.
#[derive(Debug, thiserror::Error)]
pub enum ScriptError {
    /// The file can't be read.
    #[error("can't read the script {}: {reason}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system says.
        reason: io::Error,
    },
    /// It isn't a script.
    #[error("the script is not valid: {0}")]
    Invalid(String),
}

impl Script {
    /// Reads a script from a file.
    ///
    /// # Errors
    /// When the file can't be read or is no script; unknown fields are errors too.
    pub fn load(path: &Path) -> Result<Self, ScriptError> {
        let text = fs::read_to_string(path)
            .map_err(|reason| ScriptError::Unreadable { path: path.to_owned(), reason })?;
        Self::parse(&text)
    }

    /// Reads a script from its JSON text.
    ///
    /// # Errors
    /// When the text is no script; unknown fields are errors too.
    pub fn parse(text: &str) -> Result<Self, ScriptError> {
        let script: Self =
            serde_json::from_str(text).map_err(|error| ScriptError::Invalid(error.to_string()))?;
        for (number, rule) in (1..).zip(&script.rules) {
            let invalid = |what: &str| Err(ScriptError::Invalid(format!("rule {number}: {what}")));
            if rule.reply.status.is_some_and(|status| !(200..=599).contains(&status)) {
                return invalid("status must be from 200 to 599");
            }
            if rule.when.not.as_deref().is_some_and(When::counts) {
                return invalid("times can't stand within not");
            }
            if rule.reply.hold.as_deref().is_some_and(|name| !is_plain(name)) {
                return invalid("hold must be letters, digits, _ and -");
            }
            if let Some(unknown) = rule.reply.unknown_template() {
                return invalid(&format!("there is no template {unknown}"));
            }
            let scalar = |call: &Call| !matches!(call.arguments, Value::Object(_) | Value::String(_));
            if rule.reply.tool_calls.iter().any(scalar) {
                return invalid("arguments must be an object or text");
            }
        }
        Ok(script)
    }
}

/// Whether a name can stand in a path as it is.
fn is_plain(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    !name.is_empty() && name.bytes().all(plain)
}

/// An answer and when it is given.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Rule {
    #[serde(default)]
    pub(super) when: When,
    pub(super) reply: Reply,
}

/// Conditions, all of which must hold.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct When {
    /// A glob of the model's name.
    pub(super) model: Option<String>,
    /// How many assistant messages the conversation has.
    pub(super) turn: Option<usize>,
    /// The last message.
    pub(super) last: Option<Last>,
    /// For each tool a part of one of its results.
    pub(super) tool_results: BTreeMap<String, String>,
    /// Tools that must be on offer.
    pub(super) has_tools: Vec<String>,
    /// How often the rule may be used.
    pub(super) times: Option<u64>,
    /// A part of the system prompt.
    pub(super) system: Option<String>,
    /// A part of one of the messages.
    pub(super) contains: Option<String>,
    /// Conditions that must not all hold.
    pub(super) not: Option<Box<When>>,
}

impl When {
    /// Whether it looks at how often the rule was used.
    fn counts(&self) -> bool {
        self.times.is_some() || self.not.as_deref().is_some_and(Self::counts)
    }
}

/// What the last message must be.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub(super) enum Last {
    /// It contains this.
    Contains(String),
    /// It fits all that is given.
    Fits(Fits),
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Fits {
    pub(super) role: Option<String>,
    pub(super) contains: Option<String>,
    pub(super) equals: Option<String>,
    pub(super) glob: Option<String>,
}

/// What is answered.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Reply {
    pub(super) text: Option<String>,
    pub(super) thinking: Option<String>,
    pub(super) tool_calls: Vec<Call>,
    pub(super) usage: Option<Tokens>,
    /// A pause before the answer, in milliseconds.
    pub(super) delay_ms: u64,
    /// From 300 on an error answer.
    pub(super) status: Option<u16>,
    /// `Retry-After` of an error answer, in seconds.
    pub(super) retry_after: Option<u64>,
    /// The message of an error answer; without a status, of an error object in a successful one.
    pub(super) error: Option<String>,
    /// The connection breaks after so many events of a stream, or in the middle of a whole answer.
    pub(super) break_stream_after: Option<usize>,
    /// No answer ever comes; with `break_stream_after`, no more of it.
    pub(super) hang: bool,
    /// What must be released before the answer comes.
    pub(super) hold: Option<String>,
    /// Merged into the message.
    pub(super) raw: Map<String, Value>,
}

impl Reply {
    /// A template of its texts that nobody knows.
    fn unknown_template(&self) -> Option<String> {
        let texts = self.text.iter().chain(&self.thinking).chain(&self.error);
        let arguments = self.tool_calls.iter().map(|call| &call.arguments);
        texts
            .map(|text| template::unknown(text))
            .chain(arguments.map(template::unknown_within))
            .find_map(|found| found)
    }
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Call {
    pub(super) name: String,
    #[serde(default = "no_arguments")]
    pub(super) arguments: Value,
    #[serde(default)]
    pub(super) id: Option<String>,
}

fn no_arguments() -> Value {
    Value::Object(Map::new())
}

#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Tokens {
    #[serde(alias = "prompt_tokens")]
    pub(super) input_tokens: u64,
    #[serde(alias = "completion_tokens")]
    pub(super) output_tokens: u64,
    pub(super) cached_tokens: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mistakes_are_told() {
        for (text, expected) in [
            ("{}", "rules"),
            (r#"{"rules":[{"reply":{"txt":"x"}}]}"#, "txt"),
            (r#"{"rules":[{"reply":{"status":99}}]}"#, "rule 1: status"),
            (
                r#"{"rules":[{"reply":{}},{"reply":{"tool_calls":[{"name":"a","arguments":1}]}}]}"#,
                "rule 2: arguments",
            ),
            (r#"{"rules":[{"when":{"turns":1},"reply":{}}]}"#, "turns"),
            (r#"{"rules":[{"when":{"not":{"turns":1}},"reply":{}}]}"#, "turns"),
            (r#"{"rules":[{"when":{"not":{"not":{"times":1}}},"reply":{}}]}"#, "rule 1: times"),
            (r#"{"rules":[{"reply":{"hold":"a/b"}}]}"#, "rule 1: hold"),
            (
                r#"{"rules":[{"reply":{"text":"{{last}} {{lost}}"}}]}"#,
                "rule 1: there is no template {{lost}}",
            ),
            (
                r#"{"rules":[{"reply":{"tool_calls":[{"name":"a","arguments":{"x":["{{call_id:}}"]}}]}}]}"#,
                "rule 1: there is no template {{call_id:}}",
            ),
            (
                r#"{"rules":[],"flavor":"Anthropic"}"#,
                "OpenAIv1, OpenAI, KimiV1, MistralV1, OpenRouter, Ollama",
            ),
        ] {
            let error = Script::parse(text).expect_err("refused").to_string();
            assert!(error.contains(expected), "{error}");
        }
        let error = Script::load(Path::new("/nonexistent/script.json")).expect_err("missing").to_string();
        assert!(error.contains("/nonexistent/script.json"), "{error}");
    }
}
