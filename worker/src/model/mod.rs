//! The model client: one trait, and its implementation over HTTP.
//!
//! [`ModelClient::complete`] takes a request as the engine builds it, speaks the target's dialect and
//! returns the answer together with the provider's own message, which later requests send back unchanged.
//! Failures that may pass (see [`ModelError`] for the others) are answered by asking again, at most
//! [`MAX_RETRIES`] times and within [`TOTAL_TIMEOUT`].
//!
//! A provider may have worked, and charged, for an attempt whose answer was lost: asking is at-least-once.

mod anthropic;
mod anthropic_answer;
mod anthropic_stream;
mod call_ids;
mod error;
mod fit;
mod http;
mod keys;
mod media;
mod openai;
mod openai_answer;
mod openai_stream;
mod retry;
mod sse;
mod wire;

#[cfg(test)]
mod answer_tests;
#[cfg(test)]
mod client_tests;
#[cfg(test)]
mod request_tests;
#[cfg(test)]
mod stream_tests;

use std::time::Duration;

use futures::future::BoxFuture;
use holdfast_engine::model::{Flavor, ModelAnswer, ModelRequest, ModelTarget};
use reqwest::{Client, redirect};
use serde_json::{Value, json};

pub use self::{
    anthropic::DEFAULT_MAX_TOKENS,
    error::{FailureClass, MAX_DETAIL_CHARS, ModelError},
    http::{CONNECT_TIMEOUT, IDLE_TIMEOUT, MAX_ANSWER_BYTES},
    keys::{ApiKey, ApiKeys, KeysError, MAX_FILE_BYTES, UnusableKey},
    retry::{
        ATTEMPT_TIMEOUT, Backoff, FIRST_PAUSE, LONGEST_PAUSE, LONGEST_RETRY_AFTER, MAX_RETRIES, TOTAL_TIMEOUT,
    },
};
use self::{error::Failure, http::Exchange, retry::Schedule, wire::Object};

/// What stands for a user's message without any text, where the API takes none.
const EMPTY_MESSAGE: &str = "(empty message)";

/// Asks models.
pub trait ModelClient: Send + Sync {
    /// Asks until there is an answer or no hope of one.
    ///
    /// With `deltas`, the provider is asked to stream and text goes there as it comes; an answer that is
    /// asked for again, which `on_backoff` announces, begins anew. Dropping the future gives the request up.
    ///
    /// # Errors
    /// See [`ModelError`].
    fn complete<'a>(
        &'a self,
        target: &'a ModelTarget,
        key: Option<&'a ApiKey>,
        request: &'a ModelRequest,
        deltas: Option<&'a (dyn Fn(&str) + Send + Sync)>,
        on_backoff: &'a (dyn Fn(Backoff) + Send + Sync),
    ) -> BoxFuture<'a, Result<ModelAnswer, ModelError>>;
}

/// The model client that speaks to providers over HTTP. Cloning shares its connections.
#[derive(Debug, Clone)]
pub struct HttpModelClient {
    client: Client,
    schedule: Schedule,
    idle: Duration,
    max_answer: usize,
}

