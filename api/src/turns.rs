//! Turns as clients read them: whole, with what they name by digest put in its place.

use std::{collections::HashMap, sync::Arc};

use chrono::{DateTime, Utc};
use holdfast_engine::{
    content::{Blobs, Digest, Payload, ToolResult, Usage},
    ids::{CallId, SessionId},
    mail::Settled,
    tool::ToolSpec,
    transcript,
    turn::{Answer as CallAnswer, LlmCall, LlmTurn, Said, Shown, Turn, TurnBody, UserTurn},
};
use holdfast_store::{StoreError, history, load};
use serde::Serialize;
use serde_json::{Value, json};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::{error::Answer, limits, state::Api, view::WrittenCall};

/// One turn.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct TurnView {
    pub(crate) id: Uuid,
    /// Its place: dense from 1.
    pub(crate) position: i64,
    /// `UserTurn` or `LlmTurn`.
    #[schema(value_type = String)]
    tag: &'static str,
    at: DateTime<Utc>,
    /// Of a user turn `userPrompt`, `userTools`, `userQuery`, `userToolResponses`, `userMail`; of a model's
    /// turn `llmResponse`, `llmThinking`, `llmToolCalls`.
    #[schema(value_type = Object)]
    contents: Value,
    /// Tokens that the turn cost, where the provider counts them.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<UsageView>)]
    usage: Option<Usage>,
    /// Bytes that the model wrote.
    #[serde(rename = "byteUsage", skip_serializing_if = "Option::is_none")]
    byte_usage: Option<ByteUsage>,
}

/// Tokens as the provider counted them.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct UsageView {
    input_tokens: u64,
    output_tokens: u64,
    cached_tokens: u64,
}

/// Bytes that a model wrote.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ByteUsage {
    output_bytes: usize,
    reasoning_bytes: usize,
    total_bytes: usize,
}

/// The newest turns of a session, newest first, at most `limit`; fewer if they are large. `turns` are one more, where
/// there are more.
pub(crate) async fn newest(api: &Api, owner: &Arc<str>, turns: &[Turn], limit: i64) -> Answer<Vec<TurnView>> {
    let whole = turns.len() as i64 > limit || turns.last().is_none_or(|oldest| oldest.position == 1);
    // Cut off by its bytes, the page lacks the turn before its last one as well.
    let most = if whole { turns.len() } else { turns.len().saturating_sub(1).max(1) };
    render(api, owner, turns, page(&turns[..most], limit)).await
}

/// Turns from position `from` on, oldest first, at most `limit`; fewer if they are large.
pub(crate) async fn from(
    api: &Api,
    owner: &Arc<str>,
    id: SessionId,
    from: i64,
    limit: i64,
) -> Answer<Vec<TurnView>> {
    let turns = history::turns_from(&api.store, id, from.saturating_sub(1), limit + 1).await?;
    let first = turns.iter().position(|turn| turn.position >= from).unwrap_or(turns.len());
    render(api, owner, &turns, page(&turns[first..], limit)).await
}

/// One turn, if it is there.
pub(crate) async fn at(
    api: &Api,
    owner: &Arc<str>,
    id: SessionId,
    position: i64,
) -> Answer<Option<TurnView>> {
    let turns = history::newest_turns(&api.store, id, position.saturating_add(1), 2).await?;
    let shown = usize::from(turns.first().is_some_and(|turn| turn.position == position));
    Ok(render(api, owner, &turns, &turns[..shown]).await?.pop())
}

/// The first of `turns`, at most `limit`, that fit into one page; one always does.
fn page(turns: &[Turn], limit: i64) -> &[Turn] {
    let most = turns.len().min(usize::try_from(limit).unwrap_or(usize::MAX));
    let mut bytes = 0_u64;
    let within = |turn: &&Turn| {
        bytes = bytes.saturating_add(size(turn));
        bytes <= limits::PAGE_BYTES
    };
    let fitting = turns[..most].iter().take_while(within).count();
    &turns[..fitting.max(1).min(most)]
}

/// Bytes that a turn refers to, or about as many as it holds.
fn size(turn: &Turn) -> u64 {
    fn of<T: Serialize>(payload: &Payload<T>) -> u64 {
        match payload {
            Payload::Blob { bytes, .. } => *bytes,
            Payload::Inline(_) => holdfast_engine::content::INLINE_LIMIT as u64,
        }
    }
    let len = |text: &str| text.len() as u64;
    match &turn.body {
        TurnBody::Llm(llm) => {
            let calls: u64 = llm.calls.iter().map(|call| len(&call.arguments)).sum();
            calls + llm.text.as_deref().map_or(0, len) + llm.thinking.as_deref().map_or(0, len)
        }
        TurnBody::User(user) => {
            let answers = user.answers.iter().map(|answer| match &answer.shown {
                Shown::Settled(Settled::Completed { result }) => of(result),
                Shown::Settled(Settled::Failed { message } | Settled::Cancelled { message }) => len(message),
                Shown::Placeholder(text) => len(text),
            });
            let said = user.said.iter().map(|said| match said {
                Said::Query(query) => of(query),
                Said::Late { result, .. } => of(result),
                Said::Text(text) => len(text),
            });
            answers.chain(said).sum()
        }
    }
}

