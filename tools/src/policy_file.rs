//! What is odd in an agent file's policy, in words: fields that have no effect, and rules and wrappers that
//! reach nothing.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use holdfast_engine::{
    policy::{Decorator, Disposition, Hook, Policy, PolicyConfig, PolicyError},
    tool::ToolSpec,
};
use serde_json::Value;

/// Looks at one object of the file: its place, the object, and the fields that it may have.
type Look<'a> = dyn FnMut(String, &Value, &[&str]) + 'a;

/// Looks at every object of a policy.
pub(crate) fn look_at(policy: &Value, look: &mut Look<'_>) {
    let top = "toolCallPolicyConfig";
    look(top.to_owned(), policy, &["default", "rules", "wrappers"]);
    disposition(format!("{top}.default"), &policy["default"], look);
    for (index, rule) in items(&policy["rules"]) {
        let place = format!("{top}.rules[{index}]");
        disposition(format!("{place}.disposition"), &rule["disposition"], look);
        look(
            place,
            rule,
            &["tool", "disposition", "idempotent", "readOnly", "deadlineSeconds", "onDeadline"],
        );
    }
    for (index, wrapper) in items(&policy["wrappers"]) {
        let place = format!("{top}.wrappers[{index}]");
        look(format!("{place}.match"), &wrapper["match"], &["tool", "toolbox", "args"]);
        decorators(&place, &wrapper["decorators"], look);
        look(place, wrapper, &["match", "decorators"]);
    }
}

fn items(list: &Value) -> impl Iterator<Item = (usize, &Value)> {
    list.as_array().into_iter().flatten().enumerate()
}

/// Looks at a disposition and at what it decorates.
fn disposition(place: String, value: &Value, look: &mut Look<'_>) {
    let known: &[&str] = match value["tag"].as_str() {
        Some("runAsync") => &["tag", "attachSeconds"],
        Some("runIsolated") => &["tag", "spec"],
        Some("defer") => &["tag", "reason"],
        Some("decorate") => &["tag", "decorators", "inner"],
        _ => &["tag"],
    };
    decorators(&place, &value["decorators"], look);
    if value["inner"].is_object() {
        disposition(format!("{place}.inner"), &value["inner"], look);
    }
    look(place, value, known);
}

fn decorators(place: &str, list: &Value, look: &mut Look<'_>) {
    for (index, decorator) in items(list) {
        let known: &[&str] = match decorator["tag"].as_str() {
            Some("timeout") => &["tag", "seconds"],
            Some("retries") => &["tag", "count", "backoffMs"],
            Some("cache") => &["tag", "ttlSeconds", "key"],
            Some("label") => &["tag", "text"],
            Some("truncate") => &["tag", "maxBytes"],
            Some("before" | "after") => &["tag", "hook", "timeoutSeconds"],
            Some("approve") => &["tag", "when", "then", "message", "reason"],
            Some("rateLimit") => &["tag", "perMinute", "burst"],
            _ => &["tag", "contents"],
        };
        look(format!("{place}.decorators[{index}]"), decorator, known);
    }
}

