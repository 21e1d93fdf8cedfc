//! Taking mail in: the one path by which anything reaches a session from outside its run.

use holdfast_engine::{
    content::Blob,
    decide::Mode,
    ids::{MailId, SessionId},
    mail::{MailBody, Priority, Sender},
    session::{Hold, Status},
};
use serde_json::json;
use tokio_postgres::Row;
use uuid::Uuid;

use crate::{
    errors::StoreError,
    sql,
    transaction::{Transaction, Writes, parameters},
};

/// How much unread mail of clients a mailbox holds.
pub const MAILBOX_LIMIT: i64 = 256;

/// A letter to accept.
#[derive(Debug, Clone)]
pub struct Letter {
    /// Its id; a repeat of it is the same letter.
    pub id: MailId,
    /// Who sends it.
    pub from: Sender,
    /// How urgent it is.
    pub priority: Priority,
    /// How many sessions passed it on.
    pub hops: u32,
    /// What it says.
    pub body: MailBody,
}

/// What a client learns of an accepted letter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Receipt {
    /// The letter's id.
    pub id: MailId,
    /// Its place in the mailbox.
    pub seq: i64,
    /// Whether it had been accepted before.
    pub duplicate: bool,
}

/// Which run accepted mail asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ask {
    /// None: the letters wait.
    Nothing,
    /// One that folds what arrived and does no more.
    Fold,
    /// One that goes on as far as it can, unless the session is held or a run is active anyway.
    GoOn,
    /// What a person asked for; lifts a hold.
    Run(Mode),
}

/// A session's row, locked.
#[derive(Debug, Clone)]
pub(crate) struct Locked {
    pub(crate) id: SessionId,
    pub(crate) owner: String,
    pub(crate) root: Uuid,
    pub(crate) status: Status,
    pub(crate) detail: Option<String>,
    pub(crate) hold: Hold,
    pub(crate) version: i64,
    pub(crate) last_commit: Option<Uuid>,
    pub(crate) turns: i64,
    pub(crate) mail_seq: i64,
    pub(crate) mail_cursor: i64,
    pub(crate) left: usize,
    pub(crate) event_seq: i64,
    pub(crate) deleted: bool,
}

impl Locked {
    /// The row of a session that this transaction has just inserted.
    pub(crate) fn fresh(id: SessionId, owner: &str, root: Uuid) -> Self {
        Self {
            id,
            owner: owner.to_owned(),
            root,
            status: Status::Ready,
            detail: None,
            hold: Hold::None,
            version: 1,
            last_commit: None,
            turns: 0,
            mail_seq: 0,
            mail_cursor: 0,
            left: 0,
            event_seq: 0,
            deleted: false,
        }
    }
}

/// A run's row, locked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LockedRun {
    pub(crate) session: SessionId,
    pub(crate) mode: Mode,
    pub(crate) claimed: bool,
    pub(crate) wake_seq: i64,
    pub(crate) epoch: i64,
    /// Whether it is parked because its model waits for calls or mail.
    pub(crate) waits: bool,
}

/// An event to append to a session's stream.
#[derive(Debug, Clone)]
pub(crate) struct NewEvent {
    pub(crate) kind: &'static str,
    pub(crate) body: String,
}

impl NewEvent {
    pub(crate) fn new(kind: &'static str, body: &serde_json::Value) -> Self {
        Self { kind, body: body.to_string() }
    }

    /// `session.updated`: what changes of a session, and the position of its newest turn. The rest
    /// is rendered when the event is read.
    pub(crate) fn updated(version: i64, status: Status, detail: Option<&str>, head: Option<i64>) -> Self {
        let body = json!({"version": version, "status": status.word(), "detail": detail, "head": head});
        Self::new("session.updated", &body)
    }
}

/// Locks sessions in the order of their ids. Those that don't exist are missing from the answer.
pub(crate) async fn lock_sessions(tx: &Transaction, ids: &[SessionId]) -> Result<Vec<Locked>, StoreError> {
    let ids: Vec<Uuid> = ids.iter().map(|id| id.0).collect();
    tx.query(sql::LOCK_SESSION, &[&ids]).await?.iter().map(locked).collect()
}

/// Locks the session that a token of an owner belongs to.
pub(crate) async fn lock_session_of_token(
    tx: &Transaction,
    token: &Uuid,
    owner: &str,
) -> Result<Option<Locked>, StoreError> {
    tx.query_opt(sql::LOCK_SESSION_OF_TOKEN, &[token, &owner]).await?.as_ref().map(locked).transpose()
}

