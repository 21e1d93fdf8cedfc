//! Descendants of a program that left its process group, as daemons do.
//!
//! On Linux this process is the one that orphans of its descendants are given to (a child subreaper), so whatever
//! a program leaves behind ends up among this process's children, where it is found and killed when the program
//! has ended. Each is known by the mark that programs are started with in their environment. One that has put
//! off its environment, but lives in a session that isn't ours, is killed as soon as no program runs that could
//! have started it; unless processes that no program has started may be given to this one too, as they are to
//! the first process of a container: nothing tells the two apart, and a stranger isn't ours to kill.

use std::{
    collections::{HashMap, HashSet},
    env, fs,
    sync::{LazyLock, Mutex, MutexGuard, Once, PoisonError},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{
    Pid, Signal, WaitOptions, getpid, kill_process, set_child_subreaper, test_kill_process_group, waitpid,
};
use uuid::Uuid;

/// The variable that marks what a program has started.
pub(crate) const MARK: &str = "AGENT_TOOL_RUN";

/// The variable by which a process that runs tools is given what all its marks begin with: what
/// [`marks_for_child`] returned. Tools don't get it.
pub const MARKS_VARIABLE: &str = "HOLDFAST_TOOL_MARK";

/// How long killing may take that again and again finds more.
const LIMIT: Duration = Duration::from_secs(2);

/// Pause between two looks: time for the killed to go, and for their children to be given to this process.
const PAUSE: Duration = Duration::from_millis(5);

/// After how long nobody else can be about to ask for a dead child's status.
const NOBODYS: Duration = Duration::from_secs(5);

/// How often is looked for what died, or was given to this process, since the last call ended.
const EVERY: Duration = Duration::from_secs(10);

/// How long what marks begin with may be, in bytes.
const MAX_PREFIX: usize = 64;

/// What this process knows of its programs.
#[derive(Default)]
struct Known {
    /// Programs that run, by their mark.
    running: HashMap<String, Leader>,
    /// Process groups whose leaders have ended, and that are being ended.
    ending: HashSet<i32>,
    /// What the marks begin with of processes that have ended, and whose programs are being ended.
    condemned: HashSet<String>,
    /// Those that were killed here and aren't gone yet, by when they were first killed.
    killed: HashMap<i32, Instant>,
    /// Dead children that somebody else may ask for, by when they were first seen.
    dead: HashMap<i32, Instant>,
    /// Whether children without a mark may be others' than the programs': this process is the system's or its
    /// container's first, or had children before it started any program, whose descendants come to it too.
    strangers: bool,
    /// When the first program was started, in the system's ticks since its boot.
    first: Option<u64>,
    last: u64,
}

impl Known {
    /// Whether somebody is still to go whom a hunt that began at `begun` has to wait for: one that was killed
    /// before, and lives on, was waited for then.
    fn awaits(&self, begun: Instant) -> bool {
        self.killed.values().any(|killed| *killed >= begun)
    }

    /// Whether a living child without a mark, in a session that isn't ours, is left of a program that has ended.
    fn disowned(&self, started: u64) -> bool {
        !self.strangers
            && self.first.is_some_and(|first| first <= started)
            && self.running.values().all(|leader| leader.started > started)
    }
}

#[derive(Clone, Copy)]
struct Leader {
    pid: i32,
    /// When it was started, in the system's ticks since its boot.
    started: u64,
}

static KNOWN: Mutex<Option<Known>> = Mutex::new(None);

fn known() -> MutexGuard<'static, Option<Known>> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What all marks of this process begin with: it may itself be marked by another one.
static PREFIX: LazyLock<String> = LazyLock::new(|| {
    let given = env::var(MARKS_VARIABLE).ok();
    given.filter(|prefix| is_prefix(prefix)).unwrap_or_else(fresh_prefix)
});

fn fresh_prefix() -> String {
    Uuid::new_v4().simple().to_string()
}

/// Without a hyphen, which ends it in a mark.
fn is_prefix(text: &str) -> bool {
    (1..=MAX_PREFIX).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_alphanumeric())
}

