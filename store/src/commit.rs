//! The one fenced transaction that stores what a step changed.
//!
//! A commit is a value, handed to [`commit`]. It names the version that its step read, the epoch
//! that its worker holds and an id of its own. It stores everything or nothing.

mod events;
mod rows;

use std::{collections::HashMap, time::Duration};

use chrono::{DateTime, Utc};
use holdfast_engine::{
    content::Blob,
    decide::{Mode, Spawn},
    ids::{CallId, MailId, SessionId},
    mail::{Control, MailBody, Priority, Sender, Settled},
    session::{Event, Hold, Session, Status},
};
use serde_json::json;
use uuid::Uuid;

use crate::{
    Store,
    accept::cancel_continuations,
    errors::StoreError,
    letters::{
        Ask, Letter, Locked, LockedRun, NewEvent, corrupt, insert_events, lock_runs, lock_sessions, plain,
        take_in,
    },
    plant::{self, Mistake},
    retry::against_rivals,
    sql,
    transaction::{Transaction, Writes, parameters},
};

/// What a step changed.
#[derive(Debug, Clone)]
pub struct Commit {
    /// Its own id, by which an unknown outcome is found out.
    pub id: Uuid,
    /// The lease's epoch.
    pub epoch: i64,
    /// The session's agent, for continuations.
    pub agent: String,
    /// The revision that the run uses.
    pub agent_revision: String,
    /// The session as it stands after the step; its `version` is the one that the step read.
    pub session: Session,
    /// What happened in the step, in order.
    pub happened: Vec<Event>,
    /// Blobs that the events name.
    pub blobs: Vec<Blob>,
    /// What becomes of the run.
    pub run: RunAfter,
    /// The letter that tells the parent of this session's end, and to whom it goes.
    pub to_parent: Option<(SessionId, Letter)>,
    /// Child sessions that it starts.
    pub spawns: Vec<Spawn>,
    /// Child sessions that nobody waits for any more, which it tells to stop.
    pub dismissed: Vec<SessionId>,
    /// The trace in which it is made: runs that it starts belong to it.
    pub traceparent: Option<String>,
}

impl Commit {
    /// The sessions that it locks: its own, and those that it writes to.
    pub(crate) fn touches(&self) -> impl Iterator<Item = SessionId> {
        let parent = self.to_parent.as_ref().map(|(parent, _)| *parent);
        std::iter::once(self.session.id).chain(parent).chain(self.dismissed.iter().copied())
    }
}

/// What a step makes of its run. Ending and parking give way to mail that the step hasn't considered.
#[derive(Debug, Clone, PartialEq)]
pub enum RunAfter {
    /// It goes on.
    Keep,
    /// It ends.
    End {
        /// The status that the session is left in.
        status: Status,
        /// Why, where that needs words. A session that stays failed keeps its reason without.
        detail: Option<String>,
    },
    /// The engine waits elsewhere; the run gives its slot back.
    Park {
        /// What it waits for, as views show it.
        on: String,
        /// When it wakes by itself.
        until: Option<DateTime<Utc>>,
    },
}

/// How a commit went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It is stored.
    Stored {
        /// The session's version now.
        version: i64,
        /// Whether the run has ended, or is parked, as the commit wanted.
        released: bool,
        /// The newest mail that woke the run, as the run's locked row had it.
        wake_seq: i64,
        /// How far the run goes by now.
        mode: Mode,
    },
    /// Somebody else holds the run, or nobody may: the session is deleted or has another version.
    /// Nothing was stored, and nothing will be.
    LeaseLost,
}

/// Bytes of a status detail that are kept.
const DETAIL_LIMIT: usize = 2000;

/// How long an unknown outcome is inquired after between attempts.
const INQUIRY_PAUSE: Duration = Duration::from_millis(100);

/// Stores a step.
///
/// If the connection dies during COMMIT, the outcome is found out by reading the session: its
/// `last_commit` says whether this commit took place; if it didn't, and the version and the epoch
/// still stand, it is sent again.
///
/// # Errors
/// [`StoreError::Unavailable`] if the database stays away until `deadline`: the outcome is then
/// unknown, and the lease is as good as lost. Other [`StoreError`]s mean that nothing was stored.
pub async fn commit(
    store: &Store,
    work: &Commit,
    deadline: tokio::time::Instant,
) -> Result<Outcome, StoreError> {
    loop {
        let error = match against_rivals(|| commit_once(store, work)).await {
            Ok(outcome) => {
                announce(store, work, outcome);
                return Ok(outcome);
            }
            Err(error) if error.is_unavailable() && plant::made(Mistake::UnknownIsStored) => {
                let version = work.session.version + 1;
                let released = work.run != RunAfter::Keep;
                return Ok(Outcome::Stored { version, released, wake_seq: 0, mode: Mode::UntilBlocked });
            }
            Err(error) if error.is_unavailable() => error,
            Err(error) => return Err(error),
        };
        if tokio::time::Instant::now() >= deadline {
            return Err(error);
        }
        tokio::time::sleep(INQUIRY_PAUSE).await;
        match inquire(store, work).await {
            Ok(Some(outcome)) => {
                announce(store, work, outcome);
                return Ok(outcome);
            }
            // Either it is to be sent again, or the database is still away: the loop finds out.
            Ok(None) | Err(StoreError::Unavailable(_)) => {}
            Err(error) => return Err(error),
        }
    }
}

