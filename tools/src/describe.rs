//! What a program says of itself when it is asked to `describe`.

use std::{path::Path, time::Duration};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tokio_util::sync::CancellationToken;

use crate::{
    context::is_reserved,
    output::failure_text,
    process::{self, Bounds, Ended, Job, StartError},
    schema::JsonKind,
};

/// How long a program may take to describe itself.
pub const DESCRIBE_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest description document, in bytes.
pub const MAX_DESCRIPTION: usize = 256 * 1024;
/// The most arguments that a tool may have.
pub const MAX_ARGS: usize = 100;
/// The longest slug or argument name, in bytes.
const MAX_NAME: usize = 100;

/// A program's description, checked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ScriptInfo {
    /// The tool's own name, without blanks.
    pub slug: String,
    /// What the tool does, for the model.
    pub description: String,
    /// Arguments, in the order in which positional ones are passed.
    pub args: Vec<ScriptArg>,
    /// What the model gets when the program prints nothing.
    #[serde(rename = "empty-result")]
    pub empty_result: EmptyResult,
    /// MIME type of what the program prints, lower-case and without parameters; plain text if absent.
    #[serde(rename = "output-media-type", skip_serializing_if = "Option::is_none")]
    pub output_media_type: Option<String>,
    /// Fields of the document that mean nothing here, for warnings.
    #[serde(skip)]
    pub unknown_fields: Vec<String>,
}

/// One argument of a tool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScriptArg {
    /// The name in the model's arguments object.
    pub name: String,
    /// What it means, for the model.
    pub description: String,
    /// What kind of thing it is; a JSON type's name, or a word such as `path` beside a
    /// `backing_type` that is one.
    #[serde(rename = "type")]
    pub kind: String,
    /// How it is represented.
    pub backing_type: String,
    /// How many values it takes.
    pub arity: Arity,
    /// How its values reach the program.
    pub mode: Mode,
    #[serde(flatten, skip_serializing)]
    rest: Map<String, Value>,
}

/// How many values an argument takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Arity {
    /// Exactly one; the model must give it.
    Single,
    /// One or none.
    Optional,
    /// Any number, none too; an array in the model's arguments.
    Multiple,
}

/// How an argument's values reach the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// `value`.
    Positional,
    /// `--name value`, two words.
    DashDashSpace,
    /// `--name=value`, one word.
    DashDashEqual,
    /// On standard input; several values have an empty line between them.
    Stdin,
    /// In the environment: the name upper-cased, `-` as `_`. Several values are a JSON array.
    Env,
}

/// What the model gets when the program prints nothing but blanks.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(tag = "tag", content = "contents")]
pub enum EmptyResult {
    /// An empty text.
    #[default]
    DoNothing,
    /// This text.
    AddMessage(String),
}

