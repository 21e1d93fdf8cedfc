//! Closed sessions retire, what was deleted is removed in bounded statements, and nothing open is touched.

use holdfast_engine::{decide::Mode, ids::SessionId};
use holdfast_store::{
    accept, create,
    delete::delete,
    retire::{Terms, forget_archives, purge_deleted, retire},
};
use holdfast_tests::{
    step::{calls, says},
    store::{World, caller, message, new_session},
};
use serde_json::Value;
use uuid::Uuid;

const TERMS: Terms = Terms { after_days: 30, archive: true };

/// A session that was asked something, was answered, and rests.
async fn closed(world: &World, text: &str) -> SessionId {
    let session = world.asked(text).await;
    let mut holder = world.hold().await;
    holder.drive_with(vec![calls(&[("look", "{}")]), says("done")]).await;
    session
}

/// Makes everything look as if nothing had happened for so many days.
async fn days_pass(world: &World, days: i32) {
    let sql = world.sql().await;
    sql.execute("UPDATE sessions SET updated_at = now() - make_interval(days => $1)", &[&days])
        .await
        .expect("aged");
}

/// Gives a session so many turns, calls, letters and events more.
async fn lengthen(world: &World, session: SessionId, rows: i32) {
    let sql = world.sql().await;
    for (table, number, other) in [
        ("turns", "position", "'position', fresh.n, 'id', fresh.id"),
        ("tool_calls", "index", "'id', fresh.id"),
        ("mail", "seq", "'seq', fresh.n, 'id', fresh.id"),
        ("events", "seq", "'seq', fresh.n"),
    ] {
        let more = format!(
            "INSERT INTO {table}
             SELECT (jsonb_populate_record(NULL::{table}, to_jsonb(first) || jsonb_build_object({other}))).*
             FROM (SELECT * FROM {table} WHERE session_id = $1 ORDER BY {number} LIMIT 1) first,
                 (SELECT 99 + n AS n, gen_random_uuid() AS id FROM generate_series(1, $2::integer) n) fresh"
        );
        let count = sql.execute(&more, &[&session.0, &rows]).await.expect("a long history");
        assert_eq!(i64::try_from(count).expect("few"), i64::from(rows), "{table}");
    }
}

async fn sweep(world: &World, terms: Terms) -> u64 {
    let (mut place, mut sessions) = (Uuid::nil(), 0);
    loop {
        let swept = retire(&world.store, terms, &mut place).await.expect("a look");
        sessions += swept.sessions;
        if swept.whole {
            assert!(place.is_nil(), "the next look begins with the first");
            return sessions;
        }
    }
}

#[tokio::test]
async fn a_closed_session_becomes_a_document_and_its_rows_go() {
    let world = World::new().await;
    let session = closed(&world, "was\u{1}? \\u0000 \u{1F600}").await;
    days_pass(&world, 29).await;
    assert_eq!(sweep(&world, TERMS).await, 0, "not yet");
    days_pass(&world, 31).await;
    assert_eq!(sweep(&world, TERMS).await, 1);
    assert_eq!(sweep(&world, TERMS).await, 0, "once");
    while purge_deleted(&world.store, -1.0, 10).await.expect("a pass") > 0 {}
    for table in ["sessions", "turns", "tool_calls", "mail", "runs"] {
        assert_eq!(world.count(&format!("SELECT count(*) FROM {table}")).await, 0, "{table}");
    }
    let sql = world.sql().await;
    let row =
        sql.query_one("SELECT session_id, owner, document FROM archives", &[]).await.expect("an archive");
    assert_eq!((row.get::<_, Uuid>(0), row.get::<_, &str>(1)), (session.0, "alice"));
    let document: Value = serde_json::from_str(row.get(2)).expect("JSON");
    assert_eq!(document["session"]["status"], "idle");
    let turns = document["turns"].as_array().expect("turns");
    let tags: Vec<&str> = turns.iter().filter_map(|turn| turn["tag"].as_str()).collect();
    assert_eq!(tags, ["UserTurn", "LlmTurn", "UserTurn", "LlmTurn"]);
    assert!(turns[0]["body"].to_string().contains("\u{1F600}"), "{}", turns[0]);
    assert_eq!(document["calls"][0]["name"], "look");
    assert_eq!(forget_archives(&world.store, 1, 10).await.expect("a pass"), 0);
    assert_eq!(forget_archives(&world.store, -1, 10).await.expect("a pass"), 1);
}

