//! The schema itself: statements that prepare, plans that hold under load, rows that can't be stored,
//! migrations, partitions and the bounds of passes.

use std::{collections::BTreeSet, time::Duration};

use chrono::{TimeDelta, Utc};
use futures::future::join_all;
use holdfast_engine::{decide::Mode, ids::SessionId};
use holdfast_store::{
    create, delete::delete, migrate, passes, retire::purge_deleted, settle::expire_overdue, sql,
};
use holdfast_tests::{
    cluster::{empty_database, migration_files},
    step::{claim, renew, says},
    store::{LONG, OWNER, World, caller, caller_with_key, new_session, open, roster, worker},
};
use tokio_postgres::{Client, error::SqlState};
use uuid::Uuid;

fn statement(name: &str) -> &'static str {
    let found = sql::ALL.iter().find(|(known, _)| *known == name);
    found.unwrap_or_else(|| panic!("no statement is named {name}")).1
}

#[tokio::test]
async fn every_statement_of_the_hot_path_prepares() {
    let world = World::new().await;
    let sql = world.sql().await;
    let mut names = BTreeSet::new();
    for (name, text) in sql::ALL {
        assert!(names.insert(*name), "{name} is there twice");
        let prepared = sql.prepare(text).await.unwrap_or_else(|error| panic!("{name}: {error:?}"));
        let highest = (1..=30).rev().find(|number| text.contains(&format!("${number}"))).unwrap_or(0);
        assert_eq!(prepared.params().len(), highest, "{name}: each parameter is used");
        let reads = text.contains("SELECT") && !text.contains("INSERT") && !text.contains("UPDATE ");
        let answers = !prepared.columns().is_empty();
        assert!(answers || !reads || text.contains("DELETE"), "{name} asks and gets nothing");
    }
    assert!(names.len() >= 40, "the list is whole: {}", names.len());
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../store/src/sql");
    for file in std::fs::read_dir(dir).expect("the statements") {
        let path = file.expect("a file").path();
        let name = path.file_stem().and_then(|name| name.to_str()).expect("a name");
        assert!(names.contains(name), "{name}.sql is in no list");
    }
}

/// What [`fill`] makes.
struct Load {
    owners: i32,
    due: i32,
    parked: i32,
}

impl Load {
    /// As many due runs as parked ones, of 32 owners.
    fn of(rows: i32) -> Self {
        Self { owners: 32, due: rows, parked: rows }
    }
}

/// Fills the queue: due runs, parked ones, and 200 that workers hold.
async fn fill(sql: &Client, Load { owners, due, parked }: Load) {
    let sleeping = due + parked;
    sql.batch_execute(&format!(
        "INSERT INTO sessions (id, owner, agent, agent_revision, root_id, status)
         SELECT id, 'o' || n % {owners}, 'helper', 'r1', id, 'running'
         FROM (SELECT gen_random_uuid() AS id, n FROM generate_series(1, {sleeping} + 200) n) fresh;
         INSERT INTO runs (session_id, owner, agent, agent_revision, mode, state, priority, available_at, worker, lease_until, parked_on, epoch)
         SELECT id, owner, agent, agent_revision, 'until_blocked',
                CASE WHEN n <= {due} THEN 'queued' WHEN n <= {sleeping} THEN 'parked' ELSE 'claimed' END,
                n % 3, now() - make_interval(secs => n % 1000),
                CASE WHEN n > {sleeping} THEN gen_random_uuid() END,
                CASE WHEN n > {sleeping} THEN now() + make_interval(secs => 600) END,
                CASE WHEN n > {due} AND n <= {sleeping} THEN 'a timer' END,
                CASE WHEN n > {sleeping} THEN nextval('run_epochs') ELSE 0 END
         FROM (SELECT s.*, row_number() OVER (ORDER BY id) AS n FROM sessions s) numbered;
         UPDATE runs SET available_at = now() + interval '1 day' WHERE state = 'parked';
         ANALYZE sessions; ANALYZE runs; ANALYZE agents"
    ))
    .await
    .expect("a full queue");
}

