//! The tools of an agent, kept up to date with the files that they are.

use std::{
    collections::{HashMap, HashSet},
    fmt,
    path::PathBuf,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures::{FutureExt as _, StreamExt as _, stream};
use holdfast_engine::{
    builtin::Builtin,
    naming,
    tool::{Outcome, ToolSpec},
};
use tokio::{
    sync::Mutex,
    task::JoinHandle,
    time::{Instant, MissedTickBehavior, interval},
};
use tokio_util::sync::CancellationToken;

use crate::{
    context::CallContext,
    progress::ProgressFn,
    scan::{self, Candidate, Fingerprint, Source},
    script::Script,
};

/// How many programs describe themselves at the same time.
pub const DESCRIBES_AT_ONCE: usize = 8;
/// After how long a program that couldn't describe itself is asked again, though its file is the same.
pub const RETRY_BROKEN: Duration = Duration::from_secs(30);
/// How many names the answer to a call of an unknown tool lists.
const NAMES_LISTED: usize = 100;

/// The tools of one agent. Cheap to share; calls run side by side.
pub struct Toolbox {
    sources: Arc<[Source]>,
    /// What is on offer. Replaced as a whole, so that nobody sees half a change.
    tools: RwLock<Arc<Vec<Tool>>>,
    /// Rises after what is on offer has changed.
    edition: AtomicU64,
    known: Mutex<Known>,
    /// Names of tools that the agent has and that aren't programs.
    others: Vec<String>,
}

#[derive(Clone)]
struct Tool {
    spec: ToolSpec,
    script: Arc<Script>,
    fingerprint: Fingerprint,
}

/// What earlier refreshes found out.
#[derive(Default)]
struct Known {
    described: HashMap<PathBuf, Described>,
    warnings: Vec<String>,
}

#[derive(Clone)]
struct Described {
    fingerprint: Fingerprint,
    at: Instant,
    script: Result<Arc<Script>, String>,
}

/// What a refresh found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Refreshed {
    /// Whether the tools on offer are others than before, or other versions of them.
    pub changed: bool,
    /// Everything that is wrong at the moment, in words.
    pub warnings: Vec<String>,
}

impl Toolbox {
    /// Finds and describes the tools of `sources`. What can't be used is hidden and named in the
    /// warnings.
    pub async fn open(sources: Vec<Source>) -> (Self, Vec<String>) {
        let toolbox = Self {
            sources: sources.into(),
            tools: RwLock::default(),
            edition: AtomicU64::new(0),
            known: Mutex::new(Known::default()),
            others: Vec::new(),
        };
        // Told by whoever opens it.
        let warnings = toolbox.look().await.0.warnings;
        (toolbox, warnings)
    }

    /// The same toolbox of an agent that has other tools too, which it names where it names all.
    #[must_use]
    pub fn beside(self, builtins: &[Builtin]) -> Self {
        Self { others: builtins.iter().map(|builtin| builtin.spec.name.clone()).collect(), ..self }
    }

    /// The tools on offer now, in load order.
    pub fn specs(&self) -> Vec<ToolSpec> {
        self.current().iter().map(|tool| tool.spec.clone()).collect()
    }

    /// A number that rises whenever [`Self::specs`] may have changed.
    pub fn edition(&self) -> u64 {
        self.edition.load(Ordering::Acquire)
    }

    /// Whether a tool of this name is on offer now.
    pub fn has(&self, name: &str) -> bool {
        self.current().iter().any(|tool| tool.spec.name == name)
    }

    /// The program behind a name.
    pub fn script(&self, name: &str) -> Option<Arc<Script>> {
        self.find(name).map(|tool| tool.script)
    }

    /// Runs one call to its end; `arguments` is the text that the model wrote. `cancel` stops the
    /// program's whole process group (SIGTERM, then SIGKILL), and so does dropping the future.
    pub async fn call(
        &self,
        name: &str,
        arguments: &str,
        context: &CallContext,
        cancel: &CancellationToken,
        progress: Option<&ProgressFn<'_>>,
    ) -> Outcome {
        // A tool that is new or was changed since the last look is called as it is now.
        let stale = match self.find(name) {
            Some(tool) => Fingerprint::of(tool.script.path()).ok() != Some(tool.fingerprint),
            None => !self.sources.is_empty(),
        };
        if stale {
            tokio::select! {
                biased;
                () = cancel.cancelled() => {
                    return Outcome::Cancelled("the call was cancelled before the tool started".to_owned());
                }
                _ = self.refresh() => {}
            }
        }
        match self.find(name) {
            Some(tool) => tool.script.call(arguments, context, cancel, progress).await,
            None => Outcome::Failed(self.unknown(name)),
        }
    }

