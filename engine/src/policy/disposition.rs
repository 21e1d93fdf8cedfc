//! How a call is handled, and what is wrapped around it.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// How a tool call is handled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
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
        /// What is changed, outermost first.
        decorators: Vec<Decorator>,
        /// What is decorated.
        inner: Box<Disposition>,
    },
    /// Not at all: an `approve` whose predicate holds says so. No agent file can.
    Deny {
        /// The call's failure, for the model.
        message: String,
    },
    /// First outside, by token, where somebody approves it: an `approve` whose predicate holds says so. No
    /// agent file can.
    Approve {
        /// Why, for whoever decides.
        reason: String,
        /// How the call is handled once it is approved.
        inner: Box<Disposition>,
    },
}

/// What is wrapped around a call. The first four are an older way to write those that follow.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "tag", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Decorator {
    /// As [`Decorator::Timeout`].
    WithTimeout {
        /// Seconds.
        contents: u64,
    },
    /// How many more attempts a failed call of an idempotent tool gets. Between them the call is stored as
    /// ready; [`Decorator::Retries`] tries again within one attempt.
    WithRetries {
        /// Attempts after the first.
        contents: u32,
    },
    /// As [`Decorator::Cache`] with a key, for [`DEFAULT_TTL`] seconds.
    #[serde(alias = "withCache")]
    WithCacheKey {
        /// The key.
        contents: String,
    },
    /// As [`Decorator::Label`].
    WithLabel {
        /// The text.
        contents: String,
    },
    /// The call is ended as failed after a time.
    Timeout {
        /// Seconds.
        seconds: u64,
    },
    /// A failed call of an idempotent tool is tried again.
    Retries {
        /// Attempts after the first.
        count: u32,
        /// Milliseconds before the second attempt; doubled before each further one.
        #[serde(default = "default_backoff_ms")]
        backoff_ms: u64,
    },
    /// Results of earlier calls with the same arguments are given again.
    Cache {
        /// For how many seconds.
        #[serde(default = "default_ttl")]
        ttl_seconds: u64,
        /// A name under which tools and agents of one owner share results; each has its own without.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        key: Option<String>,
    },
    /// A label for people.
    Label {
        /// The label.
        text: String,
    },
    /// The text of a result is cut.
    Truncate {
        /// Bytes that are kept at the most.
        max_bytes: u64,
    },
    /// Somebody is asked before the call begins.
    Before {
        /// Who.
        hook: Hook,
        /// Seconds that the answer may take; [`DEFAULT_HOOK_SECONDS`] unless it is set.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        timeout_seconds: Option<u64>,
    },
    /// Somebody is told how the call ended, and may change its result.
    After {
        /// Who.
        hook: Hook,
        /// Seconds that the answer may take; [`DEFAULT_HOOK_SECONDS`] unless it is set.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        timeout_seconds: Option<u64>,
    },
    /// Calls with such arguments are denied, or wait for somebody's approval.
    Approve {
        /// A predicate on the arguments.
        when: Value,
        /// What becomes of a call for which it holds.
        then: Verdict,
        /// What the model is told of a denied call.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        message: Option<String>,
        /// Why a call waits, for whoever decides.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    /// Calls of a tool begin no faster than this, all those of one owner together.
    RateLimit {
        /// Calls a minute.
        per_minute: u32,
        /// Calls that may begin at once after a silence; `per_minute` unless it is set.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        burst: Option<u32>,
    },
}

/// For how many seconds results are cached that say nothing of it.
pub const DEFAULT_TTL: u64 = 3_600;

/// Milliseconds between the first two attempts that say nothing of it.
pub const DEFAULT_BACKOFF_MS: u64 = 500;

/// Seconds that a hook's answer may take that says nothing of it.
pub const DEFAULT_HOOK_SECONDS: u64 = 30;

fn default_ttl() -> u64 {
    DEFAULT_TTL
}

fn default_backoff_ms() -> u64 {
    DEFAULT_BACKOFF_MS
}

