//! I1 and I2: what was accepted is told once, and the versions that tell it are dense.

use std::collections::BTreeMap;

use holdfast_engine::turn::{Said, TurnBody, UserTurn};

use super::{Report, rows::Rows};
use crate::chaos::story::{Sent, Story, Verdict};

/// Checks a session that is at rest.
pub(super) fn check(report: &mut Report, story: &Story, rows: &Rows) {
    mailbox(report, rows);
    messages(report, story, rows);
    completions(report, story, rows);
    turns(report, rows);
}

/// Everything in the mailbox was considered, and everything but orders was told.
fn mailbox(report: &mut Report, rows: &Rows) {
    let id = rows.id;
    let numbers: Vec<i64> = rows.mail.iter().map(|letter| letter.seq).collect();
    report.ensure(numbers == (1..=rows.mail_seq).collect::<Vec<_>>(), || {
        format!("I1 session {id}: mail {numbers:?} up to {}", rows.mail_seq)
    });
    report.ensure(rows.mail_cursor == rows.mail_seq, || {
        format!("I1 session {id}: at rest with the cursor at {} of {}", rows.mail_cursor, rows.mail_seq)
    });
    let untold = rows
        .mail
        .iter()
        .filter(|letter| rows.mail_left.contains(&letter.seq))
        .map(|letter| (letter.seq, letter.tag.as_str()))
        .collect::<Vec<_>>();
    report.ensure(untold.is_empty(), || format!("I1 session {id}: at rest with untold mail {untold:?}"));
    let mut tellings: BTreeMap<i64, usize> = BTreeMap::new();
    let mut ends: BTreeMap<uuid::Uuid, usize> = BTreeMap::new();
    for origin in rows.user_turns().flat_map(|(_, user)| &user.mail) {
        // The end of a call that came by no letter.
        if origin.seq == 0 {
            *ends.entry(origin.id.0).or_insert(0) += 1;
            continue;
        }
        *tellings.entry(origin.seq).or_insert(0) += 1;
        let known = rows.mail.iter().any(|letter| letter.seq == origin.seq && letter.id == origin.id.0);
        report.ensure(known, || format!("I1 session {id}: a turn names {origin:?}, which is no mail"));
    }
    for (call, count) in ends {
        let known = rows.calls.iter().any(|one| one.id == call);
        report.ensure(known && count == 1, || {
            format!("I1 session {id}: the end of call {call} is told {count} times; known: {known}")
        });
    }
    for letter in &rows.mail {
        let count = tellings.get(&letter.seq).copied().unwrap_or(0);
        let fits = if letter.tag == "userMessage" { count == 1 } else { count <= 1 };
        report.ensure(fits, || {
            format!("I1 session {id}: letter {} ({}) stands in {count} turns", letter.seq, letter.tag)
        });
    }
}

/// Each message that was accepted is one letter under the number of its receipt, and is said once.
fn messages(report: &mut Report, story: &Story, rows: &Rows) {
    let id = rows.id;
    let letters = rows.mail.iter().filter(|letter| letter.tag == "userMessage").count();
    report.ensure(letters == story.sent.len(), || {
        format!("I1 session {id}: {} messages were accepted, {letters} are mail", story.sent.len())
    });
    for Sent { mark, receipt } in &story.sent {
        report.saw("messages", 1);
        let kept: Vec<(uuid::Uuid, i64)> = rows
            .mail
            .iter()
            .filter(|letter| letter.body.contains(mark.as_str()))
            .map(|letter| (letter.id, letter.seq))
            .collect();
        let fits = kept.len() == 1 && receipt.is_none_or(|receipt| kept.contains(&receipt));
        report.ensure(fits, || format!("I1 session {id}: message {mark} {receipt:?} is mail {kept:?}"));
        let said = count_said(rows, mark);
        report.ensure(said == 1, || format!("I1 session {id}: message {mark} is said {said} times"));
    }
}

/// How often user turns have these words, in answers and in what was said.
fn count_said(rows: &Rows, words: &str) -> usize {
    rows.user_turns().map(|(_, user)| count_in(user, words)).sum()
}

fn count_in(user: &UserTurn, words: &str) -> usize {
    let has = |text: serde_json::Result<String>| text.is_ok_and(|text| text.contains(words));
    let answers = user.answers.iter().filter(|answer| has(serde_json::to_string(answer))).count();
    let said = user.said.iter().filter(|said: &&Said| has(serde_json::to_string(said))).count();
    answers + said
}

/// A completion that was accepted is told once, as an answer or late; one that was refused never is.
fn completions(report: &mut Report, story: &Story, rows: &Rows) {
    let id = rows.id;
    let mut marks: BTreeMap<&str, Vec<Verdict>> = BTreeMap::new();
    for attempt in &story.attempts {
        marks.entry(&attempt.mark).or_default().push(attempt.verdict);
    }
    for (mark, verdicts) in marks {
        let accepted = verdicts.contains(&Verdict::Accepted);
        let told = count_said(rows, mark);
        report.saw("completions accepted", usize::from(accepted));
        report.saw("completions refused", usize::from(!accepted));
        report.ensure(told == usize::from(accepted), || {
            format!("I1 session {id}: {mark} was answered with {verdicts:?} and is told {told} times")
        });
    }
}

/// I2: turns are dense and in the order of versions, and the model answers what it was shown.
fn turns(report: &mut Report, rows: &Rows) {
    let id = rows.id;
    let positions: Vec<i64> = rows.turns.iter().map(|turn| turn.position).collect();
    report.ensure(positions == (1..=rows.turn_count).collect::<Vec<_>>(), || {
        format!("I2 session {id}: turns {positions:?} of {}", rows.turn_count)
    });
    let versions: Vec<i64> = rows.turns.iter().map(|turn| turn.version).collect();
    let rising = versions.windows(2).all(|pair| pair[0] <= pair[1]);
    let within = versions.iter().all(|version| (2..=rows.version).contains(version));
    report.ensure(rising && within, || {
        format!("I2 session {id}: turns of versions {versions:?} of {}", rows.version)
    });
    let mut shown = false;
    for turn in &rows.turns {
        let user = matches!(turn.body, TurnBody::User(_));
        report.ensure(user || shown, || {
            format!("I2 session {id}: turn {} answers nothing that was shown", turn.position)
        });
        shown = user;
    }
    report.ensure(!shown, || format!("I2 session {id}: idle, although the model owes an answer"));
    report.saw("turns", rows.turns.len());
}
