//! What `/metrics` shows of this node.

use std::time::Duration;

use holdfast_store::sessions::Census;
use prometheus::{
    Encoder, HistogramOpts, HistogramVec, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder,
    core::Collector,
};

use crate::{
    error::{Answer, ApiError},
    limits,
    state::Api,
};

/// The collectors of a node, in a registry of its own.
pub(crate) struct Metrics {
    registry: Registry,
    requests: IntCounterVec,
    seconds: HistogramVec,
    pub(crate) streams: IntGauge,
    pub(crate) waiters: IntGauge,
    watched: IntGauge,
    runs: IntGaugeVec,
    oldest_due: IntGauge,
    continuations: IntGauge,
    connections: IntGaugeVec,
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
    pub(crate) fn new() -> Self {
        let registry = Registry::new();
        let request = ["method", "route", "status"];
        let buckets = vec![0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0, 600.0];
        let seconds = HistogramOpts::new(
            "holdfast_http_request_duration_seconds",
            "Time to the answer's head, waiting included.",
        );
        let gauge = |name: &str, help: &str| {
            add(&registry, IntGauge::new(name, help).expect("the name is a valid metric name"))
        };
        let gauges = |name: &str, help: &str, labels: &[&str]| {
            let gauges = IntGaugeVec::new(Opts::new(name, help), labels);
            add(&registry, gauges.expect("the names are valid metric names"))
        };
        let requests = IntCounterVec::new(
            Opts::new("holdfast_http_requests_total", "Requests by method, route and status."),
            &request,
        );
        Self {
            requests: add(&registry, requests.expect("the names are valid metric names")),
            seconds: add(
                &registry,
                HistogramVec::new(seconds.buckets(buckets), &request[..2])
                    .expect("the names are valid metric names"),
            ),
            streams: gauge("holdfast_http_streams_open", "Event streams that are open."),
            waiters: gauge("holdfast_http_waiters", "Requests that wait for something to happen."),
            watched: gauge("holdfast_sessions_watched", "Sessions that streams or requests wait for."),
            runs: gauges("holdfast_runs", "Runs by state, over all nodes.", &["state"]),
            oldest_due: gauge(
                "holdfast_queue_oldest_due_microseconds",
                "How long the oldest due run has waited for a worker.",
            ),
            continuations: gauge("holdfast_continuations_open", "Deferred calls that are open."),
            connections: gauges(
                "holdfast_store_connections",
                "Database connections of this process by pool and use.",
                &["pool", "use"],
            ),
            registry,
        }
    }

    /// Counts an answered request.
    pub(crate) fn answered(&self, method: &str, route: &str, status: u16, took: Duration) {
        self.requests.with_label_values(&[method, route, &status.to_string()]).inc();
        self.seconds.with_label_values(&[method, route]).observe(took.as_secs_f64());
    }

    /// Everything as Prometheus reads it; counts of the queue are missing while the database is away or slow.
    pub(crate) async fn text(&self, api: &Api) -> Result<String, prometheus::Error> {
        self.watched.set(signed(api.hub.watched()));
        match tokio::time::timeout(limits::METRICS_WAIT, api.census()).await {
            Ok(Ok(counts)) => self.queue(&counts),
            Ok(Err(error)) => {
                tracing::debug!(%error, "the queue couldn't be counted");
                self.runs.reset();
            }
            Err(_) => {
                tracing::debug!("the queue couldn't be counted in time");
                self.runs.reset();
            }
        }
        let db = api.store.db();
        let hot = db.hot_status();
        let uses = [("hot", hot.size, hot.available), ("read", size(db.read().size()), db.read().num_idle())];
        for (pool, size, idle) in uses {
            self.connections.with_label_values(&[pool, "idle"]).set(signed(idle));
            self.connections.with_label_values(&[pool, "busy"]).set(signed(size.saturating_sub(idle)));
        }
        // The rest of the process counts in the default registry.
        let mut families = prometheus::gather();
        families.extend(self.registry.gather());
        let mut text = Vec::new();
        TextEncoder::new().encode(&families, &mut text)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    fn queue(&self, counts: &Census) {
        let states = [("claimed", counts.claimed), ("queued", counts.queued), ("parked", counts.parked)];
        for (state, count) in states {
            self.runs.with_label_values(&[state]).set(count);
        }
        self.oldest_due.set(counts.oldest_due_micros);
        self.continuations.set(counts.open_continuations);
    }
}

fn add<C: Collector + Clone + 'static>(registry: &Registry, collector: C) -> C {
    registry.register(Box::new(collector.clone())).expect("every name is registered once, in this module");
    collector
}

fn signed(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

fn size(count: u32) -> usize {
    usize::try_from(count).unwrap_or(usize::MAX)
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