/// Why a program is no tool.
#[derive(Debug, thiserror::Error)]
pub enum DescribeError {
    /// It can't be started.
    #[error(transparent)]
    Start(#[from] StartError),
    /// It didn't answer in time; see [`DESCRIBE_TIMEOUT`].
    #[error("`describe` took longer than {} seconds", .0.as_secs_f64())]
    Timeout(Duration),
    /// It reported a failure.
    #[error("`describe` failed: {0}")]
    Failed(String),
    /// It printed more than [`MAX_DESCRIPTION`] bytes.
    #[error("`describe` printed {0} bytes; at most {MAX_DESCRIPTION} are read")]
    TooLong(u64),
    /// It printed no JSON object.
    #[error("`describe` printed no JSON object: {0}")]
    NotJson(String),
    /// The description breaks the protocol; the text says where and how.
    #[error("the description is not valid: {0}")]
    Invalid(String),
}

#[derive(Deserialize)]
struct Document {
    #[serde(default)]
    protocol: Option<Value>,
    slug: String,
    description: String,
    args: Vec<Value>,
    #[serde(default, rename = "empty-result")]
    empty_result: Option<Value>,
    #[serde(default, rename = "output-media-type")]
    output_media_type: Option<String>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// Asks the program at `path` to describe itself.
///
/// # Errors
/// See [`DescribeError`].
pub async fn describe(path: &Path) -> Result<ScriptInfo, DescribeError> {
    describe_within(path, DESCRIBE_TIMEOUT).await
}

async fn describe_within(path: &Path, limit: Duration) -> Result<ScriptInfo, DescribeError> {
    let job = Job { program: path, args: vec!["describe".into()], env: Vec::new(), stdin: None };
    let bounds = Bounds { keep: MAX_DESCRIPTION, timeout: Some(limit), stop: process::STOP_TIME };
    let finished = process::run(&job, &bounds, &CancellationToken::new(), None).await?;
    match finished.ended {
        Ended::Exited(status) if status.success() => {}
        Ended::Exited(status) => return Err(DescribeError::Failed(failure_text(status, &finished))),
        Ended::TimedOut | Ended::Cancelled => return Err(DescribeError::Timeout(limit)),
    }
    if finished.stdout.cut() > 0 {
        return Err(DescribeError::TooLong(finished.stdout.total()));
    }
    ScriptInfo::parse(finished.stdout.head())
}

impl ScriptInfo {
    /// Reads and checks a description document.
    ///
    /// # Errors
    /// [`DescribeError::NotJson`] and [`DescribeError::Invalid`].
    pub fn parse(document: &[u8]) -> Result<Self, DescribeError> {
        let value: Value =
            serde_json::from_slice(document).map_err(|error| DescribeError::NotJson(error.to_string()))?;
        if !value.is_object() {
            return Err(DescribeError::NotJson("it is another kind of value".to_owned()));
        }
        let document: Document =
            serde_json::from_value(value).map_err(|error| DescribeError::Invalid(error.to_string()))?;
        document.check().map_err(DescribeError::Invalid)
    }
}

impl Document {
    fn check(self) -> Result<ScriptInfo, String> {
        if let Some(protocol) = &self.protocol
            && protocol.as_u64() != Some(1)
        {
            return Err(format!("protocol {protocol} is not supported; leave it out or use 1"));
        }
        let slug_ok = (1..=MAX_NAME).contains(&self.slug.len())
            && !self.slug.contains(|c: char| c.is_whitespace() || c.is_control());
        if !slug_ok {
            return Err(format!("slug {:?} must be 1 to {MAX_NAME} bytes without blanks", self.slug));
        }
        if self.args.len() > MAX_ARGS {
            return Err(format!("{} args are too many; at most {MAX_ARGS} are allowed", self.args.len()));
        }
        let mut unknown_fields: Vec<String> = self.rest.keys().cloned().collect();
        let mut args: Vec<ScriptArg> = Vec::with_capacity(self.args.len());
        for (index, value) in self.args.into_iter().enumerate() {
            let mut arg: ScriptArg =
                serde_json::from_value(value).map_err(|error| format!("args[{index}]: {error}"))?;
            check_arg(&arg, &args).map_err(|reason| format!("args[{index}] ({:?}): {reason}", arg.name))?;
            let rest = std::mem::take(&mut arg.rest);
            unknown_fields.extend(rest.keys().map(|key| format!("args[{index}].{key}")));
            args.push(arg);
        }
        let empty_result = match self.empty_result {
            None | Some(Value::Null) => EmptyResult::default(),
            Some(value) => serde_json::from_value(value).map_err(|error| format!("empty-result: {error}"))?,
        };
        let output_media_type = self.output_media_type.as_deref().map(media_type).transpose()?;
        let (slug, description) = (self.slug, self.description);
        Ok(ScriptInfo { slug, description, args, empty_result, output_media_type, unknown_fields })
    }
}

fn check_arg(arg: &ScriptArg, before: &[ScriptArg]) -> Result<(), String> {
    let fit = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    let name_ok = (1..=MAX_NAME).contains(&arg.name.len())
        && arg.name.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
        && arg.name.chars().all(fit);
    if !name_ok {
        return Err(format!(
            "a name is 1 to {MAX_NAME} letters, digits, `_`, `-` and `.`, starting with none of the last two"
        ));
    }
    if before.iter().any(|other| other.name == arg.name) {
        return Err("another argument has the same name".to_owned());
    }
    if JsonKind::of(arg).is_none() {
        return Err(format!(
            "neither type {:?} nor backing_type {:?} is one of {}",
            arg.kind,
            arg.backing_type,
            JsonKind::NAMES
        ));
    }
    if arg.mode == Mode::Env {
        let variable = arg.variable();
        if arg.name.contains('.') || variable.starts_with(|c: char| c.is_ascii_digit()) {
            return Err(format!("mode env can't make a variable of it: {variable:?} is no variable's name"));
        }
        if is_reserved(&variable) {
            return Err(format!("mode env would set {variable}, which is not the model's to choose"));
        }
        let clash = before.iter().find(|other| other.mode == Mode::Env && other.variable() == variable);
        if let Some(other) = clash {
            return Err(format!("mode env sets {variable}, and so does {:?}", other.name));
        }
    }
    Ok(())
}

fn media_type(text: &str) -> Result<String, String> {
    let bare = text.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    let token = |part: &str| {
        !part.is_empty()
            && part.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.' | '_'))
    };
    match bare.split_once('/') {
        Some((kind, subtype)) if token(kind) && token(subtype) => Ok(bare),
        _ => Err(format!("output-media-type {text:?} is no MIME type such as image/png")),
    }
}

impl ScriptArg {
    /// The environment variable of an argument of mode `env`.
    pub(crate) fn variable(&self) -> String {
        self.name.to_ascii_uppercase().replace('-', "_")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn with_arg(change: impl FnOnce(&mut Value)) -> Value {
        let mut arg = json!({"name": "a", "description": "d", "type": "string", "backing_type": "string",
            "arity": "single", "mode": "positional"});
        change(&mut arg);
        json!({"slug": "s", "description": "d", "args": [arg]})
    }

    fn refusal(document: &Value) -> String {
        ScriptInfo::parse(document.to_string().as_bytes()).expect_err("refused").to_string()
    }

    #[test]
    fn a_whole_document_is_read() {
        let mut document = with_arg(|arg| arg["mode"] = json!("dashdashequal"));
        document["empty-result"] = json!({"tag": "AddMessage", "contents": "none"});
        document["output-media-type"] = json!("Image/PNG; q=1");
        document["colour"] = json!("red");
        let info = ScriptInfo::parse(document.to_string().as_bytes()).expect("valid");
        assert_eq!(info.args[0].mode, Mode::DashDashEqual);
        assert_eq!(info.empty_result, EmptyResult::AddMessage("none".into()));
        assert_eq!(info.output_media_type.as_deref(), Some("image/png"));
        assert_eq!(info.unknown_fields, ["colour"]);
        let back = serde_json::to_value(&info).expect("serializes");
        assert_eq!(ScriptInfo::parse(back.to_string().as_bytes()).expect("round trip").args, info.args);
    }

    #[test]
    fn each_fault_is_named_where_it_is() {
        let missing = refusal(&json!({"slug": "s", "args": []}));
        assert!(missing.contains("description"), "{missing}");
        let cases: [(&str, Value, &str); 9] = [
            ("mode", json!("spacy"), "dashdashspace"),
            ("arity", json!("many"), "multiple"),
            ("type", json!(3), "args[0]"),
            ("name", json!("a b"), "letters"),
            ("name", json!("--x"), "letters"),
            ("name", json!(""), "letters"),
            ("name", json!("a\u{0}"), "letters"),
            ("description", json!(null), "args[0]"),
            ("backing_type", json!(null), "args[0]"),
        ];
        for (field, value, expected) in cases {
            let message = refusal(&with_arg(|arg| arg[field] = value));
            assert!(message.contains(expected), "{field}: {message}");
        }
        let kinds = with_arg(|arg| {
            arg["type"] = json!("planet");
            arg["backing_type"] = json!("blob");
        });
        assert!(refusal(&kinds).contains("integer"), "{}", refusal(&kinds));
        assert!(refusal(&json!({"slug": "a b", "description": "", "args": []})).contains("blanks"));
        assert!(refusal(&json!([1])).contains("no JSON object"));
        let mut two = with_arg(|_| {});
        two["protocol"] = json!(2);
        assert!(refusal(&two).contains("protocol 2"));
    }

    #[tokio::test]
    async fn who_never_answers_is_stopped() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("tool");
        std::fs::write(&path, "#!/bin/sh\nsleep 1000 & sleep 1000").expect("written");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("made executable");
        let error = describe_within(&path, Duration::from_millis(250)).await.expect_err("no answer");
        assert_eq!(error.to_string(), "`describe` took longer than 0.25 seconds");
    }