fn locked(row: &Row) -> Result<Locked, StoreError> {
    let status: &str = row.try_get("status")?;
    let hold: &str = row.try_get("hold")?;
    Ok(Locked {
        id: SessionId(row.try_get("id")?),
        owner: row.try_get("owner")?,
        root: row.try_get("root_id")?,
        status: Status::parse(status).ok_or_else(|| corrupt("status", status))?,
        detail: row.try_get("status_detail")?,
        hold: Hold::parse(hold).ok_or_else(|| corrupt("hold", hold))?,
        version: row.try_get("version")?,
        last_commit: row.try_get("last_commit")?,
        turns: row.try_get("turns")?,
        mail_seq: row.try_get("mail_seq")?,
        mail_cursor: row.try_get("mail_cursor")?,
        left: row.try_get::<_, Vec<i64>>("mail_left")?.len(),
        event_seq: row.try_get("event_seq")?,
        deleted: row.try_get("deleted")?,
    })
}

/// Locks the session of a caller; another owner's, and a deleted one, is unknown.
pub(crate) async fn lock_own(
    tx: &Transaction,
    id: SessionId,
    owner: Option<&str>,
) -> Result<Locked, StoreError> {
    let locked = lock_sessions(tx, &[id]).await?.pop().ok_or(StoreError::UnknownSession)?;
    let own = owner.is_none_or(|owner| owner == locked.owner);
    if locked.deleted || !own { Err(StoreError::UnknownSession) } else { Ok(locked) }
}

/// Locks runs in the order of their sessions' ids.
pub(crate) async fn lock_runs(tx: &Transaction, ids: &[SessionId]) -> Result<Vec<LockedRun>, StoreError> {
    let ids: Vec<Uuid> = ids.iter().map(|id| id.0).collect();
    tx.query(sql::LOCK_RUN, &[&ids]).await?.iter().map(locked_run).collect()
}

/// Locks the run of the session that a token of an owner belongs to, if it has one.
pub(crate) async fn lock_run_of_token(
    tx: &Transaction,
    token: &Uuid,
    owner: &str,
) -> Result<Option<LockedRun>, StoreError> {
    tx.query_opt(sql::LOCK_RUN_OF_TOKEN, &[token, &owner]).await?.as_ref().map(locked_run).transpose()
}

fn locked_run(row: &Row) -> Result<LockedRun, StoreError> {
    Ok(LockedRun {
        session: SessionId(row.try_get("session_id")?),
        mode: mode(row)?,
        claimed: row.try_get::<_, &str>("state")? == "claimed",
        wake_seq: row.try_get("wake_seq")?,
        epoch: row.try_get("epoch")?,
        waits: row.try_get("waits")?,
    })
}

/// Locks a session's run, if it has one.
pub(crate) async fn lock_run(tx: &Transaction, id: SessionId) -> Result<Option<LockedRun>, StoreError> {
    Ok(lock_runs(tx, &[id]).await?.pop())
}

/// How far the run of a row goes.
pub(crate) fn mode(row: &Row) -> Result<Mode, StoreError> {
    let word: &str = row.try_get("mode")?;
    Mode::parse(word).ok_or_else(|| corrupt("mode", word))
}

pub(crate) fn corrupt(what: &str, value: &str) -> StoreError {
    StoreError::Corrupt(format!("{what} {value:?} is unknown to this build"))
}

/// What taking letters in amounts to: how the session's row changes, and what is added.
pub(crate) struct Intake {
    letters: Vec<Letter>,
    before: i64,
    /// The first new letter's number.
    pub(crate) first_seq: i64,
    /// The last letter's number.
    pub(crate) mail_seq: i64,
    /// The last event's number.
    pub(crate) event_seq: i64,
    /// The session's status.
    pub(crate) status: Status,
    /// What happened, after the number that the session's row has.
    pub(crate) events: Vec<NewEvent>,
    starts: bool,
    mode: Option<Mode>,
}

