//! The clock that decisions are made by.

use chrono::{DateTime, TimeDelta, Utc};
use tokio::time::{Duration, Instant};

/// How far this process's clock may be from the database's without being corrected: they are never read at once.
const CLOSE: TimeDelta = TimeDelta::milliseconds(250);

/// The database's clock, as far as this process can tell: what a run waits for is the same time whichever worker
/// holds it, and the one by which parked runs are woken. It goes on by the time that passes: whoever sets this
/// process's clock while a run is held ends no wait of it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clock {
    said: DateTime<Utc>,
    at: Instant,
}

impl Clock {
    /// A clock by what the database's has just said.
    pub(crate) fn by(read_at: DateTime<Utc>) -> Self {
        let (here, at) = (Utc::now(), Instant::now());
        // Never behind: what is due by the database is due here.
        Self { said: if (read_at - here).abs() < CLOSE { here.max(read_at) } else { read_at }, at }
    }

    pub(crate) fn now(self) -> DateTime<Utc> {
        self.said + self.at.elapsed()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_follows_the_databases_where_they_are_apart() {
        let days = TimeDelta::days(3);
        for apart in [days, -days] {
            let read_at = Utc::now() + apart;
            let clock = Clock::by(read_at);
            let passed = clock.now() - read_at;
            assert!(passed >= TimeDelta::zero() && passed < TimeDelta::minutes(1), "{apart}: {passed}");
        }
        let before = Utc::now();
        assert!(Clock::by(before - CLOSE / 2).now() >= before, "those that are close are alike");
    }
}
