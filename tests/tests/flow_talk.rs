//! Conversations in which more goes on than question and answer, with an API node and a worker as processes.
#![expect(clippy::expect_used, reason = "a test")]

use std::time::Duration;

use anyhow::{Result, ensure};
use holdfast_tests::{
    cluster::{Database, fresh_database},
    talk::{self, Talk},
    world::{AgentFiles, Model, Node, PATIENCE, Signal, World},
};
use serde_json::json;
use tokio::time::Instant;
use uuid::Uuid;

macro_rules! plain {
    ($($name:ident = $talk:ident),* $(,)?) => {
        $(#[tokio::test(flavor = "multi_thread")]
        async fn $name() -> Result<()> {
            Talk::$talk.undisturbed().await.map(drop)
        })*
    };
}

plain! {
    on_any_progress_the_model_is_asked_while_a_call_goes_on = OnAnyProgress,
    when_all_are_done_the_model_is_asked_once = WhenAllDone,
    after_a_while_the_model_is_asked_while_a_call_goes_on = OnTimeout,
    calls_that_only_read_run_beside_the_commit = Reads,
    a_call_that_only_reads_begins_as_another_is_told_of = ReadsBeside,
    a_call_is_attached_for_as_long_as_its_rule_says = Attached,
    a_result_that_was_read_is_not_told_again = ReadFirst,
    a_person_may_interrupt_what_is_waited_for = Interrupted,
    a_person_may_interrupt_a_wait = WaitInterrupted,
    agents_call_agents = Helpers,
    agents_start_agents_that_answer_by_mail = Mail,
    a_session_sleeps_without_a_worker = Sleep,
    a_person_answers_a_question = Question,
    a_question_that_nobody_answers_has_its_default = Unanswered,
    calls_wait_for_approvals_and_hooks = Approvals,
    a_pause_lets_calls_come_home = Paused,
    a_session_is_watched = Watched,
    agents_that_answer_each_other_end_when_the_hops_run_out = PingPong,
    a_person_may_interrupt_a_request = RequestInterrupted,
    a_person_waits_for_a_request_that_may_not_be_interrupted = RequestLeftAlone,
}

#[tokio::test(flavor = "multi_thread")]
async fn every_conversation_is_among_these() {
    let file = include_str!("flow_talk.rs");
    for talk in Talk::ALL {
        let name = format!("= {talk:?},");
        file.find(&name).expect("a test plays it");
    }
}

/// Waits until the slow call has begun so often.
async fn begun(world: &World, times: usize) -> Result<()> {
    let mut tick = tokio::time::interval(Duration::from_millis(20));
    let beginning = async {
        while world.agent.effects().values().sum::<usize>() < times {
            tick.tick().await;
        }
    };
    Ok(tokio::time::timeout(PATIENCE, beginning).await?)
}