impl HttpModelClient {
    /// Makes a client. A rustls crypto provider must be installed in the process.
    ///
    /// # Errors
    /// When TLS can't be set up.
    pub fn new() -> Result<Self, ModelError> {
        // A redirect could carry the key to another host.
        let client = Client::builder()
            .connect_timeout(CONNECT_TIMEOUT)
            .redirect(redirect::Policy::none())
            .user_agent(concat!("holdfast/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|error| ModelError::Target { detail: format!("no HTTP client can be made: {error}") })?;
        Ok(Self { client, schedule: Schedule::default(), idle: IDLE_TIMEOUT, max_answer: MAX_ANSWER_BYTES })
    }

    /// The client with other pauses between attempts than [`FIRST_PAUSE`] and [`LONGEST_PAUSE`]; a
    /// provider's own wish still counts.
    #[must_use]
    pub fn with_pauses(mut self, first: Duration, longest: Duration) -> Self {
        self.schedule = Schedule { first_pause: first, longest_pause: longest, ..self.schedule };
        self
    }

    async fn ask(
        &self,
        target: &ModelTarget,
        key: Option<&ApiKey>,
        request: &ModelRequest,
        deltas: Option<&(dyn Fn(&str) + Send + Sync)>,
        on_backoff: &(dyn Fn(Backoff) + Send + Sync),
    ) -> Result<ModelAnswer, ModelError> {
        let url = http::endpoint(target)?;
        let body = bytes::Bytes::from(encode(target, request, deltas.is_some())?);
        let (model, flavor) = (target.model.as_str(), target.flavor.name());
        tracing::info!(kind = "llm.request", model, flavor, bytes = body.len(), stream = deltas.is_some());
        let announce = |backoff: Backoff| {
            let delay_seconds = backoff.delay.as_secs_f64();
            tracing::info!(kind = "llm.backoff", model, flavor, attempt = backoff.attempt, delay_seconds);
            on_backoff(backoff);
        };
        let (idle, max_answer) = (self.idle, self.max_answer);
        let exchange = Exchange { client: &self.client, url: &url, target, key, deltas, idle, max_answer };
        let answer = retry::series(self.schedule, &announce, || exchange.run(body.clone())).await?;
        let usage = answer.usage.unwrap_or_default();
        tracing::info!(
            kind = "llm.response",
            model,
            flavor,
            tokens = usage.input_tokens.saturating_add(usage.output_tokens),
            input_tokens = usage.input_tokens,
            output_tokens = usage.output_tokens,
            cached_tokens = usage.cached_tokens,
            tool_calls = answer.calls.len(),
        );
        Ok(answer)
    }
}

impl ModelClient for HttpModelClient {
    fn complete<'a>(
        &'a self,
        target: &'a ModelTarget,
        key: Option<&'a ApiKey>,
        request: &'a ModelRequest,
        deltas: Option<&'a (dyn Fn(&str) + Send + Sync)>,
        on_backoff: &'a (dyn Fn(Backoff) + Send + Sync),
    ) -> BoxFuture<'a, Result<ModelAnswer, ModelError>> {
        Box::pin(self.ask(target, key, request, deltas, on_backoff))
    }
}

/// The body of a request in the target's dialect.
fn encode(target: &ModelTarget, request: &ModelRequest, stream: bool) -> Result<Vec<u8>, ModelError> {
    match target.flavor {
        Flavor::Anthropic => anthropic::encode(target, request, stream),
        _ => openai::encode(target, request, stream),
    }
}

/// Merges the agent's own fields and writes the body.
fn finish_body(mut body: Object, target: &ModelTarget) -> Result<Vec<u8>, ModelError> {
    match &target.extra_body {
        None | Some(Value::Null) => {}
        Some(Value::Object(extra)) => extra.iter().for_each(|(key, value)| body.set(key, value)),
        Some(_) => return Err(ModelError::Target { detail: "extraBody must be a JSON object".to_owned() }),
    }
    serde_json::to_vec(&body).map_err(|error| ModelError::Target { detail: format!("no JSON: {error}") })
}

/// A tool's schema in the form that every provider takes: an object's, with a type.
fn object_schema(parameters: &Value) -> Value {
    match parameters {
        Value::Object(schema) if schema.contains_key("type") => parameters.clone(),
        Value::Object(schema) => {
            let mut schema = schema.clone();
            schema.insert("type".to_owned(), json!("object"));
            schema.entry("properties").or_insert_with(|| json!({}));
            Value::Object(schema)
        }
        _ => json!({ "type": "object", "properties": {} }),
    }
}

/// A parser's complaint without what it quotes, since that is the model's text.
fn unreadable(error: &serde_json::Error) -> Failure {
    let what =
        if error.is_data() { "it has another shape than this flavour's answers" } else { "it is not JSON" };
    Failure::malformed(format!("{what} (line {} column {})", error.line(), error.column()))
}
