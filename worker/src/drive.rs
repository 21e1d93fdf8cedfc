//! One lease, driven: load, decide, effect, decide, commit, until the run has ended.

mod effects;

use std::{collections::HashSet, sync::Arc};

use chrono::{DateTime, Utc};
use futures::future::BoxFuture;
use holdfast_engine::{
    agent::Agent,
    content::{Blob, Digest, Payload, ToolResult},
    decide::{self, Context, Mode, Next, Run, Spawn},
    ids::{CallId, SessionId},
    mail::{Control, Envelope, MailBody, Settled},
    model::ModelAnswer,
    session::{CallState, Event, Hold, Illegal, Session, Status},
    turn::{Turn, TurnBody},
};
use holdfast_store::{
    StoreError,
    claim::Arriving,
    commit::{Commit, Outcome, RunAfter, end_of_child},
    letters::Letter,
    load::Loaded,
};
use tokio::time::{Duration, Instant};
use tracing::{Instrument, Span};
use uuid::Uuid;

use crate::{
    MAX_TAKEOVERS, Shared,
    calls::Running,
    clock::Clock,
    held::Slot,
    metrics,
    request::{Fetched, Unanswered},
    roster::Member,
    trace,
};

/// How long a load is tried again while the database is away.
const LOAD_PAUSE: Duration = Duration::from_millis(200);

/// Orders to go on that found nothing to lift and may wait to be stored with the next step.
const MAX_IDLE_ORDERS: usize = 32;

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

/// A model request under way.
struct Asking {
    /// How long the session was when it was sent.
    length: i64,
    answer: BoxFuture<'static, Result<ModelAnswer, Unanswered>>,
}

/// A run as its task holds it.
struct Driver<'a> {
    shared: &'a Arc<Shared>,
    slot: &'a Slot,
    member: &'a Member,
    agent: Arc<Agent>,
    owner: String,
    parent: Option<(SessionId, CallId)>,
    session: Session,
    inbox: Vec<Envelope>,
    run: Run,
    /// The status before this run, kept by runs that only fold mail.
    before: Status,
    happened: Vec<Event>,
    blobs: Vec<Blob>,
    spawns: Vec<Spawn>,
    dismissed: Vec<SessionId>,
    /// How far the store knows that mail has been considered.
    cursor_kept: i64,
    /// Orders to go on, above that, that found nothing to lift.
    idle_orders: usize,
    /// Blobs that this run has stored: the prompt and the tools stand in every user turn.
    stored: HashSet<Digest>,
    running: Running,
    asking: Option<Asking>,
    /// Why the model gave no answer: the run ends, unless something that runs beside it comes home first, or mail
    /// comes, of which the model is to be told.
    unanswered: Option<String>,
    /// When to decide again at the latest.
    until: Option<DateTime<Utc>>,
    /// Until when what has happened needn't be stored, because calls that only read run and may end at once. It counts
    /// from the first of them; the next commit ends it.
    reads_until: Option<Instant>,
    clock: Clock,
    fetched: Fetched,
}

/// Drives a run; `arriving` is its session, if that was read along with the claim.
pub(crate) async fn drive(
    shared: &Arc<Shared>,
    slot: &Slot,
    arriving: Option<Arriving>,
) -> Result<Status, Gone> {
    if shared.draining.is_cancelled() {
        return Err(Gone::Leaving);
    }
    if slot.lease.takeovers >= MAX_TAKEOVERS {
        return Err(Gone::Poison(slot.lease.takeovers));
    }
    let Some(member) = shared.roster.of(&slot.lease) else { return Err(Gone::Leaving) };
    let began = Instant::now();
    let loaded = load_session(shared, slot, arriving).instrument(tracing::info_span!("load")).await?;
    metrics::loaded(began.elapsed());
    let Loaded { session, owner, parent, inbox, mode, read_at, .. } = loaded;
    let clock = Clock::by(read_at);
    let before = session.status;
    let cursor_kept = session.cursor;
    let run = Run { mode: mode.unwrap_or(slot.lease.mode), steps: 0, asking: false };
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
        spawns: Vec::new(),
        dismissed: Vec::new(),
        cursor_kept,
        idle_orders: 0,
        stored: HashSet::new(),
        running: Running::default(),
        asking: None,
        unanswered: None,
        until: None,
        reads_until: None,
        clock,
        fetched: Fetched::default(),
    };
    driver.happened = decide::recover(&mut driver.session, clock.now())?;
    driver.go().await
}

