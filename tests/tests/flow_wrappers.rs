//! Wrappers through real nodes: hooks, approvals, retries, and what two workers share.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use holdfast_tests::{
    cluster::{Database, fresh_database},
    world::{AgentFiles, Model, World, answer},
};
use holdfast_tools::load_agent;
use serde_json::{Value, json};
use uuid::Uuid;

/// Calls the tool that the prompt names, with the environment that it names, and says what came of it.
const SCRIPT: &str = r#"{"rules": [
    {"when": {"turn": 0, "last": "deploy prod"}, "reply": {"tool_calls": [{"name": "bash_deploy", "arguments": {"env": "prod-1"}}]}},
    {"when": {"turn": 0, "last": "deploy secret"}, "reply": {"tool_calls": [{"name": "bash_deploy", "arguments": {"env": "secret"}}]}},
    {"when": {"turn": 0, "last": "deploy broken"}, "reply": {"tool_calls": [{"name": "bash_deploy", "arguments": {"env": "broken"}}]}},
    {"when": {"turn": 0, "last": "deploy dev"}, "reply": {"tool_calls": [{"name": "bash_deploy", "arguments": {"env": "dev"}}]}},
    {"when": {"turn": 0, "last": "flaky"}, "reply": {"tool_calls": [{"name": "bash_flaky"}]}},
    {"when": {"turn": 0, "last": "locked"}, "reply": {"tool_calls": [{"name": "bash_locked", "arguments": {"env": "secret"}}]}},
    {"when": {"turn": 0, "last": "search"}, "reply": {"tool_calls": [{"name": "bash_search", "arguments": "{ \"env\":\"x\" }"}]}},
    {"when": {"turn": 0, "last": "paced"}, "reply": {"tool_calls": [{"name": "bash_paced"}]}},
    {"reply": {"text": "{{last}}"}}
]}"#;

/// Asks for another environment, denies one and fails over another.
const ASK: &str = r#"#!/bin/bash
case "$(cat)" in
    *secret*) echo '{"action": "deny", "message": "not that one"}' ;;
    *broken*) exit 7 ;;
    *) echo '{"action": "continue", "arguments": {"env": "staging"}}' ;;
esac
"#;