    /// Looks at the files again and describes those that changed. A script that breaks is hidden with
    /// a warning; tools that stay keep their names.
    pub async fn refresh(&self) -> Refreshed {
        let (refreshed, fresh) = self.look().await;
        for warning in &fresh {
            tracing::warn!(warning = warning.as_str(), "tool not usable as it is");
        }
        refreshed
    }

    /// As [`Self::refresh`], with those of the warnings that weren't there the last time.
    async fn look(&self) -> (Refreshed, Vec<String>) {
        let mut known = self.known.lock().await;
        let sources = Arc::clone(&self.sources);
        let scanned = tokio::task::spawn_blocking(move || scan::scan(&sources)).await;
        let (candidates, mut warnings) = match scanned {
            Ok(scanned) => scanned,
            Err(error) => {
                // The tools stay as they were.
                let warnings = vec![format!("looking for tools failed: {error}")];
                return (Refreshed { changed: false, warnings: warnings.clone() }, warnings);
            }
        };
        known.described = describe_changed(&candidates, &known.described).await;
        let offered = self.offered(&candidates, &known.described, &mut warnings);
        let before = self.current();
        let tools = named(&before, offered, &mut warnings);
        let same = before.len() == tools.len()
            && before
                .iter()
                .zip(&tools)
                .all(|(old, new)| old.spec == new.spec && Arc::ptr_eq(&old.script, &new.script));
        *self.tools.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(tools);
        if !same {
            self.edition.fetch_add(1, Ordering::Release);
        }
        let fresh = warnings.iter().filter(|warning| !known.warnings.contains(warning)).cloned().collect();
        known.warnings.clone_from(&warnings);
        (Refreshed { changed: !same, warnings }, fresh)
    }

    /// Starts a task that refreshes once each `every` until `cancel` is cancelled.
    pub fn watch(self: Arc<Self>, every: Duration, cancel: CancellationToken) -> JoinHandle<()> {
        tokio::spawn(async move {
            let mut ticks = interval(every.max(Duration::from_millis(1)));
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            let refreshing = async {
                loop {
                    ticks.tick().await;
                    if self.refresh().await.changed {
                        tracing::info!(tools = self.current().len(), "tools changed");
                    }
                }
            };
            tokio::select! {
                () = cancel.cancelled() => {}
                () = refreshing => {}
            }
        })
    }

    fn current(&self) -> Arc<Vec<Tool>> {
        Arc::clone(&self.tools.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn find(&self, name: &str) -> Option<Tool> {
        self.current().iter().find(|tool| tool.spec.name == name).cloned()
    }

    fn unknown(&self, name: &str) -> String {
        let tools = self.current();
        let name: String = name.chars().take(naming::MAX_NAME).collect();
        let all = tools.iter().map(|tool| &tool.spec.name).chain(&self.others);
        let mut names: Vec<&str> = all.map(String::as_str).collect();
        if names.is_empty() {
            return format!("there is no tool {name:?}; this agent has no tools");
        }
        if names.len() > NAMES_LISTED {
            names.truncate(NAMES_LISTED);
            names.push("…");
        }
        format!("there is no tool {name:?}; this agent has: {}", names.join(", "))
    }

    /// The scripts that work and pass their source's filter, with their fingerprints, in order.
    fn offered(
        &self,
        candidates: &[Candidate],
        described: &HashMap<PathBuf, Described>,
        warnings: &mut Vec<String>,
    ) -> Vec<(Arc<Script>, Fingerprint)> {
        let mut offered = Vec::new();
        let mut names = Vec::new();
        for candidate in candidates {
            let Some(known) = described.get(&candidate.path) else { continue };
            match &known.script {
                Err(reason) => {
                    warnings.push(format!("tool {} is hidden: {reason}", candidate.path.display()));
                }
                Ok(script) => {
                    let (file, slug) = (candidate.file_name.as_str(), script.info().slug.as_str());
                    names.push((candidate.source, file, slug));
                    let fits = match &self.sources[candidate.source] {
                        Source::Directory { filter, .. } => filter.offers(file, slug),
                        Source::File(_) => true,
                    };
                    if fits {
                        warnings.extend(unknown_fields(script));
                        offered.push((Arc::clone(script), known.fingerprint.clone()));
                    }
                }
            }
        }
        warnings.extend(scan::idle_filters(&self.sources, &names));
        offered
    }
}

impl Default for Toolbox {
    /// A toolbox without tools.
    fn default() -> Self {
        Self {
            sources: Arc::new([]),
            tools: RwLock::default(),
            edition: AtomicU64::new(0),
            known: Mutex::default(),
            others: Vec::new(),
        }
    }
}

impl fmt::Debug for Toolbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tools = self.current();
        let names: Vec<&str> = tools.iter().map(|tool| tool.spec.name.as_str()).collect();
        f.debug_struct("Toolbox").field("tools", &names).finish_non_exhaustive()
    }
}

