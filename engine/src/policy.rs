//! Which disposition a tool call gets: rules of an agent, first match wins.

use globset::{Glob, GlobMatcher};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// How a tool call is handled.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "tag", rename_all = "camelCase")]
pub enum Disposition {
    /// In the worker; the run waits for it.
    RunSync,
    /// In the worker; the conversation may go on meanwhile.
    #[serde(rename_all = "camelCase")]
    RunAsync {
        /// Seconds that the run waits before it goes on without the result.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        attach_seconds: Option<u64>,
    },
    /// In a process or container of its own.
    RunIsolated {
        /// Where and how.
        #[serde(default)]
        spec: Value,
    },
    /// Outside, by token.
    Defer {
        /// Why, for the person or program that completes the call.
        #[serde(default)]
        reason: String,
    },
    /// Another disposition, changed.
    Decorate {
        /// What is changed.
        decorators: Vec<Decorator>,
        /// What is decorated.
        inner: Box<Disposition>,
    },
}

/// A change to a disposition.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "tag", content = "contents", rename_all = "camelCase")]
pub enum Decorator {
    /// Seconds after which the call is ended as failed.
    WithTimeout(u64),
    /// How many more attempts a failed call of an idempotent tool gets.
    WithRetries(u32),
    /// A name under which results may be shared.
    WithCacheKey(String),
    /// A label for people.
    WithLabel(String),
}

impl Disposition {
    /// The tag of the disposition without its decorators, as views show it.
    pub fn tag(&self) -> &'static str {
        match self {
            Self::RunSync => "runSync",
            Self::RunAsync { .. } => "runAsync",
            Self::RunIsolated { .. } => "runIsolated",
            Self::Defer { .. } => "defer",
            Self::Decorate { inner, .. } => inner.tag(),
        }
    }

    /// The disposition under all decorators.
    pub fn base(&self) -> &Disposition {
        match self {
            Self::Decorate { inner, .. } => inner.base(),
            other => other,
        }
    }

    /// The innermost call timeout in seconds that a decorator sets.
    pub fn timeout_seconds(&self) -> Option<u64> {
        self.decorators().find_map(|decorator| match decorator {
            Decorator::WithTimeout(seconds) => Some(*seconds),
            _ => None,
        })
    }

    /// How many more attempts a decorator grants.
    pub fn retries(&self) -> u32 {
        let granted = self.decorators().find_map(|decorator| match decorator {
            Decorator::WithRetries(n) => Some(*n),
            _ => None,
        });
        granted.unwrap_or(0)
    }

    fn decorators(&self) -> impl Iterator<Item = &Decorator> {
        let mut layers = Vec::new();
        let mut current = self;
        while let Self::Decorate { decorators, inner } = current {
            layers.push(decorators);
            current = inner;
        }
        layers.into_iter().rev().flatten()
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
    /// Seconds after which an open deferred call expires.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_seconds: Option<u64>,
}

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
}

fn run_sync() -> Disposition {
    Disposition::RunSync
}

impl Default for PolicyConfig {
    fn default() -> Self {
        Self { default: run_sync(), rules: Vec::new() }
    }
}

/// A policy made ready for matching.
#[derive(Debug, Clone)]
pub struct Policy {
    default: Disposition,
    rules: Vec<(Option<GlobMatcher>, RuleConfig)>,
}

/// What a policy says of one call.
#[derive(Debug, Clone, PartialEq)]
pub struct Applied {
    /// The disposition.
    pub disposition: Disposition,
    /// What decided: `default` or `rule:N`, N counting from 0.
    pub decided_by: String,
    /// Whether the tool may run again for the same call.
    pub idempotent: bool,
    /// Seconds after which an open deferred call expires.
    pub deadline_seconds: Option<u64>,
}

/// Why a policy can't be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    /// A rule's tool pattern is no glob.
    #[error("toolCallPolicyConfig: rule {rule}: {pattern:?} is not a valid glob: {reason}")]
    Glob {
        /// The rule's index.
        rule: usize,
        /// The pattern.
        pattern: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Retries on a tool that nobody calls idempotent would start it twice.
    #[error("toolCallPolicyConfig: {place}: retries need a rule with `idempotent: true`")]
    RetriesWithoutIdempotence {
        /// `default` or `rule N`.
        place: String,
    },
    /// A disposition that this build can't carry out.
    #[error("toolCallPolicyConfig: {place}: disposition {tag:?} is not supported yet; use runSync or defer")]
    Unsupported {
        /// `default` or `rule N`.
        place: String,
        /// The disposition's tag.
        tag: &'static str,
    },
}

