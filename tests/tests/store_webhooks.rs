//! Webhooks as the store keeps them: what is laid up, in which order it is handed out, what failures make of it, and
//! that nothing of it grows without bound.

use std::{collections::BTreeSet, time::Duration};

use futures::future::join_all;
use holdfast_engine::{decide::Mode, ids::SessionId};
use holdfast_store::{
    create::{self, NewSession},
    delete::delete,
    feed,
    retire::purge_deleted,
    status,
    webhooks::{self, After, Delivery, Endpoint, MOST_PENDING, PAGE, SERVER, Which},
};
use holdfast_tests::{
    gates::PATIENCE,
    store::{World, caller, message, new_session, record},
};
use serde_json::Value;
use tokio::time::Instant;
use uuid::Uuid;

const DAY: Duration = Duration::from_secs(86_400);
const NOW: Duration = Duration::ZERO;

fn endpoint(name: &str, agent: Option<&str>) -> Endpoint {
    Endpoint {
        name: name.to_owned(),
        agent: agent.map(str::to_owned),
        url: "http://127.0.0.1:9/".to_owned(),
        secret_id: "default".to_owned(),
        kinds: holdfast_engine::webhook::KINDS.map(str::to_owned).to_vec(),
    }
}

/// Waits until the feed shows all that was written: other tests' transactions hold it back too.
async fn settled(world: &World) {
    let (sql, deadline) = (world.sql().await, Instant::now() + PATIENCE);
    let mut pause = tokio::time::interval(Duration::from_millis(10));
    let shown =
        "SELECT NOT EXISTS (SELECT 1 FROM events WHERE xid >= pg_snapshot_xmin(pg_current_snapshot()))";
    while !sql.query_one(shown, &[]).await.expect("an answer").get::<_, bool>(0) {
        pause.tick().await;
        assert!(Instant::now() < deadline, "a transaction stays open");
    }
}

async fn declared(world: &World, endpoint: &Endpoint) {
    settled(world).await;
    feed::renew(&world.store).await.expect("the feed has a name");
    webhooks::declare(&world.store, endpoint).await.expect("declared");
}

/// Lays up everything that there is for an endpoint. Returns how many deliveries that made.
async fn queue(world: &World, name: &str) -> i64 {
    settled(world).await;
    queue_shown(world, name).await
}

/// The same of what the feed shows by now.
async fn queue_shown(world: &World, name: &str) -> i64 {
    let mut queued = 0;
    loop {
        let done = webhooks::queue(&world.store, name).await.expect("a page");
        queued += done.queued;
        if done.read == 0 {
            return queued;
        }
    }
}

async fn claim(world: &World, endpoint: &Endpoint) -> Vec<Delivery> {
    webhooks::claim(&world.store, endpoint, 100).await.expect("a claim")
}

async fn delivered(world: &World, delivery: &Delivery) -> bool {
    webhooks::delivered(&world.store, delivery).await.expect("an answer")
}

/// Makes all that waits due.
async fn time_passes(world: &World) {
    world.sql().await.batch_execute("UPDATE webhook_deliveries SET due_at = now()").await.expect("due");
}

async fn rows(world: &World) -> i64 {
    world.count("SELECT count(*) FROM webhook_deliveries").await
}

/// Lays up deliveries of a session that nobody knows, as if they had been in the feed.
async fn fill(world: &World, name: &str, rows: i64, state: &str, days: i32) {
    let sql = "INSERT INTO webhook_deliveries (session_id, seq, endpoint, owner, agent, kind, body, at, state, due_at, last_error)
               SELECT gen_random_uuid(), n, $1, 'o', 'a', 'run.stopped', '{}', now(), $2, now() - make_interval(days => $4), 'x'
               FROM generate_series(1, $3::bigint) n";
    world.sql().await.execute(sql, &[&name, &state, &rows, &days]).await.expect("rows");
}

