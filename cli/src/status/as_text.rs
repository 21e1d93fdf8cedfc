//! The report for people: the verdict first, then a part for each question.

use holdfast_store::{
    quota::{DEFAULT_MAX_QUEUED, Limits, Usage},
    status::{COUNTED, Deferred, FeedState, HELD_BACK_COUNTED, Queue, StepKind, Worker},
};
use holdfast_worker::MAX_TAKEOVERS;

use super::{
    database_text,
    report::{Report, owner_name},
    summary::{Causes, causes, deploy},
    verdict::Finding,
    webhooks,
    why::of_waiting,
};
use crate::{failure::Failure, output};

/// Characters of a deferral's reason that are shown.
const REASON: usize = 60;
/// Workers that hold leases and aren't registered that are shown.
const STRANGERS: usize = 5;
/// Agents of a worker that are shown.
const AGENTS: usize = 3;

/// Prints the report.
pub(super) fn show(report: &Report, findings: &[Finding]) -> Result<(), Failure> {
    output::line(verdict(findings))?;
    if let Some((name, read)) = &report.owner {
        owner(name, read.as_ref())?;
    }
    queue(report)?;
    workers(report)?;
    agents(report)?;
    interrupted(report)?;
    failures(report)?;
    section("deferred calls", report.deferred.as_ref(), |deferred| self::deferred(report, deferred))?;
    if report.owner.is_none() {
        section("feed", report.feed.as_ref(), |feed| self::feed(report, feed))?;
        section("webhooks", report.webhooks.as_ref(), |list| webhooks::show(report, list))?;
        section("database", report.database.as_ref(), |database| database_text::show(report, database))?;
    }
    database_text::retention(report)
}

/// An owner's limits and what it uses.
fn owner(name: &str, read: Option<&(Limits, Usage)>) -> Result<(), Failure> {
    let name = owner_name(name);
    section(&format!("owner {name}"), read, |(limits, usage)| {
        let of = |limit: Option<i32>| limit.map_or_else(|| "none".to_owned(), |limit| limit.to_string());
        let (running, queued) = (usage.running, usage.queued);
        let (most, rate) = (of(limits.max_running), of(limits.runs_per_minute));
        let waiting = limits.max_queued.unwrap_or(DEFAULT_MAX_QUEUED);
        output::line(format!(
            "owner {name}: {running} runs under way (limit {most}), {queued} queued (limit {waiting}), a minute: limit {rate}"
        ))
    })
}

/// The first line.
pub(super) fn verdict(findings: &[Finding]) -> String {
    if findings.is_empty() {
        return "ok".to_owned();
    }
    let list: Vec<String> =
        findings.iter().map(|one| format!("{} [{}]", one.text, one.slug.word())).collect();
    format!("needs attention: {}", list.join("; "))
}

/// A part of the report behind an empty line, or that it took too long.
fn section<T>(
    name: &str,
    read: Option<&T>,
    show: impl FnOnce(&T) -> Result<(), Failure>,
) -> Result<(), Failure> {
    output::line("")?;
    match read {
        Some(read) => show(read),
        None => output::line(format!("{name}: took too long")),
    }
}

/// A number that isn't counted further.
pub(super) fn counted(number: i64) -> String {
    if number >= COUNTED { format!("{number}+") } else { number.to_string() }
}

fn queue(report: &Report) -> Result<(), Failure> {
    section("runs", report.counts.as_ref(), |counts| {
        let open = report.deferred.as_ref().map_or_else(|| "?".to_owned(), |one| counted(one.open));
        let oldest =
            report.queue.iter().flat_map(|queue| &queue.waiting).map(|one| report.age(one.since)).max();
        output::table(
            ["RUNS HELD", "DUE", "PUT OFF", "PARKED", "OPEN CALLS", "OLDEST DUE"],
            [[
                counted(counts.claimed),
                counted(counts.due),
                (counts.queued - counts.due).to_string(),
                counts.parked.map_or_else(|| "?".to_owned(), counted),
                open,
                report
                    .queue
                    .as_ref()
                    .map_or_else(|| "?".to_owned(), |_| format!("{} s", oldest.unwrap_or(0))),
            ]],
        )
    })?;
    section("queue by owner", report.queue.as_ref(), |queue| owners(report, queue))?;
    match &report.unserved {
        None => output::line("agents without a worker: took too long"),
        Some(list) => list.iter().try_for_each(|one| {
            output::line(format!("no worker has {}, which {} runs ask for", one.agent, one.runs))
        }),
    }
}

