//! Webhooks: endpoints that are sent the events of sessions, each with a place of its own in the feed.
//!
//! [`queue`] moves an endpoint's place along and lays up what is to be sent, both in one transaction. [`claim`] takes
//! of each session the oldest delivery alone, for [`CLAIM`]; whoever claims one sends it and then says how that went,
//! naming the claim: what a scheduler that died had claimed is claimed again, and one that comes back changes nothing.
//! Docs: docs/webhooks.md.

mod dead;
mod deliver;
mod queue;

use std::{fmt, time::Duration};

pub use dead::{DEAD_DAYS, DeadLetter, Which, dead, discard, enable, forget, retry};
pub use deliver::{After, CLAIM, Delivery, LONGEST_BODY, claim, delivered, disable, failed};
pub use queue::{MOST_PENDING, PAGE, Queued, queue};

use crate::{Store, errors::StoreError};

/// The name of the endpoint that a server's own settings name.
pub const SERVER: &str = "server";

/// The name of an agent's endpoint.
pub fn of_agent(slug: &str) -> String {
    format!("agent:{slug}")
}

/// An endpoint.
#[derive(Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// [`SERVER`], or as [`of_agent`] has it.
    pub name: String,
    /// Whose sessions' events it is sent; `None` means those of all agents.
    pub agent: Option<String>,
    /// Where they are sent.
    pub url: String,
    /// Which secrets sign.
    pub secret_id: String,
    /// Which kinds of events.
    pub kinds: Vec<String>,
}

/// The URL stays out: a part of it may be what only its receiver knows.
impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, agent, url: _, secret_id, kinds } = self;
        let mut shown = f.debug_struct("Endpoint");
        shown.field("name", name).field("agent", agent).field("secret_id", secret_id).field("kinds", kinds);
        shown.finish_non_exhaustive()
    }
}

/// Records an endpoint as it is configured. One that is new, or was withdrawn, is sent what happens from now on; one
/// that was there goes on from its place. A changed URL also enables one that was disabled.
///
/// # Errors
/// [`StoreError::Corrupt`] before the first migration has named the feed.
pub async fn declare(store: &Store, endpoint: &Endpoint) -> Result<(), StoreError> {
    let Endpoint { name, agent, url, secret_id, kinds } = endpoint;
    let done = sqlx::query!(
        r#"INSERT INTO webhook_endpoints AS w (name, agent, url, secret_id, kinds, feed, xid, session_id, seq)
           SELECT $1, $2, $3, $4, $5, f.feed, pg_snapshot_xmin(pg_current_snapshot()), $6, 0
           FROM (SELECT feed FROM feeds ORDER BY created_at DESC LIMIT 1) f
           ON CONFLICT (name) DO UPDATE SET
               url = excluded.url, secret_id = excluded.secret_id, kinds = excluded.kinds, updated_at = now(),
               feed = CASE WHEN w.withdrawn_at IS NULL THEN w.feed ELSE excluded.feed END,
               xid = CASE WHEN w.withdrawn_at IS NULL THEN w.xid ELSE excluded.xid END,
               session_id = CASE WHEN w.withdrawn_at IS NULL THEN w.session_id ELSE excluded.session_id END,
               seq = CASE WHEN w.withdrawn_at IS NULL THEN w.seq ELSE excluded.seq END,
               disabled_at = CASE WHEN w.url = excluded.url AND w.withdrawn_at IS NULL THEN w.disabled_at END,
               withdrawn_at = NULL"#,
        name,
        agent.as_deref(),
        url,
        secret_id,
        kinds,
        uuid::Uuid::nil()
    )
    .execute(store.read())
    .await?;
    if done.rows_affected() == 0 {
        return Err(StoreError::Corrupt("the event feed has no identity: run migrate".to_owned()));
    }
    Ok(())
}

/// Says that an endpoint isn't configured any more: nothing is sent to it from now on, and a clean-up removes what it
/// was still to be sent. Returns whether it was there.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn withdraw(store: &Store, name: &str) -> Result<bool, StoreError> {
    let done = sqlx::query!(
        "UPDATE webhook_endpoints SET withdrawn_at = now() WHERE name = $1 AND withdrawn_at IS NULL",
        name
    )
    .execute(store.read())
    .await?;
    Ok(done.rows_affected() > 0)
}

/// The endpoints that are to be sent something: neither disabled nor withdrawn.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn endpoints(store: &Store) -> Result<Vec<Endpoint>, StoreError> {
    let rows = sqlx::query_as!(
        Endpoint,
        "SELECT name, agent, url, secret_id, kinds FROM webhook_endpoints
         WHERE disabled_at IS NULL AND withdrawn_at IS NULL ORDER BY name"
    )
    .fetch_all(store.read())
    .await?;
    Ok(rows)
}

fn seconds(time: Duration) -> f64 {
    time.as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_that_is_shown_keeps_its_url_to_itself() {
        let endpoint = Endpoint {
            name: SERVER.to_owned(),
            agent: None,
            url: "https://example.com/private-path".to_owned(),
            secret_id: "default".to_owned(),
            kinds: vec!["run.stopped".to_owned()],
        };
        let shown = format!("{endpoint:?}");
        assert!(shown.contains("server") && !shown.contains("private-path"), "{shown}");
    }
}
