//! What every process counts, whatever its role: what the store counted, and how its connections stand. It is
//! read when somebody looks.

use std::collections::HashMap;

use holdfast_store::{
    Store,
    counters::{self, Observed},
    listen::Listener,
};
use prometheus::{
    core::{Collector, Desc},
    proto::{Bucket, Counter, Gauge, Histogram, LabelPair, Metric, MetricFamily, MetricType},
};

/// Names and what they mean.
const HELP: [(&str, &str); 18] = [
    ("holdfast_build_info", "Version and role of the process."),
    ("holdfast_store_connections", "Database connections of this process by pool and use."),
    ("holdfast_store_connection_waiters", "Who waits for a database connection, by pool."),
    ("holdfast_store_connection_wait_seconds", "How long database connections were waited for, by pool."),
    ("holdfast_store_errors_total", "Failed calls of the database by kind."),
    ("holdfast_events_written_total", "Events of sessions that were committed."),
    ("holdfast_commit_group_steps", "Steps that each transaction of the committer carried."),
    ("holdfast_commit_groups_split_total", "Groups of steps that were stored singly."),
    ("holdfast_notifications_sent_total", "Hints sent to other processes."),
    ("holdfast_notifications_dropped_total", "Hints given up."),
    ("holdfast_notifications_waiting", "Hints not sent yet."),
    ("holdfast_notifications_heard_total", "Hints heard, by channel."),
    ("holdfast_notifier_connected", "Whether the connection that hints are sent on stands."),
    ("holdfast_notifier_connections_total", "How often that connection was opened."),
    ("holdfast_listener_connected", "Whether the connection that hints are heard on stands."),
    ("holdfast_listener_connections_total", "How often that connection was opened."),
    ("holdfast_continuations_expired_total", "Deferred calls that were expired here."),
    ("holdfast_refused_total", "Requests refused because too much waits, by reason."),
];

/// Collects it.
pub(super) struct StoreMetrics {
    role: &'static str,
    store: Store,
    listener: Listener,
    described: Vec<Desc>,
}

impl StoreMetrics {
    /// A collector for a process of a role.
    ///
    /// # Errors
    /// If a name is none.
    pub(super) fn new(role: &'static str, store: Store, listener: Listener) -> prometheus::Result<Self> {
        let describe =
            |(name, help): (&str, &str)| Desc::new(name.into(), help.into(), Vec::new(), HashMap::new());
        let described = HELP.into_iter().map(describe).collect::<Result<_, _>>()?;
        Ok(Self { role, store, listener, described })
    }

    fn connections(&self) -> [MetricFamily; 2] {
        let db = self.store.db();
        let (hot, leases) = (db.hot_status(), db.lease_status());
        let read = (usize::try_from(db.read().size()).unwrap_or(usize::MAX), db.read().num_idle());
        let pools =
            [("hot", (hot.size, hot.available)), ("leases", (leases.size, leases.available)), ("read", read)];
        let uses = pools.into_iter().flat_map(|(pool, (size, idle))| {
            [("idle", idle), ("busy", size.saturating_sub(idle))]
                .map(|(what, count)| gauge(&[("pool", pool), ("use", what)], count as f64))
        });
        let waiters = [("hot", hot.waiting), ("leases", leases.waiting)]
            .map(|(pool, count)| gauge(&[("pool", pool)], count as f64));
        [
            family("holdfast_store_connections", MetricType::GAUGE, uses.collect()),
            family("holdfast_store_connection_waiters", MetricType::GAUGE, waiters.into()),
        ]
    }

    fn hints(&self) -> [MetricFamily; 6] {
        let sent = self.store.notifier().map(holdfast_store::notify::Notifier::stats).unwrap_or_default();
        let connected = |connected: bool| vec![gauge(&[], f64::from(u8::from(connected)))];
        [
            total("holdfast_notifications_sent_total", sent.sent),
            total("holdfast_notifications_dropped_total", sent.dropped),
            family(
                "holdfast_notifications_waiting",
                MetricType::GAUGE,
                vec![gauge(&[], sent.waiting as f64)],
            ),
            family("holdfast_notifier_connected", MetricType::GAUGE, connected(sent.connected)),
            total("holdfast_notifier_connections_total", sent.connections),
            family("holdfast_listener_connected", MetricType::GAUGE, connected(self.listener.is_connected())),
        ]
    }
}

