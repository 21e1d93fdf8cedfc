//! What is wrapped around a call that runs here: one layer for each decorator of its disposition, the first
//! outermost, the tool in the middle. Each layer gets the call as the layers outside have left it, and the
//! reply as those inside have.

mod effort;
mod hooks;
mod rate;
mod results;
mod shape;
#[cfg(test)]
mod tests;

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures::{FutureExt as _, future::BoxFuture};
use holdfast_engine::{
    naming,
    policy::{DEFAULT_TTL, Decorator, Disposition, Hook},
    tool::Outcome,
};
use holdfast_store::{Store, tool_rates::Rate};
use holdfast_tools::{CallContext, Progress, Toolbox};
use serde::Serialize;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

pub(crate) use effort::pause;

use crate::system;

/// What a call is told to have come to when it was cancelled before its tool began.
const NOT_BEGUN: &str = "the call was cancelled before the tool started";

/// A call, and all that its layers work with.
pub(crate) struct Wrapped {
    pub(crate) store: Store,
    pub(crate) toolbox: Arc<Toolbox>,
    pub(crate) owner: String,
    pub(crate) agent: String,
    /// Where the agent file is: hooks are relative to it.
    pub(crate) dir: PathBuf,
    pub(crate) tool: String,
    /// What carries the call out if it is one of a system toolbox.
    pub(crate) system: Option<system::Desk>,
    pub(crate) context: CallContext,
    /// Who hears of progress.
    pub(crate) watcher: Watcher,
    pub(crate) layers: Vec<Layer>,
    pub(crate) failed_hooks: Mutex<Vec<HookFailed>>,
}

/// Somebody who hears how calls come along; must not block.
pub(crate) type Watcher = Arc<dyn Fn(Report) + Send + Sync>;

/// How a call comes along.
#[derive(Debug, Clone, Serialize)]
#[serde(untagged)]
pub(crate) enum Report {
    /// A line that its program has printed.
    Line(Progress),
    /// An attempt has failed and another one follows.
    Again {
        /// In words.
        message: String,
        /// The attempt that failed; the first is 1.
        attempt: u32,
        /// How many there may be.
        of: u32,
        /// How long until the next one begins.
        pause_ms: u64,
    },
}

/// A hook that gave no usable answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HookFailed {
    /// `command` or `tool`, and which.
    pub(crate) hook: String,
    /// `before` or `after`.
    pub(crate) when: &'static str,
    /// Why, in words that quote nothing of the call.
    pub(crate) reason: String,
}

/// What a call comes to.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Reply {
    /// It ran, or its result was known.
    Ended(Outcome),
    /// It wasn't let run, and won't be if it is tried again. The text is for the model.
    Refused(String),
    /// It is to be handled outside.
    Deferred(String),
}

/// One layer, made ready.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Layer {
    /// Ends what is inside after a time.
    Timeout(Duration),
    /// The innermost timeout, which the tool's own program is given.
    ToolTimeout(Duration),
    Retries {
        count: u32,
        backoff: Duration,
    },
    Cache {
        ttl: Duration,
        key: Option<String>,
    },
    Truncate(usize),
    Rate(Rate),
    Before(Asked),
    After(Asked),
}

/// A hook, made ready.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Asked {
    pub(crate) hook: Hook,
    pub(crate) timeout: Duration,
    /// Tells the hooks of a call apart.
    pub(crate) place: usize,
}

/// A call on its way through the layers.
#[derive(Clone)]
struct Frame {
    /// The arguments as the layers outside have left them.
    arguments: String,
    /// Cancelled by an order, or by a timeout outside.
    cancel: CancellationToken,
    /// When a timeout outside ends it.
    deadline: Option<Instant>,
    /// How long the tool's program may run.
    timeout: Option<Duration>,
}

/// The layers of a disposition, outermost first. The agent's own timeout counts where no decorator sets one.
pub(crate) fn layers(disposition: &Disposition, agents_timeout: Option<Duration>) -> Vec<Layer> {
    let own = disposition.timeout_seconds().is_some();
    let mut layers: Vec<Layer> = agents_timeout.filter(|_| !own).map(Layer::Timeout).into_iter().collect();
    for (place, decorator) in disposition.decorators().enumerate() {
        let layer = layer(decorator, place);
        // Two limits that are the same are one bucket, and a call takes one turn of it.
        let twice = matches!(layer, Some(Layer::Rate(_))) && layer.iter().any(|layer| layers.contains(layer));
        layers.extend(layer.filter(|_| !twice));
    }
    // The innermost timeout around nothing that waits is the program's own: its failure shows what was printed.
    let inside = layers.iter_mut().rev().find(|layer| !matches!(layer, Layer::Truncate(_)));
    if let Some(layer) = inside
        && let Layer::Timeout(limit) = *layer
    {
        *layer = Layer::ToolTimeout(limit);
    }
    layers
}