#[tokio::test]
async fn what_is_open_stays() {
    let world = World::new().await;
    let done = closed(&world, "done").await;
    let (waiting, call, _) = world.waiting().await;
    let paused = world.session().await;
    accept::pause(&world.store, &caller(), paused).await.expect("an order");
    world.hold().await.drive_with(vec![]).await;
    let unread = closed(&world, "more to come").await;
    world.post(unread, "unread", Mode::None).await;
    // Roots whose children are still at work.
    let parent = world.session().await;
    let child = NewChild { parent, text: "work" };
    child.spawn(&world).await;
    let queued = world.asked("queued").await;
    days_pass(&world, 400).await;
    assert_eq!(sweep(&world, TERMS).await, 1);
    let left = "SELECT count(*) FROM sessions WHERE deleted_at IS NULL";
    assert_eq!(world.count(left).await, 6);
    for session in [waiting, paused, unread, parent, queued] {
        assert!(world.row(session).await.updated_at < chrono::Utc::now(), "{session} is there");
    }
    assert!(holdfast_store::sessions::get(&world.store, None, done).await.is_err());
    assert!(!call.0.is_nil());
}

/// A child session that runs.
struct NewChild {
    parent: SessionId,
    text: &'static str,
}

impl NewChild {
    async fn spawn(&self, world: &World) {
        let mut new = new_session(Some(message(self.text)), Mode::UntilBlocked);
        new.parent = Some(self.parent);
        create::create(&world.store, &caller(), new.clone()).await.expect("a child");
    }
}

#[tokio::test]
async fn without_archives_nothing_is_kept() {
    let world = World::new().await;
    closed(&world, "hello").await;
    days_pass(&world, 31).await;
    assert_eq!(sweep(&world, Terms { archive: false, ..TERMS }).await, 1);
    assert_eq!(world.count("SELECT count(*) FROM archives").await, 0);
}

#[tokio::test]
async fn a_sweep_goes_over_more_sessions_than_one_look_reads() {
    let world = World::new().await;
    let sql = world.sql().await;
    sql.batch_execute(
        "INSERT INTO sessions (id, owner, agent, agent_revision, root_id, status)
         SELECT id, 'o', 'helper', 'r1', id, 'waiting_external' FROM (SELECT gen_random_uuid() AS id FROM generate_series(1, 4500)) fresh;
         UPDATE sessions SET status = 'idle' WHERE id IN (SELECT id FROM sessions ORDER BY id DESC LIMIT 20)",
    )
    .await
    .expect("many sessions");
    days_pass(&world, 31).await;
    assert_eq!(sweep(&world, TERMS).await, 20);
}

#[tokio::test]
async fn rival_purges_leave_no_row_without_its_session() {
    let world = World::new().await;
    for _ in 0..20 {
        let session = closed(&world, "hello").await;
        lengthen(&world, session, 600).await;
        delete(&world.store, &caller(), session, false).await.expect("deleted");
    }
    let rival = async || while purge_deleted(&world.store, -1.0, 50).await.expect("a pass") > 0 {};
    futures::future::join_all((0..6).map(|_| rival())).await;
    while purge_deleted(&world.store, -1.0, 50).await.expect("a pass") > 0 {}
    for table in ["sessions", "turns", "tool_calls", "mail"] {
        assert_eq!(world.count(&format!("SELECT count(*) FROM {table}")).await, 0, "{table}");
    }
}

#[tokio::test]
async fn a_giant_is_removed_in_bounded_statements() {
    let world = World::new().await;
    let session = closed(&world, "hello").await;
    lengthen(&world, session, 12_000).await;
    delete(&world.store, &caller(), session, false).await.expect("deleted");
    let mut removed = Vec::new();
    loop {
        match purge_deleted(&world.store, -1.0, 10).await.expect("a pass") {
            0 => break,
            rows => removed.push(rows),
        }
    }
    assert!(removed.len() >= 3 && removed.iter().all(|rows| *rows <= 4 * 5_000 + 100), "{removed:?}");
    for table in ["turns", "tool_calls", "mail", "sessions"] {
        assert_eq!(world.count(&format!("SELECT count(*) FROM {table}")).await, 0, "{table}");
    }
    assert_eq!(world.count("SELECT count(*) FROM events").await, 1, "the one that says that it was deleted");
}
