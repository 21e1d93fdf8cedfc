//! What the model is shown, built from stored turns: the same turns always give the same request.

use std::sync::Arc;

use chrono::SecondsFormat;
use serde_json::json;
use uuid::Uuid;

use crate::{
    Time,
    content::{BlobError, Blobs, Digest, Media, Payload, Query},
    ids::{CallId, MailId},
    mail::{Sender, Settled},
    model::{Message, ModelRequest, RequestedCall},
    offer::Offer,
    policy::Disposition,
    session::{CallState, Session, TrackedCall},
    tool::ToolSpec,
    turn::{Origin, Said, Shown, Turn, TurnBody, UserTurn},
    waits::Waits,
};

/// How models are told a time.
pub(crate) fn shown_time(at: Time) -> String {
    at.to_rfc3339_opts(SecondsFormat::Secs, true)
}

/// Stands where turns were left out of a request.
const LEFT_OUT: &str = "[Earlier parts of this conversation were left out to fit the model's context.]";

/// Bytes of text that are counted as one token where a context limit is kept.
const BYTES_PER_TOKEN: u64 = 4;

/// What the model is shown in place of the result of a call that is still open.
pub fn placeholder(call: &TrackedCall) -> String {
    let later = "Its result will come later, as a message.";
    let deferred = call.state == CallState::Deferred;
    let message = match call.state {
        CallState::Deferred => format!("This call is handled outside. {later}"),
        CallState::Running => format!("This call goes on in the background. {later}"),
        CallState::Waiting if call.child().is_some() => {
            format!("This call goes on in a session of its own. {later}")
        }
        _ => "This call has no result yet. It will come later, as a message.".to_owned(),
    };
    let mut shown = json!({"status": call.word(), "tool_call_id": call.provider_id, "message": message});
    match call.policy.disposition.base() {
        Disposition::Defer { reason } | Disposition::Approve { reason, .. }
            if deferred && !reason.is_empty() =>
        {
            shown["reason"] = json!(reason);
        }
        _ => {}
    }
    if let Some(child) = call.child() {
        shown["child_session_id"] = json!(child);
    }
    if let (Some(Waits::Timer), Some(until)) = (&call.waits, call.expires_at) {
        shown["until"] = json!(shown_time(until));
    }
    shown.to_string()
}

/// Provider's id and tool of a call that is no longer tracked.
pub fn find_call(session: &Session, id: CallId) -> Option<(String, String)> {
    session.turns.iter().rev().find_map(|turn| match &turn.body {
        TurnBody::Llm(llm) => llm
            .calls
            .iter()
            .find(|call| call.id == id)
            .map(|call| (call.provider_id.clone(), call.name.clone())),
        TurnBody::User(_) => None,
    })
}

/// The part of an id by which texts for the model name what has it.
pub(crate) fn short(id: Uuid) -> String {
    let hex = id.simple().to_string();
    hex[hex.len() - 8..].to_owned()
}

/// The header under which the model is told of the end of a call that it was shown as open.
pub(crate) fn late_header(letter: MailId, provider_id: &str, name: &str, word: &str) -> String {
    format!("{} tool call {provider_id} ({name}) {word}]", late_head(letter))
}

fn late_head(letter: MailId) -> String {
    format!("[mail {}:", letter_name(letter))
}

/// The name that a letter has in texts for the model.
pub fn letter_name(letter: MailId) -> String {
    format!("m-{}", short(letter.0))
}

/// Whether the model has been told of a call, no longer tracked, only that it was cancelled; such a
/// call may have a result nevertheless, which came too late.
///
/// Results that were told are found by their sender, since providers' ids may repeat. One that came
/// from elsewhere is not found: a repeat does less harm than a result that gets lost.
pub(crate) fn lacks_result(session: &Session, id: CallId) -> bool {
    match answer_to(session, id) {
        Some(Shown::Settled(Settled::Cancelled { .. }) | Shown::Placeholder(_)) => {}
        Some(Shown::Settled(_)) | None => return false,
    }
    !late_ends(session, id).any(|word| word != "cancelled")
}

/// The word for how a call ended, as the model was told it last; nothing if it wasn't.
pub(crate) fn told_end(session: &Session, id: CallId) -> Option<&str> {
    late_ends(session, id).last().or_else(|| match answer_to(session, id) {
        Some(Shown::Settled(settled)) => Some(settled.word()),
        Some(Shown::Placeholder(_)) | None => None,
    })
}

fn users(session: &Session) -> impl Iterator<Item = &UserTurn> {
    session.turns.iter().filter_map(|turn| match &turn.body {
        TurnBody::User(user) => Some(user),
        TurnBody::Llm(_) => None,
    })
}

