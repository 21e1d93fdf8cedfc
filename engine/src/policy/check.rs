//! What a policy may say: every number has its bounds, and what is wrong is named with its place.

use std::ops::RangeInclusive;

use super::{
    config::{PolicyConfig, RuleConfig, WrapperConfig},
    disposition::{Decorator, Disposition, Hook, Verdict},
};
use crate::content::{MAX_DEPTH, ToolResult};

/// Wrappers that a policy may have.
pub const MAX_WRAPPERS: usize = 64;
/// Decorators that all wrappers of a policy may have together, and those of one disposition.
pub const MAX_DECORATORS: usize = 128;
/// Seconds of a call's timeout: a week.
pub const TIMEOUT_SECONDS: RangeInclusive<u64> = 1..=604_800;
/// Attempts after the first.
pub const RETRIES: RangeInclusive<u32> = 0..=20;
/// Milliseconds before the second attempt.
pub const BACKOFF_MS: RangeInclusive<u64> = 0..=60_000;
/// Seconds for which a result is kept: up to a week.
pub const TTL_SECONDS: RangeInclusive<u64> = 1..=604_800;
/// Bytes of a result's text that are kept.
pub const TRUNCATE_BYTES: RangeInclusive<u64> = 256..=1_048_576;
/// Seconds that a hook's answer may take.
pub const HOOK_SECONDS: RangeInclusive<u64> = 1..=600;
/// Calls a minute, and calls at once.
pub const RATE: RangeInclusive<u32> = 1..=60_000;
/// Seconds that a run waits for an attached call: up to a day.
pub const ATTACH_SECONDS: RangeInclusive<u64> = 0..=86_400;
/// Seconds until an open deferred call expires: up to ten years.
pub const DEADLINE_SECONDS: RangeInclusive<u64> = 1..=315_360_000;
/// Bytes of a label or a cache key.
pub const MAX_NAME: usize = 200;
/// Bytes of an approval's message or reason.
pub const MAX_REASON: usize = 1_000;
/// Bytes of a hook's path or tool.
pub const MAX_PATH: usize = 4_096;

/// Why a policy can't be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    /// A tool pattern is no glob.
    #[error("toolCallPolicyConfig: {place}: {pattern:?} is not a valid glob: {reason}")]
    Glob {
        /// `rule N` or `wrapper N`.
        place: String,
        /// The pattern.
        pattern: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Retries on a tool that nobody calls idempotent would start it twice.
    #[error("toolCallPolicyConfig: {place}: retries need a rule with `idempotent: true` or `readOnly: true`")]
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
    /// A disposition that only an `approve` can give.
    #[error("toolCallPolicyConfig: {place}: a disposition can't be {tag:?}; use a decorator `approve`")]
    Internal {
        /// `default` or `rule N`.
        place: String,
        /// The disposition's tag, as it is written.
        tag: &'static str,
    },
    /// A number or a length is out of range.
    #[error("toolCallPolicyConfig: {place}: {field} must be {range}")]
    OutOfRange {
        /// Where, such as `wrapper 2, decorator 0 (retries)`.
        place: String,
        /// The field.
        field: &'static str,
        /// What it may be.
        range: String,
    },
    /// A predicate on arguments can't be used.
    #[error("toolCallPolicyConfig: {place}: {field}: {reason}")]
    Predicate {
        /// Where.
        place: String,
        /// The field.
        field: &'static str,
        /// What is wrong with it.
        reason: String,
    },
}

/// Checks what a policy says, apart from globs and predicates, which are checked as they are made ready.
pub(super) fn policy(config: &PolicyConfig) -> Result<(), PolicyError> {
    disposition(&config.default, false, "default")?;
    for (index, one) in config.rules.iter().enumerate() {
        rule(one, &format!("rule {index}"))?;
    }
    within("wrappers", "wrappers", config.wrappers.len(), &(0..=MAX_WRAPPERS), "in all")?;
    let all = config.wrappers.iter().map(|wrapper| wrapper.decorators.len()).sum();
    within("wrappers", "decorators", all, &(0..=MAX_DECORATORS), "in all")?;
    for (index, one) in config.wrappers.iter().enumerate() {
        wrapper(one, &format!("wrapper {index}"))?;
    }
    Ok(())
}

fn rule(rule: &RuleConfig, place: &str) -> Result<(), PolicyError> {
    disposition(&rule.disposition, rule.may_repeat(), place)?;
    if rule.on_deadline.answer().is_some_and(ToolResult::is_too_deep) {
        let range = format!("nested at most {MAX_DEPTH} levels deep");
        return Err(PolicyError::OutOfRange { place: place.to_owned(), field: "onDeadline", range });
    }
    match rule.deadline_seconds {
        Some(seconds) => within(place, "deadlineSeconds", seconds, &DEADLINE_SECONDS, ""),
        None => Ok(()),
    }
}

