//! Nights on call: one on which nothing is wrong, and what can be.

use chrono::{DateTime, TimeDelta, Utc};
use holdfast_store::{
    agents::AgentRow,
    quota::Limits,
    status::{
        Ages, Closed, Connections, Counts, Database, Deferred, EndpointState, Failed, Failures, FeedState,
        Group, Held, Horizon, Leases, LockWait, OldEvents, OldestCall, OwnerLoad, Queue, Rest, Retention,
        Step, StepKind, Table, TakenOver, Totals, Transaction, Unserved, Waiting, Worker, Writer,
    },
};
use serde_json::json;
use uuid::Uuid;

use crate::status::{
    report::{Bounds, Report},
    verdict::Slug,
};

pub(super) fn at() -> DateTime<Utc> {
    DateTime::from_timestamp(1_800_000_000, 0).expect("a time")
}

pub(super) fn ago(seconds: i64) -> DateTime<Utc> {
    at() - TimeDelta::seconds(seconds)
}

pub(super) fn worker() -> Worker {
    Worker {
        id: Uuid::from_u128(1),
        host: "h".into(),
        slots: 8,
        held: 0,
        labels: vec![],
        agents: vec!["a@1".into()],
        started_at: ago(600),
        seen_at: ago(2),
        now: at(),
    }
}

pub(super) fn load(owner: &str, queued: i64) -> OwnerLoad {
    let (limits, bucket) = (Limits::default(), None);
    OwnerLoad { owner: owner.into(), queued, due: queued, held: 0, due_since: Some(ago(5)), limits, bucket }
}

pub(super) fn waiting(seconds: i64) -> Waiting {
    Waiting {
        session: Uuid::from_u128(7),
        agent: "a".into(),
        revision: "1".into(),
        current: Some("1".into()),
        since: ago(seconds),
        takeovers: 0,
        owner: load("o", 1),
    }
}

pub(super) fn failed(detail: &str, seconds: i64) -> Failed {
    Failed {
        session: Uuid::from_u128(9),
        owner: "o".into(),
        agent: "a".into(),
        at: ago(seconds),
        detail: detail.into(),
        still: true,
    }
}

pub(super) fn database() -> Database {
    Database {
        connections: Connections {
            limit: 100,
            reserved: 3,
            used: 20,
            holdfast: 10,
            active: 1,
            idle_in_transaction: 0,
            waiting_for_locks: 0,
            standby: false,
        },
        transactions: vec![Transaction {
            pid: 42,
            name: "psql".into(),
            database: None,
            state: Some("idle in transaction".into()),
            since: ago(30),
            wait_type: None,
            wait: None,
        }],
        horizon: Some(Horizon { kind: "slot".into(), name: "s".into(), pid: None, age: 5, since: None }),
        lock_waits: vec![],
        waits: vec![("IO:DataFileRead".into(), 1)],
        totals: Some(Totals {
            bytes: 5_000_000,
            hits: 99,
            reads: 1,
            deadlocks: 0,
            spilled_bytes: 0,
            counted_since: None,
        }),
        tables: Some(vec![Table { name: "runs".into(), live: 10, dead: 20, vacuumed_at: None, bytes: 8192 }]),
    }
}

