//! Hooks: programs and tools that are asked about calls of other tools.
//!
//! A program reads the question on standard input and prints its answer. A tool gets those fields of the
//! question as arguments that its schema has. Both run as tools do: in a process group of their own, with the
//! variables of a call, bounded in time and output.

use std::path::Path;

use holdfast_engine::{content::ToolResult, tool::Outcome};
use serde_json::{Map, Value};
use tokio_util::sync::CancellationToken;

use crate::{
    context::CallContext,
    output::{self, MAX_OUTPUT},
    process::{self, Bounds, Ended, Job, STOP_TIME, StartError},
    toolbox::Toolbox,
};

/// Why a hook gave no answer. The texts quote nothing of what was asked or said.
#[derive(Debug, thiserror::Error)]
pub enum HookError {
    /// The program didn't start.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The program ended otherwise than with exit status 0.
    #[error("{0}")]
    Exit(String),
    /// It took too long and was stopped.
    #[error("it gave no answer within {0} seconds")]
    TimedOut(f64),
    /// The call was cancelled, and the hook stopped.
    #[error("the call was cancelled")]
    Cancelled,
    /// The answer is longer than [`MAX_OUTPUT`].
    #[error("its answer has {0} bytes; at most {MAX_OUTPUT} are taken")]
    TooLong(u64),
    /// The answer is no text.
    #[error("its answer is no text")]
    NoText,
    /// The agent has no such tool.
    #[error("the agent has no such tool")]
    NoTool,
    /// The tool says that it failed.
    #[error("the tool failed")]
    Failed,
}

/// Asks a program. `cancel` stops its whole process group, and so does dropping the future.
///
/// # Errors
/// See [`HookError`].
pub async fn ask_program(
    program: &Path,
    question: &Map<String, Value>,
    context: &CallContext,
    cancel: &CancellationToken,
) -> Result<String, HookError> {
    let stdin = serde_json::to_vec(question).unwrap_or_default();
    let job = Job { program, args: Vec::new(), env: context.variables(), stdin: Some(stdin) };
    let bounds = Bounds { keep: MAX_OUTPUT, timeout: context.timeout, stop: STOP_TIME };
    let finished = process::run(&job, &bounds, cancel, None).await?;
    match finished.ended {
        Ended::Exited(status) if status.success() => {}
        Ended::Exited(status) => return Err(HookError::Exit(output::ending(status))),
        Ended::TimedOut => {
            return Err(HookError::TimedOut(context.timeout.unwrap_or_default().as_secs_f64()));
        }
        Ended::Cancelled => return Err(HookError::Cancelled),
    }
    if finished.stdout.cut() > 0 {
        return Err(HookError::TooLong(finished.stdout.total()));
    }
    String::from_utf8(finished.stdout.head().to_vec()).map_err(|_| HookError::NoText)
}

/// Asks a tool, whatever policy the agent has for it. A field that the tool wants as text and that is none is
/// given as JSON.
///
/// # Errors
/// See [`HookError`].
pub async fn ask_tool(
    toolbox: &Toolbox,
    name: &str,
    question: &Map<String, Value>,
    context: &CallContext,
    cancel: &CancellationToken,
) -> Result<String, HookError> {
    if toolbox.script(name).is_none() {
        toolbox.refresh().await;
    }
    let script = toolbox.script(name).ok_or(HookError::NoTool)?;
    let taken = &script.parameters()["properties"];
    let given = |(field, value): (&String, &Value)| {
        let wanted = taken.get(field)?;
        let as_text = wanted["type"] == "string" && !value.is_string();
        let value = if as_text { Value::String(value.to_string()) } else { value.clone() };
        Some((field.clone(), value))
    };
    let arguments: Map<String, Value> = question.iter().filter_map(given).collect();
    let arguments = Value::Object(arguments).to_string();
    match toolbox.call(name, &arguments, context, cancel, None).await {
        Outcome::Completed(ToolResult::Text { content }) => Ok(content),
        Outcome::Completed(ToolResult::Json { content }) => Ok(content.to_string()),
        Outcome::Completed(ToolResult::Media(_) | ToolResult::Mixed { .. }) => Err(HookError::NoText),
        Outcome::Failed(_) => Err(HookError::Failed),
        Outcome::Cancelled(_) => Err(HookError::Cancelled),
    }
}
