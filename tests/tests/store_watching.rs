//! What the store says of the cluster and counts of itself, for those who watch.

use std::time::Duration;

use holdfast_engine::decide::Mode;
use holdfast_store::{
    StoreError,
    cluster::{self, Class, Due},
    counters::{self, ErrorKind},
    create,
    quota::{self, Limits},
    sessions, settle, workers,
};
use holdfast_tests::store::{World, caller, message, new_session, worker};

/// Counters are of the whole process, so tests that run beside each other in one would count each other's.
static ALONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

const NONE: Limits = Limits { max_running: None, runs_per_minute: None, max_queued: None };

/// Puts runs of an owner into the queue, due for some seconds; the first `held` of them are held.
async fn queue(world: &World, owner: &str, held: i32, due: i32, seconds: f64) {
    let sql = world.sql().await;
    sql.execute(
        "INSERT INTO runs (session_id, owner, agent, agent_revision, mode, state, available_at, worker, lease_until, epoch)
         SELECT gen_random_uuid(), $1, 'helper', 'r1', 'until_blocked',
                CASE WHEN n <= $2 THEN 'claimed' ELSE 'queued' END, now() - make_interval(secs => $4),
                CASE WHEN n <= $2 THEN gen_random_uuid() END, CASE WHEN n <= $2 THEN now() + interval '1 hour' END, n
         FROM generate_series(1, $2::int + $3::int) n",
        &[&owner, &held, &due, &seconds],
    )
    .await
    .expect("queued");
}

#[tokio::test]
async fn due_runs_are_told_apart_by_what_their_owners_do() {
    let _alone = ALONE.lock().await;
    let world = World::new().await;
    assert_eq!(cluster::due(&world.store).await.expect("counted"), [Due::default(); 3]);
    queue(&world, "idle", 0, 2, 30.0).await;
    queue(&world, "also idle", 0, 1, 90.0).await;
    queue(&world, "busy", 3, 4, 20.0).await;
    queue(&world, "at its limit", 2, 5, 500.0).await;
    queue(&world, "below its limit", 1, 1, 10.0).await;
    queue(&world, "without a rate left", 0, 6, 40.0).await;
    quota::set(&world.store, "at its limit", Limits { max_running: Some(2), ..NONE }).await.expect("set");
    quota::set(&world.store, "below its limit", Limits { max_running: Some(2), ..NONE }).await.expect("set");
    quota::set(&world.store, "without a rate left", Limits { runs_per_minute: Some(0), ..NONE })
        .await
        .expect("set");
    // What isn't due yet is nobody's.
    queue(&world, "later", 0, 9, -3600.0).await;

    let due = cluster::due(&world.store).await.expect("counted");
    let of = |class: Class| due[class as usize];
    assert_eq!(of(Class::Idle).runs, 3);
    assert_eq!(of(Class::Busy).runs, 4 + 1);
    assert_eq!(of(Class::Throttled).runs, 5 + 6);
    for (class, seconds) in [(Class::Idle, 90), (Class::Busy, 20), (Class::Throttled, 500)] {
        let micros = of(class).oldest_micros;
        assert!((seconds * 1_000_000..(seconds + 120) * 1_000_000).contains(&micros), "{class:?} {micros}");
    }
    let census = sessions::census(&world.store).await.expect("counted");
    assert_eq!(census.oldest_due_micros / 1_000_000 / 100, 5, "the oldest of all classes");
}

