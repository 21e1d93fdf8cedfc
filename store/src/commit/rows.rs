//! The rows that a step adds or changes: turns, calls and tokens, one statement a table.

use std::sync::Arc;

use chrono::{DateTime, Utc};
use deadpool_postgres::Transaction;
use holdfast_engine::{
    ids::CallId,
    policy::Disposition,
    session::{CallState, Event, TrackedCall},
    turn::{TURN_FORMAT, Turn, TurnBody},
};
use uuid::Uuid;

use super::{Commit, DETAIL_LIMIT};
use crate::{
    errors::StoreError,
    letters::{Locked, plain},
    sql,
};

pub(super) async fn insert_turns(tx: &Transaction<'_>, work: &Commit) -> Result<(), StoreError> {
    let turns: Vec<&Arc<Turn>> = work
        .happened
        .iter()
        .filter_map(|event| match event {
            Event::Sealed(turn) | Event::Answered { turn, .. } => Some(turn),
            _ => None,
        })
        .collect();
    if turns.is_empty() {
        return Ok(());
    }
    let count = turns.len();
    let usage = |turn: &&Arc<Turn>| match &turn.body {
        TurnBody::Llm(llm) => llm.usage,
        TurnBody::User(_) => None,
    };
    let tokens = |pick: fn(holdfast_engine::content::Usage) -> u64| -> Vec<Option<i64>> {
        turns
            .iter()
            .map(|turn| usage(turn).map(|usage| i64::try_from(pick(usage)).unwrap_or(i64::MAX)))
            .collect()
    };
    let bodies: Vec<String> = turns.iter().map(|turn| turn.body.to_json()).collect::<Result<_, _>>()?;
    let sessions = vec![work.session.id.0; count];
    let positions: Vec<i64> = turns.iter().map(|turn| turn.position).collect();
    let ids: Vec<Uuid> = turns.iter().map(|turn| turn.id.0).collect();
    let tags: Vec<&str> = turns.iter().map(|turn| turn.body.tag()).collect();
    let formats = vec![TURN_FORMAT; count];
    let versions = vec![work.session.version + 1; count];
    let times: Vec<DateTime<Utc>> = turns.iter().map(|turn| turn.at).collect();
    let (input, output, cached) = (
        tokens(|usage| usage.input_tokens),
        tokens(|usage| usage.output_tokens),
        tokens(|usage| usage.cached_tokens),
    );
    let statement = tx.prepare_cached(sql::INSERT_TURNS).await?;
    tx.execute(
        &statement,
        &[&sessions, &positions, &ids, &tags, &formats, &bodies, &versions, &times, &input, &output, &cached],
    )
    .await?;
    Ok(())
}

/// The calls that the step touched, as they stand after it.
fn touched_calls(work: &Commit) -> Vec<&TrackedCall> {
    let sealed = work.happened.iter().any(|event| matches!(event, Event::Sealed(_)));
    let touched = |id: CallId| {
        work.happened.iter().any(|event| match event {
            Event::Answered { calls, .. } => calls.iter().any(|call| call.id == id),
            Event::Started { call, .. }
            | Event::Deferred { call, .. }
            | Event::Returned { call }
            | Event::Finished { call, .. } => *call == id,
            _ => false,
        })
    };
    work.session.calls.iter().filter(|call| sealed || touched(call.id)).collect()
}

pub(super) async fn upsert_calls(tx: &Transaction<'_>, work: &Commit) -> Result<(), StoreError> {
    let calls = touched_calls(work);
    if calls.is_empty() {
        return Ok(());
    }
    macro_rules! column {
        ($call:ident => $value:expr) => {
            calls.iter().map(|$call| $value).collect::<Vec<_>>()
        };
    }
    let json = |result: Result<String, serde_json::Error>| result.map_err(StoreError::from);
    let dispositions: Vec<String> = calls
        .iter()
        .map(|call| json(serde_json::to_string(&call.policy.disposition)))
        .collect::<Result<_, _>>()?;
    let settled: Vec<Option<String>> = calls
        .iter()
        .map(|call| call.settled.as_ref().map(|settled| json(serde_json::to_string(settled))).transpose())
        .collect::<Result<_, _>>()?;
    let statement = tx.prepare_cached(sql::UPSERT_CALLS).await?;
    tx.execute(
        &statement,
        &[
            &vec![work.session.id.0; calls.len()],
            &column!(call => call.id.0),
            &column!(call => call.turn),
            &column!(call => call.index),
            &column!(call => call.provider_id.as_str()),
            &column!(call => call.name.as_str()),
            &column!(call => call.arguments.as_str()),
            &dispositions,
            &column!(call => call.policy.decided_by.as_str()),
            &column!(call => call.policy.idempotent),
            &column!(call => call.policy.deadline_seconds.and_then(|seconds| i64::try_from(seconds).ok())),
            &column!(call => call.state.word()),
            &column!(call => call.attempt),
            &column!(call => call.token.map(|token| token.0)),
            &column!(call => call.expires_at),
            &column!(call => call.created_at),
            &column!(call => call.started_at),
            &settled,
            &column!(call => call.finished_at),
            &column!(call => call.told),
            &column!(call => call.told_result),
        ],
    )
    .await?;
    Ok(())
}

/// Opens the tokens of calls that the step deferred, and closes those of calls that it cancelled.
/// A completion that came before the cancel stays, and its letter is told late.
pub(super) async fn open_and_close_tokens(
    tx: &Transaction<'_>,
    work: &Commit,
    before: &Locked,
) -> Result<(), StoreError> {
    let calls = touched_calls(work);
    let cancelled: Vec<CallId> = calls
        .iter()
        .filter(|call| call.state == CallState::Cancelled && call.token.is_some())
        .map(|call| call.id)
        .collect();
    let opened: Vec<&TrackedCall> = calls
        .into_iter()
        .filter(|call| {
            work.happened
                .iter()
                .any(|event| matches!(event, Event::Deferred { call: id, .. } if *id == call.id))
        })
        .collect();
    if !opened.is_empty() {
        let count = opened.len();
        let reason = |call: &&TrackedCall| match call.policy.disposition.base() {
            Disposition::Defer { reason } => plain(reason, DETAIL_LIMIT),
            _ => String::new(),
        };
        let statement = tx.prepare_cached(sql::INSERT_CONTINUATIONS).await?;
        tx.execute(
            &statement,
            &[
                &opened.iter().filter_map(|call| call.token.map(|token| token.0)).collect::<Vec<_>>(),
                &vec![work.session.id.0; count],
                &opened.iter().map(|call| call.id.0).collect::<Vec<_>>(),
                &vec![before.owner.as_str(); count],
                &vec![work.agent.as_str(); count],
                &opened.iter().map(|call| call.name.as_str()).collect::<Vec<_>>(),
                &opened.iter().map(reason).collect::<Vec<_>>(),
                &opened.iter().map(|call| call.provider_id.as_str()).collect::<Vec<_>>(),
                &opened.iter().map(|call| call.arguments.as_str()).collect::<Vec<_>>(),
                &opened.iter().map(|call| call.started_at.unwrap_or(call.created_at)).collect::<Vec<_>>(),
                &opened.iter().map(|call| call.expires_at).collect::<Vec<_>>(),
            ],
        )
        .await?;
    }
    if !cancelled.is_empty() {
        crate::accept::cancel_continuations(tx, work.session.id, Some(&cancelled)).await?;
    }
    Ok(())
}