/// A night on which nothing is wrong, although much is under way.
pub(super) fn calm() -> Report {
    Report {
        owner: None,
        bounds: Bounds { old_run: TimeDelta::seconds(60), long_transaction: TimeDelta::seconds(300) },
        ages: Ages { events: 7, sessions: 30, archives: 365 },
        retires: false,
        forgets_archives: false,
        counts: Some(Counts { claimed: 1, queued: 3, due: 2, parked: Some(3), late_timers: 0 }),
        queue: Some(Queue {
            queued: 3,
            owners: 2,
            largest: vec![load("o", 2), load("p", 1)],
            waiting: vec![waiting(5)],
        }),
        unserved: Some(vec![]),
        workers: Some(vec![worker()]),
        leases: Some(Leases { workers: vec![held(10)], taken_over: vec![], now: at() }),
        everybodys: None,
        steps: Some(vec![
            Step { kind: StepKind::ToolOnce, name: "bash_x".into(), runs: 2, since: ago(4) },
            Step { kind: StepKind::ModelRequest, name: "a".into(), runs: 3, since: ago(4) },
        ]),
        failures: Some(Failures {
            failed: vec![failed("the model gave no answer in 6 attempts; x", 9_000)],
            since: ago(86_400),
            cut: false,
        }),
        deferred: Some(Deferred { open: 4, overdue: 0, overdue_since: None, groups: vec![], oldest: vec![] }),
        agents: Some(vec![AgentRow {
            slug: "a".into(),
            revision: "1".into(),
            source: "file".into(),
            descriptor: json!({"model": "m-1", "systemPrompt": ["secret words"]}).to_string(),
            recorded_at: ago(600),
        }]),
        feed: Some(FeedState { held_back: 7, lag_micros: 2_500_000, oldest_writer: None }),
        database: Some(database()),
        webhooks: Some(vec![endpoint()]),
        retention: Retention {
            rest: Some(Rest {
                deleted: 2,
                deleted_since: Some(ago(30)),
                archives: 1,
                old_archives: 0,
                old_keys: 0,
            }),
            closed: Some(Closed { closed: 5, looked: 9 }),
            events: Some(OldEvents { partitions: 0, events: 0, bytes: 0, oldest: None }),
        },
        now: at(),
    }
}

pub(super) fn held(ends_in: i64) -> Held {
    let expired = i64::from(ends_in < 0);
    Held { worker: worker().id, held: 1, expired, soonest: ago(-ends_in), taken_over: 0 }
}

pub(super) fn endpoint() -> EndpointState {
    EndpointState {
        name: "server".into(),
        disabled_at: None,
        pending: 1,
        oldest: Some(ago(5)),
        dead: 0,
        unread_since: None,
        last_error: Some("status 503".into()),
    }
}

/// A slug, and what makes it.
pub(super) type Trouble = (Slug, Box<dyn Fn(&mut Report)>);

/// Each thing that can be wrong, and nothing else beside it.
pub(super) fn troubles() -> Vec<Trouble> {
    of_the_house().into_iter().chain(of_webhooks()).collect()
}