fn owners(report: &Report, queue: &Queue) -> Result<(), Failure> {
    if queue.largest.is_empty() {
        return output::line("nothing is queued");
    }
    let limit = |limit: Option<i32>| limit.map_or_else(|| "-".to_owned(), |limit| limit.to_string());
    let rows = queue.largest.iter().map(|one| {
        [
            owner_name(&one.owner).to_owned(),
            one.queued.to_string(),
            format!("{} %", one.queued * 100 / queue.queued.max(1)),
            one.held.to_string(),
            limit(one.limits.max_running),
            limit(one.limits.runs_per_minute),
            limit(one.limits.max_queued),
        ]
    });
    output::table(["OWNER", "QUEUED", "SHARE", "HELD", "MAX RUNNING", "PER MINUTE", "MAX QUEUED"], rows)?;
    if queue.owners > 5 {
        output::line(format!("and {} more owners", queue.owners - 5))?;
    }
    if queue.waiting.is_empty() {
        return Ok(());
    }
    output::line("")?;
    let leases = report.held();
    let rows = queue.waiting.iter().map(|one| {
        let why = report.workers.as_deref().map(|workers| of_waiting(one, workers, leases).text());
        [
            one.session.to_string(),
            owner_name(&one.owner.owner).to_owned(),
            one.agent.clone(),
            format!("{} s", report.age(one.since)),
            why.unwrap_or_else(|| "?".to_owned()),
        ]
    });
    output::table(["WAITS THE LONGEST", "OWNER", "AGENT", "DUE FOR", "WHY"], rows)
}

fn workers(report: &Report) -> Result<(), Failure> {
    section("workers", report.workers.as_ref(), |workers| {
        if workers.is_empty() {
            return output::line("no workers");
        }
        output::table(
            ["WORKER", "HOST", "HELD", "EXPIRED", "TAKEN OVER", "LABELS", "AGENTS", "SEEN"],
            workers.iter().map(|one| worker(report, one)),
        )
    })?;
    let Some(leases) = &report.leases else { return output::line("leases: took too long") };
    let known = |id| report.workers.iter().flatten().any(|worker| worker.id == id);
    let strangers: Vec<_> = leases.workers.iter().filter(|held| !known(held.worker)).collect();
    for held in strangers.iter().take(STRANGERS) {
        let (worker, count, expired) = (held.worker, held.held, held.expired);
        output::line(format!("worker {worker}, not registered, holds {count} leases, {expired} expired"))?;
    }
    if strangers.len() > STRANGERS {
        output::line(format!("and {} more that aren't registered", strangers.len() - STRANGERS))?;
    }
    if let Some(soonest) = leases.workers.iter().map(|held| held.soonest).min() {
        let left = soonest.signed_duration_since(report.now).num_seconds();
        let words = if left >= 0 { format!("in {left} s") } else { format!("{} s ago", -left) };
        output::line(format!("the first lease ends {words}"))?;
    }
    leases.taken_over.iter().try_for_each(|one| {
        let (session, owner, agent) = (one.session, owner_name(&one.owner), &one.agent);
        let (count, worker) = (one.takeovers, one.worker);
        output::line(format!(
            "session {session} of {owner} ({agent}) outlived {count} workers of {MAX_TAKEOVERS}; {worker} holds it"
        ))
    })
}

fn worker(report: &Report, one: &Worker) -> [String; 8] {
    let held = report.held_by(one.id);
    let silent = one.silence().num_seconds();
    let mut agents = one.agents.iter().take(AGENTS).cloned().collect::<Vec<_>>().join(" ");
    if one.agents.len() > AGENTS {
        agents.push_str(&format!(" and {} more", one.agents.len() - AGENTS));
    }
    [
        one.id.to_string(),
        one.host.clone(),
        format!("{}/{}", held.map_or(0, |held| held.held), one.slots),
        held.map_or(0, |held| held.expired).to_string(),
        held.map_or(0, |held| held.taken_over).to_string(),
        one.labels.join(","),
        agents,
        if one.is_live() { format!("{silent} s ago") } else { format!("{silent} s ago, lost") },
    ]
}

fn agents(report: &Report) -> Result<(), Failure> {
    section("agents", report.agents.as_ref(), |agents| {
        if agents.is_empty() {
            return output::line("no agents");
        }
        let rows = agents.iter().map(|one| {
            [one.slug.clone(), one.revision.clone(), one.source.clone(), one.recorded_at.to_rfc3339()]
        });
        output::table(["AGENT", "REVISION", "SOURCE", "RECORDED"], rows)
    })
}

