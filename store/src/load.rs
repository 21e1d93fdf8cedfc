//! Reading a session as a worker needs it: what the next decision and the next request depend on.

use std::{collections::HashMap, hash::Hash, sync::Arc};

use chrono::{DateTime, Utc};
use deadpool_postgres::Client;
use holdfast_engine::{
    content::Digest,
    decide::Mode,
    ids::{CallId, MailId, SessionId, Token, TurnId, WorkerId},
    mail::{Envelope, Priority},
    policy::{Applied, Disposition},
    session::{CallState, Hold, Session, Status, TrackedCall},
    turn::{TURN_FORMAT, Turn, TurnBody},
};
use tokio_postgres::{Row, Statement, types::FromSql};
use uuid::Uuid;

use crate::{
    Store,
    errors::StoreError,
    letters::{corrupt, mode},
    loader::News,
    plant::{self, Mistake},
    sql,
    transaction::Parameters,
};

/// A session and what a worker has to know beside it.
#[derive(Debug, Clone)]
pub struct Loaded {
    /// The session.
    pub session: Session,
    /// Its owner.
    pub owner: String,
    /// Its agent's slug.
    pub agent: String,
    /// The revision that its last run used.
    pub agent_revision: String,
    /// The session and call that its end answers.
    pub parent: Option<(SessionId, CallId)>,
    /// Revision of its parameters.
    pub settings_rev: i64,
    /// Mail above its cursor.
    pub inbox: Vec<Envelope>,
    /// How far its run goes, read after the mail; nothing if there is no run.
    pub mode: Option<Mode>,
    /// What the database's clock said.
    pub read_at: DateTime<Utc>,
}

/// Loads a session; a deleted one is unknown.
///
/// Only the holder of a run's lease changes turns and calls, so a holder that loads after its claim
/// was committed reads one state, whatever number of statements that takes. Mail comes from
/// everybody: what arrives after this is seen by its number.
///
/// # Errors
/// [`StoreError::UnknownSession`]; [`StoreError::Corrupt`] if this build can't read what is stored.
pub async fn load(store: &Store, id: SessionId) -> Result<Loaded, StoreError> {
    let mut loaded = load_group(store, &[id]).await?;
    loaded.pop().unwrap_or(Err(StoreError::UnknownSession))
}

/// Loads sessions, as [`load`] does each, in the order of `ids`.
///
/// # Errors
/// [`StoreError`] as the database has it, if none could be read.
pub(crate) async fn load_group(
    store: &Store,
    ids: &[SessionId],
) -> Result<Vec<Result<Loaded, StoreError>>, StoreError> {
    let client = store.client().await?;
    Reads::prepare(&client).await?.of(&client, ids, None).await
}

/// The statements of a load, prepared, so that all are sent at once.
pub(crate) struct Reads {
    session: Statement,
    turns: Statement,
    calls: Statement,
    unread: Statement,
    mode: Statement,
}

impl Reads {
    pub(crate) async fn prepare(client: &Client) -> Result<Self, StoreError> {
        Ok(Self {
            session: client.prepare_cached(sql::LOAD_SESSION).await?,
            turns: client.prepare_cached(sql::LOAD_TURNS).await?,
            calls: client.prepare_cached(sql::LOAD_CALLS).await?,
            unread: client.prepare_cached(sql::LOAD_UNREAD).await?,
            mode: client.prepare_cached(sql::LOAD_MODE).await?,
        })
    }

    /// Reads sessions, in the order of `ids`. With a `holder`, those whose runs this worker doesn't hold are unknown.
    pub(crate) async fn of(
        &self,
        client: &Client,
        ids: &[SessionId],
        holder: Option<WorkerId>,
    ) -> Result<Vec<Result<Loaded, StoreError>>, StoreError> {
        let (wanted, holder): (Vec<Uuid>, _) = (ids.iter().map(|id| id.0).collect(), holder.map(|id| id.0));
        let (held, named): (Parameters<'_>, Parameters<'_>) = (&[&wanted, &holder], &[&wanted]);
        // Answered in this order: the mode after the mail, so that no letter is considered under a mode that is
        // older than it.
        let (sessions, turns, calls, mail, modes) = futures::try_join!(
            client.query(&self.session, held),
            client.query(&self.turns, held),
            client.query(&self.calls, held),
            client.query(&self.unread, held),
            client.query(&self.mode, named),
        )?;
        let (sessions, modes) = (grouped(&sessions, "id")?, grouped(&modes, "session_id")?);
        let [turns, calls, mail] =
            [grouped(&turns, "session_id")?, grouped(&calls, "session_id")?, grouped(&mail, "session_id")?];
        Ok(ids
            .iter()
            .map(|&id| {
                let (head, mode) = (rows_of(&sessions, &id.0).first(), rows_of(&modes, &id.0).first());
                let (turns, calls) = (rows_of(&turns, &id.0), rows_of(&calls, &id.0));
                assemble(id, head, turns, calls, rows_of(&mail, &id.0), mode)
            })
            .collect())
    }
}