/// Makes this process the one that orphans are given to, before it starts its first program.
fn begin() {
    static BEGUN: Once = Once::new();
    BEGUN.call_once(|| {
        let strangers = getpid() == Pid::INIT || !children().is_empty();
        known().get_or_insert_default().strangers = strangers;
        if let Err(error) = set_child_subreaper(Some(getpid())) {
            tracing::warn!(%error, "daemons that tools start can't be found");
            return;
        }
        // A thread, since no runtime needs to live as long as this process does.
        if let Err(error) = thread::Builder::new().name("stragglers".to_owned()).spawn(watch) {
            tracing::warn!(%error, "what tools leave behind is looked for only when a call ends");
        }
    });
}

/// Looks now and then for as long as this process lives.
fn watch() {
    loop {
        let waiting = known().as_ref().is_some_and(|known| !known.dead.is_empty());
        thread::park_timeout(if waiting { NOBODYS } else { EVERY });
        sweep(Instant::now());
    }
}

/// What the marks of another process are to begin with, one that this process is about to start and that runs
/// tools itself: to be handed down in [`MARKS_VARIABLE`], one for each process, and to be given to [`end_marked`]
/// when that process has ended. From here on this process is given the orphans of its descendants.
#[must_use]
pub fn marks_for_child() -> String {
    begin();
    fresh_prefix()
}

/// Kills and reaps what the tools of a process have left that was started with `prefix`, from
/// [`marks_for_child`], in [`MARKS_VARIABLE`], and that has ended, however it did: it may have been killed
/// while its tools ran.
///
/// Returns as soon as none is left, after two seconds at the latest; those that died by themselves are reaped
/// a little later. Anything else than such a prefix ends
/// nothing. Where orphans aren't given to this process (elsewhere than on Linux), this does nothing.
pub async fn end_marked(prefix: &str) {
    /// Takes it back, also when the wait is given up.
    struct Condemned<'a>(&'a str);
    impl Drop for Condemned<'_> {
        fn drop(&mut self) {
            known().get_or_insert_default().condemned.remove(self.0);
        }
    }
    if !is_prefix(prefix) || prefix == *PREFIX {
        return;
    }
    let begun = Instant::now();
    known().get_or_insert_default().condemned.insert(prefix.to_owned());
    let _condemned = Condemned(prefix);
    while sweep(begun) && begun.elapsed() < LIMIT {
        tokio::time::sleep(PAUSE).await;
    }
}

/// A fresh mark, of a program that is about to be started.
pub(crate) fn mark() -> String {
    begin();
    let mut known = known();
    let known = known.get_or_insert_default();
    known.last += 1;
    let mark = format!("{}-{}", *PREFIX, known.last);
    known.running.insert(mark.clone(), Leader { pid: 0, started: 0 });
    mark
}

/// A program with this mark runs.
pub(crate) fn started(mark: &str, leader: Pid) {
    let pid = leader.as_raw_nonzero().get();
    let started = About::of(pid).map_or(0, |about| about.started);
    let mut known = known();
    let known = known.get_or_insert_default();
    if started > 0 {
        known.first = Some(known.first.map_or(started, |first| first.min(started)));
    }
    known.running.insert(mark.to_owned(), Leader { pid, started });
}

/// It doesn't after all.
pub(crate) fn unstarted(mark: &str) {
    known().get_or_insert_default().running.remove(mark);
}

/// It has ended: what it left is killed.
pub(crate) async fn ended(mark: &str, leader: Pid) {
    let group = leader.as_raw_nonzero().get();
    let begun = Instant::now();
    {
        let mut known = known();
        let known = known.get_or_insert_default();
        known.running.remove(mark);
        known.ending.insert(group);
    }
    // A process is given to this one when its parent is gone, which takes a moment after the kill.
    while (sweep(begun) || test_kill_process_group(leader).is_ok()) && begun.elapsed() < LIMIT {
        tokio::time::sleep(PAUSE).await;
    }
    known().get_or_insert_default().ending.remove(&group);
}

/// As [`ended`], for those who can't wait.
pub(crate) fn abandoned(mark: String, leader: Pid) {
    match tokio::runtime::Handle::try_current() {
        Ok(runtime) => drop(runtime.spawn(async move { ended(&mark, leader).await })),
        // The process is ending, and can't be given anything more.
        Err(_) => drop(sweep(Instant::now())),
    }
}

/// What the system says of a process.
struct About {
    dead: bool,
    /// As 0 if that of another namespace, and so is the session.
    group: i32,
    session: i32,
    started: u64,
}