/// What can be wrong with all but webhooks.
fn of_the_house() -> Vec<Trouble> {
    fn trouble(slug: Slug, make: impl Fn(&mut Report) + 'static) -> Trouble {
        (slug, Box::new(make))
    }
    fn of_database(slug: Slug, make: impl Fn(&mut Database) + 'static) -> Trouble {
        trouble(slug, move |report| make(report.database.as_mut().expect("a database")))
    }
    fn fails(slug: Slug, detail: &'static str, times: usize) -> Trouble {
        trouble(slug, move |report| {
            report.failures.as_mut().expect("failures").failed = vec![failed(detail, 60); times];
        })
    }
    vec![
        trouble(Slug::NoWorker, |report| report.workers = Some(vec![])),
        trouble(Slug::AgentUnserved, |report| {
            report.unserved = Some(vec![Unserved { agent: "b@2".into(), runs: 2, since: ago(15) }]);
        }),
        trouble(Slug::QueueTooOld, |report| {
            report.queue.as_mut().expect("a queue").waiting = vec![waiting(61)]
        }),
        trouble(Slug::OwnerFloods, |report| {
            let queue = report.queue.as_mut().expect("a queue");
            (queue.queued, queue.largest) = (1_500, vec![load("o", 1_000)]);
        }),
        trouble(Slug::LeasesLost, |report| {
            report.leases.as_mut().expect("leases").workers = vec![held(-5)];
        }),
        trouble(Slug::LeasesLost, |report| {
            let gone = Worker { id: Uuid::from_u128(2), seen_at: ago(90), held: 3, ..worker() };
            report.workers = Some(vec![worker(), gone]);
        }),
        trouble(Slug::TakeoversRising, |report| {
            report.leases.as_mut().expect("leases").taken_over = vec![TakenOver {
                session: Uuid::from_u128(3),
                owner: "o".into(),
                agent: "a".into(),
                takeovers: 2,
                worker: worker().id,
                since: ago(60),
            }];
        }),
        fails(Slug::PoisonRuns, "poison", 1),
        fails(Slug::RunsBroken, "internal: illegal: x", 1),
        fails(Slug::ModelErrors, "the model gave no answer in 6 attempts; the last one: x", 3),
        fails(Slug::ModelErrors, "no API key \"x\" is configured on this worker", 1),
        trouble(Slug::DeferredCallOverdue, |report| {
            let deferred = report.deferred.as_mut().expect("deferred calls");
            (deferred.overdue, deferred.overdue_since) = (1, Some(ago(31)));
        }),
        trouble(Slug::SchedulerSilent, |report| report.counts.as_mut().expect("counts").late_timers = 1),
        trouble(Slug::SchedulerSilent, |report| {
            report.retention.rest.as_mut().expect("a rest").deleted_since = Some(ago(3_700));
        }),
        trouble(Slug::FeedLag, |report| {
            let writer = Writer {
                pid: Some(42),
                name: "psql".into(),
                database: Some("other".into()),
                state: Some("idle in transaction".into()),
                since: Some(ago(61)),
            };
            report.feed =
                Some(FeedState { held_back: 7, lag_micros: 61_000_000, oldest_writer: Some(writer) });
        }),
        of_database(Slug::ConnectionsShort, |database| database.connections.used = 90),
        of_database(Slug::LongTransaction, |database| database.transactions[0].since = ago(300)),
        of_database(Slug::LockWaits, |database| {
            database.lock_waits = vec![LockWait {
                pid: 5,
                name: "psql".into(),
                what: "runs".into(),
                mode: "AccessShareLock".into(),
                since: Some(ago(11)),
                blocked_by: vec![6],
            }];
        }),
        of_database(Slug::VacuumBehind, |database| {
            database.tables.as_mut().expect("tables")[0].dead = 100_000;
        }),
        trouble(Slug::RetentionBehind, |report| {
            report.retention.events = Some(OldEvents {
                partitions: 3,
                events: 1,
                bytes: 1,
                oldest: Some("events_20260101".into()),
            });
        }),
        trouble(Slug::StatusSlow, |report| report.steps = None),
    ]
}

/// What can be wrong with webhooks.
fn of_webhooks() -> Vec<Trouble> {
    let endpoints = [
        EndpointState { dead: 2, ..endpoint() },
        EndpointState { disabled_at: Some(ago(9)), ..endpoint() },
        EndpointState { oldest: Some(ago(600)), ..endpoint() },
        EndpointState { unread_since: Some(ago(600)), ..endpoint() },
    ];
    let trouble = |one: EndpointState| -> Trouble {
        (Slug::WebhooksUndelivered, Box::new(move |report| report.webhooks = Some(vec![one.clone()])))
    };
    endpoints.map(trouble).into()
}

/// A night on which all is wrong at once, so that every list has something in it.
pub(super) fn eventful() -> Report {
    let mut report = calm();
    for (_, make) in
        troubles().into_iter().filter(|(slug, _)| !matches!(slug, Slug::NoWorker | Slug::StatusSlow))
    {
        make(&mut report);
    }
    report.failures.as_mut().expect("failures").failed = vec![failed("poison", 60)];
    let stranger = Held { worker: Uuid::from_u128(99), ..held(10) };
    report.leases.as_mut().expect("leases").workers.push(stranger);
    let deferred = report.deferred.as_mut().expect("deferred calls");
    let (agent, tool, reason) = ("a".to_owned(), "t".to_owned(), "r".to_owned());
    deferred.groups = vec![Group {
        agent: agent.clone(),
        tool: tool.clone(),
        reason: reason.clone(),
        open: 1,
        overdue: 0,
        oldest: ago(9),
        next_deadline: None,
    }];
    deferred.oldest = vec![OldestCall {
        session: Uuid::from_u128(5),
        owner: "o".into(),
        agent,
        tool,
        reason,
        since: ago(9),
        expires_at: None,
    }];
    report
}