/// Decides what taking letters in amounts to. `run` is the session's locked run row, if there is one.
///
/// A request of a person is preceded by the order that lifts a hold, or one that a worker may be
/// about to obey, so that the run which the person asked for isn't swallowed by an older order.
pub(crate) fn intake(
    session: &Locked,
    run: Option<&LockedRun>,
    mut letters: Vec<Letter>,
    ask: Ask,
) -> Intake {
    let active = run.is_some_and(|run| run.mode != Mode::None);
    let mut lifted = 0;
    // A run that is there may be about to obey an older order, or to end: the letter lifts what it
    // would leave behind, and its number keeps the run from ending unread.
    let asked_for = matches!(ask, Ask::Run(mode) if mode != Mode::None);
    if asked_for && (run.is_some() || session.hold != Hold::None) {
        letters.insert(0, order_of_resuming());
        lifted = 1;
    }
    let mode = match ask {
        Ask::Nothing => None,
        Ask::Fold => Some(Mode::None),
        Ask::GoOn if active || session.hold != Hold::None => Some(Mode::None),
        Ask::GoOn => Some(Mode::UntilBlocked),
        Ask::Run(mode) => Some(mode),
    };
    let starts = !active && mode.is_some_and(|mode| mode != Mode::None);
    let mut events: Vec<NewEvent> = letters
        .iter()
        .zip(session.mail_seq + 1..)
        .map(|(letter, seq)| {
            let body =
                json!({"mail": {"id": letter.id, "seq": seq, "from": letter.from, "tag": letter.body.tag()}});
            NewEvent::new("mail.accepted", &body)
        })
        .collect();
    let status = if starts { Status::Running } else { session.status };
    if starts {
        let head = (session.turns > 0).then_some(session.turns);
        events.push(NewEvent::updated(session.version, status, None, head));
        let mode = mode.unwrap_or(Mode::UntilBlocked);
        events.push(NewEvent::new("run.started", &json!({"mode": mode.word()})));
    }
    let count = |items: usize| i64::try_from(items).unwrap_or(i64::MAX);
    Intake {
        before: session.mail_seq,
        first_seq: session.mail_seq + 1 + lifted,
        mail_seq: session.mail_seq + count(letters.len()),
        event_seq: session.event_seq + count(events.len()),
        letters,
        status,
        events,
        starts,
        mode,
    }
}

/// What a session that is being inserted begins with.
pub(crate) struct Beginning<'a> {
    pub(crate) session: SessionId,
    pub(crate) owner: &'a str,
    pub(crate) intake: Intake,
    pub(crate) traceparent: Option<&'a str>,
}

/// Adds to sessions that are being inserted what they begin with: their letters, their runs, and the events, of which
/// each one's first says that it was created.
pub(crate) fn begin<'a>(
    writes: &mut Writes<'_>,
    beginnings: impl IntoIterator<Item = &'a Beginning<'a>>,
) -> Result<(), StoreError> {
    let beginnings: Vec<&Beginning<'a>> = beginnings.into_iter().collect();
    let letters = beginnings.iter().flat_map(|new| {
        let wakes = new.intake.mode.is_some();
        let numbered = (new.intake.before + 1..).zip(&new.intake.letters);
        numbered.map(move |(seq, letter)| (new.session, seq, letter, wakes))
    });
    insert_letters(writes, letters)?;
    let woken = beginnings.iter().filter_map(|new| {
        new.intake.mode.map(|mode| (new.session, mode, new.intake.mail_seq, new.traceparent))
    });
    wake_runs(writes, woken);
    let created = NewEvent { kind: "session.created", ..NewEvent::updated(1, Status::Ready, None, None) };
    let events = beginnings.iter().flat_map(|new| {
        let events = std::iter::once(&created).chain(&new.intake.events);
        (1..).zip(events).map(|(seq, event)| (new.session, seq, new.owner, event.kind, event.body.as_str()))
    });
    append_events(writes, events);
    Ok(())
}

/// A locked session with what is taken in of letters, one request after another.
#[derive(Debug)]
pub(crate) struct Mailbox {
    /// As it is after what was taken in.
    pub(crate) session: Locked,
    /// Its run, likewise.
    pub(crate) run: Option<LockedRun>,
    events_before: i64,
    /// With their numbers, and whether they wake a run.
    letters: Vec<(i64, Letter, bool)>,
    events: Vec<NewEvent>,
    starts: bool,
    mode: Option<Mode>,
    traceparent: Option<String>,
}

impl Mailbox {
    pub(crate) fn of(session: Locked, run: Option<LockedRun>) -> Self {
        Self {
            events_before: session.event_seq,
            session,
            run,
            letters: Vec::new(),
            events: Vec::new(),
            starts: false,
            mode: None,
            traceparent: None,
        }
    }

