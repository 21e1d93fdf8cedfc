//! Letters that come at once share a transaction, as new sessions do, and each has an answer of its own.
#![expect(clippy::expect_used, reason = "a test")]

use futures::future::join_all;
use holdfast_engine::{
    content::{Payload, Query},
    decide::Mode,
    ids::{MailId, SessionId},
    mail::{MailBody, Priority, Sender},
    waking::WakeClass,
};
use holdfast_store::{
    StoreError,
    accept::{self, Caller},
    create::{self, NewSession},
    idempotency::Done,
    letters::{Letter, MAILBOX_LIMIT, Receipt},
    loader::Loader,
    post::MAX_GROUP,
};
use holdfast_tests::store::{OWNER, World, caller, message, new_session};
use tokio::time::{Duration, timeout};
use uuid::Uuid;

fn letter(text: &str) -> Letter {
    Letter {
        id: MailId(Uuid::now_v7()),
        from: Sender::User { owner: Some(OWNER.to_owned()) },
        priority: Priority::Normal,
        hops: 0,
        body: MailBody::AgentMessage { text: text.to_owned(), in_reply_to: None, expects_reply: false },
    }
}

async fn send(world: &World, to: SessionId, letter: Letter) -> Result<Receipt, StoreError> {
    match accept::send(&world.store, &caller(), to, letter, WakeClass::User, &[]).await? {
        Done::Now(receipt) => Ok(receipt),
        Done::Before { .. } => panic!("there is no key"),
    }
}

#[tokio::test]
async fn letters_that_come_at_once_share_a_transaction() {
    let world = World::new().await;
    let sessions = [world.session().await, world.session().await, world.session().await];
    let sent = join_all((0..300).map(async |n: usize| {
        let to = sessions[n % 3];
        (to, send(&world, to, letter(&format!("letter {n}"))).await.expect("room").seq)
    }))
    .await;
    for session in sessions {
        let of = sent.iter().filter(|(to, _)| *to == session);
        let mut numbers: Vec<i64> = of.map(|(_, seq)| *seq).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, (1..=100).collect::<Vec<i64>>());
        let row = world.row(session).await;
        assert_eq!((row.status.as_str(), row.turns), ("running", 0));
        let events =
            format!("SELECT count(*) FROM events WHERE session_id = '{session}' AND kind = 'mail.accepted'");
        assert_eq!(world.count(&events).await, 100);
        let last = format!("SELECT max(seq) - count(*) FROM events WHERE session_id = '{session}'");
        assert_eq!(world.count(&last).await, 0, "events are numbered without a gap");
        let woken = format!("SELECT wake_seq FROM runs WHERE session_id = '{session}'");
        assert_eq!(world.count(&woken).await, 100);
    }
    let transactions = world.count("SELECT count(DISTINCT xmin::text) FROM mail").await;
    let least = i64::try_from(300_usize.div_ceil(MAX_GROUP)).expect("few");
    assert!((least..150).contains(&transactions), "{transactions} transactions for 300 letters");
}

#[tokio::test]
async fn mail_that_is_read_together_is_each_readers_own() {
    let world = World::new().await;
    let (one, other) = (world.session().await, world.session().await);
    for text in ["a", "b", "c"] {
        send(&world, one, letter(text)).await.expect("room");
    }
    send(&world, other, letter("d")).await.expect("room");
    let loader = Loader::start(&world.store);
    // One session is asked for twice, as by a reader that went away and one that came after it.
    let read = [(one, 0), (other, 0), (one, 1), (one, 3), (SessionId(Uuid::now_v7()), 0)];
    let read = join_all(read.map(|(session, cursor)| loader.mail_above(session, cursor))).await;
    let numbers: Vec<Vec<i64>> = read
        .into_iter()
        .map(|news| news.expect("read").0.iter().map(|letter| letter.seq).collect())
        .collect();
    assert_eq!(numbers, [vec![1, 2, 3], vec![1], vec![2, 3], vec![], vec![]]);
}

#[tokio::test]
async fn each_letter_of_a_group_has_its_own_answer() {
    let world = World::new().await;
    let (full, open) = (world.session().await, world.session().await);
    let filling = (0..MAILBOX_LIMIT - 2).map(|n| send(&world, full, letter(&format!("{n}"))));
    assert!(join_all(filling).await.iter().all(Result::is_ok));
    let (twice, stranger) = (letter("twice"), Caller { owner: Some("somebody else".into()), ..caller() });
    let foreign = async {
        let sent = accept::send(&world.store, &stranger, open, letter("x"), WakeClass::User, &[]).await;
        sent.map(|_| ())
    };
    let (a, b, c, d, unknown, first, again, foreign) = futures::join!(
        send(&world, full, letter("last but one")),
        send(&world, full, letter("last")),
        send(&world, full, letter("one too many")),
        send(&world, full, letter("two too many")),
        send(&world, SessionId(Uuid::now_v7()), letter("nowhere")),
        send(&world, open, twice.clone()),
        send(&world, open, twice.clone()),
        foreign,
    );
    assert_eq!((a.expect("room").seq, b.expect("room").seq), (MAILBOX_LIMIT - 1, MAILBOX_LIMIT));
    for refused in [c, d] {
        assert!(matches!(refused, Err(StoreError::MailboxFull { limit: MAILBOX_LIMIT })), "{refused:?}");
    }
    assert!(matches!(unknown, Err(StoreError::UnknownSession)), "{unknown:?}");
    assert!(matches!(foreign, Err(StoreError::UnknownSession)), "{foreign:?}");
    let (first, again) = (first.expect("room"), again.expect("known"));
    assert_eq!((first.seq, first.duplicate, again.seq, again.duplicate), (1, false, 1, true));
    assert_eq!(world.count("SELECT count(*) FROM mail").await, MAILBOX_LIMIT + 1);
}

