//! Effects of a run: the model is asked and calls run, side by side, until something is to be decided.

use std::sync::Arc;

use futures::FutureExt;
use holdfast_engine::{
    content::Blob,
    decide::{self, Context, Mode, Start},
    ids::CallId,
    mail::{Envelope, Settled},
    model::ModelAnswer,
    session::{CallState, Event, Session, Status},
};
use holdfast_store::{
    plant::{self, Mistake},
    progress::{Entry, News},
};
use tokio::time::{Duration, Instant};
use tracing::Instrument;
use uuid::Uuid;

use super::{Asking, Driver, Gone, LOAD_PAUSE};
use crate::{
    Shared,
    calls::{Ended, How, Scope},
    held::Slot,
    request::{self, Unanswered},
    wrap::HookFailed,
};

/// How soon, from the first of them on, calls that only read have to end for one commit to store them with the answer
/// that asked for them. So much later at the most others see the answer, and so much of it a crash costs.
const READ_TOGETHER: Duration = Duration::from_millis(5);

impl Driver<'_> {
    /// Begins to ask the model, unless it is being asked, and waits.
    pub(super) async fn ask(&mut self) -> Result<Option<Status>, Gone> {
        self.keep().await?;
        if self.asking.is_none() {
            if self.shared.draining.is_cancelled() && self.running.is_empty() {
                return Err(Gone::Leaving);
            }
            if !self.slot.stands() {
                return Err(Gone::LeaseLost);
            }
            // Mail that came with the commit is considered first: it may be an order to stop.
            if !self.inbox.is_empty() {
                return Ok(None);
            }
            if !self.shared.draining.is_cancelled() {
                match self.begin_to_ask().await {
                    Ok(()) => {}
                    Err(Gone::Store(error)) if error.is_unavailable() => {
                        tokio::time::sleep(LOAD_PAUSE).await;
                        return Ok(None);
                    }
                    Err(gone) => return Err(gone),
                }
            }
        }
        self.wait().await
    }

    async fn begin_to_ask(&mut self) -> Result<(), Gone> {
        let (shared, agent, session) = (self.shared, &self.agent, &self.session);
        let request = request::build(shared, &self.owner, agent, session, &mut self.fetched).await?;
        let length = session.length();
        let asking = request::ask(Arc::clone(shared), Arc::clone(agent), session.id, length + 1, request);
        self.asking = Some(Asking { length, answer: asking.in_current_span().boxed() });
        Ok(())
    }

    /// The ends of calls that only read and end so soon that one commit stores them with the answer that asked for
    /// them.
    async fn ends_at_once(&mut self) -> Option<Vec<Ended>> {
        let until = self.reads_until?;
        // Mail is looked at with the commit.
        if self.running.is_empty() || !self.inbox.is_empty() {
            return None;
        }
        let woken = self.slot.woken(self.session.cursor);
        tokio::select! {
            biased;
            ended = self.running.next() => Some(ended),
            () = woken => None,
            () = tokio::time::sleep_until(until) => None,
        }
    }

    /// Whether there is mail that wakes the run and hasn't been considered.
    fn has_mail(&self) -> bool {
        self.slot.standing.borrow().wake_seq > self.session.cursor
    }

    /// Waits until something happens: an answer, the end of a call, mail, or the time to decide again.
    pub(super) async fn wait(&mut self) -> Result<Option<Status>, Gone> {
        if let Some(ended) = self.ends_at_once().await {
            self.take_ends(ended).await?;
            return Ok(None);
        }
        if self.running.is_empty() || !plant::made(Mistake::EffectBeforeCommit) {
            self.keep().await?;
        }
        if !self.inbox.is_empty() {
            return Ok(None);
        }
        if !self.slot.stands() {
            return Err(Gone::LeaseLost);
        }
        let until = self.until;
        let answered = async {
            match &mut self.asking {
                Some(asking) => (&mut asking.answer).await,
                None => std::future::pending().await,
            }
        };
        let ended = async {
            if self.running.is_empty() { std::future::pending().await } else { self.running.next().await }
        };
        tokio::select! {
            answer = answered => {
                self.asking = None;
                self.take_answer(answer).await?;
                Ok(None)
            }
            ended = ended => {
                self.take_ends(ended).await?;
                Ok(None)
            }
            () = self.shared.ending.cancelled() => {
                self.asking = None;
                self.running.keep(|_| false).await;
                Err(Gone::Leaving)
            }
            // While the database is away effects go on.
            (mail, mode) = news(self.shared, self.slot, &self.session, self.session.cursor) => {
                self.take_mail(mail, mode);
                Ok(None)
            }
            () = self.clock.sleep_until(until) => Ok(None),
        }
    }

    async fn take_answer(&mut self, answer: Result<ModelAnswer, Unanswered>) -> Result<(), Gone> {
        match answer {
            Ok(answer) => {
                let event = self.answered(answer);
                self.happen(event)?;
                self.run.steps += 1;
                if self.has_mail() {
                    self.fetch_mail().await?;
                }
                Ok(())
            }
            Err(Unanswered(detail)) => {
                tracing::warn!(kind = "run.failed", session_id = %self.session.id, detail, "the model gave no answer");
                self.unanswered = Some(detail);
                Ok(())
            }
        }
    }

    fn answered(&self, answer: ModelAnswer) -> Event {
        let mut context = Context {
            agent: &self.agent,
            inbox: &[],
            run: self.run,
            now: self.clock.now(),
            fresh: &mut Uuid::now_v7,
            fresh_token: &mut Uuid::new_v4,
            progress: &|_| Vec::new(),
        };
        decide::answered(&self.session, &mut context, answer)
    }

    /// Begins calls, once it is stored that they begin. Those that only read needn't wait for that: if it is never
    /// stored, they and the answer that asked for them have left nothing behind.
    pub(super) async fn begin(&mut self, starts: Vec<Start>) -> Result<(), Gone> {
        if !self.begins_unstored(&starts) && !plant::made(Mistake::EffectBeforeCommit) {
            self.keep().await?;
        }
        self.shared.store.at("tools.before").await;
        // Calls that are recorded as running but can't begin, because the worker leaves, were stored before anything
        // was started: whoever claims the run next recovers them.
        if !self.slot.stands() {
            return Err(Gone::LeaseLost);
        }
        let scope = Arc::new(Scope {
            shared: Arc::clone(self.shared),
            owner: self.owner.clone(),
            session: self.session.id,
            epoch: self.slot.lease.epoch,
            agent: Arc::clone(&self.agent),
            toolbox: Arc::clone(&self.member.toolbox),
            traceparent: self.slot.lease.traceparent.clone(),
            session_json: self.session_json(),
            dir: self.member.dir.clone(),
        });
        for start in starts {
            self.running.start(&scope, start, &self.session);
        }
        Ok(())
    }

    async fn take_ends(&mut self, ended: Vec<Ended>) -> Result<(), Gone> {
        self.shared.store.at("tools.done").await;
        for Ended { call, how, hooks } in ended {
            self.hooks_failed(call, &hooks);
            // An order may have ended it meanwhile.
            if self.session.call(call).is_none_or(|call| call.state != CallState::Running) {
                continue;
            }
            let (event, blob) = self.end_of(call, how);
            self.happen(event)?;
            self.blobs.extend(blob);
            // There is something new to tell: the model is asked again.
            self.unanswered = None;
        }
        if !self.session.busy() {
            self.run.steps += 1;
        }
        Ok(())
    }

    /// The event that the end of a call makes, with the blob of a large result.
    fn end_of(&self, call: CallId, how: How) -> (Event, Option<Blob>) {
        let at = self.clock.now();
        match how {
            How::Settled(settled, blob) => (decide::finished(&self.session, call, settled, at), blob),
            // Past `finished`, which may grant another attempt.
            How::Refused(message) => {
                (Event::Finished { call, settled: Settled::Failed { message }, at }, None)
            }
            How::Defer { reason } => {
                (decide::deferred(&self.agent, &self.session, call, reason, at, &mut Uuid::new_v4), None)
            }
        }
    }

    /// Says which hooks of a call gave no usable answer.
    fn hooks_failed(&mut self, call: CallId, hooks: &[HookFailed]) {
        for HookFailed { hook, when, reason } in hooks {
            tracing::warn!(kind = "hook.failed", session_id = %self.session.id, tool_call_id = %call, hook, when, reason);
            let entry = Entry {
                session: self.session.id,
                epoch: self.slot.lease.epoch,
                call,
                tool: self.session.call(call).map(|call| call.name.clone()).unwrap_or_default(),
                news: News::HookFailed { hook: hook.clone(), when, reason: reason.clone() },
            };
            self.shared.teller.tell(entry);
        }
    }

    /// Whether calls begin before it is stored that they do. If so, it isn't for a while.
    fn begins_unstored(&mut self, starts: &[Start]) -> bool {
        if !decide::may_begin_unstored(starts, &self.happened) || self.has_mail() {
            return false;
        }
        let now = Instant::now();
        let until = *self.reads_until.get_or_insert(now + READ_TOGETHER);
        if now < until {
            self.running.unstored();
        }
        now < until
    }

    /// The whole session for `AGENT_SESSION_JSON`, where the agent asks for it.
    fn session_json(&self) -> Option<String> {
        self.agent.session_json.then(|| {
            let turns: Vec<serde_json::Value> = self
                .session
                .turns
                .iter()
                .rev()
                .map(|turn| {
                    let contents = turn.body.to_json().ok().and_then(|text| serde_json::from_str(&text).ok());
                    let contents: serde_json::Value = contents.unwrap_or_default();
                    serde_json::json!({"id": turn.id, "tag": turn.body.tag(), "contents": contents, "at": turn.at})
                })
                .collect();
            serde_json::json!({"sessionId": self.session.id, "sessionVersion": 2, "turns": turns}).to_string()
        })
    }
}

/// Waits for mail above `known` that wakes the run, and fetches all that hasn't been considered. Dropping
/// it loses nothing, so an effect under way is polled beside it.
async fn news(shared: &Shared, slot: &Slot, session: &Session, known: i64) -> (Vec<Envelope>, Option<Mode>) {
    slot.woken(known).await;
    loop {
        match shared.loader.mail_above(session.id, session.cursor).await {
            Ok(news) => return news,
            Err(_) => tokio::time::sleep(LOAD_PAUSE).await,
        }
    }
}
