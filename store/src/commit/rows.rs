//! The rows that a step adds or changes: turns, calls and tokens, one statement a table.

use deadpool_postgres::Transaction;
use holdfast_engine::{
    content::{Blob, Usage},
    ids::CallId,
    policy::Disposition,
    session::{CallState, Event, TrackedCall},
    turn::{TURN_FORMAT, Turn, TurnBody},
};
use uuid::Uuid;

use super::{Commit, DETAIL_LIMIT, Member, RunAfter};
use crate::{
    errors::StoreError,
    letters::{NewEvent, plain},
    sql,
};

/// Writes what the members changed. The statements are sent without waiting for one another: they
/// touch different tables, and the transaction fails as a whole.
pub(super) async fn write(tx: &Transaction<'_>, members: &[Member<'_>]) -> Result<(), StoreError> {
    futures::try_join!(
        update_sessions(tx, members),
        insert_turns(tx, members),
        upsert_calls(tx, members),
        open_tokens(tx, members),
        insert_events(tx, members),
        end_runs(tx, members),
        insert_blobs(tx, members),
    )?;
    close_tokens(tx, members).await?;
    park_runs(tx, members).await
}

/// One column of a statement's arrays.
fn column<'a, T, R>(items: &'a [T], pick: impl Fn(&'a T) -> R) -> Vec<R> {
    items.iter().map(pick).collect()
}

async fn update_sessions(tx: &Transaction<'_>, members: &[Member<'_>]) -> Result<(), StoreError> {
    let left = column(members, |member| {
        let numbers = member.work.session.left.iter().map(|letter| letter.seq.to_string());
        format!("{{{}}}", numbers.collect::<Vec<_>>().join(","))
    });
    let statement = tx.prepare_cached(sql::COMMIT_SESSION).await?;
    let stored = tx
        .execute(
            &statement,
            &[
                &column(members, |member| member.work.session.id.0),
                &column(members, |member| member.work.session.version),
                &column(members, |member| member.work.id),
                &column(members, |member| member.status.word()),
                &column(members, |member| member.detail.as_deref()),
                &column(members, |member| member.work.session.hold.word()),
                &column(members, |member| member.work.session.length()),
                &column(members, |member| member.work.session.cursor),
                &left,
                &column(members, |member| member.before.event_seq + count(&member.events)),
                &column(members, |member| member.work.agent_revision.as_str()),
            ],
        )
        .await?;
    if stored == members.len() as u64 {
        return Ok(());
    }
    Err(StoreError::Corrupt("a session's row changed under its lock".to_owned()))
}

fn count<T>(items: &[T]) -> i64 {
    i64::try_from(items.len()).unwrap_or(i64::MAX)
}

async fn insert_turns(tx: &Transaction<'_>, members: &[Member<'_>]) -> Result<(), StoreError> {
    let turns: Vec<(&Commit, &Turn)> = members
        .iter()
        .flat_map(|member| member.work.happened.iter().map(|event| (member.work, event)))
        .filter_map(|(work, event)| match event {
            Event::Sealed(turn) | Event::Answered { turn, .. } => Some((work, &**turn)),
            _ => None,
        })
        .collect();
    if turns.is_empty() {
        return Ok(());
    }
    let tokens = |pick: fn(Usage) -> u64| {
        column(&turns, |(_, turn)| match &turn.body {
            TurnBody::Llm(llm) => llm.usage.map(|usage| i64::try_from(pick(usage)).unwrap_or(i64::MAX)),
            TurnBody::User(_) => None,
        })
    };
    let bodies: Vec<String> = turns.iter().map(|(_, turn)| turn.body.to_json()).collect::<Result<_, _>>()?;
    let statement = tx.prepare_cached(sql::INSERT_TURNS).await?;
    tx.execute(
        &statement,
        &[
            &column(&turns, |(work, _)| work.session.id.0),
            &column(&turns, |(_, turn)| turn.position),
            &column(&turns, |(_, turn)| turn.id.0),
            &column(&turns, |(_, turn)| turn.body.tag()),
            &vec![TURN_FORMAT; turns.len()],
            &bodies,
            &column(&turns, |(work, _)| work.session.version + 1),
            &column(&turns, |(_, turn)| turn.at),
            &tokens(|usage| usage.input_tokens),
            &tokens(|usage| usage.output_tokens),
            &tokens(|usage| usage.cached_tokens),
        ],
    )
    .await?;
    Ok(())
}