#[tokio::test]
async fn a_session_that_somebody_has_locked_keeps_only_its_own_letters_waiting() {
    // One connection for those who wait, however many they are, and one for all others.
    let world = World::with_connections(2).await;
    let (locked, free) = (world.session().await, world.session().await);
    let mut sql = world.sql().await;
    let lock = sql.transaction().await.expect("a transaction");
    lock.execute("SELECT 1 FROM sessions WHERE id = $1 FOR UPDATE", &[&locked.0]).await.expect("locked");
    let mut waiting =
        std::pin::pin!(join_all((0..20).map(|n| send(&world, locked, letter(&format!("{n}"))))));
    let mut others = std::pin::pin!(async {
        for n in 0..20 {
            send(&world, free, letter(&format!("{n}"))).await.expect("room");
        }
    });
    tokio::select! {
        biased;
        _ = &mut waiting => panic!("their session is locked"),
        sent = timeout(Duration::from_secs(60), &mut others) => sent.expect("they don't wait"),
    }
    lock.rollback().await.expect("unlocked");
    let mut numbers: Vec<i64> = waiting.await.into_iter().map(|sent| sent.expect("taken in").seq).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, (1..=20).collect::<Vec<i64>>());
    // It is among the others again.
    assert_eq!(send(&world, locked, letter("and one more")).await.expect("room").seq, 21);
}

async fn create(world: &World, new: &NewSession) -> Result<Done<SessionId>, StoreError> {
    create::create(&world.store, &caller(), new.clone()).await
}

#[tokio::test]
async fn sessions_that_come_at_once_share_a_transaction() {
    let world = World::new().await;
    let long = Query { text: "x".repeat(100_000), media: Vec::new() };
    let news: Vec<NewSession> = (0..100)
        .map(|n: usize| {
            let (mut said, run) = (message(&format!("message {n}")), Mode::UntilBlocked);
            if n.is_multiple_of(10) {
                // All of them bring the same blob.
                let (query, blob) = Payload::pack(long.clone());
                (said.query, said.blobs) = (query, blob.into_iter().collect());
            }
            match n % 4 {
                0 => new_session(Some(said), run),
                1 => new_session(Some(said), Mode::None),
                2 => new_session(None, run),
                _ => NewSession { agent: "nobody".to_owned(), ..new_session(Some(said), run) },
            }
        })
        .collect();
    let made = join_all(news.iter().map(|new| create(&world, new))).await;
    for (n, (new, made)) in news.iter().zip(&made).enumerate() {
        let row = format!("SELECT count(*) FROM sessions WHERE id = '{}'", new.id);
        if n % 4 == 3 {
            assert!(matches!(made, Err(StoreError::UnknownAgent(_))), "{made:?}");
            assert_eq!(world.count(&row).await, 0);
            continue;
        }
        assert!(matches!(made, Ok(Done::Now(id)) if *id == new.id), "{made:?}");
        let session = world.row(new.id).await;
        let status = if n % 4 == 0 { "running" } else { "ready" };
        assert_eq!((session.status.as_str(), session.turns), (status, 0), "{n}");
        let of = |table: &str| format!("SELECT count(*) FROM {table} WHERE session_id = '{}'", new.id);
        let said = i64::from(n % 4 != 2);
        assert_eq!(world.count(&of("mail")).await, said);
        assert_eq!(world.count(&of("runs")).await, said, "to run, or to fold");
        let events = format!(
            "SELECT event_seq - (SELECT max(seq) FROM events WHERE session_id = s.id) FROM sessions s WHERE id = '{}'",
            new.id
        );
        assert_eq!(world.count(&events).await, 0, "events are numbered without a gap");
        let first = format!(
            "SELECT count(*) FROM events WHERE session_id = '{}' AND seq = 1 AND kind = 'session.created'",
            new.id
        );
        assert_eq!(world.count(&first).await, 1);
    }
    assert_eq!(world.count("SELECT count(*) FROM blobs WHERE length(body) > 100000").await, 1);
    let transactions = world.count("SELECT count(DISTINCT xmin::text) FROM sessions").await;
    assert!((2..40).contains(&transactions), "{transactions} transactions for 75 sessions");
}

#[tokio::test]
async fn a_session_that_is_there_already_fails_alone() {
    let world = World::new().await;
    let there = new_session(Some(message("there")), Mode::UntilBlocked);
    create(&world, &there).await.expect("a session");
    let others: Vec<NewSession> =
        (0..20).map(|n| new_session(Some(message(&format!("{n}"))), Mode::UntilBlocked)).collect();
    let all = others.iter().chain([&there]);
    let made = join_all(all.map(|new| create(&world, new))).await;
    assert!(made[..20].iter().all(Result::is_ok), "{made:?}");
    assert!(made[20].is_err());
    assert_eq!(world.count("SELECT count(*) FROM sessions").await, 21);
}
