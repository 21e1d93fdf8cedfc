//! `holdfast webhooks`: what was given up is seen, sent again or forgotten.

use std::time::Duration;

use holdfast_store::{
    Store, StoreError,
    connect::{ConnectOptions, connect},
    migrate, status,
    webhooks::{self, Which},
};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::{
    args::{WebhooksArgs, WebhooksCommand, WhichWebhooks},
    failure::{Failure, chain},
    node::{Database, once},
    output,
    status::webhooks::as_json,
};

/// How long the database may take to say that its schema is the one that this build knows.
const FIRST_ANSWER: Duration = Duration::from_secs(10);

/// Webhooks that were given up that are listed.
const LISTED: i64 = 100;

/// How many rows one statement changes.
const BATCH: i64 = 1_000;

/// Carries the command out.
pub(crate) async fn run(args: WebhooksArgs) -> Result<(), Failure> {
    let database = Database::existing(&args.database).await?;
    let done = match open(&database).await {
        Ok(store) => {
            let done = perform(&store, args.command, args.json).await;
            store.db().close().await;
            done
        }
        Err(failure) => Err(failure),
    };
    database.close().await;
    done
}

async fn open(database: &Database) -> Result<Store, Failure> {
    once("checking the schema", FIRST_ANSWER, migrate::require(database.direct_url())).await?;
    let few = ConnectOptions { hot_connections: 1, read_connections: 1, ..database.options("webhooks") };
    let db = connect(few).await.map_err(|error| Failure::during("the database")(&error))?;
    Ok(Store::new(db, None))
}

async fn perform(store: &Store, command: WebhooksCommand, json: bool) -> Result<(), Failure> {
    match command {
        WebhooksCommand::List => list(store, json).await,
        WebhooksCommand::Retry(which) => {
            let which = selected(which)?;
            let enabled = match which.event {
                None => webhooks::enable(store, which.endpoint.as_deref()).await.map_err(failed)?,
                Some(_) => 0,
            };
            let again = all(async || webhooks::retry(store, &which, BATCH).await).await?;
            let words = format!("{again} to be sent again, {enabled} endpoints enabled");
            report(json, &json!({"sent_again": again, "enabled": enabled}), &words)
        }
        WebhooksCommand::Discard(which) => {
            let which = selected(which)?;
            let gone = all(async || webhooks::discard(store, &which, BATCH).await).await?;
            report(json, &json!({"forgotten": gone}), &format!("{gone} forgotten"))
        }
        WebhooksCommand::Remove { endpoint } => {
            if !webhooks::withdraw(store, &endpoint).await.map_err(failed)? {
                return Err(Failure::Failed(format!("no endpoint is named {endpoint:?}")));
            }
            let words = format!("{endpoint} is removed; a scheduler clears away what it was to be sent");
            report(json, &json!({"removed": endpoint}), &words)
        }
    }
}

/// Says what was done, as JSON or in words.
fn report(json: bool, value: &Value, words: &str) -> Result<(), Failure> {
    if json { output::json(value) } else { output::line(words) }
}

fn failed(error: StoreError) -> Failure {
    Failure::Failed(chain(&error))
}

/// Batch after batch, until one is not full.
async fn all(batch: impl AsyncFn() -> Result<u64, StoreError>) -> Result<u64, Failure> {
    let mut sum = 0;
    loop {
        let done = batch().await.map_err(failed)?;
        sum += done;
        if i64::try_from(done).is_ok_and(|done| done < BATCH) {
            return Ok(sum);
        }
    }
}

fn selected(which: WhichWebhooks) -> Result<Which, Failure> {
    let event = which.id.map(|id| event(&id).ok_or_else(|| unknown(&id))).transpose()?;
    Ok(Which { endpoint: which.endpoint, event })
}

fn unknown(id: &str) -> Failure {
    Failure::Usage(format!("--id {id:?} is no webhook's id: evt_<session>_<number>"))
}

fn event(id: &str) -> Option<(Uuid, i64)> {
    let (session, seq) = id.strip_prefix("evt_")?.split_once('_')?;
    Some((session.parse().ok()?, seq.parse().ok()?))
}

async fn list(store: &Store, json: bool) -> Result<(), Failure> {
    let endpoints = status::webhooks(store).await.map_err(failed)?;
    let endpoints = endpoints.ok_or_else(|| Failure::Failed("the database takes too long".into()))?;
    let dead = webhooks::dead(store, LISTED).await.map_err(failed)?;
    if json {
        let dead = dead.iter().map(|one| {
            json!({
                "id": one.id(), "endpoint": one.endpoint, "session_id": one.session_id, "seq": one.seq,
                "kind": one.kind, "at": one.at, "attempts": one.attempts, "given_up_at": one.given_up,
                "cause": one.cause,
            })
        });
        let (endpoints, dead) = (as_json(&endpoints), dead.collect::<Vec<_>>());
        return output::json(&json!({"endpoints": endpoints, "given_up": dead}));
    }
    if endpoints.is_empty() {
        return output::line("no endpoint is configured");
    }
    let rows = endpoints.iter().map(|one| {
        let state = if one.disabled_at.is_some() { "disabled" } else { "enabled" };
        let error = one.last_error.clone().unwrap_or_default();
        [one.name.clone(), state.to_owned(), one.pending.to_string(), one.dead.to_string(), error]
    });
    output::table(["ENDPOINT", "STATE", "PENDING", "GIVEN UP", "LAST FAILURE"], rows)?;
    if dead.is_empty() {
        return Ok(());
    }
    output::line("")?;
    let rows = dead.iter().map(|one| {
        let (attempts, given_up) = (one.attempts.to_string(), one.given_up.to_rfc3339());
        [one.id(), one.endpoint.clone(), one.kind.clone(), attempts, given_up, one.cause.clone()]
    });
    output::table(["GIVEN UP", "ENDPOINT", "KIND", "ATTEMPTS", "AT", "CAUSE"], rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_names_a_session_and_a_number() {
        let session = Uuid::from_u128(7);
        assert_eq!(event(&format!("evt_{}_12", session.simple())), Some((session, 12)));
        for wrong in ["evt_7_1", "12", "evt_00000000000000000000000000000007"] {
            assert_eq!(event(wrong), None, "{wrong}");
        }
    }
}