fn wrapper(wrapper: &WrapperConfig, place: &str) -> Result<(), PolicyError> {
    if let Some(toolbox) = &wrapper.matches.toolbox {
        let plain = !toolbox.is_empty()
            && toolbox.len() <= MAX_NAME
            && toolbox.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        if !plain {
            let range = "letters, digits and `_`, as tool names begin".to_owned();
            return Err(PolicyError::OutOfRange { place: place.to_owned(), field: "match.toolbox", range });
        }
    }
    decorators(&wrapper.decorators, place)
}

fn disposition(disposition: &Disposition, idempotent: bool, place: &str) -> Result<(), PolicyError> {
    if !idempotent && disposition.decorators().any(Decorator::retries) {
        return Err(PolicyError::RetriesWithoutIdempotence { place: place.to_owned() });
    }
    let mut current = disposition;
    while let Disposition::Decorate { decorators: list, inner } = current {
        decorators(list, place)?;
        current = inner;
    }
    within(place, "decorators", disposition.decorators().count(), &(0..=MAX_DECORATORS), "in all")?;
    let place = || place.to_owned();
    match current {
        Disposition::RunAsync { attach_seconds: Some(seconds) } => {
            within(&place(), "attachSeconds", *seconds, &ATTACH_SECONDS, "")
        }
        Disposition::RunSync | Disposition::RunAsync { .. } | Disposition::Defer { .. } => Ok(()),
        Disposition::RunIsolated { .. } | Disposition::Decorate { .. } => {
            Err(PolicyError::Unsupported { place: place(), tag: current.tag() })
        }
        Disposition::Deny { .. } => Err(PolicyError::Internal { place: place(), tag: "deny" }),
        Disposition::Approve { .. } => Err(PolicyError::Internal { place: place(), tag: "approve" }),
    }
}

fn decorators(decorators: &[Decorator], place: &str) -> Result<(), PolicyError> {
    for (index, one) in decorators.iter().enumerate() {
        decorator(one, &format!("{place}, decorator {index} ({})", one.tag()))?;
    }
    Ok(())
}

fn decorator(decorator: &Decorator, place: &str) -> Result<(), PolicyError> {
    match decorator {
        Decorator::WithTimeout { contents } => within(place, "contents", *contents, &TIMEOUT_SECONDS, ""),
        Decorator::Timeout { seconds } => within(place, "seconds", *seconds, &TIMEOUT_SECONDS, ""),
        Decorator::WithRetries { contents } => within(place, "contents", *contents, &RETRIES, ""),
        Decorator::Retries { count, backoff_ms } => {
            within(place, "count", *count, &RETRIES, "")?;
            within(place, "backoffMs", *backoff_ms, &BACKOFF_MS, "")
        }
        Decorator::WithCacheKey { contents } | Decorator::WithLabel { contents } => {
            within(place, "contents", contents.len(), &(1..=MAX_NAME), "bytes")
        }
        Decorator::Cache { ttl_seconds, key } => {
            within(place, "ttlSeconds", *ttl_seconds, &TTL_SECONDS, "")?;
            key.as_ref().map_or(Ok(()), |key| within(place, "key", key.len(), &(1..=MAX_NAME), "bytes"))
        }
        Decorator::Label { text } => within(place, "text", text.len(), &(1..=MAX_NAME), "bytes"),
        Decorator::Truncate { max_bytes } => within(place, "maxBytes", *max_bytes, &TRUNCATE_BYTES, ""),
        Decorator::Before { hook, timeout_seconds } | Decorator::After { hook, timeout_seconds } => {
            let (Hook::Command(target) | Hook::Tool(target)) = hook;
            within(place, "hook", target.len(), &(1..=MAX_PATH), "bytes")?;
            timeout_seconds
                .map_or(Ok(()), |seconds| within(place, "timeoutSeconds", seconds, &HOOK_SECONDS, ""))
        }
        Decorator::Approve { then, message, reason, .. } => {
            let (text, other) = match then {
                Verdict::Deny => (("message", message), ("reason", reason)),
                Verdict::Defer => (("reason", reason), ("message", message)),
            };
            if other.1.is_some() {
                let range = format!("absent here: the text is {:?}", text.0);
                return Err(PolicyError::OutOfRange { place: place.to_owned(), field: other.0, range });
            }
            let length = text.1.as_ref().map_or(1, String::len);
            within(place, text.0, length, &(1..=MAX_REASON), "bytes")
        }
        Decorator::RateLimit { per_minute, burst } => {
            within(place, "perMinute", *per_minute, &RATE, "")?;
            burst.map_or(Ok(()), |burst| within(place, "burst", burst, &RATE, ""))
        }
    }
}

fn within<N: PartialOrd + std::fmt::Display>(
    place: &str,
    field: &'static str,
    number: N,
    range: &RangeInclusive<N>,
    unit: &str,
) -> Result<(), PolicyError> {
    if range.contains(&number) {
        return Ok(());
    }
    let range = format!("{} to {} {unit}", range.start(), range.end()).trim_end().to_owned();
    Err(PolicyError::OutOfRange { place: place.to_owned(), field, range })
}
