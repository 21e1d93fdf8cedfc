//! `holdfast scripted-model`.

use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::{
    args::ScriptedModelArgs,
    failure::{Failure, chain},
    node::watch_signals,
    scripted_model::{self, Script},
};

/// Serves a script until the process is told to stop.
pub(crate) async fn run(args: ScriptedModelArgs) -> Result<(), Failure> {
    let script = Script::load(&args.script).map_err(|error| Failure::Config(chain(&error)))?;
    let shutdown = CancellationToken::new();
    let signals = watch_signals(shutdown.clone(), true)?;
    let failed = |error: std::io::Error| Failure::Failed(format!("--bind {}: {error}", args.bind));
    let listener = TcpListener::bind(args.bind).await.map_err(failed)?;
    let bind = listener.local_addr().map_err(failed)?;
    tracing::info!(kind = "server.started", bind = %bind, role = "scripted-model", authentication = "none");
    scripted_model::serve(script, listener, shutdown).await.map_err(failed)?;
    tracing::info!(kind = "server.stopped");
    drop(signals);
    Ok(())
}