/// The plans of a statement with these arguments: the first one, and the one that the server has settled
/// on after the statement was used for a while.
async fn plans(sql: &Client, name: &str, arguments: &str) -> Vec<String> {
    sql.batch_execute(&format!("PREPARE q AS {}", statement(name))).await.expect("prepared");
    let mut plans = Vec::new();
    for uses in [0, 8] {
        for _ in 0..uses {
            let used = sql.batch_execute(&format!("BEGIN; EXECUTE q({arguments}); ROLLBACK")).await;
            // What has to be there isn't.
            if used.is_err_and(|error| error.code() == Some(&SqlState::DIVISION_BY_ZERO)) {
                sql.batch_execute("ROLLBACK").await.expect("rolled back");
            }
        }
        let rows = sql.query(&format!("EXPLAIN EXECUTE q({arguments})"), &[]).await.expect("a plan");
        plans.push(rows.iter().map(|row| row.get::<_, String>(0)).collect::<Vec<_>>().join("\n"));
    }
    sql.batch_execute("DEALLOCATE q").await.expect("forgotten");
    plans
}

#[tokio::test]
async fn claims_go_by_the_index_of_due_runs() {
    let world = World::new().await;
    fill(&world.sql().await, Load { owners: 10_000, due: 50_000, parked: 200_000 }).await;
    let hot = world.store.db().client().await.expect("a connection of the hot path");
    let arguments = format!("'{}', 16, 15, ARRAY['helper@r1']", worker());
    // As behind a pooler, and as the hot path's own connections plan.
    for sql in [&world.sql().await, &**hot] {
        for plan in plans(sql, "claim_queued", &format!("{arguments}, ARRAY['o1', 'o2'], ARRAY[8, 8]")).await
        {
            assert!(plan.contains("using runs_due on runs"), "{plan}");
            assert!(!plan.contains("Seq Scan on runs"), "{plan}");
            assert!(!plan.contains("priority DESC"), "the index has the order within an owner:\n{plan}");
        }
        for plan in plans(sql, "due_since", "now(), 257, ARRAY['helper@r1'], true").await {
            assert!(plan.contains("using runs_due_since on runs"), "{plan}");
            assert!(plan.contains("Index Cond: ((available_at > "), "it is entered by the time:\n{plan}");
            assert!(!plan.contains("Seq Scan on runs"), "{plan}");
        }
        for plan in plans(sql, "due_owners", "'o7', 32").await {
            assert!(plan.contains("using runs_due on runs"), "{plan}");
            assert!(!plan.contains("Seq Scan on runs") && !plan.contains("Sort"), "{plan}");
        }
        for plan in plans(sql, "claim_expired", &arguments).await {
            assert!(plan.contains("runs_claimed"), "{plan}");
            assert!(!plan.contains("Seq Scan on runs"), "{plan}");
        }
        for plan in plans(sql, "count_held", "ARRAY['o1', 'o2']").await {
            assert!(plan.contains("runs_held"), "{plan}");
        }
        for plan in plans(sql, "count_queued", "'o1', 100").await {
            assert!(plan.contains("runs_due"), "{plan}");
        }
    }
    // What the plan promises: of each owner the most urgent, and only those that are due.
    let sql = world.sql().await;
    let leases = claim(&world.store, &roster(&world.agent), 32, LONG).await;
    assert_eq!(leases.len(), 32);
    let held: Vec<Uuid> = leases.iter().map(|lease| lease.session.0).collect();
    let overtaken = "SELECT count(*) FROM runs mine JOIN runs other ON other.owner = mine.owner AND other.state = 'queued'
                     WHERE mine.session_id = ANY($1) AND other.priority > mine.priority";
    assert_eq!(sql.query_one(overtaken, &[&held]).await.expect("a count").get::<_, i64>(0), 0);
    assert_eq!(world.count("SELECT count(*) FROM runs WHERE state = 'parked'").await, 200_000);
}

