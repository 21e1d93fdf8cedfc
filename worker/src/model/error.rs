//! How asking a model fails.

use std::time::Duration;

use serde_json::Value;

use super::keys::ApiKey;

/// The longest detail of an error, in characters.
pub const MAX_DETAIL_CHARS: usize = 500;

/// Why a model gave no answer. The messages are for people: they name the server, the status and what
/// the provider said, in at most [`MAX_DETAIL_CHARS`] characters of detail, and never hold a key, a header
/// or what was asked.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The request can't be made of this target (base URL, `extraBody`).
    #[error("the agent's model settings can't be used: {detail}")]
    Target {
        /// What is wrong with them.
        detail: String,
    },
    /// 401 or 403.
    #[error("the model provider refused API key {}: {detail}", key_id.as_deref().map_or("(none was sent)".to_owned(), |id| format!("`{id}`")))]
    RefusedKey {
        /// The id of the key that was sent, if one was.
        key_id: Option<String>,
        /// Status and the provider's message.
        detail: String,
    },
    /// 404.
    #[error("the provider knows no model `{model}`, or modelUrl is wrong: {detail}")]
    UnknownModel {
        /// The model asked for.
        model: String,
        /// Status and the provider's message.
        detail: String,
    },
    /// Another status that asking again would not change.
    #[error("the model provider refused the request: {detail}")]
    Refused {
        /// The HTTP status.
        status: u16,
        /// Status and the provider's message.
        detail: String,
    },
    /// The provider reports, in an answer that HTTP calls a success, an error that asking again would not
    /// change.
    #[error("the model provider reports an error: {detail}")]
    Provider {
        /// The provider's message.
        detail: String,
    },
    /// The answer isn't what the flavour's API answers.
    #[error("the model's answer can't be read: {detail}")]
    Malformed {
        /// What is wrong with it.
        detail: String,
    },
    /// The answer has more bytes than a worker takes.
    #[error("the model's answer has more than {limit} bytes")]
    TooLarge {
        /// The limit, in bytes.
        limit: usize,
    },
    /// The provider wants a longer pause than a run waits.
    #[error("the model provider asks to wait {} seconds, more than the {} that a run waits: {detail}", wait.as_secs(), limit.as_secs())]
    AskedToWait {
        /// What the provider asks for.
        wait: Duration,
        /// What a run grants.
        limit: Duration,
        /// Status and the provider's message.
        detail: String,
    },
    /// Failures that may pass, more of them than are tried.
    #[error("the model gave no answer in {attempts} attempts; the last one: {detail}")]
    GaveUp {
        /// How often it was asked.
        attempts: u32,
        /// The last failure.
        detail: String,
    },
}

impl ModelError {
    /// A stable name of the kind of failure, for stored details and metrics.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Target { .. } => "model_target",
            Self::RefusedKey { .. } => "model_key_refused",
            Self::UnknownModel { .. } => "model_unknown",
            Self::Refused { .. } => "model_refused",
            Self::Provider { .. } => "model_provider_error",
            Self::Malformed { .. } => "model_answer_malformed",
            Self::TooLarge { .. } => "model_answer_too_large",
            Self::AskedToWait { .. } => "model_rate_limited",
            Self::GaveUp { .. } => "model_unavailable",
        }
    }
}

/// How one attempt failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// Asking again would change nothing.
    Final(ModelError),
    /// It may pass.
    Passing {
        /// What happened.
        detail: String,
        /// The pause that the provider asks for.
        retry_after: Option<Duration>,
    },
}

impl Failure {
    pub(super) fn passing(detail: impl Into<String>) -> Self {
        Self::Passing { detail: detail.into(), retry_after: None }
    }

    pub(super) fn malformed(detail: impl Into<String>) -> Self {
        Self::Final(ModelError::Malformed { detail: detail.into() })
    }

    /// An error object in an answer with a successful status, or in the middle of a stream.
    pub(super) fn reported(error: &Value, key: Option<&ApiKey>) -> Self {
        let detail = bounded(&message_of(error).unwrap_or_else(|| "without a message".to_owned()), key);
        let passing = match status_in(error) {
            Some(status) => passes(status),
            None => matches!(
                text(error, "type").or_else(|| text(error, "code")),
                Some(
                    "overloaded_error" | "rate_limit_error" | "api_error" | "timeout_error" | "server_error"
                ) | Some("rate_limit_exceeded" | "internal_server_error" | "service_unavailable")
            ),
        };
        if passing { Self::passing(detail) } else { Self::Final(ModelError::Provider { detail }) }
    }
}

