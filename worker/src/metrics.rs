//! What a worker counts, in the process's default registry. All series whose labels are known beforehand are
//! made when the first worker of the process starts, so that they are there before anything happens, and an
//! observation is an atomic addition.

use std::{
    sync::{Arc, LazyLock, Mutex, PoisonError},
    time::Duration,
};

use holdfast_engine::content::Usage;
use prometheus::{
    Gauge, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, Opts,
    core::{Collector, Desc},
    default_registry, exponential_buckets,
    proto::MetricFamily,
};
use tokio::time::Instant;

use crate::model::FailureClass;

/// What becomes of a run that was held, beside the status words of sessions and `parked`.
const ENDS: [&str; 13] = [
    "idle",
    "waiting_external",
    "paused",
    "failed",
    "ready",
    "parked",
    "deleted",
    "lease_lost",
    "handed_over",
    "put_off",
    "poison",
    "broken",
    "alone",
];

/// How a heartbeat goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Beat {
    Renewed,
    Failed,
    TimedOut,
}

/// What wrappers of calls do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wrap {
    CacheHit,
    CacheMiss,
    RateWaited,
    RateRefused,
    Retried,
    TimedOut,
    Truncated,
    HookDenied,
    HookDeferred,
    HookAnswered,
    HookFailed,
}

/// Their words, in the same order.
const WRAPS: [&str; 11] = [
    "cache_hit",
    "cache_miss",
    "rate_waited",
    "rate_refused",
    "retried",
    "timed_out",
    "truncated",
    "hook_denied",
    "hook_deferred",
    "hook_answered",
    "hook_failed",
];

static METRICS: LazyLock<Metrics> = LazyLock::new(Metrics::new);

struct Metrics {
    claimed: IntCounter,
    taken_over: IntCounter,
    leases_lost: IntCounter,
    died_alone: IntCounter,
    claim: Histogram,
    load: Histogram,
    commit: Histogram,
    run: Histogram,
    ends: IntCounterVec,
    slots: IntGauge,
    held: IntGauge,
    lease_ttl: Gauge,
    beats: [IntCounter; 3],
    beat: Histogram,
    beat_age: BeatAge,
    model: HistogramVec,
    model_failures: IntCounterVec,
    tokens: IntCounterVec,
    calls: IntCounterVec,
    call: Histogram,
    wraps: [IntCounter; 11],
}

impl Metrics {
    fn new() -> Self {
        let beats = counters("holdfast_heartbeats_total", "Heartbeats by outcome.", "outcome");
        let ends =
            counters("holdfast_runs_ended_total", "Runs that were held, by how that ended.", "outcome");
        for end in ENDS {
            ends.with_label_values(&[end]);
        }
        let failures =
            counters("holdfast_model_failures_total", "Failed attempts to ask models, by class.", "class");
        for class in FailureClass::ALL {
            failures.with_label_values(&[class.word()]);
        }
        let calls = counters("holdfast_tool_calls_total", "Tool calls run here, by outcome.", "outcome");
        for word in ["completed", "failed", "cancelled"] {
            calls.with_label_values(&[word]);
        }
        let wraps = counters("holdfast_tool_wrappers_total", "What wrappers of tool calls did.", "event");
        Self {
            claimed: counter("holdfast_runs_claimed_total", "Runs claimed."),
            taken_over: counter("holdfast_takeovers_total", "Runs taken over from expired leases."),
            leases_lost: counter("holdfast_leases_lost_total", "Leases lost while held."),
            died_alone: counter(
                "holdfast_runs_died_alone_total",
                "Processes that a run under suspicion has ended.",
            ),
            claim: histogram("holdfast_claim_seconds", "Duration of claims."),
            load: histogram("holdfast_load_seconds", "From a claimed run to its loaded session."),
            commit: histogram("holdfast_commit_seconds", "Duration of commits."),
            run: long_histogram("holdfast_run_seconds", "How long runs were held."),
            ends,
            slots: gauge("holdfast_worker_slots", "Runs that this process's workers may hold."),
            held: gauge("holdfast_worker_slots_used", "Runs that this process's workers hold."),
            lease_ttl: keep(Gauge::new(
                "holdfast_lease_ttl_seconds",
                "How long a lease lasts without a heartbeat.",
            )),
            beats: ["renewed", "failed", "timed_out"].map(|word| beats.with_label_values(&[word])),
            beat: histogram("holdfast_heartbeat_seconds", "Duration of heartbeats."),
            beat_age: keep(BeatAge::new()),
            model: keep(HistogramVec::new(
                long("holdfast_model_request_seconds", "Duration of model requests, retries included."),
                &["model", "outcome"],
            )),
            model_failures: failures,
            tokens: keep(IntCounterVec::new(
                Opts::new("holdfast_model_tokens_total", "Tokens by model and kind."),
                &["model", "kind"],
            )),
            calls,
            call: long_histogram("holdfast_tool_call_seconds", "Duration of tool calls."),
            wraps: WRAPS.map(|word| wraps.with_label_values(&[word])),
        }
    }
}

