//! Finding sessions by what was said in them.

use holdfast_engine::{scope::IntrospectionScope, turn::Turn};
use serde::Serialize;
use uuid::Uuid;

use super::{
    Entry, IntrospectError, Reader,
    condense::{self, Shows, condense},
    results, within_reach,
};
use crate::{Store, load::stored_turn, status::within};

/// How many sessions a search looks at, the newest first.
pub const SEARCHED_SESSIONS: i64 = 200;

/// How many turns of each, the newest first.
pub const SEARCHED_TURNS: i64 = 100;

/// Bytes of stored text that a search looks at.
pub const SEARCHED_BYTES: i64 = 16 * 1024 * 1024;

/// Characters that a query may have.
pub const QUERY_LIMIT: usize = 500;

/// Sessions whose turns one statement reads.
const AT_ONCE: usize = 20;

/// Characters around a match that a preview shows, before it and behind its beginning.
const PREVIEW: (usize, usize) = (80, 160);

/// A session in which something was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Match {
    /// The session.
    pub session_id: Uuid,
    /// The same: a session is one conversation.
    pub conversation_id: Uuid,
    /// How many turns it has.
    pub turn_count: i64,
    /// What stands around the newest place where it was found.
    pub preview: String,
    /// `content`.
    pub match_type: &'static str,
}

/// What a search has found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Found {
    /// What was looked for.
    pub query: String,
    /// The sessions, newest first.
    pub results: Vec<Match>,
    /// How many were found; as many as there are results.
    pub total_matches: usize,
    /// How far the reader may read.
    pub scope: IntrospectionScope,
    /// How many sessions were looked at.
    pub sessions_searched: usize,
    /// Whether that is all there is to look at.
    pub complete: bool,
}

/// Finds sessions in which a turn has all words of a query, in any case. `results_max` is how many are found before
/// the search ends, [`super::RESULTS`] unless given; what tools answered is looked at with `tool_responses`.
///
/// # Errors
/// [`IntrospectError`].
pub async fn search(
    store: &Store,
    reader: &Reader<'_>,
    query: &str,
    results_max: Option<i64>,
    tool_responses: bool,
) -> Result<Found, IntrospectError> {
    let limit = usize::try_from(results(results_max)?).unwrap_or(usize::MAX);
    let words = Words::of(query)?;
    let shows = Shows { thinking: false, results: tool_responses };
    let (sessions, total) = within_reach(store, reader, SEARCHED_SESSIONS).await?;
    let mut found = Found {
        query: query.to_owned(),
        results: Vec::new(),
        total_matches: 0,
        scope: reader.scope,
        sessions_searched: 0,
        complete: total <= SEARCHED_SESSIONS,
    };
    let (mut stored, mut blobs) = (SEARCHED_BYTES, u64::try_from(SEARCHED_BYTES).unwrap_or_default());
    'sessions: for some in sessions.chunks(AT_ONCE) {
        let (turns, bytes) = newest_turns(store, some, stored).await?;
        stored -= bytes;
        let asked: i64 = some.iter().map(|session| session.turn_count.min(SEARCHED_TURNS)).sum();
        let got = turns.iter().map(|(_, turns)| turns.len()).sum::<usize>();
        found.complete &= i64::try_from(got) == Ok(asked)
            && some.iter().all(|session| session.turn_count <= SEARCHED_TURNS);
        for session in some {
            found.sessions_searched += 1;
            // Others have leases to keep meanwhile.
            tokio::task::yield_now().await;
            let Some((_, turns)) = turns.iter().find(|(id, _)| *id == session.session_id) else { continue };
            let fetched = condense::fetch(store, reader.owner, turns, shows, &mut blobs).await?;
            let preview = turns.iter().find_map(|turn| words.find(&condense(turn, shows, &fetched)));
            found.results.extend(preview.map(|preview| hit(session, preview)));
            if found.results.len() >= limit {
                found.complete &= found.sessions_searched == sessions.len();
                break 'sessions;
            }
        }
        if stored <= 0 {
            found.complete = false;
            break;
        }
    }
    found.total_matches = found.results.len();
    Ok(found)
}

fn hit(session: &Entry, preview: String) -> Match {
    Match {
        session_id: session.session_id,
        conversation_id: session.session_id,
        turn_count: session.turn_count,
        preview,
        match_type: "content",
    }
}

