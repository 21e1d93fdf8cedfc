//! `holdfast status` names each situation of a night on call that a database alone can be in, and says what the
//! runbook has a part for.

use chrono::{TimeDelta, Utc};
use holdfast_engine::decide::{Mode, Next};
use holdfast_store::{
    accept::Caller,
    claim::{self, Rotation},
    commit::RunAfter,
    create,
    delete::delete,
    passes,
    quota::{self, Limits},
    workers,
};
use holdfast_tests::{
    status::{Told, status, until},
    step::{Holder, calls},
    store::{AGENT, LONG, OWNER, World, caller, message, new_session, roster, worker},
};
use serde_json::{Value, json};

const JSON: &[&str] = &["--json"];

async fn queued(world: &World, owner: &str, count: usize) {
    for _ in 0..count {
        let mut new = new_session(Some(message("the secret question")), Mode::UntilBlocked);
        new.owner = owner.to_owned();
        let caller = Caller { owner: Some(owner.to_owned()), ..caller() };
        create::create(&world.store, &caller, new.clone()).await.expect("a session");
    }
}

fn codes(told: &Told) -> Vec<&str> {
    let list = told.json["waits_for"].as_array().map(Vec::as_slice).unwrap_or_default();
    list.iter().filter_map(|one| one["code"].as_str()).collect()
}

fn waiting<'a>(told: &'a Told, owner: &str) -> &'a Value {
    let list = told.json["queue"]["waiting"].as_array().expect("who waits");
    list.iter()
        .find(|one| one["owner"] == owner)
        .unwrap_or_else(|| panic!("{owner} doesn't wait: {}", told.text))
}

#[tokio::test]
async fn a_quiet_house_is_ok_and_check_says_so_by_its_exit_status() {
    let world = World::new().await;
    let url = world.database.url();
    let quiet = until(url, &["--check"], |told| told.code == 0).await;
    assert_eq!(quiet.text.lines().next(), Some("ok"));
    queued(&world, OWNER, 1).await;
    // Asked without the flag, the report is a success whatever it says.
    let told = status(url, &[]).await;
    assert_eq!(told.code, 0);
    let line = told.text.lines().next().expect("a line");
    assert!(line.starts_with("needs attention: ") && line.contains("[no-worker]"), "{line}");
    assert_eq!(status(url, &["--check", "--json"]).await.code, 1);
    assert_eq!(status("postgres://127.0.0.1:9/none", &["--check"]).await.code, 1);
    assert_eq!(status(url, &["--check", "--session", &uuid::Uuid::nil().to_string()]).await.code, 2);
}

