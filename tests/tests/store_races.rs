//! Many clients at once on one thing: each crowd has exactly one winner, and every number is dense.

use std::collections::BTreeSet;

use chrono::{TimeDelta, Utc};
use futures::future::join_all;
use holdfast_engine::{
    content::ToolResult,
    decide::Mode,
    ids::{MailId, SessionId, Token},
    mail::{MailBody, Priority, Sender},
    session::Status,
};
use holdfast_store::{
    Store, StoreError,
    accept::{self, Caller},
    create,
    delete::delete,
    idempotency::Done,
    letters::{Ask, Letter, MAILBOX_LIMIT},
    settle::{self, Report, complete},
    snapshot,
};
use holdfast_tests::{
    gates::Barrier,
    step::{claim, says},
    store::{LONG, OWNER, World, caller, caller_with_key, message, new_session, open, roster},
};
use tokio::task::JoinHandle;
use uuid::Uuid;

const CROWD: usize = 64;

/// As many connections as the crowd has heads: all of them meet on the server.
async fn crowded() -> World {
    World::with_connections(CROWD).await
}

/// Lets a crowd queue for a session's lock and then in.
async fn meet<T>(world: &World, session: SessionId, crowd: Vec<JoinHandle<T>>, barrier: Barrier) -> Vec<T> {
    barrier.queued(i64::try_from(crowd.len()).expect("a small crowd")).await;
    barrier.open().await;
    let ended = join_all(crowd).await.into_iter().map(|one| one.expect("ended")).collect();
    assert_eq!(dense(world, session).await, (true, true), "mail and events are numbered without gaps");
    ended
}

/// Whether a session's mail and events are dense from 1 to its counters.
async fn dense(world: &World, session: SessionId) -> (bool, bool) {
    let sql = world.sql().await;
    let question = "SELECT s.mail_seq = (SELECT count(*) FROM mail m WHERE m.session_id = s.id)
                       AND s.mail_seq = coalesce((SELECT max(seq) FROM mail m WHERE m.session_id = s.id), 0),
                    s.event_seq = (SELECT count(*) FROM events e WHERE e.session_id = s.id)
                       AND s.event_seq = coalesce((SELECT max(seq) FROM events e WHERE e.session_id = s.id), 0)
                    FROM sessions s WHERE s.id = $1";
    let row = sql.query_one(question, &[&session.0]).await.expect("an answer");
    (row.get(0), row.get(1))
}

fn text(text: &str) -> Report {
    Report::Result(ToolResult::text(text))
}

fn completing(
    store: &Store,
    caller: Caller,
    token: Token,
    report: Report,
) -> JoinHandle<Result<Done<SessionId>, StoreError>> {
    let store = store.clone();
    tokio::spawn(async move { complete(&store, &caller, token, &report, true).await })
}