async fn world(database: &Database) -> Result<World> {
    let model = Model::start(SCRIPT).await?;
    let run_sync = json!({"tag": "runSync"});
    let config = json!({"slug": "wrapped", "flavor": "OpenAIv1", "modelUrl": model.url, "modelName": "scripted",
        "systemPrompt": ["Do it."], "toolDirectory": "tools", "toolCallPolicyConfig": {
            "rules": [
                {"tool": "bash_{flaky,locked}", "idempotent": true, "disposition": {"tag": "decorate",
                    "decorators": [{"tag": "withRetries", "contents": 2}], "inner": run_sync}},
                {"tool": "bash_*", "disposition": run_sync}],
            "wrappers": [
                {"match": {"tool": "bash_deploy"}, "decorators": [
                    {"tag": "approve", "when": {"args.env": "prod*"}, "then": "deny", "message": "prod is not for agents"},
                    {"tag": "after", "hook": {"tool": "bash_audit"}},
                    {"tag": "before", "hook": {"command": "hooks/ask"}}]},
                {"match": {"tool": "bash_locked"}, "decorators": [{"tag": "before", "hook": {"command": "hooks/ask"}}]},
                {"match": {"tool": "bash_search"}, "decorators": [{"tag": "cache", "ttlSeconds": 600}]},
                {"match": {"tool": "bash_paced"}, "decorators": [
                    {"tag": "timeout", "seconds": 2}, {"tag": "rateLimit", "perMinute": 1, "burst": 2}]}]}});
    let argument = |name: &str| {
        json!({"name": name, "description": "", "type": "string", "backing_type": "string",
            "arity": "optional", "mode": "positional"})
    };
    let about = |slug: &str, args: &[&str]| {
        let args: Vec<Value> = args.iter().map(|name| argument(name)).collect();
        json!({"slug": slug, "description": "Does it.", "args": args})
    };
    let note =
        |rest: &str| format!("cd \"$(dirname \"$0\")/..\"; echo \"$(basename \"$0\") $2 $3\" >> log; {rest}");
    let scripts = [
        ("deploy", note("echo \"deployed to $2\""), about("deploy", &["env"])),
        (
            "audit",
            note(r#"echo '{"action": "annotate", "text": "noted"}'"#),
            about("audit", &["tool", "status"]),
        ),
        ("flaky", note("[ $(grep -c flaky log) -ge 3 ] || exit 1; echo fine"), about("flaky", &[])),
        ("locked", note(""), about("locked", &["env"])),
        ("search", note("echo \"found $2\""), about("search", &["env"])),
        ("paced", note("echo \"it was my turn\""), about("paced", &[])),
    ];
    let tools: Vec<(&str, Value, &str)> =
        scripts.iter().map(|(slug, run, about)| (*slug, about.clone(), run.as_str())).collect();
    let agent = AgentFiles::with_tools(&config, &tools)?;
    fs::create_dir(agent.dir().join("hooks"))?;
    let hook = agent.dir().join("hooks/ask");
    fs::write(&hook, ASK)?;
    fs::set_permissions(&hook, fs::Permissions::from_mode(0o755))?;
    Ok(World::new(database.url(), model, agent))
}

/// What the tools have noted.
fn noted(world: &World) -> Vec<String> {
    let text = fs::read_to_string(world.agent.dir().join("log")).unwrap_or_default();
    text.lines().map(|line| line.trim().to_owned()).collect()
}

/// What comes of a prompt: the text that the model was told.
async fn ask(world: &World, api: &str, prompt: &str) -> Result<(Uuid, String)> {
    ask_agent(world, api, "wrapped", prompt).await
}

async fn ask_agent(world: &World, api: &str, agent: &str, prompt: &str) -> Result<(Uuid, String)> {
    let body = json!({"agent": agent, "prompt": prompt});
    let (status, view) = world.call("POST", &format!("{api}/v1/sessions"), Some(&body)).await?;
    ensure!(status == 201, "{status} {view}");
    let id = view["session_id"].as_str().context("no id")?.parse()?;
    Ok((id, answer(&world.until(api, id, "idle").await?)?))
}

#[tokio::test(flavor = "multi_thread")]
async fn hooks_and_approvals_decide_what_runs_and_what_the_model_is_told() -> Result<()> {
    let database = fresh_database().await;
    let world = world(&database).await?;
    let (_api, api) = world.node("api", &[], &[]).await?;
    let (worker, _) = world.node("worker", &[], &[]).await?;
    let sql = database.connect().await;

    let (dev, told) = ask(&world, &api, "deploy dev").await?;
    ensure!(told.contains("deployed to staging") && told.ends_with("noted"), "{told}");
    ensure!(noted(&world) == ["deploy staging", "audit bash_deploy completed"], "{:?}", noted(&world));
    let stored = "SELECT disposition, state FROM tool_calls WHERE session_id = $1";
    let row = sql.query_one(stored, &[&dev]).await?;
    let disposition: Value = serde_json::from_str(row.get(0))?;
    let tags: Vec<&str> = disposition["decorators"]
        .as_array()
        .context("no decorators")?
        .iter()
        .filter_map(|decorator| decorator["tag"].as_str())
        .collect();
    ensure!(tags == ["after", "before"] && disposition["inner"]["tag"] == "runSync", "{disposition}");
    // The transcript keeps what the model wrote.
    let requests = world.model.requests().await?;
    let shown = requests.last().context("no request")?["messages"].to_string();
    ensure!(shown.contains(r#"\"env\":\"dev\""#) && !shown.contains(r#"\"env\":\"staging"#), "{shown}");

    // The approval is asked for nothing that a hook could see.
    let (prod, told) = ask(&world, &api, "deploy prod").await?;
    ensure!(told.contains("prod is not for agents"), "{told}");
    let row = sql.query_one(stored, &[&prod]).await?;
    let disposition: Value = serde_json::from_str(row.get(0))?;
    ensure!(disposition == json!({"tag": "deny", "message": "prod is not for agents"}), "{disposition}");
    ensure!(row.get::<_, &str>(1) == "failed" && noted(&world).len() == 2, "{:?}", noted(&world));

    let (_, told) = ask(&world, &api, "deploy secret").await?;
    ensure!(told.contains("not that one\nnoted"), "{told}");
    let (broken, told) = ask(&world, &api, "deploy broken").await?;
    ensure!(told.contains("gave no usable answer"), "{told}");
    ensure!(noted(&world)[2..] == ["audit bash_deploy failed"; 2], "{:?}", noted(&world));
    let log = worker.log_text();
    let failed: Vec<Value> = log
        .lines()
        .filter(|line| line.contains("hook.failed"))
        .map(serde_json::from_str)
        .collect::<Result<_, _>>()?;
    let [failed] = &failed[..] else { anyhow::bail!("{log}") };
    ensure!(failed["session_id"] == broken.to_string() && failed["when"] == "before", "{failed}");
    ensure!(failed["hook"] == "command hooks/ask" && failed["reason"] == "exit code 7", "{failed}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn stored_attempts_follow_one_another_until_one_succeeds() -> Result<()> {
    let database = fresh_database().await;
    let world = world(&database).await?;
    let (_api, api) = world.node("api", &[], &[]).await?;
    let (_worker, _) = world.node("worker", &[], &[]).await?;
    let (session, told) = ask(&world, &api, "flaky").await?;
    ensure!(told.contains("fine") && noted(&world).len() == 3, "{told} {:?}", noted(&world));
    let (refused, told) = ask(&world, &api, "locked").await?;
    ensure!(told.contains("not that one"), "{told}");
    let sql = database.connect().await;
    // What a hook denies, it would deny again.
    for (session, attempts, end) in [(session, 3, "completed"), (refused, 1, "failed")] {
        let attempted = "SELECT attempt, state FROM tool_calls WHERE session_id = $1";
        let row = sql.query_one(attempted, &[&session]).await?;
        let (attempt, state): (i32, &str) = (row.get(0), row.get(1));
        ensure!((attempt, state) == (attempts, end), "{attempt} {state}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_share_results_and_rates() -> Result<()> {
    let database = fresh_database().await;
    let world = world(&database).await?;
    let (_api, api) = world.node("api", &[], &[]).await?;
    let (mut first, _) = world.node("worker", &[], &[]).await?;
    let (_, told) = ask(&world, &api, "search").await?;
    ensure!(told.contains("found x"), "{told}");
    let began = Instant::now();
    let (_, told) = ask(&world, &api, "paced").await?;
    ensure!(told.contains("it was my turn"), "{told}");
    first.kill().await?;

    let (_second, _) = world.node("worker", &[], &[]).await?;
    let (_, told) = ask(&world, &api, "search").await?;
    ensure!(told.contains("found x"), "{told}");
    let mut turns = 1;
    for _ in 0..4 {
        let (_, told) = ask(&world, &api, "paced").await?;
        let refused = told.contains("called too often: 1 calls a minute are allowed, 2 at once");
        ensure!(refused || told.contains("it was my turn"), "{told}");
        turns += usize::from(!refused);
    }
    // A slow machine may see the next minute.
    let most = 2 + (began.elapsed() + Duration::from_secs(2)).as_secs() / 60;
    ensure!(turns >= 2 && turns <= usize::try_from(most)?, "{turns} turns, {most} are allowed");
    let runs = |tool: &str| noted(&world).iter().filter(|line| line.starts_with(tool)).count();
    ensure!((runs("search"), runs("paced")) == (1, turns), "{:?}", noted(&world));
    let sql = database.connect().await;
    let keys = sql.query("SELECT owner, length(key) FROM tool_results", &[]).await?;
    ensure!(keys.len() == 1, "{} results are kept", keys.len());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_example_denies_during_a_freeze_and_notes_every_deployment() -> Result<()> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/examples/deploy");
    let copy = tempfile::tempdir()?;
    for part in ["hooks", "tools"] {
        fs::create_dir(copy.path().join(part))?;
    }
    for file in ["agent.json", "model.json", "hooks/check-freeze", "hooks/audit", "tools/deploy"] {
        fs::copy(source.join(file), copy.path().join(file))?;
    }
    let model = Model::start(&fs::read_to_string(copy.path().join("model.json"))?).await?;
    let loaded = load_agent(&copy.path().join("agent.json")).await?;
    ensure!(loaded.warnings.is_empty(), "{:?}", loaded.warnings);
    let apply = |target: &str| {
        let arguments = json!({"service": "shop", "target": target}).to_string();
        loaded.agent.policy.apply("bash_deploy", &arguments).disposition
    };
    ensure!((apply("production").tag(), apply("staging").tag()) == ("defer", "runSync"));

    let mut config: Value = serde_json::from_str(&fs::read_to_string(&loaded.path)?)?;
    config["modelUrl"] = json!(model.url);
    // Two deployments within ten seconds, for a test.
    config["toolCallPolicyConfig"]["wrappers"][1]["decorators"][3]["burst"] = json!(2);
    fs::write(&loaded.path, config.to_string())?;
    let database = fresh_database().await;
    let world = World::new(database.url(), model, AgentFiles::in_dir(copy));
    let (_api, api) = world.node("api", &[], &[]).await?;
    let (_worker, _) = world.node("worker", &[], &[]).await?;
    let (_, told) = ask_agent(&world, &api, "deployer", "to staging").await?;
    ensure!(told.contains("deployed shop to staging"), "{told}");
    fs::write(world.agent.dir().join("frozen"), "until \"Monday\"\n")?;
    let (_, told) = ask_agent(&world, &api, "deployer", "to staging").await?;
    ensure!(told.contains("deploys are frozen: until  Monday "), "{told}");
    let notes = fs::read_to_string(world.agent.dir().join("audit.jsonl"))?;
    let notes: Vec<Value> = notes.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    let ends: Vec<&Value> = notes.iter().map(|note| &note["status"]).collect();
    ensure!(ends == ["completed", "failed"] && notes[1]["arguments"]["target"] == "staging", "{notes:?}");
    Ok(())
}
