//! One lease, driven: load, decide, effect, decide, commit, until the run has ended.

use std::{collections::HashSet, sync::Arc};

use chrono::Utc;
use holdfast_engine::{
    agent::Agent,
    content::{Blob, Digest},
    decide::{self, Context, Decision, Mode, Next, Run, Start},
    ids::{CallId, MailId},
    mail::{Control, Envelope, MailBody, Priority, Sender, Settled},
    model::ModelAnswer,
    session::{CallState, Event, Hold, Illegal, Session, Status},
    turn::{Turn, TurnBody},
};
use holdfast_store::{
    StoreError,
    commit::{Commit, Outcome, RunAfter},
    letters::Letter,
    load::{self, Loaded},
    plant::{self, Mistake},
};
use tokio::time::{Duration, Instant};
use tracing::Instrument;
use uuid::Uuid;

use crate::{
    MAX_TAKEOVERS, Shared,
    calls::{Ended, Running, Scope},
    held::Slot,
    metrics,
    request::{self, Fetched, Unanswered},
    roster::Member,
};

/// How long a load is tried again while the database is away.
const LOAD_PAUSE: Duration = Duration::from_millis(200);

/// Why a run isn't driven on here.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Gone {
    /// Somebody else holds it, or its time is over.
    #[error("the lease is gone")]
    LeaseLost,
    /// This worker is leaving; the lease goes back.
    #[error("the worker is leaving")]
    Leaving,
    /// The session was deleted.
    #[error("the session is deleted")]
    Deleted,
    /// A run that ends its workers time and again is ended before it ends another one.
    #[error("{0} workers died over this run")]
    Poison(i32),
    /// The store can't say what the run needs.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A fault of the engine's rules: the run can't be driven from this state.
    #[error("illegal: {0}")]
    Illegal(#[from] Illegal),
}

/// A run as its task holds it.
struct Driver<'a> {
    shared: &'a Arc<Shared>,
    slot: &'a Slot,
    member: &'a Member,
    agent: Arc<Agent>,
    owner: String,
    parent: Option<(holdfast_engine::ids::SessionId, CallId)>,
    session: Session,
    inbox: Vec<Envelope>,
    run: Run,
    /// The status before this run, kept by runs that only fold mail.
    before: Status,
    happened: Vec<Event>,
    blobs: Vec<Blob>,
    /// Blobs that this run has stored: the prompt and the tools stand in every user turn.
    stored: HashSet<Digest>,
    running: Running,
    fetched: Fetched,
}

pub(crate) async fn drive(shared: &Arc<Shared>, slot: &Slot) -> Result<Status, Gone> {
    if shared.draining.is_cancelled() {
        return Err(Gone::Leaving);
    }
    if slot.lease.takeovers >= MAX_TAKEOVERS {
        return Err(Gone::Poison(slot.lease.takeovers));
    }
    let Some(member) = shared.roster.of(&slot.lease) else { return Err(Gone::Leaving) };
    let began = Instant::now();
    let loaded = load_session(shared, slot).instrument(tracing::info_span!("load")).await?;
    metrics::loaded(began.elapsed());
    let Loaded { session, owner, parent, inbox, mode, .. } = loaded;
    let before = session.status;
    let run = Run { mode: mode.unwrap_or(slot.lease.mode), steps: 0 };
    let mut driver = Driver {
        shared,
        slot,
        member,
        agent: member.agent(),
        owner,
        parent,
        session,
        inbox,
        run,
        before,
        happened: Vec::new(),
        blobs: Vec::new(),
        stored: HashSet::new(),
        running: Running::default(),
        fetched: Fetched::default(),
    };
    driver.happened = decide::recover(&mut driver.session, Utc::now())?;
    driver.go().await
}