#[tokio::test]
async fn one_of_many_equal_completions_wins_and_the_others_are_its_retries() {
    let world = crowded().await;
    let (session, _, token) = world.waiting().await;
    let barrier = Barrier::on(&world.database, session).await;
    let crowd = (0..CROWD).map(|_| completing(&world.store, caller(), token, text("yes"))).collect();
    let (mut won, mut retries) = (0, 0);
    for ended in meet(&world, session, crowd, barrier).await {
        match ended {
            Ok(Done::Now(_)) => won += 1,
            Err(StoreError::TokenCompleted { same_result: true }) => retries += 1,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((won, retries), (1, CROWD - 1));
    assert_eq!(world.count("SELECT count(*) FROM mail WHERE tag = 'continuationResult'").await, 1);
}

#[tokio::test]
async fn one_of_many_rival_completions_wins_and_the_others_are_told_so() {
    let world = crowded().await;
    let (session, _, token) = world.waiting().await;
    let barrier = Barrier::on(&world.database, session).await;
    let crowd = (0..CROWD)
        .map(|number| {
            let report =
                if number % 2 == 0 { text(&number.to_string()) } else { Report::Error(number.to_string()) };
            completing(&world.store, caller(), token, report)
        })
        .collect();
    let (mut won, mut rivals) = (0, 0);
    for ended in meet(&world, session, crowd, barrier).await {
        match ended {
            Ok(Done::Now(_)) => won += 1,
            Err(StoreError::TokenCompleted { same_result: false }) => rivals += 1,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((won, rivals), (1, CROWD - 1));
    let mut holder = world.hold().await;
    holder.drive_with(vec![says("thanks")]).await;
    assert_eq!(world.count("SELECT count(*) FROM tool_calls WHERE settled IS NOT NULL").await, 1);
}

#[tokio::test]
async fn many_completions_with_one_key_are_one_success() {
    let world = crowded().await;
    let (session, _, token) = world.waiting().await;
    let crowd: Vec<_> = (0..CROWD)
        .map(|_| completing(&world.store, caller_with_key("k", "complete"), token, text("yes")))
        .collect();
    let (mut now, mut before) = (0, 0);
    for ended in join_all(crowd).await {
        match ended.expect("ended").expect("a success") {
            Done::Now(id) => {
                assert_eq!(id, session);
                now += 1;
            }
            Done::Before { code, resource } => {
                assert_eq!((code, resource), (201, token.to_string()));
                before += 1;
            }
        }
    }
    assert_eq!((now, before), (1, CROWD - 1));
}

#[tokio::test]
async fn one_of_many_messages_with_one_id_is_accepted() {
    let world = crowded().await;
    let session = world.session().await;
    let message = message("once");
    let barrier = Barrier::on(&world.database, session).await;
    let crowd = (0..CROWD)
        .map(|_| {
            // Each at a node of its own: one node would take them in together.
            let (store, message) = (Store::new(world.store.db().clone(), None), message.clone());
            tokio::spawn(async move {
                accept::post(&store, &caller(), session, &message, Mode::UntilBlocked).await
            })
        })
        .collect();
    let (mut accepted, mut repeats) = (0, 0);
    for ended in meet(&world, session, crowd, barrier).await {
        let Ok(Done::Now(receipt)) = ended else { panic!("{ended:?}") };
        assert_eq!((receipt.id, receipt.seq), (message.id, 1));
        if receipt.duplicate { repeats += 1 } else { accepted += 1 }
    }
    assert_eq!((accepted, repeats), (1, CROWD - 1));
    let started = "SELECT count(*) FROM events WHERE kind = 'run.started'";
    assert_eq!(world.count(started).await, 1);
}

#[tokio::test]
async fn many_creates_with_one_key_make_one_session() {
    let world = crowded().await;
    let crowd = (0..CROWD).map(|_| {
        let store = world.store.clone();
        tokio::spawn(async move {
            // Each request would make a session of its own.
            let new = new_session(Some(message("hello")), Mode::UntilBlocked);
            create::create(&store, &caller_with_key("k", "create"), new.clone()).await
        })
    });
    let crowd: Vec<_> = crowd.collect();
    let (mut made, mut named) = (Vec::new(), BTreeSet::new());
    for ended in join_all(crowd).await {
        match ended.expect("ended").expect("a success") {
            Done::Now(id) => made.push(id.to_string()),
            Done::Before { code: 201, resource } => {
                named.insert(resource);
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(made.len(), 1);
    assert_eq!(named.into_iter().collect::<Vec<_>>(), made);
    assert_eq!(world.count("SELECT count(*) FROM sessions").await, 1);
    assert_eq!(world.count("SELECT count(*) FROM runs").await, 1);

    let other =
        create::create(&world.store, &caller_with_key("k", "another body"), new_session(None, Mode::None))
            .await;
    assert!(matches!(other, Err(StoreError::IdempotencyMismatch)), "{other:?}");
    // A key is its principal's own, and a refused request leaves none behind.
    let unknown = create::NewSession { agent: "nobody".to_owned(), ..new_session(None, Mode::None) };
    for _ in 0..2 {
        let refused = create::create(&world.store, &caller_with_key("k2", "unknown"), unknown.clone()).await;
        assert!(matches!(refused, Err(StoreError::UnknownAgent(_))), "{refused:?}");
    }
    assert_eq!(world.count("SELECT count(*) FROM idempotency_keys").await, 1);
}

#[tokio::test]
async fn many_rival_requests_with_one_key_have_one_winner() {
    let world = crowded().await;
    let crowd = (0..CROWD).map(|number| {
        let store = world.store.clone();
        tokio::spawn(async move {
            let new = new_session(None, Mode::None);
            create::create(&store, &caller_with_key("k", &format!("body {number}")), new).await
        })
    });
    let crowd: Vec<_> = crowd.collect();
    let (mut made, mut refused) = (0, 0);
    for ended in join_all(crowd).await {
        match ended.expect("ended") {
            Ok(Done::Now(_)) => made += 1,
            Err(StoreError::IdempotencyMismatch) => refused += 1,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((made, refused), (1, CROWD - 1));
    assert_eq!(world.count("SELECT count(*) FROM sessions").await, 1);
}

#[tokio::test]
async fn numbers_stay_dense_under_many_producers_and_a_worker() {
    let world = crowded().await;
    let session = world.asked("hello").await;
    let mut holder = world.hold().await;
    let producers: Vec<_> = (0..CROWD)
        .map(|number| {
            let store = world.store.clone();
            tokio::spawn(async move {
                for round in 0..3 {
                    let letter = Letter {
                        id: MailId(Uuid::now_v7()),
                        from: Sender::System { source: "a test".to_owned() },
                        priority: Priority::Normal,
                        hops: 0,
                        body: MailBody::AgentMessage {
                            text: format!("{number}/{round}"),
                            in_reply_to: None,
                            expects_reply: false,
                        },
                    };
                    let done = accept::send(&store, &caller(), session, letter, Ask::GoOn, &[]).await;
                    assert!(matches!(done, Ok(Done::Now(receipt)) if !receipt.duplicate), "{done:?}");
                }
            })
        })
        .collect();
    // The worker commits in the middle of it, again and again.
    let mut commits = 0;
    while producers.iter().any(|producer| !producer.is_finished()) || commits == 0 {
        holder.decide();
        let outcome = holder.commit(holdfast_store::commit::RunAfter::Keep).await.expect("an outcome");
        assert!(matches!(outcome, holdfast_store::commit::Outcome::Stored { .. }), "{outcome:?}");
        commits += 1;
        if matches!(holder.session.head().map(|turn| turn.body.tag()), Some("UserTurn")) {
            holder.answer(says("noted"));
        }
    }
    for producer in producers {
        producer.await.expect("every letter was taken");
    }
    let letters = i64::try_from(CROWD * 3 + 1).expect("few");
    assert_eq!(world.count("SELECT mail_seq FROM sessions").await, letters);
    assert_eq!(dense(&world, session).await, (true, true));
    assert_eq!(world.count("SELECT version FROM sessions").await, 1 + commits);
}

#[tokio::test]
async fn a_mailbox_holds_exactly_its_limit_of_unread_messages() {
    for run in [Mode::None, Mode::UntilBlocked] {
        let world = World::new().await;
        let session = world.session().await;
        let crowd: Vec<_> = (0..16)
            .map(|_| {
                let store = world.store.clone();
                tokio::spawn(async move {
                    let (mut taken, mut refused) = (0_i64, 0_i64);
                    for _ in 0..20 {
                        match accept::post(&store, &caller(), session, &message("more"), run).await {
                            Ok(Done::Now(_)) => taken += 1,
                            Err(StoreError::MailboxFull { limit: MAILBOX_LIMIT }) => refused += 1,
                            other => panic!("{other:?}"),
                        }
                    }
                    (taken, refused)
                })
            })
            .collect();
        let (mut taken, mut refused) = (0, 0);
        for ended in join_all(crowd).await {
            let (some, others) = ended.expect("ended");
            taken += some;
            refused += others;
        }
        assert_eq!((taken, refused), (MAILBOX_LIMIT, 320 - MAILBOX_LIMIT), "{run:?}");
        assert_eq!(dense(&world, session).await, (true, true));

        // Orders get through, and what is told makes room.
        accept::pause(&world.store, &caller(), session).await.expect("an order");
        let full = accept::post(&world.store, &caller(), session, &message("one more"), run).await;
        assert!(matches!(full, Err(StoreError::MailboxFull { .. })), "{full:?}");
        let mut holder = world.hold().await;
        assert_eq!(holder.drive_with(Vec::new()).await, Status::Paused);
        accept::post(&world.store, &caller(), session, &message("one more"), run)
            .await
            .expect("there is room");
    }
}

#[tokio::test]
async fn whatever_races_over_a_token_settles_it_once() {
    for round in 0..4 {
        let world = World::with_connections(24).await;
        // In every other round its deadline has passed.
        let due = round % 2 == 1;
        let since = if due { Utc::now() - TimeDelta::hours(1) } else { Utc::now() };
        let (session, _, token) =
            world.waiting_since(since, if due { "ask_soon_anna" } else { "ask_anna" }).await;
        let mut crowd = Vec::new();
        for number in 0..CROWD {
            let store = world.store.clone();
            crowd.push(tokio::spawn(async move {
                match (number + round) % 4 {
                    0 => complete(&store, &caller(), token, &text("yes"), true).await.map(|_| "completed"),
                    1 => accept::cancel(&store, &caller(), session, true).await.map(|_| "cancel"),
                    2 => settle::expire_overdue(&store, 10)
                        .await
                        .map(|count| if count > 0 { "expired" } else { "" }),
                    // Deleting comes last of all, most of the time.
                    _ if number > 60 => delete(&store, &caller(), session, false).await.map(|_| "deleted"),
                    _ => complete(&store, &caller(), token, &Report::Error("no".to_owned()), true)
                        .await
                        .map(|_| "failed"),
                }
            }));
        }
        let mut settled = Vec::new();
        for ended in join_all(crowd).await {
            match ended.expect("ended") {
                Ok(word @ ("completed" | "failed" | "expired")) => settled.push(word),
                Ok(_) => {}
                Err(
                    StoreError::TokenCompleted { .. }
                    | StoreError::TokenCancelled
                    | StoreError::TokenExpired
                    | StoreError::UnknownToken
                    | StoreError::UnknownSession
                    | StoreError::NoActiveRun,
                ) => {}
                Err(other) => panic!("{other:?}"),
            }
        }
        // One letter tells of the settlement, or a cancel's order does, or the token went unsettled
        // with its session.
        let results = world.count("SELECT count(*) FROM mail WHERE tag = 'continuationResult'").await;
        assert!(settled.len() <= 1, "round {round}: {settled:?}");
        assert!(results <= 1, "round {round}: {results} letters");
        if !settled.is_empty() {
            assert_eq!(results, 1, "round {round}");
        }
        assert_eq!(dense(&world, session).await, (true, true), "round {round}");
        match world.token_state(token).await.as_deref() {
            None => {
                assert_eq!(world.count("SELECT count(*) FROM sessions WHERE deleted_at IS NULL").await, 0)
            }
            Some("cancelled") => assert_eq!(results, 0, "round {round}"),
            Some("completed" | "failed" | "expired") => assert_eq!(results, 1, "round {round}"),
            other => panic!("round {round}: the token is {other:?}"),
        }
    }
}

#[tokio::test]
async fn many_claimers_share_many_runs_without_overlap() {
    let world = World::new().await;
    let ids: BTreeSet<SessionId> =
        join_all((0..100).map(|_| world.asked("hello"))).await.into_iter().collect();
    let workers = join_all((0..16).map(|_| open(world.database.url(), 1, None))).await;
    let agents = roster(&world.agent);
    // Each claims until it finds nothing, a few at a time.
    let claiming = workers.iter().map(async |worker| {
        let mut leases = Vec::new();
        loop {
            let more = claim(worker, &agents, 3, LONG).await;
            if more.is_empty() {
                return leases;
            }
            leases.extend(more);
        }
    });
    let leases: Vec<_> = join_all(claiming).await.into_iter().flatten().collect();
    let claimed: BTreeSet<SessionId> = leases.iter().map(|lease| lease.session).collect();
    let epochs: BTreeSet<i64> = leases.iter().map(|lease| lease.epoch).collect();
    assert_eq!((leases.len(), epochs.len()), (100, 100));
    assert_eq!(claimed, ids);
}

#[tokio::test]
async fn a_command_that_its_caller_leaves_stores_nothing_and_holds_up_nobody() {
    let world = World::with_connections(1).await;
    let (left, other) = (world.session().await, world.session().await);
    let mut sql = world.sql().await;
    let lock = sql.transaction().await.expect("a transaction");
    lock.execute("SELECT 1 FROM sessions WHERE id = $1 FOR UPDATE", &[&left.0]).await.expect("locked");
    // It waits for the lock on the only connection when its caller goes away.
    let (caller, letter) = (caller(), message("left"));
    let abandoned = accept::post(&world.store, &caller, left, &letter, Mode::None);
    let waited = tokio::time::timeout(std::time::Duration::from_millis(300), abandoned).await;
    assert!(waited.is_err(), "the row is locked");
    world.post(other, "still here", Mode::None).await;
    lock.rollback().await.expect("unlocked");
    assert_eq!(world.count("SELECT count(*) FROM mail WHERE body LIKE '%left%'").await, 0);
    assert_eq!(world.count("SELECT count(*) FROM mail").await, 1);
}

#[tokio::test]
async fn a_view_that_its_reader_leaves_holds_up_nobody() {
    let world = World::with_connections(2).await;
    let (viewed, other) = (world.session().await, world.session().await);
    let mut sql = world.sql().await;
    let lock = sql.transaction().await.expect("a transaction");
    lock.batch_execute("LOCK TABLE turns IN ACCESS EXCLUSIVE MODE").await.expect("locked");
    // However many readers come and go, they wait on one connection.
    for _ in 0..3 {
        let abandoned = snapshot::read(&world.store, OWNER, viewed, 10);
        let waited = tokio::time::timeout(std::time::Duration::from_millis(100), abandoned).await;
        assert!(waited.is_err(), "the table is locked");
    }
    world.post(other, "still here", Mode::None).await;
    lock.rollback().await.expect("unlocked");
    assert_eq!(snapshot::read(&world.store, OWNER, viewed, 10).await.expect("a view").row.id, viewed.0);
}

#[tokio::test]
async fn a_view_is_of_one_moment() {
    let world = World::new().await;
    let (session, _, _) = world.waiting().await;
    let mut sql = world.sql().await;
    // A turn and its number in one transaction, again and again.
    let writing = tokio::spawn(async move {
        for position in 3..300_i64 {
            let tx = sql.transaction().await?;
            tx.execute(
                "INSERT INTO turns SELECT session_id, $2, gen_random_uuid(), tag, format, body, version, at, input_tokens,
                                          output_tokens, cached_tokens
                 FROM turns WHERE session_id = $1 AND position = 1",
                &[&session.0, &position],
            )
            .await?;
            tx.execute("UPDATE sessions SET turns = $2 WHERE id = $1", &[&session.0, &position]).await?;
            tx.commit().await?;
        }
        Ok::<_, tokio_postgres::Error>(())
    });
    let mut views = BTreeSet::new();
    while !writing.is_finished() {
        let view = snapshot::read(&world.store, OWNER, session, 1).await.expect("a view");
        assert_eq!(view.row.turns, view.turns[0].position, "the newest turn is the one that the row names");
        views.insert(view.row.turns);
    }
    writing.await.expect("no panic").expect("written");
    assert!(views.len() > 2, "views were read meanwhile: {views:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn these_races_catch_planted_mistakes() -> anyhow::Result<()> {
    holdfast_tests::planted::check(holdfast_tests::planted::Suite::Races).await
}
