use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tracing_subscriber::{Registry, layer::SubscriberExt as _};

use super::line::{Format, Lines};

/// What is written while `work` runs.
fn written(format: Format, work: impl FnOnce()) -> Vec<String> {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let sink = Arc::clone(&lines);
    let write = move |line: &str| sink.lock().expect("no panic").push(line.to_owned());
    let layer = Lines::new(format, write, None);
    tracing::subscriber::with_default(Registry::default().with(layer), work);
    lines.lock().expect("no panic").clone()
}

fn parsed(line: &str) -> Value {
    assert!(line.ends_with("}\n") && line.matches('\n').count() == 1, "{line:?}");
    serde_json::from_str(line).expect("a JSON object")
}

#[test]
fn an_event_is_a_flat_line_of_its_kind() {
    let lines = written(Format::Json, || {
        tracing::info!(
            kind = "server.started",
            bind = "127.0.0.1:1",
            ms = 2_u128,
            secure = false,
            agents = ?["a", "b"],
            "up"
        );
    });
    let [line] = &lines[..] else { panic!("{lines:?}") };
    assert!(line.starts_with(r#"{"ts":"20"#), "{line}");
    let mut value = parsed(line);
    let ts = value["ts"].take();
    let ts = ts.as_str().expect("a text");
    assert!(ts.ends_with('Z') && ts.len() == "2026-11-30T15:28:00.123456Z".len(), "{ts}");
    assert!(chrono::DateTime::parse_from_rfc3339(ts).is_ok());
    assert_eq!(
        value,
        json!({"ts": null, "level": "info", "kind": "server.started", "bind": "127.0.0.1:1", "ms": 2,
               "secure": false, "agents": ["a", "b"], "message": "up"})
    );
}

#[test]
fn an_event_without_a_kind_names_its_origin() {
    let lines = written(Format::Json, || tracing::warn!(target: "somewhere", "line\nbreak"));
    let value = parsed(&lines[0]);
    assert_eq!(value["kind"], "log");
    assert_eq!(value["target"], "somewhere");
    assert_eq!(value["message"], "line\nbreak");
}

#[test]
fn fields_of_spans_stand_beside_those_of_the_event() {
    let lines = written(Format::Json, || {
        let run = tracing::info_span!(
            "run",
            session_id = "s",
            run_epoch = 1,
            otel.name = "hidden",
            traceparent = "",
            worker_id = tracing::field::Empty
        );
        run.record("worker_id", "w");
        let _entered = run.enter();
        let step = tracing::info_span!("step", run_epoch = 2);
        let _inner = step.enter();
        tracing::info!(kind = "run.started");
    });
    let value = parsed(&lines[0]);
    assert_eq!(value["session_id"], "s");
    assert_eq!(value["run_epoch"], 2, "the inner span's");
    assert_eq!(value["worker_id"], "w");
    assert_eq!(value.get("otel.name"), None);
    assert_eq!(value.get("traceparent"), None, "nobody filled it in");
}

#[test]
fn lists_are_lists_however_they_come() {
    let lines = written(Format::Json, || {
        let (one, none) = ("a,b", "");
        tracing::info!(session_ids = %one, agents = ?Vec::<String>::new(), labels = none, other = "a,b");
    });
    let value = parsed(&lines[0]);
    assert_eq!(value["session_ids"], json!(["a", "b"]));
    assert_eq!(value["agents"], json!([]));
    assert_eq!(value["labels"], json!([]));
    assert_eq!(value["other"], "a,b");
}

#[test]
fn a_field_cannot_pass_itself_off_as_the_level() {
    let lines = written(Format::Json, || tracing::info!(level = "error", ts = 0, "x"));
    let value = parsed(&lines[0]);
    assert_eq!(value["level"], "info");
    assert!(value["ts"].is_string());
}

#[test]
fn people_get_one_line_too() {
    let lines = written(Format::Text, || {
        tracing::error!(kind = "server.failed", error = "two\nlines", role = "api", "stopped");
    });
    let line = &lines[0];
    assert!(line.contains(" ERROR server.failed stopped "), "{line}");
    assert!(line.contains(r#"error="two\nlines""#) && line.contains("role=api"), "{line}");
    assert_eq!(line.matches('\n').count(), 1);
}

#[test]
fn what_logs_in_the_older_way_names_its_origin_and_no_paths() {
    let lines = written(Format::Json, || {
        let (file, line) = ("/home/x.rs", 3);
        tracing::warn!(target: "log", { log.target = "lib::inner", log.file = file, log.line = line }, "old");
    });
    let value = parsed(&lines[0]);
    assert_eq!((&value["target"], &value["message"]), (&json!("lib::inner"), &json!("old")));
    assert!(value.get("log.file").is_none() && value.get("log.target").is_none(), "{value}");
}