#[tokio::test]
async fn what_happens_is_laid_up_once_and_handed_out_in_the_order_of_each_session() {
    let world = World::new().await;
    let before = world.waiting().await.0;
    let server = endpoint(SERVER, None);
    declared(&world, &server).await;
    let (first, _, token) = world.waiting().await;
    let (second, ..) = world.waiting().await;
    settled(&world).await;
    let rivals = join_all((0..16).map(|_| webhooks::queue(&world.store, SERVER))).await;
    let queued: i64 = rivals.into_iter().map(|done| done.expect("a page").queued).sum();
    assert_eq!(queued + queue(&world, SERVER).await, 4, "each event once, and none from before");
    let claims = join_all((0..16).map(|_| webhooks::claim(&world.store, &server, 100))).await;
    let heads: Vec<Delivery> = claims.into_iter().flat_map(|claimed| claimed.expect("a claim")).collect();
    let of: BTreeSet<Uuid> = heads.iter().map(|one| one.session_id).collect();
    assert_eq!(of, BTreeSet::from([first.0, second.0]), "never of {before}");
    assert_eq!(heads.len(), 2, "each once: {heads:?}");
    assert!(heads.iter().all(|one| one.kind == "calls.deferred"), "{heads:?}");

    let document = heads[0].document(&world.store).await.expect("a document");
    let document: Value = serde_json::from_str(&document).expect("JSON");
    assert_eq!(document["id"], heads[0].id());
    assert_eq!(document["kind"], "calls.deferred");
    assert_eq!(document["seq"], heads[0].seq);
    assert_eq!(document["agent"], "helper");
    assert_eq!(document["owner"], "alice");
    let call = &document["calls"][0];
    assert!(call["continuation_token"] == token.0.to_string() || heads[0].session_id == second.0, "{call}");
    assert_eq!(call["tool"], "ask_anna");

    assert_eq!(claim(&world, &server).await, [], "what follows waits for its session's oldest");
    assert!(delivered(&world, &heads[0]).await);
    let [next] = &claim(&world, &server).await[..] else { panic!("the next of one session") };
    assert_eq!((next.session_id, next.kind.as_str()), (heads[0].session_id, "run.stopped"));
    assert!(delivered(&world, next).await && delivered(&world, &heads[1]).await);
    let [last] = &claim(&world, &server).await[..] else { panic!("the last") };
    assert!(delivered(&world, last).await);
    assert_eq!(rows(&world).await, 0, "what was delivered is removed at once");
    assert_eq!(queue(&world, SERVER).await, 0);
}

#[tokio::test]
async fn a_writer_that_commits_late_is_neither_lost_nor_overtaken() {
    let world = World::new().await;
    declared(&world, &endpoint(SERVER, None)).await;
    let (mut writer, late) = (world.sql().await, Uuid::now_v7());
    let tx = writer.transaction().await.expect("a transaction");
    let session = world.session().await;
    let write = "INSERT INTO events (session_id, seq, owner, kind, body) VALUES ($1, 99, 'alice', 'run.stopped', '{}')";
    tx.execute(write, &[&session.0]).await.expect("written");
    world.waiting().await;
    assert_eq!(queue_shown(&world, SERVER).await, 0, "the feed stands still below the oldest writer: {late}");
    tx.commit().await.expect("committed");
    assert_eq!(queue(&world, SERVER).await, 3);
}

#[tokio::test]
async fn a_claim_that_is_over_is_somebody_elses() {
    let world = World::new().await;
    let server = endpoint(SERVER, None);
    declared(&world, &server).await;
    world.waiting().await;
    queue(&world, SERVER).await;
    let [old] = &claim(&world, &server).await[..] else { panic!("one") };
    time_passes(&world).await;
    let [new] = &claim(&world, &server).await[..] else { panic!("the same again") };
    assert_eq!((old.id(), old.attempts), (new.id(), new.attempts));
    assert!(!delivered(&world, old).await, "whoever comes back changes nothing");
    let after = webhooks::failed(&world.store, old, "status 500", NOW, NOW).await.expect("an answer");
    assert_eq!(after, After::Lost);
    assert!(delivered(&world, new).await);
}