/// What the hot path asks by key, with arguments.
fn lookups() -> Vec<(&'static str, String)> {
    let ids = "ARRAY['00000000-0000-7000-8000-000000000001', '00000000-0000-7000-8000-000000000002']::uuid[]";
    let id = "'00000000-0000-7000-8000-000000000001'";
    let none =
        |types: &[&str]| types.iter().map(|name| format!("ARRAY[]::{name}[]")).collect::<Vec<_>>().join(", ");
    let commit = none(&[
        "uuid", "bigint", "uuid", "text", "text", "text", "bigint", "bigint", "text", "bigint", "text",
    ]);
    let calls = none(&[
        "uuid",
        "uuid",
        "text",
        "integer",
        "uuid",
        "timestamptz",
        "timestamptz",
        "text",
        "timestamptz",
        "bigint",
        "boolean",
        "text",
        "boolean",
    ]);
    vec![
        ("lock_session", ids.to_owned()),
        ("lock_run", ids.to_owned()),
        ("commit_session", commit),
        ("update_calls", calls),
        ("read_commit", id.to_owned()),
        ("load_session", format!("{ids}, {id}")),
        ("load_turns", format!("{ids}, {id}")),
        ("load_calls", format!("{ids}, {id}")),
        ("load_unread", format!("{ids}, {id}")),
        ("load_mode", ids.to_owned()),
        ("view_session", format!("{id}, 'o'")),
        ("view_turns", format!("{id}, 9, 2, 1000, 'o'")),
        ("view_pending", format!("{id}, 'o'")),
        ("view_calls", format!("{id}, 'o'")),
        ("end_run", format!("{ids}, ARRAY[1, 2]::bigint[]")),
        ("park_run", format!("{id}, 1, 'x', NULL")),
        ("heartbeat", format!("{ids}, ARRAY[1, 2]::bigint[], 15")),
        ("renew", format!("{id}, 1, 15")),
        ("release", format!("{ids}, ARRAY[1, 2]::bigint[], 0, 0")),
        ("look", ids.to_owned()),
        ("claim_named", format!("{id}, 8, 15, ARRAY['helper@r1'], {ids}, false")),
        ("lock_session_of_token", format!("{id}, 'o'")),
        ("lock_run_of_token", format!("{id}, 'o'")),
        ("tree_is_closed", format!("{ids}, 30")),
        ("has_open_continuations", id.to_owned()),
        ("has_waiting_calls", id.to_owned()),
        ("cancel_open_continuations", format!("{id}, NULL")),
        ("settle_continuation", format!("{id}, 'expired', NULL")),
        ("lock_continuation", format!("{id}, 'o'")),
        ("lock_tree", id.to_owned()),
        ("run_in_tree", format!("{id}, {ids}")),
        ("wake_terms", ids.to_owned()),
        ("find_letters", format!("{ids}, {ids}")),
        (
            "accept_session",
            format!(
                "{ids}, ARRAY[1, 2]::bigint[], ARRAY[1, 2]::bigint[], ARRAY['idle', 'idle'], ARRAY[true, false]"
            ),
        ),
        ("wake_run", format!("{ids}, ARRAY['none', 'none'], ARRAY[1, 2]::bigint[], ARRAY['', '']")),
        ("last_hold_order", format!("{id}, ARRAY['x']")),
        ("relation", format!("{id}, {id}, 'o', 64")),
        ("find_near", format!("{id}, 'o', 64, false, true, 10000, '00000001'")),
        ("find_watch", format!("{id}, {id}")),
        ("count_watches", id.to_owned()),
        ("watch_circle", format!("{id}, {id}, 64")),
        ("due_watches", "500, 256".to_owned()),
        ("lock_watch", format!("{id}, {id}")),
        ("move_watch", format!("{id}, {id}, 1")),
        ("put_off_watch", format!("{id}, {id}")),
        ("delete_watch", format!("{id}, {id}")),
        ("known_mail", format!("{id}, {ids}")),
        ("recall_result", "'o', decode(repeat('00', 32), 'hex'), 60".to_owned()),
        ("take_turn", "'o', 't', 60, 10, 30, 660".to_owned()),
    ]
}

fn reads_no_table_as_a_whole(name: &str, plan: &str) {
    for table in ["runs", "sessions", "turns", "tool_calls", "mail", "watches"] {
        assert!(!plan.contains(&format!("Seq Scan on {table}")), "{name}:\n{plan}");
    }
}

/// Pages that a look for due runs touches.
async fn pages_of_a_look(sql: &Client, since: &str) -> i64 {
    let look = statement("due_since")
        .replace("$1", since)
        .replace("$2", "257")
        .replace("$3", "ARRAY['helper@r1']")
        .replace("$4", "false");
    let rows = sql.query(&format!("EXPLAIN (ANALYZE, BUFFERS) {look}"), &[]).await.expect("a plan");
    let lines: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
    // The first are those of the whole.
    let buffers =
        lines.iter().find(|line| line.trim_start().starts_with("Buffers: shared")).expect("buffers");
    let count = |kind: &str| -> i64 {
        let found = buffers.split_whitespace().find_map(|word| word.strip_prefix(kind));
        found.map_or(0, |count| count.parse().expect("a count"))
    };
    count("hit=") + count("read=")
}

