//! What a session does next. Nothing here does it.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::{
    Time,
    agent::Agent,
    content::Blob,
    ids::{CallId, SessionId, Token, TurnId},
    mail::{Control, Envelope, MailBody, Settled},
    model::{ModelAnswer, RequestedCall},
    policy::Disposition,
    say::{result_in, say},
    session::{CallState, Event, Hold, Illegal, Session, Status, Stop, TrackedCall},
    transcript,
    turn::{Answer, LlmCall, LlmTurn, Origin, Shown, Turn, TurnBody, UserTurn},
};

/// How often a call of an idempotent tool is begun again after its worker died.
pub const MAX_RESTARTS: i32 = 3;

/// How many tool calls one answer of a model may ask for; the rest are left out.
pub const MAX_CALLS: usize = 128;

/// How far a run goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// It folds mail and obeys orders; no effect.
    None,
    /// One effect: a model request, or one round of tool calls.
    Step,
    /// Until nothing is left that the engine can do.
    UntilBlocked,
}

impl Mode {
    /// The word for it in JSON and columns.
    pub fn word(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Step => "step",
            Self::UntilBlocked => "until_blocked",
        }
    }

    /// Reads the word back.
    pub fn parse(word: &str) -> Option<Self> {
        [Self::None, Self::Step, Self::UntilBlocked].into_iter().find(|mode| mode.word() == word)
    }
}

/// The run as far as decisions depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// How far it goes.
    pub mode: Mode,
    /// Effects that it has completed.
    pub steps: u32,
}

impl Run {
    fn may_act(self) -> bool {
        match self.mode {
            Mode::None => false,
            Mode::Step => self.steps == 0,
            Mode::UntilBlocked => true,
        }
    }
}

/// What to do once the events of a decision are applied.
#[derive(Debug, Clone, PartialEq)]
pub enum Next {
    /// Ask the model; [`transcript::request`] builds the request.
    AskModel,
    /// Wait for the calls that run; those named here begin now.
    RunCalls(Vec<Start>),
    /// Give the run's slot back while the engine waits elsewhere.
    Await(Wait),
    /// End the run.
    Stop(Status),
}

/// A call to begin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Start {
    /// Which.
    pub call: CallId,
    /// The tool.
    pub name: String,
    /// The arguments as the model wrote them.
    pub arguments: String,
    /// Whether the tool may run again for the same call.
    pub idempotent: bool,
    /// Seconds after which it is ended.
    pub timeout_seconds: Option<u64>,
    /// The turn that asked for it.
    pub turn: TurnId,
}

/// What a parked run waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// The end of a child session.
    Child(SessionId),
    /// The end of an isolated call.
    Isolated(CallId),
    /// A point in time.
    Timer(Time),
}

/// A decision: events to apply, in order, and what to do then.
#[derive(Debug, Clone)]
pub struct Decision {
    /// What happens to the session.
    pub events: Vec<Event>,
    /// Blobs that the events name.
    pub blobs: Vec<Blob>,
    /// What to do then.
    pub next: Next,
}

/// What a decision is made from, besides the session.
pub struct Context<'a> {
    /// The agent.
    pub agent: &'a Agent,
    /// Mail above the session's cursor, in order.
    pub inbox: &'a [Envelope],
    /// The run.
    pub run: Run,
    /// The time.
    pub now: Time,
    /// Where fresh ids come from.
    pub fresh: &'a mut dyn FnMut() -> Uuid,
    /// Where tokens come from.
    pub fresh_token: &'a mut dyn FnMut() -> Uuid,
}

/// Decides what a session does next.
///
/// The session is taken as it stands after its last event; the events that come back are already
/// applied to it, so that callers only have to store them.
///
/// # Errors
/// [`Illegal`] would be a fault of this module; the session must then be dropped.
pub fn decide(session: &mut Session, context: &mut Context<'_>) -> Result<Decision, Illegal> {
    session.forget_told();
    let mut plan = Plan { session, events: Vec::new(), blobs: Vec::new() };
    plan.fold(context)?;
    plan.defer(context)?;
    plan.seal(context)?;
    let next = plan.next(context)?;
    Ok(Decision { events: plan.events, blobs: plan.blobs, next })
}

