//! Events as log records.
//!
//! OpenTelemetry's own bridge for `tracing` gives records other fields than the lines on standard error have;
//! these are made of what a line is made of.

use opentelemetry::{
    Key,
    logs::{AnyValue, LogRecord as _, Logger as _, Severity},
};
use opentelemetry_sdk::logs::SdkLogger;
use serde_json::{Map, Value};
use tracing::Level;

/// Whose events aren't sent, since sending brings them about: what the exporters' and the pusher's own HTTP
/// clients say would be sent, and said again.
const SILENT: [&str; 8] =
    ["opentelemetry", "reqwest", "hyper", "hyper_util", "h2", "rustls", "tower", "tonic"];

/// Makes log records of events. Never blocks: a full queue drops them.
pub(crate) struct Records(SdkLogger);

impl Records {
    pub(super) fn new(logger: SdkLogger) -> Self {
        Self(logger)
    }

    /// Queues an event with the fields that its line has. The span it happened in comes with it.
    pub(crate) fn send(&self, level: Level, target: &str, fields: &Map<String, Value>) {
        if !is_sent(target, level) {
            return;
        }
        let mut record = self.0.create_log_record();
        record.set_timestamp(opentelemetry::time::now());
        record.set_target(target.to_owned());
        record.set_severity_number(severity(level));
        record.set_severity_text(level.as_str());
        for (name, value) in fields {
            match (name.as_str(), value) {
                ("message", Value::String(text)) => record.set_body(AnyValue::from(text.clone())),
                _ => record.add_attribute(Key::from(name.clone()), any(value)),
            }
        }
        self.0.emit(record);
    }
}

/// Whether events of a target are sent: ours, and warnings of libraries. What these say below that is for
/// somebody at the machine, and may quote what is in their hands.
fn is_sent(target: &str, level: Level) -> bool {
    let library = target.split("::").next().unwrap_or(target);
    if library == "holdfast" || library.starts_with("holdfast_") {
        return true;
    }
    level <= Level::WARN && !is_silent(library)
}

fn is_silent(library: &str) -> bool {
    SILENT.iter().any(|silent| {
        library == *silent || library.strip_prefix(silent).is_some_and(|rest| rest.starts_with(['_', '-']))
    })
}

fn severity(level: Level) -> Severity {
    match level {
        Level::ERROR => Severity::Error,
        Level::WARN => Severity::Warn,
        Level::INFO => Severity::Info,
        Level::DEBUG => Severity::Debug,
        Level::TRACE => Severity::Trace,
    }
}

fn any(value: &Value) -> AnyValue {
    match value {
        Value::Null => AnyValue::from(""),
        Value::Bool(flag) => AnyValue::from(*flag),
        Value::Number(number) => match (number.as_i64(), number.as_f64()) {
            (Some(whole), _) => AnyValue::from(whole),
            (None, Some(real)) if !number.is_u64() => AnyValue::from(real),
            _ => AnyValue::from(number.to_string()),
        },
        Value::String(text) => AnyValue::from(text.clone()),
        Value::Array(items) => AnyValue::ListAny(Box::new(items.iter().map(any).collect())),
        Value::Object(_) => AnyValue::from(value.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_sending_brings_about_is_not_sent() {
        for target in [
            "opentelemetry",
            "opentelemetry_sdk",
            "opentelemetry-otlp",
            "opentelemetry_sdk::logs::batch",
            "reqwest::connect",
            "hyper_util::client::legacy::connect",
            "hyper",
            "h2::codec",
            "rustls::client::hs",
        ] {
            assert!(!is_sent(target, Level::ERROR), "{target}");
        }
        for target in ["holdfast_worker::lease", "holdfast_cli", "holdfast"] {
            assert!(is_sent(target, Level::TRACE), "{target}");
        }
        for target in ["apalis::worker", "tokio_postgres", "h2o"] {
            assert!(is_sent(target, Level::WARN) && !is_sent(target, Level::INFO), "{target}");
        }
    }

    #[test]
    fn numbers_stay_numbers_where_the_format_has_them() {
        assert_eq!(any(&Value::from(-3)), AnyValue::from(-3_i64));
        assert_eq!(any(&Value::from(1.5)), AnyValue::from(1.5));
        assert_eq!(any(&Value::from(u64::MAX)), AnyValue::from(u64::MAX.to_string()));
        let list = serde_json::json!(["a"]);
        assert_eq!(any(&list), AnyValue::ListAny(Box::new(vec![AnyValue::from("a")])));
    }
}
