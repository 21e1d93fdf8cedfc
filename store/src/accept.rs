//! What clients may ask of a session: each command is one transaction that appends mail, asks for a
//! run and writes the events, or refuses and leaves nothing.

use std::collections::BTreeMap;

use holdfast_engine::{
    content::{Blob, Payload, Query},
    decide::Mode,
    ids::{CallId, MailId, SessionId},
    mail::{Control, MailBody, Priority, Sender},
    session::Status,
};
use uuid::Uuid;

use crate::{
    Store,
    errors::StoreError,
    idempotency::{Done, Key, remember},
    letters::{
        Ask, Letter, Locked, LockedRun, MAILBOX_LIMIT, NewEvent, Receipt, insert_blobs, insert_events,
        lock_own, lock_runs, take_in,
    },
    retry::against_rivals,
    sql,
};

/// How many unread orders a mailbox holds, beside its mail.
pub const ORDER_LIMIT: i64 = 2 * MAILBOX_LIMIT;

/// Who asks, and how the request is traced.
#[derive(Debug, Clone)]
pub struct Caller {
    /// The owner whose sessions the caller sees; `None` sees all (the engine itself, never a client).
    pub owner: Option<String>,
    /// W3C trace context of the request.
    pub traceparent: Option<String>,
    /// The request's idempotency key.
    pub key: Option<Key>,
}

/// A user's message.
#[derive(Debug, Clone)]
pub struct Message {
    /// Its id; a repeat of it is the same message.
    pub id: MailId,
    /// What is asked.
    pub query: Payload<Query>,
    /// Blobs that the query names.
    pub blobs: Vec<Blob>,
}

/// A session to create.
#[derive(Debug, Clone)]
pub struct NewSession {
    /// Its id.
    pub id: SessionId,
    /// Its owner; empty where clients don't name themselves.
    pub owner: String,
    /// Its agent's slug.
    pub agent: String,
    /// The session it belongs to.
    pub parent: Option<SessionId>,
    /// The call of the parent that it answers.
    pub parent_call: Option<CallId>,
    /// Labels, for finding it.
    pub labels: BTreeMap<String, String>,
    /// Where it stands among its owner's runs; higher first.
    pub priority: i16,
    /// The first message.
    pub message: Option<Message>,
    /// How far it runs.
    pub run: Mode,
}

/// Creates a session, with its first message and run.
///
/// # Errors
/// [`StoreError::UnknownAgent`]; [`StoreError::UnknownSession`] if the parent isn't the owner's.
pub async fn create(store: &Store, caller: &Caller, new: &NewSession) -> Result<Done<SessionId>, StoreError> {
    let done = against_rivals(|| create_once(store, caller, new)).await?;
    if matches!(done, Done::Now(_)) {
        store.announce(new.id, new.run != Mode::None || new.message.is_some());
    }
    Ok(done)
}

async fn create_once(
    store: &Store,
    caller: &Caller,
    new: &NewSession,
) -> Result<Done<SessionId>, StoreError> {
    let mut client = store.client().await?;
    let tx = client.transaction().await?;
    if let Some((code, resource)) = remember(&tx, caller.key.as_ref(), &new.id.to_string()).await? {
        tx.rollback().await?;
        return Ok(Done::Before { code, resource });
    }
    let current = tx.prepare_cached(sql::CURRENT_AGENT).await?;
    let revision: String = match tx.query_opt(&current, &[&new.agent]).await? {
        Some(row) => row.try_get(0)?,
        None => return Err(StoreError::UnknownAgent(new.agent.clone())),
    };
    let root = match new.parent {
        Some(parent) => lock_own(&tx, parent, Some(&new.owner)).await?.root,
        None => new.id.0,
    };
    let labels = serde_json::to_string(&new.labels)?;
    let insert = tx.prepare_cached(sql::INSERT_SESSION).await?;
    let parent = new.parent.map(|parent| parent.0);
    let parent_call = new.parent_call.map(|call| call.0);
    tx.execute(
        &insert,
        &[&new.id.0, &new.owner, &new.agent, &revision, &parent, &parent_call, &root, &new.priority, &labels],
    )
    .await?;
    let created = NewEvent { kind: "session.created", ..NewEvent::updated(1, Status::Ready, None, None) };
    let created = [created];
    let session = Locked { event_seq: 1, ..Locked::fresh(new.id, &new.owner, root) };
    let letters: Vec<Letter> = new.message.iter().map(|message| user_letter(message, &new.owner)).collect();
    let ask = match new.run {
        _ if letters.is_empty() => Ask::Nothing,
        // Folding shows the message as the session's first turn although nobody answers it yet.
        Mode::None => Ask::Fold,
        mode => Ask::Run(mode),
    };
    let blobs = new.message.as_ref().map_or(&[][..], |message| &message.blobs);
    futures::try_join!(
        insert_events(&tx, new.id, &new.owner, 0, &created),
        take_in(&tx, &session, None, letters, ask, caller.traceparent.as_deref()),
        insert_blobs(&tx, &new.owner, blobs),
    )?;
    tx.commit().await?;
    Ok(Done::Now(new.id))
}

