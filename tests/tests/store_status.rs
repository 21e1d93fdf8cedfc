//! What `holdfast status` reads stays cheap while the tables are large: 10,000 owners, 20,000 due runs, 200,000
//! parked ones, and no section reads a table of that size as a whole.

use std::collections::BTreeSet;

use holdfast_store::status;
use holdfast_tests::store::World;
use tokio_postgres::Client;

const OWNERS: i64 = 10_000;
const DUE: i64 = 20_000;
const PARKED: i64 = 200_000;
const HELD: i64 = 200;
const DEFERRED: i64 = 60_000;
const EVENTS: i64 = 150_000;

async fn fill(sql: &Client) {
    let (sleeping, all) = (DUE + PARKED, DUE + PARKED + HELD);
    sql.batch_execute(&format!(
        "INSERT INTO sessions (id, owner, agent, agent_revision, root_id, status)
         SELECT id, 'o' || n % {OWNERS}, 'helper', 'r1', id, 'running'
         FROM (SELECT gen_random_uuid() AS id, n FROM generate_series(1, {all}) n) fresh;
         INSERT INTO runs (session_id, owner, agent, agent_revision, mode, state, priority, available_at, worker, lease_until, parked_on, epoch)
         SELECT id, owner, agent, agent_revision, 'until_blocked',
                CASE WHEN n <= {DUE} THEN 'queued' WHEN n <= {sleeping} THEN 'parked' ELSE 'claimed' END, n % 3,
                CASE WHEN n > {DUE} AND n <= {sleeping} THEN now() + interval '1 day' ELSE now() - make_interval(secs => n % 1000) END,
                CASE WHEN n > {sleeping} THEN gen_random_uuid() END,
                CASE WHEN n > {sleeping} THEN now() + interval '10 minutes' END,
                CASE WHEN n > {DUE} AND n <= {sleeping} THEN 'a timer' END,
                CASE WHEN n > {sleeping} THEN nextval('run_epochs') ELSE 0 END
         FROM (SELECT s.*, row_number() OVER (ORDER BY id) AS n FROM sessions s) numbered;
         INSERT INTO tool_calls (session_id, id, turn, index, provider_id, name, arguments, disposition, decided_by, idempotent, state, attempt, created_at, started_at, settled, finished_at)
         SELECT r.session_id, gen_random_uuid(), 1, n, 'p', 't', '{{}}', '{{}}', 'd', false, 'completed', 1, now(), now(), '{{}}', now()
         FROM (SELECT session_id FROM runs WHERE state = 'claimed') r, generate_series(1, 300) n;
         INSERT INTO continuations (token, session_id, call_id, owner, agent, tool, reason, provider_id, arguments, created_at, expires_at)
         SELECT gen_random_uuid(), gen_random_uuid(), gen_random_uuid(), 'o' || n % {OWNERS}, 'helper', 'ask', 'a person', 'p', '{{}}', now(),
                CASE WHEN n % 3 = 0 THEN now() + interval '1 day' END FROM generate_series(1, {DEFERRED}) n;
         INSERT INTO events (session_id, seq, owner, kind, body)
         SELECT gen_random_uuid(), 1, 'o' || n % {OWNERS}, 'session.updated', '{{}}' FROM generate_series(1, {EVENTS}) n;
         INSERT INTO archives (session_id, owner, agent, root_id, created_at, document)
         SELECT gen_random_uuid(), 'o' || n % {OWNERS}, 'helper', gen_random_uuid(), now(), '{{}}' FROM generate_series(1, 20000) n;
         INSERT INTO idempotency_keys (principal, key, hash, code, resource)
         SELECT 'p', n::text, decode(repeat('00', 32), 'hex'), 201, 'r' FROM generate_series(1, 20000) n;
         INSERT INTO webhook_endpoints (name, url, secret_id, kinds, feed, xid, session_id, seq)
         VALUES ('server', 'http://h', 'default', ARRAY['run.stopped'], gen_random_uuid(), '3', gen_random_uuid(), 0);
         INSERT INTO webhook_deliveries (session_id, seq, endpoint, owner, agent, kind, body, at, state, last_error)
         SELECT gen_random_uuid(), n, 'server', 'o', 'helper', 'run.stopped', '{{}}', now(), CASE WHEN n % 2 = 0 THEN 'dead' ELSE 'pending' END, 'x'
         FROM generate_series(1, 50000) n;
         ANALYZE"
    ))
    .await
    .expect("full tables");
}