#[tokio::test]
async fn an_old_snapshot_makes_looks_no_dearer() {
    let world = World::new().await;
    let (sql, holder) = (world.sql().await, world.sql().await);
    holder.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1").await.expect("held");
    // Runs that were due and have ended since; their rows can't be removed.
    let worked_off = [
        "INSERT INTO runs (session_id, owner, agent, agent_revision, mode, state, available_at)
         SELECT gen_random_uuid(), 'o', 'helper', 'r1', 'until_blocked', 'queued', now() - interval '1 minute'
         FROM generate_series(1, 20000)",
        "DELETE FROM runs",
        "VACUUM ANALYZE runs",
    ];
    for statement in worked_off {
        sql.batch_execute(statement).await.expect(statement);
    }
    let (whole, lately) =
        (pages_of_a_look(&sql, "NULL").await, pages_of_a_look(&sql, "(now() - interval '1 second')").await);
    assert!(whole > 200, "the dead rows are there: {whole}");
    assert!(lately < 20, "{lately} pages");
    holder.batch_execute("COMMIT").await.expect("let go");
}

#[tokio::test]
async fn views_read_nothing_of_whoever_may_not_see_it() {
    let world = World::new().await;
    let (session, _, _) = world.waiting().await;
    let sql = world.sql().await;
    let count = async |name: &str, owner: &str| {
        let view = statement(name).replace("$1", &format!("'{session}'::uuid"));
        let view = match name {
            "view_turns" => view
                .replace("$2", "99")
                .replace("$3", "9")
                .replace("$4", "9999")
                .replace("$5", &format!("'{owner}'")),
            _ => view.replace("$2", &format!("'{owner}'")),
        };
        sql.query(&view, &[]).await.expect("an answer").len()
    };
    let views = ["view_session", "view_turns", "view_pending", "view_calls"];
    for name in views {
        assert!(count(name, OWNER).await > 0, "{name}");
        assert_eq!(count(name, "somebody else").await, 0, "{name}");
    }
    delete(&world.store, &caller(), session, false).await.expect("deleted");
    for name in views {
        assert_eq!(count(name, OWNER).await, 0, "{name}");
    }
}

#[tokio::test]
async fn lookups_by_key_stay_lookups() {
    let world = World::new().await;
    let sql = world.sql().await;
    fill(&sql, Load::of(20_000)).await;
    for (name, arguments) in lookups() {
        for plan in plans(&sql, name, &arguments).await {
            // The tables of turns, calls, mail and watches are empty here.
            let empty = ["turns", "tool_calls", "mail", "watches"];
            let plan =
                empty.iter().fold(plan, |plan, table| plan.replace(&format!("Seq Scan on {table}"), ""));
            reads_no_table_as_a_whole(name, &plan);
        }
    }
}

#[tokio::test]
async fn the_hot_path_plans_for_full_tables_while_they_are_empty() {
    let world = World::new().await;
    let hot = world.store.db().client().await.expect("a connection of the hot path");
    for (name, arguments) in lookups() {
        for plan in plans(&hot, name, &arguments).await {
            reads_no_table_as_a_whole(name, &plan);
            // Nor a whole index: each is entered by a key. The agents are few.
            let lines: Vec<&str> = plan.lines().collect();
            for pair in lines.windows(2) {
                let scans = pair[0].contains("Index Scan using") || pair[0].contains("Index Only Scan using");
                let scans = scans && !pair[0].contains(" on agents");
                assert!(!scans || pair[1].contains("Index Cond"), "{name}:\n{plan}");
            }
            // What is open, due or held is a part of a table, but may be as large.
            for part in [
                "continuations_open",
                "continuations_due",
                "runs_due",
                "runs_due_since",
                "runs_claimed",
                "runs_held",
            ] {
                assert!(!plan.contains(part), "{name}:\n{plan}");
            }
            assert!(!plan.contains("Hash Join") && !plan.contains("Merge Join"), "{name}:\n{plan}");
        }
    }
    let claim = format!("'{}', 16, 15, ARRAY['helper@r1'], ARRAY['o1', 'o2'], ARRAY[8, 8]", worker());
    for (name, arguments) in [("due_owners", "'o7', 32"), ("claim_queued", &claim)] {
        for plan in plans(&hot, name, arguments).await {
            assert!(plan.contains("using runs_due on runs") && !plan.contains("runs_due_since"), "{plan}");
        }
    }
    for plan in plans(&hot, "due_since", "now(), 257, ARRAY['helper@r1'], true").await {
        assert!(
            plan.contains("using runs_due_since on runs") && !plan.contains("using runs_due on"),
            "{plan}"
        );
    }
}