/// Whom a hook asks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Hook {
    /// A program, relative to the agent file.
    Command(String),
    /// A tool of the agent, by the name that the model uses.
    Tool(String),
}

/// What an `approve` does with a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// It fails.
    Deny,
    /// It waits for an approval by token.
    Defer,
}

impl Disposition {
    /// The tag of the disposition without its decorators, as views show it. A call that waits for an approval
    /// is shown as deferred.
    pub fn tag(&self) -> &'static str {
        match self {
            Self::RunSync => "runSync",
            Self::RunAsync { .. } => "runAsync",
            Self::RunIsolated { .. } => "runIsolated",
            Self::Defer { .. } | Self::Approve { .. } => "defer",
            Self::Decorate { inner, .. } => inner.tag(),
            Self::Deny { .. } => "deny",
        }
    }

    /// The disposition under all decorators.
    pub fn base(&self) -> &Disposition {
        match self {
            Self::Decorate { inner, .. } => inner.base(),
            other => other,
        }
    }

    /// Whether a call of a tool that only reads has no effect at all: it runs here, and nobody is asked or told of it,
    /// nor is it counted.
    pub fn is_silent(&self) -> bool {
        let silent = |decorator: &Decorator| {
            !matches!(
                decorator,
                Decorator::Before { .. }
                    | Decorator::After { .. }
                    | Decorator::Approve { .. }
                    | Decorator::RateLimit { .. }
            )
        };
        matches!(self.base(), Self::RunSync) && self.decorators().all(silent)
    }

    /// The decorators, outermost first.
    pub fn decorators(&self) -> impl Iterator<Item = &Decorator> {
        let mut layers = Vec::new();
        let mut current = self;
        while let Self::Decorate { decorators, inner } = current {
            layers.push(decorators);
            current = inner;
        }
        layers.into_iter().flatten()
    }

    /// The shortest call timeout in seconds that a decorator sets.
    pub fn timeout_seconds(&self) -> Option<u64> {
        self.decorators()
            .filter_map(|decorator| match decorator {
                Decorator::WithTimeout { contents: seconds } | Decorator::Timeout { seconds } => {
                    Some(*seconds)
                }
                _ => None,
            })
            .min()
    }

    /// How many more attempts the innermost [`Decorator::WithRetries`] grants. Attempts within one attempt,
    /// [`Decorator::Retries`], don't count.
    pub fn retries(&self) -> u32 {
        let granted = self.decorators().filter_map(|decorator| match decorator {
            Decorator::WithRetries { contents } => Some(*contents),
            _ => None,
        });
        granted.last().unwrap_or(0)
    }

    /// The innermost label.
    pub fn label(&self) -> Option<&str> {
        let labels = self.decorators().filter_map(|decorator| match decorator {
            Decorator::WithLabel { contents: text } | Decorator::Label { text } => Some(text.as_str()),
            _ => None,
        });
        labels.last()
    }
}

impl Decorator {
    /// Whether it tries failed calls again.
    pub(super) fn retries(&self) -> bool {
        match self {
            Self::WithRetries { contents: count } | Self::Retries { count, .. } => *count > 0,
            _ => false,
        }
    }

    /// Its tag, as agent files write it.
    pub fn tag(&self) -> &'static str {
        match self {
            Self::WithTimeout { .. } => "withTimeout",
            Self::WithRetries { .. } => "withRetries",
            Self::WithCacheKey { .. } => "withCacheKey",
            Self::WithLabel { .. } => "withLabel",
            Self::Timeout { .. } => "timeout",
            Self::Retries { .. } => "retries",
            Self::Cache { .. } => "cache",
            Self::Label { .. } => "label",
            Self::Truncate { .. } => "truncate",
            Self::Before { .. } => "before",
            Self::After { .. } => "after",
            Self::Approve { .. } => "approve",
            Self::RateLimit { .. } => "rateLimit",
        }
    }
}
