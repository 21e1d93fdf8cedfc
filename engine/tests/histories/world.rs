//! A mailbox and a store, as small as they can be; the worker is in [`worker`].

mod worker;

use std::{
    cell::Cell,
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use chrono::{DateTime, TimeDelta};
use holdfast_engine::{
    Time,
    agent::{Agent, AgentConfig},
    content::{Blob, Digest, Payload, Query, ToolResult},
    decide::{self, Context, Decision, Mode, Next, Run},
    ids::{CallId, MailId, SessionId, TurnId},
    mail::{Control, Envelope, MailBody, Priority, Sender, Settled},
    model::{Flavor, ModelAnswer, RequestedCall},
    session::{CallState, Event, Hold, Session, Status, TrackedCall},
    tool::ToolSpec,
    turn::{Turn, TurnBody},
};
use uuid::Uuid;

use crate::{checks, dice::Dice};

const AGENT: &str = r#"{
    "slug": "sim", "flavor": "OpenAI", "modelUrl": "http://127.0.0.1", "modelName": "m",
    "systemPrompt": ["be brief"], "maxConcurrency": 2, "asyncCallTimeoutSeconds": 9,
    "toolCallPolicyConfig": {"default": {"tag": "runSync"}, "rules": [
        {"tool": "again", "idempotent": true, "disposition": {"tag": "decorate",
            "decorators": [{"tag": "withRetries", "contents": 2}], "inner": {"tag": "runSync"}}},
        {"tool": "ask_*", "disposition": {"tag": "defer", "reason": "a person decides"}},
        {"tool": "sign", "disposition": {"tag": "defer"}, "deadlineSeconds": 60}]}}"#;

/// How often an idempotent call of [`AGENT`] may begin: retries and restarts count the same attempts,
/// and more restarts are granted than retries.
pub(crate) const MOST_ATTEMPTS: i32 = 1 + decide::MAX_RESTARTS;

const TOOLS: [&str; 4] = ["run", "again", "ask_person", "sign"];

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
}

/// What a worker holds in memory while it has the run.
struct Held {
    session: Session,
    steps: u32,
    asking: bool,
    /// Calls that run, as the worker knows it.
    running: Vec<CallId>,
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

/// One session's whole surroundings.
pub(crate) struct World {
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
    pub(crate) begun: BTreeMap<CallId, u32>,
    /// What user messages and results say, which is unique, and what it is the end of.
    pub(crate) markers: Vec<(String, Option<CallId>)>,
    pub(crate) deaths: u32,
    ids: Cell<u128>,
    clock: i64,
    calm: bool,
    /// A person asked for a run until it is blocked, and nobody ordered otherwise since.
    wanted: bool,
}

impl World {
    pub(crate) fn new() -> Self {
        let spec = ToolSpec {
            name: "run".into(),
            original: "run".into(),
            description: "runs".into(),
            parameters: serde_json::json!({"type": "object"}),
        };
        let config = AgentConfig::parse(AGENT).expect("the simulator's agent is valid");
        Self {
            agent: config.prepare("r1".into(), vec![spec]).expect("the simulator's agent is usable"),
            mailbox: Vec::new(),
            stored: Stored::default(),
            row: None,
            held: None,
            kept: None,
            blobs: HashMap::new(),
            calls: BTreeMap::new(),
            begun: BTreeMap::new(),
            markers: Vec::new(),
            deaths: 0,
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
        DateTime::UNIX_EPOCH + TimeDelta::seconds(self.clock)
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
    fn accept(&mut self, mut bodies: Vec<MailBody>, run: Option<Mode>) {
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
                _ => Sender::System { source: "sim".into() },
            };
            let (id, sent_at) = (MailId(self.fresh()), self.tick());
            self.mailbox.push(Envelope { id, seq, from, priority: Priority::Normal, hops: 0, sent_at, body });
        }
        let mode = match run {
            Some(mode) => mode,
            None if active || held => Mode::None,
            None => Mode::UntilBlocked,
        };
        self.wanted |= mode == Mode::UntilBlocked && run.is_some();
        let wake_seq = i64::try_from(self.mailbox.len()).expect("few letters");
        let before = self.row.map_or(Mode::None, |row| row.mode);
        self.row = Some(Row { mode: before.max(mode), wake_seq });
    }

    pub(crate) fn message(&mut self, mode: Mode) {
        let text = self.marker("message", None);
        let query = Payload::Inline(Query { text, media: Vec::new() });
        self.accept(vec![MailBody::UserMessage { query }], Some(mode));
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

    /// Stores what a step changed, and checks everything.
    fn commit(&mut self, events: &[Event]) {
        let held = self.held.take().expect("only the holder commits");
        let session = &held.session;
        for event in events {
            checks::observe(&mut self.calls, event);
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
        // What was told is stored too, and never loaded again.
        let untold = session.calls.iter().filter(|call| !call.told_result);
        self.stored.calls = untold.cloned().collect();
        self.stored.left = session.left.iter().map(|letter| letter.seq).collect();
        self.stored.hold = Some(session.hold);
        self.stored.cursor = session.cursor;
        checks::session_holds(self, session, &self.stored_session());
        self.held = Some(held);
    }

    /// The session as a fresh worker loads it.
    pub(crate) fn stored_session(&self) -> Session {
        let mut session = Session::new(SessionId(Uuid::nil()));
        session.hold = self.stored.hold.unwrap_or(Hold::None);
        session.cursor = self.stored.cursor;
        session.calls.clone_from(&self.stored.calls);
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
