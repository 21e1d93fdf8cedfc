//! Tool calls that run in this worker.

use std::{sync::Arc, time::Duration};

use futures::{FutureExt, StreamExt, future::BoxFuture, stream::FuturesUnordered};
use holdfast_engine::{
    content::{Blob, Payload},
    decide::Start,
    ids::{CallId, SessionId},
    mail::Settled,
    tool::Outcome,
};
use holdfast_store::Store;
use holdfast_tools::{CallContext, Toolbox, agent_id};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use crate::{metrics, trace};

/// Bytes of a failure's text that are kept for the model.
const MAX_FAILURE: usize = 64 * 1024;

/// What a call runs for.
pub(crate) struct Scope {
    pub(crate) store: Store,
    pub(crate) session: SessionId,
    pub(crate) slug: String,
    pub(crate) revision: String,
    pub(crate) toolbox: Arc<Toolbox>,
    pub(crate) traceparent: Option<String>,
    pub(crate) session_json: Option<String>,
}

/// A call that has ended.
pub(crate) struct Ended {
    pub(crate) call: CallId,
    pub(crate) settled: Settled,
    pub(crate) blob: Option<Blob>,
}

/// The calls of a session that run now. Dropping it kills them.
#[derive(Default)]
pub(crate) struct Running {
    futures: FuturesUnordered<BoxFuture<'static, Ended>>,
    tokens: Vec<(CallId, CancellationToken)>,
}

impl Running {
    pub(crate) fn start(&mut self, scope: &Scope, start: Start) {
        let cancel = CancellationToken::new();
        self.tokens.push((start.call, cancel.clone()));
        let span = tracing::info_span!(
            "tool",
            tool_call_id = %start.call,
            "gen_ai.operation.name" = "execute_tool",
            "gen_ai.tool.name" = %start.name,
            "gen_ai.tool.call.id" = %start.call,
            "error.type" = tracing::field::Empty,
            "otel.status_code" = tracing::field::Empty,
        );
        let context = CallContext {
            session_id: scope.session,
            turn_id: start.turn,
            call_id: start.call,
            agent_id: agent_id(&scope.slug, &scope.revision),
            idempotent: start.idempotent,
            session_json: scope.session_json.clone(),
            traceparent: trace::traceparent(&span).or_else(|| scope.traceparent.clone()),
            timeout: start.timeout_seconds.map(Duration::from_secs),
        };
        let (store, toolbox) = (scope.store.clone(), Arc::clone(&scope.toolbox));
        let of_call = span.clone();
        let run = async move {
            store.at("tool.before").await;
            // An order that came with the commit of the start: the program needn't begin.
            if cancel.is_cancelled() {
                let message =
                    format!("cancelled: the call of {} was ended by order before it began.", start.name);
                return Ended { call: start.call, settled: Settled::Cancelled { message }, blob: None };
            }
            let began = Instant::now();
            let outcome = toolbox.call(&start.name, &start.arguments, &context, &cancel, None).await;
            store.at("tool.done").await;
            let (settled, blob) = settle(outcome);
            metrics::called(&settled, began.elapsed());
            if settled.word() != "completed" {
                trace::failed(&of_call, settled.word());
            }
            Ended { call: start.call, settled, blob }
        };
        self.futures.push(run.instrument(span).boxed());
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.futures.is_empty()
    }

    /// The next calls that end: at least one, and all that have ended by then.
    pub(crate) async fn next(&mut self) -> Vec<Ended> {
        let mut ended: Vec<Ended> = self.futures.next().await.into_iter().collect();
        while let Some(Some(more)) = self.futures.next().now_or_never() {
            ended.push(more);
        }
        for done in &ended {
            self.tokens.retain(|(call, _)| *call != done.call);
        }
        ended
    }

    /// Kills the calls that aren't wanted any more and waits until they are gone.
    pub(crate) async fn keep(&mut self, wanted: impl Fn(CallId) -> bool) {
        let (kept, unwanted): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.tokens).into_iter().partition(|(call, _)| wanted(*call));
        self.tokens = kept;
        if unwanted.is_empty() {
            return;
        }
        for (_, token) in &unwanted {
            token.cancel();
        }
        let mut dying: Vec<CallId> = unwanted.into_iter().map(|(call, _)| call).collect();
        let mut survivors = Vec::new();
        while !dying.is_empty() {
            let Some(ended) = self.futures.next().await else { break };
            if dying.contains(&ended.call) {
                dying.retain(|call| *call != ended.call);
            } else {
                survivors.push(ended);
            }
        }
        for ended in survivors {
            self.futures.push(futures::future::ready(ended).boxed());
        }
    }
}

fn settle(outcome: Outcome) -> (Settled, Option<Blob>) {
    match outcome {
        Outcome::Completed(result) => {
            let (result, blob) = Payload::pack(result);
            (Settled::Completed { result }, blob)
        }
        Outcome::Failed(message) => (Settled::Failed { message: cut(message) }, None),
        Outcome::Cancelled(message) => (Settled::Cancelled { message: cut(message) }, None),
    }
}

fn cut(mut message: String) -> String {
    if message.len() > MAX_FAILURE {
        let end = (0..=MAX_FAILURE).rev().find(|end| message.is_char_boundary(*end)).unwrap_or(0);
        message.truncate(end);
        message.push('…');
    }
    message
}