/// What the model was shown in answer to a call.
fn answer_to(session: &Session, id: CallId) -> Option<&Shown> {
    let answer = users(session).find_map(|user| user.answers.iter().find(|answer| answer.call == id));
    answer.map(|answer| &answer.shown)
}

/// The words for how a call ended that the model was told of it after its answer.
fn late_ends(session: &Session, id: CallId) -> impl Iterator<Item = &str> {
    users(session).flat_map(move |user| {
        // The end of a child session, whose id is the call's, is that session's letter.
        let own = user.mail.iter().filter(move |origin| match origin.from {
            Sender::ToolCall { tool_call_id } => tool_call_id == id,
            Sender::Session { session_id, .. } => session_id.0 == id.0 && origin.tag == "toolCallFinished",
            Sender::User { .. } | Sender::System { .. } => false,
        });
        let of = |origin: &Origin| {
            let head = late_head(origin.id);
            user.said.iter().find_map(|said| {
                let (Said::Late { header: text, .. } | Said::Text(text)) = said else { return None };
                let (header, _) = text.strip_prefix(&head)?.rsplit_once(']')?;
                header.rsplit(' ').next()
            })
        };
        own.filter_map(of).collect::<Vec<_>>()
    })
}

/// What earlier requests of a session have shown of its turns, which never change: the next request builds
/// only what is new, so that its cost doesn't grow with the history.
#[derive(Debug, Default)]
pub struct Rendered {
    /// By position, from 1: the messages of turns that were shown whole.
    turns: Vec<Option<Vec<Arc<Message>>>>,
    /// By position, from 1: whether a turn is a user's, and its size.
    sizes: Vec<(bool, u64)>,
    /// The prompt and the tools that were shown last, or that the agent offers.
    system: Known<Vec<String>>,
    tools: Known<Vec<ToolSpec>>,
}

/// What a blob was found to hold.
type Known<T> = Option<(Digest, Arc<T>)>;

impl Rendered {
    /// Takes note of what an agent offers: requests that show it need no blobs of it.
    pub fn know(&mut self, offer: &Offer) {
        self.system = Some((offer.system.blob.digest, Arc::clone(&offer.system.value)));
        self.tools = Some((offer.tools.blob.digest, Arc::clone(&offer.tools.value)));
    }

    fn of(&self, position: i64) -> Option<&[Arc<Message>]> {
        let index = usize::try_from(position - 1).ok()?;
        self.turns.get(index)?.as_deref()
    }

    fn keep(&mut self, position: i64, messages: Vec<Arc<Message>>) {
        let Ok(index) = usize::try_from(position - 1) else { return };
        if self.turns.len() <= index {
            self.turns.resize(index + 1, None);
        }
        self.turns[index] = Some(messages);
    }

    /// Takes note of the sizes of a session's newest turns.
    fn measure(&mut self, session: &Session) {
        let known = self.sizes.len();
        let new = session.turns.iter().skip(known);
        self.sizes.extend(new.map(|turn| (matches!(turn.body, TurnBody::User(_)), size(turn))));
    }
}

/// The blobs that a request needs; they have to be fetched before it is built.
pub fn needs(session: &Session, context_tokens: Option<u64>) -> Vec<Digest> {
    needs_after(session, context_tokens, &mut Rendered::default())
}

/// As [`needs`], for a request that is built with what is rendered already. Sorted.
pub fn needs_after(session: &Session, context_tokens: Option<u64>, rendered: &mut Rendered) -> Vec<Digest> {
    let first = first_shown(session, context_tokens, rendered);
    let mut digests: Vec<Digest> = Vec::new();
    if let Some(user) = newest_user(session) {
        let system = rendered.system.as_ref().is_none_or(|(known, _)| *known != user.system);
        let tools = rendered.tools.as_ref().is_none_or(|(known, _)| *known != user.tools);
        digests.extend(system.then_some(user.system));
        digests.extend(tools.then_some(user.tools));
    }
    for turn in shown(session, first) {
        let whole = turn.position > first || first == 1;
        match &turn.body {
            TurnBody::User(user) if !(whole && rendered.of(turn.position).is_some()) => {
                digests.extend(blobs_of(user));
            }
            _ => {}
        }
    }
    digests.sort_unstable();
    digests.dedup();
    digests
}

/// The blobs that a user turn names, apart from its prompt and tools.
pub fn blobs_of(user: &UserTurn) -> Vec<Digest> {
    let answers = user.answers.iter().filter_map(|answer| match &answer.shown {
        Shown::Settled(Settled::Completed { result }) => result.digest(),
        Shown::Settled(_) | Shown::Placeholder(_) => None,
    });
    let said = user.said.iter().filter_map(|said| match said {
        Said::Query(query) => query.digest(),
        Said::Late { result, .. } => result.digest(),
        Said::Text(_) => None,
    });
    answers.chain(said).collect()
}

