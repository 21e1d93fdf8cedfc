//! A storm of messages, at a bounded size; `bench storm` has the full one, with times.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use holdfast_store::notify::Channel;
use holdfast_tests::{
    cluster::{Database, fresh_database},
    memory,
    storm::{self, Storm},
    world::{AgentFiles, Model, PATIENCE, World},
};
use serde_json::json;
use tokio::time::{Instant, interval};
use uuid::Uuid;

#[tokio::test(flavor = "multi_thread")]
async fn each_message_of_a_storm_is_said_once_and_in_its_senders_order() -> Result<()> {
    let database = fresh_database().await;
    let world = storm::world(database.url()).await?;
    let (api_node, api) = world.node("api", &[], &[]).await?;
    let (worker, _) = world.node("worker", &[], &[]).await?;
    let weathered = Storm { messages: 1_500, clients: 30, sessions: 3 }.rage(&world, &api).await?;
    ensure!(weathered.accepts.len() == 1_500, "{} were accepted", weathered.accepts.len());
    ensure!(weathered.refused >= 30, "{} were told that a mailbox is full", weathered.refused);
    for node in [&api_node, &worker] {
        let peak = node.peak_memory()?;
        ensure!(peak <= 4 * memory::BASE, "{peak} bytes");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn letters_to_a_busy_session_cost_no_commit_before_it_speaks_again() -> Result<()> {
    let database = fresh_database().await;
    let model = Model::start(r#"{"rules": [{"reply": {"text": "ok", "hold": "good"}}]}"#).await?;
    let config = json!({"slug": "busy", "flavor": "OpenAI", "modelUrl": model.url, "modelName": "m"});
    let world = World::new(database.url(), model, AgentFiles::with_tools(&config, &[])?);
    let (_api, api) = world.node("api", &[], &[]).await?;
    let (mut worker, _) = world.node("worker", &[], &[]).await?;
    let session = world.create(&api).await?;
    until_asked(&world, Instant::now() + PATIENCE).await?;
    let asked = world.view(&api, session).await?["version"].as_i64().context("no version")?;
    let to = |what: &str| format!("{api}/v1/sessions/{session}/{what}");
    // A message brings an order to go on along, for a session that is held.
    let write = async |text: &str, as_mail: bool| {
        let (url, body) = match as_mail {
            true => (to("mail"), json!({"body": {"tag": "userMessage", "query": text}})),
            false => (to("messages"), json!({"prompt": text})),
        };
        let (status, receipt) = world.call("POST", &url, Some(&body)).await?;
        ensure!(status == 202, "{status} {receipt}");
        anyhow::Ok(())
    };
    for n in 0..30 {
        write(&format!("letter {n}"), n % 2 == 0).await?;
    }
    let busy = world.view(&api, session).await?["version"].as_i64().context("no version")?;
    ensure!(busy == asked, "thirty letters raised the version from {asked} to {busy}");
    // What was read and waits is in nobody's memory alone.
    worker.kill().await?;
    let (_worker, _) = world.node("worker", &[], &[]).await?;
    write("the last letter", true).await?;
    world.model.release("good").await?;
    world.until(&api, session, "idle").await?;
    let asked = world.model.requests().await?.last().context("nothing was asked")?.to_string();
    let told = asked.matches("letter").count();
    ensure!(told == 31, "{told} letters are told: {asked}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn orders_to_go_on_leave_room_for_one_to_stop() -> Result<()> {
    let database = fresh_database().await;
    let model = Model::start(r#"{"rules": [{"reply": {"text": "ok", "hold": "good"}}]}"#).await?;
    let config = json!({"slug": "busy", "flavor": "OpenAI", "modelUrl": model.url, "modelName": "m"});
    let world = World::new(database.url(), model, AgentFiles::with_tools(&config, &[])?);
    let (_api, api) = world.node("api", &[], &[]).await?;
    let (_worker, _) = world.node("worker", &[], &[]).await?;
    let session = world.create(&api).await?;
    until_asked(&world, Instant::now() + PATIENCE).await?;
    // More than a mailbox has room for, while the model takes its time.
    let mail = format!("{api}/v1/sessions/{session}/mail");
    let go_on = json!({"body": {"tag": "control", "message": {"tag": "resume"}}});
    for n in 0..600 {
        let (status, receipt) = world.call("POST", &mail, Some(&go_on)).await?;
        ensure!(status == 202, "after {n}: {status} {receipt}");
    }
    let (status, answer) = world.call("POST", &format!("{api}/v1/sessions/{session}/cancel"), None).await?;
    ensure!(status == 200, "{status} {answer}");
    // Nothing was answered, so it is as it was before it was asked.
    world.until(&api, session, "ready").await?;
    Ok(())
}

async fn until_asked(world: &World, until: Instant) -> Result<()> {
    let mut pause = interval(Duration::from_millis(50));
    while world.model.held().await?.is_empty() {
        pause.tick().await;
        ensure!(Instant::now() < until, "the model isn't asked");
    }
    Ok(())
}

/// Keeps a run's row locked, by two connections in turn, each of which waits for it before the other one lets go:
/// whoever only looks finds it locked at every look. All the while the workers hear of other sessions.
async fn never_free(database: &Database, session: Uuid) -> Result<()> {
    let lock = format!("BEGIN; SELECT FROM runs WHERE session_id = '{session}' FOR UPDATE");
    let hint = format!("NOTIFY {}, '{}'", Channel::Events.name(), Uuid::nil());
    let (mut holds, mut waits, hints) =
        (database.connect().await, database.connect().await, database.connect().await);
    holds.batch_execute(&lock).await?;
    loop {
        let letting_go = async {
            for _ in 0..5 {
                tokio::time::sleep(Duration::from_millis(4)).await; // others queue up meanwhile
                hints.batch_execute(&hint).await?;
            }
            holds.batch_execute("COMMIT").await
        };
        let (locked, let_go) = tokio::join!(waits.batch_execute(&lock), letting_go);
        locked?;
        let_go?;
        std::mem::swap(&mut holds, &mut waits);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_whose_row_is_locked_at_every_look_is_renewed_in_its_turn() -> Result<()> {
    let database = fresh_database().await;
    let model = Model::start(r#"{"rules": [{"reply": {"text": "ok", "hold": "good"}}]}"#).await?;
    let config = json!({"slug": "busy", "flavor": "OpenAI", "modelUrl": model.url, "modelName": "m"});
    let mut world = World::new(database.url(), model, AgentFiles::with_tools(&config, &[])?);
    world.lease_ttl = 5;
    let (_api, api) = world.node("api", &[], &[]).await?;
    let (worker, _) = world.node("worker", &[], &[]).await?;
    let session = world.create(&api).await?;
    let (sql, until) = (database.connect().await, Instant::now() + PATIENCE);
    until_asked(&world, until).await?;
    let mut pause = interval(Duration::from_millis(50));
    let lease = "SELECT epoch, lease_until::text FROM runs WHERE state = 'claimed'";
    let first: (i64, String) = sql.query_one(lease, &[]).await.map(|row| (row.get(0), row.get(1)))?;
    let renewals = async {
        let mut seen = vec![first.1];
        // The first one may have been on its way before.
        while seen.len() < 5 {
            pause.tick().await;
            ensure!(Instant::now() < until, "only {seen:?}");
            let row = sql.query_opt(lease, &[]).await?.context("nobody holds the run")?;
            ensure!(row.get::<_, i64>(0) == first.0, "the run was taken over");
            let log = worker.log_text();
            ensure!(!log.contains("run.lease_lost"), "after {} renewals: {log}", seen.len() - 1);
            let until: String = row.get(1);
            if seen.last() != Some(&until) {
                seen.push(until);
            }
        }
        anyhow::Ok(())
    };
    tokio::select! {
        ended = never_free(&database, session) => ended,
        renewed = renewals => renewed,
    }
}