#[tokio::test]
async fn who_waits_the_longest_is_named_with_what_hinders_it() {
    let world = World::new().await;
    let url = world.database.url();
    queued(&world, "slow", 2).await;
    let told = status(url, JSON).await;
    assert!(told.finding("no-worker").is_some(), "{}", told.text);
    assert_eq!(waiting(&told, "slow")["why"], "no_worker");

    // A worker is there and has another agent.
    let id = worker();
    let other = ["other@r1".to_owned()];
    workers::register(&world.store, id, "here", 1, 0, &[], &other).await.expect("registered");
    let sql = world.sql().await;
    let past = "UPDATE runs SET available_at = available_at - interval '2 minutes'";
    sql.batch_execute(past).await.expect("long due");
    let told = status(url, JSON).await;
    assert!(told.finding("agent-unserved").expect("found").contains("helper@r1"), "{}", told.text);
    assert_eq!(told.json["unserved"][0]["runs"], 2);
    assert_eq!(waiting(&told, "slow")["why"], "agent_unserved");

    // It has the agent, and its one slot is taken.
    workers::register(&world.store, id, "here", 1, 0, &[], &roster(&world.agent)).await.expect("registered");
    let told = status(url, JSON).await;
    assert_eq!(waiting(&told, "slow")["why"], "nothing");
    let (agents, rotation) = (roster(&world.agent), Rotation::default());
    let leases = claim::claim(&world.store, id, 1, LONG, &agents, false, &rotation).await.expect("a claim");
    assert_eq!(leases.len(), 1);
    let told = status(url, JSON).await;
    assert_eq!(waiting(&told, "slow")["why"], "no_free_slot");
    let session = waiting(&told, "slow")["session_id"].as_str().expect("an id").to_owned();
    assert!(told.finding("queue-too-old").expect("found").contains(&session), "{}", told.text);
    assert!(told.json["oldest_due_seconds"].as_f64() >= Some(120.0));
    assert_eq!(status(url, &["--json", "--old-run", "3600"]).await.slugs(), Vec::<&str>::new());
    let one = status(url, &["--json", "--session", &session]).await;
    assert_eq!(codes(&one), ["no_free_slot", "unread_mail"]);

    // Its owner's limits explain it, and are no fault.
    let none = Limits { max_running: Some(1), ..Limits::default() };
    quota::set(&world.store, "slow", none).await.expect("set");
    let told = status(url, JSON).await;
    assert_eq!(waiting(&told, "slow")["why"], "owner_max_running");
    assert_eq!(told.slugs(), Vec::<&str>::new());
    let none = Limits { runs_per_minute: Some(0), ..Limits::default() };
    quota::set(&world.store, "slow", none).await.expect("set");
    assert_eq!(codes(&status(url, &["--json", "--session", &session]).await)[0], "owner_runs_per_minute");
    assert!(!status(url, &["--session", &session]).await.text.contains("secret"));

    // Put off after a fault.
    sql.batch_execute("UPDATE runs SET available_at = now() + interval '1 minute' WHERE state = 'queued'")
        .await
        .expect("put off");
    assert_eq!(codes(&status(url, &["--json", "--session", &session]).await)[0], "put_off");
    let told = status(url, JSON).await;
    assert_eq!((&told.json["runs"]["put_off"], &told.json["runs"]["due"]), (&json!(1), &json!(0)));
}

#[tokio::test]
async fn an_owner_that_floods_the_queue_is_named_with_its_share_and_its_limits() {
    let world = World::new().await;
    let url = world.database.url();
    queued(&world, "quiet", 3).await;
    queued(&world, "flood", 1_000).await;
    workers::register(&world.store, worker(), "here", 8, 0, &[], &roster(&world.agent))
        .await
        .expect("registered");
    let told = status(url, JSON).await;
    assert!(told.finding("owner-floods").expect("found").contains("flood"), "{}", told.text);
    let first = &told.json["queue"]["largest"][0];
    assert_eq!((&first["owner"], &first["queued"]), (&json!("flood"), &json!(1_000)));
    assert!(first["share"].as_f64() > Some(0.99), "{first}");

    let limits = Limits { max_running: Some(3), runs_per_minute: None, max_queued: Some(1_200) };
    quota::set(&world.store, "flood", limits).await.expect("set");
    let told = status(url, &["--json", "--owner", "flood"]).await;
    assert!(told.finding("owner-floods").expect("found").contains("1200"), "four fifths: {}", told.text);
    assert_eq!(
        told.json["owner"]["limits"],
        json!({"max_running": 3, "runs_per_minute": null, "max_queued": 1_200})
    );
    assert_eq!((&told.json["runs"]["queued"], &told.json["queue"]["owners"]), (&json!(1_000), &json!(1)));
    let told = status(url, &["--json", "--owner", "quiet"]).await;
    assert_eq!((&told.json["runs"]["queued"], told.slugs().len()), (&json!(3), 0));
}

