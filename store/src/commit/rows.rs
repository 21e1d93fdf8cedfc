//! The rows that a step adds or changes: turns, calls and tokens, one statement a table.

use chrono::{DateTime, Utc};
use holdfast_engine::{
    content::Usage,
    ids::CallId,
    session::{CallState, Event, Terms, TrackedCall},
    turn::{TURN_FORMAT, Turn, TurnBody},
};
use uuid::Uuid;

use super::{Commit, DETAIL_LIMIT, Member, RunAfter};
use crate::{
    accept::cancel_continuations,
    errors::StoreError,
    letters::{NewEvent, insert_blobs, plain},
    spawn::spawn,
    sql,
    transaction::{Writes, parameters},
};

/// Writes what the members changed: sessions and runs first, then what has no lock of its own.
pub(super) fn write<'a>(writes: &mut Writes<'a>, members: &'a [Member<'a>]) -> Result<(), StoreError> {
    update_sessions(writes, members);
    end_runs(writes, members);
    park_runs(writes, members);
    insert_turns(writes, members)?;
    insert_calls(writes, members)?;
    update_calls(writes, members)?;
    insert_events(writes, members);
    open_tokens(writes, members)?;
    close_tokens(writes, members);
    let blobs_of =
        |member: &'a Member<'a>| member.work.blobs.iter().map(|blob| (member.before.owner.as_str(), blob));
    insert_blobs(writes, members.iter().flat_map(blobs_of));
    spawn_sessions(writes, members)
}

/// One column of a statement's arrays.
fn column<'a, T, R>(items: &'a [T], pick: impl Fn(&'a T) -> R) -> Vec<R> {
    items.iter().map(pick).collect()
}

fn update_sessions<'a>(writes: &mut Writes<'a>, members: &'a [Member<'a>]) {
    let left = column(members, |member| {
        let numbers = member.work.session.left.iter().map(|letter| letter.seq.to_string());
        format!("{{{}}}", numbers.collect::<Vec<_>>().join(","))
    });
    writes.push(
        sql::COMMIT_SESSION,
        parameters![
            column(members, |member| member.work.session.id.0),
            column(members, |member| member.work.session.version),
            column(members, |member| member.work.id),
            column(members, |member| member.status.word()),
            column(members, |member| member.detail.as_deref()),
            column(members, |member| member.work.session.hold.word()),
            column(members, |member| member.work.session.length()),
            column(members, |member| member.work.session.cursor),
            left,
            column(members, |member| member.before.event_seq + count(&member.events)),
            column(members, |member| member.work.agent_revision.as_str()),
        ],
    );
}

fn count<T>(items: &[T]) -> i64 {
    i64::try_from(items.len()).unwrap_or(i64::MAX)
}

fn insert_turns<'a>(writes: &mut Writes<'a>, members: &'a [Member<'a>]) -> Result<(), StoreError> {
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
    writes.push(
        sql::INSERT_TURNS,
        parameters![
            column(&turns, |(work, _)| work.session.id.0),
            column(&turns, |(_, turn)| turn.position),
            column(&turns, |(_, turn)| turn.id.0),
            column(&turns, |(_, turn)| turn.body.tag()),
            vec![TURN_FORMAT; turns.len()],
            bodies,
            column(&turns, |(work, _)| work.session.version + 1),
            column(&turns, |(_, turn)| turn.at),
            tokens(|usage| usage.input_tokens),
            tokens(|usage| usage.output_tokens),
            tokens(|usage| usage.cached_tokens),
        ],
    );
    Ok(())
}

/// Whether a step's model answer made this call.
fn is_new(work: &Commit, id: CallId) -> bool {
    work.happened.iter().any(|event| match event {
        Event::Answered { calls, .. } => calls.iter().any(|call| call.id == id),
        _ => false,
    })
}

/// The calls that a step made or changed, as they stand after it.
fn touched_calls(work: &Commit) -> impl Iterator<Item = &TrackedCall> {
    let sealed = work.happened.iter().any(|event| matches!(event, Event::Sealed(_)));
    let changed = move |id: CallId| {
        work.happened.iter().any(|event| match event {
            Event::Started { call, .. }
            | Event::Deferred { call, .. }
            | Event::Approved { call }
            | Event::Waits { call, .. }
            | Event::Read { call }
            | Event::Returned { call }
            | Event::Finished { call, .. } => *call == id,
            _ => false,
        })
    };
    work.session.calls.iter().filter(move |call| sealed || changed(call.id) || is_new(work, call.id))
}

