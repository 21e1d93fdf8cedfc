//! When a model is asked again.

use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};
use tokio::time::Instant;

use super::error::{Failure, FailureClass, ModelError};

/// How often a failure that may pass is answered by asking again.
pub const MAX_RETRIES: usize = 5;
/// The pause before the first retry; it doubles each time, and up to as much again is added by chance.
pub const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// The longest pause that is not the provider's wish.
pub const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// The longest pause that a provider is granted.
pub const LONGEST_RETRY_AFTER: Duration = Duration::from_secs(120);
/// How long one attempt may take, from connecting to the last byte.
pub const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(600);
/// How long all attempts and pauses together may take.
pub const TOTAL_TIMEOUT: Duration = Duration::from_secs(1200);

/// A pause before asking again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff {
    /// The number of the attempt that failed, from 1.
    pub attempt: u32,
    /// How long until the next one.
    pub delay: Duration,
    /// What kind of failure it met.
    pub class: FailureClass,
}

/// The times of a series of attempts.
#[derive(Debug, Clone, Copy)]
pub(super) struct Schedule {
    pub(super) first_pause: Duration,
    pub(super) longest_pause: Duration,
    pub(super) attempt: Duration,
    pub(super) total: Duration,
}

impl Default for Schedule {
    fn default() -> Self {
        Self {
            first_pause: FIRST_PAUSE,
            longest_pause: LONGEST_PAUSE,
            attempt: ATTEMPT_TIMEOUT,
            total: TOTAL_TIMEOUT,
        }
    }
}

/// Tries until an attempt succeeds, fails for good, or the retries or the time are used up.
pub(super) async fn series<T, A, F>(
    schedule: Schedule,
    on_backoff: &(dyn Fn(Backoff) + Send + Sync),
    mut attempt: A,
) -> Result<T, ModelError>
where
    A: FnMut() -> F,
    F: Future<Output = Result<T, Failure>>,
{
    let end = Instant::now() + schedule.total;
    let mut pauses = ExponentialBuilder::default()
        .with_min_delay(schedule.first_pause)
        .with_factor(2.0)
        .with_max_delay(schedule.longest_pause)
        .with_max_times(MAX_RETRIES)
        .with_jitter()
        .build();
    let mut attempts = 0;
    loop {
        attempts += 1;
        let limit = (Instant::now() + schedule.attempt).min(end);
        let outcome = tokio::time::timeout_at(limit, attempt()).await;
        let (detail, retry_after, class) = match outcome {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(Failure::Final(error))) => return Err(error),
            Ok(Err(Failure::Passing { detail, retry_after, class })) => (detail, retry_after, class),
            Err(_) => ("the answer took too long".to_owned(), None, FailureClass::Timeout),
        };
        if let Some(wait) = retry_after.filter(|wait| *wait > LONGEST_RETRY_AFTER) {
            return Err(ModelError::AskedToWait { wait, limit: LONGEST_RETRY_AFTER, detail });
        }
        let Some(pause) = pauses.next() else { return Err(ModelError::GaveUp { attempts, detail, class }) };
        let delay = pause.min(schedule.longest_pause).max(retry_after.unwrap_or_default());
        if Instant::now() + delay >= end {
            let detail = format!("{detail} (no time is left to ask again)");
            return Err(ModelError::GaveUp { attempts, detail, class });
        }
        on_backoff(Backoff { attempt: attempts, delay, class });
        tokio::time::sleep(delay).await;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// Runs a series in which attempt n fails with the n-th failure, and then succeeds.
    async fn run(failures: Vec<Failure>) -> (Result<u32, ModelError>, Vec<Backoff>, Duration) {
        let backoffs = Mutex::new(Vec::new());
        let record = |backoff| backoffs.lock().expect("no panic").push(backoff);
        let mut failures = failures.into_iter();
        let mut attempts = 0;
        let begin = Instant::now();
        let result = series(Schedule::default(), &record, || {
            attempts += 1;
            let outcome = failures.next().map_or(Ok(attempts), Err);
            async move { outcome }
        })
        .await;
        (result, backoffs.into_inner().expect("no panic"), begin.elapsed())
    }

    fn passing(seconds: Option<u64>) -> Failure {
        let retry_after = seconds.map(Duration::from_secs);
        Failure::Passing { detail: "busy".into(), retry_after, class: FailureClass::RateLimited }
    }

    #[tokio::test(start_paused = true)]
    async fn pauses_double_with_jitter() {
        let (result, backoffs, _) = run((0..5).map(|_| passing(None)).collect()).await;
        assert_eq!(result.expect("the sixth attempt answers"), 6);
        for (number, backoff) in (0..).zip(&backoffs) {
            let least = FIRST_PAUSE * 2_u32.pow(number);
            assert_eq!(backoff.attempt, number + 1);
            assert!(backoff.delay >= least && backoff.delay <= least * 2, "{backoff:?}");
        }
        assert_eq!(backoffs.len(), 5);
    }

    #[tokio::test(start_paused = true)]
    async fn the_sixth_failure_is_the_last() {
        let (result, backoffs, _) = run((0..9).map(|_| passing(None)).collect()).await;
        let error = result.expect_err("gave up");
        assert_eq!(error.to_string(), "the model gave no answer in 6 attempts; the last one: busy");
        assert_eq!(backoffs.len(), 5);
    }

    #[tokio::test(start_paused = true)]
    async fn retry_after_is_honoured_up_to_its_limit() {
        let (result, backoffs, elapsed) = run(vec![passing(Some(120))]).await;
        assert_eq!(result.expect("an answer"), 2);
        let class = FailureClass::RateLimited;
        assert_eq!(backoffs, [Backoff { attempt: 1, delay: Duration::from_secs(120), class }]);
        assert!(elapsed >= Duration::from_secs(120));

        let (result, backoffs, elapsed) = run(vec![passing(Some(121))]).await;
        let error = result.expect_err("too long").to_string();
        assert!(error.contains("121 seconds") && error.contains("120"), "{error}");
        assert_eq!((backoffs.len(), elapsed), (0, Duration::ZERO));
    }

    #[tokio::test(start_paused = true)]
    async fn a_final_failure_is_not_tried_again() {
        let (result, backoffs, _) = run(vec![Failure::malformed("no JSON")]).await;
        assert!(matches!(result, Err(ModelError::Malformed { .. })));
        assert!(backoffs.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn attempts_and_the_whole_are_bounded_in_time() {
        let begin = Instant::now();
        let backoffs = Mutex::new(0);
        let count = |_| *backoffs.lock().expect("no panic") += 1;
        let result: Result<(), _> = series(Schedule::default(), &count, std::future::pending).await;
        let class = FailureClass::Timeout;
        assert!(
            matches!(result, Err(ModelError::GaveUp { attempts: 2, class: met, .. }) if met == class),
            "{result:?}"
        );
        assert_eq!(*backoffs.lock().expect("no panic"), 1);
        assert_eq!(begin.elapsed(), TOTAL_TIMEOUT);
    }
}
