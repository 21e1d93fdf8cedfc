//! Turns as short text.

use std::{collections::HashMap, sync::Arc};

use holdfast_engine::{
    content::{Digest, Payload, ToolResult},
    mail::Settled,
    turn::{LlmTurn, Said, Shown, Turn, TurnBody, UserTurn},
};

use crate::{Store, errors::StoreError, load};

/// A blob that is larger isn't opened for a text of which a few thousand bytes are shown.
const BLOB_LIMIT: u64 = 1024 * 1024;

/// Bytes of a call's arguments that are shown.
const ARGUMENTS: usize = 500;

/// What of a turn is shown beside what was said.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Shows {
    pub(super) thinking: bool,
    pub(super) results: bool,
}

type Fetched = HashMap<Digest, Arc<str>>;

/// Fetches the blobs that the texts of turns need, as far as `budget` bytes go.
pub(super) async fn fetch(
    store: &Store,
    owner: &str,
    turns: &[Turn],
    shows: Shows,
    budget: &mut u64,
) -> Result<Fetched, StoreError> {
    let mut wanted = Vec::new();
    for turn in turns {
        let TurnBody::User(user) = &turn.body else { continue };
        for said in &user.said {
            match said {
                Said::Query(query) => want(query, &mut wanted, budget),
                Said::Late { result, .. } if shows.results => want(result, &mut wanted, budget),
                Said::Late { .. } | Said::Text(_) => {}
            }
        }
        for answer in user.answers.iter().filter(|_| shows.results) {
            if let Shown::Settled(Settled::Completed { result }) = &answer.shown {
                want(result, &mut wanted, budget);
            }
        }
    }
    wanted.sort_unstable();
    wanted.dedup();
    load::blobs(store, owner, &wanted).await
}

fn want<T>(payload: &Payload<T>, wanted: &mut Vec<Digest>, budget: &mut u64) {
    if let Payload::Blob { blob, bytes } = payload
        && *bytes <= BLOB_LIMIT.min(*budget)
    {
        *budget -= bytes;
        wanted.push(*blob);
    }
}

/// A turn as text: `[User] …` or `[LLM] …`.
pub(super) fn condense(turn: &Turn, shows: Shows, blobs: &Fetched) -> String {
    let (who, parts) = match &turn.body {
        TurnBody::User(user) => ("User", of_user(user, shows, blobs)),
        TurnBody::Llm(llm) => ("LLM", of_llm(llm, shows)),
    };
    format!("[{who}] {}", parts.join("\n"))
}

fn of_user(user: &UserTurn, shows: Shows, blobs: &Fetched) -> Vec<String> {
    let mut parts = Vec::new();
    if shows.results {
        parts.extend(user.answers.iter().map(|answer| {
            let result = match &answer.shown {
                Shown::Settled(settled) => settled_text(settled, blobs),
                Shown::Placeholder(_) => "still open".to_owned(),
            };
            format!("[result of {}] {result}", answer.name)
        }));
    } else if !user.answers.is_empty() {
        parts.push(format!("[{} tool results]", user.answers.len()));
    }
    parts.extend(user.said.iter().map(|said| match said {
        Said::Query(query) => open(query, blobs, |query| {
            let media = query.media.iter().map(|media| format!("\n[{} attachment]", media.mime_type));
            query.text + &media.collect::<String>()
        }),
        Said::Text(text) => text.clone(),
        Said::Late { header, result } if shows.results => {
            format!("{header}\n{}", open(result, blobs, |result: ToolResult| result.as_text()))
        }
        Said::Late { header, .. } => header.clone(),
    }));
    parts
}

fn settled_text(settled: &Settled, blobs: &Fetched) -> String {
    match settled {
        Settled::Completed { result } => open(result, blobs, |result: ToolResult| result.as_text()),
        Settled::Failed { message } | Settled::Cancelled { message } => message.clone(),
    }
}

fn open<T>(payload: &Payload<T>, blobs: &Fetched, text: impl FnOnce(T) -> String) -> String
where
    T: serde::Serialize + for<'de> serde::Deserialize<'de> + Clone,
{
    match (payload.open(blobs), payload) {
        (Ok(value), _) => text(value),
        (Err(_), Payload::Blob { bytes, .. }) => format!("[{bytes} bytes, left out]"),
        (Err(_), Payload::Inline(_)) => String::new(),
    }
}

fn of_llm(llm: &LlmTurn, shows: Shows) -> Vec<String> {
    let mut parts = Vec::new();
    if let Some(thinking) = llm.thinking.as_ref().filter(|_| shows.thinking) {
        parts.push(format!("[thinking] {thinking}"));
    }
    parts.extend(llm.text.clone());
    parts.extend(
        llm.calls.iter().map(|call| format!("[calls {}] {}", call.name, cut(&call.arguments, ARGUMENTS))),
    );
    parts
}

/// The beginning of a text, cut at a character.
pub(super) fn cut(text: &str, limit: usize) -> String {
    if text.len() <= limit {
        return text.to_owned();
    }
    let end = text.floor_char_boundary(limit);
    format!("{}… [{} bytes more]", &text[..end], text.len() - end)
}
