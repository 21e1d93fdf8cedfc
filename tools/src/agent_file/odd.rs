//! What is odd in an agent file, in words.

use holdfast_engine::{
    agent::{Agent, AgentConfig},
    builtin::{BuiltinKind, BuiltinToolbox, Capability},
    conduct::{ExecutionMode, YieldStrategy},
};
use serde_json::{Map, Value};

use crate::policy_file;

use super::read::{BINDINGS, REFUSED, REFUSED_OF_HELPERS, entries};

/// Warnings about what an agent, with its helpers, says and can't do.
pub(super) fn conduct(agent: &Agent) -> Vec<String> {
    let mut warnings = Vec::new();
    let conduct = &agent.conduct;
    if conduct.execution_mode == ExecutionMode::Synchronous
        && conduct.async_yield_strategy != YieldStrategy::WhenAllDone
    {
        warnings.push("asyncYieldStrategy has no effect while executionMode is \"synchronous\"".to_owned());
    }
    let spawns = |kind: &BuiltinKind| match kind {
        BuiltinKind::System(toolbox) => toolbox.capabilities.contains(&Capability::SpawnSession),
        BuiltinKind::Helper(_) => false,
    };
    for builtin in agent.builtins.iter().filter(|builtin| spawns(&builtin.kind)) {
        if agent.helpers.is_empty() {
            let (name, word) = (&builtin.spec.name, Capability::SpawnSession.word());
            warnings.push(format!("{name}: {word:?} has no effect, as the agent has no helpers"));
        }
    }
    warnings
}

/// A warning for each field that has no effect, at the top and where the file has objects of its own.
pub(super) fn fields(config: &AgentConfig, root: &Value) -> Vec<String> {
    let mut warnings = Vec::new();
    for name in config.unknown.keys().filter(|name| !REFUSED.contains(&name.as_str())) {
        warnings.push(format!("field {name:?} is unknown and has no effect"));
    }
    let mut look = |place: String, value: &Value, known: &[&str]| {
        let fields = value.as_object().into_iter().flat_map(Map::keys);
        let unknown = fields.filter(|field| !known.contains(&field.as_str()));
        warnings
            .extend(unknown.map(|field| format!("field {field:?} of {place} is unknown and has no effect")));
    };
    for (index, toolbox) in entries(root, "bashToolboxes") {
        let known: &[&str] = if toolbox["tag"] == "SingleTool" {
            &["Path", BINDINGS]
        } else {
            &["Path", "Include", "Exclude", BINDINGS]
        };
        look(format!("bashToolboxes[{index}]"), &toolbox["contents"], known);
    }
    for (index, helper) in entries(root, "extraAgents") {
        let known = [&["slug", "path"][..], &REFUSED_OF_HELPERS].concat();
        look(format!("extraAgents[{index}]"), helper, &known);
    }
    policy_file::look_at(&root["toolCallPolicyConfig"], &mut look);
    for (index, BuiltinToolbox::SystemToolbox(toolbox)) in config.builtin_toolboxes.iter().enumerate() {
        let unknown = toolbox.unknown.keys();
        warnings.extend(unknown.map(|field| {
            format!("field {field:?} of builtinToolboxes[{index}] is unknown and has no effect")
        }));
    }
    warnings
}
