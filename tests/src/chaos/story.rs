//! What the clients of a session were told: what the session has to show at the end.

use uuid::Uuid;

/// A message that was accepted.
#[derive(Debug, Clone)]
pub(super) struct Sent {
    /// Stands in its text and in no other.
    pub(super) mark: String,
    /// The letter's id and number, as the receipt has them; the first message of a session has none.
    pub(super) receipt: Option<(Uuid, i64)>,
}

/// How an attempt to complete a call was answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It counts.
    Accepted,
    /// Another one came first.
    Completed {
        /// Whether that said the same.
        same: bool,
    },
    /// The call was cancelled before.
    Cancelled,
    /// Its deadline had passed.
    Expired,
    /// The session is deleted.
    Unknown,
}

/// An attempt to complete a call; its retries by the same key are the same attempt.
#[derive(Debug, Clone)]
pub(super) struct Attempt {
    /// Whose call.
    pub(super) token: Uuid,
    /// What was said, in these words and no other attempt's unless that repeats this one.
    pub(super) mark: String,
    /// The answer.
    pub(super) verdict: Verdict,
}

/// All that the clients of one session know.
#[derive(Debug, Clone)]
pub(super) struct Story {
    /// Its number in this run.
    pub(super) number: usize,
    /// Its id.
    pub(super) id: Uuid,
    /// Whether it was deleted.
    pub(super) deleted: bool,
    /// Messages that were accepted.
    pub(super) sent: Vec<Sent>,
    /// Attempts to complete calls.
    pub(super) attempts: Vec<Attempt>,
    /// Answers that nothing explains.
    pub(super) odd: Vec<String>,
}

impl Story {
    /// The text by which requests to the model are known as this session's.
    pub(super) fn name(number: usize) -> String {
        format!("[session {number}]")
    }

    /// The text of its message `index`, which stands in no other.
    pub(super) fn mark(number: usize, index: usize) -> String {
        format!("[message {number}.{index}]")
    }
}
