//! Deleting a session and all below it. The mark is the fence: commits, spawns and accepts check it
//! under the session's lock. Rows go later, in bounded passes.

use holdfast_engine::{ids::SessionId, mail::Settled};
use serde_json::json;
use uuid::Uuid;

use crate::{
    Store,
    accept::Caller,
    commit::{end_of_child, parent_of, tell},
    errors::StoreError,
    letters::{NewEvent, insert_events, lock_own, lock_run, lock_runs, lock_sessions},
    retry::against_rivals,
    sql,
    transaction::{Transaction, Writes},
};

/// What a deletion took, or would take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The session and its descendants, deepest first.
    pub sessions: Vec<SessionId>,
    /// How many tokens go with them.
    pub continuations: i64,
}

/// Deletes a session with its descendants and their tokens; with `dry_run`, only says what it would.
///
/// # Errors
/// [`StoreError::UnknownSession`]; [`StoreError::RunInProgress`] while a worker holds a run of the
/// tree or of an ancestor. Runs that are queued or parked don't refuse.
pub async fn delete(
    store: &Store,
    caller: &Caller,
    id: SessionId,
    dry_run: bool,
) -> Result<Plan, StoreError> {
    let (plan, told) = against_rivals(|| delete_once(store, caller, id, dry_run)).await?;
    if let Some(parent) = told {
        store.announce(parent, true);
    }
    if !dry_run {
        for session in &plan.sessions {
            store.announce(*session, false);
        }
    }
    Ok(plan)
}

async fn delete_once(
    store: &Store,
    caller: &Caller,
    id: SessionId,
    dry_run: bool,
) -> Result<(Plan, Option<SessionId>), StoreError> {
    let tx = Transaction::begun(store.client().await?).await?;
    lock_own(&tx, id, caller.owner.as_deref()).await?;
    let tree = lock_tree(&tx, id).await?;
    let ids: Vec<Uuid> = tree.iter().map(|session| session.0).collect();
    lock_runs(&tx, &tree).await?;
    if tx.query_one(sql::RUN_IN_TREE, &[&id.0, &ids]).await?.try_get::<_, bool>(0)? {
        return Err(StoreError::RunInProgress);
    }
    let continuations = tx.query_one(sql::COUNT_CONTINUATIONS, &[&ids]).await?.try_get(0)?;
    let plan = Plan { sessions: tree, continuations };
    if dry_run {
        tx.rollback().await?;
        return Ok((plan, None));
    }
    let mut writes = Writes::default();
    let parent = parent_of(&tx, id).await?;
    if let Some((parent, call)) = parent {
        // Behind the tree's locks and so out of their order: a rival that does likewise is met by trying again.
        let (recipient, run) = (lock_sessions(&tx, &[parent]).await?.pop(), lock_run(&tx, parent).await?);
        let message = "the session that worked on this call was deleted.".to_owned();
        let letter = end_of_child(id, None, call, Settled::Failed { message });
        tell(&tx, &mut writes, recipient.as_ref(), run.as_ref(), letter, None).await?;
    }
    mark(&tx, &mut writes, &ids).await?;
    tx.commit(writes).await?;
    Ok((plan, parent.map(|(parent, _)| parent)))
}

/// Locks a session and all below it. Returns them, deepest first.
pub(crate) async fn lock_tree(tx: &Transaction, id: SessionId) -> Result<Vec<SessionId>, StoreError> {
    let mut locked: Vec<SessionId> = Vec::new();
    // A child that was spawned while we waited for its parent's lock shows in the next look.
    loop {
        let rows = tx.query(sql::LOCK_TREE, &[&id.0]).await?;
        let tree: Vec<SessionId> =
            rows.iter().map(|row| row.try_get(0).map(SessionId)).collect::<Result<_, _>>()?;
        if tree.iter().all(|session| locked.contains(session)) {
            return Ok(tree);
        }
        lock_sessions(tx, &tree).await?;
        locked = tree;
    }
}

/// Marks locked sessions as deleted, takes their runs and tokens away and says so in their streams.
pub(crate) async fn mark(
    tx: &Transaction,
    writes: &mut Writes<'_>,
    ids: &Vec<Uuid>,
) -> Result<(), StoreError> {
    for statement in [sql::DELETE_RUNS, sql::DELETE_CONTINUATIONS] {
        tx.execute(statement, &[ids]).await?;
    }
    for row in tx.query(sql::DELETE_TREE, &[ids]).await? {
        let (session, seq): (Uuid, i64) = (row.try_get("id")?, row.try_get("event_seq")?);
        let event = NewEvent::new("session.deleted", &json!({}));
        insert_events(writes, SessionId(session), row.try_get("owner")?, seq - 1, &[event]);
    }
    Ok(())
}