#[tokio::test]
async fn a_call_past_its_deadline_is_named_with_its_agent_and_reason() {
    let world = World::new().await;
    let url = world.database.url();
    let (late, ..) = world.waiting_since(Utc::now() - TimeDelta::hours(1), "ask_soon_anna").await;
    let (open, _, token) = world.waiting_since(Utc::now(), "ask_bert").await;
    let told = status(url, JSON).await;
    assert!(told.finding("deferred-call-overdue").is_some(), "{}", told.text);
    let deferred = &told.json["deferred"];
    assert_eq!((&deferred["open"], &deferred["overdue"]), (&json!(2), &json!(1)));
    let group = &deferred["groups"][0];
    assert_eq!((&group["agent"], &group["tool"]), (&json!(AGENT), &json!("ask_soon_anna")));
    assert_eq!((&group["reason"], &group["overdue"]), (&json!("soon"), &json!(1)));
    assert_eq!(deferred["oldest"][0]["session_id"], json!(late.0));
    assert_eq!(told.json["open_deferred_calls"], 2);

    let one = status(url, &["--json", "--session", &open.to_string()]).await;
    assert_eq!(codes(&one), ["deferred_call"]);
    assert_eq!(one.json["calls"][0]["reason"], "somebody decides");
    assert_eq!((&one.json["status"], &one.json["run"]), (&json!("waiting_external"), &Value::Null));
    assert_eq!(one.json["events"][0]["kind"], "run.stopped");
    let text = status(url, &["--session", &open.to_string()]).await.text;
    for secret in [token.to_string(), "please".to_owned()] {
        assert!(
            !text.contains(&secret) && !one.text.contains(&secret) && !told.text.contains(&secret),
            "{secret}"
        );
    }
    assert!(status(url, &["--session", &late.to_string()]).await.text.contains("past its deadline"));
}

#[tokio::test]
async fn a_locked_table_costs_its_sections_and_no_others_and_its_holder_is_named() {
    let world = World::new().await;
    let url = world.database.url();
    let holder = world.database.connect().await;
    holder
        .batch_execute("SET application_name = 'forgotten'; BEGIN; LOCK TABLE archives")
        .await
        .expect("locked");
    let pid: i32 = holder.query_one("SELECT pg_backend_pid()", &[]).await.expect("a pid").get(0);
    let waiter = world.database.connect().await;
    let waits = tokio::spawn(async move { waiter.batch_execute("SELECT FROM archives").await });
    let told = until(url, &["--json", "--long-transaction", "1"], |told| {
        told.finding("lock-waits").is_some() && told.finding("long-transaction").is_some()
    })
    .await;
    assert!(told.finding("lock-waits").expect("found").contains(&pid.to_string()), "{}", told.text);
    let open = told.json["database"]["longest_transactions"].as_array().expect("transactions");
    let open = open.iter().find(|one| one["pid"] == pid).unwrap_or_else(|| panic!("{}", told.text));
    assert_eq!((&open["name"], &open["state"]), (&json!("forgotten"), &json!("idle in transaction")));
    assert_eq!(told.json["database"]["lock_waits"][0]["blocked_by"], json!([pid]));

    assert!(told.finding("status-slow").is_some(), "{}", told.text);
    assert_eq!(told.json["took_too_long"], json!(["database.tables", "retention"]));
    assert_eq!(told.json["retention"]["deleted_sessions"], Value::Null);
    assert_eq!(told.json["runs"]["queued"], 0, "the others are told");
    let text = status(url, &[]).await.text;
    assert!(text.contains("deleted sessions and archives: took too long"), "{text}");

    holder.batch_execute("ROLLBACK").await.expect("given back");
    waits.await.expect("joined").expect("read");
    assert_eq!(status(url, JSON).await.json["took_too_long"], json!([]));
}

#[tokio::test]
async fn a_forgotten_writer_is_named_with_what_the_feed_holds_back() {
    let world = World::new().await;
    let url = world.database.url();
    let writer = world.database.connect().await;
    writer
        .batch_execute("SET application_name = 'forgetful'; BEGIN; CREATE TABLE nobodys (x integer)")
        .await
        .expect("written");
    world.session().await;
    // Older writers of other databases of the server, as tests beside this one make them, hold the feed back as well.
    let by_forgetful = |told: &Told| told.json["feed"]["oldest_writer"]["name"] == "forgetful";
    let told = until(url, JSON, by_forgetful).await;
    assert_eq!(told.json["feed"]["events_held_back"], 1);
    // What the database's clock says of the event's age is what counts.
    let sql = world.sql().await;
    sql.batch_execute("UPDATE events SET at = at - interval '61 seconds'").await.expect("aged");
    let told = until(url, JSON, by_forgetful).await;
    assert!(told.finding("feed-lag").expect("found").contains("forgetful"), "{}", told.text);
    writer.batch_execute("ROLLBACK").await.expect("given back");
}