/// The newest turns of sessions, by session, and how many bytes they are stored in.
async fn newest_turns(
    store: &Store,
    sessions: &[Entry],
    bytes: i64,
) -> Result<(Vec<(Uuid, Vec<Turn>)>, i64), IntrospectError> {
    let ids: Vec<Uuid> = sessions.iter().map(|session| session.session_id).collect();
    let rows = within(store, async |connection| {
        sqlx::query!(
            r#"SELECT session_id AS "session_id!", position AS "position!", id AS "id!", tag AS "tag!",
                      format AS "format!", body AS "body!", at AS "at!"
               FROM (SELECT t.*, n.place, sum(octet_length(t.body)) OVER (ORDER BY n.place, t.position DESC
                                                                         ROWS UNBOUNDED PRECEDING) AS bytes
                     FROM UNNEST($1::uuid[]) WITH ORDINALITY AS n (id, place)
                     CROSS JOIN LATERAL (SELECT * FROM turns WHERE session_id = n.id ORDER BY position DESC LIMIT $2) t
                    ) AS newest
               WHERE bytes <= $3 ORDER BY place, position DESC"#,
            &ids,
            SEARCHED_TURNS,
            bytes
        )
        .fetch_all(connection)
        .await
    })
    .await?
    .ok_or(IntrospectError::TooLong)?;
    let mut turns: Vec<(Uuid, Vec<Turn>)> = Vec::new();
    let mut read = 0;
    for row in rows {
        read += i64::try_from(row.body.len()).unwrap_or(i64::MAX);
        let turn = stored_turn(row.id, row.position, &row.tag, row.format, &row.body, row.at)?;
        match turns.last_mut() {
            Some((id, of_session)) if *id == row.session_id => of_session.push(turn),
            _ => turns.push((row.session_id, vec![turn])),
        }
    }
    Ok((turns, read))
}

/// A query, in small letters.
struct Words {
    phrase: Vec<char>,
    each: Vec<Vec<char>>,
}

impl Words {
    fn of(query: &str) -> Result<Self, IntrospectError> {
        if query.trim().is_empty() || query.chars().count() > QUERY_LIMIT {
            return Err(IntrospectError::BadRequest(format!("a query has 1 to {QUERY_LIMIT} characters")));
        }
        let small = |text: &str| text.chars().map(fold).collect::<Vec<char>>();
        Ok(Self { phrase: small(query.trim()), each: query.split_whitespace().map(small).collect() })
    }

    /// What stands around the query in a text that has all its words: around the whole of it if it is there, else
    /// around its first word.
    fn find(&self, text: &str) -> Option<String> {
        let chars: Vec<char> = text.chars().collect();
        let small: Vec<char> = chars.iter().copied().map(fold).collect();
        let place = |wanted: &[char]| small.windows(wanted.len()).position(|window| window == wanted);
        let first = match place(&self.phrase) {
            Some(place) => place,
            None => {
                let places: Option<Vec<usize>> = self.each.iter().map(|word| place(word)).collect();
                *places?.first()?
            }
        };
        let (from, to) = (first.saturating_sub(PREVIEW.0), (first + PREVIEW.1).min(chars.len()));
        let (before, behind) = (if from > 0 { "…" } else { "" }, if to < chars.len() { "…" } else { "" });
        Some(format!("{before}{}{behind}", chars[from..to].iter().collect::<String>()))
    }
}

/// A letter in its small form, one for one, so that places in the folded text are places in the text.
fn fold(letter: char) -> char {
    letter.to_lowercase().next().unwrap_or(letter)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_words_are_found_in_any_order_and_case() {
        let words = Words::of(" Error  HANDLING ").expect("a query");
        assert_eq!(words.find("Handling an error"), Some("Handling an error".to_owned()));
        assert_eq!(words.find("an error alone"), None);
        let long = format!("{} error handling {}", "é".repeat(200), "x".repeat(300));
        let preview = words.find(&long).expect("found");
        assert!(
            preview.starts_with('…') && preview.ends_with('…') && preview.contains("error handling"),
            "{preview}"
        );
        assert!(Words::of("Straße").expect("a query").find("STRASSE und STRAßE").is_some());
        assert!(matches!(Words::of("  "), Err(IntrospectError::BadRequest(_))));
        assert!(matches!(Words::of(&"x".repeat(501)), Err(IntrospectError::BadRequest(_))));
    }
}
