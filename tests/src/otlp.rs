//! An OTLP server that keeps what it is sent, and one that never answers.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use anyhow::{Context as _, Result};
use axum::{Router, body::Bytes, extract::State, http::StatusCode, routing::post};
use opentelemetry_proto::tonic::{
    collector::{
        logs::v1::ExportLogsServiceRequest, metrics::v1::ExportMetricsServiceRequest,
        trace::v1::ExportTraceServiceRequest,
    },
    common::v1::{KeyValue, any_value::Value},
    logs::v1::LogRecord,
    metrics::v1::Metric,
    resource::v1::Resource,
    trace::v1::Span,
};
use prost::Message as _;
use tokio::{io::AsyncReadExt as _, net::TcpListener, sync::watch};
use tokio_util::task::AbortOnDropHandle;

use crate::world::PATIENCE;

/// What a server was sent, each with whose it is.
#[derive(Debug, Default)]
pub struct Received {
    /// Spans that ended.
    pub spans: Vec<(Resource, Span)>,
    /// Log records, with their scopes.
    pub records: Vec<(Resource, String, LogRecord)>,
    /// Metrics, the newest last.
    pub metrics: Vec<(Resource, Metric)>,
    /// Every request's body as it came.
    pub bodies: Vec<Bytes>,
}

/// An OTLP server over HTTP.
pub struct Sink {
    /// What nodes take as `--otlp-endpoint`.
    pub url: String,
    kept: Arc<Mutex<Received>>,
    news: watch::Receiver<u64>,
    _serving: AbortOnDropHandle<()>,
}

#[derive(Clone)]
struct Shared {
    kept: Arc<Mutex<Received>>,
    news: watch::Sender<u64>,
}

impl Shared {
    fn keep(&self, body: Bytes, add: impl FnOnce(&mut Received)) -> StatusCode {
        {
            let mut kept = lock(&self.kept);
            kept.bodies.push(body);
            add(&mut kept);
        }
        self.news.send_modify(|count| *count += 1);
        StatusCode::OK
    }
}

fn lock(kept: &Mutex<Received>) -> MutexGuard<'_, Received> {
    kept.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Sink {
    /// Serves on a port of its own.
    ///
    /// # Errors
    /// If there is no port.
    pub async fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}", listener.local_addr()?);
        let (sender, news) = watch::channel(0);
        let shared = Shared { kept: Arc::default(), news: sender };
        let kept = Arc::clone(&shared.kept);
        let router = Router::new()
            .route("/v1/traces", post(traces))
            .route("/v1/metrics", post(metrics))
            .route("/v1/logs", post(logs))
            .with_state(shared);
        let serving = tokio::spawn(async move {
            // It ends with the test.
            let _ = axum::serve(listener, router).await;
        });
        Ok(Self { url, kept, news, _serving: AbortOnDropHandle::new(serving) })
    }

    /// What has come so far.
    pub fn received(&self) -> MutexGuard<'_, Received> {
        lock(&self.kept)
    }

    /// Waits until `pick` finds what it looks for in what has come.
    ///
    /// # Errors
    /// If that takes too long.
    pub async fn until<T>(&self, what: &str, pick: impl Fn(&Received) -> Option<T>) -> Result<T> {
        let mut news = self.news.clone();
        let finding = async {
            loop {
                if let Some(found) = pick(&self.received()) {
                    return Ok::<T, anyhow::Error>(found);
                }
                news.changed().await?;
            }
        };
        tokio::time::timeout(PATIENCE, finding).await.with_context(|| format!("{what} never came"))?
    }
}

async fn traces(State(shared): State<Shared>, body: Bytes) -> StatusCode {
    let Ok(request) = ExportTraceServiceRequest::decode(&body[..]) else { return StatusCode::BAD_REQUEST };
    shared.keep(body, |kept| {
        for of_resource in request.resource_spans {
            let resource = of_resource.resource.unwrap_or_default();
            let spans = of_resource.scope_spans.into_iter().flat_map(|scope| scope.spans);
            kept.spans.extend(spans.map(|span| (resource.clone(), span)));
        }
    })
}