fn layer(decorator: &Decorator, place: usize) -> Option<Layer> {
    let hook = |hook: &Hook, seconds: &Option<u64>| {
        let seconds = seconds.unwrap_or(holdfast_engine::policy::DEFAULT_HOOK_SECONDS);
        Asked { hook: hook.clone(), timeout: Duration::from_secs(seconds), place }
    };
    Some(match decorator {
        Decorator::WithTimeout { contents: seconds } | Decorator::Timeout { seconds } => {
            Layer::Timeout(Duration::from_secs(*seconds))
        }
        Decorator::Retries { count: 0, .. } => return None,
        Decorator::Retries { count, backoff_ms } => {
            Layer::Retries { count: *count, backoff: Duration::from_millis(*backoff_ms) }
        }
        Decorator::WithCacheKey { contents } => {
            Layer::Cache { ttl: Duration::from_secs(DEFAULT_TTL), key: Some(contents.clone()) }
        }
        Decorator::Cache { ttl_seconds, key } => {
            Layer::Cache { ttl: Duration::from_secs(*ttl_seconds), key: key.clone() }
        }
        Decorator::Truncate { max_bytes } => {
            Layer::Truncate(usize::try_from(*max_bytes).unwrap_or(usize::MAX))
        }
        Decorator::RateLimit { per_minute, burst } => {
            Layer::Rate(Rate { per_minute: *per_minute, burst: burst.unwrap_or(*per_minute) })
        }
        Decorator::Before { hook: asked, timeout_seconds } => Layer::Before(hook(asked, timeout_seconds)),
        Decorator::After { hook: asked, timeout_seconds } => Layer::After(hook(asked, timeout_seconds)),
        // Attempts that are stored are the engine's; approvals it has decided; labels are for readers.
        Decorator::WithRetries { .. }
        | Decorator::WithLabel { .. }
        | Decorator::Label { .. }
        | Decorator::Approve { .. } => return None,
    })
}

/// Why a call can't run here whatever is wrapped around it: what its disposition says comes first. The engine
/// doesn't start such calls; one that was approved is started with the disposition inside.
pub(crate) fn gated(disposition: &Disposition) -> Option<String> {
    match disposition.base() {
        Disposition::Deny { message } => Some(message.clone()),
        Disposition::Approve { reason, .. } => Some(format!("the call needs an approval: {reason}")),
        _ => None,
    }
}

impl Wrapped {
    /// Carries the call out, through all layers. A name that no tool has isn't wrapped.
    pub(crate) async fn carry_out(&self, arguments: String, cancel: CancellationToken) -> Reply {
        let frame = Frame { arguments, cancel, deadline: None, timeout: None };
        if self.tool.len() > naming::MAX_NAME {
            return self.run_tool(frame).await;
        }
        self.inside(0, frame).await
    }

    /// The hooks that have failed so far.
    pub(crate) fn failed_hooks(&self) -> Vec<HookFailed> {
        std::mem::take(&mut *self.failed_hooks.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The call from the layer `at` on.
    fn inside(&self, at: usize, frame: Frame) -> BoxFuture<'_, Reply> {
        let Some(layer) = self.layers.get(at) else { return self.run_tool(frame).boxed() };
        let next = at + 1;
        match layer {
            Layer::Timeout(limit) => self.in_time(next, frame, *limit).boxed(),
            Layer::ToolTimeout(limit) => self.inside(next, Frame { timeout: Some(*limit), ..frame }),
            Layer::Retries { count, backoff } => self.again(next, frame, *count, *backoff).boxed(),
            Layer::Cache { ttl, key } => self.remembered(next, frame, *ttl, key.as_deref()).boxed(),
            Layer::Truncate(limit) => self.truncated(next, frame, *limit).boxed(),
            Layer::Rate(rate) => self.in_turn(next, frame, *rate).boxed(),
            Layer::Before(asked) => self.asked_before(next, frame, asked).boxed(),
            Layer::After(asked) => self.told_after(next, frame, asked).boxed(),
        }
    }

    async fn run_tool(&self, frame: Frame) -> Reply {
        if let Some(desk) = &self.system {
            return Reply::Ended(desk.carry_out(&frame.arguments, &frame.cancel).await);
        }
        let context = CallContext { timeout: frame.timeout, ..self.context.clone() };
        let tell = |line: Progress| (self.watcher)(Report::Line(line));
        let calling = self.toolbox.call(&self.tool, &frame.arguments, &context, &frame.cancel, Some(&tell));
        Reply::Ended(calling.await)
    }

    fn program(&self, path: &str) -> PathBuf {
        self.dir.join(Path::new(path))
    }
}

/// What a cancelled call comes to whose tool hasn't begun.
fn not_begun() -> Reply {
    Reply::Ended(Outcome::Cancelled(NOT_BEGUN.to_owned()))
}
