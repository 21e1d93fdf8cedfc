//! Asking the model: the request is built from what is stored, and from what the agent offers where that is the same.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use holdfast_engine::{
    agent::Agent,
    content::Digest,
    ids::SessionId,
    model::{ModelAnswer, ModelRequest},
    session::Session,
    transcript,
};
use holdfast_store::{StoreError, load, notify::Channel};
use serde_json::json;
use tokio::time::Instant;
use tracing::Instrument;

use crate::{Shared, metrics, trace};

/// What a run keeps for its next request: what its requests have shown so far, and the blobs that turns which
/// aren't rendered yet name.
#[derive(Default)]
pub(crate) struct Fetched {
    rendered: transcript::Rendered,
    blobs: HashMap<Digest, Arc<str>>,
}

impl Fetched {
    /// Keeps exactly the blobs that the next request needs, which are sorted, fetching what is missing.
    async fn bring(&mut self, shared: &Shared, owner: &str, needs: &[Digest]) -> Result<(), StoreError> {
        self.blobs.retain(|digest, _| needs.binary_search(digest).is_ok());
        let missing: Vec<Digest> =
            needs.iter().filter(|digest| !self.blobs.contains_key(digest)).copied().collect();
        self.blobs.extend(load::blobs(&shared.store, owner, &missing).await?);
        Ok(())
    }
}

/// Why there is no answer, for a person: the run ends as failed.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Unanswered(pub(crate) String);

/// Builds the request for the session's newest user turn.
pub(crate) async fn build(
    shared: &Shared,
    owner: &str,
    agent: &Agent,
    session: &Session,
    fetched: &mut Fetched,
) -> Result<ModelRequest, StoreError> {
    let limit = agent.context_tokens;
    fetched.rendered.know(&agent.offer);
    let needs = transcript::needs_after(session, limit, &mut fetched.rendered);
    fetched.bring(shared, owner, &needs).await?;
    Ok(transcript::request_after(session, limit, &fetched.blobs, &mut fetched.rendered)?)
}

/// Asks the model. `position` is that of the turn that its answer will be.
pub(crate) async fn ask(
    shared: Arc<Shared>,
    agent: Arc<Agent>,
    session: SessionId,
    position: i64,
    request: ModelRequest,
) -> Result<ModelAnswer, Unanswered> {
    let key = match agent.api_key_id.as_str() {
        "" => None,
        id => Some(shared.keys.get(id).ok_or_else(|| {
            Unanswered(format!(
                "no API key {id:?} is configured on this worker; add it to the keys file and resume"
            ))
        })?),
    };
    let sent = AtomicU64::new(0);
    let deltas = |text: &str| {
        let index = sent.fetch_add(1, Ordering::Relaxed);
        stream(&shared, session, position, index, text);
    };
    let deltas: Option<&(dyn Fn(&str) + Send + Sync)> =
        if shared.stream_tokens { Some(&deltas) } else { None };
    let span = tracing::info_span!(
        "model",
        "otel.kind" = "client",
        "gen_ai.operation.name" = "chat",
        "gen_ai.provider.name" = trace::provider(agent.target.flavor),
        "gen_ai.request.model" = %agent.target.model,
        "gen_ai.usage.input_tokens" = tracing::field::Empty,
        "gen_ai.usage.output_tokens" = tracing::field::Empty,
        "gen_ai.usage.cache_read.input_tokens" = tracing::field::Empty,
        "error.type" = tracing::field::Empty,
        "otel.status_code" = tracing::field::Empty,
    );
    let began = Instant::now();
    shared.store.at("model.before").await;
    let asking = shared
        .model
        .complete(&agent.target, key, &request, deltas, &|backoff| metrics::attempt_failed(backoff.class));
    let answer = asking.instrument(span.clone()).await;
    shared.store.at("model.done").await;
    match answer {
        Ok(answer) => {
            metrics::asked(&agent.target.model, "ok", began.elapsed());
            if let Some(usage) = answer.usage {
                span.record("gen_ai.usage.input_tokens", usage.input_tokens);
                span.record("gen_ai.usage.output_tokens", usage.output_tokens);
                span.record("gen_ai.usage.cache_read.input_tokens", usage.cached_tokens);
                metrics::tokens(&agent.target.model, usage);
            }
            Ok(answer)
        }
        Err(error) => {
            metrics::asked(&agent.target.model, error.code(), began.elapsed());
            metrics::attempt_failed(error.class());
            trace::failed(&span, error.code());
            Err(Unanswered(error.to_string()))
        }
    }
}

/// Text as it comes, for those who watch now; it is never stored. `position` is that of the turn it will be
/// part of, so that nobody is shown it after the turn; `index` counts from 0 in each request.
fn stream(shared: &Shared, session: SessionId, position: i64, index: u64, text: &str) {
    if let Some(notifier) = shared.store.notifier() {
        let delta = json!({"session_id": session, "position": position, "index": index, "text": text});
        notifier.send(Channel::Deltas, delta.to_string());
    }
}
