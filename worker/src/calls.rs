//! Tool calls that run in this worker.

use std::{
    path::PathBuf,
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::{FutureExt, StreamExt, future::BoxFuture, stream::FuturesUnordered};
use holdfast_engine::{
    agent::Agent,
    builtin::BuiltinKind,
    content::{Blob, Payload},
    decide::Start,
    ids::{CallId, SessionId},
    mail::Settled,
    session::Session,
    tool::Outcome,
};
use holdfast_tools::{CallContext, Toolbox, agent_id};
use serde_json::Value;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use crate::{
    Shared, metrics,
    progress::Board,
    system, trace,
    wrap::{self, HookFailed, Reply, Watcher, Wrapped},
};

/// Bytes of a failure's text that are kept for the model.
const MAX_FAILURE: usize = 64 * 1024;

/// What a call runs for.
pub(crate) struct Scope {
    pub(crate) shared: Arc<Shared>,
    pub(crate) owner: String,
    pub(crate) session: SessionId,
    pub(crate) epoch: i64,
    pub(crate) agent: Arc<Agent>,
    pub(crate) toolbox: Arc<Toolbox>,
    pub(crate) traceparent: Option<String>,
    pub(crate) session_json: Option<String>,
    /// Where the agent file is.
    pub(crate) dir: PathBuf,
}

/// A call that has ended.
pub(crate) struct Ended {
    pub(crate) call: CallId,
    pub(crate) how: How,
    /// The hooks that gave no usable answer.
    pub(crate) hooks: Vec<HookFailed>,
}

/// How a call ended.
pub(crate) enum How {
    /// It has an end, with the blob that holds a large result.
    Settled(Settled, Option<Blob>),
    /// It wasn't let run. Whatever its policy grants, another attempt would be refused as well.
    Refused(String),
    /// A hook wants it to be handled outside.
    Defer { reason: String },
}

/// The calls of a session that run now. Dropping it kills them.
#[derive(Default)]
pub(crate) struct Running {
    futures: FuturesUnordered<BoxFuture<'static, Ended>>,
    tokens: Vec<(CallId, CancellationToken)>,
    board: Board,
}

impl Running {
    /// Begins a call of a session as it is now.
    pub(crate) fn start(&mut self, scope: &Arc<Scope>, start: Start, session: &Session) {
        let cancel = CancellationToken::new();
        self.tokens.push((start.call, cancel.clone()));
        let span = tracing::info_span!(
            "tool",
            tool_call_id = %start.call,
            "gen_ai.operation.name" = "execute_tool",
            "gen_ai.tool.name" = %start.name,
            "gen_ai.tool.call.id" = %start.call,
            "holdfast.label" = tracing::field::Empty,
            "error.type" = tracing::field::Empty,
            "otel.status_code" = tracing::field::Empty,
        );
        if let Some(label) = start.disposition.label() {
            span.record("holdfast.label", label);
        }
        let wrapped = wrapped(scope, &start, session, &self.board, &span);
        let of_call = span.clone();
        let run = async move {
            let (store, call) = (wrapped.store.clone(), start.call);
            store.at("tool.before").await;
            let began = Instant::now();
            let reply = reply(&wrapped, start, cancel).await;
            store.at("tool.done").await;
            let how = ended(reply);
            let word = match &how {
                How::Settled(settled, _) => settled.word(),
                How::Refused(_) => "failed",
                How::Defer { .. } => "deferred",
            };
            if word != "deferred" {
                metrics::called(word, began.elapsed());
            }
            if matches!(word, "failed" | "cancelled") {
                trace::failed(&of_call, word);
            }
            Ended { call, how, hooks: wrapped.failed_hooks() }
        };
        self.futures.push(run.instrument(span).boxed());
    }

    /// Calls run of which others don't know yet: nobody is told of their progress.
    pub(crate) fn unstored(&self) {
        self.board.close();
    }

    /// All calls that run are stored.
    pub(crate) fn stored(&self) {
        self.board.open();
    }

    /// What a call that runs here has said of its progress, oldest first.
    pub(crate) fn progress(&self, call: CallId) -> Vec<Value> {
        self.board.read(call)
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
            self.board.wipe(done.call);
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
        let gone = dying.clone();
        let mut survivors = Vec::new();
        while !dying.is_empty() {
            let Some(ended) = self.futures.next().await else { break };
            if dying.contains(&ended.call) {
                dying.retain(|call| *call != ended.call);
            } else {
                survivors.push(ended);
            }
        }
        gone.into_iter().for_each(|call| self.board.wipe(call));
        for ended in survivors {
            self.futures.push(futures::future::ready(ended).boxed());
        }
    }
}

/// A call with all that is wrapped around it.
fn wrapped(
    scope: &Arc<Scope>,
    start: &Start,
    session: &Session,
    board: &Board,
    span: &tracing::Span,
) -> Wrapped {
    let context = CallContext {
        session_id: scope.session,
        turn_id: start.turn,
        call_id: start.call,
        agent_id: agent_id(&scope.agent.slug, &scope.agent.revision),
        idempotent: start.idempotent,
        session_json: scope.session_json.clone(),
        traceparent: trace::traceparent(span).or_else(|| scope.traceparent.clone()),
        timeout: None,
    };
    let system = match scope.agent.builtin(&start.name).map(|builtin| &builtin.kind) {
        Some(BuiltinKind::System(toolbox)) => {
            Some(system::Desk::new(scope, start.call, Arc::clone(toolbox), session))
        }
        Some(BuiltinKind::Helper(_)) | None => None,
    };
    let reporter = board.of(scope, start);
    let watcher: Watcher = Arc::new(move |report| reporter.tell(&report));
    Wrapped {
        store: scope.shared.store.clone(),
        toolbox: Arc::clone(&scope.toolbox),
        owner: scope.owner.clone(),
        agent: scope.agent.slug.clone(),
        dir: scope.dir.clone(),
        tool: start.name.clone(),
        system,
        context,
        watcher,
        layers: wrap::layers(&start.disposition, start.timeout_seconds.map(Duration::from_secs)),
        failed_hooks: Mutex::default(),
    }
}

/// Carries a call out, after the pause that an attempt after the first begins with.
async fn reply(wrapped: &Wrapped, start: Start, cancel: CancellationToken) -> Reply {
    let cancelled = || {
        let message = format!("cancelled: the call of {} was ended by order before it began.", start.name);
        Reply::Ended(Outcome::Cancelled(message))
    };
    // An order that came with the commit of the start: the program needn't begin.
    if cancel.is_cancelled() {
        return cancelled();
    }
    if let Some(message) = wrap::gated(&start.disposition) {
        return Reply::Refused(message);
    }
    if start.disposition.retries() > 0 {
        let pause = wrap::pause(None, u32::try_from(start.attempt).unwrap_or_default());
        tokio::select! {
            biased;
            () = cancel.cancelled() => return cancelled(),
            () = tokio::time::sleep(pause) => {}
        }
    }
    wrapped.carry_out(start.arguments.clone(), cancel.clone()).await
}

fn ended(reply: Reply) -> How {
    match reply {
        Reply::Ended(Outcome::Completed(result)) => {
            let (result, blob) = Payload::pack(result);
            How::Settled(Settled::Completed { result }, blob)
        }
        Reply::Ended(Outcome::Failed(message)) => {
            How::Settled(Settled::Failed { message: cut(message) }, None)
        }
        Reply::Ended(Outcome::Cancelled(message)) => {
            How::Settled(Settled::Cancelled { message: cut(message) }, None)
        }
        Reply::Refused(message) => How::Refused(cut(message)),
        Reply::Deferred(reason) => How::Defer { reason: cut(reason) },
    }
}

fn cut(mut message: String) -> String {
    if message.len() > MAX_FAILURE {
        message.truncate(message.floor_char_boundary(MAX_FAILURE));
        message.push('…');
    }
    message
}