#[tokio::test]
async fn heartbeats_leave_the_indexes_alone() {
    let world = World::new().await;
    fill(&world.sql().await, Load::of(100)).await;
    // An owner that has less than its share leaves slots to the next claim.
    let mut leases = Vec::new();
    while leases.len() < 100 {
        let more = claim(&world.store, &roster(&world.agent), 100 - leases.len(), LONG).await;
        assert!(!more.is_empty(), "{} claimed", leases.len());
        leases.extend(more);
    }
    // Counters of a transaction hold what its connection did before.
    let mut sql = world.sql().await;
    // Rewritten, every page has the room that its fill factor leaves.
    sql.batch_execute("VACUUM FULL runs").await.expect("vacuumed");
    let (sessions, epochs): (Vec<Uuid>, Vec<i64>) =
        leases.iter().map(|lease| (lease.session.0, lease.epoch)).unzip();
    let tx = sql.transaction().await.expect("a transaction");
    let rows = tx.query(statement("heartbeat"), &[&sessions, &epochs, &30_f64]).await.expect("renewed");
    assert_eq!(rows.len(), 200, "each as it is, and each that was renewed");
    assert_eq!(rows.iter().filter(|row| row.get::<_, bool>("renewed")).count(), 100);
    let counters = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_xact_user_tables WHERE relname = 'runs'";
    let row = tx.query_one(counters, &[]).await.expect("counters");
    let (updated, hot): (i64, i64) = (row.get(0), row.get(1));
    // A row whose page is full has to move; none moves because of an index.
    assert!(updated == 100 && hot >= 90, "{hot} of {updated} are HOT");
    tx.commit().await.expect("committed");
    let held: Vec<_> = leases.iter().map(|lease| (lease.session, lease.epoch)).collect();
    assert_eq!(renew(&world.store, &held, LONG).await.len(), 100);
}

