//! What was said in a session, as condensed text.

use holdfast_engine::{builtin::Section, ids::SessionId, scope::IntrospectionScope, turn::Turn};
use serde::Serialize;
use uuid::Uuid;

use super::{
    IntrospectError, Reader,
    condense::{self, Shows, condense, cut},
};
use crate::{Store, kin, load::stored_turn, sessions, status::within};

/// How many turns one reading gives at most.
pub const READ_TURNS: i64 = 200;

/// Bytes of text that one reading gives at most.
pub const READ_TEXT: usize = 64 * 1024;

/// Bytes of a turn's text; what is longer is cut, and says so.
pub const TURN_TEXT: usize = 4_000;

/// Bytes of stored turns that one reading looks at.
const STORED: i64 = 16 * 1024 * 1024;

/// What was read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Reading {
    /// The session.
    pub session_id: Uuid,
    /// The same: a session is one conversation.
    pub conversation_id: Uuid,
    /// How many turns it has.
    pub total_turns: i64,
    /// How many are in the text.
    pub returned_turns: i64,
    /// The turns, each as `Turn N: [User] …` or `Turn N: [LLM] …`, counted from 1.
    pub content: String,
    /// Where to go on reading, as `offset`, if turns that were asked for didn't fit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_offset: Option<i64>,
    /// `condensed-text`.
    pub format: &'static str,
    /// How far the reader may read.
    pub scope: IntrospectionScope,
    /// `granted`.
    pub access: &'static str,
}

/// Reads a session as text.
///
/// What is asked for and is more than a reading gives is left out at its end, or at its beginning where the last
/// turns were asked for.
///
/// # Errors
/// [`IntrospectError`].
pub async fn read(
    store: &Store,
    reader: &Reader<'_>,
    session: SessionId,
    section: &Section,
) -> Result<Reading, IntrospectError> {
    let relation = kin::relation(store, reader.owner, reader.session, session).await?;
    if !reader.scope.allows(relation) {
        return Err(IntrospectError::NotPermitted(reader.scope));
    }
    let total = sessions::get(store, Some(reader.owner), session).await?.turns;
    let (from, to) = range(section, total);
    let last_ones = section.take_n.is_some();
    let turns = turns(store, session, (from, to), last_ones).await?;
    let shows = Shows { thinking: section.include_thinking, results: section.include_tool_responses };
    let mut budget = u64::try_from(STORED).unwrap_or_default();
    let blobs = condense::fetch(store, reader.owner, &turns, shows, &mut budget).await?;
    let texts = turns.iter().map(|turn| {
        let text = condense(turn, shows, &blobs);
        (turn.position, format!("Turn {}: {}", turn.position, cut(&text, TURN_TEXT)))
    });
    let (content, returned_turns, next) = fit(texts.collect(), (from, to), last_ones);
    let next_offset = goes_on_at(section, next);
    Ok(Reading {
        session_id: session.0,
        conversation_id: session.0,
        total_turns: total,
        returned_turns,
        content,
        next_offset,
        format: "condensed-text",
        scope: reader.scope,
        access: "granted",
    })
}

/// The turns that a section names, from the one behind the first number to the one of the second.
fn range(section: &Section, total: i64) -> (i64, i64) {
    let number = |given: Option<u64>| given.map(|number| i64::try_from(number).unwrap_or(i64::MAX));
    let skipped =
        number(section.drop_n).unwrap_or(0).saturating_add(number(section.offset).unwrap_or(0)).min(total);
    let to = number(section.limit).map_or(total, |limit| skipped.saturating_add(limit).min(total));
    let from = number(section.take_n).map_or(skipped, |last| skipped.max(to.saturating_sub(last)));
    (from, to)
}

/// The offset of the reading that goes on behind a position: it counts from behind what the section drops.
fn goes_on_at(section: &Section, position: Option<i64>) -> Option<i64> {
    let dropped = section.drop_n.map_or(0, |number| i64::try_from(number).unwrap_or(i64::MAX));
    position.map(|position| position.saturating_sub(dropped))
}