fn rows_of<'a, 'r, K: Eq + Hash>(rows: &'a HashMap<K, Vec<&'r Row>>, key: &K) -> &'a [&'r Row] {
    rows.get(key).map_or(&[], Vec::as_slice)
}

/// Rows by what stands in `column`, in the order in which they came.
fn grouped<'a, K: Eq + Hash + FromSql<'a>>(
    rows: &'a [Row],
    column: &str,
) -> Result<HashMap<K, Vec<&'a Row>>, StoreError> {
    let mut found: HashMap<K, Vec<&Row>> = HashMap::new();
    for row in rows {
        found.entry(row.try_get(column)?).or_default().push(row);
    }
    Ok(found)
}

fn assemble(
    id: SessionId,
    head: Option<&&Row>,
    turns: &[&Row],
    calls: &[&Row],
    mail: &[&Row],
    run: Option<&&Row>,
) -> Result<Loaded, StoreError> {
    let row = head.ok_or(StoreError::UnknownSession)?;
    if row.try_get::<_, bool>("deleted")? {
        return Err(StoreError::UnknownSession);
    }
    let cursor: i64 = row.try_get("mail_cursor")?;
    let letters = in_order(mail)?;
    let mut turns: Vec<Arc<Turn>> =
        turns.iter().map(|row| turn(row).map(Arc::new)).collect::<Result<_, _>>()?;
    turns.sort_by_key(|turn| turn.position);
    let mut calls: Vec<TrackedCall> = calls.iter().map(|row| call(row)).collect::<Result<_, _>>()?;
    calls.sort_by_key(|call| (call.turn, call.index));
    let (inbox, left): (Vec<_>, Vec<_>) = letters.into_iter().partition(|letter| letter.seq > cursor);
    let (status, hold): (&str, &str) = (row.try_get("status")?, row.try_get("hold")?);
    let session = Session {
        id,
        status: Status::parse(status).ok_or_else(|| corrupt("status", status))?,
        hold: Hold::parse(hold).ok_or_else(|| corrupt("hold", hold))?,
        version: row.try_get("version")?,
        cursor,
        left,
        turns,
        calls,
        stop: None,
        stack: row
            .try_get::<_, &str>("call_stack")?
            .split('/')
            .filter(|slug| !slug.is_empty())
            .map(str::to_owned)
            .collect(),
    };
    let parent: Option<Uuid> = row.try_get("parent_id")?;
    let parent_call: Option<Uuid> = row.try_get("parent_call")?;
    Ok(Loaded {
        session,
        owner: row.try_get("owner")?,
        agent: row.try_get("agent")?,
        agent_revision: row.try_get("agent_revision")?,
        parent: parent.zip(parent_call).map(|(session, call)| (SessionId(session), CallId(call))),
        settings_rev: row.try_get("settings_rev")?,
        inbox,
        mode: run.map(|row| mode(row)).transpose()?,
        read_at: row.try_get("read_at")?,
    })
}

/// Mail of a session above `cursor`, in order, and how far its run goes by then.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn mail_above(store: &Store, id: SessionId, cursor: i64) -> Result<News, StoreError> {
    Ok(mail_of(store, &[(id, cursor)]).await?.pop().unwrap_or_default())
}

/// Mail of sessions, as [`mail_above`] reads it of each, in the order of `above`.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub(crate) async fn mail_of(store: &Store, above: &[(SessionId, i64)]) -> Result<Vec<News>, StoreError> {
    let client = store.client().await?;
    // Answered in this order, as in [`load_group`].
    let (mail, goes) =
        (client.prepare_cached(sql::LOAD_MAIL).await?, client.prepare_cached(sql::LOAD_MODE).await?);
    let (ids, cursors): (Vec<Uuid>, Vec<i64>) = above.iter().map(|(id, cursor)| (id.0, *cursor)).unzip();
    let (of_mail, of_mode): (Parameters<'_>, Parameters<'_>) = (&[&ids, &cursors], &[&ids]);
    let (letters, runs) = futures::try_join!(client.query(&mail, of_mail), client.query(&goes, of_mode))?;
    let (letters, runs) = (grouped::<i64>(&letters, "place")?, grouped::<Uuid>(&runs, "session_id")?);
    let news = |(place, (id, _)): (i64, &(SessionId, i64))| {
        let run = rows_of(&runs, &id.0).first().map(|row| mode(row)).transpose()?;
        Ok((in_order(rows_of(&letters, &place))?, run))
    };
    (1..).zip(above).map(news).collect()
}

