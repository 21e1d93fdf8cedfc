//! The clients of one session: they ask, answer, repeat themselves, contradict each other and change
//! their minds.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use uuid::Uuid;

use super::{
    client::Client,
    dice::Dice,
    stage::PLANS,
    story::{Attempt, Sent, Story, Verdict},
};

/// How long clients look out for a token from the moment on that it may exist.
const EARLY: Duration = Duration::from_secs(2);

/// Plays one session from its creation on.
pub(super) struct Player {
    client: Arc<Client>,
    dice: Dice,
    /// How long clients pause between two requests at most.
    pace: Duration,
    /// Tokens that were seen, whatever became of them.
    seen: Vec<Uuid>,
    /// What its clients know so far.
    pub(super) story: Story,
}

impl Player {
    /// Creates session `number`.
    ///
    /// # Errors
    /// If it isn't created.
    pub(super) async fn create(
        client: &Arc<Client>,
        seed: u64,
        number: usize,
        pace: Duration,
    ) -> Result<Self> {
        let mut dice = Dice::part(seed, u64::try_from(number)?);
        let mark = Story::mark(number, 0);
        let plan = dice.pick(&PLANS[..3]).copied().unwrap_or_default();
        let body = json!({"agent": "chaos", "prompt": format!("{} {mark} {plan}", Story::name(number))});
        let (status, view) = client.call("POST", "/v1/sessions", Some(&body)).await?;
        ensure!(status == 201, "{status} {view}");
        let id = view["session_id"].as_str().context("no id")?.parse()?;
        let sent = vec![Sent { mark, receipt: None }];
        let story = Story { number, id, deleted: false, sent, attempts: Vec::new(), odd: Vec::new() };
        Ok(Self { client: Arc::clone(client), dice, pace, seen: Vec::new(), story })
    }

    /// Plays on for a while.
    ///
    /// # Errors
    /// If a request isn't answered at all.
    pub(super) async fn play(mut self) -> Result<Story> {
        if self.dice.chance(40) {
            self.answer_early().await?;
        }
        for _ in 0..4 + self.dice.below(4) {
            // People take their time.
            sleep(self.dice.up_to(self.pace)).await;
            match self.dice.below(100) {
                0..36 => self.answer().await?,
                36..46 => self.answer_stale().await?,
                46..70 => self.say().await?,
                70..80 => self.cancel().await?,
                80..90 => self.pause().await?,
                90..93 => self.delete().await?,
                _ => self.resume("step").await?,
            }
            if self.story.deleted {
                break;
            }
        }
        Ok(self.story)
    }

    fn path(&self, rest: &str) -> String {
        format!("/v1/sessions/{}{rest}", self.story.id)
    }

    fn odd(&mut self, what: &str, status: u16, answer: &Value) {
        self.story.odd.push(format!("{what} was answered with {status} {answer}"));
    }

    /// Tokens of calls that are open now.
    async fn open(&mut self) -> Result<Vec<Uuid>> {
        let (status, answer) = self.client.call("GET", &self.path("/pending"), None).await?;
        if status != 200 {
            self.odd("GET pending", status, &answer);
        }
        let calls = answer["calls"].as_array().cloned().unwrap_or_default();
        let tokens: Vec<Uuid> =
            calls.iter().filter_map(|call| call["continuation_token"].as_str()?.parse().ok()).collect();
        for token in &tokens {
            if !self.seen.contains(token) {
                self.seen.push(*token);
            }
        }
        Ok(tokens)
    }