/// A worker that is told to leave while a call goes on in the background, with so many seconds of grace; the call is
/// let go before or after it has left. Returns how often the call began.
async fn drained(grace: &str, let_go_first: bool) -> Result<usize> {
    let database = fresh_database().await;
    let mut world = Talk::OnAnyProgress.world(database.url()).await?;
    // Far longer than the test: whoever waits for an expiry fails.
    world.lease_ttl = 600;
    let (_api, api) = world.node("api", &[], &[]).await?;
    let (mut leaving, _) = world.node("worker", &["--shutdown-grace", grace], &[]).await?;
    let id = world.create(&api).await?;
    begun(&world, 1).await?;
    talk::asked(&world, 2).await?;
    leaving.signal(Signal::TERM)?;
    if let_go_first {
        talk::let_go(world.agent.dir())?;
    }
    ensure!(leaving.ended().await?.success(), "{}", leaving.log_text());
    let (_worker, _) = world.node("worker", &[], &[]).await?;
    if !let_go_first {
        begun(&world, 2).await?;
        talk::let_go(world.agent.dir())?;
    }
    Talk::OnAnyProgress.ended(&world, &api, id).await?;
    talk::check(&world).await?;
    Ok(world.agent.effects().values().sum())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_leaves_lets_a_call_in_the_background_finish() -> Result<()> {
    ensure!(drained("60", true).await? == 1);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_has_to_leave_hands_an_idempotent_call_over() -> Result<()> {
    ensure!(drained("1", false).await? == 2);
    Ok(())
}

/// A conversation whose model gives no answer while the slow call goes on, and what it does when that has ended.
async fn unanswered(then: serde_json::Value) -> Result<(Database, World, [Node; 2], String, Uuid)> {
    let database = fresh_database().await;
    let mut world = Talk::OnAnyProgress.world(database.url()).await?;
    let calls = json!([{"name": "bash_fast", "arguments": {}}, {"name": "bash_slow", "arguments": {}}]);
    let script = json!({"rules": [
        {"when": {"contains": "(bash_slow) completed]"}, "reply": then},
        {"when": {"turn": 0}, "reply": {"tool_calls": calls}},
        {"reply": {"status": 400, "error": "no"}}]});
    world.model = Model::start(&script.to_string()).await?;
    let agent = talk::agent(Talk::OnAnyProgress, &world.model.url);
    std::fs::write(world.agent.agent_path(), agent.to_string())?;
    let (api_node, api) = world.node("api", &[], &[]).await?;
    let (worker, _) = world.node("worker", &[], &[]).await?;
    let id = world.create(&api).await?;
    begun(&world, 1).await?;
    let mut tick = tokio::time::interval(Duration::from_millis(20));
    let until = Instant::now() + PATIENCE;
    while !worker.log_text().contains("the model gave no answer") {
        ensure!(Instant::now() < until, "it is answered: {}", worker.log_text());
        tick.tick().await;
    }
    talk::let_go(world.agent.dir())?;
    Ok((database, world, [api_node, worker], api, id))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_comes_home_although_the_model_gives_no_answer() -> Result<()> {
    let (_database, world, _nodes, api, id) = unanswered(json!({"text": "all done"})).await?;
    Talk::OnAnyProgress.ended(&world, &api, id).await?;
    let began = world.agent.effects().values().sum::<usize>();
    ensure!(began == 1, "it began {began} times: it was killed when the model gave no answer");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_fails_once_everything_has_come_home_and_the_model_still_gives_no_answer() -> Result<()> {
    let (_database, world, _nodes, api, id) = unanswered(json!({"status": 400, "error": "still no"})).await?;
    let mut tick = tokio::time::interval(Duration::from_millis(50));
    let until = Instant::now() + PATIENCE;
    let view = loop {
        let view = world.view(&api, id).await?;
        if view["status"] == "failed" {
            break view;
        }
        ensure!(Instant::now() < until, "{view}");
        tick.tick().await;
    };
    ensure!(view["status_detail"].to_string().contains("still no"), "{view}");
    let told = world.model.requests().await?;
    let told = told.iter().filter(|request| request.to_string().contains("(bash_slow) completed]")).count();
    ensure!(told == 1, "the model was asked {told} times with the result");
    Ok(())
}

/// A round of two calls, of which `peek` ends at once. Returns what happened to the session until its run stopped, and
/// the version that stored each turn.
async fn round_of(tools: [&str; 2], rule: serde_json::Value, ends: &str) -> Result<(Vec<String>, Vec<i64>)> {
    let database = fresh_database().await;
    let calls = tools.map(|name| json!({"name": name, "arguments": {}}));
    let script = json!({"rules": [
        {"when": {"turn": 0}, "reply": {"tool_calls": calls}}, {"reply": {"text": "seen"}}]});
    let model = Model::start(&script.to_string()).await?;
    // There is no such tool, which is found out at once.
    let config = json!({"slug": "peeks", "flavor": "OpenAI", "modelUrl": model.url, "modelName": "m",
        "toolCallPolicyConfig": {"rules": [rule, {"tool": "ask", "disposition": {"tag": "defer"}}]}});
    let world = World::new(database.url(), model, AgentFiles::with_tools(&config, &[])?);
    let (_api, api) = world.node("api", &[], &[]).await?;
    let (_worker, _) = world.node("worker", &[], &[]).await?;
    let id = world.create(&api).await?;
    world.until(&api, id, ends).await?;
    let sql = database.connect().await;
    let events =
        "SELECT kind, coalesce(body::json->>'head', '') FROM events WHERE session_id = $1 ORDER BY seq";
    let events = sql.query(events, &[&id]).await?;
    let events = events.iter().map(|row| format!("{} {}", row.get::<_, &str>(0), row.get::<_, &str>(1)));
    let events: Vec<String> = events.map(|event| event.trim().to_owned()).collect();
    let versions = "SELECT version FROM turns WHERE session_id = $1 ORDER BY position";
    let versions = sql.query(versions, &[&id]).await?.iter().map(|row| row.get(0)).collect();
    let first = events.iter().position(|event| event == "run.started").unwrap_or_default();
    Ok((events[first + 1..].to_vec(), versions))
}

#[tokio::test(flavor = "multi_thread")]
async fn what_only_reads_and_ends_at_once_is_stored_with_the_answer_that_asked_for_it() -> Result<()> {
    let (sync, peeks) = (json!({"tag": "runSync"}), ["peek", "peek"]);
    let (events, versions) =
        round_of(peeks, json!({"tool": "peek", "disposition": sync, "readOnly": true}), "idle").await?;
    let told = [
        "session.updated 1",
        "session.updated 2",
        "tool.started",
        "tool.started",
        "tool.completed",
        "tool.completed",
        "session.updated 3",
        "session.updated 4",
        "run.stopped",
    ];
    ensure!(events == told, "{events:?}");
    ensure!(versions == [2, 3, 3, 4], "{versions:?}");
    let (events, versions) =
        round_of(peeks, json!({"tool": "peek", "disposition": sync, "idempotent": true}), "idle").await?;
    ensure!(events == told, "the same is told, of one commit or two: {events:?}");
    ensure!(versions[2] > versions[1], "what may have effects is stored before it begins: {versions:?}");
    // What is counted isn't without effect, whatever the tool does.
    let counted = json!({"tag": "decorate", "inner": sync, "decorators": [
        {"tag": "rateLimit", "perMinute": 1_000}]});
    let (_, versions) =
        round_of(peeks, json!({"tool": "peek", "disposition": counted, "readOnly": true}), "idle").await?;
    ensure!(versions[2] > versions[1], "{versions:?}");
    // Beside a deferred call.
    let told = [
        "session.updated 1",
        "session.updated 2",
        "calls.deferred",
        "tool.started",
        "tool.completed",
        "session.updated 2",
        "run.stopped",
    ];
    for (rule, stored) in [("readOnly", [2, 3]), ("idempotent", [2, 3])] {
        let rule = json!({"tool": "peek", "disposition": sync, rule: true});
        let (events, versions) = round_of(["ask", "peek"], rule, "waiting_external").await?;
        ensure!(events == told, "{events:?}");
        ensure!(versions == stored, "{versions:?}");
    }
    Ok(())
}