/// Tells those who watch the session, and its parent's worker, what a commit brought.
pub(crate) fn announce(store: &Store, work: &Commit, outcome: Outcome) {
    if let Outcome::Stored { .. } = outcome {
        store.announce(work.session.id, false);
        if let Some((parent, _)) = &work.to_parent {
            store.announce(*parent, true);
        }
        for child in work.spawns.iter().map(|new| new.id).chain(work.dismissed.iter().copied()) {
            store.announce(child, true);
        }
    }
}

/// What became of a commit whose outcome is unknown; `None` if it didn't take place and may.
async fn inquire(store: &Store, work: &Commit) -> Result<Option<Outcome>, StoreError> {
    let client = store.client().await?;
    let statement = client.prepare_cached(sql::READ_COMMIT).await?;
    let Some(row) = client.query_opt(&statement, &[&work.session.id.0]).await? else {
        return Ok(Some(Outcome::LeaseLost));
    };
    let epoch: Option<i64> = row.try_get("epoch")?;
    let holds = epoch == Some(work.epoch) && row.try_get::<_, Option<&str>>("state")? == Some("claimed");
    let version: i64 = row.try_get("version")?;
    if row.try_get::<_, Option<Uuid>>("last_commit")? == Some(work.id) {
        let mode = match row.try_get::<_, Option<&str>>("mode")? {
            Some(word) if holds => Mode::parse(word).ok_or_else(|| corrupt("mode", word))?,
            _ => Mode::None,
        };
        let wake_seq = row.try_get::<_, Option<i64>>("wake_seq")?.unwrap_or(0);
        return Ok(Some(Outcome::Stored { version, released: !holds, wake_seq, mode }));
    }
    let stands = holds && version == work.session.version && !row.try_get::<_, bool>("deleted")?;
    Ok(if stands { None } else { Some(Outcome::LeaseLost) })
}

async fn commit_once(store: &Store, work: &Commit) -> Result<Outcome, StoreError> {
    let outcomes = store_group(store, &[work]).await?;
    outcomes.into_iter().next().ok_or(StoreError::Rival)
}

/// A step whose fence held, with what its locked rows make of it.
struct Member<'a> {
    work: &'a Commit,
    before: &'a Locked,
    /// Whether the run ends or parks, as the step wants.
    released: bool,
    status: Status,
    detail: Option<String>,
    events: Vec<NewEvent>,
}

/// Stores steps in one transaction, one statement a table, with an outcome for each. A missed fence is
/// an outcome. No session may be touched by two of them, as member or as recipient.
///
/// # Errors
/// Any [`StoreError`] means that none of them is known to be stored; [`StoreError::Unavailable`] leaves
/// the outcome of all unknown.
pub(crate) async fn store_group(store: &Store, works: &[&Commit]) -> Result<Vec<Outcome>, StoreError> {
    let tx = Transaction::over(store.client().await?);
    tx.prepare(&[sql::LOCK_SESSION, sql::LOCK_RUN]).await?;
    let touched: Vec<SessionId> = works.iter().flat_map(|work| work.touches()).collect();
    let locks = async {
        store.at("commit.begun").await;
        futures::try_join!(lock_sessions(&tx, &touched), lock_runs(&tx, &touched))
    };
    let ((), (sessions, runs)) = futures::try_join!(tx.begin(), locks)?;
    let sessions: HashMap<SessionId, &Locked> =
        sessions.iter().map(|session| (session.id, session)).collect();
    let runs: HashMap<SessionId, &LockedRun> = runs.iter().map(|run| (run.session, run)).collect();
    let (mut outcomes, mut members) = (Vec::with_capacity(works.len()), Vec::with_capacity(works.len()));
    for &work in works {
        let (outcome, member) = fence(work, sessions.get(&work.session.id), runs.get(&work.session.id));
        outcomes.push(outcome);
        members.extend(member);
    }
    if members.is_empty() {
        tx.rollback().await?;
        return Ok(outcomes);
    }
    let mut writes = Writes::default();
    rows::write(&mut writes, &members)?;
    for member in members.iter().filter(|member| member.released) {
        tell_parent(&tx, &mut writes, member.work, &sessions, &runs).await?;
    }
    for member in &members {
        dismiss(&mut writes, member.work, &sessions, &runs)?;
    }
    tx.commit_after(writes, store.at("commit.written")).await?;
    store.at("commit.done").await;
    Ok(outcomes)
}

