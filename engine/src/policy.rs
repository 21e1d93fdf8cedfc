//! Which disposition a tool call gets, and what is wrapped around it.
//!
//! Of the rules of an agent the first that matches decides. Of its wrappers all that match apply, in the order
//! of the file, the first outermost: they become one [`Disposition::Decorate`] around what the rule says, which
//! is recorded with the call. What an `approve` says is decided here, from the arguments alone.

mod check;
mod config;
mod disposition;
mod predicate;
#[cfg(test)]
mod tests;

use globset::{Glob, GlobMatcher};
use serde_json::Value;

pub use check::{
    ATTACH_SECONDS, BACKOFF_MS, DEADLINE_SECONDS, HOOK_SECONDS, MAX_DECORATORS, MAX_NAME, MAX_PATH,
    MAX_REASON, MAX_WRAPPERS, PolicyError, RATE, RETRIES, TIMEOUT_SECONDS, TRUNCATE_BYTES, TTL_SECONDS,
};
pub use config::{MatchConfig, OnDeadline, PolicyConfig, RuleConfig, WrapperConfig};
pub use disposition::{
    DEFAULT_BACKOFF_MS, DEFAULT_HOOK_SECONDS, DEFAULT_TTL, Decorator, Disposition, Hook, Verdict,
};
pub use predicate::{MAX_PREDICATE, Predicate, arguments};

use crate::content::ToolResult;

/// What the model is told of a call that an `approve` without a message denies.
const DENIED: &str = "denied: the agent's policy doesn't allow this call with these arguments";

/// Why a call waits for an approval where an `approve` gives no reason.
const NEEDS_APPROVAL: &str = "this call needs an approval";

/// A policy made ready for matching.
#[derive(Debug, Clone)]
pub struct Policy {
    default: Base,
    rules: Vec<Rule>,
    wrappers: Vec<Wrapper>,
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
    /// Whether the tool only reads. It isn't stored with the call.
    pub read_only: bool,
    /// Seconds after which an open deferred call expires.
    pub deadline_seconds: Option<u64>,
    /// What an expired call is answered with; it fails without.
    pub on_deadline: Option<ToolResult>,
}

/// A disposition, and the approvals that were found in it.
#[derive(Debug, Clone)]
struct Base {
    disposition: Disposition,
    approvals: Vec<Approval>,
}

#[derive(Debug, Clone)]
struct Rule {
    tool: Pattern,
    base: Base,
    idempotent: bool,
    read_only: bool,
    deadline_seconds: Option<u64>,
    on_deadline: Option<ToolResult>,
}

#[derive(Debug, Clone)]
struct Wrapper {
    tool: Option<Pattern>,
    toolbox: Option<String>,
    args: Option<Predicate>,
    approvals: Vec<Approval>,
    decorators: Vec<Decorator>,
}

/// An `approve`, made ready.
#[derive(Debug, Clone)]
struct Approval {
    when: Predicate,
    then: Verdict,
    text: String,
}

/// A tool name, or a glob of tool names.
#[derive(Debug, Clone)]
enum Pattern {
    Exact(String),
    Glob(GlobMatcher),
}

impl Pattern {
    fn new(pattern: &str, place: &str) -> Result<Self, PolicyError> {
        if !pattern.contains(['*', '?', '[', '{']) {
            return Ok(Self::Exact(pattern.to_owned()));
        }
        let glob = Glob::new(pattern).map_err(|error| PolicyError::Glob {
            place: place.to_owned(),
            pattern: pattern.to_owned(),
            reason: error.kind().to_string(),
        })?;
        Ok(Self::Glob(glob.compile_matcher()))
    }

    fn matches(&self, tool: &str) -> bool {
        match self {
            Self::Exact(name) => name == tool,
            Self::Glob(glob) => glob.is_match(tool),
        }
    }
}

impl Policy {
    /// Checks a policy and makes it ready.
    ///
    /// # Errors
    /// See [`PolicyError`].
    pub fn new(config: &PolicyConfig) -> Result<Self, PolicyError> {
        check::policy(config)?;
        let rule = |(index, rule): (usize, &RuleConfig)| {
            let place = format!("rule {index}");
            Ok(Rule {
                tool: Pattern::new(&rule.tool, &place)?,
                base: Base::new(&rule.disposition, &place)?,
                idempotent: rule.may_repeat(),
                read_only: rule.read_only,
                deadline_seconds: rule.deadline_seconds,
                on_deadline: rule.on_deadline.answer().cloned(),
            })
        };
        let wrapper = |(index, wrapper): (usize, &WrapperConfig)| {
            let place = format!("wrapper {index}");
            let tool = wrapper.matches.tool.as_deref();
            let args = wrapper.matches.args.as_ref();
            let (decorators, approvals) = split(&wrapper.decorators, &place)?;
            Ok(Wrapper {
                tool: tool.map(|pattern| Pattern::new(pattern, &place)).transpose()?,
                toolbox: wrapper.matches.toolbox.clone(),
                args: args.map(|args| ready(args, &place, "match.args")).transpose()?,
                approvals,
                decorators,
            })
        };
        Ok(Self {
            default: Base::new(&config.default, "default")?,
            rules: config.rules.iter().enumerate().map(rule).collect::<Result<_, _>>()?,
            wrappers: config.wrappers.iter().enumerate().map(wrapper).collect::<Result<_, _>>()?,
        })
    }