/// What is known of each candidate, after asking those that are new, changed or due for another try.
async fn describe_changed(
    candidates: &[Candidate],
    before: &HashMap<PathBuf, Described>,
) -> HashMap<PathBuf, Described> {
    let fresh = |candidate: &Candidate| {
        before.get(&candidate.path).filter(|known| {
            known.fingerprint == candidate.fingerprint
                && (known.script.is_ok() || known.at.elapsed() < RETRY_BROKEN)
        })
    };
    let asked: Vec<_> = candidates
        .iter()
        .filter(|candidate| fresh(candidate).is_none())
        .map(|candidate| ask(candidate.clone()).boxed())
        .collect();
    let mut described: HashMap<PathBuf, Described> =
        stream::iter(asked).buffer_unordered(DESCRIBES_AT_ONCE).collect().await;
    for candidate in candidates {
        if let Some(known) = fresh(candidate) {
            described.insert(candidate.path.clone(), known.clone());
        }
    }
    described
}

async fn ask(candidate: Candidate) -> (PathBuf, Described) {
    let script = Script::load(&candidate.path).await.map(Arc::new).map_err(|error| error.to_string());
    (candidate.path, Described { fingerprint: candidate.fingerprint, at: Instant::now(), script })
}

/// Gives each script its name for the model. The n-th tool of a slug keeps the name that the n-th
/// tool of that slug had before.
fn named(before: &[Tool], offered: Vec<(Arc<Script>, Fingerprint)>, warnings: &mut Vec<String>) -> Vec<Tool> {
    let mut nth = HashMap::new();
    let held: HashMap<(&str, usize), &str> = before
        .iter()
        .map(|tool| ((occurrence(&mut nth, &tool.spec.original)), tool.spec.name.as_str()))
        .collect();
    let mut nth = HashMap::new();
    let kept: Vec<Option<&str>> = offered
        .iter()
        .map(|(script, _)| held.get(&occurrence(&mut nth, &script.info().slug)).copied())
        .collect();
    // Names that stay come first: they are fit and different, so they are given again as they are.
    let stay = kept.iter().flatten().map(|name| (*name).to_owned());
    let fresh = offered.iter().zip(&kept).filter(|(_, kept)| kept.is_none());
    let wanted: Vec<String> =
        stay.chain(fresh.map(|((script, _), _)| format!("bash_{}", script.info().slug))).collect();
    let mut assigned = naming::assign(wanted.iter().map(String::as_str)).into_iter();
    let stay: Vec<String> = assigned.by_ref().take(kept.iter().flatten().count()).collect();
    let mut stay = stay.into_iter();
    let mut tools: Vec<Tool> = Vec::with_capacity(offered.len());
    for ((script, fingerprint), kept) in offered.into_iter().zip(&kept) {
        let next = if kept.is_some() { stay.next() } else { assigned.next() };
        let Some(name) = next else { continue };
        let (slug, wish) = (&script.info().slug, naming::normalize(&format!("bash_{}", script.info().slug)));
        if name != wish {
            let path = script.path().display();
            warnings
                .push(format!("tool {path}: the name {wish} of slug {slug:?} is taken; it is called {name}"));
        }
        let spec = ToolSpec {
            name,
            original: slug.clone(),
            description: script.info().description.clone(),
            parameters: script.parameters().clone(),
        };
        tools.push(Tool { spec, script, fingerprint });
    }
    debug_assert_eq!(tools.iter().map(|tool| &tool.spec.name).collect::<HashSet<_>>().len(), tools.len());
    tools
}

/// The slug with how many tools of that slug came before.
fn occurrence<'a>(seen: &mut HashMap<&'a str, usize>, slug: &'a str) -> (&'a str, usize) {
    let count = seen.entry(slug).or_default();
    *count += 1;
    (slug, *count)
}

fn unknown_fields(script: &Script) -> impl Iterator<Item = String> {
    let path = script.path().display();
    script.info().unknown_fields.iter().map(move |field| {
        format!("tool {path}: field {field:?} of its description is unknown and has no effect")
    })
}
