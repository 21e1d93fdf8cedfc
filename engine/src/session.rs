//! A session and everything that may happen to it: one exhaustive match of state and event.

use std::{collections::BTreeSet, sync::Arc};

use crate::{
    Time,
    content::ToolResult,
    ids::{CallId, SessionId, Token},
    mail::{Envelope, Settled},
    policy::{Applied, Disposition},
    turn::{Shown, Turn, TurnBody},
    waits::Waits,
};

pub use crate::status::{CallState, Hold, Status};

/// A tool call under the engine's eye.
#[derive(Debug, Clone, PartialEq)]
pub struct TrackedCall {
    /// The engine's id.
    pub id: CallId,
    /// The provider's id, unique within its turn.
    pub provider_id: String,
    /// The tool.
    pub name: String,
    /// The arguments as the model wrote them.
    pub arguments: String,
    /// Position of the turn that asked for it.
    pub turn: i64,
    /// Its place among that turn's calls, from 0.
    pub index: i32,
    /// How it is handled, and who decided that.
    pub policy: Applied,
    /// Its state.
    pub state: CallState,
    /// How many times it was begun.
    pub attempt: i32,
    /// Its token, from the moment that it is deferred.
    pub token: Option<Token>,
    /// When an open token expires, or a wait is over.
    pub expires_at: Option<Time>,
    /// What it waits for, or waited for.
    pub waits: Option<Waits>,
    /// When it was asked for.
    pub created_at: Time,
    /// When its last attempt or its wait began, or when it was deferred.
    pub started_at: Option<Time>,
    /// How it ended; set exactly in final states.
    pub settled: Option<Settled>,
    /// When it ended.
    pub finished_at: Option<Time>,
    /// Position of the turn in which the model was first told of it, be it by a placeholder.
    pub told: Option<i64>,
    /// Whether the model has been told how it ended.
    pub told_result: bool,
    /// Whether the model has read the result by asking for it.
    pub read: bool,
}

impl TrackedCall {
    /// Whether it is open and the model was shown so: it runs on in the background.
    pub fn in_background(&self) -> bool {
        let goes_on = matches!(self.state, CallState::Ready | CallState::Running | CallState::Waiting);
        goes_on && self.told.is_some()
    }

    /// The word for its state that models read: to them a child's work is work like any other.
    pub fn word(&self) -> &'static str {
        match self.state {
            CallState::Ready => "pending",
            CallState::Waiting if self.child().is_some() => "running",
            state => state.word(),
        }
    }

    /// Whether it has ended since the model was shown it as open, and the model hasn't been told.
    pub fn ended_untold(&self) -> bool {
        self.state.is_final() && self.told.is_some() && !self.told_result
    }

    /// Whether its end is news for the model: what was cancelled is told with other things.
    pub fn is_news(&self) -> bool {
        self.ended_untold() && self.state != CallState::Cancelled
    }

    /// How it is handled: if somebody had to let it run and has, as what he let run.
    pub fn disposition(&self) -> &Disposition {
        match self.policy.disposition.base() {
            Disposition::Approve { inner, .. } if self.token.is_some() => inner,
            _ => &self.policy.disposition,
        }
    }

    /// The child session that it waits for, or waited for.
    pub fn child(&self) -> Option<SessionId> {
        match &self.waits {
            Some(Waits::Child { session_id, .. }) => Some(*session_id),
            _ => None,
        }
    }
}

/// What is agreed with the outside about a deferred call.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Terms {
    /// Why it is deferred, or what is asked.
    pub reason: String,
    /// Its result if nobody gives one in time; without, it fails then.
    pub on_deadline: Option<ToolResult>,
    /// Whether the outside may let it run instead of giving its result.
    pub approval: bool,
}

/// The last prompt and tools that the model was shown are named in the newest user turn; this is
/// everything else that the next decision depends on.
#[derive(Debug, Clone)]
pub struct Session {
    /// Its id.
    pub id: SessionId,
    /// What clients see of it.
    pub status: Status,
    /// Why it doesn't go on by itself.
    pub hold: Hold,
    /// Version of the stored state that this was loaded from.
    pub version: i64,
    /// Mail up to here has been considered.
    pub cursor: i64,
    /// Mail up to the cursor that has been considered and waits to be told to the model.
    pub left: Vec<Envelope>,
    /// All turns, oldest first.
    pub turns: Vec<Arc<Turn>>,
    /// Calls that are not yet final, or that the model hasn't been told the end of.
    pub calls: Vec<TrackedCall>,
    /// When the run has to end whatever there is to do, because it was stopped by order.
    pub stop: Option<Stop>,
    /// Agents of the sessions above it, from the root down.
    pub stack: Vec<String>,
}

