//! Metrics as Prometheus's registry gathers them, in OTLP's words.

use opentelemetry_proto::tonic::{
    collector::metrics::v1::ExportMetricsServiceRequest,
    common::v1::{AnyValue, InstrumentationScope, KeyValue, any_value},
    metrics::v1::{
        AggregationTemporality, Gauge, Histogram, HistogramDataPoint, Metric, NumberDataPoint,
        ResourceMetrics, ScopeMetrics, Sum, metric::Data, number_data_point,
    },
    resource::v1::Resource,
};
use prometheus::proto::{LabelPair, MetricFamily, MetricType};

/// Times of a push, in nanoseconds since 1970.
#[derive(Debug, Clone, Copy)]
pub(super) struct Times {
    /// When counting began.
    pub(super) start: u64,
    /// When it was gathered.
    pub(super) now: u64,
}

/// All families in one request, under their own names; a time's unit is said, whatever else is counted has
/// none.
pub(super) fn request(
    families: Vec<MetricFamily>,
    resource: &opentelemetry_sdk::Resource,
    times: Times,
) -> ExportMetricsServiceRequest {
    let attributes = resource.iter().map(|(key, value)| KeyValue {
        key: key.as_str().to_owned(),
        value: Some(AnyValue::from(value.clone())),
        ..KeyValue::default()
    });
    let scope = InstrumentationScope {
        name: "holdfast".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        ..InstrumentationScope::default()
    };
    let metrics = families.into_iter().filter_map(|family| metric(family, times)).collect();
    ExportMetricsServiceRequest {
        resource_metrics: vec![ResourceMetrics {
            resource: Some(Resource { attributes: attributes.collect(), ..Resource::default() }),
            scope_metrics: vec![ScopeMetrics { scope: Some(scope), metrics, ..ScopeMetrics::default() }],
            ..ResourceMetrics::default()
        }],
    }
}

fn metric(family: MetricFamily, times: Times) -> Option<Metric> {
    let name = family.name().to_owned();
    let series = family.get_metric();
    let numbers = |value: fn(&prometheus::proto::Metric) -> f64| {
        series.iter().map(|one| number(one.get_label(), value(one), times)).collect()
    };
    let data = match family.get_field_type() {
        MetricType::COUNTER => Data::Sum(Sum {
            data_points: numbers(|one| one.get_counter().get_value()),
            aggregation_temporality: AggregationTemporality::Cumulative.into(),
            is_monotonic: true,
        }),
        MetricType::GAUGE => Data::Gauge(Gauge { data_points: numbers(|one| one.get_gauge().get_value()) }),
        MetricType::HISTOGRAM => Data::Histogram(Histogram {
            data_points: series.iter().map(|one| distribution(one, times)).collect(),
            aggregation_temporality: AggregationTemporality::Cumulative.into(),
        }),
        // Nobody here makes any.
        MetricType::SUMMARY | MetricType::UNTYPED => return None,
    };
    let unit = if name.ends_with("_seconds") { "s" } else { "" };
    let description = family.help().to_owned();
    Some(Metric { name, description, unit: unit.to_owned(), data: Some(data), ..Metric::default() })
}

fn attributes(labels: &[LabelPair]) -> Vec<KeyValue> {
    let text = |label: &LabelPair| any_value::Value::StringValue(label.value().to_owned());
    labels
        .iter()
        .map(|label| KeyValue {
            key: label.name().to_owned(),
            value: Some(AnyValue { value: Some(text(label)) }),
            ..KeyValue::default()
        })
        .collect()
}

fn number(labels: &[LabelPair], value: f64, times: Times) -> NumberDataPoint {
    NumberDataPoint {
        attributes: attributes(labels),
        start_time_unix_nano: times.start,
        time_unix_nano: times.now,
        value: Some(number_data_point::Value::AsDouble(value)),
        ..NumberDataPoint::default()
    }
}

