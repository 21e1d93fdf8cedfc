//! Conversations in which more goes on than question and answer: calls in the background, interrupts, agents that
//! call, start and write to one another, sleeps and questions to people. Each is a script of the model, agents, and
//! what a client does; all of them go on whatever dies meanwhile, and end in the same way.

mod scripts;

use std::{fs, path::Path};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tokio::time::{Duration, Instant};
use uuid::Uuid;

use crate::{
    cluster::{connect, fresh_database},
    world::{AgentFiles, Model, PATIENCE, World, answer},
};

/// A conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Talk {
    /// A fast and a slow call; the model is asked when the fast one has ended.
    OnAnyProgress,
    /// The same, and all are waited for.
    WhenAllDone,
    /// The same, and the model is asked after a while.
    OnTimeout,
    /// The same, but both only read; and another round of the fast one.
    Reads,
    /// A slow call leaves no place to a call that only reads, which begins as the end of the slow one is told.
    ReadsBeside,
    /// A slow call that is attached for as long as its rule says.
    Attached,
    /// The result of a slow call is read by its status before it is told.
    ReadFirst,
    /// A person interrupts while a call is waited for.
    Interrupted,
    /// The model waits for a call, and a person interrupts the wait.
    WaitInterrupted,
    /// Two agents are called in one round.
    Helpers,
    /// An agent is started, watched and answers by mail.
    Mail,
    /// A sleep.
    Sleep,
    /// A question to a person.
    Question,
    /// A question to a person that nobody answers.
    Unanswered,
    /// A call that a person lets run, one that a predicate denies, and one that a hook hands out.
    Approvals,
    /// A pause while a call runs, and the resume.
    Paused,
    /// A session is started, watched, and its end comes as mail.
    Watched,
    /// Two agents answer each other until the hops run out.
    PingPong,
    /// A person interrupts while the model is being asked, and the request is ended.
    RequestInterrupted,
    /// The same, and the request goes on: the person is told of next.
    RequestLeftAlone,
}

impl Talk {
    /// All of them.
    pub const ALL: [Self; 20] = [
        Self::OnAnyProgress,
        Self::WhenAllDone,
        Self::OnTimeout,
        Self::Reads,
        Self::ReadsBeside,
        Self::Attached,
        Self::ReadFirst,
        Self::Interrupted,
        Self::WaitInterrupted,
        Self::Helpers,
        Self::Mail,
        Self::Sleep,
        Self::Question,
        Self::Unanswered,
        Self::Approvals,
        Self::Paused,
        Self::Watched,
        Self::PingPong,
        Self::RequestInterrupted,
        Self::RequestLeftAlone,
    ];

