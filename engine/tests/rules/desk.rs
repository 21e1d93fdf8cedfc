//! A session on a desk, with everything in reach that a decision needs.

use std::{cell::Cell, collections::HashMap, sync::Arc};

use chrono::{DateTime, TimeDelta};
use holdfast_engine::{
    Time,
    agent::{Agent, AgentConfig},
    content::{Digest, Payload, Query, ToolResult},
    decide::{self, Context, Decision, Mode, Next, Run},
    ids::{CallId, MailId, SessionId},
    mail::{Control, Envelope, MailBody, Priority, Sender, Settled},
    model::{Flavor, ModelAnswer, ModelRequest, RequestedCall},
    session::{CallState, Event, Session},
    transcript,
    turn::{Said, Shown, TurnBody, UserTurn},
};
use uuid::Uuid;

const AGENT: &str = r#"{
    "slug": "desk", "flavor": "OpenAI", "modelUrl": "http://127.0.0.1", "modelName": "m",
    "systemPrompt": ["be brief"], "maxConcurrency": 2, "asyncCallTimeoutSeconds": 9,
    "toolCallPolicyConfig": {"default": {"tag": "runSync"}, "rules": [
        {"tool": "again", "idempotent": true, "disposition": {"tag": "decorate", "decorators":
            [{"tag": "withRetries", "contents": 2}, {"tag": "withTimeout", "contents": 5}],
            "inner": {"tag": "runSync"}}},
        {"tool": "ask", "disposition": {"tag": "defer", "reason": "a person decides"}},
        {"tool": "sign", "disposition": {"tag": "defer"}, "deadlineSeconds": 60}]}}"#;

/// One session, its mailbox and its run.
pub(crate) struct Desk {
    pub(crate) agent: Agent,
    pub(crate) session: Session,
    pub(crate) run: Run,
    inbox: Vec<Envelope>,
    blobs: HashMap<Digest, Arc<str>>,
    letters: i64,
    ids: Cell<u128>,
    clock: Cell<i64>,
}

impl Desk {
    /// An empty session in a run until it is blocked.
    pub(crate) fn new() -> Self {
        Self::of(AGENT)
    }

    /// As [`Self::new`], of another agent.
    pub(crate) fn of(agent: &str) -> Self {
        let config = AgentConfig::parse(agent).expect("a valid agent");
        Self {
            agent: config.prepare("r1".into(), Vec::new()).expect("a usable agent"),
            session: Session::new(SessionId(Uuid::nil())),
            run: Run { mode: Mode::UntilBlocked, steps: 0, asking: false },
            inbox: Vec::new(),
            blobs: HashMap::new(),
            letters: 0,
            ids: Cell::new(0),
            clock: Cell::new(0),
        }
    }

    /// A session whose model was asked something and answered with calls of these tools.
    pub(crate) fn with_calls(tools: &[&str]) -> Self {
        let mut desk = Self::new();
        desk.says("hello");
        assert_eq!(desk.decide().next, Next::AskModel);
        desk.answers(tools);
        desk
    }

    /// A session with one call of `ask` that the model was shown as open, and has commented on.
    pub(crate) fn with_placeholder() -> Self {
        let mut desk = Self::with_calls(&["ask"]);
        desk.decide();
        desk.says("meanwhile");
        assert_eq!(desk.decide().next, Next::AskModel);
        desk.answers(&[]);
        desk
    }

