//! `holdfast migrate`.

use holdfast_store::migrate;
use serde_json::json;

use crate::{
    args::MigrateArgs,
    failure::Failure,
    node::{Database, patiently, store},
    output,
};

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
    let status = patiently("checking the schema", async || migrate::status(url).await).await?;
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
