//! The states of sessions and calls, and the words for them.

use serde::{Deserialize, Serialize};

/// What a session is doing, as clients see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// There is something to do, and nobody is doing it.
    Ready,
    /// The engine will go on by itself.
    Running,
    /// Only deferred calls are open.
    WaitingExternal,
    /// The model has answered; the next word is somebody else's.
    Idle,
    /// On hold by order.
    Paused,
    /// The last run ended in an error.
    Failed,
}

impl Status {
    /// All statuses.
    pub const ALL: [Self; 6] =
        [Self::Ready, Self::Running, Self::WaitingExternal, Self::Idle, Self::Paused, Self::Failed];

    /// The word for it in JSON and columns.
    pub fn word(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Running => "running",
            Self::WaitingExternal => "waiting_external",
            Self::Idle => "idle",
            Self::Paused => "paused",
            Self::Failed => "failed",
        }
    }

    /// Reads the word back.
    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|status| status.word() == word)
    }
}

/// Why a session doesn't go on by itself although it could.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Hold {
    /// It isn't held.
    None,
    /// A `step` ended, or a run was stopped: only a request of a person runs it again.
    Step,
    /// A pause was ordered.
    Paused,
}

impl Hold {
    /// The word for it in columns.
    pub fn word(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Step => "step",
            Self::Paused => "paused",
        }
    }

    /// Reads the word back.
    pub fn parse(word: &str) -> Option<Self> {
        [Self::None, Self::Step, Self::Paused].into_iter().find(|hold| hold.word() == word)
    }
}

/// A call's state. The last three are final.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CallState {
    /// Asked for, not begun.
    Ready,
    /// Begun in a worker.
    Running,
    /// Begun where no worker is needed: a child session, a time, mail.
    Waiting,
    /// Open outside, by token.
    Deferred,
    /// Ended with a result.
    Completed,
    /// Ended with a failure.
    Failed,
    /// Ended by order.
    Cancelled,
}

impl CallState {
    /// All states.
    pub const ALL: [Self; 7] = [
        Self::Ready,
        Self::Running,
        Self::Waiting,
        Self::Deferred,
        Self::Completed,
        Self::Failed,
        Self::Cancelled,
    ];

    /// Whether nothing can change it any more.
    pub fn is_final(self) -> bool {
        matches!(self, Self::Completed | Self::Failed | Self::Cancelled)
    }

    /// The word for it in JSON and columns.
    pub fn word(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Running => "running",
            Self::Waiting => "waiting",
            Self::Deferred => "deferred",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }

    /// Reads the word back.
    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.word() == word)
    }
}