/// Whether a failure with this HTTP status may pass.
pub(super) fn passes(status: u16) -> bool {
    matches!(status, 408 | 409 | 425 | 429 | 500..=599)
}

/// Whether a provider's 429 is about money, which no waiting brings.
pub(super) fn out_of_quota(body: &Value) -> bool {
    let error = body.get("error").unwrap_or(body);
    ["code", "type"].iter().any(|key| text(error, key) == Some("insufficient_quota"))
}

/// What a provider's error body says, in any of the shapes that providers use.
pub(super) fn message_of(body: &Value) -> Option<String> {
    match body {
        Value::String(message) => Some(message.clone()),
        Value::Array(items) => {
            let messages: Vec<_> = items.iter().take(5).filter_map(message_of).collect();
            (!messages.is_empty()).then(|| messages.join("; "))
        }
        Value::Object(fields) => {
            let message = ["error", "message", "msg", "detail", "reason", "title"]
                .iter()
                .find_map(|key| fields.get(*key).and_then(message_of))?;
            // A relay says little itself and quotes the provider behind it.
            match fields.get("metadata").and_then(|metadata| text(metadata, "provider_name")) {
                Some(provider) => Some(format!("{message} ({provider})")),
                None => Some(message),
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => None,
    }
}

/// Text fit for an error: one line, no key, at most [`MAX_DETAIL_CHARS`] characters.
pub(super) fn bounded(message: &str, key: Option<&ApiKey>) -> String {
    let hidden = match key {
        Some(key) => message.replace(key.secret(), "[key]"),
        None => message.to_owned(),
    };
    let mut words =
        hidden.split(|c: char| c.is_whitespace() || c.is_control()).filter(|word| !word.is_empty());
    let mut line = words.next().unwrap_or_default().to_owned();
    for word in words {
        line.push(' ');
        line.push_str(word);
    }
    match line.char_indices().nth(MAX_DETAIL_CHARS - 1) {
        Some((end, c)) if end + c.len_utf8() < line.len() => {
            line.truncate(end);
            line.push('…');
        }
        _ => {}
    }
    line
}

fn status_in(error: &Value) -> Option<u16> {
    let code = error.get("code").or_else(|| error.get("status"))?;
    let number = code.as_u64().or_else(|| code.as_str()?.parse().ok())?;
    u16::try_from(number).ok().filter(|status| (400..600).contains(status))
}

fn text<'a>(value: &'a Value, key: &str) -> Option<&'a str> {
    value.get(key)?.as_str()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn messages_of_many_shapes() {
        for (body, expected) in [
            (json!({ "error": { "message": "bad model" } }), Some("bad model")),
            (json!({ "error": "no such model" }), Some("no such model")),
            (json!({ "type": "error", "error": { "type": "x", "message": "m" } }), Some("m")),
            (
                json!({ "detail": [{ "msg": "field required", "input": "the prompt" }, { "msg": "b" }] }),
                Some("field required; b"),
            ),
            (json!({ "message": { "detail": [{ "msg": "deep" }] } }), Some("deep")),
            (
                json!({ "error": { "message": "Provider returned error", "metadata": { "provider_name": "Acme" } } }),
                Some("Provider returned error (Acme)"),
            ),
            (json!({ "status": 3 }), None),
        ] {
            assert_eq!(message_of(&body).as_deref(), expected, "{body}");
        }
    }

    #[test]
    fn details_are_one_short_line_without_the_key() {
        let key = ApiKey::new("main", "sk-secret").expect("a key");
        let detail = bounded(&format!("wrong key\n\u{7}  sk-secret {}", "é".repeat(600)), Some(&key));
        assert!(detail.starts_with("wrong key [key] éé"), "{detail}");
        assert_eq!(detail.chars().count(), MAX_DETAIL_CHARS);
        assert!(detail.ends_with('…'));
        assert_eq!(bounded(&"x".repeat(500), None), "x".repeat(500));
    }

    #[test]
    fn reported_errors_pass_by_code_or_type() {
        let passing = |error| matches!(Failure::reported(&error, None), Failure::Passing { .. });
        assert!(passing(json!({ "code": 502, "message": "m" })));
        assert!(passing(json!({ "code": "429", "message": "m" })));
        assert!(passing(json!({ "type": "overloaded_error", "message": "m" })));
        assert!(!passing(json!({ "code": 400, "message": "m" })));
        assert!(!passing(json!({ "type": "invalid_request_error", "message": "m" })));
    }
}