/// Builds the request for the session's newest user turn.
///
/// With `context_tokens`, the oldest rounds are left out, whole rounds at a time, so that about
/// that many tokens remain; no call is ever split from its answer. The cut depends on nothing but
/// the stored turns and moves in leaps, so that providers' caches of prefixes stay of use.
///
/// # Errors
/// [`BlobError`] if a blob that [`needs`] names wasn't fetched.
pub fn request(
    session: &Session,
    context_tokens: Option<u64>,
    blobs: &dyn Blobs,
) -> Result<ModelRequest, BlobError> {
    request_after(session, context_tokens, blobs, &mut Rendered::default())
}

/// As [`request`], with what earlier requests of this session have rendered.
///
/// # Errors
/// [`BlobError`] if a blob that [`needs_after`] names wasn't fetched.
pub fn request_after(
    session: &Session,
    context_tokens: Option<u64>,
    blobs: &dyn Blobs,
    rendered: &mut Rendered,
) -> Result<ModelRequest, BlobError> {
    let (system, tools) = match newest_user(session) {
        Some(user) => {
            (known(&mut rendered.system, user.system, blobs)?, known(&mut rendered.tools, user.tools, blobs)?)
        }
        None => Default::default(),
    };
    let first = first_shown(session, context_tokens, rendered);
    let mut messages = Vec::with_capacity(session.turns.len() * 2);
    for turn in shown(session, first) {
        if turn.position == first && first > 1 {
            messages.extend(render(turn, true, blobs)?);
            continue;
        }
        match rendered.of(turn.position) {
            Some(known) => messages.extend_from_slice(known),
            None => {
                let new = render(turn, false, blobs)?;
                messages.extend_from_slice(&new);
                rendered.keep(turn.position, new);
            }
        }
    }
    Ok(ModelRequest { system, tools, messages })
}

/// The messages of a turn. Where turns before it were left out, a user turn's answers are too.
fn render(turn: &Turn, cut_here: bool, blobs: &dyn Blobs) -> Result<Vec<Arc<Message>>, BlobError> {
    let mut messages = Vec::new();
    match &turn.body {
        TurnBody::User(user) => add_user(user, cut_here, blobs, &mut messages)?,
        TurnBody::Llm(llm) => messages.push(Message::Assistant {
            text: llm.text.clone(),
            calls: llm
                .calls
                .iter()
                .map(|call| RequestedCall {
                    provider_id: call.provider_id.clone(),
                    name: call.name.clone(),
                    arguments: call.arguments.clone(),
                })
                .collect(),
            flavor: llm.flavor,
            raw: llm.raw.clone(),
        }),
    }
    Ok(messages.into_iter().map(Arc::new).collect())
}

fn newest_user(session: &Session) -> Option<&UserTurn> {
    session.turns.iter().rev().find_map(|turn| match &turn.body {
        TurnBody::User(user) => Some(user),
        TurnBody::Llm(_) => None,
    })
}

/// What a blob holds, as far as it isn't known already.
fn known<T: for<'de> serde::Deserialize<'de>>(
    known: &mut Known<T>,
    digest: Digest,
    blobs: &dyn Blobs,
) -> Result<Arc<T>, BlobError> {
    if let Some((_, value)) = known.as_ref().filter(|(of, _)| *of == digest) {
        return Ok(Arc::clone(value));
    }
    let value = Arc::new(open(digest, blobs)?);
    *known = Some((digest, Arc::clone(&value)));
    Ok(value)
}

fn open<T: for<'de> serde::Deserialize<'de>>(digest: Digest, blobs: &dyn Blobs) -> Result<T, BlobError> {
    let problem = |problem: String| BlobError { digest, problem };
    let text = blobs.get(&digest).ok_or_else(|| problem("was not fetched".to_owned()))?;
    serde_json::from_str(text).map_err(|error| problem(format!("can't be read: {error}")))
}

fn shown(session: &Session, first: i64) -> impl Iterator<Item = &Turn> {
    session.turns.iter().map(|turn| &**turn).filter(move |turn| turn.position >= first)
}

