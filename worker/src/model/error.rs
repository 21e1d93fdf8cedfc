//! How asking a model fails.

use std::time::Duration;

use serde_json::Value;

use super::keys::ApiKey;

/// The longest detail of an error, in characters.
pub const MAX_DETAIL_CHARS: usize = 500;

/// What kind of failure an attempt to ask a model met, for metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureClass {
    /// The provider wants fewer requests.
    RateLimited,
    /// The provider can't be reached, is overloaded, or broke off.
    Unavailable,
    /// It took too long.
    Timeout,
    /// It refused the key.
    KeyRefused,
    /// It knows no such model.
    UnknownModel,
    /// It refused the request.
    Refused,
    /// It reported an error in an answer that HTTP calls a success.
    ProviderError,
    /// Its answer can't be read.
    Malformed,
    /// Its answer is too large.
    TooLarge,
    /// The agent's settings make no request.
    Target,
}

impl FailureClass {
    /// All of them.
    pub const ALL: [Self; 10] = [
        Self::RateLimited,
        Self::Unavailable,
        Self::Timeout,
        Self::KeyRefused,
        Self::UnknownModel,
        Self::Refused,
        Self::ProviderError,
        Self::Malformed,
        Self::TooLarge,
        Self::Target,
    ];

    /// Its name as a label.
    pub fn word(self) -> &'static str {
        match self {
            Self::RateLimited => "rate_limited",
            Self::Unavailable => "unavailable",
            Self::Timeout => "timeout",
            Self::KeyRefused => "key_refused",
            Self::UnknownModel => "unknown_model",
            Self::Refused => "refused",
            Self::ProviderError => "provider_error",
            Self::Malformed => "malformed",
            Self::TooLarge => "too_large",
            Self::Target => "target",
        }
    }

    /// What an HTTP status that may pass means.
    pub(super) fn of_status(status: u16) -> Self {
        match status {
            429 => Self::RateLimited,
            408 | 504 => Self::Timeout,
            _ => Self::Unavailable,
        }
    }
}

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
        /// What kind of failure that was.
        class: FailureClass,
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

    /// What kind of failure the last attempt met.
    pub fn class(&self) -> FailureClass {
        match self {
            Self::Target { .. } => FailureClass::Target,
            Self::RefusedKey { .. } => FailureClass::KeyRefused,
            Self::UnknownModel { .. } => FailureClass::UnknownModel,
            Self::Refused { .. } => FailureClass::Refused,
            Self::Provider { .. } => FailureClass::ProviderError,
            Self::Malformed { .. } => FailureClass::Malformed,
            Self::TooLarge { .. } => FailureClass::TooLarge,
            Self::AskedToWait { .. } => FailureClass::RateLimited,
            Self::GaveUp { class, .. } => *class,
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
        /// What kind of failure it is.
        class: FailureClass,
    },
}

impl Failure {
    pub(super) fn passing(class: FailureClass, detail: impl Into<String>) -> Self {
        Self::Passing { detail: detail.into(), retry_after: None, class }
    }

    pub(super) fn malformed(detail: impl Into<String>) -> Self {
        Self::Final(ModelError::Malformed { detail: detail.into() })
    }

    /// An error object in an answer with a successful status, or in the middle of a stream.
    pub(super) fn reported(error: &Value, key: Option<&ApiKey>) -> Self {
        let detail = bounded(&message_of(error).unwrap_or_else(|| "without a message".to_owned()), key);
        let class = match status_in(error) {
            Some(status) => passes(status).then(|| FailureClass::of_status(status)),
            None => match text(error, "type").or_else(|| text(error, "code")) {
                Some("rate_limit_error" | "rate_limit_exceeded") => Some(FailureClass::RateLimited),
                Some("timeout_error") => Some(FailureClass::Timeout),
                Some(
                    "overloaded_error"
                    | "api_error"
                    | "server_error"
                    | "internal_server_error"
                    | "service_unavailable",
                ) => Some(FailureClass::Unavailable),
                _ => None,
            },
        };
        match class {
            Some(class) => Self::passing(class, detail),
            None => Self::Final(ModelError::Provider { detail }),
        }
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
        let class = |error| match Failure::reported(&error, None) {
            Failure::Passing { class, .. } => Some(class),
            Failure::Final(_) => None,
        };
        for (error, expected) in [
            (json!({ "code": 502, "message": "m" }), Some(FailureClass::Unavailable)),
            (json!({ "code": "429", "message": "m" }), Some(FailureClass::RateLimited)),
            (json!({ "type": "overloaded_error", "message": "m" }), Some(FailureClass::Unavailable)),
            (json!({ "type": "rate_limit_error", "message": "m" }), Some(FailureClass::RateLimited)),
            (json!({ "type": "timeout_error", "message": "m" }), Some(FailureClass::Timeout)),
            (json!({ "code": 400, "message": "m" }), None),
            (json!({ "type": "invalid_request_error", "message": "m" }), None),
        ] {
            assert_eq!(class(error.clone()), expected, "{error}");
        }
    }
}
