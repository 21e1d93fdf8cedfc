//! Waiting between attempts to reconnect.

use std::time::Duration;

const FIRST: Duration = Duration::from_millis(50);
const LAST: Duration = Duration::from_secs(5);

/// Doubles from 50 ms to 5 s, each wait shortened at random by up to half, so that the many clients of a
/// restarted server don't return in step.
#[derive(Debug)]
pub(crate) struct Backoff {
    next: Duration,
}

impl Backoff {
    pub(crate) fn new() -> Self {
        Self { next: FIRST }
    }

    /// The next wait.
    pub(crate) fn step(&mut self) -> Duration {
        let wait = self.next.mul_f64(rand::random_range(0.5..1.0));
        self.next = (self.next * 2).min(LAST);
        wait
    }

    /// Starts over after a success.
    pub(crate) fn reset(&mut self) {
        self.next = FIRST;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_to_the_bound_and_start_over() {
        let mut backoff = Backoff::new();
        let first = backoff.step();
        assert!(first >= FIRST / 2 && first < FIRST);
        let waits: Vec<_> = (0..20).map(|_| backoff.step()).collect();
        assert!(waits.iter().all(|wait| *wait < LAST));
        assert!(waits[10..].iter().all(|wait| *wait >= LAST / 2));
        backoff.reset();
        assert!(backoff.step() < FIRST);
    }
}
