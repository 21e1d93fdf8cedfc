//! `holdfast status`: what the database knows of the queue and of those who work on it.

use chrono::Utc;
use holdfast_store::{
    Store, StoreError,
    agents::{self, AgentRow},
    sessions::{self, Census},
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
    })
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
    Ok(())
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
        };
        let value = as_json(&report);
        assert_eq!(value["runs"], json!({"claimed": 1, "queued": 2, "parked": 3}));
        assert_eq!(value["open_deferred_calls"], 4);
        assert_eq!(value["oldest_due_seconds"], 1.5);
        assert!(value["workers"][0]["silent_seconds"].as_i64() >= Some(90));
        assert_eq!(value["unserved"], json!([{"agent": "b@2", "runs": 2}]));
        assert_eq!(show(&report), Ok(()));
    }
}