#[tokio::test]
async fn workers_that_are_silent_and_calls_that_are_settled_count_no_more() {
    let _alone = ALONE.lock().await;
    let world = World::new().await;
    let nothing = cluster::standing(&world.store).await.expect("counted");
    assert_eq!((nothing.workers, nothing.slots, nothing.held), (0, 0, 0));
    assert_eq!((nothing.oldest_continuation_micros, nothing.overdue_micros), (0, 0));
    for (slots, held) in [(8, 3), (16, 16)] {
        workers::register(&world.store, worker(), "host", slots, held, &[], &[]).await.expect("registered");
    }
    workers::register(&world.store, worker(), "gone", 100, 100, &[], &[]).await.expect("registered");
    let sql = world.sql().await;
    sql.batch_execute(
        "UPDATE workers SET seen_at = now() - interval '2 minutes' WHERE host = 'gone';
         INSERT INTO continuations (token, session_id, call_id, owner, agent, tool, reason, provider_id, arguments, state, created_at, expires_at, settled_at)
         VALUES (gen_random_uuid(), gen_random_uuid(), gen_random_uuid(), 'a', 'h', 't', '', '', '{}', 'open', now() - interval '300 seconds', NULL, NULL),
                (gen_random_uuid(), gen_random_uuid(), gen_random_uuid(), 'a', 'h', 't', '', '', '{}', 'open', now() - interval '200 seconds', now() - interval '50 seconds', NULL),
                (gen_random_uuid(), gen_random_uuid(), gen_random_uuid(), 'a', 'h', 't', '', '', '{}', 'expired', now() - interval '900 seconds', now() - interval '800 seconds', now())",
    )
    .await
    .expect("as wanted");
    let now = cluster::standing(&world.store).await.expect("counted");
    assert_eq!((now.workers, now.slots, now.held), (2, 24, 19));
    assert!((300..420).contains(&(now.oldest_continuation_micros / 1_000_000)), "{now:?}");
    assert!((50..170).contains(&(now.overdue_micros / 1_000_000)), "{now:?}");
}

fn errors(kind: ErrorKind) -> u64 {
    counters::snapshot().errors.into_iter().find(|(known, _)| *known == kind).map_or(0, |(_, count)| count)
}

#[tokio::test]
async fn what_is_refused_written_and_failed_is_counted_once() {
    let _alone = ALONE.lock().await;
    let world = World::new().await;
    let before = counters::snapshot();
    let id = world.session().await;
    let written = counters::snapshot().events_written - before.events_written;
    let stored = sessions::get(&world.store, None, id).await.expect("a session").event_seq;
    assert_eq!(i64::try_from(written), Ok(stored), "as many as the session's stream has");
    assert!(counters::snapshot().hot_waits.count > before.hot_waits.count);

    quota::set(&world.store, "alice", Limits { max_queued: Some(0), ..NONE }).await.expect("set");
    let new = new_session(Some(message("x")), Mode::UntilBlocked);
    let refused = create::create(&world.store, &caller(), new.clone()).await;
    assert!(matches!(refused, Err(StoreError::Backlog { .. })), "{refused:?}");
    let after = counters::snapshot();
    assert_eq!(after.refused_backlog - before.refused_backlog, 1);
    assert_eq!(after.refused_mailbox, before.refused_mailbox);
    assert_eq!(after.events_written - before.events_written, written, "what is refused writes nothing");

    let broken = errors(ErrorKind::Other);
    world.sql().await.batch_execute("ALTER TABLE workers RENAME TO nowhere").await.expect("renamed");
    assert!(cluster::standing(&world.store).await.is_err());
    assert_eq!(errors(ErrorKind::Other) - broken, 1);
    let constraint = errors(ErrorKind::Constraint);
    let negative = Limits { max_running: Some(-1), ..NONE };
    assert!(quota::set(&world.store, "alice", negative).await.is_err());
    assert_eq!(errors(ErrorKind::Constraint) - constraint, 1);
}

#[tokio::test]
async fn an_overdue_call_is_counted_by_whoever_expires_it() {
    let _alone = ALONE.lock().await;
    let world = World::new().await;
    let before = counters::snapshot().continuations_expired;
    assert_eq!(settle::expire_overdue(&world.store, 10).await.expect("looked"), 0);
    let id = world.session().await;
    let sql = world.sql().await;
    sql.execute(
        "INSERT INTO continuations (token, session_id, call_id, owner, agent, tool, reason, provider_id, arguments, created_at, expires_at)
         VALUES (gen_random_uuid(), $1, gen_random_uuid(), 'alice', 'h', 't', '', '', '{}', now(), now() - interval '1 second')",
        &[&id.0],
    )
    .await
    .expect("an overdue call");
    let expiring = settle::expire_overdue(&world.store, 10);
    let count =
        tokio::time::timeout(Duration::from_secs(60), expiring).await.expect("in time").expect("expired");
    assert_eq!(count, 1);
    assert_eq!(counters::snapshot().continuations_expired - before, 1);
}
