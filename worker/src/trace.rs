//! A run's trace: where it belongs, what is put into it beside spans, and how programs learn of it.
//!
//! Where nothing is exported all of this does nothing, and a run's context is that of the request which asked
//! for it.

use std::collections::HashMap;

use holdfast_engine::model::Flavor;
use holdfast_store::claim::Lease;
use opentelemetry::{
    KeyValue, global,
    trace::{Span as _, TraceContextExt as _, Tracer as _},
};
use tokio::time::Instant;
use tracing::{Span, field::Empty};
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

use crate::Shared;

/// The name of the header and the variable that trace context travels in.
const TRACEPARENT: &str = "traceparent";

/// The span of a lease, in the trace of the request that asked for the run.
pub(crate) fn run(shared: &Shared, lease: &Lease) -> Span {
    let span = tracing::info_span!(
        "run",
        session_id = %lease.session,
        run_epoch = lease.epoch,
        worker_id = %shared.id,
        traceparent = lease.traceparent.as_deref().unwrap_or_default(),
        "gen_ai.operation.name" = "invoke_agent",
        "gen_ai.agent.name" = %lease.agent,
        "gen_ai.conversation.id" = %lease.session,
        "holdfast.outcome" = Empty,
        "otel.status_code" = Empty,
    );
    if let Some(text) = &lease.traceparent {
        let carrier = HashMap::from([(TRACEPARENT.to_owned(), text.clone())]);
        let parent = global::get_text_map_propagator(|propagator| propagator.extract(&carrier));
        // It fails where no layer makes spans of ours, and then there is nothing to belong to.
        let _ = span.set_parent(parent);
    }
    span
}

/// Puts the claim that brought a lease into its run's trace: it was over before anybody knew whose trace
/// it belongs to.
pub(crate) fn claimed(run: &Span, asked_at: Instant, answered_at: Instant, taken_over: bool) {
    let context = run.context();
    if !context.span().span_context().is_sampled() {
        return;
    }
    let now = opentelemetry::time::now();
    let tracer = global::tracer("holdfast");
    let mut claim = tracer
        .span_builder("claim")
        .with_start_time(now - asked_at.elapsed())
        .with_attributes([KeyValue::new("holdfast.taken_over", taken_over)])
        .start_with_context(&tracer, &context);
    claim.end_with_timestamp(now - answered_at.elapsed());
}

/// A span's context as programs are told it; none where nothing is exported.
pub(crate) fn traceparent(span: &Span) -> Option<String> {
    let context = span.context();
    if !context.span().span_context().is_valid() {
        return None;
    }
    let mut carrier = HashMap::new();
    global::get_text_map_propagator(|propagator| propagator.inject_context(&context, &mut carrier));
    carrier.remove(TRACEPARENT)
}

/// Marks a span as failed; `kind` names the failure and quotes nothing.
pub(crate) fn failed(span: &Span, kind: &str) {
    span.record("error.type", kind);
    span.record("otel.status_code", "ERROR");
}

/// Who provides models of a flavour, in the words of OpenTelemetry where it has one.
pub(crate) fn provider(flavor: Flavor) -> &'static str {
    match flavor {
        Flavor::OpenAIv1 | Flavor::OpenAI => "openai",
        Flavor::Anthropic => "anthropic",
        Flavor::MistralV1 => "mistral_ai",
        Flavor::KimiV1 => "moonshot_ai",
        Flavor::OpenRouter => "openrouter",
        Flavor::Ollama => "ollama",
    }
}
