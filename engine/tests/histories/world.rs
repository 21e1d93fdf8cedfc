//! A mailbox and a store, as small as they can be; the worker is in [`worker`], agents are in [`shape`].

pub(crate) mod shape;
mod worker;

use std::{
    cell::Cell,
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use chrono::{DateTime, TimeDelta};
use holdfast_engine::{
    Time,
    agent::Agent,
    content::{Blob, Digest, Payload, Query, ToolResult},
    decide::{self, Context, Decision, Mode, Next, Run},
    ids::{CallId, MailId, SessionId, TurnId},
    mail::{Control, Envelope, MailBody, Priority, Sender, Settled},
    model::{Flavor, ModelAnswer, RequestedCall},
    session::{CallState, Event, Hold, Session, Status, Stop, TrackedCall},
    turn::{Shown, Turn, TurnBody, UserTurn},
    waits::Waits,
};
use uuid::Uuid;

use self::shape::Shape;
use crate::{checks, dice::Dice};

/// How often an idempotent call may begin: retries and restarts count the same attempts,
/// and more restarts are granted than retries.
pub(crate) const MOST_ATTEMPTS: i32 = 1 + decide::MAX_RESTARTS;

/// How a call ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Completed,
    Failed,
    Cancelled,
}

/// The run's row.
#[derive(Debug, Clone, Copy)]
struct Row {
    mode: Mode,
    wake_seq: i64,
    parked: bool,
    /// When a parked run wakes by itself.
    due: Option<Time>,
}

/// A session that a call has started.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Child {
    /// Whether its end has been mailed.
    ended: bool,
    /// Whether it was told to stop.
    pub(crate) dismissed: bool,
}

/// What a worker holds in memory while it has the run.
struct Held {
    session: Session,
    steps: u32,
    /// How long the session was when the model was asked, while it is being asked.
    asking: Option<i64>,
    /// Calls that run, as the worker knows it.
    running: Vec<CallId>,
    /// What has happened since the last commit.
    unstored: Vec<Event>,
    /// How much mail there was and how far the run went when the worker last looked, both seen at
    /// once. What comes between looking and committing is news to the commit.
    looked: Option<(usize, Mode)>,
}

/// What survives a worker.
#[derive(Default)]
pub(crate) struct Stored {
    pub(crate) turns: Vec<(TurnId, i64, Time, &'static str, String)>,
    calls: Vec<TrackedCall>,
    left: Vec<i64>,
    hold: Option<Hold>,
    pub(crate) cursor: i64,
}

/// How many times a call really began: after that was stored, and before.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Begun {
    pub(crate) stored: i32,
    pub(crate) unstored: i32,
}

/// One session's whole surroundings.
pub(crate) struct World {
    pub(crate) shape: Shape,
    agent: Agent,
    pub(crate) mailbox: Vec<Envelope>,
    pub(crate) stored: Stored,
    row: Option<Row>,
    held: Option<Held>,
    /// A session that the worker kept from its last run.
    kept: Option<Session>,
    pub(crate) blobs: HashMap<Digest, Arc<str>>,
    /// Every call that the model ever asked for, with the newest that is known of it.
    pub(crate) calls: BTreeMap<CallId, TrackedCall>,
    /// How many times a call was really begun.
    pub(crate) begun: BTreeMap<CallId, Begun>,
    /// What user messages and results say, which is unique, and what it is the end of.
    pub(crate) markers: Vec<(String, Option<CallId>)>,
    /// The child sessions of calls, by their calls.
    pub(crate) children: BTreeMap<CallId, Child>,
    pub(crate) deaths: u32,
    pub(crate) parks: u32,
    /// How often a request was ended by an interrupt, and how many calls ended beside one.
    pub(crate) interrupted_requests: u32,
    pub(crate) ended_while_asking: u32,
    /// How often calls began before it was stored that they do, and how many of them died so.
    pub(crate) begun_unstored: u32,
    pub(crate) died_unstored: u32,
    ids: Cell<u128>,
    clock: i64,
    calm: bool,
    /// A person asked for a run until it is blocked, and nobody ordered otherwise since.
    wanted: bool,
}

