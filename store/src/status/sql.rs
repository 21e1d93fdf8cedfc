//! The statements of the report, one file each under `src/status/sql/`. They are checked against the schema when
//! the crate is built; a test looks at their plans over full tables.

macro_rules! statements {
    ($($name:literal),+ $(,)?) => {
        /// Every statement with the name of its file.
        pub const ALL: &[(&str, &str)] = &[$(($name, include_str!(concat!("sql/", $name, ".sql")))),+];
    };
}

statements! {
    "queue", "parked", "owners", "waiting", "unserved", "leases", "takeovers", "steps", "deferred", "deferred_groups",
    "deferred_oldest", "failures", "failed_sessions", "connections", "transactions", "horizon", "lock_waits", "waits",
    "tables", "totals", "closed_sessions", "retention", "old_events", "session", "session_calls", "session_events",
    "webhooks",
}
