//! The mailbox: everything that reaches a session from outside its run.

use serde::{Deserialize, Serialize};

use crate::{
    Time,
    content::{Payload, Query, ToolResult},
    ids::{CallId, MailId, SessionId},
};

/// A letter, as the store numbers it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Envelope {
    /// Its id; a repeat of it is the same letter.
    pub id: MailId,
    /// Its place in the session's mailbox: dense from 1, in the order of acceptance.
    pub seq: i64,
    /// Who sent it.
    pub from: Sender,
    /// How urgent it is.
    #[serde(default)]
    pub priority: Priority,
    /// How many sessions passed it on.
    #[serde(default)]
    pub hops: u32,
    /// When it was accepted.
    pub sent_at: Time,
    /// What it says.
    pub body: MailBody,
}

/// Who sent a letter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "tag", rename_all = "camelCase")]
pub enum Sender {
    /// A client, on behalf of an owner.
    User {
        /// The owner, where clients have to name themselves.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        owner: Option<String>,
    },
    /// Another session.
    #[serde(rename_all = "camelCase")]
    Session {
        /// Which.
        session_id: SessionId,
        /// Its agent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        agent: Option<String>,
    },
    /// A tool call of this session.
    #[serde(rename_all = "camelCase")]
    ToolCall {
        /// Which.
        tool_call_id: CallId,
    },
    /// Holdfast itself.
    System {
        /// Which part of it.
        source: String,
    },
}

/// How urgent a letter is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Priority {
    /// In its turn.
    #[default]
    Normal,
    /// It isn't kept waiting by calls that the conversation waits for.
    #[serde(alias = "interrupt")]
    High,
}

/// What a letter says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "tag", rename_all = "camelCase")]
pub enum MailBody {
    /// A person asks.
    UserMessage {
        /// What.
        query: Payload<Query>,
    },
    /// Another agent writes.
    #[serde(rename_all = "camelCase")]
    AgentMessage {
        /// What.
        text: String,
        /// The letter it answers.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        in_reply_to: Option<MailId>,
        /// Whether the sender waits for an answer.
        #[serde(default)]
        expects_reply: bool,
    },
    /// A deferred call was settled by its token.
    #[serde(rename_all = "camelCase")]
    ContinuationResult {
        /// The call.
        tool_call_id: CallId,
        /// How it ended.
        settled: Settled,
    },
    /// A call that the engine waits for elsewhere (a child session, an isolated call) ended.
    #[serde(rename_all = "camelCase")]
    ToolCallFinished {
        /// The call.
        tool_call_id: CallId,
        /// How it ended.
        settled: Settled,
    },
    /// The outside lets a deferred call run.
    #[serde(rename_all = "camelCase")]
    Approved {
        /// The call.
        tool_call_id: CallId,
    },
    /// Something happened in a session that this one watches.
    #[serde(rename_all = "camelCase")]
    WatchedEvent {
        /// Where.
        session_id: SessionId,
        /// The event's kind.
        event: String,
        /// What the event says.
        data: serde_json::Value,
    },
    /// An order to the engine; the model doesn't see it.
    Control {
        /// Which.
        message: Control,
    },
}

/// An order to the engine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "tag", rename_all = "camelCase")]
pub enum Control {
    /// End the run after the current step and hold the session.
    Pause,
    /// Lift a hold.
    Resume,
    /// End the run at once; its unfinished local calls are cancelled.
    StopRun,
    /// Cancel every call that the run waits for.
    CancelAllAttached,
    /// Cancel every deferred call that is open.
    CancelDeferred,
    /// Cancel these calls if they are still open.
    #[serde(rename_all = "camelCase")]
    CancelCalls {
        /// Which.
        tool_call_ids: Vec<CallId>,
    },
}

/// How a call ended, as it is stored.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "camelCase")]
pub enum Settled {
    /// With a result.
    Completed {
        /// The result.
        result: Payload<ToolResult>,
    },
    /// With a failure; the text is for the model.
    Failed {
        /// What went wrong.
        message: String,
    },
    /// Ended before it had a result; the text is for the model.
    Cancelled {
        /// By what.
        message: String,
    },
}

impl Settled {
    /// The word for it in headers, events and columns.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Completed { .. } => "completed",
            Self::Failed { .. } => "failed",
            Self::Cancelled { .. } => "cancelled",
        }
    }
}

impl MailBody {
    /// The tag of watched events, which aren't watched themselves.
    pub(crate) const WATCHED_EVENT: &'static str = "watchedEvent";

    /// The tag, as JSON has it.
    pub fn tag(&self) -> &'static str {
        match self {
            Self::UserMessage { .. } => "userMessage",
            Self::AgentMessage { .. } => "agentMessage",
            Self::ContinuationResult { .. } => "continuationResult",
            Self::ToolCallFinished { .. } => "toolCallFinished",
            Self::Approved { .. } => "approved",
            Self::WatchedEvent { .. } => Self::WATCHED_EVENT,
            Self::Control { .. } => "control",
        }
    }
}
