//! Why a session failed, by the words that its status keeps: what people count failures by.

use crate::MAX_TAKEOVERS;

/// How the words of each cause begin, with its stable name.
const CAUSES: &[(&str, &str)] = &[
    ("poison", "poison"),
    ("internal: ", "internal"),
    ("no API key ", "model_key_missing"),
    ("the agent's model settings can't be used", "model_target"),
    ("the model provider refused API key", "model_key_refused"),
    ("the provider knows no model", "model_unknown"),
    ("the model provider refused the request", "model_refused"),
    ("the model provider reports an error", "model_provider_error"),
    ("the model's answer can't be read", "model_answer_malformed"),
    ("the model's answer has more than", "model_answer_too_large"),
    ("the model provider asks to wait", "model_rate_limited"),
    ("the model gave no answer in", "model_unavailable"),
];

/// The cause that a failed session's detail names: `poison`, `internal`, `model_key_missing`, a code of
/// [`ModelError`](crate::model::ModelError), or `other`.
pub fn cause(detail: &str) -> &'static str {
    let known = CAUSES.iter().find(|(words, _)| detail.starts_with(words));
    known.map_or("other", |(_, name)| name)
}

/// How many workers died over a session that failed as poison. Earlier releases said it in the detail.
pub fn deaths(detail: &str) -> Option<i32> {
    let said = detail.strip_prefix("poison")?;
    let Some(said) = said.strip_prefix(": ") else { return Some(MAX_TAKEOVERS) };
    said.split(' ').next()?.parse().ok()
}

/// Whether a cause is one that no repetition removes: settings, keys and names that are wrong.
pub fn is_of_settings(cause: &str) -> bool {
    matches!(cause, "model_key_missing" | "model_target" | "model_key_refused" | "model_unknown")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{
        lease::POISON,
        model::{FailureClass, ModelError},
    };

    #[test]
    fn every_failure_is_told_by_its_words() {
        let detail = || "said so".to_owned();
        let errors = [
            ModelError::Target { detail: detail() },
            ModelError::RefusedKey { key_id: None, detail: detail() },
            ModelError::RefusedKey { key_id: Some("main".into()), detail: detail() },
            ModelError::UnknownModel { model: "m".into(), detail: detail() },
            ModelError::Refused { status: 400, detail: detail() },
            ModelError::Provider { detail: detail() },
            ModelError::Malformed { detail: detail() },
            ModelError::TooLarge { limit: 1 },
            ModelError::AskedToWait { wait: Duration::ZERO, limit: Duration::ZERO, detail: detail() },
            ModelError::GaveUp { attempts: 6, detail: detail(), class: FailureClass::Unavailable },
        ];
        for error in errors {
            assert_eq!(cause(&error.to_string()), error.code(), "{error}");
        }
        assert_eq!((cause(POISON), deaths(POISON)), ("poison", Some(MAX_TAKEOVERS)));
        let earlier = "poison: 4 workers died over this run";
        assert_eq!((cause(earlier), deaths(earlier)), ("poison", Some(4)));
        assert_eq!(cause("internal: illegal: x"), "internal");
        assert_eq!(cause("no API key \"x\" is configured on this worker"), "model_key_missing");
        assert_eq!((cause("something else"), deaths("something else")), ("other", None));
        assert!(CAUSES.iter().filter(|(_, name)| is_of_settings(name)).count() == 4);
    }
}