/// The calls that a step touched, as they stand after it.
fn touched_calls(work: &Commit) -> impl Iterator<Item = &TrackedCall> {
    let sealed = work.happened.iter().any(|event| matches!(event, Event::Sealed(_)));
    let touched = move |id: CallId| {
        work.happened.iter().any(|event| match event {
            Event::Answered { calls, .. } => calls.iter().any(|call| call.id == id),
            Event::Started { call, .. }
            | Event::Deferred { call, .. }
            | Event::Returned { call }
            | Event::Finished { call, .. } => *call == id,
            _ => false,
        })
    };
    work.session.calls.iter().filter(move |call| sealed || touched(call.id))
}

async fn upsert_calls(tx: &Transaction<'_>, members: &[Member<'_>]) -> Result<(), StoreError> {
    let calls: Vec<(Uuid, &TrackedCall)> = members
        .iter()
        .flat_map(|member| touched_calls(member.work).map(|call| (member.work.session.id.0, call)))
        .collect();
    if calls.is_empty() {
        return Ok(());
    }
    let dispositions: Vec<String> = calls
        .iter()
        .map(|(_, call)| serde_json::to_string(&call.policy.disposition))
        .collect::<Result<_, _>>()?;
    let settled: Vec<Option<String>> = calls
        .iter()
        .map(|(_, call)| call.settled.as_ref().map(serde_json::to_string).transpose())
        .collect::<Result<_, _>>()?;
    let deadline =
        |call: &TrackedCall| call.policy.deadline_seconds.and_then(|seconds| i64::try_from(seconds).ok());
    let statement = tx.prepare_cached(sql::UPSERT_CALLS).await?;
    tx.execute(
        &statement,
        &[
            &column(&calls, |(session, _)| *session),
            &column(&calls, |(_, call)| call.id.0),
            &column(&calls, |(_, call)| call.turn),
            &column(&calls, |(_, call)| call.index),
            &column(&calls, |(_, call)| call.provider_id.as_str()),
            &column(&calls, |(_, call)| call.name.as_str()),
            &column(&calls, |(_, call)| call.arguments.as_str()),
            &dispositions,
            &column(&calls, |(_, call)| call.policy.decided_by.as_str()),
            &column(&calls, |(_, call)| call.policy.idempotent),
            &column(&calls, |(_, call)| deadline(call)),
            &column(&calls, |(_, call)| call.state.word()),
            &column(&calls, |(_, call)| call.attempt),
            &column(&calls, |(_, call)| call.token.map(|token| token.0)),
            &column(&calls, |(_, call)| call.expires_at),
            &column(&calls, |(_, call)| call.created_at),
            &column(&calls, |(_, call)| call.started_at),
            &settled,
            &column(&calls, |(_, call)| call.finished_at),
            &column(&calls, |(_, call)| call.told),
            &column(&calls, |(_, call)| call.told_result),
        ],
    )
    .await?;
    Ok(())
}

