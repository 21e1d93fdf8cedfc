//! What clients may ask of a session: each command is one transaction that appends mail, asks for a
//! run and writes the events, or refuses and leaves nothing.

use holdfast_engine::{
    content::{Blob, Payload, Query},
    decide::Mode,
    ids::{CallId, MailId, SessionId},
    mail::{Control, MailBody, Priority, Sender},
};
use uuid::Uuid;

use crate::{
    Store,
    counters::COUNTERS,
    errors::StoreError,
    idempotency::{self, Done, Key},
    letters::{Ask, Letter, Locked, LockedRun, MAILBOX_LIMIT, Receipt, lock_own, lock_run, take_in},
    post, quota,
    retry::against_rivals,
    sql,
    transaction::{Transaction, Writes, parameters},
    waking::Wake,
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
    /// Whether it doesn't wait for calls that the conversation waits for.
    pub interrupt: bool,
}

/// Lets a request through that asks for a run; a repeat of one that was carried out always.
pub(crate) async fn admit(
    store: &Store,
    caller: &Caller,
    owner: &str,
    letter: Option<(SessionId, MailId)>,
) -> Result<(), StoreError> {
    let refused = match quota::admit(store, owner).await {
        Err(error @ StoreError::Backlog { .. }) => error,
        other => return other,
    };
    let client = store.client().await?;
    if let Some(key) = &caller.key {
        let recall = client.prepare_cached(sql::RECALL_KEY).await?;
        if client.query_opt(&recall, &[&key.principal, &key.key]).await?.is_some() {
            return Ok(());
        }
    }
    if let Some((session, letter)) = letter {
        let find = client.prepare_cached(sql::FIND_MAIL).await?;
        if client.query_opt(&find, &[&session.0, &letter.0]).await?.is_some() {
            return Ok(());
        }
    }
    COUNTERS.refused_backlog.add(1);
    Err(refused)
}

pub(crate) fn user_letter(message: &Message, owner: &str) -> Letter {
    Letter {
        id: message.id,
        from: Sender::User { owner: Some(owner.to_owned()).filter(|owner| !owner.is_empty()) },
        priority: if message.interrupt { Priority::High } else { Priority::Normal },
        hops: 0,
        body: MailBody::UserMessage { query: message.query.clone() },
    }
}

/// Sends a user's message; the run that it asks for may be under way already.
///
/// # Errors
/// [`StoreError::UnknownSession`], [`StoreError::MailboxFull`]; [`StoreError::Backlog`] if it asks for a run
/// and too many of the owner's wait.
pub async fn post(
    store: &Store,
    caller: &Caller,
    session: SessionId,
    message: &Message,
    run: Mode,
) -> Result<Done<Receipt>, StoreError> {
    let owner = caller.owner.clone().unwrap_or_default();
    if run != Mode::None {
        admit(store, caller, &owner, Some((session, message.id))).await?;
    }
    let letter = user_letter(message, &owner);
    let ask = if run == Mode::None { Ask::Fold } else { Ask::Run(run) };
    send(store, caller, session, letter, ask, &message.blobs).await
}

/// Sends a letter; `wake` says what decides whether it starts a run.
///
/// # Errors
/// [`StoreError::UnknownSession`], [`StoreError::MailboxFull`].
pub async fn send(
    store: &Store,
    caller: &Caller,
    session: SessionId,
    letter: Letter,
    wake: impl Into<Wake>,
    blobs: &[Blob],
) -> Result<Done<Receipt>, StoreError> {
    Ok(match post::deliver(store, caller, session, &letter, wake.into(), blobs).await? {
        Done::Now(accepted) => Done::Now(accepted.receipt),
        Done::Before { code, resource } => Done::Before { code, resource },
    })
}

/// Refuses a letter for which there is no room. Orders, which requests of people bring along, take no letter's place
/// and have places of their own. `added` are those that the transaction is to store in the same places.
pub(crate) async fn has_room(
    tx: &Transaction,
    session: &Locked,
    order: bool,
    added: i64,
) -> Result<(), StoreError> {
    let (limit, count) = match order {
        true => (ORDER_LIMIT, sql::COUNT_ORDERS),
        false => (MAILBOX_LIMIT, sql::COUNT_UNREAD),
    };
    let unread = session.mail_seq - session.mail_cursor + i64::try_from(session.left).unwrap_or(i64::MAX);
    if unread < limit {
        return Ok(());
    }
    let stored: i64 = tx.query_one(count, &[&session.id.0]).await?.try_get(0)?;
    if stored.saturating_add(added) >= limit { Err(refused_for_room(order)) } else { Ok(()) }
}

pub(crate) fn refused_for_room(order: bool) -> StoreError {
    COUNTERS.refused_mailbox.add(1);
    StoreError::MailboxFull { limit: if order { ORDER_LIMIT } else { MAILBOX_LIMIT } }
}

