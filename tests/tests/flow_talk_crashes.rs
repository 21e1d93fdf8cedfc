//! The same conversations with the worker aborted at named points of the flow: another one goes on, and the end is the
//! same, and so is what was told. The test command tries one passing of each point; `HOLDFAST_PASSINGS=all` tries every
//! passing.
#![expect(clippy::expect_used, reason = "a test")]

use anyhow::{Context, Result, ensure};
use holdfast_store::gate::POINTS;
use holdfast_tests::{
    cluster::fresh_database,
    talk::{self, Talk},
};
use tokio::sync::Semaphore;

/// Conversations that go on at once: they mostly wait for leases to end.
const AT_ONCE: usize = 4;

/// More passings than a conversation has of any point.
const MAX_PASSINGS: usize = 40;

/// How far the one passing of each point goes that the test command tries.
const SPREAD: usize = 5;

/// Whether every passing of a point is tried, and not one, which differs from point to point and from one conversation
/// to the next.
fn tries_all() -> bool {
    std::env::var("HOLDFAST_PASSINGS").is_ok_and(|which| which == "all")
}

/// Plays a conversation with a worker that aborts at the `n`-th passing of `point`, in which the same is to be told.
/// Returns whether it did.
async fn play(talk: Talk, point: &'static str, n: usize, told: &[String]) -> Result<bool> {
    let database = fresh_database().await;
    let world = talk.world(database.url()).await?;
    let (_api, api) = world.node("api", &[], &[]).await?;
    let (_scheduler, _) = world.node("scheduler", &[], &[]).await?;
    let crash = format!("{point}:{n}");
    let (mut doomed, _) = world.node("worker", &[], &[("HOLDFAST_CRASH_AT", crash.as_str())]).await?;
    let succession = async {
        doomed.ended().await?;
        let successor = world.node("worker", &[], &[]).await?;
        std::future::pending::<()>().await;
        drop(successor);
        anyhow::Ok(())
    };
    tokio::select! {
        played = talk.play(&world, &api) => played.map(drop),
        died = succession => died,
    }
    .with_context(|| format!("{talk:?}, aborted at {crash}"))?;
    talk::check(&world).await.with_context(|| format!("{talk:?}, aborted at {crash}"))?;
    let story = talk::story(&world).await?;
    ensure!(story == told, "{talk:?}, aborted at {crash}: {story:#?}, else {told:#?}");
    doomed.has_ended()
}

async fn anywhere(talk: Talk) -> Result<()> {
    let told = talk.undisturbed().await?;
    let slots = Semaphore::new(AT_ONCE);
    let points = POINTS.iter().enumerate().map(async |(place, &point)| {
        let tried = async |n: usize| {
            let _slot = slots.acquire().await?;
            play(talk, point, n, &told).await
        };
        if tries_all() {
            let mut crashes = 0;
            while crashes < MAX_PASSINGS && tried(crashes + 1).await? {
                crashes += 1;
            }
            return anyhow::Ok(crashes);
        }
        let one = 1 + (talk as usize + place) % SPREAD;
        // A point that isn't passed that often is passed once, or never in this conversation.
        let crashed = tried(one).await? || (one > 1 && tried(1).await?);
        Ok(usize::from(crashed))
    });
    let crashes = futures::future::try_join_all(points).await?;
    // Not every conversation has programs, and none a worker that leaves.
    let passed = |point: &str| !point.starts_with("tool") && point != "run.released";
    let never = POINTS.iter().zip(&crashes).filter(|(point, crashes)| **crashes == 0 && passed(point));
    let never: Vec<_> = never.collect();
    ensure!(never.is_empty(), "{talk:?} never passes {never:?}");
    Ok(())
}

macro_rules! anywhere {
    ($($name:ident = $talk:ident),* $(,)?) => {
        $(#[tokio::test(flavor = "multi_thread")]
        async fn $name() -> Result<()> {
            anywhere(Talk::$talk).await
        })*
    };
}

anywhere! {
    while_a_call_goes_on = OnAnyProgress,
    while_all_are_waited_for = WhenAllDone,
    while_a_call_is_waited_for_a_while = OnTimeout,
    while_calls_only_read = Reads,
    while_a_call_that_only_reads_begins_beside = ReadsBeside,
    while_a_call_is_attached = Attached,
    while_a_status_is_read = ReadFirst,
    while_a_person_interrupts = Interrupted,
    while_a_person_interrupts_a_wait = WaitInterrupted,
    while_agents_call_agents = Helpers,
    while_agents_write_to_agents = Mail,
    while_a_session_sleeps = Sleep,
    while_a_person_is_asked = Question,
    while_nobody_answers = Unanswered,
    while_approvals_are_waited_for = Approvals,
    while_a_session_is_paused = Paused,
    while_a_session_is_watched = Watched,
    while_agents_answer_each_other = PingPong,
    while_a_request_is_interrupted = RequestInterrupted,
    while_a_request_goes_on_beside_an_interrupt = RequestLeftAlone,
}

#[tokio::test(flavor = "multi_thread")]
async fn every_conversation_is_among_these() {
    let file = include_str!("flow_talk_crashes.rs");
    for talk in Talk::ALL {
        file.find(&format!("= {talk:?},")).expect("a test plays it");
    }
}
