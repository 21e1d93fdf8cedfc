//! Signals of the process.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

use crate::failure::Failure;

/// What an impatient second signal ends the process with.
const FORCED: i32 = 1;

/// Watches signals until it is dropped: the first SIGTERM or SIGINT cancels `shutdown`, a second ends the
/// process at once. With `ignore_hangup` SIGHUP does nothing; otherwise somebody else handles it.
pub(crate) fn watch(
    shutdown: CancellationToken,
    ignore_hangup: bool,
) -> Result<AbortOnDropHandle<()>, Failure> {
    let failed = |error: io::Error| Failure::Failed(format!("signals can't be watched: {error}"));
    let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
    let mut hangup = ignore_hangup.then(|| signal(SignalKind::hangup())).transpose().map_err(failed)?;
    Ok(AbortOnDropHandle::new(tokio::spawn(async move {
        let mut asked = false;
        loop {
            let name = tokio::select! {
                Some(()) = terminate.recv() => "SIGTERM",
                Some(()) = interrupt.recv() => "SIGINT",
                Some(()) = next(hangup.as_mut()) => {
                    tracing::info!(kind = "server.signal", signal = "SIGHUP", "nothing to read again");
                    continue;
                }
            };
            tracing::info!(kind = "server.signal", signal = name);
            if asked {
                tracing::error!(kind = "server.failed", error = "told to stop at once, with work under way");
                std::process::exit(FORCED);
            }
            asked = true;
            shutdown.cancel();
        }
    })))
}

/// Lets signals that ask the process to stop do nothing, as a handler does and not as a setting that programs
/// which it starts would inherit: whoever may stop it has another way.
pub(crate) fn ignore() -> Result<(), Failure> {
    for kind in [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()] {
        // The handler stays when this value has gone.
        let _heard =
            signal(kind).map_err(|error| Failure::Failed(format!("signals can't be watched: {error}")))?;
    }
    Ok(())
}

async fn next(signal: Option<&mut Signal>) -> Option<()> {
    match signal {
        Some(signal) => signal.recv().await,
        None => std::future::pending().await,
    }
}
