//! Descendants of a program that left its process group, as daemons do.
//!
//! On Linux this process is the one that orphans of its descendants are given to (a child subreaper), so whatever
//! a program leaves behind ends up among this process's children, where it is found and killed when the program
//! has ended. Each is known by the mark that programs are started with in their environment. One that has put
//! off its environment, but lives in a session that isn't ours, is killed as soon as no program runs that could
//! have started it.

use std::{
    collections::{HashMap, HashSet},
    fs,
    sync::{LazyLock, Mutex, MutexGuard, Once, PoisonError},
    time::{Duration, Instant},
};

use rustix::process::{
    Pid, Signal, WaitOptions, getpid, getsid, kill_process, set_child_subreaper, test_kill_process_group,
    waitpid,
};
use uuid::Uuid;

/// The variable that marks what a program has started.
pub(crate) const MARK: &str = "AGENT_TOOL_RUN";

/// How long killing may take that again and again finds more.
const LIMIT: Duration = Duration::from_secs(2);

/// Pause between two looks: time for the killed to go, and for their children to be given to this process.
const PAUSE: Duration = Duration::from_millis(5);

/// After how long nobody else can be about to ask for a dead child's status.
const NOBODYS: Duration = Duration::from_secs(5);

/// What this process knows of its programs.
#[derive(Default)]
struct Known {
    /// Programs that run, by their mark.
    running: HashMap<String, Leader>,
    /// Process groups whose leaders have ended, and that are being ended.
    ending: HashSet<i32>,
    /// Those that were killed here and aren't gone yet.
    killed: HashSet<i32>,
    /// Dead children that somebody else may ask for, by when they were first seen.
    dead: HashMap<i32, Instant>,
    last: u64,
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
static PREFIX: LazyLock<String> = LazyLock::new(|| Uuid::new_v4().simple().to_string());

/// A fresh mark, of a program that is about to be started.
pub(crate) fn mark() -> String {
    static SUBREAPER: Once = Once::new();
    SUBREAPER.call_once(|| {
        if let Err(error) = set_child_subreaper(Some(getpid())) {
            tracing::warn!(%error, "daemons that tools start can't be found");
        }
    });
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
    known().get_or_insert_default().running.insert(mark.to_owned(), Leader { pid, started });
}

/// It doesn't after all.
pub(crate) fn unstarted(mark: &str) {
    known().get_or_insert_default().running.remove(mark);
}

/// It has ended: what it left is killed.
pub(crate) async fn ended(mark: &str, leader: Pid) {
    let group = leader.as_raw_nonzero().get();
    {
        let mut known = known();
        let known = known.get_or_insert_default();
        known.running.remove(mark);
        known.ending.insert(group);
    }
    // A process is given to this one when its parent is gone, which takes a moment after the kill.
    let until = Instant::now() + LIMIT;
    while (sweep() || test_kill_process_group(leader).is_ok()) && Instant::now() < until {
        tokio::time::sleep(PAUSE).await;
    }
    known().get_or_insert_default().ending.remove(&group);
}

/// As [`ended`], for those who can't wait.
pub(crate) fn abandoned(mark: String, leader: Pid) {
    match tokio::runtime::Handle::try_current() {
        Ok(runtime) => drop(runtime.spawn(async move { ended(&mark, leader).await })),
        // The process is ending, and can't be given anything more.
        Err(_) => drop(sweep()),
    }
}

/// What the system says of a process.
struct About {
    dead: bool,
    group: i32,
    started: u64,
}

impl About {
    fn of(pid: i32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name, in parentheses, may hold anything.
        let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
        let dead = matches!(fields.next()?, "Z" | "X");
        // Of all fields the fifth, and then the 22nd.
        let group = fields.nth(1)?.parse().ok()?;
        let started = fields.nth(16)?.parse().ok()?;
        Some(Self { dead, group, started })
    }
}

/// Looks at every child of this process once. Returns whether there may be more to do: some were killed or have
/// just died, and what they leave comes now.
fn sweep() -> bool {
    let mut guard = known();
    let known = guard.get_or_insert_default();
    let leaders: HashSet<i32> = known.running.values().map(|leader| leader.pid).collect();
    let ours = getsid(None).ok();
    let children = children();
    known.killed.retain(|child| children.contains(child));
    let (mut dead, mut more) = (HashMap::new(), false);
    for child in children {
        if leaders.contains(&child) {
            continue;
        }
        let (Some(about), Some(pid)) = (About::of(child), Pid::from_raw(child)) else { continue };
        let of_group = known.ending.contains(&about.group) && about.group != child;
        if about.dead && (known.killed.remove(&child) || of_group) {
            let _ = waitpid(Some(pid), WaitOptions::NOHANG);
            more = true;
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
        } else if of_group || left_behind(known, child, pid, &about, ours) {
            let _ = kill_process(pid, Signal::KILL);
            known.killed.insert(child);
            more = true;
        }
    }
    known.dead = dead;
    more || !known.killed.is_empty()
}

/// Whether a living child of this process was started by a program that has ended.
fn left_behind(known: &Known, child: i32, pid: Pid, about: &About, ours: Option<Pid>) -> bool {
    match mark_of(child) {
        Some(mark) => !known.running.contains_key(&mark),
        None => {
            let elsewhere = getsid(Some(pid)).is_ok_and(|session| Some(session) != ours);
            elsewhere && known.running.values().all(|leader| leader.started > about.started)
        }
    }
}

/// The mark that this process has given, in another's environment.
fn mark_of(pid: i32) -> Option<String> {
    let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
    let prefix = format!("{MARK}=");
    let value = environment.split(|byte| *byte == 0).find_map(|one| one.strip_prefix(prefix.as_bytes()))?;
    let mark = String::from_utf8_lossy(value).into_owned();
    mark.starts_with(PREFIX.as_str()).then_some(mark)
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
