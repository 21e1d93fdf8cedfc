//! `holdfast migrate`.

use std::time::Duration;

use holdfast_store::migrate;
use serde_json::json;

use crate::{
    args::MigrateArgs,
    failure::Failure,
    node::{Database, once, patiently, store},
    output,
};

/// How long a check may take.
const CHECK: Duration = Duration::from_secs(10);

/// Applies migrations, or checks that there are none to apply.
pub(crate) async fn run(args: MigrateArgs) -> Result<(), Failure> {
    let database = if args.check {
        Database::existing(&args.database).await
    } else {
        Database::open(&args.database).await
    }?;
    let done = if args.check { check(&database, args.json).await } else { apply(&database, args.json).await };
    database.close().await;
    done
}

async fn check(database: &Database, json: bool) -> Result<(), Failure> {
    let url = database.direct_url();
    // Whoever asks wants to know now: a check that waited would hold a deployment.
    let status = once("checking the schema", CHECK, migrate::status(url)).await?;
    let pending: Vec<_> = status
        .pending
        .iter()
        .map(|one| json!({"version": one.version, "description": one.description}))
        .collect();
    if json {
        output::json(&json!({
            "current": status.current,
            "expected": status.expected,
            "pending": pending,
            "ready": status.is_ready(),
        }))?;
    } else {
        output::line(status.to_string())?;
    }
    if status.is_ready() { Ok(()) } else { Err(Failure::Failed("migrations are pending".into())) }
}

async fn apply(database: &Database, json: bool) -> Result<(), Failure> {
    let url = database.direct_url();
    let report = patiently("migrating", async || migrate::migrate(url).await).await?;
    // What has to be in place beside the schema: the feed's name and the events' partitions.
    store(database, "migrate", false).await?.db().close().await;
    if json {
        let applied: Vec<_> = report
            .applied
            .iter()
            .map(|one| json!({"version": one.version, "description": one.description}))
            .collect();
        return output::json(&json!({"applied": applied, "current": report.status.current}));
    }
    for one in &report.applied {
        output::line(format!("applied {} {}", one.version, one.description))?;
    }
    output::line(report.status.to_string())
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;
    use crate::args::DatabaseArgs;

    #[tokio::test]
    async fn a_check_does_not_wait_for_a_database_that_is_away() {
        // A port that was free a moment ago: nobody listens there.
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        drop(listener);
        let database = DatabaseArgs {
            database_url: Some(format!("postgres://u@{address}/d")),
            listen_database_url: None,
            db_connections: 8,
            data_dir: "nowhere".into(),
        };
        let before = Instant::now();
        let failure = run(MigrateArgs { database, check: true, json: false }).await.expect_err("unreachable");
        assert_eq!(failure.code(), 1, "{failure}");
        assert!(before.elapsed() <= CHECK, "{:?}", before.elapsed());
    }
}
