//! The report as JSON: field names are stable, docs/operating/status.md has them.

use chrono::{DateTime, Utc};
use holdfast_store::{
    quota::Limits,
    status::{
        self, Database, Deferred, FeedState, HELD_BACK_COUNTED, Leases, OwnerLoad, Queue, SECTION_LIMIT,
        Step, StepKind, Worker,
    },
};
use serde_json::{Value, json};

use super::{
    report::Report,
    summary::{Causes, Deploy, causes, deploy},
    verdict::Finding,
    webhooks,
    why::of_waiting,
};

/// Workers that hold leases and aren't registered that are listed.
const STRANGERS: usize = 100;

/// The whole report.
pub(super) fn report(report: &Report, findings: &[Finding]) -> Value {
    let list = findings.iter().map(|one| json!({"slug": one.slug.word(), "text": one.text}));
    let mut value = json!({
        "verdict": {"ok": findings.is_empty(), "findings": list.collect::<Vec<_>>()},
        "at": report.now,
        "took_too_long": report.too_slow(),
        "counted_to": status::COUNTED,
        "section_seconds": SECTION_LIMIT.as_secs(),
        "runs": runs(report),
        "open_deferred_calls": report.deferred.as_ref().map(|deferred| deferred.open),
        "oldest_due_seconds": report.queue.as_ref().map(|queue| oldest_due(report, queue)),
        "queue": report.queue.as_ref().map(|queue| self::queue(report, queue)),
        "unserved": report.unserved.as_ref().map(|list| list.iter().map(|one| json!({
            "agent": one.agent, "runs": one.runs, "since": one.since, "seconds": report.age(one.since),
        })).collect::<Vec<_>>()),
        "workers": report.workers.as_ref()
            .map(|list| list.iter().map(|one| worker(report, one)).collect::<Vec<_>>()),
        "agents": report.agents.as_ref().map(|list| list.iter().map(|one| json!({
            "slug": one.slug, "revision": one.revision, "source": one.source, "recorded_at": one.recorded_at,
        })).collect::<Vec<_>>()),
        "leases": report.leases.as_ref().map(|leases| self::leases(report, leases)),
        "failures": failures(report),
        "deferred": report.deferred.as_ref().map(|deferred| self::deferred(report, deferred)),
        "deploy": report.steps.as_ref().map(|steps| interrupted(report, steps)),
        "retention": retention(report),
    });
    if let Some((name, read)) = &report.owner {
        value["owner"] = json!({
            "name": name, "limits": read.as_ref().map(|(limits, _)| self::limits(limits)),
            "running": read.as_ref().map(|(_, usage)| usage.running),
            "queued": read.as_ref().map(|(_, usage)| usage.queued),
        });
    } else {
        value["feed"] = json!(report.feed.as_ref().map(feed));
        value["webhooks"] = json!(report.webhooks.as_deref().map(webhooks::as_json));
        value["database"] = json!(report.database.as_ref().map(|database| self::database(report, database)));
    }
    value
}

fn runs(report: &Report) -> Value {
    let Some(counts) = &report.counts else { return Value::Null };
    json!({
        "claimed": counts.claimed, "queued": counts.queued, "parked": counts.parked, "due": counts.due,
        "put_off": counts.queued - counts.due, "late_timers": counts.late_timers,
    })
}

#[expect(clippy::cast_precision_loss, reason = "a duration for people, in whole milliseconds below 2^53")]
fn oldest_due(report: &Report, queue: &Queue) -> f64 {
    let ages = queue.waiting.iter().map(|one| (report.now - one.since).num_milliseconds());
    ages.max().unwrap_or(0).max(0) as f64 / 1e3
}

/// Limits of an owner.
pub(super) fn limits(limits: &Limits) -> Value {
    json!({
        "max_running": limits.max_running, "runs_per_minute": limits.runs_per_minute,
        "max_queued": limits.max_queued,
    })
}

#[expect(clippy::cast_precision_loss, reason = "a share for people, of numbers far below 2^53")]
fn owner(queue: &Queue, one: &OwnerLoad) -> Value {
    json!({
        "owner": one.owner, "queued": one.queued, "due": one.due, "held": one.held, "due_since": one.due_since,
        "share": one.queued as f64 / queue.queued.max(1) as f64, "limits": limits(&one.limits),
    })
}