/// What a fresh holder does with calls that ran under a lease that is gone: a call whose tool is
/// idempotent begins again, up to [`MAX_RESTARTS`] times; any other becomes failed, and the model
/// is told that nobody knows how far it got.
///
/// # Errors
/// As [`decide`].
pub fn recover(session: &mut Session, now: Time) -> Result<Vec<Event>, Illegal> {
    let orphans: Vec<TrackedCall> =
        session.calls.iter().filter(|call| call.state == CallState::Running).cloned().collect();
    let mut events = Vec::new();
    for call in orphans {
        let event = if call.policy.idempotent && call.attempt <= MAX_RESTARTS {
            Event::Returned { call: call.id }
        } else {
            let message = format!(
                "orphaned: the worker that ran this call of {} stopped before it had a result. \
                 The call may have taken effect in part, in full or not at all; it was not run again.",
                call.name
            );
            Event::Finished { call: call.id, settled: Settled::Failed { message }, at: now }
        };
        session.apply(&event)?;
        events.push(event);
    }
    Ok(events)
}

/// The event that a model's answer makes.
pub fn answered(session: &Session, context: &mut Context<'_>, answer: ModelAnswer) -> Event {
    let position = session.length() + 1;
    // A provider accepts its own message back only with an answer to each of its calls.
    let raw = answer.raw.filter(|_| answer.calls.len() <= MAX_CALLS);
    let calls = name_calls(answer.calls, context.fresh);
    let tracked = calls
        .iter()
        .zip(0..)
        .map(|(call, index)| TrackedCall {
            id: call.id,
            provider_id: call.provider_id.clone(),
            name: call.name.clone(),
            arguments: call.arguments.clone(),
            turn: position,
            index,
            policy: context.agent.policy.apply(&call.name),
            state: CallState::Ready,
            attempt: 0,
            token: None,
            expires_at: None,
            created_at: context.now,
            started_at: None,
            settled: None,
            finished_at: None,
            told: None,
            told_result: false,
        })
        .collect();
    let body = TurnBody::Llm(LlmTurn {
        text: answer.text,
        thinking: answer.thinking,
        calls,
        usage: answer.usage,
        flavor: answer.flavor,
        model: context.agent.target.model.clone(),
        stop_reason: answer.stop_reason,
        raw,
    });
    let turn = Turn { id: TurnId((context.fresh)()), position, at: context.now, body };
    Event::Answered { turn: Arc::new(turn), calls: tracked }
}

/// The event that the end of a running call makes: a failure is tried again while its policy
/// grants attempts.
///
/// Only for calls that still run: one that an order ended meanwhile has its end already, and
/// [`Session::apply`] refuses another.
pub fn finished(session: &Session, call: CallId, settled: Settled, now: Time) -> Event {
    let again = session.call(call).is_some_and(|tracked| {
        let granted = i32::try_from(tracked.policy.disposition.retries()).unwrap_or(i32::MAX);
        tracked.policy.idempotent && tracked.attempt <= granted
    });
    match settled {
        Settled::Failed { .. } if again => Event::Returned { call },
        settled => Event::Finished { call, settled, at: now },
    }
}

/// Gives every call an id of the engine's, and a provider's id that no other call of the turn has.
fn name_calls(requested: Vec<RequestedCall>, fresh: &mut dyn FnMut() -> Uuid) -> Vec<LlmCall> {
    let mut taken = std::collections::HashSet::new();
    let name = |call: RequestedCall| {
        let id = CallId(fresh());
        let usable = !call.provider_id.is_empty()
            && !call.provider_id.contains('\0')
            && taken.insert(call.provider_id.clone());
        let provider_id = if usable { call.provider_id } else { format!("call_{}", id.0.simple()) };
        LlmCall { id, provider_id, name: printable(call.name), arguments: printable(call.arguments) }
    };
    requested.into_iter().take(MAX_CALLS).map(name).collect()
}

/// Names and arguments stand in plain text columns, which hold no NUL. In arguments that are JSON a
/// NUL is escaped and stays so.
fn printable(text: String) -> String {
    if text.contains('\0') { text.replace('\0', "\u{FFFD}") } else { text }
}

struct Plan<'a> {
    session: &'a mut Session,
    events: Vec<Event>,
    blobs: Vec<Blob>,
}