#[tokio::test]
async fn pauses_double_to_an_hour_and_what_is_given_up_stays_and_can_be_sent_again() {
    let world = World::new().await;
    let server = endpoint(SERVER, None);
    declared(&world, &server).await;
    let (session, ..) = world.waiting().await;
    queue(&world, SERVER).await;
    let sql = world.sql().await;
    let mut pauses = Vec::new();
    for attempt in 0..14 {
        let [one] = &claim(&world, &server).await[..] else { panic!("attempt {attempt}") };
        assert_eq!(one.attempts, attempt);
        let after = webhooks::failed(&world.store, one, "status 503", NOW, DAY).await.expect("an answer");
        assert_eq!(after, After::Again);
        let asked = "SELECT max(extract(epoch FROM due_at - now()))::float8 FROM webhook_deliveries WHERE attempts > 0";
        pauses.push(sql.query_one(asked, &[]).await.expect("a pause").get::<_, f64>(0));
        assert_eq!(claim(&world, &server).await, [], "nothing of the session overtakes it");
        time_passes(&world).await;
    }
    for (attempt, pause) in (0..).zip(&pauses) {
        let whole = (2.0 * 2_f64.powi(attempt)).min(3_600.0);
        assert!((whole / 2.0 - 1.0..=whole).contains(pause), "attempt {attempt}: {pauses:?}");
    }
    let [one] = &claim(&world, &server).await[..] else { panic!("one more") };
    let minutes = Duration::from_secs(600);
    webhooks::failed(&world.store, one, "status 429", minutes, DAY).await.expect("an answer");
    let asked = "SELECT count(*) FROM webhook_deliveries WHERE due_at > now() + interval '9 minutes'";
    assert_eq!(world.count(asked).await, 1, "as long as the receiver asks for, or longer");
    time_passes(&world).await;

    let [one] = &claim(&world, &server).await[..] else { panic!("the last attempt") };
    let after = webhooks::failed(&world.store, one, "status 500", NOW, NOW).await.expect("an answer");
    assert_eq!(after, After::Dead);
    let [letter] = &webhooks::dead(&world.store, 10).await.expect("letters")[..] else {
        panic!("one letter")
    };
    assert_eq!((letter.id(), letter.attempts, letter.cause.as_str()), (one.id(), 16, "status 500"));
    let [next] = &claim(&world, &server).await[..] else { panic!("the session goes on behind it") };
    assert!(next.seq > one.seq && delivered(&world, next).await);

    let of_other = Which { endpoint: Some("agent:other".to_owned()), event: None };
    assert_eq!(webhooks::retry(&world.store, &of_other, 10).await.expect("an answer"), 0);
    let of_event = Which { endpoint: None, event: Some((session.0, one.seq)) };
    assert_eq!(webhooks::retry(&world.store, &of_event, 10).await.expect("an answer"), 1);
    let [again] = &claim(&world, &server).await[..] else { panic!("sent again") };
    assert_eq!((again.id(), again.attempts), (one.id(), 0));
    webhooks::failed(&world.store, again, "status 500", NOW, NOW).await.expect("an answer");
    assert_eq!(webhooks::discard(&world.store, &Which::default(), 10).await.expect("an answer"), 1);
    assert_eq!(rows(&world).await, 0);
}

#[tokio::test]
async fn what_has_waited_for_long_is_given_up_when_it_has_failed_for_long() {
    let world = World::new().await;
    let server = endpoint(SERVER, None);
    declared(&world, &server).await;
    world.waiting().await;
    queue(&world, SERVER).await;
    let sql = world.sql().await;
    // Nobody was there to send it.
    sql.batch_execute("UPDATE webhook_deliveries SET queued_at = now() - interval '3 days'")
        .await
        .expect("aged");
    let [one] = &claim(&world, &server).await[..] else { panic!("one") };
    let after = webhooks::failed(&world.store, one, "status 503", NOW, DAY).await.expect("an answer");
    assert_eq!(after, After::Again);
    let a_day_later = "UPDATE webhook_deliveries SET failing_since = failing_since - interval '1 day'";
    sql.batch_execute(a_day_later).await.expect("aged");
    time_passes(&world).await;
    // A receiver that wants nothing isn't failing until it is asked again.
    let [one] = &claim(&world, &server).await[..] else { panic!("again") };
    assert!(webhooks::disable(&world.store, &server, one).await.expect("an answer"));
    webhooks::enable(&world.store, None).await.expect("an answer");
    for expected in [After::Again, After::Dead] {
        time_passes(&world).await;
        let [one] = &claim(&world, &server).await[..] else { panic!("once more") };
        let after = webhooks::failed(&world.store, one, "status 503", NOW, DAY).await.expect("an answer");
        assert_eq!(after, expected);
        sql.batch_execute(a_day_later).await.expect("aged");
    }
}