    /// What the model says last.
    pub fn last_words(self) -> &'static str {
        match self {
            Self::OnAnyProgress
            | Self::OnTimeout
            | Self::ReadsBeside
            | Self::Attached
            | Self::Interrupted => "all done",
            Self::WhenAllDone | Self::Reads => "fast: fast\n slow: slow\n",
            Self::ReadFirst => "read slow",
            Self::WaitInterrupted => "all done",
            Self::RequestInterrupted | Self::RequestLeftAlone => "it goes well",
            Self::Helpers => "one: echo one; two: echo two",
            Self::Mail => "heard it",
            Self::Sleep => "awake",
            Self::Question => "they said: ship it",
            Self::Unanswered => "they said: no",
            Self::Approvals => "allowed: fast\n denied: Error: never by force asked: by hand",
            Self::Paused => "fast: fast\n slow: slow\n",
            Self::Watched => "it stopped",
            Self::PingPong => "enough",
        }
    }

    /// The agents and the model of it, over a database.
    ///
    /// # Errors
    /// If the model or the files can't be made.
    pub async fn world(self, database: &str) -> Result<World> {
        let model = Model::start(&scripts::script(self)).await?;
        let agent = AgentFiles::with_tools(&scripts::agent(self, &model.url), &scripts::tools())?;
        for (name, config) in scripts::helpers(&model.url) {
            fs::write(agent.dir().join(name), config.to_string())?;
        }
        Ok(World::new(database, model, agent))
    }

    /// Plays a client's part, until the conversation has ended. Slow tools run until they are let go.
    ///
    /// # Errors
    /// If it doesn't end as it should.
    pub async fn play(self, world: &World, api: &str) -> Result<Uuid> {
        let id = world.create(api).await?;
        match self {
            Self::OnAnyProgress | Self::OnTimeout | Self::Attached => {
                asked(world, 2).await?;
                let_go(world.agent.dir())?;
            }
            Self::WhenAllDone => let_go(world.agent.dir())?,
            Self::Reads => {
                // What isn't over at once is stored as running.
                running(world, api, id).await?;
                let_go(world.agent.dir())?;
            }
            Self::ReadFirst => {
                asked(world, 2).await?;
                let_go(world.agent.dir())?;
            }
            Self::Interrupted | Self::ReadsBeside | Self::WaitInterrupted => {
                let already = if self == Self::WaitInterrupted { 2 } else { 1 };
                asked(world, already).await?;
                running(world, api, id).await?;
                interrupt(world, api, id).await?;
                said(world, "how is it going?").await?;
                let_go(world.agent.dir())?;
            }
            Self::RequestInterrupted | Self::RequestLeftAlone => {
                // Nobody lets go the request that is to be ended.
                held(world).await?;
                interrupt(world, api, id).await?;
                if self == Self::RequestLeftAlone {
                    taken_in(world, api, id).await?;
                    world.model.release("thinking").await?;
                }
            }
            Self::Question => {
                let view = world.until(api, id, "waiting_external").await?;
                ensure!(view["pending"][0]["reason"] == "may I?", "{view}");
                let token = view["pending"][0]["continuation_token"].as_str().context("a token")?.to_owned();
                world.complete(api, &token, "ship it", false).await?;
            }
            Self::Approvals => {
                let view = world.until(api, id, "waiting_external").await?;
                for call in view["pending"].as_array().context("calls")? {
                    let token = call["continuation_token"].as_str().context("a token")?;
                    let body = match call["approval"].as_bool() {
                        Some(true) => json!({"approve": true}),
                        _ => json!({"result": "by hand"}),
                    };
                    let url = format!("{api}/v1/continuations/{token}");
                    let (status, view) = world.call("POST", &url, Some(&body)).await?;
                    ensure!(matches!(status, 200 | 202) || view["same_result"] == true, "{status} {view}");
                }
            }
            Self::Paused => {
                running(world, api, id).await?;
                let url = |command: &str| format!("{api}/v1/sessions/{id}/{command}");
                let (status, view) = world.call("POST", &url("pause"), None).await?;
                ensure!(status == 200, "{status} {view}");
                let_go(world.agent.dir())?;
                world.until(api, id, "paused").await?;
                let (status, view) = world.call("POST", &url("resume"), None).await?;
                ensure!(matches!(status, 200 | 202), "{status} {view}");
            }
            Self::Watched => {
                // It watches what happens from then on.
                asked(world, 3).await?;
                world.model.release("writer").await?;
            }
            Self::Helpers | Self::Mail | Self::PingPong | Self::Sleep | Self::Unanswered => {}
        }
        self.ended(world, api, id).await?;
        Ok(id)
    }

    /// Plays the conversation where nobody dies. Returns its [`story`].
    ///
    /// # Errors
    /// If it doesn't end as it should, or doesn't hold what holds of every conversation.
    pub async fn undisturbed(self) -> Result<Vec<String>> {
        let database = fresh_database().await;
        let world = self.world(database.url()).await?;
        let (_api, api) = world.node("api", &[], &[]).await?;
        let (_scheduler, _) = world.node("scheduler", &[], &[]).await?;
        let (_worker, _) = world.node("worker", &[], &[]).await?;
        self.play(&world, &api).await?;
        check(&world).await?;
        story(&world).await
    }

    /// Waits until the conversation has ended as it should.
    ///
    /// # Errors
    /// If it doesn't.
    pub async fn ended(self, world: &World, api: &str, id: Uuid) -> Result<()> {
        let until = Instant::now() + PATIENCE;
        loop {
            let view = world.view(api, id).await?;
            let last = answer(&view).unwrap_or_default();
            if view["status"] == "idle" && last == self.last_words() {
                return Ok(());
            }
            ensure!(view["status"] != "failed", "{self:?}: {view}");
            let calls = &view["calls"];
            ensure!(
                Instant::now() < until,
                "{self:?} is {} with {last:?}, {calls}: {:#}",
                view["status"],
                view["session"]["turns"]
            );
            tokio::time::sleep(Duration::from_millis(50)).await; // polls a process
        }
    }
}