/// Holds a step against the rows that were locked for it.
fn fence<'a>(
    work: &'a Commit,
    before: Option<&&'a Locked>,
    run: Option<&&LockedRun>,
) -> (Outcome, Option<Member<'a>>) {
    let forced = plant::made(Mistake::RetryAfterLeaseLost);
    let any = forced || plant::made(Mistake::NoEpochCheck);
    let held = run.filter(|run| run.claimed && (any || run.epoch == work.epoch));
    let Some(&before) = before.filter(|session| !session.deleted) else { return (Outcome::LeaseLost, None) };
    if before.last_commit == Some(work.id) {
        // It took place, although its first answer was lost.
        let outcome = Outcome::Stored {
            version: before.version,
            released: held.is_none(),
            wake_seq: held.map_or(0, |run| run.wake_seq),
            mode: held.map_or(Mode::None, |run| run.mode),
        };
        return (outcome, None);
    }
    let Some(run) = held.filter(|_| forced || before.version == work.session.version) else {
        return (Outcome::LeaseLost, None);
    };
    let overtaken = run.wake_seq > work.session.cursor && !plant::made(Mistake::EndIgnoresWake);
    let released = work.run != RunAfter::Keep && !overtaken;
    let (status, detail) = status_after(work, before, run, released);
    let detail = detail.map(|detail| plain(detail, DETAIL_LIMIT));
    let events = events::of(work, status, detail.as_deref(), run.mode, released);
    let version = work.session.version + 1;
    let outcome = Outcome::Stored { version, released, wake_seq: run.wake_seq, mode: run.mode };
    (outcome, Some(Member { work, before, released, status, detail, events }))
}

/// The status that a step leaves: the one that it ends its run with, else what the locked rows say.
fn status_after<'a>(
    work: &'a Commit,
    before: &'a Locked,
    run: &LockedRun,
    released: bool,
) -> (Status, Option<&'a str>) {
    match &work.run {
        RunAfter::End { status: Status::Failed, detail: None } if released => {
            (Status::Failed, before.detail.as_deref())
        }
        RunAfter::End { status, detail } if released => (*status, detail.as_deref()),
        _ if run.mode != Mode::None => (Status::Running, None),
        _ if before.status == Status::Paused && work.session.hold != Hold::Paused => {
            (work.session.implied_status(), None)
        }
        _ => (before.status, before.detail.as_deref()),
    }
}

async fn tell_parent(
    tx: &Transaction,
    writes: &mut Writes<'_>,
    work: &Commit,
    sessions: &HashMap<SessionId, &Locked>,
    runs: &HashMap<SessionId, &LockedRun>,
) -> Result<(), StoreError> {
    let Some((parent, letter)) = &work.to_parent else { return Ok(()) };
    let (session, run) = (sessions.get(parent).copied(), runs.get(parent).copied());
    tell(tx, writes, session, run, letter.clone(), work.traceparent.as_deref()).await
}

/// Mails the end of a child to its parent, whose rows are locked, unless it was mailed before.
pub(crate) async fn tell(
    tx: &Transaction,
    writes: &mut Writes<'_>,
    parent: Option<&Locked>,
    run: Option<&LockedRun>,
    letter: Letter,
    traceparent: Option<&str>,
) -> Result<(), StoreError> {
    let Some(parent) = parent.filter(|session| !session.deleted) else { return Ok(()) };
    if tx.query_opt(sql::FIND_MAIL, &[&parent.id.0, &letter.id.0]).await?.is_some() {
        return Ok(());
    }
    // A child that was stopped is no reason to begin: its parent waits for it with a run that is there, or has
    // stopped it itself.
    let stopped =
        matches!(letter.body, MailBody::ToolCallFinished { settled: Settled::Cancelled { .. }, .. });
    let ask = if stopped { Ask::Fold } else { Ask::GoOn };
    take_in(writes, parent, run, vec![letter], ask, traceparent).map(|_| ())
}