    /// Takes letters in; see [`intake`]. Returns the first one's number.
    pub(crate) fn take(&mut self, letters: Vec<Letter>, ask: Ask, traceparent: Option<&str>) -> i64 {
        let taken = intake(&self.session, self.run.as_ref(), letters, ask);
        let wakes = taken.mode.is_some();
        let numbered = (taken.before + 1..).zip(taken.letters);
        self.letters.extend(numbered.map(|(seq, letter)| (seq, letter, wakes)));
        self.events.extend(taken.events);
        self.starts |= taken.starts;
        let session = &mut self.session;
        (session.mail_seq, session.event_seq) = (taken.mail_seq, taken.event_seq);
        session.status = taken.status;
        if let Some(mode) = taken.mode {
            self.mode = self.mode.max(Some(mode));
            let before = self.run;
            self.run = Some(LockedRun {
                session: session.id,
                mode: before.map_or(mode, |run| run.mode.max(mode)),
                claimed: before.is_some_and(|run| run.claimed),
                wake_seq: session.mail_seq,
                epoch: before.map_or(0, |run| run.epoch),
                waits: false,
            });
            self.traceparent = self.traceparent.take().or_else(|| traceparent.map(str::to_owned));
        }
        taken.first_seq
    }

    /// Adds events to the session's stream.
    pub(crate) fn happen(&mut self, events: Vec<NewEvent>) {
        self.session.event_seq += i64::try_from(events.len()).unwrap_or(i64::MAX);
        self.events.extend(events);
    }

    fn is_changed(&self) -> bool {
        !(self.letters.is_empty() && self.events.is_empty() && self.mode.is_none())
    }
}

/// Writes what was taken in: letters, their sessions and runs, and the events, one statement a table.
pub(crate) fn write<'a>(
    writes: &mut Writes<'_>,
    mailboxes: impl IntoIterator<Item = &'a Mailbox>,
) -> Result<(), StoreError> {
    let changed: Vec<&Mailbox> = mailboxes.into_iter().filter(|mailbox| mailbox.is_changed()).collect();
    if changed.is_empty() {
        return Ok(());
    }
    let column =
        |pick: fn(&Mailbox) -> i64| changed.iter().map(|mailbox| pick(mailbox)).collect::<Vec<i64>>();
    let statuses: Vec<&'static str> = changed.iter().map(|mailbox| mailbox.session.status.word()).collect();
    writes.push(
        sql::ACCEPT_SESSION,
        parameters![
            changed.iter().map(|mailbox| mailbox.session.id.0).collect::<Vec<Uuid>>(),
            column(|mailbox| mailbox.session.mail_seq),
            column(|mailbox| mailbox.session.event_seq),
            statuses,
            changed.iter().map(|mailbox| mailbox.starts).collect::<Vec<bool>>(),
        ],
    );
    let letters = changed.iter().flat_map(|mailbox| {
        let id = mailbox.session.id;
        mailbox.letters.iter().map(move |(seq, letter, wakes)| (id, *seq, letter, *wakes))
    });
    insert_letters(writes, letters)?;
    let woken = changed.iter().filter_map(|mailbox| {
        let wake_seq = mailbox.session.mail_seq;
        mailbox.mode.map(|mode| (mailbox.session.id, mode, wake_seq, mailbox.traceparent.as_deref()))
    });
    wake_runs(writes, woken);
    let events = changed.iter().flat_map(|mailbox| {
        let session = &mailbox.session;
        (mailbox.events_before + 1..).zip(&mailbox.events).map(move |(seq, event)| {
            (session.id, seq, session.owner.as_str(), event.kind, event.body.as_str())
        })
    });
    append_events(writes, events);
    Ok(())
}

/// Appends letters to a locked session's mailbox and wakes its run as asked, all in the caller's
/// transaction; see [`intake`]. Returns the first new letter's number, and what the session is doing by then.
pub(crate) fn take_in(
    writes: &mut Writes<'_>,
    session: &Locked,
    run: Option<&LockedRun>,
    letters: Vec<Letter>,
    ask: Ask,
    traceparent: Option<&str>,
) -> Result<(i64, Status), StoreError> {
    let mut mailbox = Mailbox::of(session.clone(), run.copied());
    let first = mailbox.take(letters, ask, traceparent);
    write(writes, [&mailbox])?;
    Ok((first, mailbox.session.status))
}

/// Wakes runs: of sessions, how far they go, up to which letter, and in whose trace.
fn wake_runs<'a>(
    writes: &mut Writes<'_>,
    woken: impl IntoIterator<Item = (SessionId, Mode, i64, Option<&'a str>)>,
) {
    let (mut sessions, mut modes, mut seqs, mut traces) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (session, mode, seq, trace) in woken {
        sessions.push(session.0);
        modes.push(mode.word());
        seqs.push(seq);
        traces.push(trace.map(str::to_owned));
    }
    if !sessions.is_empty() {
        writes.push(sql::WAKE_RUN, parameters![sessions, modes, seqs, traces]);
    }
}