/// Lets slow tools end, those that run and those that begin later.
///
/// # Errors
/// If the file that says so can't be written.
pub fn let_go(dir: &Path) -> Result<()> {
    Ok(fs::write(dir.join("go-on"), "")?)
}

/// Waits until the model has been asked so often with another conversation.
///
/// # Errors
/// If it isn't.
pub async fn asked(world: &World, times: usize) -> Result<()> {
    until(async || {
        let mut lengths: Vec<usize> = Vec::new();
        for request in world.model.requests().await? {
            let length = request["messages"].as_array().map_or(0, Vec::len);
            if !lengths.contains(&length) {
                lengths.push(length);
            }
        }
        Ok(lengths.len() >= times)
    })
    .await
    .with_context(|| format!("the model is asked {times} times"))
}

/// Waits until the model has been asked with a text.
async fn said(world: &World, text: &str) -> Result<()> {
    until(async || Ok(world.model.requests().await?.iter().any(|request| request.to_string().contains(text))))
        .await
        .with_context(|| format!("the model is told {text:?}"))
}

/// A person says something that doesn't wait.
async fn interrupt(world: &World, api: &str, id: Uuid) -> Result<()> {
    let body = json!({"prompt": "how is it going?", "interrupt": true,
        "message_id": Uuid::from_u128(id.as_u128() ^ 1)});
    let url = format!("{api}/v1/sessions/{id}/messages");
    let (status, view) = world.call("POST", &url, Some(&body)).await?;
    ensure!(matches!(status, 200 | 202), "{status} {view}");
    Ok(())
}

/// Waits until an answer of the model is held.
async fn held(world: &World) -> Result<()> {
    until(async || Ok(!world.model.held().await?.is_empty())).await.context("the model is asked")
}

/// Waits until all mail of a session has been considered. An order after it, of which there is nothing to obey, is
/// stored at once.
async fn taken_in(world: &World, api: &str, id: Uuid) -> Result<()> {
    let order = json!({"body": {"tag": "control", "message": {"tag": "cancelAllAttached"}}});
    let (status, view) = world.call("POST", &format!("{api}/v1/sessions/{id}/mail"), Some(&order)).await?;
    ensure!(status == 202, "{status} {view}");
    let sql = connect(&world.url).await?;
    let considered = "SELECT mail_cursor = mail_seq FROM sessions WHERE id = $1";
    until(async || Ok(sql.query_one(considered, &[&id]).await?.get(0))).await.context("mail is considered")
}

/// Waits until a call of a session goes on.
async fn running(world: &World, api: &str, id: Uuid) -> Result<()> {
    until(async || {
        let view = world.view(api, id).await?;
        let calls = view["calls"].as_array().cloned().unwrap_or_default();
        Ok(calls.iter().any(|call| matches!(call["state"].as_str(), Some("running" | "waiting"))))
    })
    .await
    .context("a call goes on")
}

async fn until(mut there: impl AsyncFnMut() -> Result<bool>) -> Result<()> {
    let until = Instant::now() + PATIENCE;
    let mut pause = tokio::time::interval(Duration::from_millis(30));
    while !there().await? {
        ensure!(Instant::now() < until, "it takes too long");
        pause.tick().await;
    }
    Ok(())
}

