//! How long a call may take, and how often it is tried.

use std::time::Duration;

use holdfast_engine::{policy::DEFAULT_BACKOFF_MS, tool::Outcome};
use tokio::time::{Instant, sleep};

use super::{Frame, Reply, Report, Wrapped};
use crate::metrics::{self, Wrap};

/// The longest pause between two attempts.
const MAX_PAUSE: Duration = Duration::from_secs(60);

/// The pause before an attempt; the second is the first that has one. It doubles from attempt to attempt.
pub(crate) fn pause(backoff: Option<Duration>, attempt: u32) -> Duration {
    let backoff = backoff.unwrap_or(Duration::from_millis(DEFAULT_BACKOFF_MS));
    match attempt.checked_sub(2) {
        None => Duration::ZERO,
        Some(doublings) => backoff.saturating_mul(1 << doublings.min(16)).min(MAX_PAUSE),
    }
}

impl Wrapped {
    /// Ends what is inside when the time is over, and waits until it is gone.
    pub(super) async fn in_time(&self, next: usize, frame: Frame, limit: Duration) -> Reply {
        let ends = Instant::now() + limit;
        let cancel = frame.cancel.child_token();
        let deadline = Some(frame.deadline.map_or(ends, |earlier| earlier.min(ends)));
        let mut inside = self.inside(next, Frame { cancel: cancel.clone(), deadline, ..frame });
        tokio::select! {
            biased;
            reply = &mut inside => return reply,
            () = tokio::time::sleep_until(ends) => cancel.cancel(),
        }
        match inside.await {
            Reply::Ended(Outcome::Cancelled(_)) => {
                metrics::wrapped(Wrap::TimedOut);
                let limit = limit.as_secs_f64();
                Reply::Ended(Outcome::Failed(format!(
                    "the call was stopped: it took longer than {limit} seconds"
                )))
            }
            // It has ended by itself in the same moment.
            reply => reply,
        }
    }

    /// Tries again what failed, with a pause that doubles.
    pub(super) async fn again(&self, next: usize, frame: Frame, count: u32, backoff: Duration) -> Reply {
        let attempts = count.saturating_add(1);
        let mut attempt = 1;
        loop {
            let reply = self.inside(next, frame.clone()).await;
            let failed = matches!(reply, Reply::Ended(Outcome::Failed(_)));
            let pause = pause(Some(backoff), attempt + 1);
            let late = frame.deadline.is_some_and(|deadline| Instant::now() + pause >= deadline);
            if !failed || attempt >= attempts || late || !self.may_differ(&frame.arguments) {
                return reply;
            }
            metrics::wrapped(Wrap::Retried);
            let pause_ms = u64::try_from(pause.as_millis()).unwrap_or(u64::MAX);
            let message = format!(
                "attempt {attempt} of {attempts} failed; the next one begins in {} s",
                pause.as_secs_f64()
            );
            (self.watcher)(Report::Again { message, attempt, of: attempts, pause_ms });
            tokio::select! {
                biased;
                // The failure is what the attempts have come to.
                () = frame.cancel.cancelled() => return reply,
                () = sleep(pause) => {}
            }
            attempt += 1;
        }
    }

    /// Whether another attempt may end differently: arguments that don't fit never will.
    fn may_differ(&self, arguments: &str) -> bool {
        self.toolbox.script(&self.tool).is_some_and(|script| script.validate(arguments).is_ok())
    }
}
