//! What a session does next. Nothing here does it.

mod fold;
mod perform;
mod seal;
mod status;

pub use perform::{by_person, hops, too_many_hops};

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use uuid::Uuid;

use crate::{
    Time,
    agent::Agent,
    content::{Blob, ToolResult},
    ids::{CallId, MailId, SessionId, Token, TurnId},
    mail::{Envelope, MailBody, Settled},
    model::{ModelAnswer, RequestedCall},
    policy::Disposition,
    session::{CallState, Event, Hold, Illegal, Session, Status, Stop, Terms, TrackedCall},
    turn::{LlmCall, LlmTurn, Turn, TurnBody},
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
    /// Whether the model is being asked now.
    pub asking: bool,
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
    /// Ask the model, or wait for its answer if it is being asked;
    /// [`transcript::request`](crate::transcript::request) builds the request.
    AskModel,
    /// Begin these calls and decide again; without any, wait for those that run. If none runs either, there are some
    /// that another worker is to begin.
    RunCalls(Vec<Start>),
    /// Give the run's slot back: what is open waits for child sessions, mail or times. The word says for what.
    Park(&'static str),
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
    /// Whether the call has no effect but its result: it may begin before it is stored that it does. If it is never
    /// stored, nothing has happened.
    pub only_reads: bool,
    /// Seconds after which it is ended.
    pub timeout_seconds: Option<u64>,
    /// How it is handled, and what is wrapped around it.
    pub disposition: Disposition,
    /// Which attempt this is; the first is 1.
    pub attempt: i32,
    /// The turn that asked for it.
    pub turn: TurnId,
}

/// A session to start as a child of the one that is decided about.
#[derive(Debug, Clone, PartialEq)]
pub struct Spawn {
    /// Its id: that of the call that starts it.
    pub id: SessionId,
    /// Its agent.
    pub agent: String,
    /// The call that its end answers.
    pub call: Option<CallId>,
    /// The id of its first letter.
    pub letter: MailId,
    /// Its first letter.
    pub body: MailBody,
    /// How many sessions have passed that letter on.
    pub hops: u32,
}

/// A decision: events to apply, in order, and what to do then.
#[derive(Debug, Clone)]
pub struct Decision {
    /// What happens to the session.
    pub events: Vec<Event>,
    /// Blobs that the events and the sessions to start name.
    pub blobs: Vec<Blob>,
    /// Sessions that start with the commit of the events.
    pub spawns: Vec<Spawn>,
    /// Child sessions that nobody waits for any more: they are to be stopped.
    pub dismissed: Vec<SessionId>,
    /// What to do then.
    pub next: Next,
    /// When to decide again at the latest.
    pub until: Option<Time>,
}

/// Whether calls may begin although what has happened isn't stored yet: all of them only read, and the model is shown
/// nothing by what has happened. If it is never stored, the model is asked again and they are other calls.
pub fn may_begin_unstored(starts: &[Start], happened: &[Event]) -> bool {
    let shown = happened.iter().any(|event| matches!(event, Event::Sealed(_)));
    !shown && starts.iter().all(|start| start.only_reads)
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
    /// What calls that run here have said of their progress, oldest first.
    pub progress: &'a dyn Fn(CallId) -> Vec<Value>,
}

impl Context<'_> {
    /// Whether something new may be begun.
    fn may_act(&self, session: &Session) -> bool {
        // An order to stop always leaves a hold, and unlike the order the hold is stored: whoever
        // takes the run over after a crash must not go on either.
        self.run.may_act() && session.hold == Hold::None
    }

    /// Whether the model is being asked, and its answer is still wanted.
    fn asking(&self, session: &Session) -> bool {
        self.run.asking && session.wants_answer()
    }
}

/// Decides what a session does next.
///
/// The session is taken as it stands after its last event; the events that come back are already
/// applied to it, so that callers only have to store them, and to [forget](Session::forget_told) then what was told.
///
/// # Errors
/// [`Illegal`] would be a fault of this module; the session must then be dropped.
pub fn decide(session: &mut Session, context: &mut Context<'_>) -> Result<Decision, Illegal> {
    let mut plan =
        Plan { session, events: Vec::new(), blobs: Vec::new(), spawns: Vec::new(), dismissed: Vec::new() };
    plan.fold(context)?;
    plan.perform(context)?;
    // Before anything is shown: what begins now is shown as begun.
    let starts = if context.may_act(plan.session) { plan.start(context)? } else { Vec::new() };
    plan.end_waits(context)?;
    plan.seal(context)?;
    let next = plan.next(starts, context)?;
    let until = plan.until(context);
    let Plan { events, blobs, spawns, dismissed, .. } = plan;
    Ok(Decision { events, blobs, spawns, dismissed, next, until })
}