/// What holds of every conversation at its end, whatever died meanwhile: no request broke a provider's rule, and
/// what ended in the background was told once.
///
/// # Errors
/// With what doesn't hold.
pub async fn check(world: &World) -> Result<()> {
    let violations = world.model.violations().await?;
    ensure!(violations.is_empty(), "{violations:?}");
    for request in world.model.requests().await? {
        let text = request["messages"].to_string();
        for marker in ["(bash_slow) completed]", "(bash_slow) failed]", "(bash_fast) completed]"] {
            ensure!(text.matches(marker).count() <= 1, "{marker} is told twice: {text}");
        }
        ensure!(!text.contains("orphaned"), "a call was given up that may run again: {text}");
    }
    let untold = "SELECT name, state FROM tool_calls c JOIN sessions s ON s.id = c.session_id
        WHERE s.agent = 'main' AND NOT told_result";
    let untold = connect(&world.url).await?.query(untold, &[]).await?;
    let untold: Vec<(&str, &str)> = untold.iter().map(|row| (row.get(0), row.get(1))).collect();
    ensure!(untold.is_empty(), "the store wasn't told of: {untold:?}");
    Ok(())
}

/// By what lines of a [`story`] are known that depend on the moment: a wait, what it ended with, and the receipt of a
/// letter, which says what its recipient did then.
const OF_THE_MOMENT: [&str; 3] = [r#"\"capability\":\"wait\""#, r#""woken_by":"#, r#""recipient_status":"#];

/// What the model has been told in a conversation and what it has asked for, in the words of the last request of its
/// agent's: a line for each call, result, notice and message, in no order. Names, times, placeholders
/// and what depends on the moment are left out, since they differ from one playing to the next.
///
/// # Errors
/// If the model doesn't say what it was asked.
pub async fn story(world: &World) -> Result<Vec<String>> {
    let requests = world.model.requests().await?;
    let last = requests.iter().rev().find(|request| request["model"] == "main").context("a request")?;
    let mut told = Vec::new();
    for message in last["messages"].as_array().into_iter().flatten() {
        let text = match &message["content"] {
            Value::String(text) => text.clone(),
            Value::Array(parts) => {
                parts.iter().filter_map(|part| part["text"].as_str()).collect::<Vec<_>>().join("\n")
            }
            _ => String::new(),
        };
        match message["role"].as_str() {
            Some("user" | "tool") => told.extend(said_once(&text)),
            Some("assistant") => {
                let calls = message["tool_calls"].as_array();
                told.extend(
                    calls.into_iter().flatten().map(|call| nameless(&format!("asks {}", call["function"]))),
                );
            }
            _ => {}
        }
    }
    told.retain(|line| !OF_THE_MOMENT.iter().any(|sign| line.contains(sign)));
    told.sort_unstable();
    Ok(told)
}

/// A result or notices, without what differs from one playing to the next; none of a placeholder. Whether two ends are
/// told in one turn or in two, the moment says.
fn said_once(text: &str) -> Vec<String> {
    if serde_json::from_str::<Value>(text)
        .is_ok_and(|shown| shown["status"].is_string() && shown["message"].is_string())
    {
        return Vec::new();
    }
    let mut parts = text.split("\n[mail ");
    let first = parts.next().map(str::to_owned);
    let notices = parts.map(|notice| format!("[mail {notice}"));
    first.into_iter().chain(notices).map(|part| nameless(part.trim_end())).collect()
}

/// A text in which each word with a digit, and each letter's name, is the same.
fn nameless(text: &str) -> String {
    let hex = |rest: &str| rest.len() == 8 && rest.chars().all(|digit| digit.is_ascii_hexdigit());
    let named = |name: &str| {
        name.contains(|letter: char| letter.is_ascii_digit()) || name.strip_prefix("m-").is_some_and(hex)
    };
    let word = |letter: char| letter.is_alphanumeric() || "_-:.".contains(letter);
    let mut shown = String::new();
    for part in text.split_inclusive(|letter| !word(letter)) {
        let (name, end) = part.split_at(part.trim_end_matches(|letter| !word(letter)).len());
        shown.push_str(if named(name) { "#" } else { name });
        shown.push_str(end);
    }
    shown
}

/// The configuration of a conversation's agent, for tests that change it.
pub fn agent(talk: Talk, model_url: &str) -> Value {
    scripts::agent(talk, model_url)
}