fn counter(name: &str, help: &str) -> IntCounter {
    keep(IntCounter::new(name, help))
}

fn counters(name: &str, help: &str, label: &str) -> IntCounterVec {
    keep(IntCounterVec::new(Opts::new(name, help), &[label]))
}

fn gauge(name: &str, help: &str) -> IntGauge {
    keep(IntGauge::new(name, help))
}

/// Half a millisecond to 75 seconds.
fn histogram(name: &str, help: &str) -> Histogram {
    let buckets = exponential_buckets(0.0005, 2.5, 14).unwrap_or_default();
    keep(Histogram::with_opts(HistogramOpts::new(name, help).buckets(buckets)))
}

/// Five milliseconds to 20 minutes, as long as models are waited for.
fn long(name: &str, help: &str) -> HistogramOpts {
    let buckets = vec![
        0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 600.0, 1200.0,
    ];
    HistogramOpts::new(name, help).buckets(buckets)
}

fn long_histogram(name: &str, help: &str) -> Histogram {
    keep(Histogram::with_opts(long(name, help)))
}

/// Registers a metric once.
#[expect(clippy::expect_used, reason = "names are constants of this file, and a test makes every metric")]
fn keep<M: Collector + Clone + 'static>(metric: prometheus::Result<M>) -> M {
    let metric = metric.expect("a metric's name and labels are valid");
    if let Err(error) = default_registry().register(Box::new(metric.clone())) {
        tracing::debug!(%error, "a metric is registered already");
    }
    metric
}

/// The age of the last heartbeat that succeeded, reckoned when somebody looks.
#[derive(Clone)]
struct BeatAge {
    gauge: Gauge,
    sent: Arc<Mutex<Option<Instant>>>,
}

impl BeatAge {
    fn new() -> prometheus::Result<Self> {
        let gauge = Gauge::new(
            "holdfast_heartbeat_age_seconds",
            "Since the last heartbeat that succeeded was sent; 0 before the first.",
        )?;
        Ok(Self { gauge, sent: Arc::default() })
    }
}

impl Collector for BeatAge {
    fn desc(&self) -> Vec<&Desc> {
        self.gauge.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let sent = *self.sent.lock().unwrap_or_else(PoisonError::into_inner);
        self.gauge.set(sent.map_or(0.0, |sent| sent.elapsed().as_secs_f64()));
        self.gauge.collect()
    }
}

/// Makes every series that is known beforehand, those of the agents' models included, and says how many
/// slots a worker has.
pub(crate) fn begin<'a>(slots: usize, lease_ttl: Duration, models: impl Iterator<Item = &'a str>) {
    METRICS.slots.add(i64::try_from(slots).unwrap_or(i64::MAX));
    METRICS.lease_ttl.set(lease_ttl.as_secs_f64());
    beaten(Instant::now());
    for model in models {
        METRICS.model.with_label_values(&[model, "ok"]);
        for kind in ["input", "output", "cached"] {
            METRICS.tokens.with_label_values(&[model, kind]);
        }
    }
}

/// A worker has left.
pub(crate) fn end(slots: usize) {
    METRICS.slots.sub(i64::try_from(slots).unwrap_or(i64::MAX));
    *METRICS.beat_age.sent.lock().unwrap_or_else(PoisonError::into_inner) = None;
}

pub(crate) fn claimed(runs: usize, took: Duration) {
    METRICS.claimed.inc_by(runs as u64);
    METRICS.claim.observe(took.as_secs_f64());
}

/// A run under suspicion has ended the process that it had for itself.
pub(crate) fn died_alone() {
    METRICS.died_alone.inc();
}

pub(crate) fn taken_over(runs: usize) {
    METRICS.taken_over.inc_by(runs as u64);
}

pub(crate) fn slot_taken() {
    METRICS.held.inc();
}

pub(crate) fn slot_freed() {
    METRICS.held.dec();
}

pub(crate) fn loaded(took: Duration) {
    METRICS.load.observe(took.as_secs_f64());
}

