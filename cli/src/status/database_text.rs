//! The parts of the report that are about the database itself.

use holdfast_store::status::Database;

use super::{as_text::counted, report::Report};
use crate::{failure::Failure, output};

/// Tables that are shown.
const TABLES: usize = 8;

/// What the database says of itself.
pub(super) fn show(report: &Report, database: &Database) -> Result<(), Failure> {
    let of = &database.connections;
    output::line(format!(
        "database: {} of {} connections, {} of Holdfast's; {} busy, {} idle in a transaction, {} wait for locks{}",
        of.used,
        of.limit,
        of.holdfast,
        of.active,
        of.idle_in_transaction,
        of.waiting_for_locks,
        if of.standby { "; a standby" } else { "" },
    ))?;
    if !database.waits.is_empty() {
        let list: Vec<String> =
            database.waits.iter().map(|(wait, connections)| format!("{wait} {connections}")).collect();
        output::line(format!("busy with: {}", list.join(", ")))?;
    }
    if let Some(one) = database.transactions.first() {
        let state = one.state.as_deref().unwrap_or("state unknown");
        let age = report.age(one.since);
        output::line(format!("longest transaction: {} pid {}, {age} s, {state}", name(&one.name), one.pid))?;
    }
    if let Some(one) = &database.horizon {
        let who = one.pid.map(|pid| format!(" pid {pid}")).unwrap_or_default();
        let (kind, name, age) = (&one.kind, name(&one.name), one.age);
        output::line(format!("oldest snapshot: {kind} {name}{who}, {age} transactions ago"))?;
    }
    for one in &database.lock_waits {
        let pids: Vec<String> = one.blocked_by.iter().map(i32::to_string).collect();
        let age = one.since.map_or(0, |since| report.age(since));
        let (who, pid, what, by) = (name(&one.name), one.pid, &one.what, pids.join(", "));
        output::line(format!("{who} pid {pid} has waited {age} s for a lock on {what}, behind pid {by}"))?;
    }
    match &database.totals {
        None => output::line("size and counters: took too long")?,
        Some(totals) => {
            let looked = totals.hits + totals.reads;
            let hit = if looked > 0 { totals.hits.saturating_mul(1_000) / looked } else { 1_000 };
            output::line(format!(
                "size {}, cache hit {}.{} %, {} deadlocks, {} spilled to disk",
                bytes(totals.bytes),
                hit / 10,
                hit % 10,
                totals.deadlocks,
                bytes(totals.spilled_bytes)
            ))?;
        }
    }
    let Some(tables) = &database.tables else { return output::line("tables: took too long") };
    let rows = tables.iter().take(TABLES).map(|one| {
        let vacuumed =
            one.vacuumed_at.map_or_else(|| "never".to_owned(), |at| format!("{} s ago", report.age(at)));
        [one.name.clone(), bytes(one.bytes), one.live.to_string(), one.dead.to_string(), vacuumed]
    });
    output::table(["TABLE", "SIZE", "ROWS", "DEAD ROWS", "VACUUMED"], rows)
}

/// What may go.
pub(super) fn retention(report: &Report) -> Result<(), Failure> {
    output::line("")?;
    let of = &report.retention;
    match &of.rest {
        None => output::line("deleted sessions and archives: took too long")?,
        Some(rest) => {
            let since = rest
                .deleted_since
                .map(|at| format!(", the first for {} s", report.age(at)))
                .unwrap_or_default();
            output::line(format!(
                "deleted sessions whose rows wait to be removed: {}{since}",
                counted(rest.deleted)
            ))?;
            let (all, old, days) = (counted(rest.archives), counted(rest.old_archives), report.ages.archives);
            let mode =
                if report.forgets_archives { "" } else { "; none are ever deleted (--keep-archives-days)" };
            output::line(format!("archives: {all}, {old} older than {days} days{mode}"))?;
        }
    }
    match &of.closed {
        None => output::line("closed sessions: took too long")?,
        Some(closed) => {
            let (count, looked, days) = (closed.closed, closed.looked, report.ages.sessions);
            let mode = if report.retires { "" } else { "; none are retired (--retire-after-days)" };
            output::line(format!(
                "closed for over {days} days: {count} of the oldest {looked} sessions{mode}"
            ))?;
        }
    }
    if report.owner.is_some() {
        return Ok(());
    }
    let Some(events) = &of.events else { return output::line("old events: took too long") };
    output::line(format!(
        "partitions of events older than {} days: {}, {}",
        report.ages.events,
        events.partitions,
        bytes(events.bytes)
    ))
}

fn name(name: &str) -> &str {
    if name.is_empty() { "unnamed" } else { name }
}

/// A size for people.
pub(super) fn bytes(bytes: i64) -> String {
    let units = ["B", "kB", "MB", "GB", "TB"];
    let (mut tenths, mut unit) = (bytes.saturating_mul(10), 0);
    while tenths >= 10_240 && unit + 1 < units.len() {
        tenths /= 1_024;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{}.{} {}", tenths / 10, tenths % 10, units[unit]) }
}
