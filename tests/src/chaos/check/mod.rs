//! What is promised, held against the database, the model's record, the tools' log and the streams.

mod calls;
mod events;
mod mail;
mod requests;
mod rows;

use std::collections::{BTreeMap, HashMap};

use anyhow::Result;
use tokio_postgres::Client as Postgres;
use uuid::Uuid;

use self::rows::{CallRow, Rows};
use super::{Followed, fleet::Fleet, stage, story::Story};

/// Broken promises that are told in full; the rest is counted.
const TOLD: usize = 40;

/// Counts the sessions of which nothing is left to be checked.
const PURGED: &str = "sessions gone";

/// What a check found.
#[derive(Debug, Default)]
pub(super) struct Report {
    seen: BTreeMap<&'static str, usize>,
    violations: Vec<String>,
    untold: usize,
}

impl Report {
    /// Notes that a promise is broken.
    pub(super) fn violation(&mut self, what: String) {
        if self.violations.len() < TOLD { self.violations.push(what) } else { self.untold += 1 }
    }

    /// Notes it unless `holds`.
    fn ensure(&mut self, holds: bool, what: impl FnOnce() -> String) {
        if !holds {
            self.violation(what());
        }
    }

    /// Counts what was there to be checked.
    pub(super) fn saw(&mut self, what: &'static str, count: usize) {
        *self.seen.entry(what).or_insert(0) += count;
    }

    /// What was seen, and the violations.
    pub(super) fn into_parts(mut self) -> (BTreeMap<&'static str, usize>, Vec<String>) {
        if self.untold > 0 {
            self.violations.push(format!("and {} more", self.untold));
        }
        (self.seen, self.violations)
    }
}

/// Checks everything. All sessions are at rest.
pub(super) async fn all(
    report: &mut Report,
    admin: &Postgres,
    fleet: &mut Fleet,
    stories: &[Story],
    followed: &[Followed],
) -> Result<()> {
    let (rest, calls) = sessions(report, admin, stories).await?;
    check_effects(report, &fleet.effects(), &calls);
    requests::check(report, &fleet.requests().await?);
    let left: i64 = admin.query_one("SELECT count(*) FROM runs", &[]).await?.try_get(0)?;
    report.ensure(left == 0, || format!("{left} runs are left although all sessions are at rest"));
    Box::pin(events::check_streams(report, fleet, &rest, followed)).await
}

type Checked = (HashMap<Uuid, Rows>, HashMap<Uuid, CallRow>);

/// Checks what the database has of each session. Returns those that weren't deleted, and the calls of all.
async fn sessions(report: &mut Report, admin: &Postgres, stories: &[Story]) -> Result<Checked> {
    let mut calls: HashMap<Uuid, CallRow> = HashMap::new();
    let mut rest: HashMap<Uuid, Rows> = HashMap::new();
    for story in stories {
        let before = report.violations.len() + report.untold;
        for odd in &story.odd {
            report.violation(format!("session {}: {odd}", story.id));
        }
        let Some(rows) = rows::read(admin, story.id).await? else {
            // Some time after its deletion the rows of a session go.
            report.ensure(story.deleted, || format!("session {} is gone", story.id));
            report.saw(PURGED, 1);
            continue;
        };
        calls.extend(rows.calls.iter().map(|call| (call.id, call.clone())));
        if story.deleted {
            report.saw("deleted sessions", 1);
            check_deleted(report, &rows);
            continue;
        }
        report.saw("sessions", 1);
        mail::check(report, story, &rows);
        calls::check(report, story, &rows);
        events::check(report, &rows);
        if report.violations.len() + report.untold > before {
            report.violation(format!("the story of {}: {}", story.id, rows.outline()));
        }
        rest.insert(story.id, rows);
    }
    Ok((rest, calls))
}

