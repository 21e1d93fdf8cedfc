//! The layer that makes a line of an event.

use std::{
    borrow::Cow,
    fmt::{self, Write as _},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use chrono::{SecondsFormat, Utc};
use serde_json::{Map, Value};
use tracing::{
    Event, Level, Subscriber,
    field::{Field, Visit},
    span::{Attributes, Id, Record},
};
use tracing_subscriber::{Layer, layer::Context, registry::LookupSpan};

use crate::otlp::Records;

/// Fields that are lists, which events have no type for: they come as text, in debug form or with commas.
const LISTS: [&str; 3] = ["agents", "labels", "session_ids"];

/// How often the libraries that export may say that nothing can be sent: they would with each batch.
const EXPORTERS_SPEAK: Duration = Duration::from_secs(60);

/// How lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub(crate) enum Format {
    /// A JSON object a line.
    #[default]
    Json,
    /// For people.
    Text,
}

/// Writes each event as a line, through `write`, and sends it where log records are sent.
pub(super) struct Lines<W> {
    format: Format,
    write: W,
    records: Option<Records>,
    exporters: Seldom,
}

impl<W: Fn(&str)> Lines<W> {
    pub(super) fn new(format: Format, write: W, records: Option<Records>) -> Self {
        Self { format, write, records, exporters: Seldom::default() }
    }
}

/// Lets something be said once in [`EXPORTERS_SPEAK`].
#[derive(Default)]
struct Seldom(Mutex<Option<Instant>>);

impl Seldom {
    fn may_speak(&self, now: Instant) -> bool {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let quiet = last.is_none_or(|last| now.saturating_duration_since(last) >= EXPORTERS_SPEAK);
        if quiet {
            *last = Some(now);
        }
        quiet
    }
}

/// A span's fields, kept with it.
struct SpanFields(Map<String, Value>);

impl<S, W> Layer<S> for Lines<W>
where
    S: Subscriber + for<'span> LookupSpan<'span>,
    W: Fn(&str) + 'static,
{
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut fields = Map::new();
        attributes.record(&mut Fields(&mut fields));
        if let Some(span) = context.span(id) {
            span.extensions_mut().insert(SpanFields(fields));
        }
    }

    fn on_record(&self, id: &Id, record: &Record<'_>, context: Context<'_, S>) {
        if let Some(span) = context.span(id)
            && let Some(SpanFields(fields)) = span.extensions_mut().get_mut()
        {
            record.record(&mut Fields(fields));
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let exports = event.metadata().target().starts_with("opentelemetry");
        if exports && !self.exporters.may_speak(Instant::now()) {
            return;
        }
        let mut fields = Map::new();
        for span in context.event_scope(event).into_iter().flat_map(|scope| scope.from_root()) {
            if let Some(SpanFields(of_span)) = span.extensions().get() {
                // What is meant for traces only, and what nobody has filled in.
                let shown = of_span.iter().filter(|(name, value)| !name.contains('.') && *value != "");
                fields.extend(shown.map(|(name, value)| (name.clone(), value.clone())));
            }
        }
        event.record(&mut Fields(&mut fields));
        let (level, target) = (event.metadata().level(), origin(event.metadata().target(), &mut fields));
        if let Some(records) = &self.records {
            records.send(*level, &target, &fields);
        }
        let line = match self.format {
            Format::Json => json_line(level, &target, fields),
            Format::Text => text_line(level, &target, fields),
        };
        (self.write)(&line);
    }
}