#[tokio::test]
async fn rows_that_can_mean_nothing_are_refused() {
    let world = World::new().await;
    let (session, _, _) = world.waiting().await;
    world.post(session, "more", Mode::UntilBlocked).await;
    let sql = world.sql().await;
    let digest = "decode(repeat('00', 32), 'hex')";
    sql.batch_execute(&format!(
        "INSERT INTO idempotency_keys (principal, key, hash, code, resource) VALUES ('p', 'k', {digest}, 201, 'r')"
    ))
    .await
    .expect("a key");
    let impossible = [
        "UPDATE agents SET slug = ''",
        "UPDATE agents SET source = 'rumour'",
        "UPDATE sessions SET status = 'resting'",
        "UPDATE sessions SET status = 'paused'",
        "UPDATE sessions SET hold = 'maybe'",
        "UPDATE sessions SET version = 0",
        "UPDATE sessions SET turns = -1",
        "UPDATE sessions SET mail_cursor = mail_seq + 1",
        "UPDATE sessions SET mail_cursor = -1",
        "UPDATE sessions SET priority = 101",
        "UPDATE sessions SET parent_id = gen_random_uuid()",
        "UPDATE sessions SET root_id = gen_random_uuid()",
        "UPDATE sessions SET parent_call = gen_random_uuid()",
        "UPDATE sessions SET owner = repeat('o', 201)",
        "UPDATE sessions SET status_detail = repeat('x', 4001)",
        "UPDATE turns SET position = 0 WHERE position = 1",
        "UPDATE turns SET tag = 'Monologue'",
        "UPDATE turns SET input_tokens = 1 WHERE tag = 'UserTurn'",
        "UPDATE tool_calls SET state = 'lost'",
        "UPDATE tool_calls SET state = 'completed'",
        "UPDATE tool_calls SET settled = '{}'",
        "UPDATE tool_calls SET finished_at = now()",
        "UPDATE tool_calls SET token = NULL",
        "UPDATE tool_calls SET started_at = NULL",
        "UPDATE tool_calls SET state = 'running', attempt = 0",
        "UPDATE tool_calls SET told_result = true",
        "UPDATE continuations SET state = 'lost'",
        "UPDATE continuations SET settled_at = now()",
        "UPDATE continuations SET state = 'cancelled'",
        "UPDATE continuations SET state = 'completed', settled_at = now()",
        "UPDATE continuations SET result_hash = decode(repeat('00', 32), 'hex')",
        "UPDATE continuations SET state = 'completed', settled_at = now(), result_hash = '\\x00'",
        "UPDATE mail SET seq = 0 WHERE seq = 1",
        "UPDATE mail SET priority = 'low'",
        "UPDATE mail SET hops = -1",
        "UPDATE runs SET mode = 'forever'",
        "UPDATE runs SET state = 'done'",
        "UPDATE runs SET state = 'claimed'",
        "UPDATE runs SET worker = gen_random_uuid()",
        "UPDATE runs SET lease_until = now()",
        "UPDATE runs SET state = 'claimed', worker = gen_random_uuid(), lease_until = now(), epoch = 0",
        "UPDATE runs SET state = 'parked'",
        "UPDATE runs SET parked_on = 'nothing'",
        "UPDATE runs SET traceparent = repeat('0', 201)",
        "UPDATE blobs SET digest = '\\x00'",
        "UPDATE events SET seq = 0 WHERE seq = 1",
        "UPDATE idempotency_keys SET key = ''",
        "UPDATE idempotency_keys SET hash = '\\x00'",
    ];
    for update in impossible {
        let error = sql.batch_execute(update).await.expect_err(update);
        assert_eq!(error.code(), Some(&SqlState::CHECK_VIOLATION), "{update}: {error:?}");
    }
    let watch = "INSERT INTO watches (watcher, id, watched, kinds, cursor, expires_at) VALUES
                 (gen_random_uuid(), gen_random_uuid(), gen_random_uuid(), '{run.stopped}', 0, now() + interval '1 h')";
    sql.batch_execute(watch).await.expect("a watch");
    for update in [
        "UPDATE agents SET wake_on = '{stranger}'",
        "UPDATE agents SET wake_on = ARRAY[NULL]::text[]",
        "UPDATE watches SET watched = watcher",
        "UPDATE watches SET kinds = '{}'",
        "UPDATE watches SET tool = repeat('x', 201)",
        "UPDATE watches SET cursor = -1",
        "UPDATE watches SET expires_at = created_at",
    ] {
        let error = sql.batch_execute(update).await.expect_err(update);
        assert_eq!(error.code(), Some(&SqlState::CHECK_VIOLATION), "{update}: {error:?}");
    }
    let twice = [
        "INSERT INTO mail SELECT session_id, seq + 100, id, sender, priority, hops, tag, body, wakes FROM mail LIMIT 1",
        "INSERT INTO runs SELECT * FROM runs",
        "INSERT INTO turns SELECT * FROM turns",
        "INSERT INTO events SELECT * FROM events",
        "INSERT INTO agents (slug, revision, current, source, descriptor) VALUES ('helper', 'r2', true, 'file', '{}')",
    ];
    for insert in twice {
        let error = sql.batch_execute(insert).await.expect_err(insert);
        assert_eq!(error.code(), Some(&SqlState::UNIQUE_VIOLATION), "{insert}: {error:?}");
    }
}

#[tokio::test]
async fn many_migrators_apply_each_migration_once() {
    let database = empty_database().await;
    for migrated in join_all((0..8).map(|_| migrate::migrate(database.url()))).await {
        let report = migrated.expect("migrated");
        assert!(report.status.is_ready(), "{}", report.status);
    }
    let files = migration_files().expect("migrations").len();
    let sql = database.connect().await;
    let row =
        sql.query_one("SELECT count(*), bool_and(success) FROM _sqlx_migrations", &[]).await.expect("a row");
    assert_eq!((row.get::<_, i64>(0), row.get::<_, bool>(1)), (i64::try_from(files).expect("few"), true));
    let again = migrate::migrate(database.url()).await.expect("nothing to do");
    assert_eq!(again.applied, []);
    migrate::require(database.url()).await.expect("a schema to run on");
}

