//! Sessions that failed of late: found among the newest events, since no index knows them.

use std::collections::HashMap;

use chrono::{DateTime, TimeDelta, Utc};
use serde_json::Value;
use tokio::time::Instant;
use uuid::Uuid;

use super::{SECTION_LIMIT, within};
use crate::{Store, errors::StoreError};

/// Events that one statement reads.
const CHUNK: i64 = 50_000;

/// Events that are read at most.
pub const EVENTS_LOOKED_AT: i64 = 2_000_000;

/// Failures that are told of at most, the newest.
pub const FAILURES_SHOWN: usize = 1_000;

/// A session's failure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failed {
    /// The session.
    pub session: Uuid,
    /// Its owner.
    pub owner: String,
    /// Its agent.
    pub agent: String,
    /// When it failed.
    pub at: DateTime<Utc>,
    /// What its status said then. It may quote what a model provider answered.
    pub detail: String,
    /// Whether it is still failed.
    pub still: bool,
}

/// Sessions that failed, newest first, each once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failures {
    /// The failures; not those of sessions that are deleted.
    pub failed: Vec<Failed>,
    /// How far back the events were read: 24 hours, unless there were too many of them.
    pub since: DateTime<Utc>,
    /// Whether that is less than 24 hours.
    pub cut: bool,
}

/// Where the look back stands.
struct Place {
    xid: String,
    session: Uuid,
    seq: i64,
}

/// Looks back over a day of events, or over the newest [`EVENTS_LOOKED_AT`] of them, or over as many as
/// [`SECTION_LIMIT`] allows, for the failures of sessions.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn failures(store: &Store, owner: Option<&str>) -> Result<Option<Failures>, StoreError> {
    let (began, now) = (Instant::now(), Utc::now());
    let until = now - TimeDelta::hours(24);
    let mut place = Place { xid: u64::MAX.to_string(), session: Uuid::max(), seq: i64::MAX };
    let (mut found, mut since, mut looked, mut cut) = (HashMap::new(), now, 0, false);
    loop {
        let Some((rows, end)) = look(store, owner, &place).await? else {
            if looked == 0 {
                return Ok(None);
            }
            cut = true;
            break;
        };
        for (session, at, detail) in rows.into_iter().filter(|(_, at, _)| *at >= until) {
            // Newest first, so that a session's first one counts.
            found.entry(session).or_insert((at, detail));
        }
        let Some((next, at, count)) = end else {
            since = until;
            break;
        };
        looked += count;
        since = at.max(until);
        if at < until || count < CHUNK {
            since = until;
            break;
        }
        if looked >= EVENTS_LOOKED_AT || found.len() >= FAILURES_SHOWN || began.elapsed() >= SECTION_LIMIT {
            cut = true;
            break;
        }
        place = next;
    }
    named(store, found).await.map(|failed| failed.map(|failed| Failures { failed, since, cut }))
}

type Look = (Vec<(Uuid, DateTime<Utc>, String)>, Option<(Place, DateTime<Utc>, i64)>);

async fn look(store: &Store, owner: Option<&str>, from: &Place) -> Result<Option<Look>, StoreError> {
    within(store, async |tx| {
        let rows =
            sqlx::query_file!("src/status/sql/failures.sql", from.xid, from.session, from.seq, CHUNK, owner)
                .fetch_all(tx)
                .await?;
        let (mut failed, mut end) = (Vec::new(), None);
        for row in rows {
            match row.session {
                Some(session) => failed.push((session, row.at, message(row.body.as_deref()))),
                None => {
                    let place = Place { xid: row.xid, session: row.place, seq: row.seq };
                    end = Some((place, row.at, row.looked));
                }
            }
        }
        Ok((failed, end))
    })
    .await
}

fn message(body: Option<&str>) -> String {
    let body: Value = body.and_then(|body| serde_json::from_str(body).ok()).unwrap_or_default();
    body["message"].as_str().unwrap_or_default().to_owned()
}

async fn named(
    store: &Store,
    mut found: HashMap<Uuid, (DateTime<Utc>, String)>,
) -> Result<Option<Vec<Failed>>, StoreError> {
    let ids: Vec<Uuid> = found.keys().copied().collect();
    within(store, async |tx| {
        let rows = sqlx::query_file!("src/status/sql/failed_sessions.sql", &ids).fetch_all(tx).await?;
        let mut failed = Vec::new();
        for row in rows {
            let Some((at, detail)) = found.remove(&row.id) else { continue };
            failed.push(Failed {
                session: row.id,
                owner: row.owner,
                agent: row.agent,
                at,
                detail,
                still: row.still,
            });
        }
        failed.sort_by_key(|one| std::cmp::Reverse((one.at, one.session)));
        failed.truncate(FAILURES_SHOWN);
        Ok(failed)
    })
    .await
}