/// The stored turns of a range, in order, as far as one reading goes.
async fn turns(
    store: &Store,
    session: SessionId,
    (from, to): (i64, i64),
    last_ones: bool,
) -> Result<Vec<Turn>, IntrospectError> {
    let (from, to) = match last_ones {
        true => (from.max(to.saturating_sub(READ_TURNS)), to),
        false => (from, to.min(from.saturating_add(READ_TURNS))),
    };
    let rows = within(store, async |connection| {
        sqlx::query!(
            r#"SELECT position AS "position!", id AS "id!", tag AS "tag!", format AS "format!", body AS "body!", at AS "at!"
               FROM (SELECT *, sum(octet_length(body)) OVER (ORDER BY CASE WHEN $4 THEN -position ELSE position END
                                                            ROWS UNBOUNDED PRECEDING) AS bytes
                     FROM turns WHERE session_id = $1 AND position > $2 AND position <= $3) AS asked
               WHERE bytes <= $5 ORDER BY position"#,
            session.0,
            from,
            to,
            last_ones,
            STORED
        )
        .fetch_all(connection)
        .await
    })
    .await?
    .ok_or(IntrospectError::TooLong)?;
    let turn =
        rows.iter().map(|row| stored_turn(row.id, row.position, &row.tag, row.format, &row.body, row.at));
    Ok(turn.collect::<Result<_, _>>()?)
}

/// Joins texts as far as they fit, the first ones or the last ones; says how many did, and where to go on if not
/// all of the range did.
fn fit(texts: Vec<(i64, String)>, (from, to): (i64, i64), last_ones: bool) -> (String, i64, Option<i64>) {
    let mut bytes = 0;
    let mut fits = |(_, text): &&(i64, String)| {
        bytes += text.len() + 1;
        bytes <= READ_TEXT
    };
    let kept: Vec<&(i64, String)> = match last_ones {
        true => {
            let mut kept: Vec<_> = texts.iter().rev().take_while(&mut fits).collect();
            kept.reverse();
            kept
        }
        false => texts.iter().take_while(&mut fits).collect(),
    };
    let next = match kept.last() {
        Some((position, _)) => (*position < to).then_some(*position),
        // A turn that is too large to be looked at is passed over.
        None => (!last_ones && from < to).then_some(from + 1),
    };
    let content = kept.iter().map(|(_, text)| text.as_str()).collect::<Vec<_>>().join("\n");
    (content, i64::try_from(kept.len()).unwrap_or(i64::MAX), next)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_choose_turns() {
        let section =
            |take_n, drop_n, offset, limit| Section { take_n, drop_n, offset, limit, ..Section::default() };
        assert_eq!(range(&section(None, None, None, None), 10), (0, 10));
        assert_eq!(range(&section(Some(3), None, None, None), 10), (7, 10));
        assert_eq!(range(&section(Some(30), None, None, None), 10), (0, 10));
        assert_eq!(range(&section(None, Some(4), None, None), 10), (4, 10));
        assert_eq!(range(&section(None, None, Some(2), Some(3)), 10), (2, 5));
        assert_eq!(range(&section(Some(2), Some(4), None, Some(4)), 10), (6, 8));
        assert_eq!(range(&section(Some(2), Some(9), None, None), 10), (9, 10));
        assert_eq!(range(&section(None, Some(u64::MAX), Some(u64::MAX), Some(u64::MAX)), 10), (10, 10));
    }

    #[test]
    fn readings_that_go_on_leave_nothing_out() {
        let total = 300;
        let mut section = Section { drop_n: Some(50), ..Section::default() };
        let mut read: Vec<i64> = Vec::new();
        loop {
            let (from, to) = range(&section, total);
            let texts = (from + 1..=to.min(from + READ_TURNS)).map(|position| (position, "x".repeat(1_000)));
            let texts: Vec<_> = texts.collect();
            let positions: Vec<i64> = texts.iter().map(|(position, _)| *position).collect();
            let (_, kept, next) = fit(texts, (from, to), false);
            read.extend(&positions[..usize::try_from(kept).expect("few")]);
            match goes_on_at(&section, next) {
                Some(offset) => section.offset = Some(u64::try_from(offset).expect("positive")),
                None => break,
            }
        }
        assert_eq!(read, (51..=total).collect::<Vec<_>>());
    }

    #[test]
    fn what_does_not_fit_is_left_out_where_it_matters_least() {
        let texts: Vec<_> = (1..=20).map(|position| (position, "x".repeat(4_000))).collect();
        let (content, count, next) = fit(texts.clone(), (0, 20), false);
        assert_eq!((count, next), (16, Some(16)));
        assert!(content.len() <= READ_TEXT);
        let (_, count, next) = fit(texts.clone(), (0, 20), true);
        assert_eq!((count, next), (16, None), "the last ones are there");
        assert_eq!(fit(texts[..3].to_vec(), (0, 3), false).2, None);
        assert_eq!(fit(Vec::new(), (4, 9), false).2, Some(5), "behind a turn that is too large");
        assert_eq!(fit(Vec::new(), (8, 8), false).2, None);
    }
}
