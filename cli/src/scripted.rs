//! `holdfast scripted-model`.

use std::path::Path;

use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::{
    args::ScriptedModelArgs,
    failure::{Failure, chain},
    node::watch_signals,
    scripted_model::{self, Script},
};

/// The largest script that is read, in bytes.
const MAX_SCRIPT: u64 = 16 * 1024 * 1024;

/// Serves a script until the process is told to stop.
pub(crate) async fn run(args: ScriptedModelArgs) -> Result<(), Failure> {
    let script = read(&args.script)?;
    let shutdown = CancellationToken::new();
    let signals = watch_signals(shutdown.clone())?;
    let failed = |error: std::io::Error| Failure::Failed(format!("--bind {}: {error}", args.bind));
    let listener = TcpListener::bind(args.bind).await.map_err(failed)?;
    let bind = listener.local_addr().map_err(failed)?;
    tracing::info!(kind = "server.started", bind = %bind, role = "scripted-model", authentication = "none");
    scripted_model::serve(script, listener, shutdown).await.map_err(failed)?;
    tracing::info!(kind = "server.stopped");
    drop(signals);
    Ok(())
}

fn read(path: &Path) -> Result<Script, Failure> {
    let refuse = |reason: String| Failure::Config(format!("{}: {reason}", path.display()));
    let size = std::fs::metadata(path).map_err(|error| refuse(error.to_string()))?.len();
    if size > MAX_SCRIPT {
        return Err(refuse(format!("it has {size} bytes; at most {MAX_SCRIPT} are read")));
    }
    let text = std::fs::read_to_string(path).map_err(|error| refuse(error.to_string()))?;
    text.parse().map_err(|error: scripted_model::ScriptError| refuse(chain(&error)))
}
