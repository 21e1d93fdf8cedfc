//! The statements of the hot path, one file each under `src/sql/`. A test prepares every one of them
//! on a real server.

macro_rules! statements {
    ($($name:ident = $file:literal),+ $(,)?) => {
        $(pub(crate) const $name: &str = include_str!(concat!("sql/", $file, ".sql"));)+

        /// Every statement with the name of its file.
        pub const ALL: &[(&str, &str)] = &[$(($file, $name)),+];
    };
}

statements! {
    LOCK_SESSION = "lock_session",
    LOCK_RUN = "lock_run",
    FIND_MAIL = "find_mail",
    COUNT_UNREAD = "count_unread",
    COUNT_ORDERS = "count_orders",
    INSERT_MAIL = "insert_mail",
    INSERT_EVENTS = "insert_events",
    ACCEPT_SESSION = "accept_session",
    WAKE_RUN = "wake_run",
    INSERT_BLOBS = "insert_blobs",
    INSERT_SESSION = "insert_session",
    CURRENT_AGENT = "current_agent",
    REMEMBER_KEY = "remember_key",
    RECALL_KEY = "recall_key",
    FORGET_OLD_KEY = "forget_old_key",
    LOCK_SESSION_OF_TOKEN = "lock_session_of_token",
    LOCK_RUN_OF_TOKEN = "lock_run_of_token",
    LOCK_CONTINUATION = "lock_continuation",
    SETTLE_CONTINUATION = "settle_continuation",
    HAS_OPEN_CONTINUATIONS = "has_open_continuations",
    CANCEL_OPEN_CONTINUATIONS = "cancel_open_continuations",
    OVERDUE_CONTINUATIONS = "overdue_continuations",
    DUE_OWNERS = "due_owners",
    CLAIM_QUEUED = "claim_queued",
    CLAIM_HINTED = "claim_hinted",
    LOCK_LIMITS = "lock_limits",
    COUNT_HELD = "count_held",
    FILL_BUCKETS = "fill_buckets",
    COUNT_QUEUED = "count_queued",
    CLAIM_EXPIRED = "claim_expired",
    HEARTBEAT = "heartbeat",
    LOOK = "look",
    RELEASE = "release",
    LOAD_SESSION = "load_session",
    LOAD_TURNS = "load_turns",
    LOAD_CALLS = "load_calls",
    LOAD_UNREAD = "load_unread",
    LOAD_MAIL = "load_mail",
    LOAD_MODE = "load_mode",
    LOAD_BLOBS = "load_blobs",
    COMMIT_SESSION = "commit_session",
    INSERT_TURNS = "insert_turns",
    INSERT_CALLS = "insert_calls",
    UPDATE_CALLS = "update_calls",
    INSERT_CONTINUATIONS = "insert_continuations",
    END_RUN = "end_run",
    FAIL_SESSION = "fail_session",
    PARK_RUN = "park_run",
    READ_COMMIT = "read_commit",
    LOCK_TREE = "lock_tree",
    TREE_IS_CLOSED = "tree_is_closed",
    ARCHIVE_SESSION = "archive_session",
    RUN_IN_TREE = "run_in_tree",
    COUNT_CONTINUATIONS = "count_continuations",
    DELETE_TREE = "delete_tree",
    DELETE_RUNS = "delete_runs",
    DELETE_CONTINUATIONS = "delete_continuations",
}