    #[test]
    fn a_tool_has_so_many_arguments_and_no_more() {
        let with = |count: usize| {
            let mut document = with_arg(|_| {});
            let arg = document["args"][0].clone();
            let args = (0..count).map(|n| {
                let mut arg = arg.clone();
                arg["name"] = json!(format!("a{n}"));
                arg
            });
            document["args"] = args.collect();
            document
        };
        assert!(ScriptInfo::parse(with(MAX_ARGS).to_string().as_bytes()).is_ok());
        assert!(refusal(&with(MAX_ARGS + 1)).contains("at most 100"));
    }

    #[test]
    fn environment_arguments_cannot_touch_what_is_not_theirs() {
        for name in ["path", "ld-preload", "agent-session-id", "holdfast-x", "traceparent", "1x", "a.b"] {
            let message = refusal(&with_arg(|arg| {
                arg["name"] = json!(name);
                arg["mode"] = json!("env");
            }));
            assert!(message.contains("mode env"), "{name}: {message}");
        }
        let mut twins = with_arg(|arg| {
            arg["name"] = json!("a-b");
            arg["mode"] = json!("env");
        });
        let mut twin = twins["args"][0].clone();
        twin["name"] = json!("a_b");
        twins["args"].as_array_mut().expect("array").push(twin);
        assert!(refusal(&twins).contains("A_B"));
    }
}
