//! Tools that behave as badly as they can end with their calls, and so does all that they have started.

use std::{fs, time::Duration};

use anyhow::{Context as _, Result, ensure};
use holdfast_tests::{
    cluster::fresh_database,
    memory,
    world::{AgentFiles, Model, PATIENCE, World},
};
use serde_json::{Value, json};
use tokio::time::Instant;

/// What each tool does. All note the ids of what they start.
const TOOLS: [(&str, &str); 7] = [
    ("endless", "echo $$ >> pids; yes"),
    ("deaf", "trap '' TERM; echo $$ >> pids; while :; do sleep 1000 & wait; done"),
    ("silent", "echo $$ >> pids; exec >&- 2>&-; exec sleep 1000"),
    (
        "daemon",
        "setsid bash -c '(echo $BASHPID >> pids; exec sleep 1000) & exit' </dev/null >/dev/null 2>&1; sleep 0.2; echo done",
    ),
    (
        "bare",
        "env -i PATH=\"$PATH\" setsid bash -c '(echo $BASHPID >> pids; exec sleep 1000) & exit' </dev/null >/dev/null 2>&1; sleep 0.2; echo done",
    ),
    (
        "storm",
        "for i in $(seq 50); do setsid bash -c 'echo $$ >> pids; sleep 1000 & exec sleep 1000' & done; wait",
    ),
    ("stopped", "echo $$ >> pids; kill -STOP $$"),
];

const SCRIPT: &str = r#"{"rules": [
    {"when": {"turn": 0, "last": "misbehave"}, "reply": {"tool_calls": [
        {"name": "bash_endless"}, {"name": "bash_deaf"}, {"name": "bash_silent"}, {"name": "bash_daemon"},
        {"name": "bash_bare"}, {"name": "bash_storm"}, {"name": "bash_stopped"}]}},
    {"reply": {"text": "hello"}}
]}"#;

fn alive(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with(['Z', 'X']))
}

#[tokio::test(flavor = "multi_thread")]
async fn tools_that_misbehave_end_with_all_that_they_have_started() -> Result<()> {
    let database = fresh_database().await;
    let model = Model::start(SCRIPT).await?;
    let config = json!({"slug": "bad", "flavor": "OpenAIv1", "modelUrl": model.url, "modelName": "scripted",
        "systemPrompt": ["Do it."], "toolDirectory": "tools", "maxConcurrency": 8, "asyncCallTimeoutSeconds": 3});
    let tools: Vec<(&str, Value, String)> = TOOLS
        .iter()
        .map(|(slug, run)| {
            let described = json!({"slug": slug, "description": "Misbehaves.", "args": []});
            (*slug, described, format!("cd \"$(dirname \"$0\")/..\"; {run}"))
        })
        .collect();
    let tools: Vec<(&str, Value, &str)> =
        tools.iter().map(|(slug, described, run)| (*slug, described.clone(), run.as_str())).collect();
    let agent = AgentFiles::with_tools(&config, &tools)?;
    let world = World::new(database.url(), model, agent);
    let (_api, api) = world.node("api", &[], &[]).await?;
    let (mut worker, _) = world.node("worker", &[], &[]).await?;
    let create = async |prompt: &str| {
        let body = json!({"agent": "bad", "prompt": prompt});
        let (status, view) = world.call("POST", &format!("{api}/v1/sessions"), Some(&body)).await?;
        ensure!(status == 201, "{status} {view}");
        Ok(view["session_id"].as_str().context("no id")?.parse()?)
    };
    let bad = create("misbehave").await?;
    let good = create("hello").await?;
    world.until(&api, good, "idle").await?;
    let view = world.until(&api, bad, "idle").await?;
    ensure!(view["session"]["turns"].as_array().is_some_and(|turns| turns.len() == 4), "{view}");
    let noted = fs::read_to_string(world.agent.dir().join("pids"))?;
    ensure!(noted.lines().count() > 50, "{noted}");
    let until = Instant::now() + PATIENCE;
    let mut pause = tokio::time::interval(Duration::from_millis(20));
    loop {
        pause.tick().await;
        let left: Vec<&str> = noted.lines().filter(|pid| alive(pid)).collect();
        if left.is_empty() {
            break;
        }
        ensure!(Instant::now() < until, "they live on: {left:?}");
    }
    let (peak, limit) = (worker.peak_memory()?, memory::limit(TOOLS.len(), memory::REQUEST));
    ensure!(peak < limit, "{peak} bytes of {limit}");
    ensure!(!worker.has_ended()?, "{}", worker.log_text());
    Ok(())
}
