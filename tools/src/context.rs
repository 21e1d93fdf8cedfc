//! What a call runs in, and the environment variables that tell the program of it.

use std::time::Duration;

use holdfast_engine::ids::{CallId, SessionId, TurnId};
use sha2::{Digest, Sha256};
use uuid::Uuid;

/// The longest `NAME=value` that Linux passes to a program, in bytes with its terminator
/// (`MAX_ARG_STRLEN` with pages of 4 KiB).
pub(crate) const MAX_STRING: usize = 128 * 1024;

/// The environment of one call.
#[derive(Debug, Clone)]
pub struct CallContext {
    /// `AGENT_SESSION_ID` and `AGENT_CONVERSATION_ID`.
    pub session_id: SessionId,
    /// `AGENT_TURN_ID`: the turn that asks.
    pub turn_id: TurnId,
    /// `HOLDFAST_IDEMPOTENCY_KEY`: the same at every attempt of the call.
    pub call_id: CallId,
    /// `AGENT_AGENT_ID`: see [`agent_id`].
    pub agent_id: Uuid,
    /// `HOLDFAST_IDEMPOTENT`, `true` or `false`: whether the call may be started again under its key.
    pub idempotent: bool,
    /// `AGENT_SESSION_JSON`, where the agent asks for it. A session longer than Linux lets a variable
    /// be (128 KiB) is left out, like one that isn't given.
    pub session_json: Option<String>,
    /// `TRACEPARENT`: W3C trace context.
    pub traceparent: Option<String>,
    /// How long the program may run; for ever when absent.
    pub timeout: Option<Duration>,
}

impl CallContext {
    /// The variables, with their values.
    pub(crate) fn variables(&self) -> Vec<(String, String)> {
        let session = self.session_id.to_string();
        let mut variables = vec![
            ("AGENT_CONVERSATION_ID".to_owned(), session.clone()),
            ("AGENT_SESSION_ID".to_owned(), session),
            ("AGENT_TURN_ID".to_owned(), self.turn_id.to_string()),
            ("AGENT_AGENT_ID".to_owned(), self.agent_id.to_string()),
            ("HOLDFAST_IDEMPOTENCY_KEY".to_owned(), self.call_id.to_string()),
            ("HOLDFAST_IDEMPOTENT".to_owned(), self.idempotent.to_string()),
        ];
        if let Some(traceparent) = &self.traceparent {
            variables.push(("TRACEPARENT".to_owned(), traceparent.clone()));
        }
        if let Some(json) = &self.session_json {
            let name = "AGENT_SESSION_JSON";
            if name.len() + json.len() + 2 <= MAX_STRING {
                variables.push((name.to_owned(), json.clone()));
            } else {
                tracing::warn!(session_id = %self.session_id, bytes = json.len(), "session too long for a variable, left out");
            }
        }
        variables
    }
}

/// The id of an agent's revision: the same for the same slug and revision, everywhere.
pub fn agent_id(slug: &str, revision: &str) -> Uuid {
    derived(["holdfast agent", slug, revision])
}

/// The idempotency key of a hook of a call: the same at every attempt, and another one than the call's and
/// those of its other hooks. `place` tells the hooks of a call apart.
pub fn hook_id(call: CallId, place: &str) -> CallId {
    CallId(derived(["holdfast hook", &call.to_string(), place]))
}

fn derived(parts: [&str; 3]) -> Uuid {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part.as_bytes());
    }
    let digest = hash.finalize();
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&digest[..16]);
    uuid::Builder::from_custom_bytes(bytes).into_uuid()
}

/// Whether a variable of the worker's own environment is kept from programs: Holdfast's settings,
/// which hold credentials, and the context of a call that the worker itself may run in.
pub(crate) fn is_withheld(variable: &str) -> bool {
    variable.starts_with("HOLDFAST_")
        || variable.starts_with("AGENT_")
            && ["SESSION_ID", "CONVERSATION_ID", "TURN_ID", "AGENT_ID", "SESSION_JSON"]
                .contains(&&variable["AGENT_".len()..])
        || matches!(variable, "DATABASE_URL" | "TRACEPARENT" | "TRACESTATE")
}

/// Whether a variable can't be an argument: the context above, and what decides which code runs.
pub(crate) fn is_reserved(variable: &str) -> bool {
    is_withheld(variable) && variable != "DATABASE_URL"
        || matches!(variable, "PATH" | "IFS" | "BASH_ENV" | "SHELLOPTS" | "BASHOPTS")
        || variable.starts_with("LD_")
        || variable.starts_with("DYLD_")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agent_ids_tell_revisions_apart_and_never_change() {
        let id = agent_id("writer", "0123456789abcdef");
        assert_eq!(id, agent_id("writer", "0123456789abcdef"));
        assert_ne!(id, agent_id("writer", "0123456789abcdee"));
        assert_ne!(agent_id("ab", "c"), agent_id("a", "bc"));
        assert_eq!(id.get_version_num(), 8);
    }

    #[test]
    fn a_session_that_no_variable_holds_is_left_out() {
        let mut context = CallContext {
            session_id: Uuid::nil().into(),
            turn_id: Uuid::nil().into(),
            call_id: Uuid::nil().into(),
            agent_id: Uuid::nil(),
            idempotent: false,
            session_json: Some("x".repeat(MAX_STRING - "AGENT_SESSION_JSON".len() - 2)),
            traceparent: None,
            timeout: None,
        };
        let has = |c: &CallContext| c.variables().iter().any(|(name, _)| name == "AGENT_SESSION_JSON");
        assert!(has(&context));
        context.session_json = context.session_json.map(|json| json + "x");
        assert!(!has(&context));
    }

    #[test]
    fn settings_are_withheld_and_loaders_reserved() {
        assert!(is_withheld("HOLDFAST_API_KEYS") && is_withheld("DATABASE_URL"));
        assert!(is_withheld("AGENT_SESSION_JSON") && !is_withheld("AGENT_NAME") && !is_withheld("PATH"));
        assert!(is_reserved("PATH") && is_reserved("LD_PRELOAD") && !is_reserved("DATABASE_URL"));
    }
}
