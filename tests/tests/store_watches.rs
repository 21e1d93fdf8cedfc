//! Watches: what happens in one session comes to another one's mailbox, once, in order, for a while.

use std::time::Duration;

use futures::future::join_all;
use holdfast_engine::{
    decide::Mode,
    ids::{MailId, SessionId},
    mail::{Envelope, MailBody, Sender},
    scope::Scope,
    session::Status,
    turn::{Said, TurnBody},
    waking::WakeClass,
};
use holdfast_store::{
    correspond::{self, Address, Correspondence},
    create,
    delete::delete,
    history,
    letters::MAILBOX_LIMIT,
    retire::purge_deleted,
    watches::{self, NewWatch, WATCHES_LIMIT, Watch, WatchError},
};
use holdfast_tests::{
    step::{calls, says},
    store::{AGENT, OWNER, World, agent, caller, new_session, open, record},
};
use serde_json::json;
use uuid::Uuid;

async fn child(world: &World, parent: SessionId) -> SessionId {
    let new = create::NewSession { parent: Some(parent), ..new_session(None, Mode::None) };
    create::create(&world.store, &caller(), new.clone()).await.expect("a child");
    new.id
}

fn watch(watcher: SessionId, watched: SessionId, kinds: &[&str]) -> NewWatch {
    NewWatch {
        id: Uuid::now_v7(),
        watcher,
        watched: Address::Session(watched),
        kinds: kinds.iter().map(|kind| (*kind).to_owned()).collect(),
        tool: None,
        ttl: None,
        scope: Scope::Subtree,
    }
}

async fn start(world: &World, new: &NewWatch) -> Result<Watch, WatchError> {
    watches::start(&world.store, OWNER, new).await
}

/// Forwards until nothing is left to do. Returns how often something was.
async fn forward(world: &World) -> u64 {
    let mut done = 0;
    for _ in 0..100 {
        match watches::forward(&world.store, 50).await.expect("a pass") {
            0 => return done,
            count => done += count,
        }
    }
    panic!("the pass never comes to rest")
}

/// The events that a session was told, as `kind tool`.
async fn told(world: &World, session: SessionId) -> Vec<String> {
    let mail = history::mail(&world.store, session, 0, false, 500).await.expect("mail");
    mail.into_iter().filter_map(|letter| event(&letter)).collect()
}

fn event(letter: &Envelope) -> Option<String> {
    let MailBody::WatchedEvent { event, data, .. } = &letter.body else { return None };
    assert_eq!(letter.from, Sender::System { source: "watch".to_owned() });
    let tool = data["tool"].as_str().map(|tool| format!(" {tool}")).unwrap_or_default();
    Some(format!("{event}{tool}"))
}

async fn watches_there_are(world: &World) -> i64 {
    world.count("SELECT count(*) FROM watches").await
}

/// Lets the watched session do a round with two tools and answer.
async fn work(world: &World, session: SessionId) {
    world.post(session, "work", Mode::UntilBlocked).await;
    let mut holder = world.hold().await;
    assert_eq!(holder.session.id, session);
    let round = vec![calls(&[("deploy_prod", "{}"), ("fetch", "{}")]), says("done")];
    assert_eq!(holder.drive_with(round).await, Status::Idle);
}

#[tokio::test]
async fn events_come_once_in_order_and_wake_the_watcher() {
    let world = World::new().await;
    let parent = world.session().await;
    let watched = child(&world, parent).await;
    work(&world, watched).await;
    let new = NewWatch {
        tool: Some("deploy_*".to_owned()),
        ..watch(parent, watched, &["run.stopped", "tool.completed", "tool.started"])
    };
    start(&world, &new).await.expect("a watch");
    assert_eq!(forward(&world).await, 0, "what was before isn't told");
    work(&world, watched).await;
    assert!(forward(&world).await > 0);
    let expected = ["tool.started deploy_prod", "tool.completed deploy_prod", "run.stopped"];
    assert_eq!(told(&world, parent).await, expected);
    assert_eq!((forward(&world).await, told(&world, parent).await.len()), (0, 3));
    // The model reads where it happened and what.
    let mut holder = world.hold().await;
    assert_eq!(holder.session.id, parent);
    assert_eq!(holder.drive_with(vec![says("seen")]).await, Status::Idle);
    let Some(TurnBody::User(turn)) = holder.session.turns.first().map(|turn| &turn.body) else {
        panic!("a user turn")
    };
    let hex = watched.0.simple().to_string();
    let header = format!(": event run.stopped of session {}]\n{{\"status\":\"idle\"}}", &hex[24..]);
    let shown = turn.said.iter().any(
        |said| matches!(said, Said::Text(text) if text.starts_with("[mail m-") && text.ends_with(&header)),
    );
    assert!(shown, "{:?}", turn.said);
}