    /// Completes a call as soon as its token exists, whether or not the run has stopped.
    async fn answer_early(&mut self) -> Result<()> {
        let until = Instant::now() + EARLY;
        while Instant::now() < until {
            if let Some(token) = self.open().await?.first().copied() {
                return self.complete(token).await;
            }
            sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    async fn answer(&mut self) -> Result<()> {
        for token in self.open().await? {
            if self.dice.chance(60) {
                self.complete(token).await?;
            }
        }
        Ok(())
    }

    /// Completes a call that may have ended in any way by now.
    async fn answer_stale(&mut self) -> Result<()> {
        match self.dice.pick(&self.seen).copied() {
            Some(token) => self.complete(token).await,
            None => Ok(()),
        }
    }

    /// Completes a call once, twice with the same words, or twice at once with different ones.
    async fn complete(&mut self, token: Uuid) -> Result<()> {
        let (first, second) = (self.report(token), self.report(token));
        let client = Arc::clone(&self.client);
        match self.dice.below(5) {
            0 => {
                let (one, other) =
                    tokio::try_join!(report(&client, token, &first), report(&client, token, &second))?;
                self.note(token, &first, one);
                self.note(token, &second, other);
            }
            1 => {
                for _ in 0..2 {
                    let answer = report(&client, token, &first).await?;
                    self.note(token, &first, answer);
                }
            }
            _ => {
                let answer = report(&client, token, &first).await?;
                self.note(token, &first, answer);
            }
        }
        Ok(())
    }

    /// What somebody says of a call: its words are found by the mark, which stands nowhere else.
    fn report(&mut self, token: Uuid) -> (String, Value) {
        let mark = format!("[report {token} {:016x}]", self.dice.next());
        let body = match self.dice.below(10) {
            0 | 1 => json!({"error": format!("no luck {mark}")}),
            2 => json!({"result": format!("got {mark}"), "resume": false}),
            3 => json!({"result": {"type": "json", "content": {"got": mark}}}),
            _ => json!({"result": format!("got {mark}")}),
        };
        (mark, body)
    }

    fn note(&mut self, token: Uuid, report: &(String, Value), (status, answer): (u16, Value)) {
        let verdict = match (status, answer["error"].as_str()) {
            (200 | 202, _) => Verdict::Accepted,
            (409, Some("token_already_completed")) => {
                Verdict::Completed { same: answer["same_result"] == true }
            }
            (409, Some("token_cancelled")) => Verdict::Cancelled,
            (410, Some("token_expired")) => Verdict::Expired,
            (404, Some("unknown_token")) => Verdict::Unknown,
            _ => return self.odd("a completion", status, &answer),
        };
        self.story.attempts.push(Attempt { token, mark: report.0.clone(), verdict });
    }

    /// Sends a message, maybe again and at the same time.
    async fn say(&mut self) -> Result<()> {
        let (number, index) = (self.story.number, self.story.sent.len());
        let (mark, id) = (Story::mark(number, index), Uuid::new_v4());
        let plan = self.dice.pick(&PLANS).copied().unwrap_or_default();
        let mut body = json!({"prompt": format!("{mark} {plan}"), "message_id": id});
        match self.dice.below(10) {
            0 => body["run"] = json!("none"),
            1 => body["run"] = json!("step"),
            _ => {}
        }
        let (client, path) = (Arc::clone(&self.client), self.path("/messages"));
        let send = || client.call("POST", &path, Some(&body));
        let answers = match self.dice.below(4) {
            0 => vec![send().await?, send().await?],
            1 => {
                let (one, other) = tokio::try_join!(send(), send())?;
                vec![one, other]
            }
            _ => vec![send().await?],
        };
        let mut receipts = Vec::new();
        for (status, answer) in answers {
            let receipt = &answer["receipt"];
            let named: Option<Uuid> = receipt["id"].as_str().and_then(|text| text.parse().ok());
            match (status, named, receipt["seq"].as_i64()) {
                (200 | 202, Some(named), Some(seq)) if named == id => receipts.push(seq),
                _ => self.odd("a message", status, &answer),
            }
        }
        if receipts.windows(2).any(|pair| pair[0] != pair[1]) {
            self.story.odd.push(format!("message {id} got the numbers {receipts:?}"));
        }
        if let Some(seq) = receipts.first() {
            self.story.sent.push(Sent { mark, receipt: Some((id, *seq)) });
        }
        Ok(())
    }

    async fn cancel(&mut self) -> Result<()> {
        let body = json!({"deferred": self.dice.chance(50)});
        let (status, answer) = self.client.call("POST", &self.path("/cancel"), Some(&body)).await?;
        match (status, answer["error"].as_str()) {
            (200, _) | (409, Some("no_active_run")) => {}
            _ => self.odd("a cancel", status, &answer),
        }
        if self.dice.chance(40) {
            self.resume("until_blocked").await?;
        }
        Ok(())
    }

    async fn pause(&mut self) -> Result<()> {
        let (status, answer) = self.client.call("POST", &self.path("/pause"), None).await?;
        if status != 200 {
            self.odd("a pause", status, &answer);
        }
        sleep(self.dice.up_to(self.pace)).await;
        if self.dice.chance(70) {
            self.resume("until_blocked").await?;
        }
        Ok(())
    }

    async fn resume(&mut self, mode: &str) -> Result<()> {
        let body = json!({"mode": mode});
        let (status, answer) = self.client.call("POST", &self.path("/resume"), Some(&body)).await?;
        match (status, answer["error"].as_str()) {
            (200 | 202, _) | (409, Some("run_in_progress")) => Ok(()),
            _ => {
                self.odd("a resume", status, &answer);
                Ok(())
            }
        }
    }

    async fn delete(&mut self) -> Result<()> {
        let (status, answer) = self.client.call("DELETE", &self.path(""), None).await?;
        match (status, answer["error"].as_str()) {
            // An attempt whose answer was lost may have done it.
            (200, _) | (404, Some("unknown_session")) => self.story.deleted = true,
            (409, Some("run_in_progress")) => {}
            _ => self.odd("a deletion", status, &answer),
        }
        if self.story.deleted
            && let Some(token) = self.seen.last().copied()
        {
            self.complete(token).await?;
        }
        Ok(())
    }

    /// Completes what is still open, when all that is left is to come to rest.
    ///
    /// # Errors
    /// If a request isn't answered at all.
    pub(super) async fn finish(client: &Arc<Client>, seed: u64, story: Story) -> Result<Story> {
        let dice = Dice::part(!seed, u64::try_from(story.attempts.len() * 1_000 + story.number)?);
        let mut player =
            Self { client: Arc::clone(client), dice, pace: Duration::ZERO, seen: Vec::new(), story };
        for token in player.open().await? {
            player.complete(token).await?;
        }
        Ok(player.story)
    }

    /// Lets a session go on that is held, or that nobody told to.
    ///
    /// # Errors
    /// If the request isn't answered at all.
    pub(super) async fn go_on(client: &Arc<Client>, story: Story) -> Result<Story> {
        let mut player = Self {
            client: Arc::clone(client),
            dice: Dice::new(0),
            pace: Duration::ZERO,
            seen: Vec::new(),
            story,
        };
        player.resume("until_blocked").await?;
        Ok(player.story)
    }
}

async fn report(client: &Client, token: Uuid, report: &(String, Value)) -> Result<(u16, Value)> {
    client.call("POST", &format!("/v1/continuations/{token}"), Some(&report.1)).await
}