#[tokio::test]
async fn what_may_go_is_counted_and_what_should_be_gone_is_named() {
    let world = World::new().await;
    let url = world.database.url();
    for _ in 0..2 {
        let session = world.session().await;
        delete(&world.store, &caller(), session, false).await.expect("deleted");
    }
    let old = world.session().await;
    let sql = world.sql().await;
    sql.execute("UPDATE sessions SET updated_at = now() - interval '40 days' WHERE id = $1", &[&old.0])
        .await
        .expect("aged");
    let told = status(url, JSON).await;
    let retention = &told.json["retention"];
    assert_eq!(retention["deleted_sessions"], 2, "{}", told.text);
    let closed = &retention["closed_sessions"];
    assert_eq!((&closed["count"], &closed["retired"]), (&json!(1), &json!(false)));
    assert_eq!(told.slugs(), Vec::<&str>::new(), "the grace isn't over");
    let told = status(url, &["--json", "--retire-after-days", "90"]).await;
    assert_eq!(told.json["retention"]["closed_sessions"]["count"], 0);
    let told = status(url, &["--json", "--owner", OWNER]).await;
    assert_eq!(told.json["retention"]["closed_sessions"]["count"], 1);

    sql.batch_execute(
        "UPDATE sessions SET deleted_at = now() - interval '2 hours' WHERE deleted_at IS NOT NULL",
    )
    .await
    .expect("aged");
    let past = Utc::now() - TimeDelta::days(40);
    let made = passes::turn_event_partitions(&world.store, past, None).await.expect("a pass");
    assert_eq!(made.len(), 4);
    let told = status(url, JSON).await;
    assert!(told.finding("scheduler-silent").is_some(), "{}", told.text);
    assert!(told.finding("retention-behind").expect("found").contains(&made[0]), "{}", told.text);
    assert_eq!(told.json["retention"]["events"]["partitions"], 4);
    assert!(status(url, &["--json", "--keep-events-days", "60"]).await.finding("retention-behind").is_none());
    passes::turn_event_partitions(&world.store, Utc::now(), Some(7)).await.expect("a pass");
    while holdfast_store::retire::purge_deleted(&world.store, 60.0, 10).await.expect("a pass") > 0 {}
    assert_eq!(status(url, JSON).await.slugs(), Vec::<&str>::new());
}

/// A session whose call of a tool runs.
async fn running(world: &World, tool: &str) -> Holder {
    let mut holder = world.hold().await;
    assert!(matches!(holder.decide(), Next::AskModel));
    holder.commit(RunAfter::Keep).await.expect("stored");
    holder.answer(calls(&[(tool, "{}")]));
    assert!(matches!(holder.decide(), Next::RunCalls(_)));
    holder.commit(RunAfter::Keep).await.expect("stored");
    holder
}

#[tokio::test]
async fn what_a_deploy_would_cut_off_is_told_by_what_becomes_of_it() {
    let world = World::new().await;
    let url = world.database.url();
    let (parked, ..) = world.waiting().await;
    let mut holders = Vec::new();
    for tool in ["twice_x", "once_x", "once_x"] {
        world.asked("go").await;
        holders.push(running(&world, tool).await);
    }
    world.asked("think").await;
    let _thinking = world.hold().await;
    let told = status(url, JSON).await;
    let deploy = &told.json["deploy"];
    assert_eq!(
        (&deploy["tool_once"], &deploy["tool_again"], &deploy["model_request"]),
        (&json!(2), &json!(1), &json!(1)),
        "{}",
        told.text
    );
    assert_eq!(
        (&deploy["steps"][0]["name"], &deploy["steps"][0]["kind"]),
        (&json!("once_x"), &json!("tool_once"))
    );
    let one = status(url, &["--json", "--session", &holders[1].session.id.to_string()]).await;
    assert_eq!(codes(&one), ["tool_running"]);
    assert_eq!(one.json["calls"][0]["idempotent"], false);
    assert_eq!(codes(&status(url, &["--json", "--session", &parked.to_string()]).await), ["deferred_call"]);
}
