//! When the model is spoken to next, and what it is told.

use std::sync::Arc;

use chrono::TimeDelta;

use super::{Context, Plan};
use crate::{
    Time,
    agent::Agent,
    conduct::{ExecutionMode, YieldStrategy},
    ids::TurnId,
    mail::{Envelope, MailBody, Priority, Settled},
    policy::Disposition,
    say::{Told, say},
    session::{CallState, Event, Illegal, Session, TrackedCall},
    transcript,
    turn::{Answer, Shown, Turn, TurnBody, UserTurn},
    waits::Waits,
};

impl Plan<'_> {
    /// Seals the next user turn when there is something to show, and nothing that the conversation waits for.
    pub(super) fn seal(&mut self, context: &mut Context<'_>) -> Result<(), Illegal> {
        let session = &*self.session;
        if !is_time(session, context) {
            return Ok(());
        }
        let mut round: Vec<&TrackedCall> = session.round().collect();
        round.sort_by_key(|call| call.index);
        let answers: Vec<Answer> = round.into_iter().map(answer_for).collect();
        let Told { said, mail } = say(session);
        let offer = &context.agent.offer;
        let said_in_answer = context.agent.conduct.mail_in_tool_result && !answers.is_empty();
        let user = UserTurn {
            system: offer.system.blob.digest,
            tools: offer.tools.blob.digest,
            answers,
            said,
            mail,
            said_in_answer,
        };
        let turn = Turn {
            id: TurnId((context.fresh)()),
            position: session.length() + 1,
            at: context.now,
            body: TurnBody::User(user),
        };
        let (cursor, told) = (session.cursor, !session.left.is_empty());
        self.blobs.extend([offer.system.blob.clone(), offer.tools.blob.clone()]);
        self.happen(Event::Sealed(Arc::new(turn)))?;
        if told {
            self.happen(Event::Folded { cursor, left: Vec::new() })?;
        }
        Ok(())
    }

    /// When to decide again at the latest: when a call has been waited for long enough, or has waited long enough.
    pub(super) fn until(&self, context: &Context<'_>) -> Option<Time> {
        let detached = self
            .session
            .round()
            .filter(|call| holds(call, self.session, context))
            .filter_map(|call| detaches_at(call, context.agent));
        let waits = self.session.waiting().filter_map(|call| call.expires_at);
        detached.chain(waits).filter(|at| *at > context.now).min()
    }
}

/// Whether the model is to be spoken to now.
fn is_time(session: &Session, context: &Context<'_>) -> bool {
    let interrupted = session.left.iter().any(interrupts);
    if context.asking(session) {
        // What is to end after this answer asks for no other one.
        return interrupted && context.agent.conduct.interrupt_completions && context.may_act(session);
    }
    let mut round = session.round().peekable();
    let asked = round.peek().is_some();
    let (mut over, mut held, mut detached) = (true, false, false);
    for call in round {
        over &= call.state.is_final();
        let holds = holds(call, session, context);
        held |= holds;
        let goes_on = matches!(call.state, CallState::Ready | CallState::Running) || is_child(call);
        detached |= goes_on && !holds;
    }
    if held && !interrupted {
        return false;
    }
    let spoken = session.left.iter().any(speaks);
    (asked && over) || detached || spoken || late_results_are_due(session, context.agent)
}

/// Whether a letter is a reason to speak to the model. Orders ride along with what is told, and so do ends of calls
/// in the background, which have a rule of their own.
fn speaks(letter: &Envelope) -> bool {
    match &letter.body {
        MailBody::UserMessage { .. }
        | MailBody::AgentMessage { .. }
        | MailBody::WatchedEvent { .. }
        | MailBody::ContinuationResult { .. } => true,
        MailBody::ToolCallFinished { .. } | MailBody::Approved { .. } | MailBody::Control { .. } => false,
    }
}

/// Whether a letter doesn't wait for calls that the conversation waits for.
fn interrupts(letter: &Envelope) -> bool {
    let message = matches!(letter.body, MailBody::UserMessage { .. } | MailBody::AgentMessage { .. });
    message && letter.priority == Priority::High
}

fn is_child(call: &TrackedCall) -> bool {
    call.state == CallState::Waiting && call.child().is_some()
}

/// Whether the conversation waits for a call of the round. It waits for what the worker or a child does until it
/// has been waited for long enough, and for a wait of the model's own; a call that the outside or a time ends is
/// waited for as long as nobody speaks.
fn holds(call: &TrackedCall, session: &Session, context: &Context<'_>) -> bool {
    match call.state {
        CallState::Ready | CallState::Running => {}
        CallState::Waiting => match &call.waits {
            Some(Waits::Timer) | None => return false,
            Some(waits) if waits.ends_with_mail() => return true,
            Some(_) => {}
        },
        _ => return false,
    }
    let conduct = &context.agent.conduct;
    let until_another_ends = conduct.execution_mode == ExecutionMode::Asynchronous
        && conduct.async_yield_strategy == YieldStrategy::OnAnyProgress
        && matches!(call.disposition().base(), Disposition::RunAsync { attach_seconds: None });
    if until_another_ends {
        return !session.round().any(|other| other.state.is_final());
    }
    detaches_at(call, context.agent).is_none_or(|at| at > context.now)
}

/// When a call has been waited for long enough, if a time says so.
fn detaches_at(call: &TrackedCall, agent: &Agent) -> Option<Time> {
    if agent.conduct.execution_mode == ExecutionMode::Synchronous {
        return None;
    }
    let milliseconds = match call.disposition().base() {
        Disposition::RunAsync { attach_seconds: Some(seconds) } => seconds.saturating_mul(1000),
        Disposition::RunAsync { attach_seconds: None } => match agent.conduct.async_yield_strategy {
            YieldStrategy::OnTimeout(milliseconds) => milliseconds,
            YieldStrategy::WhenAllDone | YieldStrategy::OnAnyProgress => return None,
        },
        _ => return None,
    };
    let delta = i64::try_from(milliseconds).ok().and_then(TimeDelta::try_milliseconds)?;
    call.created_at.checked_add_signed(delta)
}

/// Whether calls have ended that the model was shown as open, and it isn't to wait for others.
fn late_results_are_due(session: &Session, agent: &Agent) -> bool {
    let news = session.calls.iter().any(TrackedCall::is_news);
    // A child session that somebody else has stopped is news, other than a call that this one's orders have ended.
    let stopped = session.left.iter().any(|letter| matches!(letter.body, MailBody::ToolCallFinished { .. }));
    let for_all = agent.conduct.execution_mode == ExecutionMode::Synchronous
        || agent.conduct.async_yield_strategy == YieldStrategy::WhenAllDone;
    (news || stopped)
        && !(for_all && session.calls.iter().any(|call| call.in_background() && !is_timer(call)))
}

fn is_timer(call: &TrackedCall) -> bool {
    call.waits == Some(Waits::Timer)
}

fn answer_for(call: &TrackedCall) -> Answer {
    let shown = match &call.settled {
        Some(settled) => Shown::Settled(Settled::clone(settled)),
        None => Shown::Placeholder(transcript::placeholder(call)),
    };
    Answer { call: call.id, provider_id: call.provider_id.clone(), name: call.name.clone(), shown }
}
