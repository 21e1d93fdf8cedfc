//! What `/metrics` shows of this node, and of the cluster as its database has it.

use std::time::Duration;

use chrono::{DateTime, Utc};
use holdfast_store::{
    Store, StoreError,
    cluster::{self, Class, Due, Standing},
    sessions::Census,
    status,
};
use prometheus::{
    GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
    core::Collector,
};
use tokio::time::Instant;

use crate::{
    error::{Answer, ApiError},
    limits,
    state::Api,
};

/// The collectors of a node.
pub(crate) struct Metrics {
    requests: IntCounterVec,
    seconds: HistogramVec,
    pub(crate) streams: IntGauge,
    pub(crate) waiters: IntGauge,
    watched: IntGauge,
    pub(crate) session_delay: Histogram,
    pub(crate) feed_delay: Histogram,
    cluster: Cluster,
}

/// What is the same at every node. Without labels they are vectors too, so that they can be missing.
struct Cluster {
    up: IntGauge,
    runs: IntGaugeVec,
    due: IntGaugeVec,
    oldest_due: GaugeVec,
    oldest_due_micros: IntGaugeVec,
    workers: IntGaugeVec,
    slots: IntGaugeVec,
    continuations: IntGaugeVec,
    oldest_continuation: GaugeVec,
    overdue: GaugeVec,
    feed_lag: GaugeVec,
    held_back: IntGaugeVec,
    /// When they were last read, whether or not there was an answer. Held while they are read, so that
    /// several who watch ask once.
    read_at: tokio::sync::Mutex<Option<Instant>>,
}

/// Counts one while it lives.
pub(crate) struct Counted(IntGauge);

impl Counted {
    /// Counts one more, unless there are `limit` already.
    pub(crate) fn up(gauge: &IntGauge, limit: i64) -> Answer<Self> {
        gauge.inc();
        let counted = Self(gauge.clone());
        if gauge.get() > limit {
            return Err(ApiError::unavailable(format!(
                "this node serves {limit} such requests already; try again or another node"
            )));
        }
        Ok(counted)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.dec();
    }
}

impl Metrics {
    /// Makes the collectors and registers them.
    pub(crate) fn new(registry: &Registry) -> Self {
        let request = ["method", "route", "status"];
        let buckets = vec![0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0, 600.0];
        let gauge = |name: &str, help: &str| {
            add(registry, IntGauge::new(name, help).expect("the name is a valid metric name"))
        };
        let histograms = |name: &str, help: &str, labels: &[&str]| {
            let opts = HistogramOpts::new(name, help).buckets(buckets.clone());
            add(registry, HistogramVec::new(opts, labels).expect("the names are valid metric names"))
        };
        let requests = IntCounterVec::new(
            Opts::new("holdfast_http_requests_total", "Requests by method, route and status."),
            &request,
        );
        let delays = histograms(
            "holdfast_stream_delay_seconds",
            "From an event's transaction to its sending on a stream that follows live.",
            &["stream"],
        );
        Self {
            requests: add(registry, requests.expect("the names are valid metric names")),
            seconds: histograms(
                "holdfast_http_request_duration_seconds",
                "Time to the answer's head, waiting included.",
                &request[..2],
            ),
            streams: gauge("holdfast_http_streams_open", "Event streams that are open."),
            waiters: gauge("holdfast_http_waiters", "Requests that wait for something to happen."),
            watched: gauge("holdfast_sessions_watched", "Sessions that streams or requests wait for."),
            session_delay: delays.with_label_values(&["session"]),
            feed_delay: delays.with_label_values(&["feed"]),
            cluster: Cluster::new(registry),
        }
    }

    /// Counts an answered request.
    pub(crate) fn answered(&self, method: &str, route: &str, status: u16, took: Duration) {
        self.requests.with_label_values(&[method, route, &status.to_string()]).inc();
        self.seconds.with_label_values(&[method, route]).observe(took.as_secs_f64());
    }

    /// Brings up to date what isn't counted as it happens.
    pub(crate) async fn refresh(&self, api: &Api) {
        self.watched.set(signed(api.hub.watched()));
        self.cluster.refresh(api).await;
    }
}

/// Notes how long an event has taken from its transaction to a stream. Clocks differ a little: an event from
/// the future has taken no time.
pub(crate) fn delayed(delays: &Histogram, at: DateTime<Utc>) {
    delays.observe((Utc::now() - at).to_std().unwrap_or_default().as_secs_f64());
}

