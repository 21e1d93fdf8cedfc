//! What needs attention, each thing with a slug that the runbook has a part for.

use chrono::{Days, TimeDelta};
use holdfast_store::status::{Database, Failures, Held, Table, Worker};
use holdfast_worker::cause::{cause, is_of_settings};

use super::{
    report::{Report, owner_name},
    webhooks,
    why::{Why, of_waiting},
};

/// Queued runs from which on one owner's may be a flood.
const FLOOD: i64 = 1_000;
/// Seconds for which an agent may be without a worker: nodes are replaced, and register each five seconds.
const UNSERVED: i64 = 10;
/// Seconds after which an expired lease should have been taken over.
const EXPIRED: i64 = 3;
/// Takeovers of one run from which on it, and not its workers, is to be suspected.
const TAKEOVERS: i32 = 2;
/// Sessions of an agent that failed for its model within an hour.
const MODEL_FAILURES: usize = 3;
/// Seconds after which a scheduler should have ended a call past its deadline.
const OVERDUE: i64 = 30;
/// Seconds after which a scheduler should have removed the rows of a deleted session.
const PURGE: i64 = 3_600;
/// Seconds that the feed may be behind.
const FEED_LAG: i64 = 60;
/// Seconds that a connection may wait for a lock.
const LOCK_WAIT: i64 = 10;
/// How many findings of a kind are told at most; the sections of the report have the rest.
const OF_A_KIND: usize = 3;
/// Dead rows of a table that has fewer living ones.
const DEAD: i64 = 100_000;

macro_rules! slugs {
    ($($name:ident = $word:literal),+ $(,)?) => {
        /// What can need attention.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(super) enum Slug { $($name),+ }

        impl Slug {
            /// All of them.
            #[cfg(test)]
            pub(super) const ALL: &[Self] = &[$(Self::$name),+];

            /// Its stable name, and its anchor in the runbook.
            pub(super) fn word(self) -> &'static str {
                match self { $(Self::$name => $word),+ }
            }
        }
    };
}

slugs! {
    NoWorker = "no-worker",
    AgentUnserved = "agent-unserved",
    QueueTooOld = "queue-too-old",
    OwnerFloods = "owner-floods",
    LeasesLost = "leases-lost",
    TakeoversRising = "takeovers-rising",
    PoisonRuns = "poison-runs",
    RunsBroken = "runs-broken",
    ModelErrors = "model-errors",
    DeferredCallOverdue = "deferred-call-overdue",
    SchedulerSilent = "scheduler-silent",
    FeedLag = "feed-lag",
    WebhooksUndelivered = "webhooks-undelivered",
    ConnectionsShort = "connections-short",
    LongTransaction = "long-transaction",
    LockWaits = "lock-waits",
    VacuumBehind = "vacuum-behind",
    RetentionBehind = "retention-behind",
    StatusSlow = "status-slow",
}

/// Something that needs attention.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Finding {
    /// The runbook's part.
    pub(super) slug: Slug,
    /// What was seen.
    pub(super) text: String,
}

/// All that needs attention, what stands in the way of work first.
pub(super) fn findings(report: &Report) -> Vec<Finding> {
    let mut all = Findings(Vec::new());
    queue(report, &mut all);
    owners(report, &mut all);
    leases(report, &mut all);
    if let Some(failures) = &report.failures {
        failed(report, failures, &mut all);
    }
    scheduler(report, &mut all);
    if let Some(feed) = report.feed.as_ref().filter(|feed| feed.lag_micros / 1_000_000 >= FEED_LAG) {
        let who = feed.oldest_writer.as_ref().map_or_else(String::new, |writer| {
            let pid = writer.pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default();
            format!(" and waits for {:?}{pid}", writer.name)
        });
        let lag = feed.lag_micros / 1_000_000;
        all.push(Slug::FeedLag, format!("the feed across sessions is {lag} s behind{who}"));
    }
    all.0.extend(webhooks::findings(report));
    if let Some(database) = &report.database {
        of_database(report, database, &mut all);
    }
    retention(report, &mut all);
    let slow = report.too_slow();
    if !slow.is_empty() {
        all.push(Slug::StatusSlow, format!("took too long to read: {}", slow.join(", ")));
    }
    all.0
}

struct Findings(Vec<Finding>);

impl Findings {
    fn push(&mut self, slug: Slug, text: String) {
        self.0.push(finding(slug, &text));
    }
}

/// A finding. All of them stand in one line, whatever the names in them hold.
pub(super) fn finding(slug: Slug, text: &str) -> Finding {
    Finding { slug, text: text.replace(char::is_control, " ") }
}