#[tokio::test]
async fn partitions_of_events_are_made_ahead_and_dropped_with_age() {
    let world = World::new().await;
    let far = Utc::now() + TimeDelta::days(30);
    let day = |ahead: i64| format!("events_{}", (far + TimeDelta::days(ahead)).format("%Y%m%d"));
    // Many schedulers make them at once, and each is made by one of them.
    let passing = join_all((0..6).map(|_| passes::turn_event_partitions(&world.store, far, Some(7)))).await;
    let mut made: Vec<String> = passing.into_iter().flat_map(|made| made.expect("a pass")).collect();
    made.sort();
    assert_eq!(made, [day(0), day(1), day(2), day(3)]);
    let sql = world.sql().await;
    let insert = "INSERT INTO events (session_id, seq, owner, kind, body, at) VALUES (gen_random_uuid(), 1, '', 'test', '{}', $1)";
    sql.execute(insert, &[&far]).await.expect("an event");
    let there = format!("SELECT count(*) FROM {}", day(0));
    assert_eq!(world.count(&there).await, 1, "events go where their day is");

    let next =
        passes::turn_event_partitions(&world.store, far + TimeDelta::days(1), Some(7)).await.expect("a pass");
    assert_eq!(next, [day(4)]);
    // Seven days are kept: the first is dropped when it is eight days old.
    let kept =
        passes::turn_event_partitions(&world.store, far + TimeDelta::days(7), Some(7)).await.expect("a pass");
    assert!(!kept.contains(&day(0)), "{kept:?}");
    let dropped =
        passes::turn_event_partitions(&world.store, far + TimeDelta::days(8), Some(7)).await.expect("a pass");
    assert!(dropped.contains(&day(0)) && !dropped.contains(&day(1)), "{dropped:?}");
    assert_eq!(world.count("SELECT count(*) FROM events WHERE kind = 'test'").await, 0);
}

#[tokio::test]
async fn a_day_that_the_default_partition_holds_stays_there_and_ages() {
    let world = World::new().await;
    world.session().await;
    let now = Utc::now();
    let made = passes::turn_event_partitions(&world.store, now, Some(7)).await.expect("a pass");
    assert!(!made.contains(&format!("events_{}", now.format("%Y%m%d"))), "{made:?}");
    let events = "SELECT count(*) FROM events";
    assert_eq!(world.count(events).await, 1);
    passes::turn_event_partitions(&world.store, now + TimeDelta::days(7), Some(7)).await.expect("a pass");
    assert_eq!(world.count(events).await, 1);
    passes::turn_event_partitions(&world.store, now + TimeDelta::days(8), Some(7)).await.expect("a pass");
    assert_eq!(world.count(events).await, 0, "what is older than it is kept goes");
}

#[tokio::test]
async fn purging_is_bounded_and_leaves_the_living_alone() {
    let world = World::new().await;
    let living = world.asked("hello").await;
    let mut doomed = Vec::new();
    for _ in 0..5 {
        doomed.push(world.asked("goodbye").await);
    }
    for session in &doomed {
        delete(&world.store, &caller(), *session, false).await.expect("deleted");
    }
    assert_eq!(purge_deleted(&world.store, 3600.0, 10).await.expect("a pass"), 0, "the grace isn't over");
    let mut left = Vec::new();
    while purge_deleted(&world.store, 0.0, 2).await.expect("a pass") > 0 {
        left.push(world.count("SELECT count(*) FROM sessions").await);
    }
    assert_eq!(left, [4, 2, 1]);
    assert_eq!(world.count("SELECT count(*) FROM sessions").await, 1);
    assert_eq!(world.count("SELECT count(*) FROM mail").await, 1);
    // What was deleted says so to those who read on.
    assert_eq!(world.count("SELECT count(*) FROM events WHERE kind = 'session.deleted'").await, 5);
    assert_eq!(world.count("SELECT count(DISTINCT session_id) FROM events").await, 6);
    let mut holder = world.hold().await;
    assert_eq!(holder.session.id, living);
    holder.drive_with(vec![says("hi")]).await;
}