#[tokio::test]
async fn a_watcher_is_woken_as_by_a_tool_of_its_own() {
    for (classes, runs) in [(vec![WakeClass::Tool], 1), (vec![WakeClass::User, WakeClass::Child], 0)] {
        let world = World::new().await;
        let parent = world.session().await;
        let watched = child(&world, parent).await;
        start(&world, &watch(parent, watched, &["mail.accepted"])).await.expect("a watch");
        let mut other = agent("r1");
        other.waking.wake_on = classes;
        record(&world.store, AGENT, &other).await.expect("recorded");
        world.post(watched, "hello", Mode::None).await;
        forward(&world).await;
        assert_eq!((told(&world, parent).await.len(), world.runs(parent).await), (1, runs));
    }
}

#[tokio::test]
async fn many_schedulers_tell_an_event_once() {
    let world = World::with_connections(24).await;
    let parent = world.session().await;
    let mut watched = Vec::new();
    for _ in 0..8 {
        let child = child(&world, parent).await;
        start(&world, &watch(parent, child, &["mail.accepted"])).await.expect("a watch");
        for number in 0..12 {
            world.post(child, &number.to_string(), Mode::None).await;
        }
        watched.push(child);
    }
    let stores = join_all((0..6).map(|_| open(world.database.url(), 2, None))).await;
    join_all(stores.iter().map(async |store| while watches::forward(store, 3).await.expect("a pass") > 0 {}))
        .await;
    let mail = history::mail(&world.store, parent, 0, false, 500).await.expect("mail");
    assert_eq!(mail.iter().map(|letter| letter.seq).collect::<Vec<_>>(), (1..=96).collect::<Vec<_>>());
    for child in watched {
        let seqs = mail.iter().filter_map(|letter| match &letter.body {
            MailBody::WatchedEvent { session_id, data, .. } if *session_id == child => {
                data["mail"]["seq"].as_i64()
            }
            _ => None,
        });
        assert_eq!(seqs.collect::<Vec<_>>(), (1..=12).collect::<Vec<_>>(), "in order, once");
    }
}

/// A letter of the sibling that the parent's agent isn't woken by.
async fn fill(world: &World, parent: SessionId, sender: SessionId, count: i64) {
    for _ in 0..count {
        let letter = Correspondence {
            from: sender,
            from_agent: AGENT.to_owned(),
            to: Address::Session(parent),
            id: MailId(Uuid::now_v7()),
            text: "noise".to_owned(),
            in_reply_to: None,
            expects_reply: false,
            interrupt: false,
            hops: 0,
            scope: Scope::All,
            interrupt_scope: Scope::All,
            max_hops: 16,
            traceparent: None,
        };
        correspond::send(&world.store, OWNER, &letter).await.expect("room");
    }
}

