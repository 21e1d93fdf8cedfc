//! `holdfast status`: what the database knows of the queue, of those who work on it, and of itself, for whoever is
//! on call. The first line says what needs attention; each finding's slug is a part of docs/operating/runbook.md.

mod as_json;
mod as_text;
mod database_text;
mod one;
mod report;
mod summary;
mod verdict;
pub(crate) mod webhooks;
mod why;

#[cfg(test)]
mod tests;

use std::time::Duration;

use holdfast_engine::ids::SessionId;
use holdfast_store::{
    Store,
    connect::{ConnectOptions, connect},
    migrate,
};

use crate::{
    args::StatusArgs,
    failure::{Failure, chain},
    node::{Database, once},
    output,
};

/// How long a database may take to say that its schema is the one that this build knows. Whoever is on call is to
/// learn soon that it is away.
const FIRST_ANSWER: Duration = Duration::from_secs(10);

/// Prints the report.
pub(crate) async fn run(args: StatusArgs) -> Result<(), Failure> {
    let database = Database::existing(&args.database).await?;
    let done = match open(&database).await {
        Ok(store) => {
            let told = match args.session {
                Some(id) => one::tell(&store, SessionId(id), args.json).await,
                None => tell(&store, &args).await,
            };
            store.db().close().await;
            told
        }
        Err(failure) => Err(failure),
    };
    database.close().await;
    done
}

/// A store over one connection of either kind: the server may be short of them.
async fn open(database: &Database) -> Result<Store, Failure> {
    once("checking the schema", FIRST_ANSWER, migrate::require(database.direct_url())).await?;
    let few = ConnectOptions { hot_connections: 1, read_connections: 1, ..database.options("status") };
    let db = connect(few).await.map_err(|error| Failure::during("the database")(&error))?;
    Ok(Store::new(db, None))
}

async fn tell(store: &Store, args: &StatusArgs) -> Result<(), Failure> {
    let report = report::read(store, args).await.map_err(|error| Failure::Failed(chain(&error)))?;
    let findings = verdict::findings(&report);
    if args.json {
        output::json(&as_json::report(&report, &findings))?;
    } else {
        as_text::show(&report, &findings)?;
    }
    if args.check && !findings.is_empty() {
        let slugs: Vec<&str> = findings.iter().map(|one| one.slug.word()).collect();
        return Err(Failure::Failed(format!("needs attention: {}", slugs.join(", "))));
    }
    Ok(())
}