#[tokio::test]
async fn keys_and_workers_are_forgotten_with_age_and_in_bounds() {
    let world = World::new().await;
    for number in 0..5 {
        let caller = caller_with_key(&format!("k{number}"), "create");
        create::create(&world.store, &caller, new_session(None, Mode::None)).await.expect("a session");
    }
    let sql = world.sql().await;
    assert_eq!(passes::forget_keys(&world.store, 10).await.expect("a pass"), 0);
    sql.execute("UPDATE idempotency_keys SET created_at = now() - interval '25 hours' WHERE key < 'k3'", &[])
        .await
        .expect("aged");
    let mut forgotten = Vec::new();
    for _ in 0..3 {
        forgotten.push(passes::forget_keys(&world.store, 2).await.expect("a pass"));
    }
    assert_eq!((forgotten, world.count("SELECT count(*) FROM idempotency_keys").await), (vec![2, 1, 0], 2));
    // A key that has aged is free again before any pass has come by.
    sql.execute("UPDATE idempotency_keys SET created_at = now() - interval '25 hours'", &[])
        .await
        .expect("aged");
    let fresh = new_session(None, Mode::None);
    let again = create::create(&world.store, &caller_with_key("k4", "another body"), fresh.clone()).await;
    assert!(matches!(again, Ok(holdfast_store::idempotency::Done::Now(id)) if id == fresh.id), "{again:?}");

    for _ in 0..2 {
        let agents = roster(&world.agent);
        holdfast_store::workers::register(&world.store, worker(), "host", 8, 0, &[], &agents)
            .await
            .expect("registered");
    }
    sql.execute("UPDATE workers SET seen_at = now() - interval '11 minutes' WHERE id = (SELECT min(id::text)::uuid FROM workers)", &[])
        .await
        .expect("aged");
    assert_eq!(passes::forget_workers(&world.store).await.expect("a pass"), 1);
    assert_eq!(holdfast_store::workers::list(&world.store).await.expect("a list").len(), 1);
}

#[tokio::test]
async fn due_timers_are_promoted_in_batches_and_by_many_at_once() {
    let world = World::new().await;
    let sql = world.sql().await;
    fill(&sql, Load::of(50)).await;
    sql.batch_execute("DELETE FROM runs WHERE state <> 'parked'").await.expect("only parked ones");
    assert_eq!(passes::promote_timers(&world.store, 100).await.expect("a pass"), 0);
    sql.batch_execute("UPDATE runs SET available_at = now()").await.expect("due");
    assert_eq!(passes::promote_timers(&world.store, 10).await.expect("a pass"), 10);
    let stores = join_all((0..4).map(|_| open(world.database.url(), 1, None))).await;
    let promoted = join_all(stores.iter().map(|store| passes::promote_timers(store, 15))).await;
    let promoted: u64 = promoted.into_iter().map(|count| count.expect("a pass")).sum();
    assert!((15..=40).contains(&promoted), "{promoted}");
    let queued = world.count("SELECT count(*) FROM runs WHERE state = 'queued'").await;
    assert_eq!(queued, 10 + i64::try_from(promoted).expect("few"), "none is promoted twice");
    while passes::promote_timers(&world.store, 100).await.expect("a pass") > 0 {}
    // Two claims: an owner with less than its share leaves slots to the next one.
    let mut claimed = 0;
    for _ in 0..2 {
        claimed += claim(&world.store, &roster(&world.agent), 100, Duration::from_secs(60)).await.len();
    }
    assert_eq!(claimed, 50);
}

#[tokio::test]
async fn overdue_tokens_are_expired_in_bounds() {
    let world = World::new().await;
    let long_ago = Utc::now() - TimeDelta::hours(1);
    let mut sessions: Vec<SessionId> = Vec::new();
    for _ in 0..5 {
        sessions.push(world.waiting_since(long_ago, "ask_soon_anna").await.0);
    }
    let (fresh, _, token) = world.waiting_since(Utc::now() + TimeDelta::hours(1), "ask_soon_bert").await;
    let mut expired = Vec::new();
    for _ in 0..4 {
        expired.push(expire_overdue(&world.store, 2).await.expect("a pass"));
    }
    assert_eq!(expired, [2, 2, 1, 0]);
    assert_eq!((world.token_state(token).await.as_deref(), world.runs(fresh).await), (Some("open"), 0));
    for session in sessions {
        assert_eq!(world.runs(session).await, 1);
    }
}