/// Letters by their numbers.
fn in_order(rows: &[&Row]) -> Result<Vec<Envelope>, StoreError> {
    let mut letters: Vec<Envelope> = rows.iter().map(|row| envelope(row)).collect::<Result<_, _>>()?;
    letters.sort_by_key(|letter| letter.seq);
    Ok(letters)
}

/// Blobs of an owner by their digests. Missing ones are missing from the answer.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn blobs(
    store: &Store,
    owner: &str,
    digests: &[Digest],
) -> Result<HashMap<Digest, Arc<str>>, StoreError> {
    if digests.is_empty() {
        return Ok(HashMap::new());
    }
    let wanted: Vec<&[u8]> = digests.iter().map(|digest| digest.0.as_slice()).collect();
    let client = store.client().await?;
    let statement = client.prepare_cached(sql::LOAD_BLOBS).await?;
    let rows = client.query(&statement, &[&owner, &wanted]).await?;
    rows.iter()
        .map(|row| {
            let digest: [u8; 32] = row
                .try_get::<_, &[u8]>(0)?
                .try_into()
                .map_err(|_| StoreError::Corrupt("a digest of another length".to_owned()))?;
            Ok((Digest(digest), Arc::from(row.try_get::<_, &str>(1)?)))
        })
        .collect()
}

/// Reads a stored turn. Older formats are upcast here and nowhere else.
pub(crate) fn stored_turn(
    id: Uuid,
    position: i64,
    tag: &str,
    format: i16,
    body: &str,
    at: DateTime<Utc>,
) -> Result<Turn, StoreError> {
    if format != TURN_FORMAT {
        return Err(StoreError::Corrupt(format!("turn format {format}; this build reads {TURN_FORMAT}")));
    }
    Ok(Turn { id: TurnId(id), position, at, body: TurnBody::parse(tag, body)? })
}

pub(crate) fn turn(row: &Row) -> Result<Turn, StoreError> {
    stored_turn(
        row.try_get("id")?,
        row.try_get("position")?,
        row.try_get("tag")?,
        row.try_get("format")?,
        row.try_get("body")?,
        row.try_get("at")?,
    )
}

fn call(row: &Row) -> Result<TrackedCall, StoreError> {
    let state: &str = row.try_get("state")?;
    let disposition: Disposition = serde_json::from_str(row.try_get("disposition")?)?;
    let settled: Option<&str> = row.try_get("settled")?;
    let deadline: Option<i64> = row.try_get("deadline_seconds")?;
    Ok(TrackedCall {
        id: CallId(row.try_get("id")?),
        provider_id: row.try_get("provider_id")?,
        name: row.try_get("name")?,
        arguments: row.try_get("arguments")?,
        turn: row.try_get("turn")?,
        index: row.try_get("index")?,
        policy: Applied {
            disposition,
            decided_by: row.try_get("decided_by")?,
            idempotent: row.try_get("idempotent")? || plant::made(Mistake::RestartOrphans),
            read_only: false,
            deadline_seconds: deadline.and_then(|seconds| u64::try_from(seconds).ok()),
            on_deadline: None,
        },
        state: CallState::parse(state).ok_or_else(|| corrupt("call state", state))?,
        attempt: row.try_get("attempt")?,
        token: row.try_get::<_, Option<Uuid>>("token")?.map(Token),
        expires_at: row.try_get("expires_at")?,
        waits: row.try_get::<_, Option<&str>>("waits")?.map(serde_json::from_str).transpose()?,
        created_at: row.try_get("created_at")?,
        started_at: row.try_get("started_at")?,
        settled: settled.map(serde_json::from_str).transpose()?,
        finished_at: row.try_get("finished_at")?,
        told: row.try_get("told")?,
        told_result: row.try_get("told_result")?,
        read: row.try_get("read")?,
    })
}

fn envelope(row: &Row) -> Result<Envelope, StoreError> {
    Ok(Envelope {
        id: MailId(row.try_get("id")?),
        seq: row.try_get("seq")?,
        from: serde_json::from_str(row.try_get("sender")?)?,
        priority: match row.try_get::<_, &str>("priority")? {
            "high" => Priority::High,
            _ => Priority::Normal,
        },
        hops: u32::try_from(row.try_get::<_, i32>("hops")?).unwrap_or_default(),
        sent_at: row.try_get("sent_at")?,
        body: serde_json::from_str(row.try_get("body")?)?,
    })
}