#[tokio::test]
async fn a_full_mailbox_makes_a_watch_wait_and_lose_nothing() {
    let world = World::new().await;
    let parent = world.session().await;
    let (watched, noisy) = (child(&world, parent).await, world.session().await);
    start(&world, &watch(parent, watched, &["mail.accepted"])).await.expect("a watch");
    fill(&world, parent, noisy, MAILBOX_LIMIT - 2).await;
    for number in 0..5 {
        world.post(watched, &number.to_string(), Mode::None).await;
    }
    assert_eq!(forward(&world).await, 1);
    assert_eq!(told(&world, parent).await.len(), 2, "as many as there is room for");
    assert_eq!(forward(&world).await, 0, "then it waits");
    // Another watch goes on meanwhile.
    let (other, its) = (world.session().await, world.session().await);
    start(&world, &NewWatch { scope: Scope::All, ..watch(other, its, &["mail.accepted"]) })
        .await
        .expect("a watch");
    world.post(its, "hello", Mode::None).await;
    assert_eq!((forward(&world).await, told(&world, other).await.len()), (1, 1));
    let holders = holdfast_tests::step::Holder::claim_all(&world.store, &world.agent).await;
    for mut holder in holders.into_iter().filter(|holder| holder.session.id == parent) {
        holder.drive_with(vec![says("read")]).await;
    }
    assert!(forward(&world).await > 0);
    assert_eq!(told(&world, parent).await.len(), 5, "all of them, none twice");
}

#[tokio::test]
async fn a_watch_says_what_it_refuses() {
    let world = World::new().await;
    let parent = world.session().await;
    let (watched, peer) = (child(&world, parent).await, world.session().await);
    let good = watch(parent, watched, &["run.stopped"]);
    let refused = async |new: NewWatch| start(&world, &new).await.expect_err("refused").code();
    let kinds = |kinds: &[&str]| watch(parent, watched, kinds);
    assert_eq!(refused(kinds(&[])).await, "bad_filter");
    assert_eq!(refused(kinds(&["run.stoped"])).await, "bad_filter");
    assert_eq!(refused(NewWatch { tool: Some("[".to_owned()), ..good.clone() }).await, "bad_filter");
    for ttl in [Duration::from_millis(999), Duration::from_secs(86_401)] {
        assert_eq!(refused(NewWatch { ttl: Some(ttl), ..good.clone() }).await, "bad_ttl");
    }
    let of = |watched: SessionId| NewWatch { watched: Address::Session(watched), ..good.clone() };
    assert_eq!(refused(of(peer)).await, "not_permitted");
    assert_eq!(refused(of(SessionId(Uuid::now_v7()))).await, "unknown_session");
    assert_eq!(refused(of(parent)).await, "watch_circle");
    let bob = watches::start(&world.store, "bob", &good).await.expect_err("another owner");
    assert_eq!(bob.code(), "unknown_session");
    delete(&world.store, &caller(), watched, false).await.expect("deleted");
    assert_eq!(refused(good.clone()).await, "unknown_session");
    assert_eq!(watches_there_are(&world).await, 0);
}

#[tokio::test]
async fn a_repeat_is_the_same_watch_and_a_session_has_32() {
    let world = World::with_connections(40).await;
    let parent = world.session().await;
    let watched = child(&world, parent).await;
    let new = watch(parent, watched, &["run.stopped", "run.started", "run.stopped"]);
    let first = start(&world, &new).await.expect("a watch");
    assert_eq!(first.kinds, ["run.started", "run.stopped"]);
    for again in join_all((0..4).map(|_| start(&world, &new))).await {
        assert_eq!(again.expect("the same"), first);
    }
    // Ids are each watcher's own: another session's watch isn't met.
    let child_of_child = child(&world, watched).await;
    let same_id = NewWatch { id: new.id, ..watch(watched, child_of_child, &["run.stopped"]) };
    assert_eq!(start(&world, &same_id).await.expect("its own").watched, child_of_child);
    let many: Vec<NewWatch> = (0..40).map(|_| watch(parent, watched, &["run.stopped"])).collect();
    let started = join_all(many.iter().map(|new| start(&world, new))).await;
    let limit = usize::try_from(WATCHES_LIMIT).expect("a small number");
    assert_eq!(started.iter().filter(|started| started.is_ok()).count(), limit - 1);
    assert!(
        started
            .iter()
            .all(|started| started.as_ref().err().is_none_or(|error| error.code() == "too_many_watches"))
    );
    assert_eq!(watches::list(&world.store, OWNER, parent).await.expect("a list").len(), limit);
    assert_eq!(start(&world, &new).await.expect("a repeat of one that is there"), first);
    assert!(watches::stop(&world.store, OWNER, parent, new.id).await.expect("an answer"));
    assert!(!watches::stop(&world.store, OWNER, parent, new.id).await.expect("an answer"), "it is gone");
    start(&world, &watch(parent, watched, &["run.started"])).await.expect("there is room again");
}

