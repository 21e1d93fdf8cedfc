//! `holdfast check`: whether agent files load, and what is in them.

use holdfast_engine::tool::ToolSpec;
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
        return output::json(&json!({ "agents": agents }));
    }
    for one in &loaded {
        show(one, &args)?;
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
        "warnings": one.warnings,
    });
    if args.tools != ToolDisplay::None {
        value["tools"] = one.agent.tools.iter().map(|tool| shown(one, tool, args.tools)).collect();
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
            let applied = one.agent.policy.apply(&tool.name);
            let script = one.toolbox.script(&tool.name);
            json!({
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
    let tools = &one.agent.tools;
    let announce = one.config.announce.lines().next().unwrap_or_default();
    let count = if tools.len() == 1 { "1 tool".to_owned() } else { format!("{} tools", tools.len()) };
    output::line(format!("{}: {announce} ({count}, revision {})", one.agent.slug, one.agent.revision))?;
    match args.tools {
        ToolDisplay::None => {}
        ToolDisplay::List => {
            for tool in tools {
                let tag = one.agent.policy.apply(&tool.name).disposition.tag();
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
