//! Numbers that both forms of the report tell.

use chrono::{DateTime, Utc};
use holdfast_store::status::{Failed, Failures, Step, StepKind};
use holdfast_worker::cause::{cause, deaths};
use uuid::Uuid;

use super::report::Report;

/// How many causes are told of.
const CAUSES: usize = 10;
/// How many sessions that ended as poison are told of.
const POISON: usize = 10;

/// Sessions of an agent that failed for the same cause.
pub(super) struct CauseGroup<'a> {
    pub(super) cause: &'static str,
    pub(super) agent: &'a str,
    pub(super) model: Option<String>,
    pub(super) sessions: usize,
    pub(super) still: usize,
    pub(super) last_at: DateTime<Utc>,
    pub(super) last_session: Uuid,
}

/// Failures by cause, and those that crashed their workers.
pub(super) struct Causes<'a> {
    /// The most frequent first.
    pub(super) groups: Vec<CauseGroup<'a>>,
    /// Sessions that ended as poison with the workers that died over each, the newest first.
    pub(super) poison: Vec<(&'a Failed, Option<i32>)>,
}

/// Groups failures, which come newest first.
pub(super) fn causes<'a>(report: &Report, failures: &'a Failures) -> Causes<'a> {
    let mut groups: Vec<CauseGroup<'a>> = Vec::new();
    for one in &failures.failed {
        let cause = cause(&one.detail);
        let still = usize::from(one.still);
        match groups.iter_mut().find(|group| group.cause == cause && group.agent == one.agent) {
            Some(group) => {
                group.sessions += 1;
                group.still += still;
            }
            None => groups.push(CauseGroup {
                cause,
                agent: &one.agent,
                model: model(report, &one.agent),
                sessions: 1,
                still,
                last_at: one.at,
                last_session: one.session,
            }),
        }
    }
    groups.sort_by_key(|group| std::cmp::Reverse(group.sessions));
    groups.truncate(CAUSES);
    let poison = failures.failed.iter().filter(|one| cause(&one.detail) == "poison");
    let poison = poison.map(|one| (one, deaths(&one.detail))).take(POISON).collect();
    Causes { groups, poison }
}

/// The model that an agent's current revision names.
fn model(report: &Report, agent: &str) -> Option<String> {
    let row = report.agents.iter().flatten().find(|row| row.slug == agent)?;
    let descriptor: serde_json::Value = serde_json::from_str(&row.descriptor).ok()?;
    descriptor["model"].as_str().map(str::to_owned)
}

/// Runs that a deploy would cut off if they weren't drained.
pub(super) struct Deploy {
    /// Whose tool would never run again.
    pub(super) orphaned: i64,
    /// Whose tool would run again.
    pub(super) again: i64,
    /// Whose model would be asked, and paid, again.
    pub(super) asked: i64,
}

/// Counts runs by what they are doing; one with calls of several tools counts for each.
pub(super) fn deploy(steps: &[Step]) -> Deploy {
    let of = |kind| steps.iter().filter(|step| step.kind == kind).map(|step| step.runs).sum();
    Deploy {
        orphaned: of(StepKind::ToolOnce),
        again: of(StepKind::ToolAgain),
        asked: of(StepKind::ModelRequest),
    }
}
