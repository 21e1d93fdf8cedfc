//! Waiting for a turn.

use std::time::Duration;

use holdfast_store::tool_rates::{self, MAX_WAIT, Rate};
use tokio::time::{Instant, sleep, timeout};

use super::{Frame, Reply, Wrapped, not_begun};
use crate::metrics::{self, Wrap};

/// How long the database may take to answer, and how long it is left alone after it didn't.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(200);

impl Wrapped {
    /// Takes the owner's next turn for this tool, at most as long as the call may take. While the database is
    /// away no turn can be had, and none is assumed.
    pub(super) async fn in_turn(&self, next: usize, frame: Frame, rate: Rate) -> Reply {
        let began = Instant::now();
        let ends = began + MAX_WAIT;
        let ends = frame.deadline.map_or(ends, |deadline| deadline.min(ends));
        let turn = loop {
            let left = ends.saturating_duration_since(Instant::now());
            let taken = tokio::select! {
                biased;
                () = frame.cancel.cancelled() => return not_begun(),
                taken = timeout(
                    PATIENCE.min(left),
                    tool_rates::take(&self.store, &self.owner, &self.tool, rate, left),
                ) => taken,
            };
            match taken {
                Ok(Ok(Some(wait))) => break Instant::now() + wait,
                Ok(Ok(None)) => return self.too_late(rate, left),
                Ok(Err(error)) if !error.is_unavailable() => {
                    tracing::warn!(%error, "the rate of a tool can't be kept");
                    return Reply::Refused(UNKNOWN.to_owned());
                }
                Ok(Err(_)) | Err(_) => {}
            }
            if Instant::now() + PAUSE >= ends {
                return Reply::Refused(UNKNOWN.to_owned());
            }
            tokio::select! {
                biased;
                () = frame.cancel.cancelled() => return not_begun(),
                () = sleep(PAUSE) => {}
            }
        };
        if turn > Instant::now() {
            metrics::wrapped(Wrap::RateWaited);
            tokio::select! {
                biased;
                () = frame.cancel.cancelled() => return not_begun(),
                () = tokio::time::sleep_until(turn) => {}
            }
        }
        self.inside(next, frame).await
    }

    fn too_late(&self, Rate { per_minute, burst }: Rate, left: Duration) -> Reply {
        metrics::wrapped(Wrap::RateRefused);
        let (tool, left) = (&self.tool, left.as_secs());
        Reply::Refused(format!(
            "{tool} is called too often: {per_minute} calls a minute are allowed, {burst} at once, and this call's \
             turn wouldn't come within {left} seconds. It was not run. Call it less often, or later."
        ))
    }
}

/// What a call comes to whose turn nobody knows.
const UNKNOWN: &str =
    "the tool has a rate limit, and whose turn it is couldn't be found out; the call was not run";
