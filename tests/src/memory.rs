//! How much memory a worker may have, as docs/ARCHITECTURE.md says it, and a load that takes it there.

use anyhow::{Result, ensure};
use serde_json::json;
use tokio::time::{Duration, Instant};
use uuid::Uuid;

use crate::world::{AgentFiles, Model, client};

/// Bytes that a worker has without any run.
pub const BASE: u64 = 64 * 1024 * 1024;

/// How often what a run tells the model lies in memory: as the tool printed it, in the step that stores it, in the
/// request and on its way.
pub const COPIES: u64 = 6;

/// Bytes that each run's tool prints.
pub const PRINTED: u64 = 10 * 1024 * 1024;

/// Bytes of a request that tells of such a result: what is kept of it, every character escaped.
pub const REQUEST: u64 = 2 * holdfast_tools::MAX_OUTPUT as u64;

/// Bytes that a worker may have resident with `runs` whose requests are of `request` bytes each.
pub fn limit(runs: usize, request: u64) -> u64 {
    BASE + runs as u64 * COPIES * request
}

const SCRIPT: &str = r#"{"rules": [
    {"when": {"turn": 0}, "reply": {"tool_calls": [{"name": "bash_flood"}]}},
    {"reply": {"text": "done"}}
]}"#;

/// A model, and an agent whose only tool prints [`PRINTED`] bytes when `runs` calls have begun: all at once, then.
///
/// # Errors
/// If they can't be made.
pub async fn flood(runs: usize) -> Result<(Model, AgentFiles)> {
    let model = Model::start(SCRIPT).await?;
    let described = json!({"slug": "flood", "description": "Prints much.", "args": []});
    let config = json!({"slug": "flooded", "flavor": "OpenAIv1", "modelUrl": model.url, "modelName": "scripted",
        "systemPrompt": ["Do it."], "toolDirectory": "tools"});
    let run = format!(
        "cd \"$(dirname \"$0\")/..\"; echo x >> begun; while [ \"$(wc -l < begun)\" -lt {runs} ]; do sleep 0.2; done
head -c {PRINTED} /dev/zero | tr '\\0' '\"'"
    );
    let agent = AgentFiles::with_tools(&config, &[("flood", described, &run)])?;
    Ok((model, agent))
}

/// Runs so many sessions of that agent to their ends, through a node at `api`, within `patience` from when the last
/// has been created.
///
/// # Errors
/// If one doesn't end idle.
pub async fn play(api: &str, runs: usize, patience: Duration) -> Result<()> {
    let http = client();
    let mut sessions: Vec<Uuid> = Vec::new();
    for _ in 0..runs {
        let body = json!({"agent": "flooded", "prompt": "print"});
        let answer = http.post(format!("{api}/v1/sessions")).json(&body).send().await?.error_for_status()?;
        let view: serde_json::Value = answer.json().await?;
        sessions.push(view["session_id"].as_str().unwrap_or_default().parse()?);
    }
    let (mut pause, until) = (tokio::time::interval(Duration::from_millis(100)), Instant::now() + patience);
    while let Some(id) = sessions.last() {
        // Without its turns: they are large.
        let answer = http.get(format!("{api}/v1/sessions/{id}?turns=0")).send().await?.error_for_status()?;
        let view: serde_json::Value = answer.json().await?;
        match view["status"].as_str() {
            Some("idle") => drop(sessions.pop()),
            Some("running") => {
                ensure!(Instant::now() < until, "{} sessions don't end", sessions.len());
                pause.tick().await;
            }
            _ => anyhow::bail!("{view}"),
        }
    }
    Ok(())
}
