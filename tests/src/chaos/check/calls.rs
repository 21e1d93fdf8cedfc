//! I3 and I5: each call is answered once and ends once; each token is settled once.

use std::collections::BTreeMap;

use holdfast_engine::{
    mail::{Sender, Settled},
    turn::{Said, Shown, TurnBody},
};
use uuid::Uuid;

use super::{
    Report,
    rows::{CallRow, Rows},
};
use crate::chaos::story::{Attempt, Story, Verdict};

/// Checks a session that is at rest.
pub(super) fn check(report: &mut Report, story: &Story, rows: &Rows) {
    answers(report, rows);
    for call in &rows.calls {
        report.saw("calls", 1);
        ends(report, rows, call);
        tellings(report, rows, call);
    }
    tokens(report, story, rows);
}

/// Every user turn answers the calls of the model's turn before it, in their order, and no others.
fn answers(report: &mut Report, rows: &Rows) {
    let mut asked: Vec<Uuid> = Vec::new();
    for turn in &rows.turns {
        match &turn.body {
            TurnBody::Llm(llm) => asked = llm.calls.iter().map(|call| call.id.0).collect(),
            TurnBody::User(user) => {
                let answered: Vec<Uuid> = user.answers.iter().map(|answer| answer.call.0).collect();
                report.ensure(answered == asked, || {
                    format!(
                        "I3 session {} turn {}: answers {answered:?} to {asked:?}",
                        rows.id, turn.position
                    )
                });
                asked.clear();
            }
        }
    }
}

/// A call has one end, told by one event, and as many starts as attempts.
fn ends(report: &mut Report, rows: &Rows, call: &CallRow) {
    let id = rows.id;
    let named = call.id.to_string();
    let count = |kind: &str| {
        let of_kind = rows.events.iter().filter(|event| event.kind == kind);
        of_kind.filter(|event| event.body["tool_call_id"] == named.as_str()).collect::<Vec<_>>()
    };
    let ended = count("tool.completed");
    let fits = ended.len() == 1 && ended[0].body["state"] == call.state.as_str();
    report.ensure(fits, || format!("I3 session {id}: {call:?} ended by the events {ended:?}"));
    let started = count("tool.started").len();
    report.ensure(i32::try_from(started) == Ok(call.attempt), || {
        format!("I3 session {id}: {started} starts were told of {call:?}")
    });
    let deferred = rows.events.iter().filter(|event| event.kind == "calls.deferred");
    let deferred: usize = deferred
        .map(|event| {
            event.body["calls"].as_array().into_iter().flatten().filter(|one| **one == named.as_str()).count()
        })
        .sum();
    report.ensure(deferred == usize::from(call.token.is_some()), || {
        format!("I3 session {id}: deferred {deferred} times: {call:?}")
    });
}

/// The model hears of a call's end once: by its answer if it had ended by then, else by one letter or by
/// the order that ended it.
fn tellings(report: &mut Report, rows: &Rows, call: &CallRow) {
    let id = rows.id;
    let shown = rows.user_turns().flat_map(|(_, user)| &user.answers).find(|answer| answer.call.0 == call.id);
    let Some(shown) = shown.map(|answer| &answer.shown) else {
        // Every round of a session that is at rest is over, and so shown.
        return report.violation(format!("I3 session {id}: never shown: {call:?}"));
    };
    let mut late = 0;
    for (_, user) in rows.user_turns() {
        let own: Vec<String> = user
            .mail
            .iter()
            .filter(|origin| matches!(origin.from, Sender::ToolCall { tool_call_id } if tool_call_id.0 == call.id))
            .map(|origin| origin.id.0.simple().to_string())
            .collect();
        let said = user.said.iter().filter_map(|said| match said {
            Said::Late { header, .. } => Some(header),
            Said::Query(_) | Said::Text(_) => None,
        });
        late += said
            .filter(|header| own.iter().any(|letter| header.contains(&letter[letter.len() - 8..])))
            .count();
    }
    report.saw("late results", late);
    let (least, most) = match shown {
        Shown::Settled(Settled::Completed { .. } | Settled::Failed { .. }) => (0, 0),
        // A completion that beat the cancel is a result nevertheless, and is told late.
        Shown::Settled(Settled::Cancelled { .. }) => (0, 1),
        // A call that an order ends after its placeholder may get a result that had been accepted.
        Shown::Placeholder(_) if call.state == "cancelled" => (0, 1),
        Shown::Placeholder(_) => (1, 1),
    };
    report.ensure((least..=most).contains(&late), || {
        format!("I3 session {id}: shown as {shown:?} and told late {late} times: {call:?}")
    });
    if let Shown::Settled(settled) = shown {
        report.ensure(settled.word() == call.state, || {
            format!("I3 session {id}: shown as {settled:?}, but stored as {call:?}")
        });
    }
}

/// I5: every token is settled, and completed by exactly one attempt that was told so.
fn tokens(report: &mut Report, story: &Story, rows: &Rows) {
    let id = rows.id;
    let mut attempts: BTreeMap<Uuid, Vec<&Attempt>> = BTreeMap::new();
    for attempt in &story.attempts {
        attempts.entry(attempt.token).or_default().push(attempt);
    }
    for row in &rows.tokens {
        let own = attempts.remove(&row.token).unwrap_or_default();
        let accepted: Vec<&Attempt> =
            own.iter().copied().filter(|attempt| attempt.verdict == Verdict::Accepted).collect();
        let kind = match row.state.as_str() {
            "completed" => "tokens completed",
            "failed" => "tokens failed",
            "cancelled" => "tokens cancelled",
            "expired" => "tokens expired",
            _ => "tokens open",
        };
        report.saw(kind, 1);
        let wanted = usize::from(matches!(row.state.as_str(), "completed" | "failed"));
        report.ensure(row.state != "open" && accepted.len() == wanted, || {
            format!("I5 session {id}: {row:?} after {own:?}")
        });
        for attempt in &own {
            let fits = match attempt.verdict {
                Verdict::Accepted => true,
                Verdict::Completed { same } => {
                    wanted == 1 && same == accepted.iter().any(|first| first.mark == attempt.mark)
                }
                Verdict::Cancelled => row.state == "cancelled",
                Verdict::Expired => row.state == "expired",
                Verdict::Unknown => false,
            };
            report.ensure(fits, || format!("I5 session {id}: {row:?}, but {attempt:?}"));
        }
        let call = rows.calls.iter().find(|call| call.id == row.call);
        // A completion that beat a cancel leaves the call cancelled; an expiry is a failure.
        let fits = call.is_some_and(|call| match row.state.as_str() {
            "expired" => matches!(call.state.as_str(), "failed" | "cancelled"),
            state => call.state == state || call.state == "cancelled",
        });
        report.ensure(fits, || format!("I5 session {id}: {row:?} of {call:?}"));
    }
    report.ensure(attempts.is_empty(), || format!("I5 session {id}: no such tokens: {attempts:?}"));
}