#[tokio::test]
async fn an_agents_endpoint_is_sent_its_own_sessions_and_the_kinds_that_it_asks_for() {
    let world = World::new().await;
    record(&world.store, "other", &world.agent).await.expect("recorded");
    let mine = Endpoint { kinds: vec!["run.stopped".to_owned()], ..endpoint("agent:helper", Some("helper")) };
    let others = endpoint("agent:other", Some("other"));
    declared(&world, &mine).await;
    declared(&world, &others).await;
    let (session, ..) = world.waiting().await;
    assert_eq!((queue(&world, &mine.name).await, queue(&world, &others.name).await), (1, 0));
    let [one] = &claim(&world, &mine).await[..] else { panic!("one") };
    assert_eq!((one.session_id, one.kind.as_str()), (session.0, "run.stopped"));
    let new =
        NewSession { agent: "other".to_owned(), ..new_session(Some(message("go")), Mode::UntilBlocked) };
    create::create(&world.store, &caller(), new.clone()).await.expect("a session");
    let write = "INSERT INTO events (session_id, seq, owner, kind, body) VALUES ($1, 99, 'alice', 'run.stopped', '{}')";
    world.sql().await.execute(write, &[&new.id.0]).await.expect("an event");
    assert_eq!(queue(&world, &others.name).await, 1);
    assert_eq!(queue(&world, &mine.name).await, 0);
}

#[tokio::test]
async fn what_waits_and_what_was_given_up_is_bounded() {
    let world = World::new().await;
    let server = endpoint(SERVER, None);
    declared(&world, &server).await;
    fill(&world, SERVER, MOST_PENDING, "pending", 0).await;
    let (session, ..) = world.waiting().await;
    assert_eq!(queue(&world, SERVER).await, 0, "the place in the feed waits");
    let state = status::webhooks(&world.store).await.expect("a report").expect("in time");
    assert_eq!((state[0].pending, state[0].unread_since.is_some()), (MOST_PENDING, true));
    let [one, ..] = &claim(&world, &server).await[..] else { panic!("many") };
    assert!(delivered(&world, one).await);
    assert_eq!(queue(&world, SERVER).await, 2, "and nothing of it is lost");
    assert!(MOST_PENDING + PAGE > rows(&world).await);

    world.sql().await.batch_execute("DELETE FROM webhook_deliveries WHERE agent = 'a'").await.expect("gone");
    fill(&world, SERVER, 25, "dead", webhooks::DEAD_DAYS + 1).await;
    fill(&world, SERVER, 3, "dead", webhooks::DEAD_DAYS - 1).await;
    for expected in [10, 10, 5, 0] {
        assert_eq!(webhooks::forget(&world.store, 10).await.expect("a pass"), expected);
    }
    assert_eq!(rows(&world).await, 5, "young ones and those that wait stay");

    delete(&world.store, &caller(), session, false).await.expect("deleted");
    while purge_deleted(&world.store, -1.0, 10).await.expect("a pass") > 0 {}
    assert_eq!(rows(&world).await, 3, "what a deleted session said goes with it");

    assert!(webhooks::withdraw(&world.store, SERVER).await.expect("an answer"));
    assert!(!webhooks::withdraw(&world.store, SERVER).await.expect("an answer"));
    assert_eq!(webhooks::endpoints(&world.store).await.expect("a list"), []);
    while webhooks::forget(&world.store, 2).await.expect("a pass") > 0 {}
    assert_eq!(world.count("SELECT count(*) FROM webhook_endpoints").await + rows(&world).await, 0);
}