async fn logs(State(shared): State<Shared>, body: Bytes) -> StatusCode {
    let Ok(request) = ExportLogsServiceRequest::decode(&body[..]) else { return StatusCode::BAD_REQUEST };
    shared.keep(body, |kept| {
        for of_resource in request.resource_logs {
            let resource = of_resource.resource.unwrap_or_default();
            for of_scope in of_resource.scope_logs {
                let scope = of_scope.scope.unwrap_or_default().name;
                let records = of_scope.log_records.into_iter();
                kept.records.extend(records.map(|record| (resource.clone(), scope.clone(), record)));
            }
        }
    })
}

async fn metrics(State(shared): State<Shared>, body: Bytes) -> StatusCode {
    let Ok(request) = ExportMetricsServiceRequest::decode(&body[..]) else { return StatusCode::BAD_REQUEST };
    shared.keep(body, |kept| {
        for of_resource in request.resource_metrics {
            let resource = of_resource.resource.unwrap_or_default();
            let metrics = of_resource.scope_metrics.into_iter().flat_map(|scope| scope.metrics);
            kept.metrics.extend(metrics.map(|metric| (resource.clone(), metric)));
        }
    })
}

/// An attribute as text.
pub fn attribute(attributes: &[KeyValue], name: &str) -> Option<String> {
    let found = attributes.iter().find(|one| one.key == name)?;
    Some(match found.value.as_ref()?.value.as_ref()? {
        Value::StringValue(text) => text.clone(),
        Value::BoolValue(flag) => flag.to_string(),
        Value::IntValue(number) => number.to_string(),
        Value::DoubleValue(number) => number.to_string(),
        other => format!("{other:?}"),
    })
}

/// A server that takes connections and requests and never answers.
pub struct Hanging {
    /// What nodes take as `--otlp-endpoint`.
    pub url: String,
    asked: watch::Receiver<usize>,
    _taking: AbortOnDropHandle<()>,
}

impl Hanging {
    /// Listens on a port of its own.
    ///
    /// # Errors
    /// If there is no port.
    pub async fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address: SocketAddr = listener.local_addr()?;
        let (sender, asked) = watch::channel(0);
        let taking = tokio::spawn(async move {
            let mut held = Vec::new();
            while let Ok((mut stream, _)) = listener.accept().await {
                let sender = sender.clone();
                held.push(AbortOnDropHandle::new(tokio::spawn(async move {
                    let mut first = [0_u8; 1];
                    if stream.read_exact(&mut first).await.is_ok() {
                        sender.send_modify(|count| *count += 1);
                    }
                    // Whoever waits for an answer waits until it gives up.
                    std::future::pending::<()>().await;
                })));
            }
        });
        Ok(Self { url: format!("http://{address}"), asked, _taking: AbortOnDropHandle::new(taking) })
    }

    /// Waits until so many requests hang.
    ///
    /// # Errors
    /// If they don't come.
    pub async fn asked(&self, count: usize) -> Result<()> {
        let mut asked = self.asked.clone();
        let waiting = asked.wait_for(|asked| *asked >= count);
        tokio::time::timeout(PATIENCE, waiting).await.context("nobody asks")??;
        Ok(())
    }
}

/// How soon nodes under test send what they have; as variables of their environment.
pub fn impatient() -> [(&'static str, String); 3] {
    let soon = Duration::from_millis(100).as_millis().to_string();
    [
        ("OTEL_METRIC_EXPORT_INTERVAL", soon.clone()),
        ("OTEL_BSP_SCHEDULE_DELAY", soon.clone()),
        ("OTEL_BLRP_SCHEDULE_DELAY", soon),
    ]
}
