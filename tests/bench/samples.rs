//! Durations of one kind, and what is said of them.

use std::{fmt, time::Duration};

/// Durations in the order in which they were measured.
#[derive(Debug, Default, Clone)]
pub(crate) struct Samples(Vec<Duration>);

impl Samples {
    /// One more.
    pub(crate) fn add(&mut self, took: Duration) {
        self.0.push(took);
    }

    /// The duration that so many of a hundred stay within, in milliseconds; 0 without samples.
    pub(crate) fn percentile(&self, percent: usize) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let rank = (sorted.len() * percent).div_ceil(100).max(1);
        sorted.get(rank - 1).map_or(0.0, |took| took.as_secs_f64() * 1000.0)
    }
}

impl fmt::Display for Samples {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for percent in [50, 90, 99] {
            write!(f, "p{percent} {:>8.2}  ", self.percentile(percent))?;
        }
        write!(f, "max {:>8.2} ms  of {}", self.percentile(100), self.0.len())
    }
}