fn queue(report: &Report, queue: &Queue) -> Value {
    let workers = report.workers.as_deref();
    let leases = report.held();
    let waiting = queue.waiting.iter().map(|one| {
        let why = workers.map(|workers| of_waiting(one, workers, leases));
        json!({
            "session_id": one.session, "owner": one.owner.owner, "agent": format!("{}@{}", one.agent, one.revision),
            "since": one.since, "seconds": report.age(one.since), "takeovers": one.takeovers,
            "why": why.as_ref().map(|why| why.code()), "why_text": why.as_ref().map(|why| why.text()),
        })
    });
    json!({
        "owners": queue.owners,
        "largest": queue.largest.iter().map(|one| owner(queue, one)).collect::<Vec<_>>(),
        "waiting": waiting.collect::<Vec<_>>(),
    })
}

fn worker(report: &Report, one: &Worker) -> Value {
    let held = report.held_by(one.id);
    json!({
        "id": one.id, "host": one.host, "slots": one.slots, "held": one.held, "labels": one.labels,
        "agents": one.agents, "started_at": one.started_at, "seen_at": one.seen_at,
        "silent_seconds": one.silence().num_seconds(), "live": one.is_live(),
        "leases": held.map_or(0, |held| held.held), "expired_leases": held.map_or(0, |held| held.expired),
        "taken_over": held.map_or(0, |held| held.taken_over),
    })
}

fn leases(report: &Report, leases: &Leases) -> Value {
    let total = |of: fn(&status::Held) -> i64| leases.workers.iter().map(of).sum::<i64>();
    let known = |id| report.workers.iter().flatten().any(|worker| worker.id == id);
    let strangers = leases.workers.iter().filter(|held| !known(held.worker)).take(STRANGERS);
    json!({
        "held": total(|held| held.held),
        "expired": total(|held| held.expired),
        "soonest_expiry": leases.workers.iter().map(|held| held.soonest).min(),
        "of_unregistered_workers": strangers.map(|held| json!({
            "worker": held.worker, "held": held.held, "expired": held.expired, "soonest_expiry": held.soonest,
        })).collect::<Vec<_>>(),
        "taken_over": leases.taken_over.iter().map(|one| json!({
            "session_id": one.session, "owner": one.owner, "agent": one.agent, "takeovers": one.takeovers,
            "worker": one.worker, "since": one.since,
        })).collect::<Vec<_>>(),
    })
}

fn failures(report: &Report) -> Value {
    let Some(failures) = &report.failures else { return Value::Null };
    let Causes { groups, poison } = causes(report, failures);
    json!({
        "since": failures.since, "complete": !failures.cut, "sessions": failures.failed.len(),
        "by_cause": groups.iter().map(|one| json!({
            "cause": one.cause, "agent": one.agent, "model": one.model, "sessions": one.sessions,
            "still_failed": one.still, "last_at": one.last_at, "last_session_id": one.last_session,
        })).collect::<Vec<_>>(),
        "poison": poison.iter().map(|(one, deaths)| json!({
            "session_id": one.session, "owner": one.owner, "agent": one.agent, "at": one.at, "takeovers": deaths,
            "still_failed": one.still,
        })).collect::<Vec<_>>(),
    })
}

fn deferred(report: &Report, deferred: &Deferred) -> Value {
    json!({
        "open": deferred.open, "overdue": deferred.overdue, "overdue_since": deferred.overdue_since,
        "groups": deferred.groups.iter().map(|one| json!({
            "agent": one.agent, "tool": one.tool, "reason": one.reason, "open": one.open, "overdue": one.overdue,
            "oldest": one.oldest, "seconds": report.age(one.oldest), "next_deadline": one.next_deadline,
        })).collect::<Vec<_>>(),
        "oldest": deferred.oldest.iter().map(|one| json!({
            "session_id": one.session, "owner": one.owner, "agent": one.agent, "tool": one.tool, "reason": one.reason,
            "since": one.since, "seconds": report.age(one.since), "expires_at": one.expires_at,
        })).collect::<Vec<_>>(),
    })
}

/// The stable name of what a run is doing.
pub(super) fn kind(kind: StepKind) -> &'static str {
    match kind {
        StepKind::ToolOnce => "tool_once",
        StepKind::ToolAgain => "tool_again",
        StepKind::ModelRequest => "model_request",
    }
}