fn order_of_resuming() -> Letter {
    Letter {
        id: MailId(Uuid::now_v7()),
        from: Sender::System { source: "resume".to_owned() },
        priority: Priority::High,
        hops: 0,
        body: MailBody::Control { message: holdfast_engine::mail::Control::Resume },
    }
}

/// Letters of sessions, with their numbers and whether they wake a run.
fn insert_letters<'a>(
    writes: &mut Writes<'_>,
    letters: impl Iterator<Item = (SessionId, i64, &'a Letter, bool)>,
) -> Result<(), StoreError> {
    let letters: Vec<_> = letters.collect();
    if letters.is_empty() {
        return Ok(());
    }
    let text = |pick: fn(&Letter) -> Result<String, serde_json::Error>| {
        letters.iter().map(|(_, _, letter, _)| pick(letter)).collect::<Result<Vec<String>, _>>()
    };
    let word = |pick: fn(&Letter) -> &'static str| {
        letters.iter().map(|(_, _, letter, _)| pick(letter)).collect::<Vec<&'static str>>()
    };
    let hops = letters.iter().map(|(_, _, letter, _)| i32::try_from(letter.hops).unwrap_or(i32::MAX));
    writes.push(
        sql::INSERT_MAIL,
        parameters![
            letters.iter().map(|(session, ..)| session.0).collect::<Vec<Uuid>>(),
            letters.iter().map(|(_, seq, ..)| *seq).collect::<Vec<i64>>(),
            letters.iter().map(|(_, _, letter, _)| letter.id.0).collect::<Vec<Uuid>>(),
            text(|letter| serde_json::to_string(&letter.from))?,
            word(|letter| match letter.priority {
                Priority::Normal => "normal",
                Priority::High => "high",
            }),
            hops.collect::<Vec<i32>>(),
            word(|letter| letter.body.tag()),
            text(|letter| serde_json::to_string(&letter.body))?,
            letters.iter().map(|(.., wakes)| *wakes).collect::<Vec<bool>>(),
        ],
    );
    Ok(())
}

/// Appends events to a session's stream after number `before`; the caller moves the counter.
pub(crate) fn insert_events(
    writes: &mut Writes<'_>,
    session: SessionId,
    owner: &str,
    before: i64,
    events: &[NewEvent],
) {
    let numbered = (before + 1..).zip(events);
    append_events(
        writes,
        numbered.map(|(seq, event)| (session, seq, owner, event.kind, event.body.as_str())),
    );
}

/// Appends events to streams: whose, their numbers, their owners, kinds and bodies.
fn append_events<'a>(
    writes: &mut Writes<'_>,
    events: impl Iterator<Item = (SessionId, i64, &'a str, &'static str, &'a str)>,
) {
    let (mut sessions, mut seqs, mut owners) = (Vec::new(), Vec::new(), Vec::new());
    let (mut kinds, mut bodies) = (Vec::new(), Vec::new());
    for (session, seq, owner, kind, body) in events {
        sessions.push(session.0);
        seqs.push(seq);
        owners.push(owner.to_owned());
        kinds.push(kind);
        bodies.push(body.to_owned());
    }
    if !sessions.is_empty() {
        writes.events += sessions.len();
        writes.push(sql::INSERT_EVENTS, parameters![sessions, seqs, owners, kinds, bodies]);
    }
}

/// Stores blobs of owners that aren't there yet.
pub(crate) fn insert_blobs<'a>(writes: &mut Writes<'a>, blobs: impl Iterator<Item = (&'a str, &'a Blob)>) {
    let (mut owners, mut digests, mut bodies) = (Vec::new(), Vec::new(), Vec::new());
    for (owner, blob) in blobs {
        owners.push(owner);
        digests.push(blob.digest.0.as_slice());
        bodies.push(&*blob.text);
    }
    if !owners.is_empty() {
        writes.push(sql::INSERT_BLOBS, parameters![owners, digests, bodies]);
    }
}

/// Text for a plain column: a NUL, which Postgres can't hold there, becomes U+FFFD, and what is
/// longer than `limit` bytes is cut at a character.
pub(crate) fn plain(text: &str, limit: usize) -> String {
    let mut kept = text.replace('\0', "\u{FFFD}");
    if kept.len() > limit {
        kept.truncate(kept.floor_char_boundary(limit));
        kept.push('…');
    }
    kept
}
