//! Mail that arrives while a run ends or parks: whoever is second sees what the first has done.

use holdfast_engine::{decide::Mode, session::Status};
use holdfast_store::{
    accept,
    commit::{Outcome, RunAfter},
    idempotency::Done,
    load,
};
use holdfast_tests::{
    gates::{Stopper, until_queued},
    step::{Holder, queries, says, send},
    store::{World, caller, message},
};
use tokio::task::JoinHandle;

type Ending = JoinHandle<Result<Outcome, holdfast_store::StoreError>>;

/// A run that is about to be released, its commit held at `point`.
async fn about_to(world: &World, run: RunAfter, point: &'static str) -> (Holder, Ending, Stopper) {
    let mut holder = world.hold().await;
    holder.decide();
    holder.answer(says("hi"));
    holder.decide();
    let work = holder.work(run);
    let (gate, stopper) = Stopper::at(point);
    let store = world.gated(gate);
    let committing = tokio::spawn(async move { send(&store, &work).await });
    stopper.reached().await;
    (holder, committing, stopper)
}

fn end() -> RunAfter {
    RunAfter::End { status: Status::Idle, detail: None }
}

fn park() -> RunAfter {
    RunAfter::Park { on: "a timer".to_owned(), until: None }
}

async fn mail_before_the_release(run: RunAfter) {
    let world = World::new().await;
    let session = world.asked("hello").await;
    let (mut holder, committing, stopper) = about_to(&world, run, "commit.begun").await;
    let wake_seq = world.post(session, "and another thing", Mode::UntilBlocked).await.seq;
    stopper.release();
    let outcome = committing.await.expect("ended").expect("an outcome");
    let goes_on = Outcome::Stored { version: 2, released: false, wake_seq, mode: Mode::UntilBlocked };
    assert_eq!(outcome, goes_on);
    assert_eq!(world.row(session).await.status, "running");
    holder.learn(outcome).await;
    assert_eq!(holder.inbox.last().map(|letter| letter.seq), Some(wake_seq));
    assert_eq!(holder.drive_with(vec![says("noted")]).await, Status::Idle);
    assert_eq!(queries(&holder.session), ["hello", "and another thing"]);
    assert_eq!((world.runs(session).await, world.row(session).await.status.as_str()), (0, "idle"));
}

#[tokio::test]
async fn mail_before_an_ends_lock_lets_the_run_go_on() {
    Box::pin(mail_before_the_release(end())).await;
}

#[tokio::test]
async fn mail_before_a_parks_lock_lets_the_run_go_on() {
    Box::pin(mail_before_the_release(park())).await;
}

#[tokio::test]
async fn mail_during_a_step_is_there_for_whoever_takes_over() {
    let world = World::new().await;
    let session = world.asked("hello").await;
    let (holder, committing, stopper) = about_to(&world, RunAfter::Keep, "commit.begun").await;
    let seq = world.post(session, "and another thing", Mode::UntilBlocked).await.seq;
    stopper.release();
    let outcome = committing.await.expect("ended").expect("an outcome");
    assert!(matches!(outcome, Outcome::Stored { released: false, .. }), "{outcome:?}");
    // The worker dies with what it knows: all that is left is what is stored.
    drop(holder);
    let loaded = load::load(&world.store, session).await.expect("loaded");
    let unread: Vec<i64> = loaded.inbox.iter().map(|letter| letter.seq).collect();
    assert_eq!(unread, (loaded.session.cursor + 1..=seq).collect::<Vec<_>>());
    assert_eq!(unread.last(), Some(&seq));
}

async fn mail_behind_the_release(run: RunAfter, left_over: i64) {
    let world = World::new().await;
    let session = world.asked("hello").await;
    let (holder, committing, stopper) = about_to(&world, run, "commit.written").await;
    let posting = tokio::spawn({
        let store = world.store.clone();
        let message = message("and another thing");
        async move { accept::post(&store, &caller(), session, &message, Mode::UntilBlocked).await }
    });
    until_queued(&world.sql().await, 1).await;
    assert_eq!(world.runs(session).await, 1, "nothing is visible before the commit");
    stopper.release();
    let outcome = committing.await.expect("ended").expect("an outcome");
    assert!(matches!(outcome, Outcome::Stored { released: true, .. }), "{outcome:?}");
    let Done::Now(receipt) = posting.await.expect("ended").expect("taken") else {
        panic!("no key was given")
    };
    let mut next = world.hold().await;
    assert!(next.lease.epoch > holder.lease.epoch && !next.lease.taken_over);
    assert_eq!(next.lease.wake_seq, receipt.seq);
    assert_eq!(next.drive_with(vec![says("noted")]).await, Status::Idle);
    assert_eq!(queries(&next.session), ["hello", "and another thing"]);
    let started = "SELECT count(*) FROM events WHERE kind = 'run.started'";
    assert_eq!(world.count(started).await, left_over);
}

#[tokio::test]
async fn mail_that_waits_for_an_ends_lock_starts_the_next_run() {
    mail_behind_the_release(end(), 2).await;
}

#[tokio::test]
async fn mail_that_waits_for_a_parks_lock_wakes_the_parked_run() {
    // It is the same run: it was parked, not ended.
    mail_behind_the_release(park(), 1).await;
}

#[tokio::test]
async fn a_resume_while_a_run_only_folds_is_not_lost() {
    for point in ["commit.begun", "commit.written"] {
        let world = World::new().await;
        let session = world.created(Some(message("for later")), Mode::None).await;
        let mut folding = world.hold().await;
        assert_eq!(folding.lease.mode, Mode::None);
        folding.decide();
        let work = folding.work(RunAfter::End { status: Status::Ready, detail: None });
        let (gate, stopper) = Stopper::at(point);
        let store = world.gated(gate);
        let committing = tokio::spawn(async move { send(&store, &work).await });
        stopper.reached().await;
        let resuming = tokio::spawn({
            let store = world.store.clone();
            async move { accept::resume(&store, &caller(), session, Mode::UntilBlocked).await }
        });
        let resumed = if point == "commit.begun" {
            let done = resuming.await;
            stopper.release();
            done
        } else {
            until_queued(&world.sql().await, 1).await;
            stopper.release();
            resuming.await
        };
        resumed.expect("ended").expect("a run is asked for");
        let outcome = committing.await.expect("ended").expect("an outcome");
        assert_eq!(world.runs(session).await, 1, "{point}: the run that was promised is there");
        assert!(world.row(session).await.active, "{point}");
        let status = match outcome {
            Outcome::Stored { released: true, .. } => world.hold().await.drive_with(vec![says("hi")]).await,
            _ => {
                folding.learn(outcome).await;
                folding.drive_with(vec![says("hi")]).await
            }
        };
        assert_eq!(status, Status::Idle, "{point}");
    }
}

#[tokio::test]
async fn news_is_announced_after_the_commit() {
    use holdfast_store::{
        listen::{Heard, Listener},
        notify::Channel,
    };
    let world = World::with_notifier().await;
    let listener = Listener::start(world.database.url(), "tests", &[Channel::Runs]).expect("a listener");
    listener.connected().await;
    let mut heard = listener.subscribe();
    let session = world.asked("hello").await;
    let news = async {
        loop {
            match heard.recv().await.expect("the listener stands") {
                Heard::Item { item, .. } if *item == session.to_string() => break,
                _ => {}
            }
        }
    };
    tokio::time::timeout(holdfast_tests::gates::PATIENCE, news).await.expect("a hint");
    assert_eq!(world.hold().await.session.id, session);
}
