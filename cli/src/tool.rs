//! `holdfast tool`: one program as a tool, without a model.

use std::{io::Read as _, path::Path, time::Duration};

use holdfast_engine::{
    content::ToolResult,
    ids::{CallId, SessionId, TurnId},
    tool::Outcome,
};
use holdfast_tools::{CallContext, Script, agent_id};
use serde_json::json;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{args::ToolCommand, failure::Failure, output};

/// Does what the command line says.
pub(crate) async fn run(command: ToolCommand) -> Result<(), Failure> {
    match command {
        ToolCommand::Call { path, arguments, timeout, json } => {
            call(&path, &given(arguments)?, timeout.map(Duration::from_secs), json).await
        }
        ToolCommand::Describe { path, json } => describe(&path, json).await,
        ToolCommand::Validate { path, arguments, json } => {
            validate(&path, arguments.map(given).transpose()?, json).await
        }
    }
}

/// Arguments as they were written, or from standard input.
fn given(arguments: String) -> Result<String, Failure> {
    if arguments != "-" {
        return Ok(arguments);
    }
    let mut text = String::new();
    std::io::stdin()
        .read_to_string(&mut text)
        .map_err(|error| Failure::Failed(format!("standard input: {error}")))?;
    Ok(text)
}

async fn load(path: &Path) -> Result<Script, Failure> {
    Script::load(path).await.map_err(|error| Failure::Tool(format!("{}: {error}", path.display())))
}

async fn call(path: &Path, arguments: &str, timeout: Option<Duration>, json: bool) -> Result<(), Failure> {
    let script = load(path).await?;
    let context = CallContext {
        session_id: SessionId(Uuid::nil()),
        turn_id: TurnId(Uuid::nil()),
        call_id: CallId(Uuid::now_v7()),
        agent_id: agent_id("holdfast-tool-call", ""),
        idempotent: false,
        session_json: None,
        traceparent: None,
        timeout,
    };
    // The program leads a group of its own, which the terminal's Ctrl-C doesn't reach.
    let cancel = CancellationToken::new();
    let interrupted = cancel.clone();
    let watch = tokio::spawn(async move {
        if tokio::signal::ctrl_c().await.is_ok() {
            interrupted.cancel();
        }
    });
    let outcome = script.call(arguments, &context, &cancel, None).await;
    watch.abort();
    if json {
        output::json(&serde_json::to_value(&outcome).unwrap_or_default())?;
    }
    match outcome {
        Outcome::Completed(_) if json => Ok(()),
        Outcome::Completed(ToolResult::Json { content }) => output::line(format!("{content:#}")),
        Outcome::Completed(result) => output::line(result.as_text().trim_end_matches('\n')),
        Outcome::Failed(reason) | Outcome::Cancelled(reason) => Err(Failure::Tool(reason)),
    }
}

async fn describe(path: &Path, json: bool) -> Result<(), Failure> {
    let script = load(path).await?;
    let info = script.info();
    if json {
        let mut value = serde_json::to_value(info).unwrap_or_default();
        value["parameters"] = script.parameters().clone();
        return output::json(&value);
    }
    output::line(format!("{}: {}", info.slug, info.description))?;
    if info.args.is_empty() {
        return output::line("takes no arguments");
    }
    let rows = info.args.iter().map(|arg| {
        [arg.name.clone(), arg.kind.clone(), word(&arg.arity), word(&arg.mode), arg.description.clone()]
    });
    output::table(["ARGUMENT", "TYPE", "ARITY", "MODE", "DESCRIPTION"], rows)
}

/// The name that descriptions use for an arity or a mode.
fn word(value: &impl serde::Serialize) -> String {
    serde_json::to_value(value).ok().and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
}

async fn validate(path: &Path, arguments: Option<String>, json: bool) -> Result<(), Failure> {
    let script = load(path).await?;
    let info = script.info();
    if let Some(arguments) = arguments {
        script.validate(&arguments).map_err(Failure::Tool)?;
    }
    let warnings: Vec<_> = info
        .unknown_fields
        .iter()
        .map(|field| format!("field {field:?} of the description is unknown and has no effect"))
        .collect();
    if json {
        return output::json(&json!({"slug": info.slug, "valid": true, "warnings": warnings}));
    }
    for warning in &warnings {
        output::line(format!("warning: {warning}"))?;
    }
    output::line(format!("{}: valid", info.slug))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn script(dir: &Path, body: &str) -> std::path::PathBuf {
        let path = dir.join("tool");
        let description = json!({"slug": "greet", "description": "greets", "args": [
            {"name": "who", "description": "", "type": "string", "backing_type": "string",
             "arity": "single", "mode": "positional"}]});
        let text = format!(
            "#!/bin/sh\nif [ \"$1\" = describe ]; then cat <<'EOF'\n{description}\nEOF\nexit 0\nfi\n{body}\n"
        );
        std::fs::write(&path, text).expect("written");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("executable");
        path
    }

    #[tokio::test]
    async fn a_failing_tool_has_its_own_exit_code() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = script(dir.path(), "echo no >&2; exit 3");
        let failure = call(&path, r#"{"who": "x"}"#, None, false).await.expect_err("fails");
        assert_eq!(failure.code(), 5);
        assert!(failure.to_string().contains("no"), "{failure}");
        assert_eq!(validate(&path, Some("{}".into()), false).await.expect_err("who is missing").code(), 5);
        assert_eq!(validate(&path, Some(r#"{"who": "x"}"#.into()), true).await, Ok(()));
        assert_eq!(describe(Path::new("/absent"), false).await.expect_err("absent").code(), 5);
    }

    #[tokio::test]
    async fn a_tool_that_works_is_a_success() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = script(dir.path(), "[ \"$2\" = world ] && echo hello");
        assert_eq!(call(&path, r#"{"who": "world"}"#, None, false).await, Ok(()));
        assert_eq!(describe(&path, false).await, Ok(()));
    }
}
