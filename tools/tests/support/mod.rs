//! Scripts in temporary directories, and the means to call them.
#![expect(dead_code, reason = "each test file uses a part")]

pub(crate) mod tree;

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    time::Duration,
};

use holdfast_engine::{content::ToolResult, tool::Outcome};
use holdfast_tools::{CallContext, Script, agent_id};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// Longer than any call of these tests takes, shorter than the programs that hang.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) fn directory() -> TempDir {
    tempfile::tempdir().expect("a temporary directory")
}

/// Writes an executable file; the content appears at once, as a new file.
pub(crate) fn write(path: &Path, content: &str) {
    let fresh = path.with_extension("fresh~");
    fs::write(&fresh, content).expect("written");
    fs::set_permissions(&fresh, fs::Permissions::from_mode(0o755)).expect("made executable");
    fs::rename(&fresh, path).expect("put in place");
}

/// A script that answers `describe` with `description` and does `body` otherwise.
pub(crate) fn script_text(description: &Value, body: &str) -> String {
    format!(
        "#!/bin/bash\nif [ \"$1\" = describe ]; then cat <<'EOF'\n{description}\nEOF\nexit 0\nfi\nshift\n{body}\n"
    )
}

pub(crate) fn description(slug: &str) -> Value {
    json!({"slug": slug, "description": format!("does {slug}"), "args": []})
}

pub(crate) fn arg(name: &str, kind: &str, arity: &str, mode: &str) -> Value {
    json!({"name": name, "description": "", "type": kind, "backing_type": kind, "arity": arity, "mode": mode})
}

/// One script in a directory of its own.
pub(crate) struct Bench {
    pub(crate) directory: TempDir,
    pub(crate) script: Script,
}

impl Bench {
    pub(crate) async fn new(description: Value, body: &str) -> Self {
        let directory = directory();
        let path = directory.path().join("tool");
        write(&path, &script_text(&description, body));
        let script = Script::load(&path).await.expect("describes itself");
        Self { directory, script }
    }

    /// A tool without arguments.
    pub(crate) async fn plain(body: &str) -> Self {
        Self::new(description("plain"), body).await
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) async fn call(&self, arguments: &Value) -> Outcome {
        self.call_in(arguments, &context()).await
    }

    pub(crate) async fn call_in(&self, arguments: &Value, context: &CallContext) -> Outcome {
        let (arguments, cancel) = (arguments.to_string(), CancellationToken::new());
        let call = self.script.call(&arguments, context, &cancel, None);
        // Boxed: a future under two layers of time limits is large.
        tokio::time::timeout(PATIENCE, Box::pin(call)).await.expect("the call ends")
    }
}

pub(crate) fn context() -> CallContext {
    CallContext {
        session_id: Uuid::from_u128(1).into(),
        turn_id: Uuid::from_u128(2).into(),
        call_id: Uuid::from_u128(3).into(),
        agent_id: agent_id("a", "r"),
        idempotent: true,
        session_json: None,
        traceparent: None,
        timeout: Some(PATIENCE * 2),
    }
}

pub(crate) fn text(outcome: Outcome) -> String {
    match outcome {
        Outcome::Completed(ToolResult::Text { content }) => content,
        other => panic!("no text: {other:?}"),
    }
}

pub(crate) fn failure(outcome: Outcome) -> String {
    match outcome {
        Outcome::Failed(message) => message,
        other => panic!("no failure: {other:?}"),
    }
}

/// The process whose id a script wrote to `file`.
pub(crate) fn pid(file: &Path) -> i32 {
    fs::read_to_string(file).expect("an id was written").trim().parse().expect("a process id")
}

/// Waits until a process is gone, or only its exit status is left.
pub(crate) async fn gone(pid: i32) {
    let alive = || {
        fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| {
            !stat.rsplit(')').next().unwrap_or_default().trim_start().starts_with(['Z', 'X'])
        })
    };
    let waited = tokio::time::timeout(PATIENCE, async {
        while alive() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    waited.await.expect("the process ends");
}