/// Prometheus's buckets hold what those before them hold too; OTLP's don't, and have one more, for what is
/// larger.
fn distribution(series: &prometheus::proto::Metric, times: Times) -> HistogramDataPoint {
    let histogram = series.get_histogram();
    let (mut bounds, mut counts, mut below) = (Vec::new(), Vec::new(), 0);
    for bucket in histogram.get_bucket().iter().filter(|bucket| bucket.upper_bound().is_finite()) {
        bounds.push(bucket.upper_bound());
        counts.push(bucket.cumulative_count().saturating_sub(below));
        below = bucket.cumulative_count();
    }
    // It is read while others count: a bucket may be ahead of the count.
    let count = histogram.get_sample_count().max(below);
    counts.push(count - below);
    HistogramDataPoint {
        attributes: attributes(series.get_label()),
        start_time_unix_nano: times.start,
        time_unix_nano: times.now,
        count,
        sum: Some(histogram.get_sample_sum()),
        bucket_counts: counts,
        explicit_bounds: bounds,
        ..HistogramDataPoint::default()
    }
}

#[cfg(test)]
mod tests {
    use prometheus::{GaugeVec, HistogramOpts, HistogramVec, IntCounter, Opts, Registry, core::Collector};

    use super::*;

    fn sent() -> Vec<Metric> {
        let registry = Registry::new();
        let add = |collector: Box<dyn Collector>| registry.register(collector).expect("registered");
        let counter = IntCounter::new("things_total", "Things.").expect("a counter");
        counter.inc_by(3);
        let gauge = GaugeVec::new(Opts::new("level", "A level."), &["pool"]).expect("gauges");
        gauge.with_label_values(&["hot"]).set(1.5);
        let opts = HistogramOpts::new("wait_seconds", "Waits.").buckets(vec![0.1, 1.0]);
        let waits = HistogramVec::new(opts, &["pool"]).expect("histograms");
        for value in [0.05, 0.5, 0.6, 7.0] {
            waits.with_label_values(&["hot"]).observe(value);
        }
        add(Box::new(counter));
        add(Box::new(gauge));
        add(Box::new(waits));
        let resource = opentelemetry_sdk::Resource::builder_empty().with_service_name("test").build();
        let request = request(registry.gather(), &resource, Times { start: 1, now: 2 });
        let [of_resource] = <[ResourceMetrics; 1]>::try_from(request.resource_metrics).expect("one");
        let attributes = of_resource.resource.expect("a resource").attributes;
        assert_eq!(attributes[0].key, "service.name");
        let [of_scope] = <[ScopeMetrics; 1]>::try_from(of_resource.scope_metrics).expect("one");
        of_scope.metrics
    }

    #[test]
    fn counters_gauges_and_histograms_say_the_same_in_otlp() {
        let metrics = sent();
        let names: Vec<&str> = metrics.iter().map(|metric| metric.name.as_str()).collect();
        assert_eq!(names, ["level", "things_total", "wait_seconds"]);
        let Some(Data::Gauge(gauge)) = &metrics[0].data else { panic!("{:?}", metrics[0]) };
        assert_eq!(gauge.data_points[0].value, Some(number_data_point::Value::AsDouble(1.5)));
        assert_eq!(gauge.data_points[0].attributes[0].key, "pool");
        let Some(Data::Sum(sum)) = &metrics[1].data else { panic!("{:?}", metrics[1]) };
        assert!(sum.is_monotonic);
        assert_eq!(sum.data_points[0].value, Some(number_data_point::Value::AsDouble(3.0)));
        assert_eq!((sum.data_points[0].start_time_unix_nano, sum.data_points[0].time_unix_nano), (1, 2));
        let Some(Data::Histogram(waits)) = &metrics[2].data else { panic!("{:?}", metrics[2]) };
        let point = &waits.data_points[0];
        assert_eq!((&point.explicit_bounds[..], &point.bucket_counts[..]), (&[0.1, 1.0][..], &[1, 2, 1][..]));
        assert_eq!(point.count, point.bucket_counts.iter().sum::<u64>());
        assert_eq!(metrics[2].unit, "s");
    }
}
