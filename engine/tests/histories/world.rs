//! A mailbox, a store and a worker, as small as they can be.

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

/// How often an idempotent call of [`AGENT`] may begin: each retry and each restart once, and once.
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
    /// How much mail there was and how far the run went when the worker last looked. What comes
    /// between looking and committing is news to the commit.
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
    fn accept(&mut self, mut bodies: Vec<MailBody>, run: Option<Mode>) {
        let active = self.row.is_some_and(|row| row.mode != Mode::None);
        let held = self.stored.hold.is_some_and(|hold| hold != Hold::None);
        let ordered = self
            .mailbox
            .iter()
            .any(|letter| letter.seq > self.stored.cursor && matches!(letter.body, MailBody::Control { .. }));
        if run.is_some_and(|mode| mode != Mode::None) && (held || active || ordered) {
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

    // The worker.

    /// One thing that a worker does.
    pub(crate) fn work(&mut self, seed: u64) {
        let Some(row) = self.row else { return };
        let mut dice = Dice::new(seed);
        if self.held.is_none() {
            self.claim(&mut dice);
        }
        let held = self.held.as_ref().expect("claimed");
        // Mail may end what the worker waits for; else it is seen when that is over.
        let news = held.session.cursor < row.wake_seq && dice.below(3) == 0;
        let running = held.running.clone();
        if held.looked.is_some() {
            return self.decide(&mut dice);
        }
        if held.asking && !news {
            self.model_answers(&mut dice);
        } else if !running.is_empty() && !news {
            let one = dice.below(running.len() as u64);
            self.call_ends(running[usize::try_from(one).expect("small")], &mut dice);
        }
        let held = self.held.as_mut().expect("still held");
        held.looked = Some((self.mailbox.len(), row.mode));
        if dice.below(3) > 0 {
            self.decide(&mut dice);
        }
    }

    fn claim(&mut self, dice: &mut Dice) {
        let mut session = match self.kept.take() {
            Some(session) if dice.below(2) == 0 => session,
            _ => self.stored_session(),
        };
        let now = self.tick();
        let events = decide::recover(&mut session, now).expect("recovery is legal");
        assert!(session.calls.iter().all(|call| call.state != CallState::Running));
        self.held = Some(Held { session, steps: 0, asking: false, running: Vec::new(), looked: None });
        self.commit(&events);
    }

    fn model_answers(&mut self, dice: &mut Dice) {
        let count = if self.calm { 0 } else { [0, 0, 1, 1, 2, 3, 4, 5][usize::from(dice.byte() % 8)] };
        let mut request = || RequestedCall {
            provider_id: match dice.below(8) {
                0 => String::new(),
                1 => checks::REPEATED.to_owned(),
                _ => format!("call_{}", self.fresh().simple()),
            },
            name: TOOLS[usize::from(dice.byte()) % TOOLS.len()].to_owned(),
            arguments: "{}".to_owned(),
        };
        let answer = ModelAnswer {
            text: Some("so be it".to_owned()),
            thinking: None,
            calls: (0..count).map(|_| request()).collect(),
            usage: None,
            flavor: Flavor::OpenAI,
            raw: None,
            stop_reason: None,
        };
        let now = self.tick();
        let mut held = self.held.take().expect("the holder asked");
        let run = Run { mode: Mode::UntilBlocked, steps: held.steps };
        let event =
            self.in_context(run, &[], now, |context| decide::answered(&held.session, context, answer));
        held.session.apply(&event).expect("an answer to the newest user turn is legal");
        held.asking = false;
        held.steps += 1;
        self.held = Some(held);
        self.commit(&[event]);
    }

    fn call_ends(&mut self, call: CallId, dice: &mut Dice) {
        let end = if dice.below(3) == 0 { End::Failed } else { End::Completed };
        let settled = self.settled(call, end);
        let now = self.tick();
        let held = self.held.as_mut().expect("the holder runs calls");
        let event = decide::finished(&held.session, call, settled, now);
        held.session.apply(&event).expect("a running call may end");
        held.running.retain(|running| *running != call);
        if !held.session.busy() {
            held.steps += 1;
        }
        self.commit(&[event]);
    }

    fn in_context<T>(
        &self,
        run: Run,
        inbox: &[Envelope],
        now: Time,
        then: impl FnOnce(&mut Context<'_>) -> T,
    ) -> T {
        let (mut fresh, mut fresh_token) = (|| self.fresh(), || self.fresh());
        then(&mut Context {
            agent: &self.agent,
            inbox,
            run,
            now,
            fresh: &mut fresh,
            fresh_token: &mut fresh_token,
        })
    }

    /// Decides, and checks that a worker that had loaded the session just now would decide the same.
    fn decision(&mut self, session: &mut Session, run: Run, mail: usize, dice: &mut Dice) -> Decision {
        let there = self.mailbox.iter().take(mail);
        let mut inbox: Vec<Envelope> = there.filter(|letter| letter.seq > session.cursor).cloned().collect();
        if dice.below(4) == 0 {
            inbox.truncate(1 + usize::from(dice.byte() % 4));
        }
        let now = self.tick();
        let ids = self.ids.get();
        let mut loaded = self.stored_session();
        let twin = self.in_context(run, &inbox, now, |context| decide::decide(&mut loaded, context));
        self.ids.set(ids);
        let decision = self.in_context(run, &inbox, now, |context| decide::decide(session, context));
        let (twin, decision) = (twin.expect("decisions are legal"), decision.expect("decisions are legal"));
        assert_eq!(format!("{decision:?}"), format!("{twin:?}"), "memory makes no difference");
        decision
    }

    fn decide(&mut self, dice: &mut Dice) {
        let mut held = self.held.take().expect("only the holder decides");
        let (mail, mode) = held.looked.take().expect("looked before it decides");
        let run = Run { mode, steps: held.steps };
        let decision = self.decision(&mut held.session, run, mail, dice);
        for Blob { digest, text } in &decision.blobs {
            self.blobs.insert(*digest, Arc::from(text.as_str()));
        }
        held.asking = decision.next == Next::AskModel;
        held.running
            .retain(|call| held.session.call(*call).is_some_and(|call| call.state == CallState::Running));
        self.held = Some(held);
        self.commit(&decision.events);
        match decision.next {
            Next::AskModel => checks::may_ask(self.session()),
            Next::RunCalls(starts) => {
                for start in &starts {
                    *self.begun.entry(start.call).or_default() += 1;
                }
                let held = self.held.as_mut().expect("just put back");
                held.running.extend(starts.iter().map(|start| start.call));
                assert!((1..=2).contains(&held.running.len()), "between one and maxConcurrency calls run");
            }
            Next::Await(_) => panic!("nothing of this agent waits elsewhere"),
            Next::Stop(status) => self.stop(run, status),
        }
    }

    fn session(&self) -> &Session {
        &self.held.as_ref().expect("held").session
    }

    fn stop(&mut self, run: Run, status: Status) {
        let session = self.session();
        assert_eq!(status, session.implied_status());
        if run.mode == Mode::UntilBlocked && session.hold == Hold::None {
            assert!(!session.busy(), "a run doesn't leave calls behind that it may run");
        }
        let (mut again, now, ids) = (session.clone(), session.cursor, self.ids.get());
        let now = DateTime::UNIX_EPOCH + TimeDelta::seconds(now);
        let repeat = self.in_context(run, &[], now, |context| decide::decide(&mut again, context));
        let repeat = repeat.expect("decisions are legal");
        self.ids.set(ids);
        assert!(
            repeat.events.is_empty() && repeat.next == Next::Stop(status),
            "a stop is a fixed point: {repeat:?}"
        );
        if self.row.is_some_and(|row| row.wake_seq <= session.cursor) {
            if self.wanted {
                let blocked = matches!(status, Status::Idle | Status::WaitingExternal);
                assert!(
                    session.hold == Hold::None && blocked,
                    "a run that was asked for was swallowed: {status:?}"
                );
            }
            self.wanted = false;
            self.row = None;
            self.kept = self.held.take().map(|held| held.session);
        }
    }

    pub(crate) fn die(&mut self) {
        self.deaths += u32::from(self.held.is_some());
        (self.held, self.kept) = (None, None);
    }

    pub(crate) fn die_deciding(&mut self) {
        if let (Some(row), Some(mut held)) = (self.row, self.held.take()) {
            let run = Run { mode: row.mode, steps: held.steps };
            self.decision(&mut held.session, run, self.mailbox.len(), &mut Dice::new(0));
            self.deaths += 1;
        }
        self.kept = None;
    }

    /// Lifts every hold, completes every deferred call and lets the model say only goodbye.
    pub(crate) fn bring_to_rest(&mut self) {
        self.calm = true;
        self.message(Mode::UntilBlocked);
        let mut dice = Dice::new(1);
        for _ in 0..2_000 {
            if self.row.is_some() {
                self.work(dice.next());
                continue;
            }
            let open = self.calls.values().filter(|call| call.state == CallState::Deferred);
            let open: Vec<CallId> = open.map(|call| call.id).collect();
            if open.is_empty() {
                return;
            }
            for tool_call_id in open {
                let settled = self.settled(tool_call_id, End::Completed);
                self.accept(vec![MailBody::ContinuationResult { tool_call_id, settled }], None);
            }
        }
        panic!("the session doesn't come to rest");
    }
}