impl Policy {
    /// Checks a policy and makes it ready.
    ///
    /// # Errors
    /// See [`PolicyError`].
    pub fn new(config: &PolicyConfig) -> Result<Self, PolicyError> {
        check(&config.default, false, || "default".to_owned())?;
        let mut rules = Vec::with_capacity(config.rules.len());
        for (index, rule) in config.rules.iter().enumerate() {
            check(&rule.disposition, rule.idempotent, || format!("rule {index}"))?;
            let is_glob = rule.tool.contains(['*', '?', '[', '{']);
            let matcher = if is_glob {
                let glob = Glob::new(&rule.tool).map_err(|error| PolicyError::Glob {
                    rule: index,
                    pattern: rule.tool.clone(),
                    reason: error.kind().to_string(),
                })?;
                Some(glob.compile_matcher())
            } else {
                None
            };
            rules.push((matcher, rule.clone()));
        }
        Ok(Self { default: config.default.clone(), rules })
    }

    /// What the policy says of a call of `tool`.
    pub fn apply(&self, tool: &str) -> Applied {
        let matching = self.rules.iter().enumerate().find(|(_, (glob, rule))| match glob {
            Some(glob) => glob.is_match(tool),
            None => rule.tool == tool,
        });
        match matching {
            Some((index, (_, rule))) => Applied {
                disposition: rule.disposition.clone(),
                decided_by: format!("rule:{index}"),
                idempotent: rule.idempotent,
                deadline_seconds: rule.deadline_seconds,
            },
            None => Applied {
                disposition: self.default.clone(),
                decided_by: "default".to_owned(),
                idempotent: false,
                deadline_seconds: None,
            },
        }
    }
}

fn check(disposition: &Disposition, idempotent: bool, place: impl Fn() -> String) -> Result<(), PolicyError> {
    if disposition.retries() > 0 && !idempotent {
        return Err(PolicyError::RetriesWithoutIdempotence { place: place() });
    }
    match disposition.base() {
        Disposition::RunSync | Disposition::Defer { .. } => Ok(()),
        other => Err(PolicyError::Unsupported { place: place(), tag: other.tag() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(json: &str) -> Result<Policy, PolicyError> {
        Policy::new(&serde_json::from_str(json).expect("policy JSON"))
    }

    #[test]
    fn the_first_matching_rule_decides() {
        let policy = policy(
            r#"{"default": {"tag": "runSync"}, "rules": [
                {"tool": "fetch_b", "disposition": {"tag": "defer", "reason": "exact"}, "deadlineSeconds": 5},
                {"tool": "fetch_*", "disposition": {"tag": "defer", "reason": "glob"}}]}"#,
        )
        .expect("a valid policy");
        let exact = policy.apply("fetch_b");
        assert_eq!(exact.decided_by, "rule:0");
        assert_eq!(exact.deadline_seconds, Some(5));
        assert_eq!(policy.apply("fetch_c").disposition, Disposition::Defer { reason: "glob".into() });
        assert_eq!(policy.apply("other").decided_by, "default");
    }

    #[test]
    fn decorators_are_read_from_the_inside_out() {
        let d: Disposition = serde_json::from_str(
            r#"{"tag": "decorate", "decorators": [{"tag": "withTimeout", "contents": 30}],
                "inner": {"tag": "decorate", "decorators": [{"tag": "withTimeout", "contents": 5}], "inner": {"tag": "runSync"}}}"#,
        )
        .expect("a disposition");
        assert_eq!(d.timeout_seconds(), Some(5));
        assert_eq!(d.tag(), "runSync");
    }

    #[test]
    fn retries_need_idempotence() {
        let with = |idempotent: bool| {
            policy(&format!(
                r#"{{"rules": [{{"tool": "t", "idempotent": {idempotent}, "disposition":
                    {{"tag": "decorate", "decorators": [{{"tag": "withRetries", "contents": 2}}], "inner": {{"tag": "runSync"}}}}}}]}}"#
            ))
        };
        assert!(with(true).is_ok());
        assert_eq!(
            with(false).map(|_| ()),
            Err(PolicyError::RetriesWithoutIdempotence { place: "rule 0".into() })
        );
    }

    #[test]
    fn a_broken_glob_is_named() {
        let error = policy(r#"{"rules": [{"tool": "a[", "disposition": {"tag": "runSync"}}]}"#).map(|_| ());
        assert!(matches!(error, Err(PolicyError::Glob { rule: 0, .. })), "{error:?}");
    }
}
