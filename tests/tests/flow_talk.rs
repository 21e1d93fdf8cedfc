//! Conversations in which more goes on than question and answer, with an API node and a worker as processes.
#![expect(clippy::expect_used, reason = "a test")]

use std::time::Duration;

use anyhow::{Result, ensure};
use holdfast_tests::{
    cluster::fresh_database,
    talk::{self, Talk},
    world::{PATIENCE, Signal, World},
};

async fn plain(talk: Talk) -> Result<()> {
    let database = fresh_database().await;
    let world = talk.world(database.url()).await?;
    let (_api, api) = world.node("api", &[], &[]).await?;
    let (_scheduler, _) = world.node("scheduler", &[], &[]).await?;
    let (_worker, _) = world.node("worker", &[], &[]).await?;
    talk.play(&world, &api).await?;
    talk::check(&world).await
}

macro_rules! plain {
    ($($name:ident = $talk:ident),* $(,)?) => {
        $(#[tokio::test(flavor = "multi_thread")]
        async fn $name() -> Result<()> {
            plain(Talk::$talk).await
        })*
    };
}

plain! {
    on_any_progress_the_model_is_asked_while_a_call_goes_on = OnAnyProgress,
    when_all_are_done_the_model_is_asked_once = WhenAllDone,
    after_a_while_the_model_is_asked_while_a_call_goes_on = OnTimeout,
    a_call_is_attached_for_as_long_as_its_rule_says = Attached,
    a_result_that_was_read_is_not_told_again = ReadFirst,
    a_person_may_interrupt_what_is_waited_for = Interrupted,
    a_person_may_interrupt_a_wait = WaitInterrupted,
    agents_call_agents = Helpers,
    agents_start_agents_that_answer_by_mail = Mail,
    a_session_sleeps_without_a_worker = Sleep,
    a_person_answers_a_question = Question,
    a_question_that_nobody_answers_has_its_default = Unanswered,
    calls_wait_for_approvals_and_hooks = Approvals,
    a_pause_lets_calls_come_home = Paused,
    a_session_is_watched = Watched,
    agents_that_answer_each_other_end_when_the_hops_run_out = PingPong,
}

#[tokio::test(flavor = "multi_thread")]
async fn every_conversation_is_among_these() {
    let file = include_str!("flow_talk.rs");
    for talk in Talk::ALL {
        let name = format!("= {talk:?},");
        file.find(&name).expect("a test plays it");
    }
}

/// Waits until the slow call has begun so often.
async fn begun(world: &World, times: usize) -> Result<()> {
    let mut tick = tokio::time::interval(Duration::from_millis(20));
    let beginning = async {
        while world.agent.effects().values().sum::<usize>() < times {
            tick.tick().await;
        }
    };
    Ok(tokio::time::timeout(PATIENCE, beginning).await?)
}

/// A worker that is told to leave while a call goes on in the background, with so many seconds of grace; the call is
/// let go before or after it has left. Returns how often the call began.
async fn drained(grace: &str, let_go_first: bool) -> Result<usize> {
    let database = fresh_database().await;
    let mut world = Talk::OnAnyProgress.world(database.url()).await?;
    // Far longer than the test: whoever waits for an expiry fails.
    world.lease_ttl = 600;
    let (_api, api) = world.node("api", &[], &[]).await?;
    let (mut leaving, _) = world.node("worker", &["--shutdown-grace", grace], &[]).await?;
    let id = world.create(&api).await?;
    begun(&world, 1).await?;
    talk::asked(&world, 2).await?;
    leaving.signal(Signal::TERM)?;
    if let_go_first {
        talk::let_go(world.agent.dir())?;
    }
    ensure!(leaving.ended().await?.success(), "{}", leaving.log_text());
    let (_worker, _) = world.node("worker", &[], &[]).await?;
    if !let_go_first {
        begun(&world, 2).await?;
        talk::let_go(world.agent.dir())?;
    }
    Talk::OnAnyProgress.ended(&world, &api, id).await?;
    talk::check(&world).await?;
    Ok(world.agent.effects().values().sum())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_leaves_lets_a_call_in_the_background_finish() -> Result<()> {
    ensure!(drained("60", true).await? == 1);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_has_to_leave_hands_an_idempotent_call_over() -> Result<()> {
    ensure!(drained("1", false).await? == 2);
    Ok(())
}
