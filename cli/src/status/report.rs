//! What one report reads, section by section.

use chrono::{DateTime, TimeDelta, Utc};
use holdfast_store::{
    Store, StoreError,
    agents::AgentRow,
    quota::{Limits, Usage},
    status::{
        self, Ages, Counts, Database, Deferred, EndpointState, Failures, FeedState, Held, Leases, Queue,
        Retention, Step, Unserved, Worker,
    },
};
use uuid::Uuid;

use crate::args::StatusArgs;

/// Days after which closed sessions are told of where none are retired.
const SESSIONS_SHOWN: i32 = 30;
/// Days after which archives are told of where all are kept.
const ARCHIVES_SHOWN: i32 = 365;

/// From when on something needs attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Bounds {
    /// A due run that nothing explains.
    pub(super) old_run: TimeDelta,
    /// An open transaction.
    pub(super) long_transaction: TimeDelta,
}

/// What was read. A section that took too long is `None`; what is told of an owner has no `feed`, no
/// `database` and no `webhooks`.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Report {
    /// The owner that is told of, with its limits and what it uses.
    pub(super) owner: Option<(String, Option<(Limits, Usage)>)>,
    pub(super) bounds: Bounds,
    pub(super) ages: Ages,
    pub(super) retires: bool,
    pub(super) forgets_archives: bool,
    pub(super) counts: Option<Counts>,
    pub(super) queue: Option<Queue>,
    pub(super) unserved: Option<Vec<Unserved>>,
    pub(super) workers: Option<Vec<Worker>>,
    pub(super) leases: Option<Leases>,
    /// Where only an owner's leases are told of, those of all: what is left of workers' slots.
    pub(super) everybodys: Option<Leases>,
    pub(super) steps: Option<Vec<Step>>,
    pub(super) failures: Option<Failures>,
    pub(super) deferred: Option<Deferred>,
    pub(super) agents: Option<Vec<AgentRow>>,
    pub(super) feed: Option<FeedState>,
    pub(super) database: Option<Database>,
    pub(super) webhooks: Option<Vec<EndpointState>>,
    pub(super) retention: Retention,
    /// The database's time, where it told it.
    pub(super) now: DateTime<Utc>,
}

/// Reads one section after the other, so that a report is one more connection and never a crowd of them.
pub(super) async fn read(store: &Store, args: &StatusArgs) -> Result<Report, StoreError> {
    let owner = args.owner.as_deref();
    let of_all = owner.is_none();
    let ages = Ages {
        events: args.keep_events_days,
        sessions: if args.retire_after_days > 0 { args.retire_after_days } else { SESSIONS_SHOWN },
        archives: if args.keep_archives_days > 0 { args.keep_archives_days } else { ARCHIVES_SHOWN },
    };
    let leases = status::leases(store, owner).await?;
    let everybodys = if of_all { None } else { status::leases(store, None).await? };
    Ok(Report {
        owner: match owner {
            Some(name) => Some((name.to_owned(), status::owner(store, name).await?)),
            None => None,
        },
        bounds: Bounds {
            old_run: TimeDelta::seconds(args.old_run),
            long_transaction: TimeDelta::seconds(args.long_transaction),
        },
        ages,
        retires: args.retire_after_days > 0,
        forgets_archives: args.keep_archives_days > 0,
        counts: status::counts(store, owner).await?,
        queue: status::queue(store, owner).await?,
        unserved: status::unserved(store, owner).await?,
        workers: status::workers(store).await?,
        now: leases.as_ref().map_or_else(Utc::now, |leases| leases.now),
        leases,
        everybodys,
        steps: status::steps(store, owner).await?,
        failures: status::failures(store, owner).await?,
        deferred: status::deferred(store, owner).await?,
        agents: status::agents(store).await?,
        feed: if of_all { status::feed_within(store).await? } else { None },
        database: if of_all { status::database(store).await? } else { None },
        webhooks: if of_all { status::webhooks(store).await? } else { None },
        retention: status::retention(store, owner, ages).await?,
    })
}

impl Report {
    /// Seconds from a time until this reading, not less than 0.
    pub(super) fn age(&self, since: DateTime<Utc>) -> i64 {
        self.now.signed_duration_since(since).num_seconds().max(0)
    }

    /// What each worker holds, whoever owns it.
    pub(super) fn held(&self) -> &[Held] {
        self.everybodys.as_ref().or(self.leases.as_ref()).map_or(&[], |leases| &leases.workers)
    }

    /// The leases of a worker.
    pub(super) fn held_by(&self, worker: Uuid) -> Option<&Held> {
        self.leases.as_ref()?.workers.iter().find(|held| held.worker == worker)
    }

    /// The sections that took too long, by their names in the JSON report.
    pub(super) fn too_slow(&self) -> Vec<&'static str> {
        let of_all = self.owner.is_none();
        let parked = self.counts.as_ref().is_some_and(|counts| counts.parked.is_none());
        let (totals, tables) = self
            .database
            .as_ref()
            .map_or((false, false), |database| (database.totals.is_none(), database.tables.is_none()));
        let sections = [
            ("owner", self.owner.as_ref().is_some_and(|(_, read)| read.is_none())),
            ("agents", self.agents.is_none()),
            ("runs", self.counts.is_none()),
            ("runs.parked", parked),
            ("queue", self.queue.is_none()),
            ("unserved", self.unserved.is_none()),
            ("workers", self.workers.is_none()),
            ("leases", self.leases.is_none()),
            ("deploy", self.steps.is_none()),
            ("failures", self.failures.is_none()),
            ("deferred", self.deferred.is_none()),
            ("feed", of_all && self.feed.is_none()),
            ("database", of_all && self.database.is_none()),
            ("webhooks", of_all && self.webhooks.is_none()),
            ("database.totals", totals),
            ("database.tables", tables),
            ("retention", self.retention.rest.is_none()),
            ("retention.sessions", self.retention.closed.is_none()),
            ("retention.events", self.retention.events.is_none()),
        ];
        sections.into_iter().filter(|(_, slow)| *slow).map(|(name, _)| name).collect()
    }
}

/// The name of an owner for people.
pub(super) fn owner_name(owner: &str) -> &str {
    if owner.is_empty() { "(without a name)" } else { owner }
}
