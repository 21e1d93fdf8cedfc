//! One delivery: claimed, sent by whoever claimed it, and settled under its claim.

use std::time::Duration;

use chrono::{DateTime, Utc};
use serde_json::{Value, json};
use uuid::Uuid;

use super::{Endpoint, seconds};
use crate::{Store, errors::StoreError, feed::EventRow, shown};

/// How long a claim stands. Whoever claimed has to be done by then, or somebody else sends the same again.
pub const CLAIM: Duration = Duration::from_secs(30);

/// The longest body that is sent, in bytes; the arguments of calls are left out of one that would be longer.
pub const LONGEST_BODY: usize = 1024 * 1024;

/// Seconds after the first failure of a delivery, doubled by each further one.
const FIRST_PAUSE: f64 = 2.0;

/// Seconds that a pause takes at the most, also one that the receiver asks for.
const LONGEST_PAUSE: f64 = 3_600.0;

/// Something that an endpoint is to be sent, claimed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delivery {
    /// Which endpoint.
    pub endpoint: String,
    /// Whose event.
    pub session_id: Uuid,
    /// Its number in the session's stream.
    pub seq: i64,
    /// The session's owner; empty where clients don't name themselves.
    pub owner: String,
    /// The session's agent.
    pub agent: String,
    /// What kind of event.
    pub kind: String,
    /// Its references and small values, a JSON object.
    pub body: String,
    /// When it happened.
    pub at: DateTime<Utc>,
    /// How many attempts have failed.
    pub attempts: i32,
    /// The claim.
    pub claim: Uuid,
}

/// Names an event, always in the same way: receivers know repeats by it.
pub(super) fn id(session: Uuid, seq: i64) -> String {
    format!("evt_{}_{seq}", session.simple())
}

impl Delivery {
    /// The event's name, the same for every attempt and every endpoint.
    pub fn id(&self) -> String {
        id(self.session_id, self.seq)
    }

    /// What is sent: the event as streams show it, with its name, agent and owner.
    ///
    /// # Errors
    /// [`StoreError`] as the database has it, and [`StoreError::Corrupt`] for an event that can't be read.
    pub async fn document(&self, store: &Store) -> Result<String, StoreError> {
        let event = EventRow {
            session_id: self.session_id,
            seq: self.seq,
            kind: self.kind.clone(),
            body: self.body.clone(),
            at: self.at,
            xid: 0,
        };
        let mut data = shown::data(store, &event).await?;
        shown::name(&mut data, &event);
        data.insert("id".to_owned(), json!(self.id()));
        data.insert("agent".to_owned(), json!(self.agent));
        data.insert("owner".to_owned(), json!(Some(&self.owner).filter(|owner| !owner.is_empty())));
        let text = serde_json::to_string(&data)?;
        if text.len() <= LONGEST_BODY {
            return Ok(text);
        }
        for call in data.get_mut("calls").and_then(Value::as_array_mut).into_iter().flatten() {
            call["call"]["function"]["arguments"] = Value::Null;
        }
        Ok(serde_json::to_string(&data)?)
    }
}

/// Claims up to `limit` deliveries of an endpoint that are due, of each session the oldest that waits and no other.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn claim(store: &Store, endpoint: &Endpoint, limit: i64) -> Result<Vec<Delivery>, StoreError> {
    let rows = sqlx::query_as!(
        Delivery,
        r#"UPDATE webhook_deliveries d SET claim = $2, due_at = now() + make_interval(secs => $3)
           WHERE (d.session_id, d.endpoint, d.seq) IN (
               SELECT p.session_id, p.endpoint, p.seq FROM webhook_deliveries p
               WHERE p.endpoint = $1 AND p.state = 'pending' AND p.due_at <= now()
                 AND EXISTS (SELECT 1 FROM webhook_endpoints w
                             WHERE w.name = $1 AND w.disabled_at IS NULL AND w.withdrawn_at IS NULL)
                 AND NOT EXISTS (SELECT 1 FROM webhook_deliveries e
                                 WHERE e.session_id = p.session_id AND e.endpoint = p.endpoint AND e.seq < p.seq
                                   AND e.state = 'pending')
               ORDER BY p.due_at LIMIT $4 FOR UPDATE OF p SKIP LOCKED)
           RETURNING d.endpoint, d.session_id, d.seq, d.owner, d.agent, d.kind, d.body, d.at, d.attempts, d.claim AS "claim!""#,
        endpoint.name,
        Uuid::new_v4(),
        seconds(CLAIM),
        limit
    )
    .fetch_all(store.read())
    .await?;
    Ok(rows)
}

