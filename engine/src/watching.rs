//! Which events of another session a watch passes on.

use globset::{Glob, GlobMatcher};
use serde_json::Value;

use crate::mail::MailBody;

/// Kinds of events that can be watched. Progress isn't among them: it is read, not delivered.
pub const KINDS: [&str; 14] = [
    "session.created",
    "session.updated",
    "session.failed",
    "session.deleted",
    "run.started",
    "run.stopped",
    "calls.deferred",
    "tool.started",
    "tool.completed",
    "subcall.started",
    "subcall.completed",
    "subcall.failed",
    "hook.failed",
    "mail.accepted",
];

/// The longest glob, in bytes.
const GLOB_LIMIT: usize = 200;

/// What a watch passes on.
#[derive(Debug, Clone)]
pub struct Filter {
    kinds: Vec<String>,
    tool: Option<GlobMatcher>,
}

/// Why nothing can be watched for that.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FilterError {
    /// No kinds are named.
    #[error("name at least one kind of event: {}", KINDS.join(", "))]
    NoKinds,
    /// There is no such kind.
    #[error("there are no events {0:?}; there are {known}", known = KINDS.join(", "))]
    UnknownKind(String),
    /// The tool pattern is no glob.
    #[error("{pattern:?} is not a valid glob of tool names: {reason}")]
    Glob {
        /// What was given.
        pattern: String,
        /// Why it isn't one.
        reason: String,
    },
}

impl Filter {
    /// A filter for events of these kinds; of those that name a tool only the ones whose tool the glob matches.
    ///
    /// # Errors
    /// [`FilterError`] for what can match nothing.
    pub fn new(kinds: &[String], tool: Option<&str>) -> Result<Self, FilterError> {
        if kinds.is_empty() {
            return Err(FilterError::NoKinds);
        }
        if let Some(unknown) = kinds.iter().find(|kind| !KINDS.contains(&kind.as_str())) {
            return Err(FilterError::UnknownKind(unknown.chars().take(100).collect()));
        }
        let tool = tool.map(|pattern| {
            let bad = |reason: String| {
                let pattern = pattern.chars().take(GLOB_LIMIT).collect();
                FilterError::Glob { pattern, reason }
            };
            if pattern.len() > GLOB_LIMIT {
                return Err(bad(format!("it is longer than {GLOB_LIMIT} bytes")));
            }
            let glob = Glob::new(pattern).map_err(|error| bad(error.kind().to_string()))?;
            Ok(glob.compile_matcher())
        });
        Ok(Self { kinds: kinds.to_vec(), tool: tool.transpose()? })
    }

    /// Whether an event is passed on. That a watched event has been delivered never is: two sessions that
    /// watch each other's mail would write to each other for ever.
    pub fn matches(&self, kind: &str, body: &Value) -> bool {
        if !self.kinds.iter().any(|known| known == kind) {
            return false;
        }
        if kind == "mail.accepted" && body["mail"]["tag"] == MailBody::WATCHED_EVENT {
            return false;
        }
        match (&self.tool, body["tool"].as_str()) {
            (Some(glob), Some(tool)) => glob.is_match(tool),
            _ => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn filter(kinds: &[&str], tool: Option<&str>) -> Result<Filter, FilterError> {
        Filter::new(&kinds.iter().map(|kind| (*kind).to_owned()).collect::<Vec<_>>(), tool)
    }

    #[test]
    fn a_glob_picks_among_events_that_name_a_tool_and_no_others() {
        let filter = filter(&["run.stopped", "tool.completed"], Some("deploy_*")).expect("a filter");
        assert!(filter.matches("run.stopped", &json!({"status": "idle"})));
        assert!(filter.matches("tool.completed", &json!({"tool": "deploy_prod"})));
        assert!(!filter.matches("tool.completed", &json!({"tool": "fetch"})));
        assert!(!filter.matches("tool.started", &json!({"tool": "deploy_prod"})));
    }

    #[test]
    fn watched_events_are_not_watched() {
        let filter = filter(&["mail.accepted"], None).expect("a filter");
        assert!(filter.matches("mail.accepted", &json!({"mail": {"tag": "agentMessage"}})));
        assert!(!filter.matches("mail.accepted", &json!({"mail": {"tag": "watchedEvent"}})));
    }

    #[test]
    fn what_can_match_nothing_is_refused() {
        assert_eq!(filter(&[], None).err(), Some(FilterError::NoKinds));
        assert_eq!(filter(&["run.stoped"], None).err(), Some(FilterError::UnknownKind("run.stoped".into())));
        for glob in ["deploy_[", &"x".repeat(201)] {
            assert!(matches!(filter(&["run.stopped"], Some(glob)), Err(FilterError::Glob { .. })), "{glob}");
        }
    }
}