/// An order to end the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// `pause`: after the current step.
    Paused,
    /// `cancel`: at once.
    Cancelled,
}

/// Something that happens to a session.
#[derive(Debug, Clone)]
pub enum Event {
    /// Mail up to `cursor` was considered; `left` of it waits to be told.
    Folded {
        /// The highest number considered.
        cursor: i64,
        /// What waits.
        left: Vec<Envelope>,
    },
    /// A stop was ordered.
    StopOrdered(Stop),
    /// A hold was lifted by order, and with it any stop that was ordered before.
    Resumed,
    /// A step ended with work left.
    Held,
    /// The model is about to be shown this user turn.
    Sealed(Arc<Turn>),
    /// The model answered; its calls are ready.
    Answered {
        /// The turn.
        turn: Arc<Turn>,
        /// Its calls, in order.
        calls: Vec<TrackedCall>,
    },
    /// A call begins in this worker.
    Started {
        /// Which.
        call: CallId,
        /// When.
        at: Time,
    },
    /// A call was handed to the outside.
    Deferred {
        /// Which.
        call: CallId,
        /// The token that completes it.
        token: Token,
        /// When the token expires.
        expires_at: Option<Time>,
        /// What is agreed with the outside.
        terms: Terms,
        /// When.
        at: Time,
    },
    /// The outside lets a deferred call run.
    Approved {
        /// Which.
        call: CallId,
    },
    /// A call waits for something that no worker does.
    Waits {
        /// Which.
        call: CallId,
        /// For what.
        waits: Waits,
        /// When the wait is over at the latest.
        until: Option<Time>,
        /// When.
        at: Time,
    },
    /// The model has asked for a call's result and got it.
    Read {
        /// Which.
        call: CallId,
    },
    /// A call that was begun has to begin again: its worker is gone, or an attempt failed.
    Returned {
        /// Which.
        call: CallId,
    },
    /// A call ended.
    Finished {
        /// Which.
        call: CallId,
        /// How.
        settled: Settled,
        /// When.
        at: Time,
    },
}

/// An event that the session's state doesn't allow. The session is as it was.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Illegal {
    /// The call isn't tracked (any more).
    #[error("call {0} is not tracked")]
    UnknownCall(CallId),
    /// The call is in a state that doesn't allow it.
    #[error("call {call} is {state} and can't become {to}", state = .from.word())]
    CallState {
        /// The call.
        call: CallId,
        /// Its state.
        from: CallState,
        /// What was to happen.
        to: &'static str,
    },
    /// The turn doesn't follow the last one.
    #[error("a turn at position {position} ({what}) can't follow {last} turns")]
    TurnOrder {
        /// The position given.
        position: i64,
        /// How many turns there are.
        last: i64,
        /// What was wrong.
        what: &'static str,
    },
    /// A call of the answered turn lacks its answer, has two, or one that doesn't fit its state.
    #[error("the user turn doesn't answer each open call exactly once")]
    Answers,
    /// The cursor would go back.
    #[error("the mail cursor can't go from {from} to {to}")]
    Cursor {
        /// Where it is.
        from: i64,
        /// Where it was to go.
        to: i64,
    },
}

impl Session {
    /// A session without turns.
    pub fn new(id: SessionId) -> Self {
        Self {
            id,
            status: Status::Ready,
            hold: Hold::None,
            version: 0,
            cursor: 0,
            left: Vec::new(),
            turns: Vec::new(),
            calls: Vec::new(),
            stop: None,
            stack: Vec::new(),
        }
    }

    /// The session without its past: what the next commit needs of it, at a cost that doesn't grow.
    pub fn at_head(&self) -> Self {
        Self {
            left: self.left.clone(),
            turns: self.turns.last().cloned().into_iter().collect(),
            calls: self.calls.clone(),
            stack: Vec::new(),
            ..*self
        }
    }

    /// The newest turn.
    pub fn head(&self) -> Option<&Turn> {
        self.turns.last().map(|turn| &**turn)
    }