/// A warning for each rule and wrapper that no tool of the agent's falls under, and for what has no effect on
/// those that do.
///
/// # Errors
/// If a rule can't stand alone, which those of a valid policy can.
pub(crate) fn idle(
    config: &PolicyConfig,
    tools: &[ToolSpec],
    dir: &Path,
) -> Result<Vec<String>, PolicyError> {
    let mut warnings = Vec::new();
    for (index, rule) in config.rules.iter().enumerate() {
        let alone = Policy::new(&PolicyConfig { rules: vec![rule.clone()], ..PolicyConfig::default() })?;
        if !tools.iter().any(|tool| alone.of_tool(&tool.name).decided_by != "default") {
            let tool = &rule.tool;
            warnings
                .push(format!("toolCallPolicyConfig.rules[{index}]: {tool:?} matches no tool of the agent"));
        }
    }
    let policy = Policy::new(config)?;
    for (index, rule) in config.rules.iter().enumerate() {
        if rule.read_only && !matches!(rule.disposition.base(), Disposition::RunSync) {
            let place = format!("toolCallPolicyConfig.rules[{index}]");
            warnings.push(format!("{place}: readOnly has the effect of idempotent alone without runSync"));
        }
    }
    for (index, wrapper) in config.wrappers.iter().enumerate() {
        let place = format!("toolCallPolicyConfig.wrappers[{index}]");
        let wrapped: Vec<&str> =
            tools.iter().map(|tool| tool.name.as_str()).filter(|tool| policy.wraps(index, tool)).collect();
        if wrapped.is_empty() {
            warnings.push(format!("{place}: it matches no tool of the agent"));
        }
        warnings.extend(without_effect(&policy, &place, &wrapper.decorators, &wrapped));
    }
    let all = places(config);
    warnings.extend(all.iter().flat_map(|(place, decorators)| unusable_hooks(place, decorators, tools, dir)));
    Ok(warnings)
}

/// Decorators of a wrapper that some of its tools do without.
fn without_effect(policy: &Policy, place: &str, decorators: &[Decorator], tools: &[&str]) -> Vec<String> {
    let mut warnings = Vec::new();
    let of = |wanted: &dyn Fn(&str) -> bool| {
        tools.iter().copied().filter(|tool| wanted(tool)).collect::<Vec<_>>().join(", ")
    };
    let deferred = |tool: &str| matches!(policy.of_tool(tool).disposition.base(), Disposition::Defer { .. });
    let outside = of(&deferred);
    let once = of(&|tool| !policy.of_tool(tool).idempotent && !deferred(tool));
    for (index, decorator) in decorators.iter().enumerate() {
        let place = format!("{place}.decorators[{index}]");
        let tag = decorator.tag();
        match decorator {
            Decorator::Label { .. } | Decorator::WithLabel { .. } | Decorator::Approve { .. } => {}
            _ if !outside.is_empty() => {
                warnings.push(format!("{place}: {tag} has no effect on calls that are deferred: {outside}"));
            }
            _ => {}
        }
        if matches!(decorator, Decorator::Retries { .. } | Decorator::WithRetries { .. }) && !once.is_empty()
        {
            warnings.push(format!("{place}: {tag} has no effect on what no rule calls idempotent: {once}"));
        }
    }
    warnings
}

/// Everywhere where decorators stand.
fn places(config: &PolicyConfig) -> Vec<(String, Vec<&Decorator>)> {
    let top = "toolCallPolicyConfig";
    let mut places = vec![(format!("{top}.default"), config.default.decorators().collect())];
    for (index, rule) in config.rules.iter().enumerate() {
        places.push((format!("{top}.rules[{index}]"), rule.disposition.decorators().collect()));
    }
    for (index, wrapper) in config.wrappers.iter().enumerate() {
        places.push((format!("{top}.wrappers[{index}]"), wrapper.decorators.iter().collect()));
    }
    places
}

fn unusable_hooks(place: &str, decorators: &[&Decorator], tools: &[ToolSpec], dir: &Path) -> Vec<String> {
    let mut warnings = Vec::new();
    for decorator in decorators {
        let (Decorator::Before { hook, .. } | Decorator::After { hook, .. }) = decorator else { continue };
        let fault = match hook {
            Hook::Command(path) => {
                let path: PathBuf = dir.join(path);
                let runs = fs::metadata(&path)
                    .is_ok_and(|about| about.is_file() && about.permissions().mode() & 0o111 != 0);
                (!runs).then(|| format!("{} is not an executable file", path.display()))
            }
            Hook::Tool(name) => {
                let known = tools.iter().any(|tool| tool.name == *name);
                (!known).then(|| format!("the agent has no tool {name:?}"))
            }
        };
        let effect = match decorator {
            Decorator::Before { .. } => "every call is refused",
            _ => "it is passed over",
        };
        warnings.extend(fault.map(|fault| format!("{place}: hook {}: {fault}; {effect}", decorator.tag())));
    }
    warnings
}