    pub(crate) fn fresh(&self) -> Uuid {
        self.ids.set(self.ids.get() + 1);
        Uuid::from_u128(self.ids.get().wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835))
    }

    pub(crate) fn now(&self) -> Time {
        DateTime::UNIX_EPOCH + TimeDelta::seconds(self.clock.get())
    }

    pub(crate) fn post(&mut self, body: MailBody) -> MailId {
        self.letters += 1;
        let id = MailId(self.fresh());
        let from = match &body {
            MailBody::ContinuationResult { tool_call_id, .. } => {
                Sender::ToolCall { tool_call_id: *tool_call_id }
            }
            _ => Sender::User { owner: None },
        };
        let (seq, sent_at) = (self.letters, self.now());
        self.inbox.push(Envelope { id, seq, from, priority: Priority::Normal, hops: 0, sent_at, body });
        id
    }

    pub(crate) fn says(&mut self, text: &str) -> MailId {
        let query = Payload::Inline(Query { text: text.into(), media: Vec::new() });
        self.post(MailBody::UserMessage { query })
    }

    /// A person says something that doesn't wait.
    pub(crate) fn interrupts(&mut self, text: &str) {
        self.says(text);
        if let Some(letter) = self.inbox.last_mut() {
            letter.priority = Priority::High;
        }
    }

    /// A letter of another session.
    pub(crate) fn writes(&mut self, text: &str, hops: u32) -> MailId {
        let body = MailBody::AgentMessage { text: text.into(), in_reply_to: None, expects_reply: false };
        let id = self.post(body);
        if let Some(letter) = self.inbox.last_mut() {
            letter.hops = hops;
            letter.from =
                Sender::Session { session_id: SessionId(Uuid::from_u128(7)), agent: Some("peer".into()) };
        }
        id
    }

    /// The newest letter is read twice.
    pub(crate) fn repeats(&mut self) {
        self.inbox.extend(self.inbox.last().cloned());
    }

    /// Says who sent the newest letter, and how often it was passed on.
    pub(crate) fn sent_by(&mut self, from: Sender, hops: u32) {
        if let Some(letter) = self.inbox.last_mut() {
            (letter.from, letter.hops) = (from, hops);
        }
    }

    /// Time goes by.
    pub(crate) fn pass(&self, seconds: i64) {
        self.clock.set(self.clock.get() + seconds);
    }

    pub(crate) fn order(&mut self, message: Control) -> MailId {
        self.post(MailBody::Control { message })
    }

    pub(crate) fn result(&mut self, call: CallId, text: &str) -> MailId {
        self.post(MailBody::ContinuationResult { tool_call_id: call, settled: completed(text) })
    }

    /// Decides with the mail that was posted since the last decision, which is stored by now.
    pub(crate) fn decide(&mut self) -> Decision {
        self.session.forget_told();
        self.decide_unstored()
    }

    /// As [`Self::decide`], where nothing was stored meanwhile.
    pub(crate) fn decide_unstored(&mut self) -> Decision {
        self.clock.set(self.clock.get() + 1);
        let inbox = std::mem::take(&mut self.inbox);
        let mut session = self.session.clone();
        let decision = self.context(&inbox, |context| decide::decide(&mut session, context));
        self.session = session;
        let decision = decision.expect("decisions are legal");
        for blob in &decision.blobs {
            self.blobs.insert(blob.digest, Arc::clone(&blob.text));
        }
        decision
    }

    fn context<T>(&self, inbox: &[Envelope], then: impl FnOnce(&mut Context<'_>) -> T) -> T {
        let (mut fresh, mut fresh_token) = (|| self.fresh(), || self.fresh());
        then(&mut Context {
            agent: &self.agent,
            inbox,
            run: self.run,
            now: self.now(),
            fresh: &mut fresh,
            fresh_token: &mut fresh_token,
            progress: &|_| Vec::new(),
        })
    }

    /// The model answers; every call has a provider's id of its own.
    pub(crate) fn answers(&mut self, tools: &[&str]) -> Vec<CallId> {
        let position = self.session.length() + 1;
        let calls = tools.iter().zip(0..).map(|(tool, index)| (format!("p{position}_{index}"), *tool));
        let calls: Vec<(String, &str)> = calls.collect();
        let calls: Vec<(&str, &str)> = calls.iter().map(|(id, tool)| (id.as_str(), *tool)).collect();
        self.answers_under(&calls)
    }

    /// The model answers with calls of (provider's id, tool).
    pub(crate) fn answers_under(&mut self, calls: &[(&str, &str)]) -> Vec<CallId> {
        let calls: Vec<(&str, &str, String)> =
            calls.iter().map(|(id, tool)| (*id, *tool, "{}".to_owned())).collect();
        self.answers_with(&calls)
    }

    /// The model answers with calls of (provider's id, tool, arguments).
    pub(crate) fn answers_with(&mut self, calls: &[(&str, &str, String)]) -> Vec<CallId> {
        let raw = serde_json::value::RawValue::from_string(r#"{"role":"assistant"}"#.into());
        let answer = ModelAnswer {
            text: Some("well".into()),
            thinking: None,
            calls: calls
                .iter()
                .map(|(id, tool, arguments)| RequestedCall {
                    provider_id: (*id).into(),
                    name: (*tool).into(),
                    arguments: arguments.clone(),
                })
                .collect(),
            usage: None,
            flavor: Flavor::OpenAI,
            raw: Some(raw.expect("JSON")),
            stop_reason: None,
        };
        let event = self.context(&[], |context| decide::answered(&self.session, context, answer));
        self.session.apply(&event).expect("an answer is legal");
        self.run.steps += 1;
        self.run.asking = false;
        self.session.round().map(|call| call.id).collect()
    }

    /// A running call ends in the worker.
    pub(crate) fn ends(&mut self, call: CallId, settled: Settled) -> Event {
        let event = decide::finished(&self.session, call, settled, self.now());
        self.session.apply(&event).expect("a running call may end");
        if !self.session.busy() {
            self.run.steps += 1;
        }
        event
    }

    /// The ids of the newest turn's calls, in order.
    pub(crate) fn calls(&self) -> Vec<CallId> {
        self.session.round().map(|call| call.id).collect()
    }

    pub(crate) fn state(&self, call: CallId) -> CallState {
        self.session.call(call).expect("tracked").state
    }

    /// The newest user turn.
    pub(crate) fn user(&self) -> &UserTurn {
        let newest = self.session.turns.iter().rev().find_map(|turn| match &turn.body {
            TurnBody::User(user) => Some(user),
            TurnBody::Llm(_) => None,
        });
        newest.expect("the model was shown something")
    }

    /// What the newest user turn shows of the calls, in order.
    pub(crate) fn shown(&self) -> Vec<String> {
        let text = |shown: &Shown| match shown {
            Shown::Settled(Settled::Completed { result: Payload::Inline(result) }) => result.as_text(),
            Shown::Settled(Settled::Completed { .. }) => "blob".into(),
            Shown::Settled(Settled::Failed { message } | Settled::Cancelled { message }) => message.clone(),
            Shown::Placeholder(text) => text.clone(),
        };
        self.user().answers.iter().map(|answer| text(&answer.shown)).collect()
    }

    /// What the newest user turn says besides.
    pub(crate) fn said(&self) -> Vec<String> {
        let text = |said: &Said| match said {
            Said::Query(Payload::Inline(query)) => query.text.clone(),
            Said::Late { header, result: Payload::Inline(result) } => {
                format!("{header}\n{}", result.as_text())
            }
            Said::Text(text) => text.clone(),
            Said::Query(_) | Said::Late { .. } => "blob".into(),
        };
        self.user().said.iter().map(text).collect()
    }

    pub(crate) fn request(&self) -> ModelRequest {
        transcript::request(&self.session, None, &self.blobs).expect("blobs are at hand")
    }

    /// The session as a worker loads it that didn't see how it came about.
    pub(crate) fn reload(&mut self) {
        self.session.stop = None;
        self.run.steps = 0;
    }
}

pub(crate) fn completed(text: &str) -> Settled {
    Settled::Completed { result: Payload::Inline(ToolResult::text(text)) }
}

pub(crate) fn failed(text: &str) -> Settled {
    Settled::Failed { message: text.into() }
}

/// The calls that begin now.
pub(crate) fn started(next: &Next) -> Vec<CallId> {
    match next {
        Next::RunCalls(starts) => starts.iter().map(|start| start.call).collect(),
        other => panic!("no calls run: {other:?}"),
    }
}

/// The last part of an id, by which headers name letters.
pub(crate) fn short(id: MailId) -> String {
    id.0.simple().to_string()[24..].to_owned()
}
