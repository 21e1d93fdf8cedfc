//! A worker's hand: claims, loads, decides and commits through the production functions, with the
//! model's answers given by the test.

use std::{collections::VecDeque, time::Duration};

use chrono::{DateTime, Utc};
use holdfast_engine::{
    agent::Agent,
    content::{Blob, Payload, ToolResult},
    decide::{self, Context, Mode, Next, Run, Spawn},
    ids::{CallId, MailId, SessionId},
    mail::{Envelope, MailBody, Priority, Sender, Settled},
    model::{Flavor, ModelAnswer, RequestedCall},
    session::{Event, Session, Status},
    turn::{Said, Turn, TurnBody},
};
use holdfast_store::{
    Store, StoreError,
    claim::{self, Beat, Lease, Rotation},
    commit::{self, Commit, Outcome, RunAfter},
    letters::Letter,
    load,
};
use tokio::time::Instant;
use uuid::Uuid;

use crate::{
    gates::PATIENCE,
    store::{LONG, roster, worker},
};

/// A model's answer that ends its round.
pub fn says(text: &str) -> ModelAnswer {
    ModelAnswer {
        text: Some(text.to_owned()),
        thinking: None,
        calls: Vec::new(),
        usage: None,
        flavor: Flavor::OpenAI,
        raw: None,
        stop_reason: Some("stop".to_owned()),
    }
}

/// A model's answer that asks for calls, as `(tool, arguments)`.
pub fn calls(wanted: &[(&str, &str)]) -> ModelAnswer {
    let call = |(place, (name, arguments)): (usize, &(&str, &str))| RequestedCall {
        provider_id: format!("call_{place}_{}", Uuid::now_v7().simple()),
        name: (*name).to_owned(),
        arguments: (*arguments).to_owned(),
    };
    ModelAnswer { text: None, calls: wanted.iter().enumerate().map(call).collect(), ..says("") }
}

/// Claims as a fresh worker that has these agents: expired leases first, then runs that are due.
///
/// # Panics
/// If the store refuses.
pub async fn claim(store: &Store, agents: &[String], slots: usize, ttl: Duration) -> Vec<Lease> {
    claim::claim(store, worker(), slots, ttl, agents, true, &Rotation::default()).await.expect("a claim")
}

/// Gives leases back in good order. Returns how many.
///
/// # Panics
/// If the store refuses.
pub async fn release(store: &Store, held: &[(SessionId, i64)], delay: Duration) -> u64 {
    claim::release(store, held, delay, false).await.expect("an answer")
}

/// Renews leases. Returns those that were.
///
/// # Panics
/// If the store refuses.
pub async fn renew(store: &Store, held: &[(SessionId, i64)], ttl: Duration) -> Vec<Beat> {
    let beats = claim::heartbeat(store, held, ttl).await.expect("an answer");
    beats.into_iter().filter(|beat| beat.renewed).collect()
}

/// A text as the result of a call.
pub fn result(text: &str) -> Settled {
    Settled::Completed { result: Payload::Inline(ToolResult::text(text)) }
}

/// A lease in a worker's hand.
#[derive(Debug, Clone)]
pub struct Holder {
    /// Where its commits go.
    pub store: Store,
    /// The agent.
    pub agent: Agent,
    /// The lease.
    pub lease: Lease,
    /// The session as the last step left it.
    pub session: Session,
    /// Mail that the next decision considers.
    pub inbox: Vec<Envelope>,
    /// The run.
    pub run: Run,
    /// The time that decisions are told.
    pub now: DateTime<Utc>,
    parent: Option<(SessionId, CallId)>,
    happened: Vec<Event>,
    blobs: Vec<Blob>,
    spawns: Vec<Spawn>,
    dismissed: Vec<SessionId>,
    /// When to decide again at the latest.
    pub until: Option<DateTime<Utc>>,
}

impl Holder {
    /// Claims the one run that is due and loads its session, as a worker that has `agent`.
    ///
    /// # Panics
    /// If no run is due, or the session can't be loaded.
    pub async fn claim(store: &Store, agent: &Agent, ttl: Duration) -> Self {
        // A claim steps around a row whose last holder is still rolling back; a worker looks again too.
        let mut looks = tokio::time::interval(std::time::Duration::from_millis(10));
        for _ in 0..100 {
            looks.tick().await;
            if let Some(lease) = claim(store, &roster(agent), 1, ttl).await.into_iter().next() {
                return Self::load(store, agent, lease).await;
            }
        }
        panic!("no run is due")
    }

