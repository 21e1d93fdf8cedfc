//! What the store refuses or can't do.

use holdfast_engine::content::BlobError;

use crate::{
    connect::{ConnectError, Fault},
    counters::{COUNTERS, ErrorKind},
    outage,
};

/// Why a store function has no answer.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Postgres is away, restarting or out of connections; trying again later may work.
    #[error("the database is not available: {0}")]
    Unavailable(String),
    /// Postgres ended the transaction for the sake of another one; the store tries again by itself.
    #[error("the transaction was rolled back for another one")]
    Rival,
    /// No such session for this caller.
    #[error("unknown session")]
    UnknownSession,
    /// No such agent.
    #[error("unknown agent {0:?}")]
    UnknownAgent(String),
    /// No such token for this caller.
    #[error("unknown token")]
    UnknownToken,
    /// The token was used before.
    #[error("the call was completed before")]
    TokenCompleted {
        /// Whether with the same result, as a retry would.
        same_result: bool,
    },
    /// The call was cancelled before a result came.
    #[error("the call was cancelled")]
    TokenCancelled,
    /// The call's deadline has passed.
    #[error("the call expired")]
    TokenExpired,
    /// The call isn't one that may be let run: it waits for its result.
    #[error("this call waits for its result; there is nothing to approve")]
    NothingToApprove,
    /// A run goes on that has to end first.
    #[error("a run is in progress")]
    RunInProgress,
    /// There is no run to cancel.
    #[error("no run is active")]
    NoActiveRun,
    /// The mailbox holds as much unread mail as it may.
    #[error("the mailbox is full: it holds {limit} unread messages")]
    MailboxFull {
        /// How much it may hold.
        limit: i64,
    },
    /// The owner has as many runs queued as it may.
    #[error("the queue is full: {limit} runs of this owner wait")]
    Backlog {
        /// How many may wait.
        limit: i64,
    },
    /// The idempotency key was used for another request.
    #[error("the idempotency key was used for another request")]
    IdempotencyMismatch,
    /// Stored data that this build can't read.
    #[error("stored data can't be read: {0}")]
    Corrupt(String),
    /// Anything else that Postgres says.
    #[error("database error {code}: {message}")]
    Database {
        /// The SQLSTATE, or `client`.
        code: String,
        /// The server's message; never shown to clients.
        message: String,
    },
}

impl StoreError {
    /// Whether the database is away, as opposed to having said no.
    pub fn is_unavailable(&self) -> bool {
        matches!(self, Self::Unavailable(_))
    }

    /// What it is when the database doesn't answer for too long.
    pub fn late(what: &str) -> Self {
        let kind = Some(ErrorKind::StatementTimeout);
        Self::of(Fault::Unavailable, kind, Some("57014"), format!("{what} takes too long"))
    }

    /// Every error of the database comes through here, and is counted once.
    fn of(fault: Fault, kind: Option<ErrorKind>, code: Option<&str>, message: String) -> Self {
        if let Some(kind) = kind {
            COUNTERS.failed(kind);
        }
        match fault {
            Fault::Unavailable => {
                outage::failed(outage::cause(code), &message);
                Self::Unavailable(message)
            }
            Fault::Retryable => Self::Rival,
            Fault::Permanent => Self::Database { code: code.unwrap_or("client").to_owned(), message },
        }
    }
}

impl From<tokio_postgres::Error> for StoreError {
    fn from(error: tokio_postgres::Error) -> Self {
        let message = error.as_db_error().map_or_else(|| error.to_string(), |db| db.message().to_owned());
        let (fault, code) = (Fault::of(&error), error.code().map(tokio_postgres::error::SqlState::code));
        Self::of(fault, kind(fault, code), code, message)
    }
}

impl From<ConnectError> for StoreError {
    fn from(error: ConnectError) -> Self {
        let fault = error.fault();
        let kind = match &error {
            ConnectError::PoolTimeout { .. } => Some(ErrorKind::PoolTimeout),
            ConnectError::Postgres(cause) => {
                kind(fault, cause.code().map(tokio_postgres::error::SqlState::code))
            }
            _ => kind(fault, None),
        };
        Self::of(fault, kind, error.code(), error.to_string())
    }
}

/// What a failure is counted as; without a code it is the connection that failed, or this process.
fn kind(fault: Fault, code: Option<&str>) -> Option<ErrorKind> {
    match code {
        Some(code) => ErrorKind::of_code(code),
        None if fault == Fault::Unavailable => Some(ErrorKind::Connection),
        None => Some(ErrorKind::Other),
    }
}

impl From<sqlx::Error> for StoreError {
    fn from(error: sqlx::Error) -> Self {
        let fault = Fault::of_sqlx(&error);
        match error.as_database_error() {
            Some(db) => {
                let code = db.code();
                Self::of(fault, kind(fault, code.as_deref()), code.as_deref(), db.message().to_owned())
            }
            None => {
                let timeout = matches!(error, sqlx::Error::PoolTimedOut).then_some(ErrorKind::PoolTimeout);
                Self::of(fault, timeout.or_else(|| kind(fault, None)), None, error.to_string())
            }
        }
    }
}

impl From<serde_json::Error> for StoreError {
    fn from(error: serde_json::Error) -> Self {
        Self::Corrupt(error.to_string())
    }
}

impl From<BlobError> for StoreError {
    fn from(error: BlobError) -> Self {
        Self::Corrupt(error.to_string())
    }
}