async fn load_session(shared: &Shared, slot: &Slot, arriving: Option<Arriving>) -> Result<Loaded, Gone> {
    if let Some(arriving) = arriving {
        shared.store.at("load.before").await;
        if let Ok(loaded) = arriving.await {
            shared.store.at("load.done").await;
            return Ok(loaded);
        }
    }
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
                if self.idle() && self.unanswered.is_none() {
                    return self.leave().await;
                }
                // What runs comes home; nothing else begins.
                Arc::make_mut(&mut self.agent).max_concurrency = 0;
            }
            let next = self.decide()?;
            self.shared.store.at("decide.done").await;
            self.end_unwanted().await;
            let ended = match next {
                Next::Stop(status) => {
                    let (status, detail) = self.verdict(status);
                    self.store(RunAfter::End { status, detail }).await?.then_some(status)
                }
                Next::Park(on) => {
                    let park = RunAfter::Park { on: on.to_owned(), until: self.until };
                    self.store(park).await?.then_some(Status::Running)
                }
                Next::AskModel => self.ask().await?,
                // Only where nothing may begin: this one leaves.
                Next::RunCalls(starts) if starts.is_empty() && self.idle() => None,
                Next::RunCalls(starts) if starts.is_empty() => self.wait().await?,
                Next::RunCalls(starts) => {
                    self.begin(starts).await?;
                    None
                }
            };
            if let Some(status) = ended {
                return Ok(status);
            }
        }
    }

    /// Whether nothing is under way here.
    fn idle(&self) -> bool {
        self.running.is_empty() && self.asking.is_none()
    }

    /// Ends effects whose outcome nobody waits for any more.
    async fn end_unwanted(&mut self) {
        let session = &self.session;
        let wanted = |asking: &Asking| asking.length == session.length() && session.wants_answer();
        self.asking = self.asking.take().filter(wanted);
        self.running
            .keep(|call| session.call(call).is_some_and(|call| call.state == CallState::Running))
            .await;
    }

    /// Stores what happened, if anything did; the run goes on.
    ///
    /// That letters were read and wait is nothing, and so is an order to go on where nothing stands in the way, which
    /// comes along with a person's message: the next step says so too, and whoever holds the run before that reads them
    /// again and finds the same. So those who write to a busy session don't wait for its worker. Orders that are many
    /// are stored all the same: as long as they aren't, they take places that an order to stop may need.
    async fn keep(&mut self) -> Result<(), Gone> {
        if self.only_set_aside() {
            self.happened.clear();
        }
        if !self.happened.is_empty() {
            self.store(RunAfter::Keep).await?;
        }
        Ok(())
    }

    /// Whether nothing happened but that mail was read, and all of it waits or says to go on. Another letter that is
    /// done with is something: it takes nobody's place in the mailbox any more.
    fn only_set_aside(&self) -> bool {
        let session = &self.session;
        let waiting = session.left.iter().filter(|letter| letter.seq > self.cursor_kept).count();
        let read = usize::try_from(session.cursor - self.cursor_kept).unwrap_or(usize::MAX);
        self.idle_orders <= MAX_IDLE_ORDERS
            && waiting + self.idle_orders == read
            && self.happened.iter().all(|event| matches!(event, Event::Folded { .. }))
    }

    /// Stores what happened and goes.
    async fn leave(&mut self) -> Result<Status, Gone> {
        self.keep().await?;
        Err(Gone::Leaving)
    }

    fn decide(&mut self) -> Result<Next, Gone> {
        let inbox = std::mem::take(&mut self.inbox);
        // One that lifts something is an event as well.
        let go_on = MailBody::Control { message: Control::Resume };
        let orders = inbox.iter().filter(|letter| letter.seq > self.session.cursor && letter.body == go_on);
        self.idle_orders += orders.count();
        let mode = if self.unanswered.is_some() { Mode::None } else { self.run.mode };
        let run = Run { mode, asking: self.asking.is_some(), ..self.run };
        let progress = |call| self.running.progress(call);
        let mut context = Context {
            agent: &self.agent,
            inbox: &inbox,
            run,
            now: self.clock.now(),
            fresh: &mut Uuid::now_v7,
            fresh_token: &mut Uuid::new_v4,
            progress: &progress,
        };
        let decided = decide::decide(&mut self.session, &mut context)?;
        self.happened.extend(decided.events);
        for blob in decided.blobs {
            let known = self.stored.contains(&blob.digest);
            if !known && !self.blobs.iter().any(|other| other.digest == blob.digest) {
                self.blobs.push(blob);
            }
        }
        self.spawns.extend(decided.spawns);
        for child in decided.dismissed {
            // A child that was never started needn't be told to stop.
            let there = self.spawns.len();
            self.spawns.retain(|new| new.id != child);
            if self.spawns.len() == there {
                self.dismissed.push(child);
            }
        }
        self.until = decided.until;
        Ok(decided.next)
    }

    /// A run that only folded mail leaves a failed session failed: nothing has been tried since.
    fn verdict(&self, implied: Status) -> (Status, Option<String>) {
        if self.unanswered.is_some() {
            return (Status::Failed, self.unanswered.clone());
        }
        let only_folded = self.run.mode == Mode::None && self.before == Status::Failed;
        if only_folded && self.session.hold != Hold::Paused {
            return (Status::Failed, None);
        }
        (implied, None)
    }

    fn traceparent(&self) -> Option<String> {
        trace::traceparent(&Span::current()).or_else(|| self.slot.lease.traceparent.clone())
    }

    /// Stores what happened since the last commit. Returns whether the run is released.
    async fn store(&mut self, run: RunAfter) -> Result<bool, Gone> {
        let to_parent = self.letter_to_parent(&run);
        if let Some((_, _, blob)) = &to_parent {
            self.blobs.extend(blob.clone());
        }
        let reaches_others = to_parent.is_some() || !(self.spawns.is_empty() && self.dismissed.is_empty());
        let work = Commit {
            id: Uuid::now_v7(),
            epoch: self.slot.lease.epoch,
            agent: self.slot.lease.agent.clone(),
            agent_revision: self.agent.revision.clone(),
            session: self.session.at_head(),
            happened: std::mem::take(&mut self.happened),
            blobs: std::mem::take(&mut self.blobs),
            run,
            to_parent: to_parent.map(|(parent, letter, _)| (parent, letter)),
            spawns: std::mem::take(&mut self.spawns),
            dismissed: std::mem::take(&mut self.dismissed),
            traceparent: if reaches_others { self.traceparent() } else { None },
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
                self.session.forget_told();
                self.running.stored();
                self.reads_until = None;
                (self.cursor_kept, self.idle_orders) = (self.session.cursor, 0);
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
            match self.shared.loader.mail_above(self.session.id, self.session.cursor).await {
                Ok((mail, mode)) => {
                    self.take_mail(mail, mode);
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

    /// Takes mail to be considered next. Whoever writes has the model asked again.
    fn take_mail(&mut self, mail: Vec<Envelope>, mode: Option<Mode>) {
        self.inbox = mail;
        self.run.mode = mode.unwrap_or(self.run.mode);
        self.unanswered = None;
    }

    fn happen(&mut self, event: Event) -> Result<(), Gone> {
        self.session.apply(&event)?;
        self.happened.push(event);
        Ok(())
    }

    /// What tells the parent that this session, its child, has ended, and the blob that it names.
    fn letter_to_parent(&self, run: &RunAfter) -> Option<(SessionId, Letter, Option<Blob>)> {
        let (parent, call) = self.parent?;
        let RunAfter::End { status, detail } = run else { return None };
        let (settled, blob) = match status {
            _ if decide::was_stopped(&self.session, self.run.mode) => {
                let message =
                    "cancelled: the session that worked on this call was stopped by order.".to_owned();
                (Settled::Cancelled { message }, None)
            }
            Status::Idle => {
                let text = match self.session.head() {
                    Some(Turn { body: TurnBody::Llm(llm), .. }) => llm.text.clone().unwrap_or_default(),
                    _ => String::new(),
                };
                let (result, blob) = Payload::pack(ToolResult::text(text));
                (Settled::Completed { result }, blob)
            }
            Status::Failed => (Settled::Failed { message: detail.clone()? }, None),
            _ => return None,
        };
        let letter = end_of_child(self.session.id, Some(self.agent.slug.clone()), call, settled);
        Some((parent, letter, blob))
    }
}