impl Collector for StoreMetrics {
    fn desc(&self) -> Vec<&Desc> {
        self.described.iter().collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let counted = counters::snapshot();
        let build = gauge(&[("role", self.role), ("version", env!("CARGO_PKG_VERSION"))], 1.0);
        let waits = [("hot", &counted.hot_waits), ("leases", &counted.lease_waits)]
            .map(|(pool, waits)| histogram(&[("pool", pool)], waits, 1e6));
        let errors = counted.errors.map(|(kind, count)| counter(&[("kind", kind.word())], count));
        let heard = counted.heard.map(|(channel, count)| {
            let name = channel.name();
            counter(&[("channel", name.strip_prefix("holdfast_").unwrap_or(name))], count)
        });
        let refused = [("backlog", counted.refused_backlog), ("mailbox_full", counted.refused_mailbox)]
            .map(|(reason, count)| counter(&[("reason", reason)], count));
        let mut families = vec![
            family("holdfast_build_info", MetricType::GAUGE, vec![build]),
            family("holdfast_store_connection_wait_seconds", MetricType::HISTOGRAM, waits.into()),
            family("holdfast_store_errors_total", MetricType::COUNTER, errors.into()),
            total("holdfast_events_written_total", counted.events_written),
            family(
                "holdfast_commit_group_steps",
                MetricType::HISTOGRAM,
                vec![histogram(&[], &counted.group_steps, 1.0)],
            ),
            total("holdfast_commit_groups_split_total", counted.groups_split),
            family("holdfast_notifications_heard_total", MetricType::COUNTER, heard.into()),
            total("holdfast_listener_connections_total", counted.listener_connections),
            total("holdfast_continuations_expired_total", counted.continuations_expired),
            family("holdfast_refused_total", MetricType::COUNTER, refused.into()),
        ];
        families.extend(self.connections());
        families.extend(self.hints());
        families
    }
}

fn family(name: &str, kind: MetricType, series: Vec<Metric>) -> MetricFamily {
    let mut family = MetricFamily::default();
    let help = HELP.iter().find(|(known, _)| *known == name).map_or("", |(_, help)| help);
    debug_assert!(!help.is_empty(), "{name} is missing from the list");
    family.set_name(name.to_owned());
    family.set_help(help.to_owned());
    family.set_field_type(kind);
    family.set_metric(series);
    family
}

fn total(name: &str, count: u64) -> MetricFamily {
    family(name, MetricType::COUNTER, vec![counter(&[], count)])
}

/// A series; labels come in the order of their names.
fn labelled(labels: &[(&str, &str)]) -> Metric {
    debug_assert!(labels.is_sorted(), "{labels:?}");
    let pair = |(name, value): &(&str, &str)| {
        let mut pair = LabelPair::default();
        pair.set_name((*name).to_owned());
        pair.set_value((*value).to_owned());
        pair
    };
    Metric::from_label(labels.iter().map(pair).collect())
}

fn counter(labels: &[(&str, &str)], count: u64) -> Metric {
    let mut counter = Counter::default();
    counter.set_value(count as f64);
    let mut series = labelled(labels);
    series.set_counter(counter);
    series
}

fn gauge(labels: &[(&str, &str)], value: f64) -> Metric {
    let mut gauge = Gauge::default();
    gauge.set_value(value);
    let mut series = labelled(labels);
    series.set_gauge(gauge);
    series
}

/// A histogram of whole numbers, `scale` of which make a unit.
fn histogram(labels: &[(&str, &str)], observed: &Observed, scale: f64) -> Metric {
    let bucket = |(bound, count): &(u64, u64)| {
        let mut bucket = Bucket::default();
        bucket.set_upper_bound(*bound as f64 / scale);
        bucket.set_cumulative_count(*count);
        bucket
    };
    let mut histogram = Histogram::default();
    histogram.set_bucket(observed.buckets.iter().map(bucket).collect());
    histogram.set_sample_count(observed.count);
    histogram.set_sample_sum(observed.sum as f64 / scale);
    let mut series = labelled(labels);
    series.set_histogram(histogram);
    series
}
