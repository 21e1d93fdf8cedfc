//! What a call waits for that no worker runs.

use serde::{Deserialize, Serialize};

use crate::ids::{CallId, SessionId};

/// What ends a call that waits. Whatever it is, such a call may also have a time at which it ends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "tag", rename_all = "camelCase")]
pub enum Waits {
    /// The end of a child session, which mails it.
    #[serde(rename_all = "camelCase")]
    Child {
        /// The child.
        session_id: SessionId,
        /// Its agent.
        agent: String,
    },
    /// Its time.
    Timer,
    /// Mail.
    Mail,
    /// The end of one of these calls, or mail.
    #[serde(rename_all = "camelCase")]
    Calls {
        /// The calls.
        tool_call_ids: Vec<CallId>,
    },
    /// The end of any call that runs in the background, or mail.
    AnyCall,
    /// The end of a call whose status is asked for, or mail.
    #[serde(rename_all = "camelCase")]
    Status {
        /// The call.
        tool_call_id: CallId,
        /// Whether its progress is wanted.
        include_progress: bool,
    },
}

impl Waits {
    /// Whether it is one of those by which the model itself waits: any mail ends it.
    pub fn ends_with_mail(&self) -> bool {
        !matches!(self, Self::Child { .. } | Self::Timer)
    }

    /// The word for it where a parked session says what it waits for.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Child { .. } => "child",
            Self::Timer => "timer",
            Self::Mail | Self::Calls { .. } | Self::AnyCall | Self::Status { .. } => "wait",
        }
    }
}
