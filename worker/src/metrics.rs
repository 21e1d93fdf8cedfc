//! What a worker counts, in the process's default registry.

use std::{sync::LazyLock, time::Duration};

use prometheus::{
    Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, Opts, core::Collector,
    default_registry, exponential_buckets,
};

static CLAIMED: LazyLock<IntCounter> =
    LazyLock::new(|| keep(IntCounter::new("holdfast_runs_claimed_total", "Runs claimed.")));
static TAKEN_OVER: LazyLock<IntCounter> = LazyLock::new(|| {
    keep(IntCounter::new("holdfast_takeovers_total", "Runs taken over from expired leases."))
});
static LEASES_LOST: LazyLock<IntCounter> =
    LazyLock::new(|| keep(IntCounter::new("holdfast_leases_lost_total", "Leases lost while held.")));
static CLAIM: LazyLock<Histogram> =
    LazyLock::new(|| keep(Histogram::with_opts(seconds("holdfast_claim_seconds", "Duration of claims."))));
static COMMIT: LazyLock<Histogram> =
    LazyLock::new(|| keep(Histogram::with_opts(seconds("holdfast_commit_seconds", "Duration of commits."))));
static MODEL: LazyLock<HistogramVec> = LazyLock::new(|| {
    let opts = seconds("holdfast_model_request_seconds", "Duration of model requests, retries included.");
    keep(HistogramVec::new(opts, &["model", "outcome"]))
});
static TOKENS: LazyLock<IntCounterVec> = LazyLock::new(|| {
    keep(IntCounterVec::new(
        Opts::new("holdfast_model_tokens_total", "Tokens by model and kind."),
        &["model", "kind"],
    ))
});
static CALLS: LazyLock<IntCounterVec> = LazyLock::new(|| {
    keep(IntCounterVec::new(
        Opts::new("holdfast_tool_calls_total", "Tool calls run here, by outcome."),
        &["outcome"],
    ))
});

fn seconds(name: &str, help: &str) -> HistogramOpts {
    let buckets = exponential_buckets(0.0005, 2.5, 14).unwrap_or_default();
    HistogramOpts::new(name, help).buckets(buckets)
}

/// Registers a metric once; a second worker of the same process shares it.
#[expect(clippy::expect_used, reason = "names are constants of this file, and a test makes every metric")]
fn keep<M: Collector + Clone + 'static>(metric: prometheus::Result<M>) -> M {
    let metric = metric.expect("a metric's name and labels are valid");
    if let Err(error) = default_registry().register(Box::new(metric.clone())) {
        tracing::debug!(%error, "a metric is registered already");
    }
    metric
}

pub(crate) fn claimed(runs: usize, took: Duration) {
    CLAIMED.inc_by(runs as u64);
    CLAIM.observe(took.as_secs_f64());
}

pub(crate) fn taken_over(runs: usize) {
    TAKEN_OVER.inc_by(runs as u64);
}

pub(crate) fn lease_lost() {
    LEASES_LOST.inc();
}

pub(crate) fn committed(took: Duration) {
    COMMIT.observe(took.as_secs_f64());
}

pub(crate) fn asked(model: &str, outcome: &str, took: Duration) {
    MODEL.with_label_values(&[model, outcome]).observe(took.as_secs_f64());
}

pub(crate) fn tokens(model: &str, usage: holdfast_engine::content::Usage) {
    for (kind, count) in
        [("input", usage.input_tokens), ("output", usage.output_tokens), ("cached", usage.cached_tokens)]
    {
        TOKENS.with_label_values(&[model, kind]).inc_by(count);
    }
}

pub(crate) fn called(outcome: &str) {
    CALLS.with_label_values(&[outcome]).inc();
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_metric_can_be_made() {
        super::claimed(1, std::time::Duration::from_millis(1));
        super::taken_over(1);
        super::lease_lost();
        super::committed(std::time::Duration::from_millis(1));
        super::asked("m", "ok", std::time::Duration::from_millis(1));
        super::tokens("m", holdfast_engine::content::Usage::default());
        super::called("completed");
        let names: Vec<String> = prometheus::gather().iter().map(|family| family.name().to_owned()).collect();
        assert!(names.iter().any(|name| name == "holdfast_model_tokens_total"), "{names:?}");
    }
}
