//! Identifiers. Each is a UUID of its own type, so that one can't stand in for another.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub Uuid);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl FromStr for $name {
            type Err = uuid::Error;
            fn from_str(text: &str) -> Result<Self, Self::Err> {
                text.parse().map(Self)
            }
        }

        impl From<Uuid> for $name {
            fn from(id: Uuid) -> Self {
                Self(id)
            }
        }
    };
}

id!(
    /// One conversation.
    SessionId
);
id!(
    /// One turn of a session.
    TurnId
);
id!(
    /// One tool call, named by the engine. Providers' own ids may repeat; this one doesn't.
    CallId
);
id!(
    /// The token of a deferred call: whoever of its owner's programs holds it may complete the call.
    Token
);
id!(
    /// One envelope of a mailbox. A sender may choose it, which makes sending idempotent.
    MailId
);
id!(
    /// One incarnation of a worker process.
    WorkerId
);