/// Position of the first turn that a request shows: always a user turn, whose answers are dropped
/// if the turn that asked for them is left out. The newest answers and the turn that asked for them
/// stay, whatever their size: a model that isn't shown what it just asked for asks again. So does all
/// that no model has read yet.
fn first_shown(session: &Session, context_tokens: Option<u64>, rendered: &mut Rendered) -> i64 {
    let Some(limit) = context_tokens else { return 1 };
    let budget = limit.saturating_mul(BYTES_PER_TOKEN);
    let keep = budget / 4 * 3;
    rendered.measure(session);
    let sizes = &rendered.sizes[..session.turns.len()];
    let (mut first, mut total) = (0, 0);
    // The last turn at which a request for the turn at hand may begin.
    let mut latest = 0;
    let (mut user_before, mut unread) = (0, false);
    for (index, (user, bytes)) in sizes.iter().enumerate() {
        total += bytes;
        // Requests are made for user turns only, so that is where limits are kept.
        if !user {
            unread = false;
            continue;
        }
        if !unread {
            latest = if answers_calls(&session.turns[index]) { user_before } else { index };
        }
        (user_before, unread) = (index, true);
        if total <= budget {
            continue;
        }
        while first < latest && total > keep {
            let next = sizes[first + 1..=index].iter().position(|(user, _)| *user);
            let Some(step) = next else { break };
            total -= sizes[first..=first + step].iter().map(|(_, bytes)| bytes).sum::<u64>();
            first += step + 1;
        }
    }
    session.turns.get(first).map_or(1, |turn| turn.position)
}

fn answers_calls(turn: &Turn) -> bool {
    matches!(&turn.body, TurnBody::User(user) if !user.answers.is_empty())
}

fn size(turn: &Turn) -> u64 {
    let len = |text: &str| text.len() as u64;
    match &turn.body {
        TurnBody::Llm(llm) => {
            let calls = llm.calls.iter().map(|call| len(&call.name) + len(&call.arguments)).sum::<u64>();
            llm.text.as_deref().map_or(0, len) + llm.thinking.as_deref().map_or(0, len) + calls
        }
        TurnBody::User(user) => {
            let answers = user.answers.iter().map(|answer| match &answer.shown {
                Shown::Settled(Settled::Completed { result }) => weigh(result),
                Shown::Settled(Settled::Failed { message } | Settled::Cancelled { message }) => len(message),
                Shown::Placeholder(text) => len(text),
            });
            let said = user.said.iter().map(|said| match said {
                Said::Query(query) => weigh(query),
                Said::Late { header, result } => len(header) + weigh(result),
                Said::Text(text) => len(text),
            });
            answers.chain(said).sum()
        }
    }
}

fn weigh<T: serde::Serialize>(payload: &Payload<T>) -> u64 {
    match payload {
        Payload::Blob { bytes, .. } => *bytes,
        Payload::Inline(value) => serde_json::to_string(value).map_or(0, |text| text.len() as u64),
    }
}

fn add_user(
    user: &UserTurn,
    cut_here: bool,
    blobs: &dyn Blobs,
    messages: &mut Vec<Message>,
) -> Result<(), BlobError> {
    let answers = if cut_here { &[] } else { user.answers.as_slice() };
    for answer in answers {
        let (text, media) = match &answer.shown {
            Shown::Settled(Settled::Completed { result }) => {
                let result = result.open(blobs)?;
                (result.as_text(), result.media().into_iter().cloned().collect())
            }
            Shown::Settled(Settled::Failed { message } | Settled::Cancelled { message }) => {
                (format!("Error: {message}"), Vec::new())
            }
            Shown::Placeholder(text) => (text.clone(), Vec::new()),
        };
        messages.push(Message::Tool {
            provider_id: answer.provider_id.clone(),
            name: answer.name.clone(),
            text,
            media,
        });
    }
    let mut query = query_of(user, blobs)?;
    if cut_here {
        let told = query.take().unwrap_or_default();
        let text =
            if told.text.is_empty() { LEFT_OUT.to_owned() } else { format!("{LEFT_OUT}\n\n{}", told.text) };
        query = Some(Query { text, media: told.media });
    }
    match (query, messages.last_mut()) {
        (None, _) => {}
        (Some(query), Some(Message::Tool { text, media, .. })) if user.said_in_answer => {
            text.push_str("\n\n");
            text.push_str(&query.text);
            media.extend(query.media);
        }
        (Some(Query { text, media }), _) => messages.push(Message::User { text, media }),
    }
    Ok(())
}

/// What was said in a user turn, as one query; `None` if nothing was.
///
/// # Errors
/// [`BlobError`] if a blob of the turn wasn't fetched.
pub fn query_of(user: &UserTurn, blobs: &dyn Blobs) -> Result<Option<Query>, BlobError> {
    if user.said.is_empty() {
        return Ok(None);
    }
    let mut texts = Vec::with_capacity(user.said.len());
    let mut media: Vec<Media> = Vec::new();
    for said in &user.said {
        match said {
            Said::Query(query) => {
                let query = query.open(blobs)?;
                if !query.text.is_empty() {
                    texts.push(query.text);
                }
                media.extend(query.media);
            }
            Said::Text(text) => texts.push(text.clone()),
            Said::Late { header, result } => {
                let result = result.open(blobs)?;
                texts.push(format!("{header}\n{}", result.as_text()));
                media.extend(result.media().into_iter().cloned());
            }
        }
    }
    Ok(Some(Query { text: texts.join("\n\n"), media }))
}