/// What faults would leave behind, each with the promise that it breaks.
const FAULTS: [(&str, &str); 9] = [
    ("I1", "UPDATE sessions SET mail_cursor = mail_cursor - 1 WHERE mail_cursor > 0"),
    ("I1", "DELETE FROM mail m WHERE seq = (SELECT max(seq) FROM mail WHERE session_id = m.session_id)"),
    (
        "I1",
        "INSERT INTO turns SELECT session_id, position + 1000, gen_random_uuid(), tag, format, body, version, at
         FROM turns WHERE position = 1",
    ),
    ("I2", "UPDATE sessions SET version = version + 1"),
    ("I2", "DELETE FROM turns t WHERE position = (SELECT max(position) FROM turns WHERE session_id = t.session_id)"),
    ("I3", "UPDATE tool_calls SET state = 'cancelled' WHERE state = 'completed'"),
    ("I3", "UPDATE tool_calls SET attempt = attempt + 1 WHERE attempt = 1"),
    ("I5", "UPDATE continuations SET state = 'expired', result_hash = NULL WHERE state = 'completed'"),
    ("I6", "DELETE FROM events WHERE kind = 'run.stopped'"),
];

/// Makes sure that the check isn't blind: it has to find faults that are made on purpose, each in a
/// transaction that is rolled back.
pub(super) async fn finds_faults(report: &mut Report, admin: &Postgres, stories: &[Story]) -> Result<()> {
    let few: Vec<Story> = stories.iter().filter(|story| !story.deleted).take(30).cloned().collect();
    for (promise, fault) in FAULTS {
        admin.batch_execute("BEGIN").await?;
        let changed = admin.execute(fault, &[]).await?;
        let mut found = Report::default();
        let checked = sessions(&mut found, admin, &few).await;
        admin.batch_execute("ROLLBACK").await?;
        checked?;
        let seen = found.violations.iter().any(|violation| violation.starts_with(promise));
        report.ensure(seen, || format!("the check misses {promise} in {changed} rows: {fault}"));
        report.saw("faults made and found", usize::from(seen));
    }
    Ok(())
}

/// A deleted session takes its tokens and its run along, and nothing comes after its end.
fn check_deleted(report: &mut Report, rows: &Rows) {
    let id = rows.id;
    report.ensure(rows.deleted, || format!("session {id}: its deletion was answered, but it is there"));
    report.ensure(rows.tokens.is_empty(), || format!("session {id}: deleted, but tokens are left"));
    let last = rows.events.last().map(|event| event.kind.as_str());
    report.ensure(last == Some("session.deleted"), || {
        format!("session {id}: deleted, but its last event is {last:?}")
    });
    let ends = rows.events.iter().filter(|event| event.kind == "session.deleted").count();
    report.ensure(ends == 1, || format!("session {id}: deleted {ends} times"));
}

/// I4: a call that nobody calls idempotent starts at most once, and others at most as often as they were
/// recorded to.
fn check_effects(report: &mut Report, effects: &BTreeMap<String, usize>, calls: &HashMap<Uuid, CallRow>) {
    for (key, &starts) in effects {
        let Some(call) = key.parse().ok().and_then(|id: Uuid| calls.get(&id)) else {
            // Calls go with their session.
            report.ensure(report.seen.contains_key(PURGED), || {
                format!("I4: {key:?} was started, but no such call is stored")
            });
            continue;
        };
        report.saw("starts of tools", starts);
        let attempts = usize::try_from(call.attempt).unwrap_or(0);
        let most = if call.idempotent { attempts } else { attempts.min(1) };
        report.ensure(starts <= most, || format!("I4: {starts} starts of {call:?}"));
        report.saw("calls started again", usize::from(starts > 1));
    }
    let local = calls.values().filter(|call| [stage::ONCE, stage::AGAIN].contains(&call.name.as_str()));
    for call in local {
        let started = effects.contains_key(&call.id.to_string());
        report.ensure(call.state != "completed" || started, || {
            format!("I4: completed without a start: {call:?}")
        });
        report.ensure(call.name != stage::ONCE || call.attempt <= 1, || {
            format!("I4: recorded as started twice: {call:?}")
        });
        let orphan = call.settled.as_deref().is_some_and(|settled| settled.contains("orphaned: "));
        report.saw("orphaned calls", usize::from(orphan));
    }
}