fn calls_of<'a>(members: &'a [Member<'a>], new: bool) -> Vec<(Uuid, &'a TrackedCall)> {
    let of = |member: &'a Member<'a>| {
        touched_calls(member.work)
            .filter(move |call| is_new(member.work, call.id) == new)
            .map(|call| (member.work.session.id.0, call))
    };
    members.iter().flat_map(of).collect()
}

fn settled_of(calls: &[(Uuid, &TrackedCall)]) -> Result<Vec<Option<String>>, StoreError> {
    let text = |call: &TrackedCall| call.settled.as_ref().map(serde_json::to_string).transpose();
    Ok(calls.iter().map(|(_, call)| text(call)).collect::<Result<_, _>>()?)
}

fn waits_of(calls: &[(Uuid, &TrackedCall)]) -> Result<Vec<Option<String>>, StoreError> {
    let text = |call: &TrackedCall| call.waits.as_ref().map(serde_json::to_string).transpose();
    Ok(calls.iter().map(|(_, call)| text(call)).collect::<Result<_, _>>()?)
}

/// The arguments of a call that its row keeps: none once its end has been told, as `update_calls.sql` says too.
fn kept_arguments(call: &TrackedCall) -> &str {
    if call.told_result { "" } else { &call.arguments }
}

fn insert_calls<'a>(writes: &mut Writes<'a>, members: &'a [Member<'a>]) -> Result<(), StoreError> {
    let calls = calls_of(members, true);
    if calls.is_empty() {
        return Ok(());
    }
    let dispositions: Vec<String> = calls
        .iter()
        .map(|(_, call)| serde_json::to_string(&call.policy.disposition))
        .collect::<Result<_, _>>()?;
    let deadline =
        |call: &TrackedCall| call.policy.deadline_seconds.and_then(|seconds| i64::try_from(seconds).ok());
    writes.push(
        sql::INSERT_CALLS,
        parameters![
            column(&calls, |(session, _)| *session),
            column(&calls, |(_, call)| call.id.0),
            column(&calls, |(_, call)| call.turn),
            column(&calls, |(_, call)| call.index),
            column(&calls, |(_, call)| call.provider_id.as_str()),
            column(&calls, |(_, call)| call.name.as_str()),
            column(&calls, |(_, call)| kept_arguments(call)),
            dispositions,
            column(&calls, |(_, call)| call.policy.decided_by.as_str()),
            column(&calls, |(_, call)| call.policy.idempotent),
            column(&calls, |(_, call)| deadline(call)),
            column(&calls, |(_, call)| call.state.word()),
            column(&calls, |(_, call)| call.attempt),
            column(&calls, |(_, call)| call.token.map(|token| token.0)),
            column(&calls, |(_, call)| call.expires_at),
            column(&calls, |(_, call)| call.created_at),
            column(&calls, |(_, call)| call.started_at),
            settled_of(&calls)?,
            column(&calls, |(_, call)| call.finished_at),
            column(&calls, |(_, call)| call.told),
            column(&calls, |(_, call)| call.told_result),
            waits_of(&calls)?,
            column(&calls, |(_, call)| call.read),
        ],
    );
    Ok(())
}

fn update_calls<'a>(writes: &mut Writes<'a>, members: &'a [Member<'a>]) -> Result<(), StoreError> {
    let calls = calls_of(members, false);
    if calls.is_empty() {
        return Ok(());
    }
    writes.push(
        sql::UPDATE_CALLS,
        parameters![
            column(&calls, |(session, _)| *session),
            column(&calls, |(_, call)| call.id.0),
            column(&calls, |(_, call)| call.state.word()),
            column(&calls, |(_, call)| call.attempt),
            column(&calls, |(_, call)| call.token.map(|token| token.0)),
            column(&calls, |(_, call)| call.expires_at),
            column(&calls, |(_, call)| call.started_at),
            settled_of(&calls)?,
            column(&calls, |(_, call)| call.finished_at),
            column(&calls, |(_, call)| call.told),
            column(&calls, |(_, call)| call.told_result),
            waits_of(&calls)?,
            column(&calls, |(_, call)| call.read),
        ],
    );
    Ok(())
}

/// A call that a step deferred, with its token and its terms.
struct Opened<'a> {
    member: &'a Member<'a>,
    call: &'a TrackedCall,
    token: Uuid,
    terms: &'a Terms,
    at: DateTime<Utc>,
}

