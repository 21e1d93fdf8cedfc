//! One program as a tool: its description, its schema, and calls of it.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use holdfast_engine::tool::Outcome;
use serde_json::Value;
use tokio_util::sync::CancellationToken;

use crate::{
    context::CallContext,
    describe::{DescribeError, ScriptInfo, describe},
    invocation::Invocation,
    output,
    process::{self, Bounds, Job, STOP_TIME, StartError},
    progress::ProgressFn,
    schema::Schema,
};

/// A program that has described itself.
#[derive(Debug)]
pub struct Script {
    path: PathBuf,
    info: ScriptInfo,
    schema: Schema,
    stop_time: Duration,
}

impl Script {
    /// Asks the program at `path` for its description.
    ///
    /// # Errors
    /// See [`DescribeError`].
    pub async fn load(path: &Path) -> Result<Self, DescribeError> {
        // A bare file name would be looked up in PATH.
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let info = describe(&path).await?;
        let schema = Schema::new(&info).map_err(DescribeError::Invalid)?;
        Ok(Self { path, info, schema, stop_time: STOP_TIME })
    }

    /// The same program with another time between SIGTERM and SIGKILL; [`STOP_TIME`] by default.
    #[must_use]
    pub fn with_stop_time(self, stop_time: Duration) -> Self {
        Self { stop_time, ..self }
    }

    /// Where the program is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it says of itself.
    pub fn info(&self) -> &ScriptInfo {
        &self.info
    }

    /// JSON Schema of its arguments object.
    pub fn parameters(&self) -> &Value {
        self.schema.parameters()
    }

    /// Checks `arguments` as a call would, without starting anything.
    ///
    /// # Errors
    /// The text that the model would be told.
    pub fn validate(&self, arguments: &str) -> Result<(), String> {
        self.lay_out(arguments).map(drop)
    }

    /// Runs one call to its end; `arguments` is the text that the model wrote. `cancel` stops the
    /// program's whole process group, and so does dropping the future.
    pub async fn call(
        &self,
        arguments: &str,
        context: &CallContext,
        cancel: &CancellationToken,
        progress: Option<&ProgressFn<'_>>,
    ) -> Outcome {
        let invocation = match self.lay_out(arguments) {
            Ok(invocation) => invocation,
            Err(message) => return Outcome::Failed(message),
        };
        if cancel.is_cancelled() {
            return Outcome::Cancelled("the call was cancelled before the tool started".to_owned());
        }
        let mut args = invocation.words;
        args.insert(0, "run".into());
        // Later ones win, and the context is not the model's to set.
        let mut env = invocation.variables;
        env.extend(context.variables());
        let job = Job { program: &self.path, args, env, stdin: invocation.stdin };
        let bounds =
            Bounds { keep: output::keep(&self.info), timeout: context.timeout, stop: self.stop_time };
        match process::run(&job, &bounds, cancel, progress).await {
            Ok(finished) => output::outcome(&self.info, &finished, context.timeout),
            Err(error) => Outcome::Failed(match (error, invocation.longest) {
                (StartError::TooLong, Some((name, bytes))) => {
                    format!("{}; the longest is {name:?} with {bytes} bytes", StartError::TooLong)
                }
                (error, _) => error.to_string(),
            }),
        }
    }

    fn lay_out(&self, arguments: &str) -> Result<Invocation, String> {
        let values = self
            .schema
            .check(arguments)
            .map_err(|reason| format!("the arguments of {} are not valid: {reason}", self.info.slug))?;
        Invocation::new(&self.info, &values)
    }
}