async fn load_session(shared: &Shared, slot: &Slot) -> Result<Loaded, Gone> {
    loop {
        shared.store.at("load.before").await;
        match shared.loader.load(slot.lease.session).await {
            Ok(loaded) => {
                shared.store.at("load.done").await;
                return Ok(loaded);
            }
            Err(StoreError::UnknownSession) => return Err(Gone::Deleted),
            Err(error) if error.is_unavailable() => {
                if !slot.stands() {
                    return Err(Gone::LeaseLost);
                }
                tokio::time::sleep(LOAD_PAUSE).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

impl Driver<'_> {
    async fn go(&mut self) -> Result<Status, Gone> {
        loop {
            self.agent = self.member.agent();
            if self.shared.draining.is_cancelled() {
                if self.running.is_empty() {
                    return self.leave().await;
                }
                // What runs comes home; nothing else begins.
                Arc::make_mut(&mut self.agent).max_concurrency = 0;
            }
            let next = self.decide()?;
            self.shared.store.at("decide.done").await;
            let session = &self.session;
            self.running
                .keep(|call| session.call(call).is_some_and(|call| call.state == CallState::Running))
                .await;
            let ended = match next {
                Next::Stop(status) => {
                    let (status, detail) = self.verdict(status);
                    self.store(RunAfter::End { status, detail }).await?.then_some(status)
                }
                Next::Await(wait) => {
                    let park = RunAfter::Park { on: format!("{wait:?}"), until: None };
                    self.store(park).await?.then_some(Status::Running)
                }
                Next::AskModel => self.ask().await?,
                Next::RunCalls(starts) => {
                    self.run_calls(starts).await?;
                    None
                }
            };
            if let Some(status) = ended {
                return Ok(status);
            }
        }
    }

    /// Stores what happened, if anything did; the run goes on.
    async fn keep(&mut self) -> Result<(), Gone> {
        if !self.happened.is_empty() {
            self.store(RunAfter::Keep).await?;
        }
        Ok(())
    }

    /// Stores what happened and goes.
    async fn leave(&mut self) -> Result<Status, Gone> {
        self.keep().await?;
        Err(Gone::Leaving)
    }

    fn decide(&mut self) -> Result<Next, Gone> {
        let mut context = Context {
            agent: &self.agent,
            inbox: &self.inbox,
            run: self.run,
            now: Utc::now(),
            fresh: &mut Uuid::now_v7,
            fresh_token: &mut Uuid::new_v4,
        };
        let Decision { events, blobs, next } = decide::decide(&mut self.session, &mut context)?;
        self.inbox.clear();
        self.happened.extend(events);
        for blob in blobs {
            let known = self.stored.contains(&blob.digest);
            if !known && !self.blobs.iter().any(|other| other.digest == blob.digest) {
                self.blobs.push(blob);
            }
        }
        Ok(next)
    }

    /// A run that only folded mail leaves a failed session failed: nothing has been tried since.
    fn verdict(&self, implied: Status) -> (Status, Option<String>) {
        let only_folded = self.run.mode == Mode::None && self.before == Status::Failed;
        if only_folded && self.session.hold != Hold::Paused {
            return (Status::Failed, None);
        }
        (implied, None)
    }

    /// Stores what happened since the last commit. Returns whether the run is released.
    async fn store(&mut self, run: RunAfter) -> Result<bool, Gone> {
        let to_parent = self.letter_to_parent(&run);
        let work = Commit {
            id: Uuid::now_v7(),
            epoch: self.slot.lease.epoch,
            agent: self.slot.lease.agent.clone(),
            agent_revision: self.agent.revision.clone(),
            session: self.session.at_head(),
            happened: std::mem::take(&mut self.happened),
            blobs: std::mem::take(&mut self.blobs),
            run,
            to_parent,
        };
        let began = Instant::now();
        self.shared.store.at("commit.before").await;
        let span = tracing::info_span!("commit");
        let brought: Vec<Digest> = work.blobs.iter().map(|blob| blob.digest).collect();
        let keeps = work.run == RunAfter::Keep;
        self.slot.releasing(!keeps);
        let outcome = self.shared.committer.commit(work, self.slot.until()).instrument(span).await;
        metrics::committed(began.elapsed());
        match outcome {
            Ok(Outcome::Stored { released: true, .. }) if keeps => Err(Gone::LeaseLost),
            Ok(Outcome::Stored { version, released, wake_seq, mode }) => {
                self.slot.releasing(released);
                self.stored.extend(brought);
                self.session.version = version;
                self.run.mode = mode;
                if !released && wake_seq > self.session.cursor {
                    self.fetch_mail().await?;
                }
                Ok(released)
            }
            Ok(Outcome::LeaseLost) => Err(Gone::LeaseLost),
            // Whether the step is stored is for the next holder to see; the lease, if it stands, goes back.
            Err(error) if error.is_unavailable() && self.slot.stands() => Err(Gone::Leaving),
            Err(error) if error.is_unavailable() => Err(Gone::LeaseLost),
            Err(error) => Err(error.into()),
        }
    }

    async fn fetch_mail(&mut self) -> Result<(), Gone> {
        loop {
            match load::mail_above(&self.shared.store, self.session.id, self.session.cursor).await {
                Ok((mail, mode)) => {
                    self.inbox = mail;
                    self.run.mode = mode.unwrap_or(self.run.mode);
                    return Ok(());
                }
                Err(error) if error.is_unavailable() && self.slot.stands() => {
                    tokio::time::sleep(LOAD_PAUSE).await;
                }
                Err(error) if error.is_unavailable() => return Err(Gone::LeaseLost),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Before an effect: what led to it is stored, the lease stands, and nobody wants to leave.
    async fn ready(&mut self) -> Result<(), Gone> {
        self.keep().await?;
        if self.shared.draining.is_cancelled() {
            return Err(Gone::Leaving);
        }
        if self.slot.stands() { Ok(()) } else { Err(Gone::LeaseLost) }
    }

    async fn ask(&mut self) -> Result<Option<Status>, Gone> {
        self.ready().await?;
        if !self.inbox.is_empty() {
            // Mail came with the commit: it is considered first, and may be an order to stop.
            return Ok(None);
        }
        let mut known = self.session.cursor;
        let answer = {
            let asking =
                request::ask(self.shared, &self.owner, &self.agent, &self.session, &mut self.fetched);
            tokio::pin!(asking);
            loop {
                tokio::select! {
                    answer = &mut asking => break Some(answer),
                    () = self.shared.ending.cancelled() => return Err(Gone::Leaving),
                    // While the database is away the request goes on.
                    (mail, mode) = news(self.shared, self.slot, &self.session, known) => {
                        known = mail.last().map_or(known, |letter| letter.seq).max(self.slot.standing.borrow().wake_seq);
                        if mail.iter().any(stops) {
                            self.inbox = mail;
                            self.run.mode = mode.unwrap_or(self.run.mode);
                            break None;
                        }
                    }
                }
            }
        };
        match answer {
            None => Ok(None),
            Some(Ok(answer)) => {
                let event = self.answered(answer);
                self.happen(event)?;
                self.run.steps += 1;
                if self.slot.standing.borrow().wake_seq > self.session.cursor {
                    self.fetch_mail().await?;
                }
                Ok(None)
            }
            Some(Err(Unanswered::Store(error))) if error.is_unavailable() => {
                tokio::time::sleep(LOAD_PAUSE).await;
                Ok(None)
            }
            Some(Err(Unanswered::Store(error))) => Err(error.into()),
            Some(Err(Unanswered::Failed(detail))) => {
                tracing::warn!(kind = "run.failed", session_id = %self.session.id, detail, "the model gave no answer");
                let status = Status::Failed;
                Ok(self.store(RunAfter::End { status, detail: Some(detail) }).await?.then_some(status))
            }
        }
    }

    fn answered(&self, answer: ModelAnswer) -> Event {
        let mut context = Context {
            agent: &self.agent,
            inbox: &[],
            run: self.run,
            now: Utc::now(),
            fresh: &mut Uuid::now_v7,
            fresh_token: &mut Uuid::new_v4,
        };
        decide::answered(&self.session, &mut context, answer)
    }

    async fn run_calls(&mut self, starts: Vec<Start>) -> Result<(), Gone> {
        self.ready_for(&starts).await?;
        if !self.inbox.is_empty() && starts.is_empty() {
            return Ok(());
        }
        let scope = Scope {
            store: self.shared.store.clone(),
            session: self.session.id,
            slug: self.agent.slug.clone(),
            revision: self.agent.revision.clone(),
            toolbox: Arc::clone(&self.member.toolbox),
            traceparent: self.slot.lease.traceparent.clone(),
            session_json: self.session_json(),
        };
        for start in starts {
            self.running.start(&scope, start);
        }
        if !self.inbox.is_empty() {
            return Ok(());
        }
        let ended = tokio::select! {
            ended = self.running.next() => ended,
            () = self.shared.ending.cancelled() => {
                self.running.keep(|_| false).await;
                return Err(Gone::Leaving);
            }
            (mail, mode) = news(self.shared, self.slot, &self.session, self.session.cursor) => {
                self.inbox = mail;
                self.run.mode = mode.unwrap_or(self.run.mode);
                return Ok(());
            }
        };
        self.shared.store.at("tools.done").await;
        for Ended { call, settled, blob } in ended {
            // An order may have ended it meanwhile.
            if self.session.call(call).is_none_or(|call| call.state != CallState::Running) {
                continue;
            }
            let event = decide::finished(&self.session, call, settled, Utc::now());
            self.happen(event)?;
            self.blobs.extend(blob);
        }
        if !self.session.busy() {
            self.run.steps += 1;
        }
        Ok(())
    }

    /// Calls that are recorded as running but can't begin, because the worker leaves, were stored
    /// before anything was started: whoever claims the run next recovers them.
    async fn ready_for(&mut self, starts: &[Start]) -> Result<(), Gone> {
        if starts.is_empty() || !plant::made(Mistake::EffectBeforeCommit) {
            self.keep().await?;
        }
        if !starts.is_empty() {
            self.shared.store.at("tools.before").await;
        }
        if self.slot.stands() { Ok(()) } else { Err(Gone::LeaseLost) }
    }

    fn happen(&mut self, event: Event) -> Result<(), Gone> {
        self.session.apply(&event)?;
        self.happened.push(event);
        Ok(())
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

    /// What tells the parent that this session, its child, has ended.
    fn letter_to_parent(&self, run: &RunAfter) -> Option<(holdfast_engine::ids::SessionId, Letter)> {
        let (parent, call) = self.parent?;
        let settled = match run {
            RunAfter::End { status: Status::Idle, .. } => {
                let text = match self.session.head() {
                    Some(Turn { body: TurnBody::Llm(llm), .. }) => llm.text.clone().unwrap_or_default(),
                    _ => String::new(),
                };
                let result = holdfast_engine::content::ToolResult::text(text);
                Settled::Completed { result: holdfast_engine::content::Payload::Inline(result) }
            }
            RunAfter::End { status: Status::Failed, detail } => {
                Settled::Failed { message: detail.clone().unwrap_or_default() }
            }
            _ => return None,
        };
        let letter = Letter {
            id: MailId(self.session.id.0),
            from: Sender::Session { session_id: self.session.id, agent: Some(self.agent.slug.clone()) },
            priority: Priority::Normal,
            hops: 0,
            body: MailBody::ToolCallFinished { tool_call_id: call, settled },
        };
        Some((parent, letter))
    }
}

/// Waits for mail above `known` that wakes the run, and fetches all that hasn't been considered. Dropping
/// it loses nothing, so an effect under way is polled beside it.
async fn news(shared: &Shared, slot: &Slot, session: &Session, known: i64) -> (Vec<Envelope>, Option<Mode>) {
    slot.woken(known).await;
    loop {
        match load::mail_above(&shared.store, session.id, session.cursor).await {
            Ok(news) => return news,
            Err(_) => tokio::time::sleep(LOAD_PAUSE).await,
        }
    }
}

fn stops(letter: &Envelope) -> bool {
    matches!(letter.body, MailBody::Control { message: Control::StopRun })
}
