//! Webhooks from real nodes to a real receiver: signed, at least once, in the order of each session, and nobody waits
//! for a receiver that is slow, down or hostile.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use chrono::Utc;
use holdfast_tests::{
    hooked::{Hooked, LEFT, NEW, OLD, PLACED, STRANGER, hides},
    receiver::{Message, Receiver, Refused, Reply, Taken, Verifier, briefly},
    scrape::{Scrape, metrics_address},
    sse::Follower,
    status,
    world::{Node, PATIENCE},
};
use serde_json::{Value, json};
use tokio::time::Instant;
use uuid::Uuid;

fn of(messages: &[Message], session: Uuid) -> Vec<&Message> {
    messages.iter().filter(|one| one.body["session_id"] == session.to_string()).collect()
}

fn kinds<'a>(messages: &[&'a Message]) -> Vec<&'a str> {
    messages.iter().map(|one| one.kind()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_external_worker_is_told_by_whom_it_trusts_and_need_not_poll() -> Result<()> {
    let hooked = Hooked::new().await?;
    let receiver = Receiver::start(|_| Reply::Status(204)).await?;
    let first = hooked.scheduler(Some(&receiver.url), &[]).await?;
    let second = hooked.scheduler(Some(&receiver.url), &[]).await?;
    hooked.until_count(PLACED, 1).await?;
    let (_nodes, api) = hooked.nodes().await?;
    let mut sessions = Vec::new();
    for _ in 0..8 {
        sessions.push(hooked.world.create(&api).await?);
    }
    let deferred = |told: &[Message]| told.iter().filter(|one| one.kind() == "calls.deferred").count() == 8;
    for told in receiver.until(deferred).await?.iter().filter(|one| one.kind() == "calls.deferred") {
        hooked.complete(&api, told).await?;
    }
    let idle = |told: &[Message]| told.iter().filter(|one| one.body["status"] == "idle").count() == 8;
    receiver.until(idle).await?;
    hooked.until_count(LEFT, 0).await?;
    let messages = receiver.messages();
    let ids: BTreeSet<&str> = messages.iter().map(|one| one.id.as_str()).collect();
    ensure!(ids.len() == messages.len(), "two schedulers send each once: {}", briefly(&messages));
    for id in &sessions {
        let mine = of(&messages, *id);
        ensure!(mine.iter().map(|one| one.body["seq"].as_i64()).is_sorted(), "{}", briefly(&messages));
        let (first, rest) = mine.split_first().context("a session that nobody heard of")?;
        ensure!(first.kind() == "calls.deferred" && rest.len() >= 2, "{}", briefly(&messages));
        ensure!(rest.iter().all(|one| one.kind() == "run.stopped"), "{}", briefly(&messages));
        ensure!(rest.first().is_some_and(|one| one.body["status"] == "waiting_external"));
        ensure!(rest.last().is_some_and(|one| one.body["status"] == "idle"), "{}", briefly(&messages));
    }
    let (mut old, mut new, mut stranger) = (Verifier::new(OLD), Verifier::new(NEW), Verifier::new(STRANGER));
    for one in &messages {
        ensure!(one.head == "POST /hook application/json", "{}", one.head);
        ensure!(one.signature.split(' ').count() == 2, "{}", one.signature);
        for known in [&mut old, &mut new] {
            ensure!(known.verify(one, Utc::now()) == Ok(Taken::Fresh), "{one:?}");
            ensure!(known.verify(one, Utc::now()) == Ok(Taken::Repeat), "{one:?}");
        }
        ensure!(stranger.verify(one, Utc::now()) == Err(Refused::Forged), "{one:?}");
        ensure!(one.body["id"] == one.id && one.body["agent"] == "canonical", "{}", one.text);
    }
    as_streams_show_it(&api, sessions[0], &of(&messages, sessions[0])).await?;
    for node in [&first, &second] {
        hides(&node.log_text(), &receiver.url)?;
    }
    Ok(())
}

/// What is sent is what the session's stream shows, and three fields more.
async fn as_streams_show_it(api: &str, session: Uuid, told: &[&Message]) -> Result<()> {
    let path = format!("/v1/sessions/{session}/events?after=0");
    let stream = Follower::start(Arc::new(Mutex::new(vec![api.to_owned()])), path);
    let frames = stream
        .until(|frames| frames.iter().any(|one| one.kind == "run.stopped" && one.data["status"] == "idle"));
    let frames = frames.await?;
    for one in told {
        let frame = frames.iter().find(|frame| frame.data["seq"] == one.body["seq"]).context("an event")?;
        let mut body = one.body.clone();
        let fields = body.as_object_mut().context("an object")?;
        let more: Vec<_> = ["id", "agent", "owner"].iter().filter_map(|name| fields.remove(*name)).collect();
        ensure!(more.len() == 3 && body == frame.data, "{body} is not {}", frame.data);
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_scheduler_was_killed_over_is_sent_again_under_its_id() -> Result<()> {
    let hooked = Hooked::new().await?;
    let hangs = Arc::new(AtomicBool::new(true));
    let hanging = Arc::clone(&hangs);
    let receiver =
        Receiver::start(
            move |_| {
                if hanging.load(Ordering::SeqCst) { Reply::Hang } else { Reply::Status(200) }
            },
        )
        .await?;
    let mut doomed = hooked.scheduler(Some(&receiver.url), &[]).await?;
    hooked.until_count(PLACED, 1).await?;
    let (_nodes, api) = hooked.nodes().await?;
    let session = hooked.world.create(&api).await?;
    // The receiver has it, and the scheduler doesn't know yet.
    let first = receiver.until(|told| !told.is_empty()).await?;
    doomed.kill().await?;
    hangs.store(false, Ordering::SeqCst);
    let _successor = hooked.scheduler(Some(&receiver.url), &[]).await?;
    let messages = receiver.until(|told| told.len() >= 3).await?;
    let mine = of(&messages, session);
    ensure!(kinds(&mine) == ["calls.deferred", "calls.deferred", "run.stopped"], "{}", briefly(&messages));
    ensure!(first[0].id == messages[1].id && first[0].text == messages[1].text, "{}", briefly(&messages));
    let mut verifier = Verifier::new(OLD);
    let taken: Vec<_> = messages.iter().map(|one| verifier.verify(one, Utc::now())).collect();
    ensure!(taken == [Ok(Taken::Fresh), Ok(Taken::Repeat), Ok(Taken::Fresh)], "{taken:?}");
    hooked.until_count(LEFT, 0).await
}

#[tokio::test(flavor = "multi_thread")]
async fn who_hangs_or_is_down_keeps_nobody_waiting_and_is_told_all_in_order_later() -> Result<()> {
    let hooked = Hooked::new().await?;
    let up = Arc::new(AtomicBool::new(false));
    let is_up = Arc::clone(&up);
    let flaky =
        Receiver::start(
            move |_| {
                if is_up.load(Ordering::SeqCst) { Reply::Status(200) } else { Reply::Status(503) }
            },
        )
        .await?;
    let healthy = Receiver::start(|_| Reply::Status(200)).await?;
    hooked.agent_hook(&json!({"url": healthy.url, "secretId": "other", "events": ["run.stopped"]}))?;
    let scheduler = hooked.scheduler(Some(&flaky.url), &[]).await?;
    hooked.until_count(PLACED, 1).await?;
    let (_nodes, api) = hooked.nodes().await?;
    hooked.until_count(PLACED, 2).await?;
    let mut sessions = Vec::new();
    for _ in 0..20 {
        sessions.push(hooked.world.create(&api).await?);
    }
    // More of them fail than one endpoint is sent at once.
    healthy.until(|told| told.len() >= 20).await?;
    let mut own = Verifier::new(STRANGER);
    for one in &healthy.messages() {
        ensure!(one.kind() == "run.stopped" && own.verify(one, Utc::now()) == Ok(Taken::Fresh), "{one:?}");
    }
    let failing = flaky.until(|told| told.len() >= 20).await?;
    ensure!(failing.iter().all(|one| one.kind() == "calls.deferred"), "nothing overtakes what failed");
    up.store(true, Ordering::SeqCst);
    hooked.until_count(LEFT, 0).await?;
    let messages = flaky.messages();
    for session in sessions {
        let mut last: BTreeMap<&str, usize> = BTreeMap::new();
        let mine = of(&messages, session);
        mine.iter().enumerate().for_each(|(place, one)| *last.entry(one.kind()).or_insert(place) = place);
        ensure!(last.get("calls.deferred") < last.get("run.stopped"), "{}", briefly(&messages));
        ensure!(mine.iter().filter(|one| one.kind() == "run.stopped").count() == 1, "{}", briefly(&messages));
    }
    let log = scheduler.log_text();
    for (kind, times) in [("webhook.failing", 1), ("webhook.recovered", 1), ("webhook.dead", 0)] {
        let found = log.matches(&format!("\"kind\":\"{kind}\"")).count();
        ensure!(found.min(1) == times, "{kind} {found} times: {log}");
    }
    hides(&log, &flaky.url)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_receiver_that_hangs_delays_no_other() -> Result<()> {
    let hooked = Hooked::new().await?;
    let hanging = Receiver::start(|_| Reply::Hang).await?;
    let healthy = Receiver::start(|_| Reply::Endless).await?;
    hooked.agent_hook(&json!({"url": healthy.url}))?;
    let _scheduler = hooked.scheduler(Some(&hanging.url), &[]).await?;
    hooked.until_count(PLACED, 1).await?;
    let (_nodes, api) = hooked.nodes().await?;
    hooked.until_count(PLACED, 2).await?;
    for _ in 0..20 {
        hooked.world.create(&api).await?;
    }
    healthy.until(|told| told.len() >= 40).await?;
    // An answer of any length is an answer, of which a little is read.
    hooked.until_count("SELECT count(*) FROM webhook_deliveries WHERE endpoint <> 'server'", 0).await?;
    ensure!(hanging.messages().len() >= 16, "its own lane is full");
    let waiting = hooked.count("SELECT count(*) FROM webhook_deliveries WHERE endpoint = 'server'").await?;
    ensure!(waiting == 40, "{waiting}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_given_up_is_seen_and_sent_again() -> Result<()> {
    let hooked = Hooked::new().await?;
    let accepts = Arc::new(AtomicBool::new(false));
    let accepting = Arc::clone(&accepts);
    let receiver = Receiver::start(move |_| {
        if accepting.load(Ordering::SeqCst) { Reply::Status(200) } else { Reply::Status(500) }
    })
    .await?;
    let scheduler = hooked.scheduler(Some(&receiver.url), &["--webhook-give-up", "1"]).await?;
    hooked.until_count(PLACED, 1).await?;
    let (_nodes, api) = hooked.nodes().await?;
    let session = hooked.world.create(&api).await?;
    hooked.until_count("SELECT count(*) FROM webhook_deliveries WHERE state = 'dead'", 2).await?;
    let log = scheduler.log_text();
    let dead: Vec<&str> = log.lines().filter(|line| line.contains("\"webhook.dead\"")).collect();
    ensure!(dead.len() == 2 && dead[0].contains(&session.to_string()), "{log}");
    ensure!(dead[0].contains("status 500") && dead[0].contains("webhook_id"), "{log}");
    let seen = Scrape::of(&metrics_address(&scheduler)?).await?;
    ensure!(seen.series["holdfast_webhooks_dead_total"][0].1 == 2.0, "{:?}", seen.series);

    let told = status::status(hooked.database.url(), &["--json"]).await;
    let finding = told.finding("webhooks-undelivered").context("a finding")?;
    ensure!(finding.contains("server") && finding.ends_with('2'), "{finding}");
    ensure!(told.json["webhooks"][0]["given_up"] == 2, "{}", told.text);
    let text = status::status(hooked.database.url(), &[]).await.text;
    ensure!(text.contains("WEBHOOK ENDPOINT") && text.contains("GIVEN UP"), "{text}");
    let listed: Value = serde_json::from_str(&hooked.command(&["list", "--json"]).await?)?;
    ensure!(listed["given_up"][0]["cause"] == "status 500", "{listed}");
    let id = listed["given_up"][1]["id"].as_str().context("an id")?.to_owned();
    ensure!(hooked.command(&["list"]).await?.contains(&id), "{id}");
    for shown in [told.text, text, listed.to_string(), log] {
        hides(&shown, &receiver.url)?;
    }

    accepts.store(true, Ordering::SeqCst);
    let before = receiver.messages().len();
    let said = hooked.command(&["retry", "--id", &id]).await?;
    ensure!(said.starts_with("1 to be sent again"), "{said}");
    let messages = receiver.until(|told| told.len() > before).await?;
    ensure!(messages.last().is_some_and(|last| last.id == id), "{}", briefly(&messages));
    hooked.until_count(LEFT, 1).await?;
    hooked.command(&["discard", "--all"]).await?;
    hooked.until_count(LEFT, 0).await?;
    ensure!(
        status::status(hooked.database.url(), &["--json"]).await.finding("webhooks-undelivered").is_none()
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redirect_leads_nowhere_and_410_disables() -> Result<()> {
    let hooked = Hooked::new().await?;
    let elsewhere = Receiver::start(|_| Reply::Status(200)).await?;
    let (target, gone) = (elsewhere.url.clone(), Arc::new(AtomicBool::new(false)));
    let is_gone = Arc::clone(&gone);
    let receiver = Receiver::start(move |_| {
        if is_gone.load(Ordering::SeqCst) { Reply::Status(410) } else { Reply::Redirect(target.clone()) }
    })
    .await?;
    let scheduler = hooked.scheduler(Some(&receiver.url), &[]).await?;
    hooked.until_count(PLACED, 1).await?;
    let (_nodes, api) = hooked.nodes().await?;
    hooked.world.create(&api).await?;
    hooked.until_count("SELECT count(*) FROM webhook_deliveries WHERE last_error = 'status 307'", 1).await?;
    gone.store(true, Ordering::SeqCst);
    hooked.until_count("SELECT count(*) FROM webhook_endpoints WHERE disabled_at IS NOT NULL", 1).await?;
    let asked = receiver.messages().len();
    let told = status::status(hooked.database.url(), &["--json"]).await;
    let finding = told.finding("webhooks-undelivered").context("a finding")?;
    ensure!(finding.contains("disabled"), "{finding}");
    ensure!(scheduler.log_text().contains("webhook.disabled"), "{}", scheduler.log_text());
    hooked.world.create(&api).await?;
    // A scheduler that starts anew looks at once, and leaves it alone too.
    let second = hooked.scheduler(Some(&receiver.url), &[]).await?;
    let (address, deadline) = (metrics_address(&second)?, Instant::now() + PATIENCE);
    let mut pause = tokio::time::interval(Duration::from_millis(100));
    let passed = |seen: &Scrape| {
        let all = seen.series.get("holdfast_scheduler_passes_total").into_iter().flatten();
        let mine =
            all.filter(|(labels, _)| labels["pass"] == "queue_webhooks" && labels["outcome"] == "done");
        mine.map(|(_, count)| count).sum::<f64>() >= 3.0
    };
    while !passed(&Scrape::of(&address).await?) {
        pause.tick().await;
        ensure!(Instant::now() < deadline, "it makes no passes: {}", second.log_text());
    }
    ensure!(receiver.messages().len() == asked && elsewhere.messages().is_empty());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn without_secrets_nothing_is_sent_and_what_cant_be_signed_is_refused() -> Result<()> {
    let hooked = Hooked::new().await?;
    let receiver = Receiver::start(|_| Reply::Status(200)).await?;
    hooked.agent_hook(&json!({"url": receiver.url, "secretId": "absent"}))?;
    let (_plain, _) = hooked.world.node("scheduler", &[], &[]).await?;
    let other = hooked.scheduler(None, &[]).await?;
    let (_nodes, api) = hooked.nodes().await?;
    hooked.until_count(PLACED, 1).await?;
    let session = hooked.world.create(&api).await?;
    hooked.world.until(&api, session, "waiting_external").await?;
    let deadline = Instant::now() + PATIENCE;
    let mut pause = tokio::time::interval(Duration::from_millis(50));
    while !other.log_text().contains("webhook.no_secret") {
        pause.tick().await;
        if Instant::now() > deadline {
            bail!("nobody says so: {}", other.log_text());
        }
    }
    ensure!(receiver.messages().is_empty() && hooked.count(LEFT).await? == 0);
    let file = hooked.secrets().display().to_string();
    for (flags, wrong) in [
        (vec!["--webhook-url", "http://h/"], "--webhook-secret-file"),
        (vec!["--webhook-url", "ftp://h/", "--webhook-secret-file", &file], "--webhook-url"),
        (vec!["--webhook-url", "http://u:p@h/", "--webhook-secret-file", &file], "password"),
        (vec!["--webhook-secret-file", "/absent"], "webhook secrets"),
    ] {
        let flags: Vec<String> = flags.into_iter().map(str::to_owned).collect();
        let database = ["--database-url".to_owned(), hooked.database.url().to_owned()];
        let mut node = Node::start("scheduler", &[&database[..], &flags].concat(), &[])?;
        let ended = node.ended().await?;
        ensure!(ended.code() == Some(3), "{flags:?}: {ended}");
        ensure!(node.log_text().contains(wrong), "{flags:?}: {}", node.log_text());
    }
    Ok(())
}
