//! `holdfast status`: what the database knows of the queue and of those who work on it.

use chrono::Utc;
use holdfast_store::{
    Store, StoreError,
    agents::{self, AgentRow},
    sessions::{self, Census},
    status::{self, FeedState, HELD_BACK_COUNTED},
    workers::{self, WorkerRow},
};
use serde_json::{Value, json};

use crate::{
    args::StatusArgs,
    failure::{Failure, chain},
    node::{Database, store},
    output,
};

/// After how many seconds of silence a worker counts as lost.
const SILENT: i64 = 60;

struct Report {
    census: Census,
    workers: Vec<WorkerRow>,
    unserved: Vec<(String, i64)>,
    agents: Vec<AgentRow>,
    feed: FeedState,
}

/// Prints the report.
pub(crate) async fn run(args: StatusArgs) -> Result<(), Failure> {
    let database = Database::existing(&args.database).await?;
    let done = match store(&database, "status", true).await {
        Ok(store) => {
            let report = read(&store).await.map_err(|error| Failure::Failed(chain(&error)));
            store.db().close().await;
            report.and_then(|report| if args.json { output::json(&as_json(&report)) } else { show(&report) })
        }
        Err(failure) => Err(failure),
    };
    database.close().await;
    done
}

async fn read(store: &Store) -> Result<Report, StoreError> {
    Ok(Report {
        census: sessions::census(store).await?,
        workers: workers::list(store).await?,
        unserved: workers::unserved(store).await?,
        agents: agents::list(store).await?,
        feed: status::feed(store).await?,
    })
}

fn as_json(report: &Report) -> Value {
    let Census { claimed, queued, parked, open_continuations, oldest_due_micros } = report.census;
    let workers = report.workers.iter().map(|one| {
        json!({
            "id": one.id, "host": one.host, "slots": one.slots, "held": one.held, "labels": one.labels,
            "agents": one.agents, "started_at": one.started_at, "seen_at": one.seen_at,
            "silent_seconds": silence(one),
        })
    });
    let agents = report.agents.iter().map(|one| {
        json!({"slug": one.slug, "revision": one.revision, "source": one.source, "recorded_at": one.recorded_at})
    });
    json!({
        "runs": {"claimed": claimed, "queued": queued, "parked": parked},
        "open_deferred_calls": open_continuations,
        "oldest_due_seconds": seconds(oldest_due_micros),
        "workers": workers.collect::<Vec<_>>(),
        "agents": agents.collect::<Vec<_>>(),
        "unserved": report.unserved.iter()
            .map(|(agent, runs)| json!({"agent": agent, "runs": runs})).collect::<Vec<_>>(),
        "feed": {
            "lag_seconds": seconds(report.feed.lag_micros),
            "events_held_back": report.feed.held_back,
            "oldest_writer": report.feed.oldest_writer.as_ref().map(|one| json!({
                "pid": one.pid, "name": one.name, "database": one.database, "state": one.state, "since": one.since,
            })),
        },
    })
}

/// How far the feed across sessions is behind, and whom it waits for.
fn show_feed(feed: &FeedState) -> Result<(), Failure> {
    let more = if feed.held_back >= HELD_BACK_COUNTED { " or more" } else { "" };
    let (held, lag) = (feed.held_back, seconds(feed.lag_micros));
    output::line(format!("feed across sessions: {lag:.1} s behind, {held}{more} events held back"))?;
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
        let age = (Utc::now() - since).num_seconds().max(0);
        line.push_str(&format!(" for {age} s"));
    }
    if let Some(state) = &writer.state {
        line.push_str(&format!(", {state}"));
    }
    output::line(line)
}

fn show(report: &Report) -> Result<(), Failure> {
    let Census { claimed, queued, parked, open_continuations, oldest_due_micros } = report.census;
    output::table(
        ["RUNS HELD", "QUEUED", "PARKED", "OPEN CALLS", "OLDEST DUE"],
        [[
            claimed.to_string(),
            queued.to_string(),
            parked.to_string(),
            open_continuations.to_string(),
            format!("{:.1} s", seconds(oldest_due_micros)),
        ]],
    )?;
    output::line("")?;
    if report.workers.is_empty() {
        output::line("no workers")?;
    } else {
        let rows = report.workers.iter().map(|one| {
            let silent = silence(one);
            let seen =
                if silent > SILENT { format!("{silent} s ago, lost?") } else { format!("{silent} s ago") };
            [
                one.id.to_string(),
                one.host.clone(),
                format!("{}/{}", one.held, one.slots),
                one.labels.join(","),
                one.agents.join(" "),
                seen,
            ]
        });
        output::table(["WORKER", "HOST", "HELD", "LABELS", "AGENTS", "SEEN"], rows)?;
    }
    output::line("")?;
    if report.agents.is_empty() {
        output::line("no agents")?;
    } else {
        let rows = report.agents.iter().map(|one| {
            [one.slug.clone(), one.revision.clone(), one.source.clone(), one.recorded_at.to_rfc3339()]
        });
        output::table(["AGENT", "REVISION", "SOURCE", "RECORDED"], rows)?;
    }
    for (agent, runs) in &report.unserved {
        output::line(format!("no worker has {agent}, which {runs} runs ask for"))?;
    }
    output::line("")?;
    show_feed(&report.feed)
}

fn silence(worker: &WorkerRow) -> i64 {
    (Utc::now() - worker.seen_at).num_seconds().max(0)
}

#[expect(clippy::cast_precision_loss, reason = "a duration for people, in whole microseconds below 2^53")]
fn seconds(micros: i64) -> f64 {
    micros as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_names_what_needs_attention() {
        let report = Report {
            census: Census {
                claimed: 1,
                queued: 2,
                parked: 3,
                open_continuations: 4,
                oldest_due_micros: 1_500_000,
            },
            workers: vec![WorkerRow {
                id: uuid::Uuid::nil(),
                host: "h".into(),
                slots: 8,
                held: 1,
                labels: vec![],
                agents: vec!["a@1".into()],
                started_at: Utc::now(),
                seen_at: Utc::now() - chrono::TimeDelta::seconds(90),
            }],
            unserved: vec![("b@2".into(), 2)],
            agents: vec![],
            feed: FeedState {
                held_back: 7,
                lag_micros: 2_500_000,
                oldest_writer: Some(status::Writer {
                    pid: Some(42),
                    name: "psql".into(),
                    database: Some("other".into()),
                    state: Some("idle in transaction".into()),
                    since: None,
                }),
            },
        };
        let value = as_json(&report);
        assert_eq!(value["runs"], json!({"claimed": 1, "queued": 2, "parked": 3}));
        assert_eq!(value["open_deferred_calls"], 4);
        assert_eq!(value["oldest_due_seconds"], 1.5);
        assert!(value["workers"][0]["silent_seconds"].as_i64() >= Some(90));
        assert_eq!(value["unserved"], json!([{"agent": "b@2", "runs": 2}]));
        assert_eq!(value["feed"]["lag_seconds"], 2.5);
        assert_eq!(value["feed"]["events_held_back"], 7);
        assert_eq!(value["feed"]["oldest_writer"]["pid"], 42);
        assert_eq!(value["feed"]["oldest_writer"]["state"], "idle in transaction");
        assert_eq!(show(&report), Ok(()));
    }
}