pub(crate) fn committed(took: Duration) {
    METRICS.commit.observe(took.as_secs_f64());
}

/// A run isn't held any more; `outcome` is one of [`ENDS`].
pub(crate) fn ended(outcome: &'static str, took: Duration) {
    debug_assert!(ENDS.contains(&outcome), "{outcome} is missing from the list");
    METRICS.ends.with_label_values(&[outcome]).inc();
    METRICS.run.observe(took.as_secs_f64());
    if outcome == "lease_lost" {
        METRICS.leases_lost.inc();
    }
}

pub(crate) fn beat(outcome: Beat, took: Duration) {
    METRICS.beats[outcome as usize].inc();
    METRICS.beat.observe(took.as_secs_f64());
}

/// All leases stand as of `sent`.
pub(crate) fn beaten(sent: Instant) {
    *METRICS.beat_age.sent.lock().unwrap_or_else(PoisonError::into_inner) = Some(sent);
}

pub(crate) fn asked(model: &str, outcome: &str, took: Duration) {
    METRICS.model.with_label_values(&[model, outcome]).observe(took.as_secs_f64());
}

pub(crate) fn attempt_failed(class: FailureClass) {
    METRICS.model_failures.with_label_values(&[class.word()]).inc();
}

pub(crate) fn tokens(model: &str, usage: Usage) {
    for (kind, count) in
        [("input", usage.input_tokens), ("output", usage.output_tokens), ("cached", usage.cached_tokens)]
    {
        METRICS.tokens.with_label_values(&[model, kind]).inc_by(count);
    }
}

/// A call has ended; `outcome` is `completed`, `failed` or `cancelled`.
pub(crate) fn called(outcome: &str, took: Duration) {
    METRICS.calls.with_label_values(&[outcome]).inc();
    METRICS.call.observe(took.as_secs_f64());
}

pub(crate) fn wrapped(what: Wrap) {
    METRICS.wraps[what as usize].inc();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exposed() -> String {
        prometheus::TextEncoder::new().encode_to_string(&prometheus::gather()).expect("text")
    }

    #[tokio::test]
    async fn every_series_is_there_before_anything_happens_and_counts_once() {
        begin(7, Duration::from_secs(15), ["m"].into_iter());
        let before = exposed();
        for wanted in [
            "holdfast_worker_slots 7",
            "holdfast_worker_slots_used 0",
            "holdfast_lease_ttl_seconds 15",
            r#"holdfast_heartbeats_total{outcome="timed_out"} 0"#,
            r#"holdfast_model_request_seconds_count{model="m",outcome="ok"} 0"#,
            r#"holdfast_model_tokens_total{kind="cached",model="m"} 0"#,
            r#"holdfast_model_failures_total{class="rate_limited"} 0"#,
            r#"holdfast_runs_ended_total{outcome="poison"} 0"#,
            r#"holdfast_tool_wrappers_total{event="hook_failed"} 0"#,
            "holdfast_leases_lost_total 0",
        ] {
            assert!(before.contains(wanted), "{wanted} is missing from\n{before}");
        }
        claimed(2, Duration::from_millis(1));
        ended("lease_lost", Duration::from_millis(1));
        ended("idle", Duration::from_millis(1));
        beat(Beat::TimedOut, Duration::from_millis(1));
        tokens("m", Usage { input_tokens: 3, ..Usage::default() });
        called("completed", Duration::from_millis(1));
        wrapped(Wrap::HookFailed);
        wrapped(Wrap::CacheHit);
        let after = exposed();
        for wanted in [
            "holdfast_runs_claimed_total 2",
            "holdfast_leases_lost_total 1",
            r#"holdfast_runs_ended_total{outcome="idle"} 1"#,
            r#"holdfast_heartbeats_total{outcome="timed_out"} 1"#,
            r#"holdfast_heartbeats_total{outcome="renewed"} 0"#,
            r#"holdfast_model_tokens_total{kind="input",model="m"} 3"#,
            r#"holdfast_tool_calls_total{outcome="completed"} 1"#,
            r#"holdfast_tool_wrappers_total{event="hook_failed"} 1"#,
            r#"holdfast_tool_wrappers_total{event="cache_hit"} 1"#,
            r#"holdfast_tool_wrappers_total{event="cache_miss"} 0"#,
        ] {
            assert!(after.contains(wanted), "{wanted} is missing from\n{after}");
        }
        end(7);
        assert!(exposed().contains("holdfast_worker_slots 0"));
    }
}
