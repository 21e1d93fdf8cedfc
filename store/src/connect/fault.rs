//! What a failed database call means for its caller: wait, try again, or give up.

use std::error::Error as StdError;
use std::io;

use deadpool_postgres::PoolError;
use sqlx::postgres::{PgDatabaseError, PgSeverity};
use tokio_postgres::error::Severity;

/// What to do about an error of the database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The database is away, full or too slow: back off and try again, or answer `unavailable`. If the
    /// connection was lost during COMMIT, the transaction's outcome is unknown.
    Unavailable,
    /// The server rolled the transaction back because of its neighbours: run it again.
    Retryable,
    /// Trying again gives the same error.
    Permanent,
}

impl Fault {
    /// What an SQLSTATE means.
    pub fn of_code(code: &str) -> Fault {
        match code {
            // Serialization failure, deadlock, and a lock that wasn't granted within lock_timeout.
            // And what a pipelined statement says behind one that failed so.
            "40001" | "40P01" | "55P03" | "25P02" => Fault::Retryable,
            // Shutdowns, a server that is starting, idle limits that closed the connection, a
            // statement over its time, a primary that has become a standby, a full disk or memory.
            "57P01" | "57P02" | "57P03" | "57P05" | "25P03" | "57014" | "25006" => Fault::Unavailable,
            // And whatever else the server's own system doesn't let it do.
            "53000" | "53100" | "53200" | "53300" | "58000" | "58030" => Fault::Unavailable,
            code if code.starts_with("08") => Fault::Unavailable,
            _ => Fault::Permanent,
        }
    }

    /// What an SQLSTATE means in a message that `ends` the session or not. An internal error that does is one
    /// of the server's surroundings, such as a file that it can't write when a session begins on a full disk.
    fn of_said(code: &str, ends: bool) -> Fault {
        if ends && code == "XX000" { Fault::Unavailable } else { Fault::of_code(code) }
    }

    /// What an error of the hot path means.
    pub fn of(error: &tokio_postgres::Error) -> Fault {
        if let Some(said) = error.as_db_error() {
            let ends = matches!(said.parsed_severity(), Some(Severity::Fatal | Severity::Panic));
            return Fault::of_said(said.code().code(), ends);
        }
        if error.is_closed() { Fault::Unavailable } else { of_cause(error) }
    }

    /// What an error of the hot pool means.
    pub fn of_pool(error: &PoolError) -> Fault {
        match error {
            PoolError::Timeout(_) | PoolError::Closed => Fault::Unavailable,
            PoolError::Backend(error) => Fault::of(error),
            PoolError::NoRuntimeSpecified | PoolError::PostCreateHook(_) => Fault::Permanent,
        }
    }

    /// What an error of the read side means.
    pub fn of_sqlx(error: &sqlx::Error) -> Fault {
        match error {
            sqlx::Error::Database(error) => {
                let said = error.try_downcast_ref::<PgDatabaseError>();
                let ends =
                    said.is_some_and(|said| matches!(said.severity(), PgSeverity::Fatal | PgSeverity::Panic));
                error.code().map_or(Fault::Permanent, |code| Fault::of_said(&code, ends))
            }
            sqlx::Error::Io(error) => of_io(error),
            sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed | sqlx::Error::WorkerCrashed => {
                Fault::Unavailable
            }
            sqlx::Error::Tls(error) => of_cause_from(Some(&**error)),
            _ => Fault::Permanent,
        }
    }
}

/// Whether the error says only that the database is away for now.
pub fn is_transient(error: &tokio_postgres::Error) -> bool {
    Fault::of(error) == Fault::Unavailable
}

/// Whether the whole transaction should be run again.
pub fn is_retryable(error: &tokio_postgres::Error) -> bool {
    Fault::of(error) == Fault::Retryable
}

fn of_cause(error: &tokio_postgres::Error) -> Fault {
    of_cause_from(error.source())
}

/// Finds the system's error among the causes; drivers hide which step it broke.
fn of_cause_from(mut cause: Option<&(dyn StdError + 'static)>) -> Fault {
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<io::Error>() {
            return of_io(error);
        }
        cause = error.source();
    }
    Fault::Permanent
}

/// Refused certificates and malformed messages come as invalid data or input; everything else of the
/// system's is about reaching the server.
fn of_io(error: &io::Error) -> Fault {
    match error.kind() {
        io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput | io::ErrorKind::PermissionDenied => {
            Fault::Permanent
        }
        _ => Fault::Unavailable,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_mean_what_the_callers_do() {
        for code in ["57P01", "57P02", "57P03", "08006", "08P01", "53300", "25006", "57014"] {
            assert_eq!(Fault::of_code(code), Fault::Unavailable, "{code}");
        }
        for code in ["40001", "40P01", "55P03"] {
            assert_eq!(Fault::of_code(code), Fault::Retryable, "{code}");
        }
        for code in ["23505", "42P01", "28P01", "3D000", "22P05"] {
            assert_eq!(Fault::of_code(code), Fault::Permanent, "{code}");
        }
    }

    #[test]
    fn an_internal_error_is_a_fault_of_ours_unless_it_ends_the_session() {
        assert_eq!(Fault::of_said("XX000", false), Fault::Permanent);
        assert_eq!(Fault::of_said("XX000", true), Fault::Unavailable);
        assert_eq!(Fault::of_said("28P01", true), Fault::Permanent, "a wrong password stays wrong");
    }

    #[test]
    fn the_read_sides_errors_are_told_apart() {
        let reset = io::Error::from(io::ErrorKind::ConnectionReset);
        assert_eq!(Fault::of_sqlx(&sqlx::Error::Io(reset)), Fault::Unavailable);
        assert_eq!(Fault::of_sqlx(&sqlx::Error::PoolTimedOut), Fault::Unavailable);
        assert_eq!(Fault::of_sqlx(&sqlx::Error::RowNotFound), Fault::Permanent);
        let refused = sqlx::Error::Tls(Box::new(io::Error::from(io::ErrorKind::InvalidData)));
        assert_eq!(Fault::of_sqlx(&refused), Fault::Permanent);
    }
}