/// Cancels open tokens of a session, all of them or those of `calls`.
pub(crate) fn cancel_continuations(writes: &mut Writes<'_>, session: SessionId, calls: Option<&[CallId]>) {
    let calls: Option<Vec<Uuid>> = calls.map(|calls| calls.iter().map(|call| call.0).collect());
    writes.push(sql::CANCEL_OPEN_CONTINUATIONS, parameters![session.0, calls]);
}

/// Whether calls of a session wait for child sessions, times or mail.
async fn has_waiting(tx: &Transaction, session: SessionId) -> Result<bool, StoreError> {
    Ok(tx.query_one(sql::HAS_WAITING_CALLS, &[&session.0]).await?.try_get(0)?)
}

async fn has_open(tx: &Transaction, session: SessionId) -> Result<bool, StoreError> {
    Ok(tx.query_one(sql::HAS_OPEN_CONTINUATIONS, &[&session.0]).await?.try_get(0)?)
}

/// Runs a session on from where it stands; lifts a hold.
///
/// # Errors
/// [`StoreError::UnknownSession`], [`StoreError::RunInProgress`], [`StoreError::Backlog`].
pub async fn resume(
    store: &Store,
    caller: &Caller,
    id: SessionId,
    mode: Mode,
) -> Result<Done<SessionId>, StoreError> {
    if let Some(owner) = &caller.owner {
        admit(store, caller, owner, None).await?;
    }
    let done = against_rivals(async || {
        change(store, caller, id, async |_, writes, session, run| {
            if run.is_some_and(|run| run.mode != Mode::None) {
                return Err(StoreError::RunInProgress);
            }
            let trace = caller.traceparent.as_deref();
            take_in(writes, session, run, Vec::new(), Ask::Run(mode), trace).map(|_| ())
        })
        .await
    })
    .await?;
    if let (Done::Now(_), Some(owner)) = (&done, &caller.owner) {
        store.backlog.queued(owner);
    }
    store.announce(id, true);
    Ok(done)
}

/// Stops a session's run, and the child sessions that work for it, which they may without a run of its own. With
/// `deferred`, its open deferred calls are cancelled too, which is allowed without a run as well.
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
        change(store, caller, id, async |tx, writes, session, run| {
            let active = run.is_some_and(|run| run.mode != Mode::None);
            // Under the session's lock no token opens or is settled.
            let cancels = active || has_waiting(tx, id).await? || (deferred && has_open(tx, id).await?);
            if !cancels {
                return Err(StoreError::NoActiveRun);
            }
            has_room(tx, session, true, 0).await?;
            let mut letters = Vec::new();
            if deferred {
                cancel_continuations(writes, id, None);
                // All of them, also those whose tokens a step is about to open.
                letters.push(order(caller, Control::CancelDeferred));
            }
            letters.push(order(caller, Control::StopRun));
            take_in(writes, session, run, letters, Ask::Fold, caller.traceparent.as_deref()).map(|_| ())
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
    give_order(store, caller, id, Control::Pause, Ask::Fold).await
}

/// Cancels the calls that the conversation waits for; those in the background and deferred ones go on. The model is
/// told, by a run if there is none.
///
/// # Errors
/// [`StoreError::UnknownSession`], [`StoreError::MailboxFull`].
pub async fn cancel_attached(
    store: &Store,
    caller: &Caller,
    id: SessionId,
) -> Result<Done<SessionId>, StoreError> {
    give_order(store, caller, id, Control::CancelAllAttached, Ask::GoOn).await
}

async fn give_order(
    store: &Store,
    caller: &Caller,
    id: SessionId,
    message: Control,
    ask: Ask,
) -> Result<Done<SessionId>, StoreError> {
    let done = against_rivals(async || {
        change(store, caller, id, async |tx, writes, session, run| {
            has_room(tx, session, true, 0).await?;
            let letters = vec![order(caller, message.clone())];
            take_in(writes, session, run, letters, ask, caller.traceparent.as_deref()).map(|_| ())
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
    work: impl AsyncFnOnce(&Transaction, &mut Writes<'_>, &Locked, Option<&LockedRun>) -> Result<(), StoreError>,
) -> Result<Done<SessionId>, StoreError> {
    let tx = Transaction::over(store.client().await?);
    tx.prepare(&[sql::LOCK_SESSION, sql::LOCK_RUN]).await?;
    let reads = async { futures::try_join!(lock_own(&tx, id, caller.owner.as_deref()), lock_run(&tx, id)) };
    let (session, run) = match idempotency::begin(&tx, caller.key.as_ref(), &id.to_string(), reads).await? {
        Done::Now(read) => read,
        Done::Before { code, resource } => return Ok(Done::Before { code, resource }),
    };
    let mut writes = Writes::default();
    work(&tx, &mut writes, &session, run.as_ref()).await?;
    tx.commit(writes).await?;
    Ok(Done::Now(id))
}
