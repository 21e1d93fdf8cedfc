//! Settling deferred calls by token: completion, and expiry by whoever meets an overdue token.

use holdfast_engine::{
    content::{Blob, Digest, Payload, ToolResult},
    ids::{CallId, MailId, SessionId, Token},
    mail::{MailBody, Priority, Sender, Settled},
};
use uuid::Uuid;

use crate::{
    Store,
    accept::Caller,
    counters::COUNTERS,
    errors::StoreError,
    idempotency::{self, Done},
    letters::{
        Ask, Letter, insert_blobs, lock_own, lock_run, lock_run_of_token, lock_session_of_token, take_in,
    },
    plant::{self, Mistake},
    retry::against_rivals,
    sql,
    transaction::{Parameters, Transaction, Writes, parameters},
};

/// What an external program has to say of a call.
#[derive(Debug, Clone, PartialEq)]
pub enum Report {
    /// Its result.
    Result(ToolResult),
    /// That it failed, and why.
    Error(String),
    /// That it may run; only for calls that were deferred until somebody says so.
    Approval,
}

impl Report {
    /// A digest of what is said: equal for a retry, different for a rival.
    fn digest(&self) -> Digest {
        let (kind, text) = match self {
            Self::Result(result) => ("result", serde_json::to_string(result).unwrap_or_default()),
            Self::Error(message) => ("error", message.clone()),
            Self::Approval => ("approval", String::new()),
        };
        Digest::of(format!("{kind}:{text}").as_bytes())
    }

    /// The letter that brings it, the state that its token is in then, and the blob that the letter names.
    fn letter(&self, call: CallId) -> (Letter, &'static str, Option<Blob>) {
        let (settled, blob) = match self {
            Self::Result(result) => {
                let (result, blob) = Payload::pack(result.clone());
                (Settled::Completed { result }, blob)
            }
            Self::Error(message) => (Settled::Failed { message: message.clone() }, None),
            Self::Approval => {
                let body = MailBody::Approved { tool_call_id: call };
                return (letter_of(call, body), "approved", None);
            }
        };
        let state = settled.word();
        (result_letter(call, settled), state, blob)
    }
}

/// Completes a deferred call: settles its token, mails the result to the session and, with
/// `resume`, lets the session go on. Accepted from the commit that made the token on, whether or
/// not the run that made it has stopped.
///
/// # Errors
/// [`StoreError::UnknownToken`] (also another owner's, and a deleted session's),
/// [`StoreError::TokenCompleted`], [`StoreError::TokenCancelled`], [`StoreError::TokenExpired`];
/// [`StoreError::NothingToApprove`] for an approval of a call that waits for its result.
pub async fn complete(
    store: &Store,
    caller: &Caller,
    token: Token,
    report: &Report,
    resume: bool,
) -> Result<Done<SessionId>, StoreError> {
    loop {
        match against_rivals(|| complete_once(store, caller, token, report, resume)).await? {
            Completion::Done(done) => {
                if let Done::Now(session) = done {
                    store.announce(session, true);
                }
                return Ok(done);
            }
            // Whoever meets an overdue token expires it, in a transaction that remembers no key. If somebody
            // else closes it first, another look says how.
            Completion::Overdue(session) => {
                if against_rivals(|| expire_once(store, token, session)).await? {
                    store.announce(session, true);
                    return Err(StoreError::TokenExpired);
                }
            }
        }
    }
}

/// What an attempt to complete a call met.
enum Completion {
    Done(Done<SessionId>),
    Overdue(SessionId),
}

async fn complete_once(
    store: &Store,
    caller: &Caller,
    token: Token,
    report: &Report,
    resume: bool,
) -> Result<Completion, StoreError> {
    let owner = caller.owner.clone().unwrap_or_default();
    let seen = match plant::made(Mistake::TokenBeforeLock) {
        true => {
            Transaction::over(store.client().await?)
                .query_opt(sql::LOCK_CONTINUATION, &[&token.0, &owner])
                .await?
        }
        false => None,
    };
    let tx = Transaction::over(store.client().await?);
    tx.prepare(&[sql::LOCK_SESSION_OF_TOKEN, sql::LOCK_RUN_OF_TOKEN, sql::LOCK_CONTINUATION]).await?;
    let wanted: Parameters<'_> = &[&token.0, &owner];
    let locks = async {
        futures::try_join!(
            lock_session_of_token(&tx, &token.0, &owner),
            lock_run_of_token(&tx, &token.0, &owner),
            tx.query_opt(sql::LOCK_CONTINUATION, wanted),
        )
    };
    let begun = idempotency::begin(&tx, caller.key.as_ref(), &token.to_string(), locks).await?;
    let (session, run, row) = match begun {
        Done::Now(locked) => locked,
        Done::Before { code, resource } => return Ok(Completion::Done(Done::Before { code, resource })),
    };
    let session = session.filter(|session| !session.deleted).ok_or(StoreError::UnknownToken)?;
    let row = seen.or(row).ok_or(StoreError::UnknownToken)?;
    let id = session.id;
    let digest = report.digest();
    match row.try_get::<_, &str>("state")? {
        "open" => {}
        "cancelled" => return Err(StoreError::TokenCancelled),
        "expired" => return Err(StoreError::TokenExpired),
        "approved" => return Err(StoreError::TokenCompleted { same_result: *report == Report::Approval }),
        _ => {
            let kept: Option<&[u8]> = row.try_get("result_hash")?;
            return Err(StoreError::TokenCompleted { same_result: kept == Some(&digest.0) });
        }
    }
    if *report == Report::Approval && !row.try_get::<_, bool>("approval")? {
        return Err(StoreError::NothingToApprove);
    }
    let call = CallId(row.try_get("call_id")?);
    if row.try_get("overdue")? {
        tx.rollback().await?;
        return Ok(Completion::Overdue(id));
    }
    let (letter, state, blob) = report.letter(call);
    let mut writes = Writes::default();
    close(&mut writes, token, state, Some(digest).filter(|_| *report != Report::Approval));
    let ask = if resume { Ask::GoOn } else { Ask::Fold };
    take_in(&mut writes, &session, run.as_ref(), vec![letter], ask, caller.traceparent.as_deref())?;
    insert_blobs(&mut writes, blob.iter().map(|blob| (session.owner.as_str(), blob)));
    tx.commit(writes).await?;
    Ok(Completion::Done(Done::Now(id)))
}