impl About {
    fn of(pid: i32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name, in parentheses, may hold anything.
        let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
        let dead = matches!(fields.next()?, "Z" | "X");
        // Of all fields the fifth and the sixth, and then the 22nd.
        let group = fields.nth(1)?.parse().ok()?;
        let session = fields.next()?.parse().ok()?;
        let started = fields.nth(15)?.parse().ok()?;
        Some(Self { dead, group, session, started })
    }
}

/// Looks at every child of this process once. Returns whether there may be more to do for a hunt that began at
/// `begun`: some were killed since or have just died, and what they leave comes now.
fn sweep(begun: Instant) -> bool {
    let mut guard = known();
    let known = guard.get_or_insert_default();
    let leaders: HashSet<i32> = known.running.values().map(|leader| leader.pid).collect();
    let Some(ours) = About::of(getpid().as_raw_nonzero().get()) else { return false };
    let children = children();
    known.killed.retain(|child, _| children.contains(child));
    let (mut dead, mut more) = (HashMap::new(), false);
    for child in children {
        if leaders.contains(&child) {
            continue;
        }
        let (Some(about), Some(pid)) = (About::of(child), Pid::from_raw(child)) else { continue };
        let of_group = known.ending.contains(&about.group) && about.group != child;
        if about.dead && (known.killed.remove(&child).is_some() || of_group) {
            let _ = waitpid(Some(pid), WaitOptions::NOHANG);
            more = true;
        } else if about.dead && about.group == ours.group {
            // Started by this process itself, and no program: whoever did so waits for it.
        } else if about.dead {
            // An orphan that ended by itself or with its group, unless somebody else here waits for it, who is
            // quick about it.
            more |= !known.dead.contains_key(&child);
            let since = *known.dead.get(&child).unwrap_or(&Instant::now());
            if since.elapsed() < NOBODYS {
                dead.insert(child, since);
            } else {
                let _ = waitpid(Some(pid), WaitOptions::NOHANG);
            }
        } else if of_group || left_behind(known, child, &about, ours.session) {
            // One that may not be killed isn't waited for.
            if kill_process(pid, Signal::KILL).is_ok() {
                known.killed.entry(child).or_insert_with(Instant::now);
            }
        }
    }
    known.dead = dead;
    more || known.awaits(begun)
}

/// Whether a living child of this process was started by a program that has ended.
fn left_behind(known: &Known, child: i32, about: &About, session: i32) -> bool {
    let mark = mark_of(child);
    match mark.as_deref().and_then(|mark| Some((mark, mark.rsplit_once('-')?.0))) {
        Some((mark, prefix)) if prefix == *PREFIX => !known.running.contains_key(mark),
        Some((_, prefix)) if known.condemned.contains(prefix) => true,
        _ => about.session != session && known.disowned(about.started),
    }
}

/// The mark in another's environment, if that can be read.
fn mark_of(pid: i32) -> Option<String> {
    let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
    let prefix = format!("{MARK}=");
    let value = environment.split(|byte| *byte == 0).find_map(|one| one.strip_prefix(prefix.as_bytes()))?;
    Some(String::from_utf8_lossy(value).into_owned())
}

/// Children of this process; all threads', since each may have been given orphans.
fn children() -> Vec<i32> {
    let Ok(threads) = fs::read_dir("/proc/self/task") else { return Vec::new() };
    let lists =
        threads.flatten().filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
    lists
        .flat_map(|list| list.split_ascii_whitespace().filter_map(|id| id.parse().ok()).collect::<Vec<_>>())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_lives_on_after_a_kill_is_waited_for_once() {
        let begun = Instant::now();
        let mut known = Known::default();
        known.killed.insert(7, begun);
        assert!(known.awaits(begun), "by the call that killed it");
        assert!(!known.awaits(begun + PAUSE), "by no later one");
        known.killed.insert(8, begun + PAUSE);
        assert!(known.awaits(begun + PAUSE), "which has its own");
    }

    #[test]
    fn without_a_mark_only_what_a_program_can_have_started_is_ended() {
        let mut known = Known::default();
        assert!(!known.disowned(100), "no program ever ran");
        known.first = Some(50);
        assert!(known.disowned(50) && !known.disowned(49), "older than any program");
        known.running.insert("a-1".to_owned(), Leader { pid: 1, started: 90 });
        assert!(!known.disowned(90) && known.disowned(89), "a running program's");
        known.strangers = true;
        assert!(!known.disowned(89), "a stranger's");
    }
}