fn user_letter(message: &Message, owner: &str) -> Letter {
    Letter {
        id: message.id,
        from: Sender::User { owner: Some(owner.to_owned()).filter(|owner| !owner.is_empty()) },
        priority: Priority::Normal,
        hops: 0,
        body: MailBody::UserMessage { query: message.query.clone() },
    }
}

/// Sends a user's message; the run that it asks for may be under way already.
///
/// # Errors
/// [`StoreError::UnknownSession`], [`StoreError::MailboxFull`].
pub async fn post(
    store: &Store,
    caller: &Caller,
    session: SessionId,
    message: &Message,
    run: Mode,
) -> Result<Done<Receipt>, StoreError> {
    let owner = caller.owner.clone().unwrap_or_default();
    let letter = user_letter(message, &owner);
    let ask = if run == Mode::None { Ask::Fold } else { Ask::Run(run) };
    send(store, caller, session, letter, ask, &message.blobs).await
}

/// Sends a letter; `ask` says what it wakes.
///
/// # Errors
/// [`StoreError::UnknownSession`], [`StoreError::MailboxFull`].
pub async fn send(
    store: &Store,
    caller: &Caller,
    session: SessionId,
    letter: Letter,
    ask: Ask,
    blobs: &[Blob],
) -> Result<Done<Receipt>, StoreError> {
    let done = against_rivals(|| send_once(store, caller, session, &letter, ask, blobs)).await?;
    if let Done::Now(Receipt { duplicate: false, .. }) = done {
        store.announce(session, ask != Ask::Nothing);
    }
    Ok(done)
}

async fn send_once(
    store: &Store,
    caller: &Caller,
    id: SessionId,
    letter: &Letter,
    ask: Ask,
    blobs: &[Blob],
) -> Result<Done<Receipt>, StoreError> {
    let mut client = store.client().await?;
    let tx = client.transaction().await?;
    let resource = format!("{id}/{}", letter.id);
    if let Some((code, resource)) = remember(&tx, caller.key.as_ref(), &resource).await? {
        tx.rollback().await?;
        return Ok(Done::Before { code, resource });
    }
    let session = lock_own(&tx, id, caller.owner.as_deref()).await?;
    let find = tx.prepare_cached(sql::FIND_MAIL).await?;
    if let Some(row) = tx.query_opt(&find, &[&id.0, &letter.id.0]).await? {
        let receipt = Receipt { id: letter.id, seq: row.try_get(0)?, duplicate: true };
        tx.commit().await?;
        return Ok(Done::Now(receipt));
    }
    has_room(&tx, &session, matches!(letter.body, MailBody::Control { .. })).await?;
    let run = lock_runs(&tx, &[id]).await?.pop();
    let cancelled = match &letter.body {
        MailBody::Control { message: Control::CancelCalls { tool_call_ids } } => Some(tool_call_ids),
        _ => None,
    };
    if let Some(calls) = cancelled {
        cancel_continuations(&tx, id, Some(calls)).await?;
    }
    let traceparent = caller.traceparent.as_deref();
    let taken = take_in(&tx, &session, run.as_ref(), vec![letter.clone()], ask, traceparent).await?;
    insert_blobs(&tx, &session.owner, blobs).await?;
    tx.commit().await?;
    Ok(Done::Now(Receipt { id: letter.id, seq: taken.first_seq, duplicate: false }))
}

/// Refuses a letter for which there is no room. Orders, which requests of people bring along, take no
/// letter's place and have places of their own.
async fn has_room(
    tx: &deadpool_postgres::Transaction<'_>,
    session: &Locked,
    order: bool,
) -> Result<(), StoreError> {
    let (limit, count) = match order {
        true => (ORDER_LIMIT, sql::COUNT_ORDERS),
        false => (MAILBOX_LIMIT, sql::COUNT_UNREAD),
    };
    let unread = session.mail_seq - session.mail_cursor + i64::try_from(session.left).unwrap_or(i64::MAX);
    if unread < limit {
        return Ok(());
    }
    let count = tx.prepare_cached(count).await?;
    if tx.query_one(&count, &[&session.id.0]).await?.try_get::<_, i64>(0)? >= limit {
        return Err(StoreError::MailboxFull { limit });
    }
    Ok(())
}

