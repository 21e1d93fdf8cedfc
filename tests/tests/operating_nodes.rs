//! `holdfast status` beside real nodes: workers that are killed, a session that crashes them, an agent without a
//! key, and a scheduler that comes back.

use anyhow::{Context, Result, ensure};
use chrono::{TimeDelta, Utc};
use holdfast_store::passes;
use holdfast_tests::{
    cluster::fresh_database,
    status::{Told, status, until},
    store,
    world::{AgentFiles, Model, Node, World},
};
use serde_json::{Value, json};

const JSON: &[&str] = &["--json"];

const SCRIPT: &str = r#"{"rules": [
    {"when": {"turn": 0}, "reply": {"tool_calls": [{"name": "bash_wait", "arguments": {"file": "x"}}]}},
    {"when": {}, "reply": {"text": "done"}}]}"#;

/// A world whose agent's tool ends when its file `go` is there, or after a minute.
async fn waiting_world(url: &str) -> Result<World> {
    let model = Model::start(SCRIPT).await?;
    let config = json!({"slug": "patient", "flavor": "OpenAI", "modelUrl": model.url, "modelName": "scripted",
        "toolDirectory": "tools", "toolCallPolicyConfig": {"rules": [
            {"tool": "bash_wait", "disposition": {"tag": "runSync"}, "idempotent": true}]}});
    let described = json!({"slug": "wait", "description": "Waits.", "args": [
        {"name": "file", "description": "which", "type": "string", "backing_type": "string", "arity": "single", "mode": "positional"}]});
    let script =
        "for _ in $(seq 600); do [ -e \"$(dirname \"$0\")/../go\" ] && break; sleep 0.1; done; echo waited";
    let agent = AgentFiles::with_tools(&config, &[("wait", described, script)])?;
    Ok(World::new(url, model, agent))
}

/// The worker that holds a lease.
fn holder(told: &Told) -> Option<Value> {
    let workers = told.json["workers"].as_array()?;
    workers.iter().find(|one| one["leases"].as_i64() > Some(0)).map(|one| one["id"].clone())
}

