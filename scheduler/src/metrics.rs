//! What a scheduler counts, in the process's default registry.

use std::{sync::LazyLock, time::Duration};

use prometheus::{
    Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, Opts, core::Collector,
    default_registry,
};

use crate::{PASSES, webhooks::Outcome as Sent};

/// How a pass goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Nothing is left to do.
    Done,
    /// More was left than a pass does, or the scheduler stops.
    Unfinished,
    /// The database was away.
    Unavailable,
    /// Something else went wrong.
    Failed,
}

impl Outcome {
    const ALL: [Self; 4] = [Self::Done, Self::Unfinished, Self::Unavailable, Self::Failed];

    fn word(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Unfinished => "unfinished",
            Self::Unavailable => "unavailable",
            Self::Failed => "failed",
        }
    }
}

static METRICS: LazyLock<Metrics> = LazyLock::new(Metrics::new);

struct Metrics {
    passes: IntCounterVec,
    seconds: HistogramVec,
    work: IntCounterVec,
    retired: IntCounter,
    webhooks: IntCounterVec,
    webhook_seconds: Histogram,
    webhooks_dead: IntCounter,
}

/// How attempts to send a webhook end.
const SENT: [&str; 3] = ["delivered", "failed", "gone"];

impl Metrics {
    fn new() -> Self {
        let buckets = vec![0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0, 600.0];
        let metrics = Self {
            passes: keep(IntCounterVec::new(
                Opts::new("holdfast_scheduler_passes_total", "Passes by name and outcome."),
                &["pass", "outcome"],
            )),
            seconds: keep(HistogramVec::new(
                HistogramOpts::new("holdfast_scheduler_pass_seconds", "Duration of passes.").buckets(buckets),
                &["pass"],
            )),
            work: keep(IntCounterVec::new(
                Opts::new("holdfast_scheduler_work_total", "What passes did: calls, runs, rows, partitions."),
                &["pass"],
            )),
            retired: keep(IntCounter::new(
                "holdfast_sessions_retired_total",
                "Closed sessions that were deleted for their age.",
            )),
            webhooks: keep(IntCounterVec::new(
                Opts::new(
                    "holdfast_webhook_attempts_total",
                    "Attempts to send a webhook, by how they ended.",
                ),
                &["outcome"],
            )),
            webhook_seconds: keep(Histogram::with_opts(
                HistogramOpts::new("holdfast_webhook_seconds", "Duration of attempts to send a webhook.")
                    .buckets(vec![0.005, 0.025, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0]),
            )),
            webhooks_dead: keep(IntCounter::new(
                "holdfast_webhooks_dead_total",
                "Webhooks that were given up.",
            )),
        };
        for outcome in SENT {
            metrics.webhooks.with_label_values(&[outcome]);
        }
        for pass in PASSES {
            metrics.seconds.with_label_values(&[pass.name]);
            metrics.work.with_label_values(&[pass.name]);
            for outcome in Outcome::ALL {
                metrics.passes.with_label_values(&[pass.name, outcome.word()]);
            }
        }
        metrics
    }
}

/// Registers a metric once; a second scheduler of the same process shares it.
#[expect(clippy::expect_used, reason = "names are constants of this file, and a test makes every metric")]
fn keep<M: Collector + Clone + 'static>(metric: prometheus::Result<M>) -> M {
    let metric = metric.expect("a metric's name and labels are valid");
    if let Err(error) = default_registry().register(Box::new(metric.clone())) {
        tracing::debug!(%error, "a metric is registered already");
    }
    metric
}

/// Makes every series, so that they are there before anything happens.
pub(crate) fn begin() {
    LazyLock::force(&METRICS);
}

pub(crate) fn passed(pass: &str, outcome: Outcome, took: Duration) {
    METRICS.passes.with_label_values(&[pass, outcome.word()]).inc();
    METRICS.seconds.with_label_values(&[pass]).observe(took.as_secs_f64());
}

pub(crate) fn did(pass: &str, count: u64) {
    METRICS.work.with_label_values(&[pass]).inc_by(count);
}

pub(crate) fn retired(sessions: u64) {
    METRICS.retired.inc_by(sessions);
}

pub(crate) fn webhook(outcome: &Sent, took: Duration) {
    let [delivered, failed, gone] = SENT;
    let word = match outcome {
        Sent::Delivered => delivered,
        Sent::Failed { .. } => failed,
        Sent::Gone => gone,
    };
    METRICS.webhooks.with_label_values(&[word]).inc();
    METRICS.webhook_seconds.observe(took.as_secs_f64());
}

pub(crate) fn webhook_dead() {
    METRICS.webhooks_dead.inc();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pass_has_its_series_before_it_ran() {
        begin();
        passed("expire_tokens", Outcome::Unavailable, Duration::from_millis(3));
        did("expire_tokens", 2);
        retired(4);
        let text =
            prometheus::TextEncoder::new().encode_to_string(&prometheus::gather()).expect("valid metrics");
        for wanted in [
            r#"holdfast_scheduler_passes_total{outcome="unavailable",pass="expire_tokens"} 1"#,
            r#"holdfast_scheduler_passes_total{outcome="failed",pass="retire_closed"} 0"#,
            r#"holdfast_scheduler_pass_seconds_count{pass="expire_tokens"} 1"#,
            r#"holdfast_scheduler_work_total{pass="expire_tokens"} 2"#,
            r#"holdfast_scheduler_work_total{pass="purge_deleted"} 0"#,
            "holdfast_sessions_retired_total 4",
        ] {
            assert!(text.contains(wanted), "{wanted} is missing from\n{text}");
        }
    }
}