/// The statements that read what grows, with arguments: `$o` stands for the owner. Beside each the indexes of
/// which its plan uses one at least.
const GROWING: &[(&str, &str, &[&str])] = &[
    ("queue", "$o, 100000", &["runs_due", "runs_held"]),
    ("owners", "$o, 1000000, 5", &["runs_due"]),
    ("waiting", "ARRAY['o1', 'o2']", &["runs_due"]),
    ("unserved", "$o, 100000", &["runs_due"]),
    ("leases", "$o, 100000", &["runs_claimed", "runs_held"]),
    ("takeovers", "$o, 100000", &["runs_claimed", "runs_held"]),
    ("steps", "$o, 10000", &["runs_claimed", "runs_held"]),
    ("deferred", "$o, 100000", &["continuations_due", "continuations_open"]),
    ("deferred_oldest", "$o, 5", &["continuations_open"]),
    (
        "failures",
        "'18446744073709551615', 'ffffffff-ffff-ffff-ffff-ffffffffffff', 9223372036854775807, 50000, $o",
        &["events_default_xid"],
    ),
    ("failed_sessions", "ARRAY['00000000-0000-7000-8000-000000000001']::uuid[]", &["sessions_pkey"]),
    ("closed_sessions", "$o, 100000, 30", &["sessions_pkey", "sessions_by_owner"]),
    ("session", "'00000000-0000-7000-8000-000000000001'", &["sessions_pkey"]),
    ("session_calls", "'00000000-0000-7000-8000-000000000001'", &["tool_calls_pkey"]),
    ("webhooks", "100000", &["webhook_deliveries_due"]),
    ("session_events", "'00000000-0000-7000-8000-000000000001', 10", &["events_default_session_id"]),
];

/// Statements whose tables are small, or of the system's, or that are read up to a bound and no further.
const SMALL: &[&str] = &[
    "parked",
    "deferred_groups",
    "retention",
    "connections",
    "transactions",
    "horizon",
    "lock_waits",
    "waits",
    "tables",
    "totals",
    "old_events",
];

async fn plan(sql: &Client, name: &str, arguments: &str, how: &str) -> String {
    let text = status::ALL.iter().find(|(known, _)| *known == name).expect("a statement").1;
    sql.batch_execute(&format!("PREPARE q AS {text}"))
        .await
        .unwrap_or_else(|error| panic!("{name}: {error:?}"));
    let rows = sql.query(&format!("EXPLAIN {how} EXECUTE q({arguments})"), &[]).await;
    let rows = rows.unwrap_or_else(|error| panic!("{name}: {error:?}"));
    sql.batch_execute("DEALLOCATE q").await.expect("forgotten");
    rows.iter().map(|row| row.get::<_, String>(0)).collect::<Vec<_>>().join("\n")
}

#[tokio::test]
async fn no_section_of_the_report_reads_a_large_table_as_a_whole() {
    let known: BTreeSet<&str> = GROWING.iter().map(|(name, ..)| *name).chain(SMALL.iter().copied()).collect();
    let all: BTreeSet<&str> = status::ALL.iter().map(|(name, _)| *name).collect();
    assert_eq!(known, all, "each statement has its place in a list");
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../store/src/status/sql");
    for file in std::fs::read_dir(dir).expect("the statements") {
        let path = file.expect("a file").path();
        let name = path.file_stem().and_then(|name| name.to_str()).expect("a name");
        assert!(all.contains(name), "{name}.sql is in no list");
    }
    let world = World::new().await;
    let sql = world.sql().await;
    fill(&sql).await;
    for owner in ["NULL", "'o7'"] {
        for (name, arguments, indexes) in GROWING {
            let plan = plan(&sql, name, &arguments.replace("$o", owner), "").await;
            for table in ["runs", "sessions", "tool_calls", "events", "webhook_deliveries"] {
                assert!(!plan.contains(&format!("Seq Scan on {table}")), "{name} of {owner}:\n{plan}");
            }
            assert!(indexes.iter().any(|index| plan.contains(index)), "{name} of {owner}:\n{plan}");
            let by_owner = *name != "waiting" || plan.contains("Index Cond: ((owner = w.owner)");
            assert!(by_owner, "it reads the owner's part of the index:\n{plan}");
        }
    }
}

/// What is read to a bound ends there: the rows that a plan touched tell.
#[tokio::test]
async fn what_is_counted_is_counted_to_a_bound() {
    let world = World::new().await;
    let sql = world.sql().await;
    fill(&sql).await;
    for (name, arguments) in [
        ("parked", "NULL, 1000"),
        ("queue", "NULL, 1000"),
        ("unserved", "NULL, 1000"),
        ("owners", "NULL, 1000, 5"),
        ("leases", "NULL, 100"),
        ("deferred_groups", "NULL, 1000, 5"),
        ("closed_sessions", "NULL, 1000, 30"),
        ("retention", "NULL, 1000, 30"),
        ("webhooks", "1000"),
        (
            "failures",
            "'18446744073709551615', 'ffffffff-ffff-ffff-ffff-ffffffffffff', 9223372036854775807, 1000, NULL",
        ),
    ] {
        let plan = plan(&sql, name, arguments, "(ANALYZE, COSTS OFF, TIMING OFF)").await;
        // Rows that a scan gave its parent.
        let scans = plan.lines().filter(|line| line.contains(" Scan ") && line.contains("rows="));
        for line in scans {
            let rows = line.split("rows=").nth(1).and_then(|rest| rest.split([' ', ')']).next());
            let rows: f64 =
                rows.and_then(|rows| rows.parse().ok()).unwrap_or_else(|| panic!("{name}: {line}"));
            assert!(rows <= 1_001.0, "{name} reads on:\n{plan}");
        }
        assert!(plan.contains(" Scan "), "{name}:\n{plan}");
    }
}