    /// Position of the newest turn; 0 without turns.
    pub fn length(&self) -> i64 {
        self.turns.last().map_or(0, |turn| turn.position)
    }

    /// A tracked call.
    pub fn call(&self, id: CallId) -> Option<&TrackedCall> {
        self.calls.iter().find(|call| call.id == id)
    }

    /// The calls of the newest turn, if it asked for any: those that the next user turn answers.
    pub fn round(&self) -> impl Iterator<Item = &TrackedCall> {
        let position = match self.head() {
            Some(Turn { position, body: TurnBody::Llm(_), .. }) => *position,
            _ => 0,
        };
        self.calls.iter().filter(move |call| call.turn == position)
    }

    /// Drops the calls whose end the model has been told. Once what told them is stored, and not before: the store
    /// learns how they ended from here.
    pub fn forget_told(&mut self) {
        self.calls.retain(|call| !call.told_result);
    }

    /// Whether a call waits for this worker or runs in it.
    pub fn busy(&self) -> bool {
        self.calls.iter().any(|call| matches!(call.state, CallState::Ready | CallState::Running))
    }

    /// The calls that wait for what no worker does.
    pub fn waiting(&self) -> impl Iterator<Item = &TrackedCall> {
        self.calls.iter().filter(|call| call.state == CallState::Waiting)
    }

    /// Whether the model owes an answer.
    pub fn owed(&self) -> bool {
        matches!(self.head().map(|turn| &turn.body), Some(TurnBody::User(_)))
    }

    /// Whether an answer of the model is still wanted.
    pub fn wants_answer(&self) -> bool {
        self.owed() && self.stop != Some(Stop::Cancelled)
    }

    /// The status that the turns and calls imply when no run goes on.
    pub fn implied_status(&self) -> Status {
        if self.hold == Hold::Paused {
            return Status::Paused;
        }
        if self.busy() || self.waiting().next().is_some() {
            return Status::Ready;
        }
        let open = self.calls.iter().any(|call| call.state == CallState::Deferred);
        match self.head().map(|turn| &turn.body) {
            None | Some(TurnBody::User(_)) => Status::Ready,
            Some(TurnBody::Llm(_)) if open => Status::WaitingExternal,
            Some(TurnBody::Llm(turn)) if turn.calls.is_empty() => Status::Idle,
            Some(TurnBody::Llm(_)) => Status::Ready,
        }
    }

    /// Lets an event happen.
    ///
    /// # Errors
    /// [`Illegal`] if the state doesn't allow it; the session is then unchanged.
    pub fn apply(&mut self, event: &Event) -> Result<(), Illegal> {
        match event {
            Event::Folded { cursor, left } => self.folded(*cursor, left),
            Event::StopOrdered(stop) => {
                self.stop = Some(match (self.stop, stop) {
                    (Some(Stop::Cancelled), _) => Stop::Cancelled,
                    (_, stop) => *stop,
                });
                self.hold = match (self.hold, stop) {
                    (Hold::Paused, _) | (_, Stop::Paused) => Hold::Paused,
                    (_, Stop::Cancelled) => Hold::Step,
                };
                Ok(())
            }
            Event::Resumed => {
                self.hold = Hold::None;
                self.stop = None;
                Ok(())
            }
            Event::Held => {
                self.hold = Hold::Step;
                Ok(())
            }
            Event::Sealed(turn) => self.sealed(turn),
            Event::Answered { turn, calls } => self.answered(turn, calls),
            Event::Started { call, at } => {
                let call = self.in_state(*call, &[CallState::Ready], "running")?;
                call.state = CallState::Running;
                call.attempt += 1;
                call.started_at = Some(*at);
                Ok(())
            }
            Event::Deferred { call, token, expires_at, terms: _, at } => {
                let call = self.in_state(*call, &[CallState::Ready, CallState::Running], "deferred")?;
                call.state = CallState::Deferred;
                call.token = Some(*token);
                call.expires_at = *expires_at;
                call.started_at = Some(*at);
                Ok(())
            }
            Event::Approved { call } => {
                let call = self.in_state(*call, &[CallState::Deferred], "approved")?;
                call.state = CallState::Ready;
                call.expires_at = None;
                Ok(())
            }
            Event::Waits { call, waits, until, at } => {
                let call = self.in_state(*call, &[CallState::Ready], "waiting")?;
                call.state = CallState::Waiting;
                call.waits = Some(waits.clone());
                call.expires_at = *until;
                call.started_at = Some(*at);
                Ok(())
            }
            Event::Read { call } => {
                let ended = [CallState::Completed, CallState::Failed, CallState::Cancelled];
                self.in_state(*call, &ended, "read")?.read = true;
                Ok(())
            }
            Event::Returned { call } => {
                let call = self.in_state(*call, &[CallState::Running], "ready again")?;
                call.state = CallState::Ready;
                Ok(())
            }
            Event::Finished { call, settled, at } => {
                let open = [CallState::Ready, CallState::Running, CallState::Waiting, CallState::Deferred];
                let call = self.in_state(*call, &open, settled.word())?;
                call.state = match settled {
                    Settled::Completed { .. } => CallState::Completed,
                    Settled::Failed { .. } => CallState::Failed,
                    Settled::Cancelled { .. } => CallState::Cancelled,
                };
                call.settled = Some(settled.clone());
                call.finished_at = Some(*at);
                Ok(())
            }
        }
    }