#[tokio::test]
async fn a_disabled_endpoint_keeps_its_place_and_loses_nothing() {
    let world = World::new().await;
    let server = endpoint(SERVER, None);
    declared(&world, &server).await;
    world.waiting().await;
    queue(&world, SERVER).await;
    let [one] = &claim(&world, &server).await[..] else { panic!("one") };
    assert!(webhooks::disable(&world.store, &server, one).await.expect("an answer"));
    assert!(!webhooks::disable(&world.store, &server, one).await.expect("an answer"), "once");
    world.waiting().await;
    assert_eq!(queue(&world, SERVER).await, 0);
    assert_eq!(claim(&world, &server).await, []);
    declared(&world, &server).await;
    assert_eq!(webhooks::endpoints(&world.store).await.expect("a list"), [], "a restart doesn't enable it");
    assert_eq!(webhooks::enable(&world.store, Some("agent:x")).await.expect("an answer"), 0);
    assert_eq!(webhooks::enable(&world.store, None).await.expect("an answer"), 1);
    assert_eq!(queue(&world, SERVER).await, 2);
    let again = claim(&world, &server).await;
    assert!(again.iter().any(|again| again.id() == one.id() && again.attempts == 1), "{again:?}");
    let elsewhere = Endpoint { url: "http://127.0.0.1:8/".to_owned(), ..server.clone() };
    webhooks::disable(&world.store, &server, &again[0]).await.expect("an answer");
    declared(&world, &elsewhere).await;
    assert_eq!(webhooks::endpoints(&world.store).await.expect("a list"), [elsewhere], "another URL does");
    webhooks::disable(&world.store, &server, &again[0]).await.expect("an answer");
    assert_eq!(
        webhooks::endpoints(&world.store).await.expect("a list").len(),
        1,
        "410 of the old one is late"
    );
}

#[tokio::test]
async fn a_database_that_numbers_anew_begins_at_now() {
    let world = World::new().await;
    declared(&world, &endpoint(SERVER, None)).await;
    world.waiting().await;
    let renamed = "UPDATE feeds SET feed = gen_random_uuid(); UPDATE webhook_endpoints SET xid = '900000000'";
    settled(&world).await;
    world.sql().await.batch_execute(renamed).await.expect("another numbering");
    let done = webhooks::queue(&world.store, SERVER).await.expect("a page");
    assert!(done.renewed && done.read == 0, "{done:?}");
    assert_eq!(queue(&world, SERVER).await, 0);
    world.waiting().await;
    assert_eq!(queue(&world, SERVER).await, 2);
}

#[tokio::test]
async fn a_call_with_giant_arguments_is_sent_without_them() {
    let world = World::new().await;
    let server = endpoint(SERVER, None);
    declared(&world, &server).await;
    let (session, ..) = world.waiting().await;
    let sql = "UPDATE continuations SET arguments = repeat('x', 2000000) WHERE session_id = $1";
    world.sql().await.execute(sql, &[&session.0]).await.expect("giant");
    queue(&world, SERVER).await;
    let [one] = &claim(&world, &server).await[..] else { panic!("one") };
    let text = one.document(&world.store).await.expect("a document");
    assert!(text.len() < webhooks::LONGEST_BODY, "{}", text.len());
    let document: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(document["calls"][0]["call"]["function"]["arguments"], Value::Null);
    assert!(document["calls"][0]["continuation_token"].is_string(), "which says where they are read");
}

#[tokio::test]
async fn clocks_that_were_set_back_hold_up_no_webhook() {
    let world = World::new().await;
    let server = endpoint(SERVER, None);
    declared(&world, &server).await;
    let _: (SessionId, _, _) = world.waiting().await;
    queue(&world, SERVER).await;
    let sql = world.sql().await;
    sql.batch_execute("UPDATE webhook_deliveries SET due_at = now() + interval '1 day'")
        .await
        .expect("ahead");
    assert_eq!(claim(&world, &server).await, []);
    assert_eq!(webhooks::forget(&world.store, 10).await.expect("a pass"), 2);
    assert_eq!(claim(&world, &server).await.len(), 1);
}