impl Plan<'_> {
    fn happen(&mut self, event: Event) -> Result<(), Illegal> {
        self.session.apply(&event)?;
        self.events.push(event);
        Ok(())
    }

    /// Considers the mail above the cursor: orders are obeyed and results settle their calls at
    /// once, in order; what the model has to read waits for the next user turn.
    fn fold(&mut self, context: &Context<'_>) -> Result<(), Illegal> {
        let news: Vec<&Envelope> =
            context.inbox.iter().filter(|letter| letter.seq > self.session.cursor).collect();
        let Some(newest) = news.last() else { return Ok(()) };
        let cursor = newest.seq;
        let mut left = self.session.left.clone();
        for letter in news {
            let waits = match &letter.body {
                MailBody::UserMessage { .. } | MailBody::AgentMessage { .. } => true,
                MailBody::ContinuationResult { tool_call_id, settled }
                | MailBody::ToolCallFinished { tool_call_id, settled } => {
                    self.settle(*tool_call_id, settled, &left, context.now)?
                }
                MailBody::Control { message } => self.obey(message, context.now)?,
            };
            if waits {
                left.push(letter.clone());
            }
        }
        self.happen(Event::Folded { cursor, left })
    }

    /// Settles a call from outside. Returns whether the result has to be told by mail: because the
    /// model was shown a placeholder, or because the call was cancelled before its result came. A
    /// repeat, and a result of a call that this session never had, say nothing.
    fn settle(
        &mut self,
        id: CallId,
        settled: &Settled,
        left: &[Envelope],
        now: Time,
    ) -> Result<bool, Illegal> {
        let beaten = match self.session.call(id) {
            Some(call) if !call.state.is_final() => {
                let told = call.told.is_some();
                self.happen(Event::Finished { call: id, settled: settled.clone(), at: now })?;
                return Ok(told);
            }
            Some(call) => call.state == CallState::Cancelled,
            None => transcript::lacks_result(self.session, id),
        };
        let real = |settled: &Settled| !matches!(settled, Settled::Cancelled { .. });
        let waits = left.iter().filter_map(result_in).any(|(call, other)| call == id && real(other));
        Ok(beaten && real(settled) && !waits)
    }

    /// Obeys an order. Returns whether the model has to hear of it, when it is next spoken to,
    /// because a call ended of which it was shown a placeholder.
    fn obey(&mut self, order: &Control, now: Time) -> Result<bool, Illegal> {
        match order {
            Control::Pause => self.happen(Event::StopOrdered(Stop::Paused)).map(|()| false),
            Control::Resume => self.happen(Event::Resumed).map(|()| false),
            Control::StopRun => {
                self.happen(Event::StopOrdered(Stop::Cancelled))?;
                self.cancel_open(now, |call| call.state != CallState::Deferred)
            }
            Control::CancelAllAttached => self.cancel_open(now, |call| call.state != CallState::Deferred),
            Control::CancelDeferred => self.cancel_open(now, |call| call.state == CallState::Deferred),
            Control::CancelCalls { tool_call_ids } => {
                self.cancel_open(now, |call| tool_call_ids.contains(&call.id))
            }
        }
    }

    fn cancel_open(&mut self, now: Time, which: impl Fn(&TrackedCall) -> bool) -> Result<bool, Illegal> {
        let open = self.session.calls.iter().filter(|call| !call.state.is_final() && which(call));
        let told = open.clone().any(|call| call.told.is_some());
        let ids: Vec<(CallId, String, bool)> =
            open.map(|call| (call.id, call.name.clone(), call.state == CallState::Running)).collect();
        for (call, name, began) in ids {
            let message = if began {
                format!(
                    "cancelled: the call of {name} was stopped by order; it may have taken effect in part."
                )
            } else {
                format!("cancelled: the call of {name} was ended by order before it had a result.")
            };
            self.happen(Event::Finished { call, settled: Settled::Cancelled { message }, at: now })?;
        }
        Ok(told)
    }

    /// Hands the calls that belong outside to the outside. That is no effect: the token exists
    /// once the commit does.
    fn defer(&mut self, context: &mut Context<'_>) -> Result<(), Illegal> {
        let ready = self.session.calls.iter().filter(|call| call.state == CallState::Ready);
        let outside: Vec<(CallId, Option<u64>)> = ready
            .filter(|call| matches!(call.policy.disposition.base(), Disposition::Defer { .. }))
            .map(|call| (call.id, call.policy.deadline_seconds))
            .collect();
        for (call, deadline) in outside {
            let expires_at = deadline
                .and_then(|seconds| i64::try_from(seconds).ok())
                .and_then(chrono::TimeDelta::try_seconds)
                .and_then(|delta| context.now.checked_add_signed(delta));
            let token = Token((context.fresh_token)());
            self.happen(Event::Deferred { call, token, expires_at, at: context.now })?;
        }
        Ok(())
    }

    /// Seals the next user turn when there is something to show: every call of the round has ended
    /// (or may stay open, because somebody spoke), and none is about to run.
    fn seal(&mut self, context: &mut Context<'_>) -> Result<(), Illegal> {
        let session = &*self.session;
        if session.busy() {
            return Ok(());
        }
        let round_over = {
            let mut round = session.round().peekable();
            round.peek().is_some() && round.all(|call| call.state.is_final())
        };
        // Orders ride along with what is told; they are no reason to speak.
        let spoken = session.left.iter().any(|letter| !matches!(letter.body, MailBody::Control { .. }));
        if !round_over && !spoken {
            return Ok(());
        }
        let mut round: Vec<&TrackedCall> = session.round().collect();
        round.sort_by_key(|call| call.index);
        let answers = round.into_iter().map(answer_for).collect();
        let said = say(session);
        let mail = session.left.iter().map(Origin::from).collect();
        let shown = Offer::of(context.agent);
        let user = UserTurn { system: shown.system.digest, tools: shown.tools.digest, answers, said, mail };
        let turn = Turn {
            id: TurnId((context.fresh)()),
            position: session.length() + 1,
            at: context.now,
            body: TurnBody::User(user),
        };
        let (cursor, told) = (session.cursor, !session.left.is_empty());
        self.blobs.extend([shown.system, shown.tools]);
        self.happen(Event::Sealed(Arc::new(turn)))?;
        if told {
            self.happen(Event::Folded { cursor, left: Vec::new() })?;
        }
        Ok(())
    }

    fn next(&mut self, context: &Context<'_>) -> Result<Next, Illegal> {
        // An order to stop always leaves a hold, and unlike the order the hold is stored: whoever
        // takes the run over after a crash must not go on either.
        let may_act = context.run.may_act() && self.session.hold == Hold::None;
        let starts = if may_act { self.start(context)? } else { Vec::new() };
        let running = self.session.calls.iter().any(|call| call.state == CallState::Running);
        // A pause, or the end of a step, lets calls that already run come home.
        if running {
            return Ok(Next::RunCalls(starts));
        }
        let owed = matches!(self.session.head().map(|turn| &turn.body), Some(TurnBody::User(_)));
        if may_act && owed {
            return Ok(Next::AskModel);
        }
        let work_left = owed || self.session.busy();
        if context.run.mode == Mode::Step && work_left && self.session.hold == Hold::None {
            self.happen(Event::Held)?;
        }
        Ok(Next::Stop(self.session.implied_status()))
    }

    fn start(&mut self, context: &Context<'_>) -> Result<Vec<Start>, Illegal> {
        let running = self.session.calls.iter().filter(|call| call.state == CallState::Running).count();
        let free = context.agent.max_concurrency.saturating_sub(running);
        let session = &*self.session;
        let turn_id = |position: i64| {
            let turn = session.turns.iter().rev().find(|turn| turn.position == position);
            turn.map_or(TurnId(Uuid::nil()), |turn| turn.id)
        };
        let ready = session.calls.iter().filter(|call| call.state == CallState::Ready);
        let starts: Vec<Start> = ready
            .take(free)
            .map(|call| Start {
                call: call.id,
                name: call.name.clone(),
                arguments: call.arguments.clone(),
                idempotent: call.policy.idempotent,
                timeout_seconds: call
                    .policy
                    .disposition
                    .timeout_seconds()
                    .or(context.agent.call_timeout_seconds),
                turn: turn_id(call.turn),
            })
            .collect();
        for start in &starts {
            self.happen(Event::Started { call: start.call, at: context.now })?;
        }
        Ok(starts)
    }
}

/// The prompt and the tools of an agent, as blobs that user turns name.
pub struct Offer {
    /// A JSON array of texts.
    pub system: Blob,
    /// A JSON array of [`crate::tool::ToolSpec`].
    pub tools: Blob,
}

impl Offer {
    /// What an agent offers now.
    pub fn of(agent: &Agent) -> Self {
        let json = |result: Result<String, serde_json::Error>| result.unwrap_or_else(|_| "[]".to_owned());
        Self {
            system: Blob::new(json(serde_json::to_string(&agent.system_prompt))),
            tools: Blob::new(json(serde_json::to_string(&agent.tools))),
        }
    }
}

fn answer_for(call: &TrackedCall) -> Answer {
    let shown = match &call.settled {
        Some(settled) => Shown::Settled(settled.clone()),
        None => Shown::Placeholder(transcript::placeholder(call)),
    };
    Answer { call: call.id, provider_id: call.provider_id.clone(), name: call.name.clone(), shown }
}