/// Whether a run, which goes as far as `mode` says, ends because it was stopped by order. The order itself isn't
/// stored, but the hold that it leaves is, and a run until it is blocked leaves no other: a step's hold is a step's.
pub fn was_stopped(session: &Session, mode: Mode) -> bool {
    session.stop == Some(Stop::Cancelled) || (session.hold == Hold::Step && mode == Mode::UntilBlocked)
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
            policy: policy_of(context.agent, call),
            state: CallState::Ready,
            attempt: 0,
            token: None,
            expires_at: None,
            waits: None,
            created_at: context.now,
            started_at: None,
            settled: None,
            finished_at: None,
            told: None,
            told_result: false,
            read: false,
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

/// What the agent's policy says of a call. What the engine itself carries out may be done again: it leaves the
/// same traces under the same ids. For that it has to be stored first, whatever a rule says.
fn policy_of(agent: &Agent, call: &LlmCall) -> crate::policy::Applied {
    let applied = agent.policy.apply(&call.name, &call.arguments);
    let own = agent.builtin(&call.name).is_some();
    crate::policy::Applied {
        idempotent: applied.idempotent || own,
        read_only: applied.read_only && !own,
        ..applied
    }
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

/// The event that hands a running call to the outside, as something that looked at it before it ran wants.
pub fn deferred(
    agent: &Agent,
    session: &Session,
    call: CallId,
    reason: String,
    now: Time,
    fresh_token: &mut dyn FnMut() -> Uuid,
) -> Event {
    let tracked = session.call(call);
    let deadline = tracked.and_then(|call| call.policy.deadline_seconds);
    let expires_at = deadline.and_then(|seconds| after(now, seconds));
    let on_deadline = tracked.and_then(|call| on_deadline(agent, call));
    let terms = Terms { reason, on_deadline, approval: false };
    Event::Deferred { call, token: Token(fresh_token()), expires_at, terms, at: now }
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
    spawns: Vec<Spawn>,
    dismissed: Vec<SessionId>,
}

impl Plan<'_> {
    fn happen(&mut self, event: Event) -> Result<(), Illegal> {
        self.session.apply(&event)?;
        self.events.push(event);
        Ok(())
    }

    /// Ends a call here; a child session that it waited for is let go.
    fn finish(&mut self, call: CallId, settled: Settled, now: Time) -> Result<(), Illegal> {
        let waiting = self.session.call(call).filter(|call| call.state == CallState::Waiting);
        self.dismissed.extend(waiting.and_then(TrackedCall::child));
        self.happen(Event::Finished { call, settled, at: now })
    }

    fn next(&mut self, starts: Vec<Start>, context: &Context<'_>) -> Result<Next, Illegal> {
        let may_act = context.may_act(self.session);
        if !starts.is_empty() {
            return Ok(Next::RunCalls(starts));
        }
        if context.asking(self.session) || (may_act && self.session.owed()) {
            return Ok(Next::AskModel);
        }
        // A pause, or the end of a step, lets calls that already run come home.
        if self.session.calls.iter().any(|call| call.state == CallState::Running) {
            return Ok(Next::RunCalls(Vec::new()));
        }
        // Where nothing may begin, at a worker that leaves, what is ready is somebody else's to begin.
        if may_act && self.session.calls.iter().any(|call| call.state == CallState::Ready) {
            return Ok(Next::RunCalls(Vec::new()));
        }
        let waits = self.session.waiting().filter_map(|call| call.waits.as_ref()).map(|waits| waits.word());
        // What a person waits for longest is named first.
        let word = waits.min();
        if let Some(word) = word.filter(|_| context.run.mode == Mode::UntilBlocked && may_act) {
            return Ok(Next::Park(word));
        }
        let work_left = self.session.owed() || self.session.busy() || word.is_some();
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
                only_reads: call.policy.read_only && call.disposition().is_silent(),
                timeout_seconds: timeout_seconds(context.agent, call),
                disposition: call.disposition().clone(),
                attempt: call.attempt + 1,
                turn: turn_id(call.turn),
            })
            .collect();
        for start in &starts {
            self.happen(Event::Started { call: start.call, at: context.now })?;
        }
        Ok(starts)
    }
}

/// The result that a call has if nobody completes it in time. Of a call that was loaded, the rule says so.
fn on_deadline(agent: &Agent, call: &TrackedCall) -> Option<ToolResult> {
    call.policy.on_deadline.clone().or_else(|| agent.policy.of_tool(&call.name).on_deadline)
}

/// Seconds after which a call is ended.
fn timeout_seconds(agent: &Agent, call: &TrackedCall) -> Option<u64> {
    call.disposition().timeout_seconds().or(agent.call_timeout_seconds)
}

/// The time `seconds` after another, where there is one.
fn after(now: Time, seconds: u64) -> Option<Time> {
    let delta = i64::try_from(seconds).ok().and_then(chrono::TimeDelta::try_seconds)?;
    now.checked_add_signed(delta)
}