/// Renders `shown`; `around` holds them and the turns whose calls they answer.
async fn render(api: &Api, owner: &Arc<str>, around: &[Turn], shown: &[Turn]) -> Answer<Vec<TurnView>> {
    let (mut offers, mut contents) = (Vec::new(), Vec::new());
    for turn in shown {
        if let TurnBody::User(user) = &turn.body {
            offers.extend([user.system, user.tools]);
            contents.extend(transcript::blobs_of(user));
        }
    }
    for digests in [&mut offers, &mut contents] {
        digests.sort_unstable();
        digests.dedup();
    }
    let offers = api.kept.fetch(&api.store, owner, &offers).await?;
    let contents = load::blobs(&api.store, owner, &contents).await?;
    let calls: HashMap<CallId, &LlmCall> = around
        .iter()
        .filter_map(|turn| match &turn.body {
            TurnBody::Llm(llm) => Some(&llm.calls),
            TurnBody::User(_) => None,
        })
        .flatten()
        .map(|call| (call.id, call))
        .collect();
    let mut offered = Offered { texts: &offers, read: HashMap::new() };
    let view = |turn: &Turn| {
        let (contents, usage, bytes) = match &turn.body {
            TurnBody::User(user) => (user_contents(user, &mut offered, &calls, &contents)?, None, None),
            TurnBody::Llm(llm) => (llm_contents(llm), llm.usage, Some(bytes(llm))),
        };
        let (id, position, at) = (turn.id.0, turn.position, turn.at);
        Ok(TurnView { id, position, tag: turn.body.tag(), at, contents, usage, byte_usage: bytes })
    };
    Ok(shown.iter().map(view).collect::<Result<_, StoreError>>()?)
}

/// Prompts and tools of a page, each read once.
struct Offered<'a> {
    texts: &'a HashMap<Digest, Arc<str>>,
    read: HashMap<Digest, Value>,
}

impl Offered<'_> {
    fn get(
        &mut self,
        digest: Digest,
        read: impl FnOnce(&str) -> Result<Value, serde_json::Error>,
    ) -> Result<Value, StoreError> {
        if let Some(value) = self.read.get(&digest) {
            return Ok(value.clone());
        }
        let text = Blobs::get(self.texts, &digest)
            .ok_or_else(|| StoreError::Corrupt(format!("blob {digest} is missing")))?;
        let value = read(text)?;
        self.read.insert(digest, value.clone());
        Ok(value)
    }
}

fn user_contents(
    user: &UserTurn,
    offered: &mut Offered<'_>,
    calls: &HashMap<CallId, &LlmCall>,
    blobs: &dyn Blobs,
) -> Result<Value, StoreError> {
    let prompt = offered.get(user.system, |text| {
        let parts: Vec<String> = serde_json::from_str(text)?;
        let parts: Vec<String> = parts.into_iter().filter(|part| !part.is_empty()).collect();
        Ok(Value::String(parts.join("\n\n")))
    })?;
    let tools = offered.get(user.tools, |text| {
        let tools: Vec<ToolSpec> = serde_json::from_str(text)?;
        Ok(tools.iter().map(tool).collect())
    })?;
    let responses =
        user.answers.iter().map(|answer| response(answer, calls, blobs)).collect::<Result<Vec<_>, _>>()?;
    let query =
        transcript::query_of(user, blobs)?.map(|query| json!({"text": query.text, "media": query.media}));
    Ok(json!({
        "userPrompt": {"systemPrompt": prompt},
        "userTools": tools,
        "userQuery": query,
        "userToolResponses": responses,
        "userMail": user.mail,
    }))
}

fn tool(tool: &ToolSpec) -> Value {
    let ToolSpec { name, original: _, description, parameters } = tool;
    json!({
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    })
}

/// A call and what the model was shown of it.
fn response(
    answer: &CallAnswer,
    calls: &HashMap<CallId, &LlmCall>,
    blobs: &dyn Blobs,
) -> Result<Value, StoreError> {
    let arguments = calls.get(&answer.call).map_or("", |call| call.arguments.as_str());
    let shown = match &answer.shown {
        Shown::Settled(Settled::Completed { result }) => result_json(&result.open(blobs)?)?,
        Shown::Settled(Settled::Failed { message } | Settled::Cancelled { message }) => {
            json!({"type": "text", "content": message})
        }
        Shown::Placeholder(text) => json!({"type": "text", "content": text}),
    };
    Ok(json!([WrittenCall::new(&answer.provider_id, &answer.name, arguments), shown]))
}

/// A result in the form in which clients send it.
pub(crate) fn result_json(result: &ToolResult) -> Result<Value, StoreError> {
    Ok(serde_json::to_value(result)?)
}

fn llm_contents(llm: &LlmTurn) -> Value {
    let calls: Vec<WrittenCall> = llm
        .calls
        .iter()
        .map(|call| WrittenCall::new(&call.provider_id, &call.name, &call.arguments))
        .collect();
    json!({
        "llmResponse": llm.text,
        "llmThinking": llm.thinking,
        "llmToolCalls": calls,
        "llmModel": llm.model,
        "llmStopReason": llm.stop_reason,
    })
}

fn bytes(llm: &LlmTurn) -> ByteUsage {
    let arguments: usize = llm.calls.iter().map(|call| call.name.len() + call.arguments.len()).sum();
    let output_bytes = llm.text.as_deref().map_or(0, str::len) + arguments;
    let reasoning_bytes = llm.thinking.as_deref().map_or(0, str::len);
    ByteUsage { output_bytes, reasoning_bytes, total_bytes: output_bytes + reasoning_bytes }
}
