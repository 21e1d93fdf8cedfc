//! The clock that decisions are made by.

use chrono::{DateTime, TimeDelta, Utc};
use tokio::time::Duration;

/// How far this process's clock may be from the database's without being corrected: they are never read at once.
const CLOSE: TimeDelta = TimeDelta::milliseconds(250);

/// The database's clock, as far as this process can tell: what a run waits for is the same time whichever worker
/// holds it, and the one by which parked runs are woken.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clock {
    ahead: TimeDelta,
}

impl Clock {
    /// A clock by what the database's has just said.
    pub(crate) fn by(read_at: DateTime<Utc>) -> Self {
        let ahead = read_at - Utc::now();
        Self { ahead: if ahead.abs() < CLOSE { TimeDelta::zero() } else { ahead } }
    }

    pub(crate) fn now(self) -> DateTime<Utc> {
        Utc::now() + self.ahead
    }

    /// Waits until a time, or for ever without one.
    pub(crate) async fn sleep_until(self, until: Option<DateTime<Utc>>) {
        match until {
            Some(until) => {
                let left = (until - self.now()).to_std().unwrap_or_default();
                // A little later rather than a little earlier: then it is over by the clock too.
                tokio::time::sleep(left + Duration::from_millis(1)).await;
            }
            None => std::future::pending().await,
        }
    }
}