fn queue(report: &Report, all: &mut Findings) {
    let due = report.counts.as_ref().map_or(0, |counts| counts.due);
    let workers = report.workers.as_deref();
    if due > 0 && workers.is_some_and(|workers| !workers.iter().any(|one| one.is_live())) {
        all.push(Slug::NoWorker, format!("no worker is alive; runs that are due: {due}"));
        return;
    }
    for one in
        report.unserved.iter().flatten().filter(|one| report.age(one.since) >= UNSERVED).take(OF_A_KIND)
    {
        let (agent, runs, age) = (&one.agent, one.runs, report.age(one.since));
        let text = format!("no worker has {agent}; due runs that ask for it: {runs}, the oldest for {age} s");
        all.push(Slug::AgentUnserved, text);
    }
    let (Some(queue), Some(workers)) = (&report.queue, workers) else { return };
    let held = report.held();
    let stuck = queue.waiting.iter().find_map(|one| {
        let why = of_waiting(one, workers, held);
        let told = why.is_limit() || matches!(why, Why::NoWorker | Why::AgentUnserved(_));
        (!told && report.age(one.since) >= report.bounds.old_run.num_seconds()).then_some((one, why))
    });
    if let Some((one, why)) = stuck {
        let (session, age, why) = (one.session, report.age(one.since), why.text());
        let owner = owner_name(&one.owner.owner);
        let text = format!("session {session} of owner {owner} has been due for {age} s: {why}");
        all.push(Slug::QueueTooOld, text);
    }
}

fn owners(report: &Report, all: &mut Findings) {
    let Some(queue) = &report.queue else { return };
    for one in &queue.largest {
        let limit = i64::from(one.limits.max_queued.unwrap_or(holdfast_store::quota::DEFAULT_MAX_QUEUED));
        let name = owner_name(&one.owner);
        if limit > 0 && one.queued >= limit - limit / 5 {
            let text = format!("owner {name} has {} of the {limit} queued runs that it may have", one.queued);
            all.push(Slug::OwnerFloods, text);
        } else if one.queued >= FLOOD && queue.owners > 1 && one.queued * 2 >= queue.queued {
            let percent = one.queued * 100 / queue.queued.max(1);
            let text = format!("owner {name} has {} queued runs, {percent} % of all", one.queued);
            all.push(Slug::OwnerFloods, text);
        }
    }
}

fn leases(report: &Report, all: &mut Findings) {
    let Some(leases) = &report.leases else { return };
    let workers = report.workers.as_deref().unwrap_or_default();
    let expired = |held: &&Held| held.expired > 0 && report.age(held.soonest) >= EXPIRED;
    for held in leases.workers.iter().filter(expired).take(OF_A_KIND) {
        let host = workers.iter().find(|one| one.id == held.worker);
        let host = host.map_or_else(|| ", not registered".to_owned(), |one| format!(" on {}", one.host));
        let (worker, expired, age) = (held.worker, held.expired, report.age(held.soonest));
        let text = format!(
            "leases of worker {worker}{host} that expired and nobody took over: {expired}, the first {age} s ago"
        );
        all.push(Slug::LeasesLost, text);
    }
    let gone = |one: &&Worker| !one.is_live() && report.held_by(one.id).is_none_or(|held| held.expired == 0);
    for worker in workers.iter().filter(gone).take(OF_A_KIND) {
        let (id, host, silent) = (worker.id, &worker.host, worker.silence().num_seconds());
        let text = format!(
            "worker {id} on {host} went without leaving: silent for {silent} s, runs that it held: {}",
            worker.held
        );
        all.push(Slug::LeasesLost, text);
    }
    if let Some(worst) = leases.taken_over.iter().find(|one| one.takeovers >= TAKEOVERS) {
        let text =
            format!("{} workers died over session {}, which runs again", worst.takeovers, worst.session);
        all.push(Slug::TakeoversRising, text);
    }
}