fn result_letter(call: CallId, settled: Settled) -> Letter {
    letter_of(call, MailBody::ContinuationResult { tool_call_id: call, settled })
}

fn letter_of(call: CallId, body: MailBody) -> Letter {
    Letter {
        id: MailId(Uuid::now_v7()),
        from: Sender::ToolCall { tool_call_id: call },
        priority: Priority::Normal,
        hops: 0,
        body,
    }
}

/// How a call ends that nobody has completed in time: with what was agreed for that, or as failed.
fn expired(on_deadline: Option<&str>) -> Result<(Settled, Option<Blob>), StoreError> {
    let Some(answer) = on_deadline else {
        let message = "expired: nobody completed this call before its deadline.".to_owned();
        return Ok((Settled::Failed { message }, None));
    };
    let (result, blob) = Payload::pack(serde_json::from_str::<ToolResult>(answer)?.bounded());
    Ok((Settled::Completed { result }, blob))
}

fn close(writes: &mut Writes<'_>, token: Token, state: &'static str, hash: Option<Digest>) {
    let hash = hash.map(|digest| digest.0.to_vec());
    writes.push(sql::SETTLE_CONTINUATION, parameters![token.0, state, hash]);
}

/// Expires up to `limit` overdue tokens, each in a transaction of its own. Returns how many. A token
/// that can't be expired is logged and passed over.
///
/// # Errors
/// [`StoreError::Unavailable`]; what was expired before stays so.
pub async fn expire_overdue(store: &Store, limit: i64) -> Result<u64, StoreError> {
    let due: Vec<(Token, SessionId)> = {
        let client = store.client().await?;
        let find = client.prepare_cached(sql::OVERDUE_CONTINUATIONS).await?;
        let rows = client.query(&find, &[&limit]).await?;
        rows.iter()
            .map(|row| Ok((Token(row.try_get(0)?), SessionId(row.try_get(1)?))))
            .collect::<Result<_, StoreError>>()?
    };
    let mut count = 0;
    for (token, session) in due {
        match against_rivals(|| expire_once(store, token, session)).await {
            Ok(true) => {
                store.announce(session, true);
                count += 1;
            }
            Ok(false) => {}
            Err(error) if error.is_unavailable() => return Err(error),
            // One token that can't be expired doesn't keep the others open.
            Err(error) => tracing::error!(%error, session_id = %session, "a token can't be expired"),
        }
    }
    Ok(count)
}

async fn expire_once(store: &Store, token: Token, id: SessionId) -> Result<bool, StoreError> {
    let tx = Transaction::over(store.client().await?);
    tx.prepare(&[sql::LOCK_SESSION, sql::LOCK_RUN]).await?;
    let (session, run) = match futures::try_join!(tx.begin(), lock_own(&tx, id, None), lock_run(&tx, id)) {
        Ok(((), session, run)) => (session, run),
        Err(StoreError::UnknownSession) => return Ok(false),
        Err(error) => return Err(error),
    };
    let row = tx.query_opt(sql::LOCK_CONTINUATION, &[&token.0, &session.owner]).await?;
    let Some(row) = row else { return Ok(false) };
    if !row.try_get::<_, bool>("overdue")? && !plant::made(Mistake::ExpireBlindly) {
        return Ok(false);
    }
    let call = CallId(row.try_get::<_, Uuid>("call_id")?);
    let (settled, blob) = expired(row.try_get("on_deadline")?)?;
    let mut writes = Writes::default();
    close(&mut writes, token, "expired", None);
    let letters = vec![result_letter(call, settled)];
    take_in(&mut writes, &session, run.as_ref(), letters, Ask::GoOn, None)?;
    insert_blobs(&mut writes, blob.iter().map(|blob| (session.owner.as_str(), blob)));
    tx.commit(writes).await?;
    COUNTERS.continuations_expired.add(1);
    Ok(true)
}