/// Opens the tokens of calls that steps deferred. A token works from this commit on. A call whose token the same
/// step ended is among them, so that its token is known to have been there.
fn open_tokens<'a>(writes: &mut Writes<'a>, members: &'a [Member<'a>]) -> Result<(), StoreError> {
    let opened: Vec<Opened<'a>> = members
        .iter()
        .flat_map(|member| member.work.happened.iter().map(move |event| (member, event)))
        .filter_map(|(member, event)| match event {
            Event::Deferred { call, token, terms, at, .. } => {
                let call = member.work.session.call(*call)?;
                Some(Opened { member, call, token: token.0, terms, at: *at })
            }
            _ => None,
        })
        .collect();
    if opened.is_empty() {
        return Ok(());
    }
    let answers =
        opened.iter().map(|new| new.terms.on_deadline.as_ref().map(serde_json::to_string).transpose());
    let answers: Vec<Option<String>> = answers.collect::<Result<_, _>>()?;
    writes.push(
        sql::INSERT_CONTINUATIONS,
        parameters![
            column(&opened, |new| new.token),
            column(&opened, |new| new.member.work.session.id.0),
            column(&opened, |new| new.call.id.0),
            column(&opened, |new| new.member.before.owner.as_str()),
            column(&opened, |new| new.member.work.agent.as_str()),
            column(&opened, |new| new.call.name.as_str()),
            column(&opened, |new| plain(&new.terms.reason, DETAIL_LIMIT)),
            column(&opened, |new| new.call.provider_id.as_str()),
            column(&opened, |new| new.call.arguments.as_str()),
            column(&opened, |new| new.at),
            column(&opened, |new| new.call.expires_at),
            answers,
            column(&opened, |new| new.terms.approval),
        ],
    );
    Ok(())
}

/// Closes the tokens of calls that steps cancelled. A completion that came before the cancel stays, and
/// its letter is told late.
fn close_tokens<'a>(writes: &mut Writes<'a>, members: &'a [Member<'a>]) {
    for member in members {
        let cancelled: Vec<CallId> = touched_calls(member.work)
            .filter(|call| call.state == CallState::Cancelled && call.token.is_some())
            .map(|call| call.id)
            .collect();
        if !cancelled.is_empty() {
            cancel_continuations(writes, member.work.session.id, Some(&cancelled));
        }
    }
}

fn insert_events<'a>(writes: &mut Writes<'a>, members: &'a [Member<'a>]) {
    let rows: Vec<(&Member<'_>, i64, &NewEvent)> = members
        .iter()
        .flat_map(|member| {
            (member.before.event_seq + 1..).zip(&member.events).map(move |(seq, event)| (member, seq, event))
        })
        .collect();
    writes.events += rows.len();
    writes.push(
        sql::INSERT_EVENTS,
        parameters![
            column(&rows, |(member, _, _)| member.work.session.id.0),
            column(&rows, |(_, seq, _)| *seq),
            column(&rows, |(member, _, _)| member.before.owner.as_str()),
            column(&rows, |(_, _, event)| event.kind),
            column(&rows, |(_, _, event)| event.body.as_str()),
        ],
    );
}

fn end_runs<'a>(writes: &mut Writes<'a>, members: &'a [Member<'a>]) {
    let ended: Vec<&Commit> = members
        .iter()
        .filter(|member| member.released && matches!(member.work.run, RunAfter::End { .. }))
        .map(|member| member.work)
        .collect();
    if !ended.is_empty() {
        let sessions = column(&ended, |work| work.session.id.0);
        writes.push(sql::END_RUN, parameters![sessions, column(&ended, |work| work.epoch)]);
    }
}

fn park_runs<'a>(writes: &mut Writes<'a>, members: &'a [Member<'a>]) {
    for member in members.iter().filter(|member| member.released) {
        if let RunAfter::Park { on, until } = &member.work.run {
            writes.push(
                sql::PARK_RUN,
                parameters![member.work.session.id.0, member.work.epoch, on.as_str(), *until],
            );
        }
    }
}

/// Starts the members' child sessions.
fn spawn_sessions<'a>(writes: &mut Writes<'a>, members: &'a [Member<'a>]) -> Result<(), StoreError> {
    for member in members {
        for new in &member.work.spawns {
            spawn(writes, member.before, member.work, new)?;
        }
    }
    Ok(())
}
