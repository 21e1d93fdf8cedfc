//! Traces, logs and metrics over OTLP, where an endpoint is given.
//!
//! Traces and logs go through OpenTelemetry's batch processors: bounded queues, each emptied by a thread of its
//! own, which drop what doesn't fit. Metrics are pushed by a task (see [`push`]). An endpoint that is away or
//! hangs therefore costs what wasn't sent, and nothing else.

mod encode;
mod endpoint;
mod logs;
pub(crate) mod push;

use std::{sync::LazyLock, time::Duration};

use opentelemetry::{KeyValue, logs::LoggerProvider as _, trace::TracerProvider as _};
use opentelemetry_otlp::{Protocol, WithExportConfig as _, WithHttpConfig as _};
use opentelemetry_sdk::{
    Resource,
    logs::SdkLoggerProvider,
    propagation::TraceContextPropagator,
    trace::{SdkTracer, SdkTracerProvider},
};
use uuid::Uuid;

pub(crate) use self::{endpoint::Endpoint, logs::Records};
use crate::failure::Failure;

/// How long the last spans and records may take at the end.
const FINISH: Duration = Duration::from_secs(2);

/// Names this start of the process in everything that is sent.
static INSTANCE: LazyLock<Uuid> = LazyLock::new(Uuid::now_v7);

/// A client that goes where it was told and nowhere else: a redirect would carry headers with keys in them to
/// another host.
fn client() -> reqwest::Result<reqwest::blocking::Client> {
    reqwest::blocking::Client::builder().redirect(reqwest::redirect::Policy::none()).build()
}

/// What everything that is sent is marked with.
fn resource(role: &'static str) -> Resource {
    Resource::builder()
        .with_service_name("holdfast")
        .with_attributes([
            KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
            KeyValue::new("service.instance.id", INSTANCE.to_string()),
            KeyValue::new("holdfast.role", role),
        ])
        .build()
}

/// The exporters of traces and logs, if there are any.
#[must_use = "without `finish` the last spans and records are lost"]
#[derive(Debug)]
pub(crate) struct Exports(Option<(SdkTracerProvider, SdkLoggerProvider)>);

impl Exports {
    /// Starts exporting to `endpoint`; `role` is the process's. To be called before the runtime starts: the
    /// exporters bring a runtime of their own, which can't start inside another.
    pub(crate) fn start(endpoint: Option<&str>, role: &'static str) -> Result<Self, Failure> {
        // Trace context travels through mail and tools even where nothing is exported.
        opentelemetry::global::set_text_map_propagator(TraceContextPropagator::new());
        let Some(text) = endpoint else { return Ok(Self(None)) };
        let endpoint = Endpoint::parse(text)?;
        let refuse = |error: opentelemetry_otlp::ExporterBuildError| endpoint::refused(&error.to_string());
        let client = client().map_err(|error| endpoint::refused(&error.to_string()))?;
        let spans = opentelemetry_otlp::SpanExporter::builder()
            .with_http()
            .with_http_client(client.clone())
            .with_protocol(Protocol::HttpBinary)
            .with_endpoint(endpoint.traces())
            .build()
            .map_err(refuse)?;
        let records = opentelemetry_otlp::LogExporter::builder()
            .with_http()
            .with_http_client(client)
            .with_protocol(Protocol::HttpBinary)
            .with_endpoint(endpoint.logs())
            .build()
            .map_err(refuse)?;
        let tracers =
            SdkTracerProvider::builder().with_batch_exporter(spans).with_resource(resource(role)).build();
        let loggers =
            SdkLoggerProvider::builder().with_batch_exporter(records).with_resource(resource(role)).build();
        opentelemetry::global::set_tracer_provider(tracers.clone());
        Ok(Self(Some((tracers, loggers))))
    }

    /// What makes spans.
    pub(crate) fn tracer(&self) -> Option<SdkTracer> {
        self.0.as_ref().map(|(tracers, _)| tracers.tracer("holdfast"))
    }

    /// What makes log records.
    pub(crate) fn records(&self) -> Option<Records> {
        self.0.as_ref().map(|(_, loggers)| Records::new(loggers.logger("holdfast")))
    }

    /// Sends what is left, outside any runtime, and takes no longer than [`FINISH`].
    pub(crate) fn finish(self) {
        let Some((tracers, loggers)) = self.0 else { return };
        let (spans, records) = std::thread::scope(|scope| {
            let records = scope.spawn(|| loggers.shutdown_with_timeout(FINISH));
            (tracers.shutdown_with_timeout(FINISH), records.join())
        });
        // The exporter of logs is gone, so these reach standard error alone.
        if let Err(error) = spans {
            tracing::warn!(kind = "otlp.unfinished", %error, "the last traces may be lost");
        }
        if let Ok(Err(error)) = records {
            tracing::warn!(kind = "otlp.unfinished", %error, "the last log records may be lost");
        }
    }
}