/// Cancels open tokens of a session, all of them or those of `calls`. Returns whose they were.
pub(crate) async fn cancel_continuations(
    tx: &deadpool_postgres::Transaction<'_>,
    session: SessionId,
    calls: Option<&[CallId]>,
) -> Result<Vec<CallId>, StoreError> {
    let calls: Option<Vec<Uuid>> = calls.map(|calls| calls.iter().map(|call| call.0).collect());
    let cancel = tx.prepare_cached(sql::CANCEL_OPEN_CONTINUATIONS).await?;
    let rows = tx.query(&cancel, &[&session.0, &calls]).await?;
    rows.iter().map(|row| Ok(CallId(row.try_get(0)?))).collect()
}

/// Runs a session on from where it stands; lifts a hold.
///
/// # Errors
/// [`StoreError::UnknownSession`], [`StoreError::RunInProgress`].
pub async fn resume(
    store: &Store,
    caller: &Caller,
    id: SessionId,
    mode: Mode,
) -> Result<Done<SessionId>, StoreError> {
    let done = against_rivals(async || {
        change(store, caller, id, async |tx, session, run| {
            if run.is_some_and(|run| run.mode != Mode::None) {
                return Err(StoreError::RunInProgress);
            }
            let trace = caller.traceparent.as_deref();
            take_in(tx, session, run, Vec::new(), Ask::Run(mode), trace).await.map(|_| ())
        })
        .await
    })
    .await?;
    store.announce(id, true);
    Ok(done)
}

/// Stops a session's run. With `deferred`, its open deferred calls are cancelled too, which is
/// allowed without a run.
///
/// The worker that holds the run obeys; this returns before it has.
///
/// # Errors
/// [`StoreError::UnknownSession`], [`StoreError::NoActiveRun`], [`StoreError::MailboxFull`].
pub async fn cancel(
    store: &Store,
    caller: &Caller,
    id: SessionId,
    deferred: bool,
) -> Result<Done<SessionId>, StoreError> {
    let done = against_rivals(async || {
        change(store, caller, id, async |tx, session, run| {
            let active = run.is_some_and(|run| run.mode != Mode::None);
            let calls = if deferred { cancel_continuations(tx, id, None).await? } else { Vec::new() };
            if !active && calls.is_empty() {
                return Err(StoreError::NoActiveRun);
            }
            has_room(tx, session, true).await?;
            let mut letters = Vec::new();
            if deferred {
                // All of them, also those whose tokens a step is about to open.
                letters.push(order(caller, Control::CancelDeferred));
            }
            letters.push(order(caller, Control::StopRun));
            take_in(tx, session, run, letters, Ask::Fold, caller.traceparent.as_deref()).await.map(|_| ())
        })
        .await
    })
    .await?;
    store.announce(id, true);
    Ok(done)
}

/// Orders a pause: a run ends after its current step, and the session is held.
///
/// # Errors
/// [`StoreError::UnknownSession`], [`StoreError::MailboxFull`].
pub async fn pause(store: &Store, caller: &Caller, id: SessionId) -> Result<Done<SessionId>, StoreError> {
    let done = against_rivals(async || {
        change(store, caller, id, async |tx, session, run| {
            has_room(tx, session, true).await?;
            let letters = vec![order(caller, Control::Pause)];
            take_in(tx, session, run, letters, Ask::Fold, caller.traceparent.as_deref()).await.map(|_| ())
        })
        .await
    })
    .await?;
    store.announce(id, true);
    Ok(done)
}

fn order(caller: &Caller, message: Control) -> Letter {
    let owner = caller.owner.clone().filter(|owner| !owner.is_empty());
    Letter {
        id: MailId(Uuid::now_v7()),
        from: Sender::User { owner },
        priority: Priority::High,
        hops: 0,
        body: MailBody::Control { message },
    }
}

/// One transaction under the session's lock: the key first, then the session, then its run.
async fn change(
    store: &Store,
    caller: &Caller,
    id: SessionId,
    work: impl AsyncFnOnce(
        &deadpool_postgres::Transaction<'_>,
        &Locked,
        Option<&LockedRun>,
    ) -> Result<(), StoreError>,
) -> Result<Done<SessionId>, StoreError> {
    let mut client = store.client().await?;
    let tx = client.transaction().await?;
    if let Some((code, resource)) = remember(&tx, caller.key.as_ref(), &id.to_string()).await? {
        tx.rollback().await?;
        return Ok(Done::Before { code, resource });
    }
    let session = lock_own(&tx, id, caller.owner.as_deref()).await?;
    let run = lock_runs(&tx, &[id]).await?.pop();
    work(&tx, &session, run.as_ref()).await?;
    tx.commit().await?;
    Ok(Done::Now(id))
}
