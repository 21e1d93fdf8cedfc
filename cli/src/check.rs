//! `holdfast check`: whether agent files load, and what is in them.

mod tree;

use holdfast_engine::{builtin::BuiltinKind, tool::ToolSpec};
use holdfast_tools::LoadedAgent;
use serde_json::{Value, json};

use crate::{
    args::{CheckArgs, ToolDisplay},
    failure::Failure,
    node, output,
};

/// Loads agents as a server would and reports them.
pub(crate) async fn run(args: CheckArgs) -> Result<(), Failure> {
    if args.agents.agent_file.is_empty() && args.agents.agents_dir.is_empty() {
        return Err(Failure::Usage("nothing to check: give --agent-file or --agents-dir".into()));
    }
    let mut loaded = node::load(&args.agents).await?;
    node::warn_of_missing_keys(&mut loaded, &node::keys(&args.keys)?);
    if args.json {
        let agents: Vec<_> = loaded.iter().map(|one| report(one, &args)).collect();
        return output::json(&json!({ "agents": agents, "tree": tree::as_json(&tree::of(&loaded)) }));
    }
    for one in &loaded {
        show(one, &args)?;
    }
    if loaded.iter().any(|one| !one.agent.helpers.is_empty()) {
        output::line("tree:")?;
        tree::as_text(&tree::of(&loaded)).iter().try_for_each(|line| output::line(format!("  {line}")))?;
    }
    Ok(())
}

fn report(one: &LoadedAgent, args: &CheckArgs) -> Value {
    let mut value = json!({
        "slug": one.agent.slug,
        "revision": one.agent.revision,
        "announce": one.config.announce,
        "file": one.path,
        "model": one.agent.target.model,
        "flavor": one.agent.target.flavor,
        "parameters": [],
        "helpers": one.agent.helpers.iter().map(|helper| &helper.slug).collect::<Vec<_>>(),
        "warnings": one.warnings,
    });
    if args.tools != ToolDisplay::None {
        value["tools"] = one.agent.tools().iter().map(|tool| shown(one, tool, args.tools)).collect();
    }
    if args.show_config {
        value["config"] = serde_json::from_str(&one.config_text).unwrap_or_default();
    }
    value
}

fn shown(one: &LoadedAgent, tool: &ToolSpec, how: ToolDisplay) -> Value {
    match how {
        ToolDisplay::None => Value::Null,
        ToolDisplay::List => json!({"name": tool.name, "description": tool.description}),
        ToolDisplay::Openai => json!({
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
            },
        }),
        ToolDisplay::Internal => {
            let applied = one.agent.policy.of_tool(&tool.name);
            let script = one.toolbox.script(&tool.name);
            let kind = match one.agent.builtin(&tool.name).map(|builtin| &builtin.kind) {
                None => "program",
                Some(BuiltinKind::Helper(_)) => "helper",
                Some(BuiltinKind::System(_)) => "system",
            };
            json!({
                "kind": kind,
                "name": tool.name,
                "original": tool.original,
                "description": tool.description,
                "parameters": tool.parameters,
                "path": script.as_ref().map(|script| script.path()),
                "args": script.as_ref().map(|script| &script.info().args),
                "activation": "always",
                "disposition": applied.disposition,
                "decided_by": applied.decided_by,
                "idempotent": applied.idempotent,
                "read_only": applied.read_only,
                "deadline_seconds": applied.deadline_seconds,
            })
        }
    }
}

fn show(one: &LoadedAgent, args: &CheckArgs) -> Result<(), Failure> {
    if args.show_config {
        let config: Value = serde_json::from_str(&one.config_text).unwrap_or_default();
        output::line(format!("{config:#}"))?;
    }
    let tools = one.agent.tools();
    let announce = one.config.announce.lines().next().unwrap_or_default();
    let count = if tools.len() == 1 { "1 tool".to_owned() } else { format!("{} tools", tools.len()) };
    output::line(format!("{}: {announce} ({count}, revision {})", one.agent.slug, one.agent.revision))?;
    match args.tools {
        ToolDisplay::None => {}
        ToolDisplay::List => {
            for tool in tools {
                let tag = one.agent.policy.of_tool(&tool.name).disposition.tag();
                let first = tool.description.lines().next().unwrap_or_default();
                output::line(format!("  {} [{tag}] {first}", tool.name))?;
            }
        }
        how @ (ToolDisplay::Internal | ToolDisplay::Openai) => {
            let all: Value = tools.iter().map(|tool| shown(one, tool, how)).collect();
            output::line(format!("{all:#}"))?;
        }
    }
    for warning in &one.warnings {
        output::line(format!("  warning: {warning}"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_report_says_what_carries_each_tool_out() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("a.json");
        let config = json!({"slug": "self", "flavor": "OpenAIv1", "modelUrl": "http://m", "modelName": "x",
            "builtinToolboxes":
                [{"tag": "SystemToolbox", "contents": {"Name": "own", "Capabilities": ["wait"]}}],
            "extraAgents": [{"slug": "self", "path": "a.json"}]});
        std::fs::write(&file, config.to_string()).expect("written");
        let loaded = holdfast_tools::load_agent(&file).await.expect("loads");
        let agents =
            crate::args::AgentArgs { agent_file: vec![file], agents_dir: vec![], only_agent: vec![] };
        let keys = crate::args::KeyArgs { api_keys: None };
        let args = CheckArgs { agents, keys, tools: ToolDisplay::Internal, show_config: false, json: true };
        let value = report(&loaded, &args);
        assert_eq!(value["helpers"], json!(["self"]));
        let kinds = value["tools"].as_array().expect("a list").iter();
        let kinds: Vec<_> = kinds.map(|tool| json!([tool["name"], tool["kind"], tool["path"]])).collect();
        let expected =
            json!([["system_own_system_info", "system", null], ["prompt_agent_self", "helper", null]]);
        assert_eq!(json!(kinds), expected);
    }
}