/// Where an event comes from. Those of libraries that log in the older way all seem to come from one place, and
/// say in fields where they are from.
fn origin(target: &'static str, fields: &mut Map<String, Value>) -> Cow<'static, str> {
    if target != "log" {
        return target.into();
    }
    for place in ["log.file", "log.line", "log.module_path"] {
        fields.remove(place);
    }
    match fields.remove("log.target") {
        Some(Value::String(origin)) => origin.into(),
        _ => target.into(),
    }
}

fn timestamp() -> String {
    Utc::now().to_rfc3339_opts(SecondsFormat::Micros, true)
}

/// The event's kind, taken out of its fields; where it has none, its origin takes that place.
fn kind(target: &str, fields: &mut Map<String, Value>) -> String {
    match fields.remove("kind") {
        Some(Value::String(kind)) => kind,
        Some(other) => other.to_string(),
        None => {
            fields.insert("target".to_owned(), target.into());
            "log".to_owned()
        }
    }
}

fn json_line(level: &Level, target: &str, mut fields: Map<String, Value>) -> String {
    let mut line = Map::new();
    line.insert("ts".to_owned(), timestamp().into());
    line.insert("level".to_owned(), level.as_str().to_lowercase().into());
    line.insert("kind".to_owned(), kind(target, &mut fields).into());
    for (name, value) in fields {
        // A field can't pass itself off as one of the three.
        line.entry(name).or_insert(value);
    }
    // Written by hand so that the three come first, whatever order the map keeps.
    let mut text = String::from("{");
    for (index, name) in ["ts", "level", "kind"].into_iter().enumerate() {
        let value = line.remove(name).unwrap_or_default();
        let comma = if index == 0 { "" } else { "," };
        let _ = write!(text, "{comma}\"{name}\":{value}");
    }
    for (name, value) in line {
        let _ = write!(text, ",{}:{value}", Value::String(name));
    }
    text.push_str("}\n");
    text
}

fn text_line(level: &Level, target: &str, mut fields: Map<String, Value>) -> String {
    let kind = kind(target, &mut fields);
    let mut text = format!("{} {:<5} {kind}", timestamp(), level.as_str());
    if let Some(message) = fields.remove("message") {
        let _ = write!(text, " {}", plain(&message));
    }
    for (name, value) in fields {
        let _ = write!(text, " {name}={}", plain(&value));
    }
    // JSON leaves some control characters as they are.
    let mut text = crate::output::printable(&text).into_owned();
    text.push('\n');
    text
}

/// A value for people: text without quotes where it is one word, and never more than one line.
fn plain(value: &Value) -> String {
    match value {
        Value::String(text) if !text.is_empty() && !text.contains(|c: char| c.is_control() || c == '"') => {
            text.clone()
        }
        other => other.to_string(),
    }
}

/// Gathers fields as JSON values.
struct Fields<'a>(&'a mut Map<String, Value>);

impl Fields<'_> {
    fn put(&mut self, field: &Field, value: impl Into<Value>) {
        // `r#type` and the like are written with their prefix only in Rust.
        let name = field.name().trim_start_matches("r#");
        self.0.insert(name.to_owned(), value.into());
    }

    fn text(&mut self, field: &Field, text: String) {
        if !LISTS.contains(&field.name()) {
            return self.put(field, text);
        }
        match serde_json::from_str(&text) {
            Ok(list @ Value::Array(_)) => self.put(field, list),
            _ => {
                let items = text.split(',').map(str::trim).filter(|item| !item.is_empty());
                self.put(field, items.map(Value::from).collect::<Vec<_>>());
            }
        }
    }
}

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let text = format!("{value:?}");
        self.text(field, text);
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.text(field, value.to_owned());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, value);
    }

    // JSON's readers agree on numbers up to 64 bits only.
    fn record_i128(&mut self, field: &Field, value: i128) {
        match i64::try_from(value) {
            Ok(value) => self.put(field, value),
            Err(_) => self.put(field, value.to_string()),
        }
    }

    fn record_u128(&mut self, field: &Field, value: u128) {
        match u64::try_from(value) {
            Ok(value) => self.put(field, value),
            Err(_) => self.put(field, value.to_string()),
        }
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.put(field, value);
    }

    fn record_error(&mut self, field: &Field, value: &(dyn std::error::Error + 'static)) {
        self.put(field, crate::failure::chain(value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exporters_speak_once_a_minute() {
        let (seldom, start) = (Seldom::default(), Instant::now());
        let spoken =
            [0, 1, 59, 60, 61, 121].map(|second| seldom.may_speak(start + Duration::from_secs(second)));
        assert_eq!(spoken, [true, false, false, true, false, true]);
    }
}