fn runs_a_tool(told: &Told) -> bool {
    told.json["deploy"]["tool_again"] == 1 && holder(told).is_some()
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_that_die_are_named_and_the_session_that_kills_them_is_condemned() -> Result<()> {
    let database = fresh_database().await;
    let url = database.url();
    let world = waiting_world(url).await?;
    let (_api, api) = world.node("api", &[], &[]).await?;
    let (mut node, _) = world.node("worker", &[], &[]).await?;
    let id = world.create(&api).await?;
    let working = until(url, JSON, runs_a_tool).await;
    ensure!(working.json["deploy"]["steps"][0]["name"] == "bash_wait", "{}", working.text);
    let first = holder(&working).context("a holder")?;

    // Nobody is there to take the run over.
    node.kill().await?;
    let lost = until(url, JSON, |told| told.finding("leases-lost").is_some()).await;
    let text = lost.finding("leases-lost").context("found")?;
    ensure!(text.contains(first.as_str().context("an id")?), "{text}");
    let row = lost.json["workers"].as_array().and_then(|list| list.iter().find(|one| one["id"] == first));
    ensure!(row.context("the worker")?["expired_leases"] == 1, "{}", lost.text);
    let session = id.to_string();
    let one = status(url, &["--json", "--session", &session]).await;
    ensure!(one.json["waits_for"][0]["code"] == "lease_expired", "{}", one.text);

    // The next worker takes it over and dies as well.
    let (mut node, _) = world.node("worker", &[], &[]).await?;
    let taken = until(url, JSON, |told| told.json["leases"]["taken_over"][0]["takeovers"] == 1).await;
    let row = &taken.json["leases"]["taken_over"][0];
    ensure!(row["session_id"] == json!(id) && row["worker"] != first, "{}", taken.text);
    ensure!(taken.finding("takeovers-rising").is_none(), "one death is nobody's fault: {}", taken.text);
    node.kill().await?;
    let (mut node, _) = world.node("worker", &[], &[]).await?;
    let taken = until(url, JSON, |told| told.finding("takeovers-rising").is_some()).await;
    ensure!(taken.finding("takeovers-rising").is_some_and(|text| text.contains(&session)), "{}", taken.text);
    node.kill().await?;
    // From here on the run has a process of its own, which dies as soon as it has read the session, three times.
    let (mut node, _) = world.node("worker", &[], &[("HOLDFAST_CRASH_AT", "load.done:1")]).await?;
    let condemned = until(url, JSON, |told| told.finding("poison-runs").is_some()).await;
    let poison = &condemned.json["failures"]["poison"][0];
    ensure!(poison["session_id"] == json!(id) && poison["takeovers"] == 5, "{}", condemned.text);
    ensure!(condemned.json["failures"]["by_cause"][0]["agent"] == "patient", "{}", condemned.text);
    let one = status(url, &["--json", "--session", &session]).await;
    ensure!(one.json["waits_for"][0]["code"] == "failed" && one.json["cause"] == "poison", "{}", one.text);
    ensure!(!node.has_ended()?, "nobody else dies: {}", node.log_text());
    node.kill().await?;
    let (_node, _) = world.node("worker", &[], &[]).await?;
    // What is no longer failed needs no attention.
    std::fs::write(world.agent.dir().join("go"), "")?;
    let (code, view) = world.call("POST", &format!("{api}/v1/sessions/{id}/resume"), None).await?;
    ensure!(matches!(code, 200 | 202), "{code} {view}");
    world.until(&api, id, "idle").await?;
    ensure!(status(url, JSON).await.finding("poison-runs").is_none());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_is_missing_is_named_by_its_agent_and_model() -> Result<()> {
    let database = fresh_database().await;
    let url = database.url();
    let model = Model::start(SCRIPT).await?;
    let config = json!({"slug": "keyless", "flavor": "OpenAI", "modelUrl": model.url, "modelName": "scripted-1",
        "apiKeyId": "absent"});
    let agent = AgentFiles::with_tools(&config, &[])?;
    let world = World::new(url, model, agent);
    let (_serve, api) = world.node("serve", &[], &[]).await?;
    let id = world.create(&api).await?;
    let failed = until(url, JSON, |told| told.finding("model-errors").is_some()).await;
    ensure!(failed.finding("model-errors").is_some_and(|text| text.contains("keyless")), "{}", failed.text);
    let cause = &failed.json["failures"]["by_cause"][0];
    ensure!(cause["cause"] == "model_key_missing" && cause["model"] == "scripted-1", "{cause}");
    ensure!(cause["last_session_id"] == json!(id) && cause["still_failed"] == 1, "{cause}");
    ensure!(!failed.text.contains("fetch the local"), "a prompt is told: {}", failed.text);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_scheduler_that_comes_back_clears_what_it_was_missed_for() -> Result<()> {
    let world = store::World::new().await;
    let url = world.database.url();
    world.waiting_since(Utc::now() - TimeDelta::hours(1), "ask_soon_anna").await;
    passes::turn_event_partitions(&world.store, Utc::now() - TimeDelta::days(40), None).await?;
    let missed = status(url, JSON).await;
    ensure!(missed.slugs() == ["deferred-call-overdue", "retention-behind"], "{}", missed.text);
    let arguments = ["--database-url".to_owned(), url.to_owned()];
    let mut scheduler = Node::start("scheduler", &arguments, &[])?;
    scheduler.started().await?;
    // The call's expiry wakes its session, which no worker is there for.
    let back = until(url, JSON, |told| told.slugs() == ["no-worker"]).await;
    ensure!(back.json["deferred"]["open"] == 0 && back.json["retention"]["events"]["partitions"] == 0);
    Ok(())
}