fn interrupted(report: &Report, steps: &[Step]) -> Value {
    let Deploy { orphaned, again, asked } = deploy(steps);
    json!({
        "tool_once": orphaned, "tool_again": again, "model_request": asked,
        "steps": steps.iter().map(|one| json!({
            "kind": kind(one.kind), "name": one.name, "runs": one.runs, "since": one.since,
            "seconds": report.age(one.since),
        })).collect::<Vec<_>>(),
    })
}

#[expect(clippy::cast_precision_loss, reason = "a duration for people, in whole microseconds below 2^53")]
fn feed(feed: &FeedState) -> Value {
    json!({
        "lag_seconds": feed.lag_micros as f64 / 1e6,
        "events_held_back": feed.held_back,
        "counted_to": HELD_BACK_COUNTED,
        "oldest_writer": feed.oldest_writer.as_ref().map(|one| json!({
            "pid": one.pid, "name": one.name, "database": one.database, "state": one.state, "since": one.since,
        })),
    })
}

fn since(report: &Report, since: Option<DateTime<Utc>>) -> Value {
    since.map_or(Value::Null, |since| json!(report.age(since)))
}

#[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
fn database(report: &Report, database: &Database) -> Value {
    let of = &database.connections;
    json!({
        "connections": {
            "used": of.used, "limit": of.limit, "reserved": of.reserved, "holdfast": of.holdfast, "active": of.active,
            "idle_in_transaction": of.idle_in_transaction, "waiting_for_locks": of.waiting_for_locks,
        },
        "standby": of.standby,
        "longest_transactions": database.transactions.iter().map(|one| json!({
            "pid": one.pid, "name": one.name, "database": one.database, "state": one.state, "since": one.since,
            "seconds": report.age(one.since), "wait": one.wait,
        })).collect::<Vec<_>>(),
        "oldest_snapshot": database.horizon.as_ref().map(|one| json!({
            "kind": one.kind, "name": one.name, "pid": one.pid, "transactions_since": one.age, "since": one.since,
            "seconds": since(report, one.since),
        })),
        "lock_waits": database.lock_waits.iter().map(|one| json!({
            "pid": one.pid, "name": one.name, "what": one.what, "mode": one.mode, "since": one.since,
            "seconds": since(report, one.since), "blocked_by": one.blocked_by,
        })).collect::<Vec<_>>(),
        "busy_with": database.waits.iter()
            .map(|(wait, connections)| json!({"wait": wait, "connections": connections})).collect::<Vec<_>>(),
        "cache_hit": database.totals.as_ref().filter(|one| one.hits + one.reads > 0)
            .map(|one| one.hits as f64 / (one.hits + one.reads) as f64),
        "deadlocks": database.totals.as_ref().map(|one| one.deadlocks),
        "spilled_bytes": database.totals.as_ref().map(|one| one.spilled_bytes),
        "counted_since": database.totals.as_ref().and_then(|one| one.counted_since),
        "bytes": database.totals.as_ref().map(|one| one.bytes),
        "tables": database.tables.as_ref().map(|tables| tables.iter().map(|one| json!({
            "name": one.name, "live_rows": one.live, "dead_rows": one.dead, "vacuumed_at": one.vacuumed_at,
            "bytes": one.bytes,
        })).collect::<Vec<_>>()),
    })
}

fn retention(report: &Report) -> Value {
    let of = &report.retention;
    let (ages, rest) = (report.ages, of.rest.as_ref());
    let mut value = json!({
        "deleted_sessions": rest.map(|rest| rest.deleted),
        "deleted_since": rest.and_then(|rest| rest.deleted_since),
        "closed_sessions": of.closed.map(|closed| json!({
            "older_than_days": ages.sessions, "retired": report.retires, "count": closed.closed,
            "looked_at": closed.looked,
        })),
        "archives": rest.map(|rest| json!({
            "count": rest.archives, "older_than_days": ages.archives, "forgotten": report.forgets_archives,
            "old": rest.old_archives,
        })),
    });
    if report.owner.is_none() {
        value["idempotency_keys"] = json!(rest.map(|rest| rest.old_keys));
        value["events"] = json!(of.events.as_ref().map(|events| json!({
            "older_than_days": ages.events, "partitions": events.partitions, "events": events.events,
            "bytes": events.bytes, "oldest": events.oldest,
        })));
    }
    value
}
