//! Considering mail: orders are obeyed and results settle their calls at once, in order; what the model has to
//! read waits for the next user turn.

use super::{Context, Plan};
use crate::{
    Time,
    ids::CallId,
    mail::{Control, Envelope, MailBody, Settled},
    say::result_in,
    session::{CallState, Event, Hold, Illegal, Stop, TrackedCall},
    transcript,
};

impl Plan<'_> {
    /// Considers the mail above the cursor.
    pub(super) fn fold(&mut self, context: &Context<'_>) -> Result<(), Illegal> {
        let before = self.session.cursor;
        let (mut cursor, mut left) = (before, self.session.left.clone());
        for letter in context.inbox {
            // Each is considered once, even if it was read twice.
            if letter.seq <= cursor {
                continue;
            }
            cursor = letter.seq;
            let waits = match &letter.body {
                MailBody::UserMessage { .. }
                | MailBody::AgentMessage { .. }
                | MailBody::WatchedEvent { .. } => true,
                MailBody::ContinuationResult { tool_call_id, settled }
                | MailBody::ToolCallFinished { tool_call_id, settled } => {
                    self.settle(*tool_call_id, settled, &left, context.now)?
                }
                MailBody::Approved { tool_call_id } => {
                    self.approve(*tool_call_id)?;
                    false
                }
                MailBody::Control { message } => {
                    self.obey(message, context)?;
                    false
                }
            };
            if waits {
                left.push(letter.clone());
            }
        }
        if cursor == before { Ok(()) } else { self.happen(Event::Folded { cursor, left }) }
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

    /// Lets a deferred call run. One that has ended meanwhile stays as it is.
    fn approve(&mut self, id: CallId) -> Result<(), Illegal> {
        match self.session.call(id) {
            Some(call) if call.state == CallState::Deferred => self.happen(Event::Approved { call: id }),
            _ => Ok(()),
        }
    }

    /// Obeys an order. What the model has to hear of it, it hears when it is next spoken to.
    fn obey(&mut self, order: &Control, context: &Context<'_>) -> Result<(), Illegal> {
        let now = context.now;
        match order {
            Control::Pause => {
                self.happen(Event::StopOrdered(Stop::Paused))?;
                if context.agent.conduct.pause_cancels_calls {
                    self.cancel_open(now, |call| call.state != CallState::Deferred)?;
                }
                Ok(())
            }
            // Nothing stands in the way: those who write to a session that goes on send this along.
            Control::Resume if self.session.hold == Hold::None && self.session.stop.is_none() => Ok(()),
            Control::Resume => self.happen(Event::Resumed),
            Control::StopRun => {
                self.happen(Event::StopOrdered(Stop::Cancelled))?;
                self.cancel_open(now, |call| call.state != CallState::Deferred)
            }
            Control::CancelAllAttached => {
                self.cancel_open(now, |call| call.state != CallState::Deferred && call.told.is_none())
            }
            Control::CancelDeferred => self.cancel_open(now, |call| call.state == CallState::Deferred),
            Control::CancelCalls { tool_call_ids } => {
                self.cancel_open(now, |call| tool_call_ids.contains(&call.id))
            }
        }
    }

    fn cancel_open(&mut self, now: Time, which: impl Fn(&TrackedCall) -> bool) -> Result<(), Illegal> {
        let open = self.session.calls.iter().filter(|call| !call.state.is_final() && which(call));
        let ids: Vec<(CallId, Settled)> = open.map(|call| (call.id, by_order(call))).collect();
        for (call, settled) in ids {
            self.finish(call, settled, now)?;
        }
        Ok(())
    }
}

/// How a call ends that was open when an order ended it.
pub(super) fn by_order(call: &TrackedCall) -> Settled {
    let name = &call.name;
    let message = match call.state {
        CallState::Running => {
            format!("cancelled: the call of {name} was stopped by order; it may have taken effect in part.")
        }
        CallState::Waiting if call.child().is_some() => {
            format!("cancelled: the call of {name} was stopped by order; its session has been told to stop.")
        }
        _ => format!("cancelled: the call of {name} was ended by order before it had a result."),
    };
    Settled::Cancelled { message }
}
