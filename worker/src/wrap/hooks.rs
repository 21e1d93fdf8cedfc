//! Asking hooks, and obeying them.

use holdfast_engine::{
    content::ToolResult,
    policy::{self, Hook},
    tool::Outcome,
};
use holdfast_tools::{CallContext, HookError, ask_program, ask_tool, hook_id};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::sync::PoisonError;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{Asked, Frame, HookFailed, Reply, Wrapped, not_begun, shape};
use crate::metrics::{self, Wrap};

/// What the model is told of a call whose `before` hook gave no usable answer.
const NO_ANSWER: &str =
    "denied: the hook that decides about this call gave no usable answer; the call was not run";

/// What a `before` hook may answer.
#[derive(Debug, PartialEq, Deserialize)]
#[serde(tag = "action", rename_all = "camelCase", deny_unknown_fields)]
enum Before {
    Continue {
        #[serde(default)]
        arguments: Option<Map<String, Value>>,
    },
    Deny {
        message: String,
    },
    Defer {
        #[serde(default)]
        reason: String,
    },
    Answer {
        result: Value,
    },
}

/// What an `after` hook may answer.
#[derive(Debug, PartialEq, Deserialize)]
#[serde(tag = "action", rename_all = "camelCase", deny_unknown_fields)]
enum After {
    Continue {
        #[serde(default)]
        result: Option<Value>,
    },
    Annotate {
        text: String,
    },
}

impl Wrapped {
    /// Asks whether the call may begin. Without a usable answer it may not.
    pub(super) async fn asked_before(&self, next: usize, frame: Frame, asked: &Asked) -> Reply {
        let question = self.question(&frame.arguments);
        let answer = match self.ask(asked, &question, &frame.cancel).await {
            _ if frame.cancel.is_cancelled() => return not_begun(),
            Ok(answer) => read(&answer),
            Err(error) => Err(error.to_string()),
        };
        let answer = answer.and_then(|answer| match answer {
            Before::Answer { result } => as_result(result).map(Reply::completed).map(Obeyed::Reply),
            Before::Deny { message } => Ok(Obeyed::Reply(Reply::Refused(message))),
            Before::Defer { reason } => Ok(Obeyed::Reply(Reply::Deferred(reason))),
            Before::Continue { arguments } => Ok(Obeyed::Go(arguments)),
        });
        match answer {
            Ok(Obeyed::Go(arguments)) => {
                let arguments = arguments.map_or(frame.arguments, |fields| Value::Object(fields).to_string());
                self.inside(next, Frame { arguments, ..frame }).await
            }
            Ok(Obeyed::Reply(reply)) => {
                metrics::wrapped(match reply {
                    Reply::Refused(_) => Wrap::HookDenied,
                    Reply::Deferred(_) => Wrap::HookDeferred,
                    Reply::Ended(_) => Wrap::HookAnswered,
                });
                reply
            }
            Err(reason) => {
                self.failed(asked, "before", reason);
                Reply::Refused(NO_ANSWER.to_owned())
            }
        }
    }

    /// Tells how the call ended, and changes its result if the hook says so. Without a usable answer nothing
    /// changes. Of a call that was cancelled, or is handled outside, it isn't told.
    pub(super) async fn told_after(&self, next: usize, frame: Frame, asked: &Asked) -> Reply {
        let began = Instant::now();
        let (arguments, cancel) = (frame.arguments.clone(), frame.cancel.clone());
        let reply = self.inside(next, frame).await;
        let (status, result) = match &reply {
            Reply::Ended(Outcome::Completed(result)) => ("completed", result.clone()),
            Reply::Ended(Outcome::Failed(text)) | Reply::Refused(text) => ("failed", ToolResult::text(text)),
            Reply::Ended(Outcome::Cancelled(_)) | Reply::Deferred(_) => return reply,
        };
        let mut question = self.question(&arguments);
        question.insert("result".to_owned(), json!(result));
        question.insert("status".to_owned(), json!(status));
        let took = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        question.insert("duration_ms".to_owned(), json!(took));
        let answer = match self.ask(asked, &question, &cancel).await {
            // The call has ended all the same.
            _ if cancel.is_cancelled() => return reply,
            Ok(answer) => read(&answer),
            Err(error) => Err(error.to_string()),
        };
        let changed = answer.and_then(|answer| match answer {
            After::Continue { result } => result.map(as_result).transpose().map(Changed::Result),
            After::Annotate { text } => Ok(Changed::Note(text)),
        });
        match changed {
            Ok(Changed::Result(None)) => reply,
            Ok(Changed::Result(Some(result))) => reply.with(result),
            Ok(Changed::Note(note)) => shape::annotated(reply, &note),
            Err(reason) => {
                self.failed(asked, "after", reason);
                reply
            }
        }
    }

    fn question(&self, arguments: &str) -> Map<String, Value> {
        let arguments = policy::arguments(arguments).unwrap_or_else(|| Value::from(arguments));
        let fields = [
            ("tool", json!(self.tool)),
            ("arguments", arguments),
            ("session_id", json!(self.context.session_id)),
            ("tool_call_id", json!(self.context.call_id)),
            ("agent", json!(self.agent)),
        ];
        fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }

