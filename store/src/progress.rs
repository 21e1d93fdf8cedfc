//! Progress of running calls, in the streams of their sessions: told while it is fresh, and no part of any step.

use std::collections::BTreeMap;

use holdfast_engine::ids::{CallId, SessionId};
use serde_json::{Value, json};

use crate::{
    Store,
    errors::StoreError,
    letters::{Mailbox, NewEvent, lock_runs, lock_sessions, write},
    sql,
    transaction::{Transaction, Writes},
};

/// A report of a call.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// The call's session.
    pub session: SessionId,
    /// The epoch of the lease under which it runs.
    pub epoch: i64,
    /// The call.
    pub call: CallId,
    /// Its tool.
    pub tool: String,
    /// What is told.
    pub news: News,
}

/// What is told of a running call.
#[derive(Debug, Clone, PartialEq)]
pub enum News {
    /// How it is coming along.
    Progress(Value),
    /// A hook gave no usable answer.
    HookFailed {
        /// Which.
        hook: String,
        /// `before` or `after`.
        when: &'static str,
        /// Why, in words that quote nothing of the call.
        reason: String,
    },
}

impl Entry {
    fn event(&self) -> NewEvent {
        let mut body = json!({"tool_call_id": self.call, "tool": self.tool});
        match &self.news {
            News::Progress(progress) => {
                body["progress"] = progress.clone();
                NewEvent::new("tool.progressed", &body)
            }
            News::HookFailed { hook, when, reason } => {
                body["hook"] = json!(hook);
                body["when"] = json!(when);
                body["reason"] = json!(reason);
                NewEvent::new("hook.failed", &body)
            }
        }
    }
}

/// Appends reports to their sessions' streams. Those whose lease is gone are left out.
///
/// # Errors
/// [`StoreError`] as the database has it; then none is told.
pub async fn record(store: &Store, entries: &[Entry]) -> Result<(), StoreError> {
    let mut by_session: BTreeMap<SessionId, Vec<&Entry>> = BTreeMap::new();
    for entry in entries {
        by_session.entry(entry.session).or_default().push(entry);
    }
    let ids: Vec<SessionId> = by_session.keys().copied().collect();
    let tx = Transaction::over(store.client().await?);
    tx.prepare(&[sql::LOCK_SESSION, sql::LOCK_RUN]).await?;
    let ((), sessions, runs) =
        futures::try_join!(tx.begin(), lock_sessions(&tx, &ids), lock_runs(&tx, &ids))?;
    let mut told = Vec::new();
    for session in sessions.into_iter().filter(|session| !session.deleted) {
        let run = runs.iter().find(|run| run.session == session.id && run.claimed);
        let fresh = by_session.get(&session.id).into_iter().flatten();
        let fresh = fresh.filter(|entry| run.is_some_and(|run| run.epoch == entry.epoch));
        let events: Vec<NewEvent> = fresh.map(|entry| entry.event()).collect();
        if !events.is_empty() {
            let mut mailbox = Mailbox::of(session, None);
            mailbox.happen(events);
            told.push(mailbox);
        }
    }
    if told.is_empty() {
        return tx.rollback().await;
    }
    let mut writes = Writes::default();
    write(&mut writes, &told)?;
    tx.commit(writes).await?;
    for mailbox in told {
        store.announce(mailbox.session.id, false);
    }
    Ok(())
}
