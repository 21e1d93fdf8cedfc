//! Logs: one line for each event, on standard error, as JSON or for people.
//!
//! A JSON line is `{"ts", "level", "kind", …}`: `kind` is the event's own field of that name, or `log`;
//! every other field stands beside it, those of the spans around the event too. With an OTLP endpoint the same
//! events with the same fields go there as well (see [`crate::otlp`]).

mod line;
#[cfg(test)]
mod tests;

use std::{
    backtrace::{Backtrace, BacktraceStatus},
    io::Write as _,
    panic::PanicHookInfo,
};

use tracing_subscriber::{
    EnvFilter, Layer as _, Registry, filter::LevelFilter, filter::Targets, layer::SubscriberExt as _,
    util::SubscriberInitExt as _,
};

pub(crate) use line::Format;
use line::Lines;

use crate::{failure::Failure, otlp::Exports};

/// What a server says if `RUST_LOG` doesn't ask for something else. Of an export that failed the exporter warns and
/// the processor says so again, which is enough; and once a minute is, however many batches fail. Of connections that are
/// lost the pool warns one by one, twice each, where `database.unavailable` says once why.
pub(crate) const SERVER: &str = "warn,holdfast=info,opentelemetry=error,deadpool=error";
/// What holds whatever `RUST_LOG` asks for: below this the driver quotes the parameters of statements, which are
/// prompts, results and tokens.
const PRIVATE: &str = "tokio_postgres=warn";
/// What any other command says.
pub(crate) const QUIET: &str = "warn";

/// Starts logging, and sending traces and logs where there is an endpoint for it. To be called once, before
/// the runtime starts, by a process of a role.
///
/// # Errors
/// [`Failure::Config`] if `RUST_LOG` or the endpoint can't be used.
pub(crate) fn start(
    format: Format,
    default: &str,
    otlp_endpoint: Option<&str>,
    role: &'static str,
) -> Result<Exports, Failure> {
    let wanted = std::env::var("RUST_LOG").ok().filter(|text| !text.trim().is_empty());
    let filter = EnvFilter::builder()
        .parse(wanted.as_deref().unwrap_or(default))
        .map_err(|error| Failure::Config(format!("RUST_LOG can't be used: {error}")))?;
    let private =
        PRIVATE.parse().map_err(|error| Failure::Failed(format!("logging can't start: {error}")))?;
    let filter = filter.add_directive(private);
    let exports = Exports::start(otlp_endpoint, role)?;
    let write = |line: &str| {
        // A log that can't be written can't be complained about either.
        let _ = std::io::stderr().lock().write_all(line.as_bytes());
    };
    let lines = Lines::new(format, write, exports.records());
    // Libraries' spans stay out of traces, and RUST_LOG decides about logs only.
    let ours = Targets::new().with_target("holdfast", LevelFilter::INFO);
    let spans = exports.tracer().map(|tracer| {
        tracing_opentelemetry::layer()
            .with_tracer(tracer)
            .with_location(false)
            .with_threads(false)
            .with_filter(ours)
    });
    Registry::default()
        .with(spans)
        .with(lines.with_filter(filter))
        .try_init()
        .map_err(|error| Failure::Failed(format!("logging can't start: {error}")))?;
    std::panic::set_hook(Box::new(panicked));
    Ok(exports)
}

/// A panic is an event as any other: one line, which whoever reads logs by line can read.
/// Says where something panicked. A text that was put together then may quote what people said, so only one that
/// stands in the program is told.
fn panicked(info: &PanicHookInfo<'_>) {
    let backtrace = Backtrace::capture();
    let backtrace = (backtrace.status() == BacktraceStatus::Captured).then(|| backtrace.to_string());
    tracing::error!(
        kind = "panic",
        thread = std::thread::current().name(),
        location = info.location().map(ToString::to_string),
        backtrace,
        "{}",
        info.payload().downcast_ref::<&'static str>().unwrap_or(&"a panic")
    );
}
