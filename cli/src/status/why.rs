//! Why a due run waits, from what workers and limits say.

use holdfast_store::{
    quota::Limits,
    status::{Held, Waiting, Worker},
};

/// Why nobody has taken a due run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Why {
    /// No worker was heard of within a minute.
    NoWorker,
    /// None of them has the agent.
    AgentUnserved(String),
    /// Its owner has as many runs under way as it may.
    OwnerRunning { limit: i32, held: i64 },
    /// Its owner has started as many runs as its rate allows.
    OwnerRate { per_minute: i32 },
    /// All slots of the workers that have the agent are taken.
    NoFreeSlot { workers: usize, slots: i64 },
    /// Nothing in the database hinders it.
    Nothing,
}

impl Why {
    /// Its stable name.
    pub(super) fn code(&self) -> &'static str {
        match self {
            Self::NoWorker => "no_worker",
            Self::AgentUnserved(_) => "agent_unserved",
            Self::OwnerRunning { .. } => "owner_max_running",
            Self::OwnerRate { .. } => "owner_runs_per_minute",
            Self::NoFreeSlot { .. } => "no_free_slot",
            Self::Nothing => "nothing",
        }
    }

    /// For people.
    pub(super) fn text(&self) -> String {
        match self {
            Self::NoWorker => "no worker is alive".to_owned(),
            Self::AgentUnserved(agent) => format!("no worker has {agent}"),
            Self::OwnerRunning { limit, held } => {
                format!("its owner has {held} runs under way and may have {limit} (max_running)")
            }
            Self::OwnerRate { per_minute } => {
                format!("its owner has used up its {per_minute} runs a minute (runs_per_minute)")
            }
            Self::NoFreeSlot { workers, slots } => {
                format!("all {slots} slots of the {workers} workers that have its agent are taken")
            }
            Self::Nothing => "nothing hinders it; a worker takes it at its next look".to_owned(),
        }
    }

    /// Whether the owner's limits do what they are for.
    pub(super) fn is_limit(&self) -> bool {
        matches!(self, Self::OwnerRunning { .. } | Self::OwnerRate { .. })
    }
}

/// What an owner may and has.
pub(super) struct Share<'a> {
    pub(super) limits: &'a Limits,
    pub(super) bucket: Option<f64>,
    pub(super) held: i64,
}

/// Why a due run that asks for an agent waits.
pub(super) fn why(
    agent: (&str, &str, Option<&str>),
    share: &Share<'_>,
    workers: &[Worker],
    leases: &[Held],
) -> Why {
    let (slug, revision, current) = agent;
    let live: Vec<&Worker> = workers.iter().filter(|worker| worker.is_live()).collect();
    if live.is_empty() {
        return Why::NoWorker;
    }
    let serving: Vec<&Worker> =
        live.into_iter().filter(|worker| worker.serves(slug, revision, current)).collect();
    if serving.is_empty() {
        return Why::AgentUnserved(format!("{slug}@{revision}"));
    }
    if let Some(limit) = share.limits.max_running.filter(|limit| share.held >= i64::from(*limit)) {
        return Why::OwnerRunning { limit, held: share.held };
    }
    if let Some(per_minute) = share.limits.runs_per_minute
        && share.bucket.is_none_or(|bucket| bucket < 1.0)
    {
        return Why::OwnerRate { per_minute };
    }
    // What a worker said of itself is up to five seconds old; its leases aren't.
    let held = |worker: &Worker| {
        leases.iter().find(|held| held.worker == worker.id).map_or(i64::from(worker.held), |held| held.held)
    };
    let free: i64 = serving.iter().map(|worker| (i64::from(worker.slots) - held(worker)).max(0)).sum();
    if free == 0 {
        let slots = serving.iter().map(|worker| i64::from(worker.slots)).sum();
        return Why::NoFreeSlot { workers: serving.len(), slots };
    }
    Why::Nothing
}

/// Why the oldest due run of an owner waits.
pub(super) fn of_waiting(one: &Waiting, workers: &[Worker], leases: &[Held]) -> Why {
    let share = Share { limits: &one.owner.limits, bucket: one.owner.bucket, held: one.owner.held };
    why((&one.agent, &one.revision, one.current.as_deref()), &share, workers, leases)
}