/// Tells child sessions to stop that nobody waits for any more, with all that they have handed out.
fn dismiss(
    writes: &mut Writes<'_>,
    work: &Commit,
    sessions: &HashMap<SessionId, &Locked>,
    runs: &HashMap<SessionId, &LockedRun>,
) -> Result<(), StoreError> {
    for child in &work.dismissed {
        let Some(recipient) = sessions.get(child).filter(|session| !session.deleted) else { continue };
        let order = |message| Letter {
            id: MailId(Uuid::now_v7()),
            from: Sender::Session { session_id: work.session.id, agent: Some(work.agent.clone()) },
            priority: Priority::High,
            hops: 0,
            body: MailBody::Control { message },
        };
        let orders = vec![order(Control::CancelDeferred), order(Control::StopRun)];
        cancel_continuations(writes, *child, None);
        let run = runs.get(child).copied();
        take_in(writes, recipient, run, orders, Ask::Fold, work.traceparent.as_deref())?;
    }
    Ok(())
}

/// Ends a run that can't be driven, whatever it was: the session keeps what is stored, its mail stays
/// unread, and its status says why. Returns whether the lease still stood.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn fail(store: &Store, id: SessionId, epoch: i64, why: &str) -> Result<bool, StoreError> {
    let done = against_rivals(|| fail_once(store, id, epoch, why)).await?;
    let Some(Told { parent }) = done else { return Ok(false) };
    store.announce(id, false);
    if let Some(parent) = parent {
        store.announce(parent, true);
    }
    Ok(true)
}

async fn fail_once(store: &Store, id: SessionId, epoch: i64, why: &str) -> Result<Option<Told>, StoreError> {
    let tx = Transaction::begun(store.client().await?).await?;
    let parent = parent_of(&tx, id).await?;
    let touched: Vec<SessionId> = std::iter::once(id).chain(parent.map(|(parent, _)| parent)).collect();
    let sessions = lock_sessions(&tx, &touched).await?;
    let runs = lock_runs(&tx, &touched).await?;
    let session = sessions.iter().find(|session| session.id == id && !session.deleted);
    let run = runs.iter().find(|run| run.session == id && run.claimed && run.epoch == epoch);
    let (Some(before), Some(run)) = (session, run) else { return Ok(None) };
    let detail = plain(why, DETAIL_LIMIT);
    let head = (before.turns > 0).then_some(before.turns);
    let mut events = vec![NewEvent::updated(before.version + 1, Status::Failed, Some(&detail), head)];
    if run.mode != Mode::None {
        events.push(NewEvent::new("session.failed", &json!({"message": detail})));
        events.push(NewEvent::new("run.stopped", &json!({"status": Status::Failed.word()})));
    }
    let event_seq = before.event_seq + i64::try_from(events.len()).unwrap_or(i64::MAX);
    let mut writes = Writes::default();
    if let Some((parent, call)) = parent {
        let recipient = sessions.iter().find(|session| session.id == parent);
        let settled = Settled::Failed { message: detail.clone() };
        let letter = end_of_child(id, None, call, settled);
        let run = runs.iter().find(|run| run.session == parent);
        tell(&tx, &mut writes, recipient, run, letter, None).await?;
    }
    writes.push(sql::FAIL_SESSION, parameters![id.0, Uuid::now_v7(), detail, event_seq]);
    writes.push(sql::END_RUN, parameters![vec![id.0], vec![epoch]]);
    insert_events(&mut writes, id, &before.owner, before.event_seq, &events);
    tx.commit(writes).await?;
    Ok(Some(Told { parent: parent.map(|(parent, _)| parent) }))
}

/// Whom a session's end was told.
struct Told {
    parent: Option<SessionId>,
}

/// The call that a session answers, if it is one of a session's.
pub(crate) async fn parent_of(
    tx: &Transaction,
    id: SessionId,
) -> Result<Option<(SessionId, CallId)>, StoreError> {
    let Some(row) = tx.query_opt(sql::PARENT_OF, &[&id.0]).await? else { return Ok(None) };
    Ok(Some((SessionId(row.try_get(0)?), CallId(row.try_get(1)?))))
}

/// The letter that tells a parent how the child session of a call ended. Its id is the child's: whatever ends the
/// child again later has nothing to say to a call that has ended.
pub fn end_of_child(child: SessionId, agent: Option<String>, call: CallId, settled: Settled) -> Letter {
    Letter {
        id: MailId(child.0),
        from: Sender::Session { session_id: child, agent },
        priority: Priority::Normal,
        hops: 0,
        body: MailBody::ToolCallFinished { tool_call_id: call, settled },
    }
}