    /// What the policy says of a call of `tool`; `arguments` is the text that the model wrote. Predicates
    /// don't hold for what isn't JSON.
    pub fn apply(&self, tool: &str, arguments: &str) -> Applied {
        self.judge(tool, predicate::arguments(arguments).as_ref())
    }

    /// What the policy says of a tool as long as nothing is known of arguments: no predicate holds.
    pub fn of_tool(&self, tool: &str) -> Applied {
        self.judge(tool, None)
    }

    /// Whether a wrapper, counting from 0, is for calls of `tool`, whatever their arguments.
    pub fn wraps(&self, wrapper: usize, tool: &str) -> bool {
        self.wrappers.get(wrapper).is_some_and(|wrapper| wrapper.is_for(tool))
    }

    fn judge(&self, tool: &str, arguments: Option<&Value>) -> Applied {
        let found = self.rules.iter().enumerate().find(|(_, rule)| rule.tool.matches(tool));
        let base = found.map_or(&self.default, |(_, rule)| &rule.base);
        let idempotent = found.is_some_and(|(_, rule)| rule.idempotent);
        let wrappers: Vec<&Wrapper> =
            self.wrappers.iter().filter(|wrapper| wrapper.is_for(tool) && wrapper.fits(arguments)).collect();
        let decorators: Vec<Decorator> = wrappers
            .iter()
            .flat_map(|wrapper| &wrapper.decorators)
            .filter(|decorator| idempotent || !decorator.retries())
            .cloned()
            .collect();
        let approvals = wrappers.iter().flat_map(|wrapper| &wrapper.approvals).chain(&base.approvals);
        let inner = if decorators.is_empty() {
            base.disposition.clone()
        } else {
            Disposition::Decorate { decorators, inner: Box::new(base.disposition.clone()) }
        };
        Applied {
            disposition: gated(inner, approvals, arguments),
            decided_by: found.map_or_else(|| "default".to_owned(), |(index, _)| format!("rule:{index}")),
            idempotent,
            read_only: found.is_some_and(|(_, rule)| rule.read_only),
            deadline_seconds: found.and_then(|(_, rule)| rule.deadline_seconds),
            on_deadline: found.and_then(|(_, rule)| rule.on_deadline.clone()),
        }
    }
}

impl Base {
    fn new(disposition: &Disposition, place: &str) -> Result<Self, PolicyError> {
        let Disposition::Decorate { decorators, inner } = disposition else {
            return Ok(Self { disposition: disposition.clone(), approvals: Vec::new() });
        };
        let (decorators, mut approvals) = split(decorators, place)?;
        let inner = Self::new(inner, place)?;
        approvals.extend(inner.approvals);
        let disposition = if decorators.is_empty() {
            inner.disposition
        } else {
            Disposition::Decorate { decorators, inner: Box::new(inner.disposition) }
        };
        Ok(Self { disposition, approvals })
    }
}

impl Wrapper {
    fn is_for(&self, tool: &str) -> bool {
        let of_toolbox = |toolbox: &String| {
            tool.strip_prefix(toolbox.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with('_'))
        };
        self.tool.as_ref().is_none_or(|pattern| pattern.matches(tool))
            && self.toolbox.as_ref().is_none_or(of_toolbox)
    }

    fn fits(&self, arguments: Option<&Value>) -> bool {
        self.args.as_ref().is_none_or(|args| arguments.is_some_and(|arguments| args.holds(arguments)))
    }
}

/// A denial needs nobody's approval any more; several approvals are one, with all reasons.
fn gated<'a>(
    inner: Disposition,
    approvals: impl Iterator<Item = &'a Approval>,
    arguments: Option<&Value>,
) -> Disposition {
    let Some(arguments) = arguments else { return inner };
    let holding: Vec<&Approval> = approvals.filter(|approval| approval.when.holds(arguments)).collect();
    if let Some(denial) = holding.iter().find(|approval| approval.then == Verdict::Deny) {
        return Disposition::Deny { message: denial.text.clone() };
    }
    let mut reasons: Vec<&str> = Vec::new();
    for approval in &holding {
        if !reasons.contains(&approval.text.as_str()) {
            reasons.push(&approval.text);
        }
    }
    if reasons.is_empty() {
        return inner;
    }
    Disposition::Approve { reason: reasons.join("; "), inner: Box::new(inner) }
}

/// Approvals apart from all other decorators.
fn split(decorators: &[Decorator], place: &str) -> Result<(Vec<Decorator>, Vec<Approval>), PolicyError> {
    let (mut others, mut approvals) = (Vec::new(), Vec::new());
    for (index, decorator) in decorators.iter().enumerate() {
        match decorator {
            Decorator::Approve { when, then, message, reason } => {
                let when = ready(when, &format!("{place}, decorator {index} (approve)"), "when")?;
                let (given, default) = match then {
                    Verdict::Deny => (message, DENIED),
                    Verdict::Defer => (reason, NEEDS_APPROVAL),
                };
                let text = given.clone().unwrap_or_else(|| default.to_owned());
                approvals.push(Approval { when, then: *then, text });
            }
            other => others.push(other.clone()),
        }
    }
    Ok((others, approvals))
}

fn ready(predicate: &Value, place: &str, field: &'static str) -> Result<Predicate, PolicyError> {
    Predicate::new(predicate).map_err(|reason| PolicyError::Predicate {
        place: place.to_owned(),
        field,
        reason,
    })
}
