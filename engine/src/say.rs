//! Mail, and ends of calls in the background, as the model reads them.

use std::collections::BTreeSet;

use crate::{
    content::{Payload, ToolResult},
    ids::{CallId, MailId},
    mail::{Envelope, MailBody, Sender, Settled},
    session::{CallState, Session, TrackedCall},
    transcript::{self, short},
    turn::{Origin, Said},
};

/// The call that a letter brings the end of, and how it ended.
pub(crate) fn result_in(letter: &Envelope) -> Option<(CallId, &Settled)> {
    match &letter.body {
        MailBody::ContinuationResult { tool_call_id, settled }
        | MailBody::ToolCallFinished { tool_call_id, settled } => Some((*tool_call_id, settled)),
        MailBody::UserMessage { .. }
        | MailBody::AgentMessage { .. }
        | MailBody::WatchedEvent { .. }
        | MailBody::Approved { .. }
        | MailBody::Control { .. } => None,
    }
}

/// What a user turn says beside its answers, and where that came from.
pub(crate) struct Told {
    pub(crate) said: Vec<Said>,
    pub(crate) mail: Vec<Origin>,
}

/// What the model has to be told besides the answers to its last calls: the mail that waits and, of each call
/// that was shown as open and has ended, once how it ended.
pub(crate) fn say(session: &Session) -> Told {
    let by_letter: BTreeSet<CallId> =
        session.left.iter().filter_map(result_in).map(|(call, _)| call).collect();
    let (mut said, mut mail) = (Vec::new(), Vec::new());
    let untold = session.calls.iter().filter(|call| call.ended_untold());
    for call in untold.filter(|call| !by_letter.contains(&call.id)) {
        let Some(settled) = &call.settled else { continue };
        let id = MailId(call.id.0);
        said.push(late(id, call, settled));
        let from = Sender::ToolCall { tool_call_id: call.id };
        mail.push(Origin { id, seq: 0, from, tag: "toolCallFinished".to_owned(), hops: 0 });
    }
    // What people and agents write comes last: that is what the model answers.
    said.extend(session.left.iter().filter_map(|letter| of_letter(session, letter)));
    mail.extend(session.left.iter().map(Origin::from));
    Told { said, mail }
}

fn of_letter(session: &Session, letter: &Envelope) -> Option<Said> {
    match &letter.body {
        MailBody::UserMessage { query } => Some(Said::Query(query.clone())),
        MailBody::AgentMessage { text, expects_reply, .. } => {
            let sender = sender(&letter.from);
            let reply = if *expects_reply { ", expects reply" } else { "" };
            let name = transcript::letter_name(letter.id);
            Some(Said::Text(format!("[mail {name} from {sender}{reply}]\n{text}")))
        }
        MailBody::ContinuationResult { tool_call_id, settled }
        | MailBody::ToolCallFinished { tool_call_id, settled } => match session.call(*tool_call_id) {
            Some(call) => Some(late(letter.id, call, settled)),
            None => {
                let (provider_id, name) = transcript::find_call(session, *tool_call_id)?;
                let header = transcript::late_header(letter.id, &provider_id, &name, settled.word());
                Some(Said::Late { header, result: result_of(settled) })
            }
        },
        MailBody::WatchedEvent { session_id, event, data } => {
            let (name, session) = (transcript::letter_name(letter.id), short(session_id.0));
            Some(Said::Text(format!("[mail {name}: event {event} of session {session}]\n{data}")))
        }
        MailBody::Approved { .. } | MailBody::Control { .. } => None,
    }
}

/// How a call ended that was shown as open. What the model has read already isn't said again, and what an order
/// ended has nothing more to say.
fn late(letter: MailId, call: &TrackedCall, settled: &Settled) -> Said {
    let header = transcript::late_header(letter, &call.provider_id, &call.name, settled.word());
    // What was read is how the call ended, which needn't be what a letter brings.
    if call.read && call.settled.as_ref() == Some(settled) {
        return Said::Text(format!("{header} You have read its result already."));
    }
    if call.state == CallState::Cancelled && matches!(settled, Settled::Cancelled { .. }) {
        return Said::Text(header);
    }
    Said::Late { header, result: result_of(settled) }
}

fn result_of(settled: &Settled) -> Payload<ToolResult> {
    match settled {
        Settled::Completed { result } => result.clone(),
        Settled::Failed { message } | Settled::Cancelled { message } => {
            Payload::Inline(ToolResult::text(message.clone()))
        }
    }
}

fn sender(from: &Sender) -> String {
    match from {
        Sender::Session { session_id, agent: Some(agent) } => {
            format!("session {} (agent {agent:?})", short(session_id.0))
        }
        Sender::Session { session_id, agent: None } => format!("session {}", short(session_id.0)),
        Sender::User { owner: Some(owner) } => owner.clone(),
        Sender::User { owner: None } => "a client".to_owned(),
        Sender::ToolCall { tool_call_id } => format!("tool call {}", short(tool_call_id.0)),
        Sender::System { source } => source.clone(),
    }
}
