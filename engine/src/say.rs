//! Mail as the model reads it.

use std::collections::BTreeSet;

use crate::{
    content::{Payload, ToolResult},
    ids::CallId,
    mail::{Control, Envelope, MailBody, Sender, Settled},
    session::{CallState, Session},
    transcript::{self, short},
    turn::Said,
};

/// The call that a letter brings the end of, and how it ended.
pub(crate) fn result_in(letter: &Envelope) -> Option<(CallId, &Settled)> {
    match &letter.body {
        MailBody::ContinuationResult { tool_call_id, settled }
        | MailBody::ToolCallFinished { tool_call_id, settled } => Some((*tool_call_id, settled)),
        MailBody::UserMessage { .. } | MailBody::AgentMessage { .. } | MailBody::Control { .. } => None,
    }
}

/// What the mail that waits says to the model. Of a call that was shown as open and has ended, it
/// says so once: by the letter that brought the end, else by the first order that named it.
pub(crate) fn say(session: &Session) -> Vec<Said> {
    let mut told: BTreeSet<CallId> =
        session.left.iter().filter_map(result_in).map(|(call, _)| call).collect();
    session.left.iter().filter_map(|letter| said(session, letter, &mut told)).collect()
}

fn said(session: &Session, letter: &Envelope, told: &mut BTreeSet<CallId>) -> Option<Said> {
    match &letter.body {
        MailBody::UserMessage { query } => Some(Said::Query(query.clone())),
        MailBody::AgentMessage { text, expects_reply, .. } => {
            let sender = sender(&letter.from);
            let reply = if *expects_reply { ", expects reply" } else { "" };
            Some(Said::Text(format!("[mail m-{} from {sender}{reply}]\n{text}", short(letter.id.0))))
        }
        MailBody::ContinuationResult { tool_call_id, settled }
        | MailBody::ToolCallFinished { tool_call_id, settled } => {
            let (provider_id, name) = match session.call(*tool_call_id) {
                Some(call) => (call.provider_id.clone(), call.name.clone()),
                None => transcript::find_call(session, *tool_call_id)?,
            };
            let header = transcript::late_header(letter.id, &provider_id, &name, settled.word());
            let result = match settled {
                Settled::Completed { result } => result.clone(),
                Settled::Failed { message } | Settled::Cancelled { message } => {
                    Payload::Inline(ToolResult::text(message.clone()))
                }
            };
            Some(Said::Late { header, result })
        }
        MailBody::Control { message: message @ (Control::CancelCalls { .. } | Control::CancelDeferred) } => {
            let named = |call: CallId| match message {
                Control::CancelCalls { tool_call_ids } => tool_call_ids.contains(&call),
                _ => true,
            };
            let ended = session.calls.iter().filter(|call| {
                let open_when_shown = call.told.is_some() && !call.told_result;
                open_when_shown && call.state == CallState::Cancelled && named(call.id)
            });
            let lines: Vec<String> = ended
                .filter(|call| told.insert(call.id))
                .map(|call| transcript::late_header(letter.id, &call.provider_id, &call.name, "cancelled"))
                .collect();
            (!lines.is_empty()).then(|| Said::Text(lines.join("\n")))
        }
        // The calls that these end run or wait for a worker; no turn is sealed over such a call, so
        // none of them was ever shown as open.
        MailBody::Control { message: Control::StopRun | Control::CancelAllAttached } => None,
        MailBody::Control { message: Control::Pause | Control::Resume } => None,
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