fn interrupted(report: &Report) -> Result<(), Failure> {
    section("what a deploy interrupts", report.steps.as_ref(), |steps| {
        if steps.is_empty() {
            return output::line("a deploy now interrupts nothing");
        }
        let sums = deploy(steps);
        output::line(format!(
            "cut off now, not drained: {} runs lose a tool call for good, {} run theirs again, {} ask a model again",
            sums.orphaned, sums.again, sums.asked
        ))?;
        let rows = steps.iter().take(10).map(|one| {
            let kind = match one.kind {
                StepKind::ToolOnce => "tool, never run twice",
                StepKind::ToolAgain => "tool, idempotent",
                StepKind::ModelRequest => "model request of agent",
            };
            [kind.to_owned(), one.name.clone(), one.runs.to_string(), format!("{} s", report.age(one.since))]
        });
        output::table(["UNDER WAY", "NAME", "RUNS", "OLDEST"], rows)
    })
}

fn failures(report: &Report) -> Result<(), Failure> {
    section("failed sessions", report.failures.as_ref(), |failures| {
        let since = failures.since.to_rfc3339_opts(chrono::SecondsFormat::Secs, true);
        let back =
            if failures.cut { format!("since {since}, no further back") } else { "in 24 h".to_owned() };
        if failures.failed.is_empty() {
            return output::line(format!("no session failed {back}"));
        }
        output::line(format!("sessions that failed {back}: {}", failures.failed.len()))?;
        let Causes { groups, poison } = causes(report, failures);
        let rows = groups.iter().map(|one| {
            [
                one.cause.to_owned(),
                one.agent.to_owned(),
                one.model.clone().unwrap_or_default(),
                one.sessions.to_string(),
                one.still.to_string(),
                format!("{} s ago", report.age(one.last_at)),
                one.last_session.to_string(),
            ]
        });
        output::table(["CAUSE", "AGENT", "MODEL", "FAILED", "STILL", "LAST", "SESSION"], rows)?;
        poison.iter().try_for_each(|(one, deaths)| {
            let (session, owner, agent) = (one.session, owner_name(&one.owner), &one.agent);
            let deaths = deaths.map_or_else(|| "its".to_owned(), |deaths| deaths.to_string());
            let then = if one.still { "" } else { ", and went on since" };
            output::line(format!("session {session} of {owner} ({agent}) crashed {deaths} workers{then}"))
        })
    })
}

fn deferred(report: &Report, deferred: &Deferred) -> Result<(), Failure> {
    let (open, overdue) = (counted(deferred.open), deferred.overdue);
    output::line(format!("deferred calls: {open} open, {overdue} past their deadline"))?;
    if deferred.groups.is_empty() {
        return Ok(());
    }
    let rows = deferred.groups.iter().map(|one| {
        [
            one.agent.clone(),
            one.tool.clone(),
            shortened(&one.reason),
            one.open.to_string(),
            one.overdue.to_string(),
            format!("{} s", report.age(one.oldest)),
        ]
    });
    output::table(["AGENT", "TOOL", "WAITS FOR", "OPEN", "OVERDUE", "OLDEST"], rows)?;
    let Some(oldest) = deferred.oldest.first() else { return Ok(()) };
    let (session, owner, age) = (oldest.session, owner_name(&oldest.owner), report.age(oldest.since));
    output::line(format!(
        "the oldest is {}'s, of session {session} of {owner}, open for {age} s",
        oldest.tool
    ))
}

/// A line of a text, not too long.
pub(super) fn shortened(text: &str) -> String {
    let line = text.lines().next().unwrap_or_default();
    if line.chars().count() <= REASON {
        return line.to_owned();
    }
    line.chars().take(REASON).chain(['…']).collect()
}

/// How far the feed across sessions is behind, and whom it waits for.
fn feed(report: &Report, feed: &FeedState) -> Result<(), Failure> {
    let more = if feed.held_back >= HELD_BACK_COUNTED { " or more" } else { "" };
    let (held, tenths) = (feed.held_back, feed.lag_micros / 100_000);
    let (lag, rest) = (tenths / 10, tenths % 10);
    output::line(format!("feed across sessions: {lag}.{rest} s behind, {held}{more} events held back"))?;
    let Some(writer) = &feed.oldest_writer else { return output::line("no writer has a transaction open") };
    let mut line =
        format!("oldest writer: {}", if writer.name.is_empty() { "unnamed" } else { &writer.name });
    if let Some(pid) = writer.pid {
        line.push_str(&format!(" pid {pid}"));
    }
    if let Some(database) = &writer.database {
        line.push_str(&format!(" database {database}"));
    }
    if let Some(since) = writer.since {
        line.push_str(&format!(" for {} s", report.age(since)));
    }
    if let Some(state) = &writer.state {
        line.push_str(&format!(", {state}"));
    }
    output::line(line)
}