impl Cluster {
    fn new(registry: &Registry) -> Self {
        let gauges = |name: &str, help: &str, labels: &[&str]| {
            let gauges = IntGaugeVec::new(Opts::new(name, help), labels);
            add(registry, gauges.expect("the names are valid metric names"))
        };
        let seconds = |name: &str, help: &str, labels: &[&str]| {
            let gauges = GaugeVec::new(Opts::new(name, help), labels);
            add(registry, gauges.expect("the names are valid metric names"))
        };
        let up = IntGauge::new(
            "holdfast_database_up",
            "Whether the database gave a sign of life within a second.",
        );
        Self {
            up: add(registry, up.expect("the name is a valid metric name")),
            runs: gauges("holdfast_runs", "Runs by state, over all nodes.", &["state"]),
            due: gauges("holdfast_queue_due_runs", "Runs that are due and wait, by class.", &["class"]),
            oldest_due: seconds(
                "holdfast_queue_oldest_due_seconds",
                "How long the oldest due run of a class has waited for a worker.",
                &["class"],
            ),
            oldest_due_micros: gauges(
                "holdfast_queue_oldest_due_microseconds",
                "How long the oldest due run has waited for a worker.",
                &[],
            ),
            workers: gauges("holdfast_workers", "Workers that were heard of within a minute.", &[]),
            slots: gauges("holdfast_workers_slots", "Slots of all workers, by use.", &["use"]),
            continuations: gauges("holdfast_continuations_open", "Deferred calls that are open.", &[]),
            oldest_continuation: seconds(
                "holdfast_continuations_oldest_seconds",
                "Age of the oldest open deferred call.",
                &[],
            ),
            overdue: seconds(
                "holdfast_continuations_overdue_seconds",
                "For how long the most overdue open deferred call should have been expired.",
                &[],
            ),
            feed_lag: seconds(
                "holdfast_feed_lag_seconds",
                "How far the feed across sessions is behind.",
                &[],
            ),
            held_back: gauges(
                "holdfast_feed_held_back_events",
                "Events that the feed across sessions can't show yet.",
                &[],
            ),
            read_at: tokio::sync::Mutex::default(),
        }
    }

    async fn refresh(&self, api: &Api) {
        let mut read_at = self.read_at.lock().await;
        if read_at.is_some_and(|at| at.elapsed() < limits::CENSUS_AGE) {
            return;
        }
        let up = tokio::time::timeout(limits::METRICS_WAIT, api.store.db().ping()).await;
        let up = matches!(up, Ok(Ok(())));
        self.up.set(i64::from(up));
        // One after the other, on one connection at a time: clients' requests need the others. What isn't known
        // any more isn't told.
        self.hide();
        if !up {
            *read_at = Some(Instant::now());
            return;
        }
        // The dearest comes last, and what there is no time for takes no other with it.
        let (store, until): (&Store, _) = (&api.store, Instant::now() + limits::METRICS_WAIT);
        if let Some(feed) = known("the feed", until, status::feed(store)).await {
            self.feed_lag.with_label_values(NONE).set(seconds(feed.lag_micros));
            self.held_back.with_label_values(NONE).set(feed.held_back);
        }
        if let Some(standing) = known("workers", until, cluster::standing(store)).await {
            self.show_standing(&standing);
        }
        if let Some(due) = known("due runs", until, cluster::due(store)).await {
            self.show_due(&due);
        }
        if let Some(census) = known("runs", until, api.census()).await {
            self.show_census(&census);
        }
        *read_at = Some(Instant::now());
    }

    fn show_census(&self, census: &Census) {
        let states = [("claimed", census.claimed), ("queued", census.queued), ("parked", census.parked)];
        for (state, count) in states {
            self.runs.with_label_values(&[state]).set(count);
        }
        self.oldest_due_micros.with_label_values(NONE).set(census.oldest_due_micros);
        self.continuations.with_label_values(NONE).set(census.open_continuations);
    }

    fn show_due(&self, due: &[Due; Class::ALL.len()]) {
        for (class, due) in Class::ALL.into_iter().zip(due) {
            self.due.with_label_values(&[class.word()]).set(due.runs);
            self.oldest_due.with_label_values(&[class.word()]).set(seconds(due.oldest_micros));
        }
    }

    fn show_standing(&self, standing: &Standing) {
        self.workers.with_label_values(NONE).set(standing.workers);
        self.slots.with_label_values(&["held"]).set(standing.held);
        self.slots.with_label_values(&["free"]).set((standing.slots - standing.held).max(0));
        self.oldest_continuation.with_label_values(NONE).set(seconds(standing.oldest_continuation_micros));
        self.overdue.with_label_values(NONE).set(seconds(standing.overdue_micros));
    }

    /// Numbers that nobody knows any more aren't told.
    fn hide(&self) {
        for counts in [
            &self.runs,
            &self.due,
            &self.oldest_due_micros,
            &self.workers,
            &self.slots,
            &self.continuations,
            &self.held_back,
        ] {
            counts.reset();
        }
        for times in [&self.oldest_due, &self.oldest_continuation, &self.overdue, &self.feed_lag] {
            times.reset();
        }
    }
}

/// The labels of a metric that has none.
const NONE: &[&str] = &[];

/// What the database says to a question, if it does in time.
async fn known<T>(
    what: &str,
    until: Instant,
    asked: impl Future<Output = Result<T, StoreError>>,
) -> Option<T> {
    let why = match tokio::time::timeout_at(until, asked).await {
        Ok(Ok(answer)) => return Some(answer),
        Ok(Err(error)) => error.to_string(),
        Err(_) => "no answer in time".to_owned(),
    };
    tracing::debug!(what, why, "the cluster couldn't be counted");
    None
}

fn add<C: Collector + Clone + 'static>(registry: &Registry, collector: C) -> C {
    registry.register(Box::new(collector.clone())).expect("a registry serves one node");
    collector
}

fn signed(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

#[expect(clippy::cast_precision_loss, reason = "a duration for people, in whole microseconds below 2^53")]
fn seconds(micros: i64) -> f64 {
    micros as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_counted_is_limited_and_given_back() {
        let gauge = IntGauge::new("g", "g").expect("a gauge");
        let first = Counted::up(&gauge, 1).expect("there is room");
        assert!(Counted::up(&gauge, 1).is_err_and(|error| error.is_unavailable()));
        assert_eq!(gauge.get(), 1, "who was refused isn't counted");
        drop(first);
        assert_eq!(gauge.get(), 0);
        assert!(Counted::up(&gauge, 1).is_ok());
    }
}
