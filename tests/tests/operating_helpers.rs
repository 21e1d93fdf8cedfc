//! Agents that call agents, as nodes have them: what is reached from one file is listed, is worked for, and is
//! what `holdfast check` shows.

use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use holdfast_tests::{
    cluster::fresh_database,
    world::{AgentFiles, Model, PATIENCE, World, binary},
};
use serde_json::{Value, json};
use tokio::process::Command;
use uuid::Uuid;

const SCRIPT: &str = r#"{"rules": [{"when": {}, "reply": {"text": "done"}}]}"#;

/// A planner that calls an executor, which calls it back; the node is told of the planner alone.
fn files(model: &Model) -> Result<AgentFiles> {
    let agent = |slug: &str, helper: &str, path: &str| {
        json!({"slug": slug, "flavor": "OpenAI", "modelUrl": model.url, "modelName": "scripted",
            "extraAgents": [{"slug": helper, "path": path}]})
    };
    let files = AgentFiles::with_tools(&agent("planner", "executor", "executor.json"), &[])?;
    let executor = agent("executor", "planner", "agent.json").to_string();
    std::fs::write(files.dir().join("executor.json"), executor)?;
    Ok(files)
}

#[tokio::test(flavor = "multi_thread")]
async fn agents_that_are_reached_are_listed_and_worked_for() -> Result<()> {
    let database = fresh_database().await;
    let model = Model::start(SCRIPT).await?;
    let agent = files(&model)?;
    let world = World::new(database.url(), model, agent);
    let (_serve, api) = world.node("serve", &[], &[]).await?;
    let (code, listed) = world.call("GET", &format!("{api}/v1/agents"), None).await?;
    let agents = listed.as_array().with_context(|| listed.to_string())?;
    let told = |one: &Value| json!([one["slug"], one["helpers"], one["tools"][0]["name"]]);
    let told: Vec<Value> = agents.iter().map(told).collect();
    let expected = [
        json!(["executor", ["planner"], "prompt_agent_planner"]),
        json!(["planner", ["executor"], "prompt_agent_executor"]),
    ];
    ensure!(code == 200 && told == expected, "{listed}");
    let body = json!({"agent": "executor", "prompt": "go"});
    let (code, created) = world.call("POST", &format!("{api}/v1/sessions"), Some(&body)).await?;
    ensure!(matches!(code, 200..=202), "{code} {created}");
    let id: Uuid = created["session_id"].as_str().context("an id")?.parse()?;
    world.until(&api, id, "idle").await?;
    Ok(())
}

#[tokio::test]
async fn check_shows_who_calls_whom() -> Result<()> {
    let model = Model::start(SCRIPT).await?;
    let agent = files(&model)?;
    let check = async |more: &[&str]| {
        let mut command = Command::new(binary()?);
        command.arg("check").arg("--agent-file").arg(agent.agent_path()).args(more);
        command.stdin(Stdio::null()).kill_on_drop(true);
        let output = tokio::time::timeout(PATIENCE, command.output()).await??;
        anyhow::Ok((output.status.code(), String::from_utf8(output.stdout)?))
    };
    let (code, text) = check(&[]).await?;
    let tree = "tree:\n  planner\n    executor\n      planner (cycle)\n";
    ensure!(code == Some(0) && text.ends_with(tree), "{text}");
    ensure!(
        text.contains("  warning: calls can go in a circle") && text.contains("planner → executor → planner"),
        "{text}"
    );
    let (code, text) = check(&["--json"]).await?;
    let value: Value = serde_json::from_str(&text)?;
    let executor = json!({"slug": "executor", "helpers": [{"slug": "planner", "cycle": true}]});
    ensure!(
        code == Some(0) && value["tree"] == json!([{"slug": "planner", "helpers": [executor]}]),
        "{text}"
    );
    ensure!(
        value["agents"][1]["slug"] == "executor" && value["agents"][1]["helpers"][0] == "planner",
        "{text}"
    );
    std::fs::write(agent.dir().join("executor.json"), "{}")?;
    ensure!(
        check(&[]).await?.0 == Some(4),
        "an agent that can't be reached is an error of the one that calls it"
    );
    Ok(())
}