fn failed(report: &Report, failures: &Failures, all: &mut Findings) {
    let still =
        |name: &str| failures.failed.iter().filter(|one| one.still && cause(&one.detail) == name).count();
    for (slug, name, what) in [
        (Slug::PoisonRuns, "poison", "ended as poison after five workers died over them"),
        (Slug::RunsBroken, "internal", "can't be driven on"),
    ] {
        let count = still(name);
        let newest = failures.failed.iter().find(|one| one.still && cause(&one.detail) == name);
        if let Some(newest) = newest {
            all.push(slug, format!("sessions that {what}: {count}, the newest {}", newest.session));
        }
    }
    let hour = report.now - TimeDelta::hours(1);
    let recent = || {
        failures.failed.iter().filter(move |one| one.at >= hour && cause(&one.detail).starts_with("model_"))
    };
    let mut agents: Vec<&str> = recent().map(|one| one.agent.as_str()).collect();
    agents.sort_unstable();
    agents.dedup();
    for agent in agents {
        let mine: Vec<_> = recent().filter(|one| one.agent == agent).collect();
        let wrong = mine.iter().any(|one| one.still && is_of_settings(cause(&one.detail)));
        if let (true, Some(newest)) = (wrong || mine.len() >= MODEL_FAILURES, mine.first()) {
            let (count, why) = (mine.len(), cause(&newest.detail));
            let text =
                format!("sessions of agent {agent} that failed for its model within an hour: {count}, {why}");
            all.push(Slug::ModelErrors, text);
        }
    }
}

fn scheduler(report: &Report, all: &mut Findings) {
    if let Some(deferred) = &report.deferred
        && let Some(since) = deferred.overdue_since.filter(|since| report.age(*since) >= OVERDUE)
    {
        let (count, age) = (deferred.overdue, report.age(since));
        let text = format!("deferred calls past their deadline: {count}, the first for {age} s");
        all.push(Slug::DeferredCallOverdue, text);
    }
    let mut undone = Vec::new();
    if let Some(late) = report.counts.as_ref().map(|counts| counts.late_timers).filter(|late| *late > 0) {
        undone.push(format!("timers over a minute late: {late}"));
    }
    if let Some(rest) = &report.retention.rest {
        if let Some(since) = rest.deleted_since.filter(|since| report.age(*since) >= PURGE) {
            let age = report.age(since);
            undone.push(format!("rows of sessions that were deleted {age} s ago are still there"));
        }
        if report.owner.is_none() && rest.old_keys > 0 {
            undone.push(format!("{} idempotency keys are older than 25 hours", rest.old_keys));
        }
    }
    if !undone.is_empty() {
        all.push(Slug::SchedulerSilent, format!("no scheduler keeps up: {}", undone.join(", ")));
    }
}

fn of_database(report: &Report, database: &Database, all: &mut Findings) {
    let connections = &database.connections;
    let room = i64::from(connections.limit - connections.reserved);
    if connections.used * 10 >= room * 9 {
        let text = format!("{} of {room} connections of the database are used", connections.used);
        all.push(Slug::ConnectionsShort, text);
    }
    let bound = report.bounds.long_transaction.num_seconds();
    if let Some(oldest) = database.transactions.first().filter(|one| report.age(one.since) >= bound) {
        let (pid, name, age) = (oldest.pid, &oldest.name, report.age(oldest.since));
        let state = oldest.state.as_deref().unwrap_or("state unknown");
        let text = format!("a transaction of {name:?} (pid {pid}, {state}) has been open for {age} s");
        all.push(Slug::LongTransaction, text);
    }
    let waits = database
        .lock_waits
        .iter()
        .filter(|one| one.since.is_some_and(|since| report.age(since) >= LOCK_WAIT));
    if let Some(first) = waits.clone().next() {
        let pids: Vec<String> = first.blocked_by.iter().map(i32::to_string).collect();
        let age = first.since.map_or(0, |since| report.age(since));
        let text = format!(
            "connections that wait for locks: {}, pid {} for {age} s for {} behind pid {}",
            waits.count(),
            first.pid,
            first.what,
            pids.join(", ")
        );
        all.push(Slug::LockWaits, text);
    }
    let dead = |table: &&Table| table.dead >= DEAD && table.dead >= table.live;
    if let Some(table) = database.tables.iter().flatten().find(dead) {
        let text =
            format!("table {} has {} dead rows and {} living ones", table.name, table.dead, table.live);
        all.push(Slug::VacuumBehind, text);
    }
}

fn retention(report: &Report, all: &mut Findings) {
    let Some(events) = &report.retention.events else { return };
    // The pass that drops partitions comes by once an hour, so a day more is no fault.
    let days = Days::new(report.ages.events + 1);
    let limit = report.now.date_naive().checked_sub_days(days).unwrap_or_default();
    let limit = format!("events_{}", limit.format("%Y%m%d"));
    if let Some(oldest) = events.oldest.as_ref().filter(|oldest| **oldest < limit) {
        let (count, kept) = (events.partitions, report.ages.events);
        let text = format!("{count} partitions of events are older than {kept} days, the oldest {oldest}");
        all.push(Slug::RetentionBehind, text);
    }
}