/// Opens the tokens of calls that steps deferred. A token works from this commit on.
async fn open_tokens(tx: &Transaction<'_>, members: &[Member<'_>]) -> Result<(), StoreError> {
    let deferred = |work: &Commit, id: CallId| {
        work.happened.iter().any(|event| matches!(event, Event::Deferred { call, .. } if *call == id))
    };
    let opened: Vec<(&Member<'_>, &TrackedCall, Uuid)> = members
        .iter()
        .flat_map(|member| touched_calls(member.work).map(move |call| (member, call)))
        .filter(|(member, call)| deferred(member.work, call.id))
        .filter_map(|(member, call)| call.token.map(|token| (member, call, token.0)))
        .collect();
    if opened.is_empty() {
        return Ok(());
    }
    let reason = |call: &TrackedCall| match call.policy.disposition.base() {
        Disposition::Defer { reason } => plain(reason, DETAIL_LIMIT),
        _ => String::new(),
    };
    let statement = tx.prepare_cached(sql::INSERT_CONTINUATIONS).await?;
    tx.execute(
        &statement,
        &[
            &column(&opened, |(_, _, token)| *token),
            &column(&opened, |(member, _, _)| member.work.session.id.0),
            &column(&opened, |(_, call, _)| call.id.0),
            &column(&opened, |(member, _, _)| member.before.owner.as_str()),
            &column(&opened, |(member, _, _)| member.work.agent.as_str()),
            &column(&opened, |(_, call, _)| call.name.as_str()),
            &column(&opened, |(_, call, _)| reason(call)),
            &column(&opened, |(_, call, _)| call.provider_id.as_str()),
            &column(&opened, |(_, call, _)| call.arguments.as_str()),
            &column(&opened, |(_, call, _)| call.started_at.unwrap_or(call.created_at)),
            &column(&opened, |(_, call, _)| call.expires_at),
        ],
    )
    .await?;
    Ok(())
}

/// Closes the tokens of calls that steps cancelled. A completion that came before the cancel stays, and
/// its letter is told late.
async fn close_tokens(tx: &Transaction<'_>, members: &[Member<'_>]) -> Result<(), StoreError> {
    for member in members {
        let cancelled: Vec<CallId> = touched_calls(member.work)
            .filter(|call| call.state == CallState::Cancelled && call.token.is_some())
            .map(|call| call.id)
            .collect();
        if !cancelled.is_empty() {
            crate::accept::cancel_continuations(tx, member.work.session.id, Some(&cancelled)).await?;
        }
    }
    Ok(())
}

async fn insert_events(tx: &Transaction<'_>, members: &[Member<'_>]) -> Result<(), StoreError> {
    let rows: Vec<(&Member<'_>, i64, &NewEvent)> = members
        .iter()
        .flat_map(|member| {
            (member.before.event_seq + 1..).zip(&member.events).map(move |(seq, event)| (member, seq, event))
        })
        .collect();
    let statement = tx.prepare_cached(sql::INSERT_EVENTS).await?;
    tx.execute(
        &statement,
        &[
            &column(&rows, |(member, _, _)| member.work.session.id.0),
            &column(&rows, |(_, seq, _)| *seq),
            &column(&rows, |(member, _, _)| member.before.owner.as_str()),
            &column(&rows, |(_, _, event)| event.kind),
            &column(&rows, |(_, _, event)| event.body.as_str()),
        ],
    )
    .await?;
    Ok(())
}

async fn end_runs(tx: &Transaction<'_>, members: &[Member<'_>]) -> Result<(), StoreError> {
    let ended: Vec<&Commit> = members
        .iter()
        .filter(|member| member.released && matches!(member.work.run, RunAfter::End { .. }))
        .map(|member| member.work)
        .collect();
    if ended.is_empty() {
        return Ok(());
    }
    let statement = tx.prepare_cached(sql::END_RUN).await?;
    let sessions = column(&ended, |work| work.session.id.0);
    tx.execute(&statement, &[&sessions, &column(&ended, |work| work.epoch)]).await?;
    Ok(())
}

async fn park_runs(tx: &Transaction<'_>, members: &[Member<'_>]) -> Result<(), StoreError> {
    for member in members.iter().filter(|member| member.released) {
        if let RunAfter::Park { on, until } = &member.work.run {
            let statement = tx.prepare_cached(sql::PARK_RUN).await?;
            tx.execute(&statement, &[&member.work.session.id.0, &member.work.epoch, on, until]).await?;
        }
    }
    Ok(())
}

/// Stores the members' blobs that aren't there yet.
async fn insert_blobs(tx: &Transaction<'_>, members: &[Member<'_>]) -> Result<(), StoreError> {
    let blobs: Vec<(&str, &Blob)> = members
        .iter()
        .flat_map(|member| member.work.blobs.iter().map(|blob| (member.before.owner.as_str(), blob)))
        .collect();
    if blobs.is_empty() {
        return Ok(());
    }
    let statement = tx.prepare_cached(sql::INSERT_BLOBS).await?;
    tx.execute(
        &statement,
        &[
            &column(&blobs, |(owner, _)| *owner),
            &column(&blobs, |(_, blob)| blob.digest.0.as_slice()),
            &column(&blobs, |(_, blob)| blob.text.as_str()),
        ],
    )
    .await?;
    Ok(())
}
