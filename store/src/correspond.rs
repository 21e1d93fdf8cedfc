//! Letters that one session's agent sends to another session.

use holdfast_engine::{
    ids::{MailId, SessionId},
    mail::{MailBody, Priority, Sender},
    scope::Scope,
    session::Status,
    waking::WakeClass,
};

pub use crate::kin::Address;
use crate::{
    Store,
    accept::Caller,
    errors::StoreError,
    idempotency::Done,
    kin::{self, KinError},
    letters::{Letter, Receipt},
    post::{self, Accepted},
    waking::Wake,
};

/// Bytes that the text of a letter may have.
pub const TEXT_LIMIT: usize = holdfast_engine::builtin::MAX_TEXT;

/// A letter to send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Correspondence {
    /// The session that writes.
    pub from: SessionId,
    /// Its agent's slug, which the recipient's model is told.
    pub from_agent: String,
    /// Whom it writes to.
    pub to: Address,
    /// The letter's id; a repeat of it to the same session is the same letter.
    pub id: MailId,
    /// What it says; at most [`TEXT_LIMIT`] bytes.
    pub text: String,
    /// The letter that it answers.
    pub in_reply_to: Option<MailId>,
    /// Whether the sender waits for an answer.
    pub expects_reply: bool,
    /// Whether it goes before other mail, and takes the recipient from what it waits for.
    pub interrupt: bool,
    /// How many sessions have passed it on: one more than the letter that it answers, 0 if it answers none.
    pub hops: u32,
    /// Whom the sender's agent may write to.
    pub scope: Scope,
    /// Whom it may interrupt.
    pub interrupt_scope: Scope,
    /// How many hops its letters may have.
    pub max_hops: u32,
    /// The trace in which it is written: a run that it starts belongs to it.
    pub traceparent: Option<String>,
}

/// What came of a letter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sent {
    /// The letter as it was accepted.
    pub receipt: Receipt,
    /// Who got it.
    pub recipient: SessionId,
    /// What the recipient is doing by then.
    pub status: Status,
    /// Whether a run of the recipient takes it up; if not, it waits until something else starts one. A repeat
    /// starts none.
    pub wakes: bool,
}

/// Why a letter wasn't sent.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// There is no such session, or it is another owner's, or deleted.
    #[error("there is no such session")]
    UnknownRecipient,
    /// The recipient is out of reach.
    #[error("{what} is outside the scope {scope}", what = if *.interrupts { "interrupting that session" } else { "that session" }, scope = .scope.word())]
    NotPermitted {
        /// The scope that doesn't reach it.
        scope: Scope,
        /// Whether only the interrupt was refused; without, the letter would be accepted.
        interrupts: bool,
    },
    /// The recipient has as much unread mail as it may.
    #[error("the mailbox is full: it holds {limit} unread messages; try again when they are read")]
    MailboxFull {
        /// How much it may hold.
        limit: i64,
    },
    /// The letter was passed on too often.
    #[error("the letter has been passed on too often: {max} hops are allowed")]
    TooManyHops {
        /// How often it may be.
        max: u32,
    },
    /// Several sessions in reach have ids that end so.
    #[error("several sessions end in {0}; name one by its whole id")]
    Ambiguous(String),
    /// The text is too long.
    #[error("the text has more than {limit} bytes")]
    TooLong {
        /// How many it may have.
        limit: usize,
    },
    /// What the database says.
    #[error(transparent)]
    Store(StoreError),
}

impl SendError {
    /// A word for it that doesn't change.
    pub fn code(&self) -> &'static str {
        match self {
            Self::UnknownRecipient => "unknown_recipient",
            Self::NotPermitted { .. } => "not_permitted",
            Self::MailboxFull { .. } => "mailbox_full",
            Self::TooManyHops { .. } => "too_many_hops",
            Self::Ambiguous(_) => "ambiguous_recipient",
            Self::TooLong { .. } => "text_too_long",
            Self::Store(error) if error.is_unavailable() => "unavailable",
            Self::Store(_) => "internal",
        }
    }
}

impl From<KinError> for SendError {
    fn from(error: KinError) -> Self {
        match error {
            KinError::Unknown => Self::UnknownRecipient,
            KinError::NotPermitted(scope) => Self::NotPermitted { scope, interrupts: false },
            KinError::Ambiguous(end) => Self::Ambiguous(end),
            KinError::Store(error) => error.into(),
        }
    }
}

impl From<StoreError> for SendError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::UnknownSession => Self::UnknownRecipient,
            StoreError::MailboxFull { limit } => Self::MailboxFull { limit },
            error => Self::Store(error),
        }
    }
}

/// Sends a letter to another session of the owner. Whether it starts a run there, the recipient's agent decides by
/// what the sender is to it (`wakeOn`): `parent` from above, `child` from below, `peer` from elsewhere.
///
/// # Errors
/// [`SendError`]; then nothing was stored.
pub async fn send(store: &Store, owner: &str, letter: &Correspondence) -> Result<Sent, SendError> {
    if letter.hops > letter.max_hops {
        return Err(SendError::TooManyHops { max: letter.max_hops });
    }
    if letter.text.len() > TEXT_LIMIT {
        return Err(SendError::TooLong { limit: TEXT_LIMIT });
    }
    let (recipient, relation) = kin::find(store, owner, letter.from, &letter.to, letter.scope).await?;
    if letter.interrupt && !letter.interrupt_scope.allows(relation) {
        return Err(SendError::NotPermitted { scope: letter.interrupt_scope, interrupts: true });
    }
    let wake = Wake::As(WakeClass::from_session(relation));
    let (owner, traceparent) = (Some(owner.to_owned()), letter.traceparent.clone());
    let caller = Caller { owner, traceparent, key: None };
    match post::deliver(store, &caller, recipient, &envelope(letter), wake, &[]).await? {
        Done::Now(Accepted { receipt, status, wakes, .. }) => Ok(Sent { receipt, recipient, status, wakes }),
        Done::Before { .. } => Err(SendError::Store(StoreError::IdempotencyMismatch)),
    }
}

fn envelope(letter: &Correspondence) -> Letter {
    Letter {
        id: letter.id,
        from: Sender::Session { session_id: letter.from, agent: Some(letter.from_agent.clone()) },
        priority: if letter.interrupt { Priority::High } else { Priority::Normal },
        hops: letter.hops,
        body: MailBody::AgentMessage {
            text: letter.text.clone(),
            in_reply_to: letter.in_reply_to,
            expects_reply: letter.expects_reply,
        },
    }
}