    /// Claims every run that is due, and loads the sessions.
    ///
    /// # Panics
    /// If the store refuses.
    pub async fn claim_all(store: &Store, agent: &Agent) -> Vec<Self> {
        let leases = claim(store, &roster(agent), 1000, LONG).await;
        let mut holders = Vec::new();
        for lease in leases {
            holders.push(Self::load(store, agent, lease).await);
        }
        holders
    }

    /// Loads the session of a lease, and recovers the calls of an earlier holder.
    ///
    /// # Panics
    /// If the session can't be loaded.
    pub async fn load(store: &Store, agent: &Agent, lease: Lease) -> Self {
        let loaded = load::load(store, lease.session).await.expect("a session");
        let mut session = loaded.session;
        let happened = decide::recover(&mut session, Utc::now()).expect("a state to recover from");
        Self {
            store: store.clone(),
            agent: agent.clone(),
            run: Run { mode: loaded.mode.unwrap_or(lease.mode), steps: 0, asking: false },
            lease,
            session,
            inbox: loaded.inbox,
            now: Utc::now(),
            parent: loaded.parent,
            happened,
            blobs: Vec::new(),
            spawns: Vec::new(),
            dismissed: Vec::new(),
            until: None,
        }
    }

    /// The lease as heartbeats and releases name it.
    pub fn held(&self) -> (SessionId, i64) {
        (self.lease.session, self.lease.epoch)
    }

    /// Decides the next step.
    ///
    /// # Panics
    /// If the engine's rules are broken.
    pub fn decide(&mut self) -> Next {
        let mut context = Context {
            agent: &self.agent,
            inbox: &self.inbox,
            run: self.run,
            now: self.now,
            fresh: &mut Uuid::now_v7,
            fresh_token: &mut Uuid::new_v4,
            progress: &|_| Vec::new(),
        };
        let decision = decide::decide(&mut self.session, &mut context).expect("a legal step");
        self.inbox.clear();
        self.happened.extend(decision.events);
        self.blobs.extend(decision.blobs);
        self.spawns.extend(decision.spawns);
        self.dismissed.extend(decision.dismissed);
        self.until = decision.until;
        decision.next
    }

    /// The model answers.
    ///
    /// # Panics
    /// If nobody has asked it.
    pub fn answer(&mut self, answer: ModelAnswer) {
        let mut context = Context {
            agent: &self.agent,
            inbox: &[],
            run: self.run,
            now: self.now,
            fresh: &mut Uuid::now_v7,
            fresh_token: &mut Uuid::new_v4,
            progress: &|_| Vec::new(),
        };
        let event = decide::answered(&self.session, &mut context, answer);
        self.happen(event);
        self.run.steps += 1;
    }

    /// A call that runs here ends.
    ///
    /// # Panics
    /// If it doesn't run.
    pub fn finish(&mut self, call: CallId, settled: Settled) {
        let event = decide::finished(&self.session, call, settled, self.now);
        self.happen(event);
        if !self.session.busy() {
            self.run.steps += 1;
        }
    }

    fn happen(&mut self, event: Event) {
        self.session.apply(&event).expect("a legal event");
        self.happened.push(event);
    }

    /// The commit of what happened since the last one, which is taken for stored.
    pub fn work(&mut self, run: RunAfter) -> Commit {
        let session = self.session.clone();
        self.session.forget_told();
        Commit {
            id: Uuid::now_v7(),
            epoch: self.lease.epoch,
            agent: self.lease.agent.clone(),
            agent_revision: self.agent.revision.clone(),
            session,
            happened: std::mem::take(&mut self.happened),
            blobs: std::mem::take(&mut self.blobs),
            to_parent: self.letter_to_parent(&run),
            spawns: std::mem::take(&mut self.spawns),
            dismissed: std::mem::take(&mut self.dismissed),
            traceparent: self.lease.traceparent.clone(),
            run,
        }
    }

    fn letter_to_parent(&self, run: &RunAfter) -> Option<(SessionId, Letter)> {
        let (parent, call) = self.parent?;
        let RunAfter::End { status: Status::Idle, .. } = run else { return None };
        let text = match self.session.head().map(|turn| &turn.body) {
            Some(TurnBody::Llm(llm)) => llm.text.clone().unwrap_or_default(),
            _ => String::new(),
        };
        Some((parent, letter_from(self.session.id, call, &text)))
    }