    async fn ask(
        &self,
        asked: &Asked,
        question: &Map<String, Value>,
        cancel: &CancellationToken,
    ) -> Result<String, HookError> {
        let context = CallContext {
            call_id: hook_id(self.context.call_id, &asked.place.to_string()),
            session_json: None,
            timeout: Some(asked.timeout),
            ..self.context.clone()
        };
        match &asked.hook {
            Hook::Command(path) => ask_program(&self.program(path), question, &context, cancel).await,
            Hook::Tool(name) => ask_tool(&self.toolbox, name, question, &context, cancel).await,
        }
    }

    fn failed(&self, asked: &Asked, when: &'static str, reason: String) {
        metrics::wrapped(Wrap::HookFailed);
        let hook = match &asked.hook {
            Hook::Command(path) => format!("command {path}"),
            Hook::Tool(name) => format!("tool {name}"),
        };
        let mut failed = self.failed_hooks.lock().unwrap_or_else(PoisonError::into_inner);
        failed.push(HookFailed { hook, when, reason });
    }
}

/// What is done about a `before` hook's answer.
enum Obeyed {
    Go(Option<Map<String, Value>>),
    Reply(Reply),
}

/// What is done about an `after` hook's answer.
enum Changed {
    Result(Option<ToolResult>),
    Note(String),
}

impl Reply {
    fn completed(result: ToolResult) -> Self {
        Self::Ended(Outcome::Completed(result))
    }

    /// The same end with another result: what failed stays failed.
    fn with(self, result: ToolResult) -> Self {
        match self {
            Self::Ended(Outcome::Completed(_)) => Self::completed(result),
            Self::Ended(Outcome::Failed(_)) => Self::Ended(Outcome::Failed(result.as_text())),
            Self::Refused(_) => Self::Refused(result.as_text()),
            other => other,
        }
    }
}

/// Reads an answer. What is wrong is told without quoting it.
fn read<A: for<'de> Deserialize<'de>>(answer: &str) -> Result<A, String> {
    let value: Value = serde_json::from_str(answer.trim()).map_err(|_| "its answer is no JSON".to_owned())?;
    serde_json::from_value(value)
        .map_err(|_| "its answer has no known action, or not the fields that belong to it".to_owned())
}

/// A result as a hook writes it: one of the forms that clients send, a text, or any other JSON.
fn as_result(value: Value) -> Result<ToolResult, String> {
    match value {
        Value::String(text) => Ok(ToolResult::text(text)),
        Value::Object(fields) if fields.contains_key("type") => {
            let result: ToolResult = serde_json::from_value(Value::Object(fields))
                .map_err(|_| "its result has a type, but not the fields that belong to it".to_owned())?;
            Ok(if let ToolResult::Json { content } = result { ToolResult::json(content) } else { result })
        }
        other => Ok(ToolResult::json(other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_strictly() {
        let go = |fields: Option<Value>| Before::Continue {
            arguments: fields.and_then(|f| f.as_object().cloned()),
        };
        for (text, answer) in [
            ("  {\"action\": \"continue\"}\n", go(None)),
            (r#"{"action": "continue", "arguments": {"a": 1}}"#, go(Some(json!({"a": 1})))),
            (r#"{"action": "deny", "message": "no"}"#, Before::Deny { message: "no".into() }),
            (r#"{"action": "defer"}"#, Before::Defer { reason: String::new() }),
            (r#"{"action": "answer", "result": [1]}"#, Before::Answer { result: json!([1]) }),
        ] {
            assert_eq!(read::<Before>(text), Ok(answer), "{text}");
        }
        for text in [
            "",
            "ok",
            "{}",
            r#"{"action": "allow"}"#,
            r#"{"action": "continue", "argumnets": {}}"#,
            r#"{"action": "continue", "arguments": "x"}"#,
            r#"{"action": "deny"}"#,
            r#"{"action": "answer"}"#,
            r#"{"action": "annotate", "text": "x"}"#,
            "{\"action\": \"continue\"} {\"action\": \"deny\", \"message\": \"x\"}",
        ] {
            assert!(read::<Before>(text).is_err(), "{text}");
        }
        assert_eq!(read(r#"{"action": "continue", "result": null}"#), Ok(After::Continue { result: None }));
        assert!(read::<After>(r#"{"action": "continue", "arguments": {}}"#).is_err());
        assert!(read::<After>(r#"{"action": "deny", "message": "x"}"#).is_err());
    }

    #[test]
    fn results_are_texts_forms_or_json() {
        assert_eq!(as_result(json!("x")), Ok(ToolResult::text("x")));
        assert_eq!(as_result(json!({"type": "text", "content": "x"})), Ok(ToolResult::text("x")));
        assert_eq!(as_result(json!({"n": 1})), Ok(ToolResult::Json { content: json!({"n": 1}) }));
        assert!(as_result(json!({"type": "text"})).is_err());
    }
}