#[tokio::test]
async fn stopping_is_its_owners_and_a_list_shows_what_goes_on() {
    let world = World::new().await;
    let parent = world.session().await;
    let watched = child(&world, parent).await;
    let new = NewWatch { tool: Some("x*".to_owned()), ..watch(parent, watched, &["tool.completed"]) };
    let begun = start(&world, &new).await.expect("a watch");
    assert!(!watches::stop(&world.store, "bob", parent, new.id).await.expect("an answer"));
    assert_eq!(watches::list(&world.store, "bob", parent).await.expect("a list"), []);
    assert_eq!(watches::list(&world.store, OWNER, parent).await.expect("a list"), [begun]);
    assert!(watches::stop(&world.store, OWNER, parent, new.id).await.expect("an answer"));
    work(&world, watched).await;
    assert_eq!((forward(&world).await, told(&world, parent).await.len()), (0, 0));
}

#[tokio::test]
async fn watches_do_not_go_round_in_circles() {
    let world = World::with_connections(16).await;
    let mut ring = vec![world.session().await];
    for _ in 0..3 {
        ring.push(child(&world, ring[ring.len() - 1]).await);
    }
    let link = |from: usize, to: usize| watch(ring[from], ring[to], &["run.stopped"]);
    for (from, to) in [(0, 1), (1, 2), (2, 3)] {
        start(&world, &link(from, to)).await.expect("a watch");
    }
    for from in 1..=3 {
        let circle = start(&world, &link(from, 0)).await.expect_err("a circle");
        assert_eq!(circle.code(), "watch_circle");
    }
    // A watch that has ended closes none.
    let sql = world.sql().await;
    sql.batch_execute("UPDATE watches SET created_at = now() - interval '1 h', expires_at = now()")
        .await
        .expect("ended");
    // Rivals that would close one together don't.
    let links: Vec<NewWatch> = (0..4).map(|from| link(from, (from + 1) % 4)).collect();
    let started = join_all(links.iter().map(|new| start(&world, new))).await;
    assert_eq!(started.iter().filter(|started| started.is_ok()).count(), 3, "{started:?}");
}

#[tokio::test]
async fn a_watch_ends_with_its_time_and_tells_what_was_before() {
    let world = World::new().await;
    let parent = world.session().await;
    let watched = child(&world, parent).await;
    let new = NewWatch { ttl: Some(Duration::from_secs(1)), ..watch(parent, watched, &["mail.accepted"]) };
    start(&world, &new).await.expect("a watch");
    world.post(watched, "in time", Mode::None).await;
    let sql = world.sql().await;
    sql.batch_execute(
        "UPDATE watches SET created_at = created_at - interval '1 h', expires_at = clock_timestamp()",
    )
    .await
    .expect("over");
    world.post(watched, "too late", Mode::None).await;
    assert_eq!(watches::list(&world.store, OWNER, parent).await.expect("a list"), []);
    assert_eq!(forward(&world).await, 1);
    assert_eq!((told(&world, parent).await.len(), watches_there_are(&world).await), (1, 0));
}

#[tokio::test]
async fn an_overdue_watch_goes_although_nobody_reads_its_mailbox() {
    let world = World::new().await;
    let parent = world.session().await;
    let (watched, noisy) = (child(&world, parent).await, world.session().await);
    start(&world, &watch(parent, watched, &["mail.accepted"])).await.expect("a watch");
    world.post(watched, "hello", Mode::None).await;
    fill(&world, parent, noisy, MAILBOX_LIMIT).await;
    let sql = world.sql().await;
    let ended = |ago: &str| {
        format!(
            "UPDATE watches SET created_at = now() - interval '3 d', expires_at = now() - interval '{ago}'"
        )
    };
    sql.batch_execute(&ended("23 h")).await.expect("over");
    assert_eq!((forward(&world).await, watches_there_are(&world).await), (0, 1), "what it has waits a day");
    sql.batch_execute(&ended("25 h")).await.expect("over");
    assert_eq!((forward(&world).await, watches_there_are(&world).await), (1, 0));
}