    fn in_state(
        &mut self,
        id: CallId,
        allowed: &[CallState],
        to: &'static str,
    ) -> Result<&mut TrackedCall, Illegal> {
        let call = self.calls.iter_mut().find(|call| call.id == id).ok_or(Illegal::UnknownCall(id))?;
        if !allowed.contains(&call.state) {
            return Err(Illegal::CallState { call: id, from: call.state, to });
        }
        Ok(call)
    }

    fn folded(&mut self, cursor: i64, left: &[Envelope]) -> Result<(), Illegal> {
        if cursor < self.cursor {
            return Err(Illegal::Cursor { from: self.cursor, to: cursor });
        }
        self.cursor = cursor;
        self.left = left.to_vec();
        Ok(())
    }

    fn follows(&self, turn: &Turn) -> Result<(), Illegal> {
        if turn.position == self.length() + 1 {
            return Ok(());
        }
        Err(Illegal::TurnOrder { position: turn.position, last: self.length(), what: "not the next" })
    }

    /// A user turn answers each call of the answered turn exactly once, and tells each late result
    /// at most once. Calls whose end has been told stay until [`Self::forget_told`], so that they
    /// can be stored with the turn that told them.
    fn sealed(&mut self, turn: &Arc<Turn>) -> Result<(), Illegal> {
        self.follows(turn)?;
        let TurnBody::User(user) = &turn.body else {
            return Err(Illegal::TurnOrder {
                position: turn.position,
                last: self.length(),
                what: "sealing wants a user turn",
            });
        };
        let round: BTreeSet<CallId> = self.round().map(|call| call.id).collect();
        let answered: BTreeSet<CallId> = user.answers.iter().map(|answer| answer.call).collect();
        let as_they_are = user.answers.iter().all(|answer| {
            let ended = self.call(answer.call).is_some_and(|call| call.state.is_final());
            ended == matches!(answer.shown, Shown::Settled(_))
        });
        if round != answered || answered.len() != user.answers.len() || !as_they_are {
            return Err(Illegal::Answers);
        }
        for call in &mut self.calls {
            if round.contains(&call.id) {
                call.told = Some(turn.position);
            }
            call.told_result = call.told_result || call.state.is_final();
        }
        self.turns.push(Arc::clone(turn));
        Ok(())
    }

    fn answered(&mut self, turn: &Arc<Turn>, calls: &[TrackedCall]) -> Result<(), Illegal> {
        self.follows(turn)?;
        let asked = matches!(self.head(), Some(Turn { body: TurnBody::User(_), .. }));
        let TurnBody::Llm(llm) = &turn.body else {
            return Err(Illegal::TurnOrder {
                position: turn.position,
                last: self.length(),
                what: "answering wants a model turn",
            });
        };
        if !asked {
            return Err(Illegal::TurnOrder {
                position: turn.position,
                last: self.length(),
                what: "a model answers user turns only",
            });
        }
        let same = llm.calls.len() == calls.len()
            && llm.calls.iter().zip(calls).all(|(asked, call)| {
                asked.id == call.id && call.turn == turn.position && call.state == CallState::Ready
            });
        if !same {
            return Err(Illegal::Answers);
        }
        self.turns.push(Arc::clone(turn));
        self.calls.extend(calls.iter().cloned());
        Ok(())
    }
}