/// Removes a delivery that was taken. Returns whether the claim still stood.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn delivered(store: &Store, delivery: &Delivery) -> Result<bool, StoreError> {
    let done = sqlx::query!(
        "DELETE FROM webhook_deliveries WHERE session_id = $1 AND endpoint = $2 AND seq = $3 AND claim = $4",
        delivery.session_id,
        delivery.endpoint,
        delivery.seq,
        delivery.claim
    )
    .execute(store.read())
    .await?;
    Ok(done.rows_affected() > 0)
}

/// What becomes of a delivery whose attempt failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum After {
    /// It is tried again.
    Again,
    /// It was given up, and stays as a dead letter.
    Dead,
    /// The claim was over: somebody else has it.
    Lost,
}

/// Says how an attempt failed, in a few words that quote nobody. It is tried again after a pause of 2 s, doubled by
/// each failure up to an hour, of which up to a half is left to chance; `asked` is what the receiver asks for. What
/// has failed for longer than `give_up` is given up.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn failed(
    store: &Store,
    delivery: &Delivery,
    cause: &str,
    asked: Duration,
    give_up: Duration,
) -> Result<After, StoreError> {
    let row = sqlx::query!(
        r#"UPDATE webhook_deliveries SET
               attempts = attempts + 1, claim = NULL, last_error = left($5, 200),
               failing_since = coalesce(failing_since, now()),
               state = CASE WHEN coalesce(failing_since, now()) <= now() - make_interval(secs => $6)
                   THEN 'dead' ELSE 'pending' END,
               due_at = CASE WHEN coalesce(failing_since, now()) <= now() - make_interval(secs => $6) THEN now()
                   ELSE now() + make_interval(secs => least($9, greatest($7,
                       least($9, $8 * 2 ^ least(attempts, 30)) * (0.5 + random() / 2)))) END
           WHERE session_id = $1 AND endpoint = $2 AND seq = $3 AND claim = $4
           RETURNING state = 'dead' AS "dead!""#,
        delivery.session_id,
        delivery.endpoint,
        delivery.seq,
        delivery.claim,
        cause,
        seconds(give_up),
        seconds(asked),
        FIRST_PAUSE,
        LONGEST_PAUSE
    )
    .fetch_optional(store.read())
    .await?;
    Ok(row.map_or(After::Lost, |row| if row.dead { After::Dead } else { After::Again }))
}

/// Disables the endpoint that a delivery was sent to, and gives the delivery back: it waits until the endpoint is
/// enabled. An endpoint that has got another URL since stays enabled. Returns whether it was enabled until now.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn disable(store: &Store, endpoint: &Endpoint, delivery: &Delivery) -> Result<bool, StoreError> {
    let done = sqlx::query!(
        "UPDATE webhook_endpoints SET disabled_at = now() WHERE name = $1 AND url = $2 AND disabled_at IS NULL",
        endpoint.name,
        endpoint.url
    )
    .execute(store.read())
    .await?;
    sqlx::query!(
        "UPDATE webhook_deliveries SET attempts = attempts + 1, claim = NULL, due_at = now(), last_error = 'status 410'
         WHERE session_id = $1 AND endpoint = $2 AND seq = $3 AND claim = $4",
        delivery.session_id,
        delivery.endpoint,
        delivery.seq,
        delivery.claim
    )
    .execute(store.read())
    .await?;
    // While nothing is sent nothing fails.
    sqlx::query!(
        "UPDATE webhook_deliveries SET failing_since = NULL WHERE endpoint = $1 AND failing_since IS NOT NULL",
        endpoint.name
    )
    .execute(store.read())
    .await?;
    Ok(done.rows_affected() > 0)
}
