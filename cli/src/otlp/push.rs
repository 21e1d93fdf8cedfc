//! Pushing metrics: what `/metrics` shows, sent every so often.

use std::{sync::Arc, time::Duration};

use chrono::Utc;
use futures::future::BoxFuture;
use opentelemetry_sdk::Resource;
use prometheus::{IntCounter, IntCounterVec, Opts, proto::MetricFamily};
use prost::Message as _;
use reqwest::{
    Client,
    header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue},
    redirect,
};
use tokio::{task::JoinHandle, time::MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use super::{
    Endpoint,
    encode::{self, Times},
    endpoint, resource,
};
use crate::failure::Failure;

/// How often metrics are sent unless `OTEL_METRIC_EXPORT_INTERVAL` says otherwise.
const EVERY: Duration = Duration::from_secs(15);
/// How long the server may take.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How long the last push may take.
const LAST: Duration = Duration::from_secs(2);

/// Gathers what the process counts.
pub(crate) type Gather = Arc<dyn Fn() -> BoxFuture<'static, Vec<MetricFamily>> + Send + Sync>;

/// A task that pushes.
#[derive(Debug)]
pub(crate) struct Pushing {
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Pushing {
    /// Begins to push what `gather` gives to an endpoint.
    ///
    /// # Errors
    /// [`Failure::Config`] if the endpoint or what the environment says of it can't be used.
    pub(crate) fn start(endpoint: &str, role: &'static str, gather: Gather) -> Result<Self, Failure> {
        let pusher = Pusher::new(&Endpoint::parse(endpoint)?, role, gather)?;
        let every = interval(std::env::var("OTEL_METRIC_EXPORT_INTERVAL").ok().as_deref())?;
        let stop = CancellationToken::new();
        let task = tokio::spawn(pusher.run(every, stop.clone()));
        Ok(Self { stop, task })
    }

    /// Pushes once more, for at most two seconds, and ends.
    pub(crate) async fn finish(self) {
        self.stop.cancel();
        let abort = self.task.abort_handle();
        if tokio::time::timeout(LAST, self.task).await.is_err() {
            abort.abort();
            tracing::debug!("the last metrics weren't sent in time");
        }
    }
}

fn interval(text: Option<&str>) -> Result<Duration, Failure> {
    let Some(text) = text.map(str::trim).filter(|text| !text.is_empty()) else { return Ok(EVERY) };
    match text.parse() {
        Ok(millis) if millis > 0 => Ok(Duration::from_millis(millis)),
        _ => Err(Failure::Config(format!(
            "OTEL_METRIC_EXPORT_INTERVAL: {text:?} is no number of milliseconds"
        ))),
    }
}

struct Pusher {
    client: Client,
    url: String,
    headers: HeaderMap,
    resource: Resource,
    gather: Gather,
    start: u64,
    sent: IntCounter,
    failed: IntCounter,
    /// Whether the last push arrived, which is said when it changes.
    reached: bool,
}

impl Pusher {
    fn new(endpoint: &Endpoint, role: &'static str, gather: Gather) -> Result<Self, Failure> {
        let client = Client::builder()
            .timeout(TIMEOUT)
            .redirect(redirect::Policy::none())
            .user_agent(concat!("holdfast/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|error| endpoint::refused(&error.to_string()))?;
        let given = std::env::var("OTEL_EXPORTER_OTLP_HEADERS").unwrap_or_default();
        let mut headers = headers(&given)?;
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/x-protobuf"));
        let pushes = pushes();
        Ok(Self {
            client,
            url: endpoint.metrics(),
            headers,
            resource: resource(role),
            gather,
            start: nanos(),
            sent: pushes.with_label_values(&["sent"]),
            failed: pushes.with_label_values(&["failed"]),
            reached: true,
        })
    }

    async fn run(mut self, every: Duration, stop: CancellationToken) {
        let mut tick = tokio::time::interval(every);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while stop.run_until_cancelled(tick.tick()).await.is_some() {
            // A push under way gives way to the last one.
            stop.run_until_cancelled(self.push()).await;
        }
        self.push().await;
    }

    async fn push(&mut self) {
        let times = Times { start: self.start, now: nanos() };
        let body = encode::request((self.gather)().await, &self.resource, times).encode_to_vec();
        let request = self.client.post(&self.url).headers(self.headers.clone()).body(body);
        let failure = match request.send().await {
            Ok(answer) if answer.status().is_success() => None,
            Ok(answer) => Some(format!("it answered {}", answer.status())),
            // Without the URL, which may hold a secret.
            Err(error) => Some(crate::failure::chain(&error.without_url())),
        };
        let counter = if failure.is_none() { &self.sent } else { &self.failed };
        counter.inc();
        match (&failure, self.reached) {
            (Some(error), true) => {
                tracing::warn!(kind = "otlp.unreachable", error, "metrics can't be sent; trying on");
            }
            (None, false) => tracing::info!(kind = "otlp.reached", "metrics are sent again"),
            _ => {}
        }
        self.reached = failure.is_none();
    }
}

/// The counter of pushes, registered once; without an endpoint it stays at 0.
pub(crate) fn pushes() -> IntCounterVec {
    static PUSHES: std::sync::LazyLock<IntCounterVec> = std::sync::LazyLock::new(|| {
        let opts = Opts::new("holdfast_otlp_pushes_total", "Metrics sent by OTLP.");
        let pushes = IntCounterVec::new(opts, &["outcome"]).expect("the names are valid");
        for outcome in ["sent", "failed"] {
            pushes.with_label_values(&[outcome]);
        }
        prometheus::default_registry().register(Box::new(pushes.clone())).expect("registered once, here");
        pushes
    });
    PUSHES.clone()
}

fn nanos() -> u64 {
    Utc::now().timestamp_nanos_opt().and_then(|nanos| u64::try_from(nanos).ok()).unwrap_or_default()
}

/// Headers as `OTEL_EXPORTER_OTLP_HEADERS` has them: `name=value,…`, values percent-encoded. Errors don't
/// quote values, which may be secrets.
fn headers(text: &str) -> Result<HeaderMap, Failure> {
    let mut headers = HeaderMap::new();
    for (number, pair) in (1..).zip(text.split(',').map(str::trim).filter(|pair| !pair.is_empty())) {
        let wrong =
            || Failure::Config(format!("OTEL_EXPORTER_OTLP_HEADERS: entry {number} isn't name=value"));
        let (name, value) = pair.split_once('=').ok_or_else(wrong)?;
        let name = HeaderName::try_from(name.trim()).map_err(|_| wrong())?;
        let mut value =
            HeaderValue::try_from(decoded(value.trim()).ok_or_else(wrong)?).map_err(|_| wrong())?;
        value.set_sensitive(true);
        headers.insert(name, value);
    }
    Ok(headers)
}

fn decoded(text: &str) -> Option<Vec<u8>> {
    let mut bytes = text.bytes();
    let mut plain = Vec::with_capacity(text.len());
    while let Some(byte) = bytes.next() {
        plain.push(match byte {
            b'%' => {
                let digits = [bytes.next()?, bytes.next()?];
                u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?
            }
            other => other,
        });
    }
    Some(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_read_as_the_other_exporters_read_them() {
        let read = headers("authorization=Basic%20YWJj+/==, x-scope = a%2Cb ,").expect("headers");
        assert_eq!(read["authorization"], "Basic YWJj+/==");
        assert_eq!(read["x-scope"], "a,b");
        assert!(read["authorization"].is_sensitive());
        assert_eq!(headers("").map(|headers| headers.len()), Ok(0));
        for bad in ["secret", "a b=secret", "a=%", "a=%zz", "a=%0Asecret"] {
            let error = headers(bad).expect_err("no headers").to_string();
            assert!(error.contains("entry 1") && !error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn the_interval_is_in_milliseconds() {
        assert_eq!(interval(None), Ok(EVERY));
        assert_eq!(interval(Some("")), Ok(EVERY));
        assert_eq!(interval(Some("250")), Ok(Duration::from_millis(250)));
        for bad in ["0", "-1", "15s"] {
            assert!(interval(Some(bad)).is_err(), "{bad}");
        }
    }
}
