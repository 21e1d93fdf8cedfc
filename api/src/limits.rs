//! The limits of the HTTP surface: what is longer, larger or more is refused, and the answer says so.

use std::time::Duration;

/// Bytes of a request body, unless configured otherwise.
pub const MAX_BODY: usize = 32 * 1024 * 1024;
/// Seconds after which a client whose owner's queue is full may try again.
pub(crate) const BACKLOG_RETRY_AFTER: u32 = 5;
/// Items of a list when the client names no number.
pub(crate) const LIST_DEFAULT: i64 = 50;
/// Items of a list at most.
pub(crate) const LIST_MAX: i64 = 500;
/// Turns of a view when the client names no number.
pub(crate) const TURNS_DEFAULT: i64 = 200;
/// Bytes of messages and results after which a page of turns or mail ends early; the first item is
/// always whole.
pub(crate) const PAGE_BYTES: u64 = 64 * 1024 * 1024;
/// Bytes of a text that is kept where it stands and shown with everything around it: an agent's message,
/// why a call failed.
pub(crate) const INLINE_TEXT: usize = 64 * 1024;
/// Labels of a session.
pub(crate) const LABELS: usize = 64;
/// Bytes of a label's key.
pub(crate) const LABEL_KEY: usize = 100;
/// Bytes of a label's value.
pub(crate) const LABEL_VALUE: usize = 500;
/// Bytes of an agent's slug.
pub(crate) const SLUG: usize = 100;
/// Bytes of an owner's name.
pub(crate) const OWNER: usize = 200;
/// Bytes of a search text.
pub(crate) const SEARCH: usize = 200;
/// Bytes of a tool's name in a filter.
pub(crate) const TOOL: usize = 200;
/// Attachments of a message.
pub(crate) const MEDIA: usize = 64;
/// Bytes of a MIME type.
pub(crate) const MIME: usize = 200;
/// Bytes of an attachment's file name.
pub(crate) const FILENAME: usize = 500;
/// Visible ASCII characters of an idempotency key.
pub(crate) const KEY: usize = 200;
/// Calls that one order cancels.
pub(crate) const CANCELLED_CALLS: usize = 500;
/// Characters of a request id that is kept as the client sent it.
pub(crate) const REQUEST_ID: usize = 128;
/// Lowest and highest priority of a session.
pub(crate) const PRIORITY: std::ops::RangeInclusive<i16> = -100..=100;

/// How long a waiting request waits when the client names no time.
pub(crate) const WAIT_DEFAULT: Duration = Duration::from_secs(120);
/// How long it waits at most.
pub(crate) const WAIT_MAX: Duration = Duration::from_secs(600);
/// How long an accepted message that starts no run is waited for, so that the view shows it.
pub(crate) const FOLD_WAIT: Duration = Duration::from_secs(2);
/// How long a cancelled run is waited for.
pub(crate) const CANCEL_WAIT: Duration = Duration::from_secs(10);
/// How long a paused run is waited for.
pub(crate) const PAUSE_WAIT: Duration = Duration::from_secs(2);
/// How long a body may pause between two of its parts.
pub(crate) const BODY_PAUSE: Duration = Duration::from_secs(30);
/// Bytes of a refused body that are still read, so that a client that only sends meets an answer and not a
/// closed connection.
pub(crate) const DISCARDED: usize = 64 * 1024 * 1024;
/// How long they are read at most.
pub(crate) const DISCARD_TIME: Duration = Duration::from_secs(10);
/// Silence on an event stream after which a comment is sent.
pub(crate) const KEEPALIVE: Duration = Duration::from_secs(15);
/// Events that a stream reads at once.
pub(crate) const EVENT_PAGE: i64 = 200;
/// Sessions in the snapshot of the feed.
pub(crate) const FEED_SNAPSHOT: i64 = 50;
/// How often every waiting request and stream is checked against the database.
pub(crate) const SCAN: Duration = Duration::from_secs(1);
/// How many sessions one check names.
pub(crate) const SCAN_CHUNK: usize = 1_000;
/// Between two looks of one reader at the feed, however much happens.
pub(crate) const FEED_PAUSE: Duration = Duration::from_millis(100);
/// Between two looks of one long poll, however much happens.
pub(crate) const POLL_PAUSE: Duration = Duration::from_millis(250);
/// How long a health check waits for the database.
pub(crate) const HEALTH_WAIT: Duration = Duration::from_secs(2);
/// How long metrics wait for counts of the queue before they are shown without.
pub(crate) const METRICS_WAIT: Duration = Duration::from_secs(1);
/// How long counts of the queue are shown before they are counted again.
pub(crate) const CENSUS_AGE: Duration = Duration::from_secs(1);
/// Bytes of prompts and tool lists that a node keeps at hand.
pub(crate) const KEPT_BLOBS: usize = 32 * 1024 * 1024;
/// Seconds that a browser may keep the answer to a preflight.
pub(crate) const PREFLIGHT_AGE: &str = "600";
/// Bytes of a token file.
pub(crate) const TOKEN_FILE: u64 = 16 * 1024 * 1024;
/// Event streams that a node serves at once.
pub(crate) const STREAMS: i64 = 10_000;
/// Requests that wait on a node at once.
pub(crate) const WAITERS: i64 = 20_000;