    /// Commits what happened since the last commit. What the outcome says of mail and mode is taken
    /// over, as a worker does.
    ///
    /// # Errors
    /// As [`commit::commit`].
    ///
    /// # Panics
    /// If new mail can't be read.
    pub async fn commit(&mut self, run: RunAfter) -> Result<Outcome, StoreError> {
        let work = self.work(run);
        let outcome = send(&self.store, &work).await?;
        self.learn(outcome).await;
        Ok(outcome)
    }

    /// Takes over what an outcome says.
    ///
    /// # Panics
    /// If new mail can't be read.
    pub async fn learn(&mut self, outcome: Outcome) {
        let Outcome::Stored { version, released, wake_seq, mode } = outcome else { return };
        self.session.version = version;
        self.run.mode = mode;
        if !released && wake_seq > self.session.cursor {
            let read = load::mail_above(&self.store, self.session.id, self.session.cursor).await;
            let (mail, mode) = read.expect("mail");
            self.inbox = mail;
            self.run.mode = mode.unwrap_or(self.run.mode);
        }
    }

    /// Ends the run in `status`, which has to take place.
    ///
    /// # Panics
    /// If it doesn't.
    pub async fn end(&mut self, status: Status) {
        let outcome = self.commit(RunAfter::End { status, detail: None }).await;
        assert!(matches!(outcome, Ok(Outcome::Stored { released: true, .. })), "{outcome:?}");
    }

    /// Drives the run to its end with these answers of the model; calls that run here answer `done`.
    /// Returns the status that it ended in.
    ///
    /// # Panics
    /// If an answer is missing or left over, or the lease is lost.
    pub async fn drive_with(&mut self, answers: Vec<ModelAnswer>) -> Status {
        let mut answers = VecDeque::from(answers);
        loop {
            let run = match self.decide() {
                Next::AskModel => {
                    let answer = answers.pop_front().expect("an answer for every request");
                    self.store_step().await;
                    if self.inbox.is_empty() {
                        self.answer(answer);
                    } else {
                        answers.push_front(answer);
                    }
                    continue;
                }
                Next::RunCalls(starts) => {
                    self.store_step().await;
                    for start in starts {
                        self.finish(start.call, result("done"));
                    }
                    continue;
                }
                Next::Park(on) => RunAfter::Park { on: on.to_owned(), until: self.until },
                Next::Stop(status) => RunAfter::End { status, detail: None },
            };
            let status = match run {
                RunAfter::End { status, .. } => status,
                _ => Status::Running,
            };
            let outcome = self.commit(run).await.expect("a commit");
            match outcome {
                Outcome::Stored { released: true, .. } => {
                    assert!(answers.is_empty(), "answers are left over: {answers:?}");
                    return status;
                }
                Outcome::Stored { .. } => {}
                Outcome::LeaseLost => panic!("the lease is lost"),
            }
        }
    }

    async fn store_step(&mut self) {
        if self.happened.is_empty() {
            return;
        }
        let outcome = self.commit(RunAfter::Keep).await.expect("a commit");
        assert!(matches!(outcome, Outcome::Stored { released: false, .. }), "{outcome:?}");
    }
}

/// A result that a session sends to another one's call.
pub fn letter_from(sender: SessionId, call: CallId, text: &str) -> Letter {
    Letter {
        id: MailId(sender.0),
        from: Sender::Session { session_id: sender, agent: None },
        priority: Priority::Normal,
        hops: 0,
        body: MailBody::ToolCallFinished { tool_call_id: call, settled: result(text) },
    }
}

/// Stores a commit within [`PATIENCE`].
///
/// # Errors
/// As [`commit::commit`].
pub async fn send(store: &Store, work: &Commit) -> Result<Outcome, StoreError> {
    commit::commit(store, work, Instant::now() + PATIENCE).await
}

/// How often the results of calls were told late, in turns from `from` on.
pub fn told_late(turns: &[std::sync::Arc<Turn>], from: i64) -> usize {
    let said = turns.iter().filter(|turn| turn.position >= from).flat_map(|turn| match &turn.body {
        TurnBody::User(user) => user.said.as_slice(),
        TurnBody::Llm(_) => &[],
    });
    said.filter(|said| matches!(said, Said::Late { .. })).count()
}

/// The texts that people said, in order.
pub fn queries(session: &Session) -> Vec<String> {
    let said = session.turns.iter().flat_map(|turn| match &turn.body {
        TurnBody::User(user) => user.said.as_slice(),
        TurnBody::Llm(_) => &[],
    });
    said.filter_map(|said| match said {
        Said::Query(Payload::Inline(query)) => Some(query.text.clone()),
        _ => None,
    })
    .collect()
}

/// How far a fold goes.
pub const FOLD: Mode = Mode::None;