impl World {
    pub(crate) fn new(shape: u8) -> Self {
        let shape = Shape::new(shape);
        Self {
            shape,
            agent: shape.agent(),
            mailbox: Vec::new(),
            stored: Stored::default(),
            row: None,
            held: None,
            kept: None,
            blobs: HashMap::new(),
            calls: BTreeMap::new(),
            begun: BTreeMap::new(),
            markers: Vec::new(),
            children: BTreeMap::new(),
            deaths: 0,
            parks: 0,
            interrupted_requests: 0,
            ended_while_asking: 0,
            begun_unstored: 0,
            died_unstored: 0,
            ids: Cell::new(0),
            clock: 0,
            calm: false,
            wanted: false,
        }
    }

    fn fresh(&self) -> Uuid {
        self.ids.set(self.ids.get() + 1);
        // Spread, so that the short forms of ids differ.
        Uuid::from_u128(self.ids.get().wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835))
    }

    fn tick(&mut self) -> Time {
        self.clock += 1;
        self.now()
    }

    fn now(&self) -> Time {
        DateTime::UNIX_EPOCH + TimeDelta::seconds(self.clock)
    }

    /// Time goes by.
    pub(crate) fn pass(&mut self, seconds: u8) {
        self.clock += i64::from(seconds);
    }

    fn marker(&mut self, kind: &str, call: Option<CallId>) -> String {
        let text = format!("<{kind} {}>", self.markers.len());
        self.markers.push((text.clone(), call));
        text
    }

    // The accepting side.

    /// Takes letters in; `run` is what a person asked for, `None` wakes as far as the hold allows.
    ///
    /// A person's request is preceded by the order that lifts a hold whenever there is a hold, an
    /// order that may lead to one, or a run: a step may be about to end held, and a request without
    /// a letter of its own could come between a worker's last look and its last commit.
    fn accept(&mut self, bodies: Vec<MailBody>, run: Option<Mode>) {
        self.accept_as(Priority::Normal, bodies, run);
    }

    fn accept_as(&mut self, priority: Priority, mut bodies: Vec<MailBody>, run: Option<Mode>) {
        let active = self.row.is_some_and(|row| row.mode != Mode::None);
        let held = self.stored.hold.is_some_and(|hold| hold != Hold::None);
        let ordered = self
            .mailbox
            .iter()
            .any(|letter| letter.seq > self.stored.cursor && matches!(letter.body, MailBody::Control { .. }));
        if run.is_some_and(|mode| mode != Mode::None) && (held || ordered || self.row.is_some()) {
            bodies.insert(0, MailBody::Control { message: Control::Resume });
        }
        for body in bodies {
            let seq = i64::try_from(self.mailbox.len()).expect("few letters") + 1;
            let from = match &body {
                MailBody::UserMessage { .. } => Sender::User { owner: None },
                MailBody::ContinuationResult { tool_call_id, .. } => {
                    Sender::ToolCall { tool_call_id: *tool_call_id }
                }
                MailBody::ToolCallFinished { tool_call_id, .. } => {
                    Sender::Session { session_id: SessionId(tool_call_id.0), agent: None }
                }
                _ => Sender::System { source: "sim".into() },
            };
            let id = match &body {
                MailBody::ToolCallFinished { tool_call_id, .. } => MailId(tool_call_id.0),
                _ => MailId(self.fresh()),
            };
            let sent_at = self.tick();
            self.mailbox.push(Envelope { id, seq, from, priority, hops: 0, sent_at, body });
        }
        let mode = match run {
            Some(mode) => mode,
            None if active || held => Mode::None,
            None => Mode::UntilBlocked,
        };
        self.wanted |= mode == Mode::UntilBlocked && run.is_some();
        let wake_seq = i64::try_from(self.mailbox.len()).expect("few letters");
        let before = self.row.map_or(Mode::None, |row| row.mode);
        self.row = Some(Row { mode: before.max(mode), wake_seq, parked: false, due: None });
    }

    pub(crate) fn message(&mut self, mode: Mode) {
        let text = self.marker("message", None);
        let query = Payload::Inline(Query { text, media: Vec::new() });
        self.accept(vec![MailBody::UserMessage { query }], Some(mode));
    }

    /// A person says something that doesn't wait.
    pub(crate) fn interrupt(&mut self) {
        let text = self.marker("interrupt", None);
        let query = Payload::Inline(Query { text, media: Vec::new() });
        self.accept_as(Priority::High, vec![MailBody::UserMessage { query }], Some(Mode::UntilBlocked));
    }

    /// A child session ends, be it that it was told to.
    pub(crate) fn child_ends(&mut self, choice: u8, end: End) {
        let going = self.children.iter().filter(|(_, child)| !child.ended);
        let going: Vec<CallId> = going.map(|(call, _)| *call).collect();
        let Some(call) = going.get(usize::from(choice) % going.len().max(1)).copied() else { return };
        self.end_child(call, end);
    }

    fn end_child(&mut self, call: CallId, end: End) {
        let settled = self.settled(call, end);
        self.children.entry(call).and_modify(|child| child.ended = true);
        self.accept(vec![MailBody::ToolCallFinished { tool_call_id: call, settled }], None);
    }

    /// Whether the end of a call's child will come, or has come and wasn't considered yet.
    fn is_outstanding(&self, call: CallId, session: &Session) -> bool {
        let unread = || {
            let mut letters = self.mailbox.iter().filter(|letter| letter.seq > session.cursor);
            letters.any(|letter| letter.id.0 == call.0)
        };
        self.children.get(&call).is_some_and(|child| !child.ended || unread())
    }

    /// Whether the model has read how a call ended.
    pub(crate) fn was_read(&self, session: &Session, call: CallId) -> bool {
        let ends: Vec<&str> =
            self.markers.iter().filter(|(_, of)| *of == Some(call)).map(|(text, _)| text.as_str()).collect();
        let shown = session
            .turns
            .iter()
            .filter(|turn| turn.body.to_json().is_ok_and(|text| ends.iter().any(|end| text.contains(end))));
        let cancelled = self.calls[&call].state == CallState::Cancelled;
        self.calls[&call].read && (cancelled || ends.is_empty() || shown.count() > 0)
    }

    pub(crate) fn agent_message(&mut self) {
        let text = self.marker("mail", None);
        self.accept(vec![MailBody::AgentMessage { text, in_reply_to: None, expects_reply: true }], None);
    }

    fn settled(&mut self, call: CallId, end: End) -> Settled {
        let text = self.marker("end", Some(call));
        match end {
            End::Completed => Settled::Completed { result: Payload::Inline(ToolResult::text(text)) },
            End::Failed => Settled::Failed { message: text },
            End::Cancelled => Settled::Cancelled { message: text },
        }
    }

    /// One of the newest calls, which are the most interesting.
    fn pick(&self, choice: u8) -> Option<CallId> {
        let mut calls: Vec<&TrackedCall> = self.calls.values().collect();
        calls.sort_by_key(|call| std::cmp::Reverse((call.turn, call.index)));
        calls.truncate(8);
        calls.get(usize::from(choice) % calls.len().max(1)).map(|call| call.id)
    }

    pub(crate) fn result(&mut self, choice: u8, end: End) {
        let Some(tool_call_id) = self.pick(choice) else { return };
        // Only what was handed out has a token.
        if !self.shape.is_plain() && self.calls[&tool_call_id].token.is_none() {
            return;
        }
        let settled = self.settled(tool_call_id, end);
        self.accept(vec![MailBody::ContinuationResult { tool_call_id, settled }], None);
    }

    pub(crate) fn stray_result(&mut self) {
        let tool_call_id = CallId(self.fresh());
        let settled = Settled::Failed { message: "stray".into() };
        self.accept(vec![MailBody::ContinuationResult { tool_call_id, settled }], None);
    }

    pub(crate) fn cancel(&mut self, deferred: bool) {
        let open = self.stored.calls.iter().filter(|call| call.state == CallState::Deferred);
        let tool_call_ids: Vec<CallId> = open.map(|call| call.id).collect();
        let mut orders = Vec::new();
        if deferred {
            orders.push(MailBody::Control { message: Control::CancelCalls { tool_call_ids } });
        }
        orders.push(MailBody::Control { message: Control::StopRun });
        self.wanted = false;
        self.accept(orders, Some(Mode::None));
    }

    pub(crate) fn cancel_calls(&mut self, a: u8, b: u8) {
        let tool_call_ids = [a, b].into_iter().filter_map(|choice| self.pick(choice)).collect();
        let message = Control::CancelCalls { tool_call_ids };
        self.accept(vec![MailBody::Control { message }], None);
    }

    pub(crate) fn cancel_attached(&mut self) {
        self.accept(vec![MailBody::Control { message: Control::CancelAllAttached }], None);
    }

    pub(crate) fn pause(&mut self) {
        self.wanted = false;
        self.accept(vec![MailBody::Control { message: Control::Pause }], Some(Mode::None));
    }

    pub(crate) fn resume(&mut self, mode: Mode) {
        self.accept(Vec::new(), Some(mode));
    }

    // The store.

    /// Stores what has happened since the last commit, and checks everything.
    fn commit(&mut self) {
        let mut held = self.held.take().expect("only the holder commits");
        let session = &held.session;
        for event in held.unstored.drain(..) {
            checks::observe(&mut self.calls, &event);
        }
        checks::calls_agree(&self.calls, session);
        assert!(session.turns.len() >= self.stored.turns.len(), "turns are only appended");
        for (turn, stored) in session.turns.iter().zip(&self.stored.turns) {
            assert_eq!(turn.id, stored.0, "turns are only appended");
        }
        for turn in session.turns.iter().skip(self.stored.turns.len()) {
            let text = turn.body.to_json().expect("turns have a JSON form");
            self.stored.turns.push((turn.id, turn.position, turn.at, turn.body.tag(), text));
        }
        assert!(session.cursor >= self.stored.cursor, "the cursor never goes back");
        // A row that a commit says nothing of stays as it is.
        for call in &session.calls {
            match self.stored.calls.iter_mut().find(|stored| stored.id == call.id) {
                Some(stored) => stored.clone_from(call),
                None => self.stored.calls.push(call.clone()),
            }
        }
        // What was told is stored too, and never loaded again.
        self.stored.calls.retain(|call| !call.told_result);
        self.stored.left = session.left.iter().map(|letter| letter.seq).collect();
        self.stored.hold = Some(session.hold);
        self.stored.cursor = session.cursor;
        checks::session_holds(self, session, &self.stored_session());
        held.session.forget_told();
        self.held = Some(held);
    }

    /// The session as a fresh worker loads it.
    pub(crate) fn stored_session(&self) -> Session {
        let mut session = Session::new(SessionId(Uuid::nil()));
        session.hold = self.stored.hold.unwrap_or(Hold::None);
        session.cursor = self.stored.cursor;
        session.calls.clone_from(&self.stored.calls);
        for call in &mut session.calls {
            // It isn't stored: what was stored begins stored.
            call.policy.read_only = false;
        }
        for (id, position, at, tag, text) in &self.stored.turns {
            let body = TurnBody::parse(tag, text).expect("stored turns can be read");
            session.turns.push(Arc::new(Turn { id: *id, position: *position, at: *at, body }));
        }
        for seq in &self.stored.left {
            let letter = self.mailbox.iter().find(|letter| letter.seq == *seq);
            session.left.push(letter.cloned().expect("left letters stay in the mailbox"));
        }
        session
    }
}
