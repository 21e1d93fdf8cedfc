//! All that the database has of a session.

use anyhow::Result;
use holdfast_engine::turn::{TurnBody, UserTurn};
use serde_json::Value;
use tokio_postgres::Client as Postgres;
use uuid::Uuid;

/// A turn.
#[derive(Debug)]
pub(super) struct TurnRow {
    pub(super) position: i64,
    pub(super) version: i64,
    pub(super) body: TurnBody,
}

/// A call.
#[derive(Debug, Clone)]
pub(super) struct CallRow {
    pub(super) id: Uuid,
    pub(super) name: String,
    pub(super) idempotent: bool,
    pub(super) state: String,
    pub(super) attempt: i32,
    pub(super) token: Option<Uuid>,
    pub(super) settled: Option<String>,
}

/// A continuation.
#[derive(Debug)]
pub(super) struct TokenRow {
    pub(super) token: Uuid,
    pub(super) call: Uuid,
    pub(super) state: String,
}

/// A letter.
#[derive(Debug)]
pub(super) struct MailRow {
    pub(super) seq: i64,
    pub(super) id: Uuid,
    pub(super) tag: String,
    pub(super) body: String,
}

/// An event.
#[derive(Debug)]
pub(super) struct EventRow {
    pub(super) seq: i64,
    pub(super) kind: String,
    pub(super) body: Value,
}

/// A session with everything that belongs to it, each in its order.
#[derive(Debug)]
pub(super) struct Rows {
    pub(super) id: Uuid,
    pub(super) deleted: bool,
    pub(super) version: i64,
    pub(super) turn_count: i64,
    pub(super) mail_seq: i64,
    pub(super) mail_cursor: i64,
    pub(super) mail_left: Vec<i64>,
    pub(super) event_seq: i64,
    pub(super) turns: Vec<TurnRow>,
    pub(super) calls: Vec<CallRow>,
    pub(super) tokens: Vec<TokenRow>,
    pub(super) mail: Vec<MailRow>,
    pub(super) events: Vec<EventRow>,
}

impl Rows {
    /// The user turns, in order.
    pub(super) fn user_turns(&self) -> impl Iterator<Item = (i64, &UserTurn)> {
        self.turns.iter().filter_map(|turn| match &turn.body {
            TurnBody::User(user) => Some((turn.position, user)),
            TurnBody::Llm(_) => None,
        })
    }

    /// What happened, in short: for whoever has to find out why.
    pub(super) fn outline(&self) -> String {
        let events: Vec<String> =
            self.events.iter().map(|event| format!("{} {} {}", event.seq, event.kind, event.body)).collect();
        let turns: Vec<String> = self
            .turns
            .iter()
            .map(|turn| {
                let body = turn.body.to_json().unwrap_or_default();
                format!("{} v{} {} {body}", turn.position, turn.version, turn.body.tag())
            })
            .collect();
        format!(
            "\nevents:\n  {}\nturns:\n  {}\nmail: {:#?}\ncalls: {:#?}\ntokens: {:?}",
            events.join("\n  "),
            turns.join("\n  "),
            self.mail,
            self.calls,
            self.tokens
        )
    }
}

/// Reads a session, if it is there.
pub(super) async fn read(admin: &Postgres, id: Uuid) -> Result<Option<Rows>> {
    let sql = "SELECT deleted_at IS NOT NULL, version, turns, mail_seq, mail_cursor, mail_left, event_seq
               FROM sessions WHERE id = $1";
    let Some(session) = admin.query_opt(sql, &[&id]).await? else { return Ok(None) };
    Ok(Some(Rows {
        id,
        deleted: session.try_get(0)?,
        version: session.try_get(1)?,
        turn_count: session.try_get(2)?,
        mail_seq: session.try_get(3)?,
        mail_cursor: session.try_get(4)?,
        mail_left: session.try_get(5)?,
        event_seq: session.try_get(6)?,
        turns: turns(admin, id).await?,
        calls: calls(admin, id).await?,
        tokens: tokens(admin, id).await?,
        mail: mail(admin, id).await?,
        events: events(admin, id).await?,
    }))
}

async fn turns(admin: &Postgres, id: Uuid) -> Result<Vec<TurnRow>> {
    let sql = "SELECT position, version, tag, body FROM turns WHERE session_id = $1 ORDER BY position";
    let rows = admin.query(sql, &[&id]).await?;
    rows.iter()
        .map(|row| {
            let body = TurnBody::parse(row.try_get(2)?, row.try_get(3)?)?;
            Ok(TurnRow { position: row.try_get(0)?, version: row.try_get(1)?, body })
        })
        .collect()
}

async fn calls(admin: &Postgres, id: Uuid) -> Result<Vec<CallRow>> {
    let sql = "SELECT id, name, idempotent, state, attempt, token, settled
               FROM tool_calls WHERE session_id = $1 ORDER BY turn, index";
    let rows = admin.query(sql, &[&id]).await?;
    rows.iter()
        .map(|row| {
            Ok(CallRow {
                id: row.try_get(0)?,
                name: row.try_get(1)?,
                idempotent: row.try_get(2)?,
                state: row.try_get(3)?,
                attempt: row.try_get(4)?,
                token: row.try_get(5)?,
                settled: row.try_get(6)?,
            })
        })
        .collect()
}

async fn tokens(admin: &Postgres, id: Uuid) -> Result<Vec<TokenRow>> {
    let sql = "SELECT token, call_id, state FROM continuations WHERE session_id = $1 ORDER BY created_at";
    let rows = admin.query(sql, &[&id]).await?;
    rows.iter()
        .map(|row| Ok(TokenRow { token: row.try_get(0)?, call: row.try_get(1)?, state: row.try_get(2)? }))
        .collect()
}

async fn mail(admin: &Postgres, id: Uuid) -> Result<Vec<MailRow>> {
    let sql = "SELECT seq, id, tag, body FROM mail WHERE session_id = $1 ORDER BY seq";
    let rows = admin.query(sql, &[&id]).await?;
    rows.iter()
        .map(|row| {
            Ok(MailRow {
                seq: row.try_get(0)?,
                id: row.try_get(1)?,
                tag: row.try_get(2)?,
                body: row.try_get(3)?,
            })
        })
        .collect()
}

async fn events(admin: &Postgres, id: Uuid) -> Result<Vec<EventRow>> {
    let sql = "SELECT seq, kind, body FROM events WHERE session_id = $1 ORDER BY seq";
    let rows = admin.query(sql, &[&id]).await?;
    rows.iter()
        .map(|row| {
            let body = serde_json::from_str(row.try_get(2)?)?;
            Ok(EventRow { seq: row.try_get(0)?, kind: row.try_get(1)?, body })
        })
        .collect()
}