#[tokio::test]
async fn a_watch_ends_with_either_session() {
    for purged in [false, true] {
        let world = World::new().await;
        let parent = world.session().await;
        let (watched, other) = (child(&world, parent).await, child(&world, parent).await);
        let kinds = &["session.deleted", "run.stopped"];
        start(&world, &watch(parent, watched, kinds)).await.expect("a watch");
        start(&world, &watch(other, parent, kinds)).await.expect("a watch");
        for gone in [watched, other] {
            delete(&world.store, &caller(), gone, false).await.expect("deleted");
        }
        assert_eq!(watches::list(&world.store, OWNER, parent).await.expect("a list"), []);
        if purged {
            while purge_deleted(&world.store, 0.0, 10).await.expect("a pass") > 0 {}
        }
        assert_eq!(forward(&world).await, 2);
        assert_eq!(
            (told(&world, parent).await, watches_there_are(&world).await),
            (vec!["session.deleted".to_owned()], 0)
        );
    }
}

#[tokio::test]
async fn a_watch_that_cannot_be_carried_on_holds_up_no_other() {
    let world = World::new().await;
    let parent = world.session().await;
    let (broken, whole) = (child(&world, parent).await, child(&world, parent).await);
    start(&world, &watch(parent, broken, &["run.stopped", "mail.accepted"])).await.expect("a watch");
    start(&world, &watch(parent, whole, &["mail.accepted"])).await.expect("a watch");
    let sql = world.sql().await;
    let unknown = "UPDATE watches SET kinds = '{a.later.releases.kind}', due_at = now() - interval '1 h' WHERE watched = $1";
    sql.execute(unknown, &[&broken.0]).await.expect("changed");
    for session in [broken, whole] {
        world.post(session, "hello", Mode::None).await;
    }
    // A pass that does one watch at a time isn't stuck with it.
    let mut done = 0;
    for _ in 0..3 {
        done += watches::forward(&world.store, 1).await.expect("a pass");
    }
    assert_eq!((done, told(&world, parent).await.len()), (1, 1));
    let later = "SELECT count(*) FROM watches WHERE due_at > now() + interval '50 s'";
    assert_eq!(world.count(later).await, 1, "it is tried again later");
}

#[tokio::test]
async fn sessions_that_follow_each_others_mail_do_not_write_for_ever() {
    let world = World::new().await;
    let parent = world.session().await;
    let (middle, low) = (child(&world, parent).await, world.session().await);
    start(&world, &watch(parent, middle, &["mail.accepted"])).await.expect("a watch");
    start(&world, &NewWatch { scope: Scope::All, ..watch(middle, low, &["mail.accepted"]) })
        .await
        .expect("a watch");
    world.post(low, "hello", Mode::None).await;
    forward(&world).await;
    assert_eq!((told(&world, middle).await.len(), told(&world, parent).await.len()), (1, 0));
}

#[tokio::test]
async fn large_events_are_told_by_their_beginning() {
    let world = World::new().await;
    let parent = world.session().await;
    let watched = child(&world, parent).await;
    start(&world, &watch(parent, watched, &["session.failed"])).await.expect("a watch");
    let body = json!({"message": "é".repeat(watches::DATA_LIMIT)}).to_string();
    let sql = world.sql().await;
    sql.execute(
        "WITH s AS (UPDATE sessions SET event_seq = event_seq + 1 WHERE id = $1 RETURNING id, owner, event_seq)
         INSERT INTO events (session_id, seq, owner, kind, body) SELECT id, event_seq, owner, 'session.failed', $2 FROM s",
        &[&watched.0, &body],
    )
    .await
    .expect("an event");
    forward(&world).await;
    let mail = history::mail(&world.store, parent, 0, false, 10).await.expect("mail");
    let [Envelope { body: MailBody::WatchedEvent { data, .. }, .. }] = mail.as_slice() else {
        panic!("{mail:?}")
    };
    let text = data.as_str().expect("a text");
    assert!(text.len() <= watches::DATA_LIMIT + 4 && body.starts_with(text.trim_end_matches('…')));
}
