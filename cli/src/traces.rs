//! Traces over OTLP, where an endpoint is given.

use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::{Protocol, WithExportConfig as _};
use opentelemetry_sdk::{
    Resource,
    propagation::TraceContextPropagator,
    trace::{SdkTracer, SdkTracerProvider},
};

use crate::failure::Failure;

/// Where an OTLP server takes traces.
const PATH: &str = "/v1/traces";

/// The exporter of traces, if there is one.
#[must_use = "without `finish` the last spans are lost"]
#[derive(Debug)]
pub(crate) struct Traces(Option<SdkTracerProvider>);

impl Traces {
    /// Starts exporting to `endpoint`, an `http` or `https` URL, with or without the path of traces.
    pub(crate) fn start(endpoint: Option<&str>) -> Result<Self, Failure> {
        // Trace context travels through mail and tools even where nothing is exported.
        opentelemetry::global::set_text_map_propagator(TraceContextPropagator::new());
        let Some(endpoint) = endpoint else { return Ok(Self(None)) };
        let refuse = |reason: String| Failure::Config(format!("--otlp-endpoint: {reason}"));
        let exporter = opentelemetry_otlp::SpanExporter::builder()
            .with_http()
            .with_protocol(Protocol::HttpBinary)
            .with_endpoint(traces_url(endpoint).map_err(refuse)?)
            .build()
            .map_err(|error| refuse(error.to_string()))?;
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(exporter)
            .with_resource(Resource::builder().with_service_name("holdfast").build())
            .build();
        opentelemetry::global::set_tracer_provider(provider.clone());
        Ok(Self(Some(provider)))
    }

    /// What makes spans.
    pub(crate) fn tracer(&self) -> Option<SdkTracer> {
        self.0.as_ref().map(|provider| provider.tracer("holdfast"))
    }

    /// Sends what is left, outside any runtime.
    pub(crate) fn finish(self) {
        if let Some(provider) = self.0
            && let Err(error) = provider.shutdown()
        {
            tracing::warn!(%error, "the last traces may be lost");
        }
    }
}

fn traces_url(endpoint: &str) -> Result<String, String> {
    let url = reqwest::Url::parse(endpoint).map_err(|error| format!("{endpoint:?} is no URL: {error}"))?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(format!("{endpoint:?} must start with http:// or https://"));
    }
    let base = endpoint.trim_end_matches('/');
    Ok(if base.ends_with(PATH) { base.to_owned() } else { format!("{base}{PATH}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_of_traces_is_added_once() {
        assert_eq!(traces_url("http://c:4318").as_deref(), Ok("http://c:4318/v1/traces"));
        assert_eq!(traces_url("http://c:4318/v1/traces/").as_deref(), Ok("http://c:4318/v1/traces"));
        assert!(traces_url("c:4318").is_err());
        assert!(traces_url("nonsense").is_err());
    }
}
