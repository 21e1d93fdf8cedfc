//! How a command ends without success, and the exit code that says so.

use std::io;

/// Why a command failed. Each kind has an exit code of its own.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Failure {
    /// Anything that no other kind names.
    #[error("{0}")]
    Failed(String),
    /// A server said no.
    #[error("{message} ({}HTTP {status})", code.as_ref().map(|code| format!("{code}, ")).unwrap_or_default())]
    Refused {
        /// HTTP status.
        status: u16,
        /// Stable code of the error, if whoever answered has codes.
        code: Option<String>,
        /// Text for people.
        message: String,
    },
    /// The command line is wrong in a way that the parser can't see.
    #[error("{0}")]
    Usage(String),
    /// A setting, from a flag, the environment or `holdfast.toml`, can't be used.
    #[error("{0}")]
    Config(String),
    /// An agent doesn't load.
    #[error("{0}")]
    Agent(String),
    /// A tool failed.
    #[error("{0}")]
    Tool(String),
    /// Whoever read standard output has gone, as `head` does: nothing is left to do or to say.
    #[error("standard output was closed")]
    Closed,
}

impl Failure {
    /// The exit code.
    pub(crate) fn code(&self) -> u8 {
        match self {
            Self::Closed => 0,
            Self::Failed(_) | Self::Refused { .. } => 1,
            Self::Usage(_) => 2,
            Self::Config(_) => 3,
            Self::Agent(_) => 4,
            Self::Tool(_) => 5,
        }
    }

    /// A failure of some work, with what the system or a library says of it.
    pub(crate) fn during(what: &str) -> impl Fn(&dyn std::error::Error) -> Self {
        move |error| Self::Failed(format!("{what}: {}", chain(error)))
    }

    /// What failed writing means.
    pub(crate) fn writing(error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::Closed,
            _ => Self::Failed(format!("writing the output: {error}")),
        }
    }
}

/// An error with its causes, each said once.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_the_code_that_the_contract_gives_it() {
        let codes = [
            (Failure::Failed(String::new()), 1),
            (Failure::Refused { status: 404, code: Some("unknown_session".into()), message: "no".into() }, 1),
            (Failure::Usage(String::new()), 2),
            (Failure::Config(String::new()), 3),
            (Failure::Agent(String::new()), 4),
            (Failure::Tool(String::new()), 5),
        ];
        for (failure, code) in codes {
            assert_eq!(failure.code(), code, "{failure:?}");
        }
    }

    #[test]
    fn a_closed_pipe_is_no_failure_of_the_command() {
        let closed = io::Error::from(io::ErrorKind::BrokenPipe);
        assert_eq!(Failure::writing(&closed).code(), 0);
        assert_eq!(Failure::writing(&io::Error::from(io::ErrorKind::StorageFull)).code(), 1);
    }

    #[test]
    fn causes_are_told_once() {
        let inner = io::Error::other("connection refused");
        let outer = io::Error::other(inner);
        assert_eq!(chain(&outer), "connection refused");
    }
}
