//! Requests to Anthropic's messages API.

use holdfast_engine::{
    content::Media,
    model::{Flavor, Message, ModelRequest, ModelTarget, RequestedCall},
    tool::ToolSpec,
};
use serde_json::{Value, json, value::RawValue};

use super::{
    EMPTY_MESSAGE,
    call_ids::CallIds,
    error::ModelError,
    fit,
    media::anthropic_block,
    wire::{Object, raw},
};

/// The API demands a limit; this is it when the agent sets none.
pub const DEFAULT_MAX_TOKENS: u64 = 8192;

/// The body of a request. The same request always has the same bytes.
pub(super) fn encode(
    target: &ModelTarget,
    request: &ModelRequest,
    stream: bool,
) -> Result<Vec<u8>, ModelError> {
    let mut body = Object::default()
        .with("model", &target.model)
        .with("max_tokens", &target.max_output_tokens.unwrap_or(DEFAULT_MAX_TOKENS));
    let system = request.system.iter().filter(|part| !part.trim().is_empty());
    let mut system: Vec<_> = system.map(|part| json!({ "type": "text", "text": part })).collect();
    if cache_up_to_last(&mut system) {
        body.set("system", &system);
    }
    let mut tools: Vec<_> = request.tools.iter().map(tool).collect();
    if cache_up_to_last(&mut tools) {
        body.set("tools", &tools);
    }
    body.set("messages", &messages(request));
    if let Some(temperature) = target.temperature {
        body.set("temperature", &temperature);
    }
    if stream {
        body.set("stream", &true);
    }
    super::finish_body(body, target)
}

/// Marks the end of what the provider may cache; false when there is nothing.
fn cache_up_to_last(blocks: &mut [Value]) -> bool {
    let Some(last) = blocks.last_mut() else { return false };
    last["cache_control"] = json!({ "type": "ephemeral" });
    true
}

fn tool(spec: &ToolSpec) -> Value {
    json!({
        "name": spec.name,
        "description": spec.description,
        "input_schema": super::object_schema(&spec.parameters),
    })
}

/// The conversation with roles that alternate: messages of the same side become one.
fn messages(request: &ModelRequest) -> Vec<Object> {
    let mut turns = Turns::default();
    let mut ids = CallIds::new(Flavor::Anthropic);
    for message in &request.messages {
        match &**message {
            Message::User { text, media } => turns.add("user", user(text, media)),
            Message::Assistant { text, calls, flavor, raw: own } => {
                let out_ids = ids.begin(calls);
                let own = own.as_deref().filter(|_| *flavor == Flavor::Anthropic);
                let own = own.and_then(|own| replay(own, &out_ids));
                turns.add("assistant", own.unwrap_or_else(|| assistant(text.as_deref(), calls, &out_ids)));
            }
            Message::Tool { provider_id, text, media, .. } => {
                turns.add("user", vec![tool_result(&ids.answer(provider_id), text, media)]);
            }
        }
    }
    turns.finish()
}

#[derive(Default)]
struct Turns(Vec<(&'static str, Vec<Box<RawValue>>)>);

impl Turns {
    fn add(&mut self, role: &'static str, mut blocks: Vec<Box<RawValue>>) {
        match self.0.last_mut() {
            _ if blocks.is_empty() => {}
            Some((last, known)) if *last == role => known.append(&mut blocks),
            _ => self.0.push((role, blocks)),
        }
    }

    fn finish(self) -> Vec<Object> {
        let turns = self.0.into_iter();
        turns.map(|(role, blocks)| Object::default().with("role", role).with("content", &blocks)).collect()
    }
}

fn user(text: &str, media: &[Media]) -> Vec<Box<RawValue>> {
    let shown = match (text.trim().is_empty(), media.is_empty()) {
        (false, _) => Some(text),
        (true, false) => None,
        // The API takes no empty message, and the roles must alternate.
        (true, true) => Some(EMPTY_MESSAGE),
    };
    let text = shown.map(text_block);
    text.into_iter().chain(media.iter().map(|media| raw(&anthropic_block(media)))).collect()
}

fn text_block(text: &str) -> Box<RawValue> {
    raw(&json!({ "type": "text", "text": text }))
}

fn tool_result(id: &str, text: &str, media: &[Media]) -> Box<RawValue> {
    let mut content: Vec<_> = media.iter().map(anthropic_block).collect();
    if !text.trim().is_empty() {
        content.insert(0, json!({ "type": "text", "text": text }));
    }
    raw(&json!({ "type": "tool_result", "tool_use_id": id, "content": content }))
}

/// An assistant message made of what is known of it.
fn assistant(text: Option<&str>, calls: &[RequestedCall], ids: &[String]) -> Vec<Box<RawValue>> {
    let text = text.filter(|text| !text.trim().is_empty()).map(text_block);
    let calls = calls.iter().zip(ids).map(|(call, id)| {
        let input = Object::default()
            .with("type", "tool_use")
            .with("id", id)
            .with("name", fit::name(&call.name))
            .with("input", &fit::arguments(&call.arguments));
        raw(&input)
    });
    text.into_iter().chain(calls).collect()
}

/// The provider's own blocks, changed only where they would be refused: ids that had to change, calls that
/// the model wrote wrongly, and blocks of blank text. `None` when they don't hold the calls that the ids are for.
fn replay(own: &RawValue, ids: &[String]) -> Option<Vec<Box<RawValue>>> {
    let blocks: Vec<Box<RawValue>> = serde_json::from_str(own.get()).ok()?;
    let mut ids = ids.iter();
    let mut out = Vec::with_capacity(blocks.len());
    for block in blocks {
        let mut object = Object::parse(&block)?;
        match object.get("type").map(RawValue::get) {
            Some(r#""tool_use""#) => {
                let id = ids.next()?;
                let renamed = object.get("id").map(RawValue::get) != Some(raw(id).get());
                if renamed {
                    object.set("id", id);
                }
                let changed = repair(&mut object) || renamed;
                out.push(if changed { raw(&object) } else { block });
            }
            Some(r#""text""#) if is_blank(&object) => {}
            _ => out.push(block),
        }
    }
    ids.next().is_none().then_some(out)
}

/// Gives a call a name and arguments that the API takes; whether anything had to change.
fn repair(block: &mut Object) -> bool {
    let name = block.get("name").and_then(|name| serde_json::from_str::<String>(name.get()).ok());
    let misnamed = name.as_deref().is_none_or(|name| fit::name(name) != name);
    if misnamed {
        block.set("name", fit::INVALID_NAME);
    }
    let input = block.get("input").filter(|input| input.get() != "null");
    let misused = !input.is_some_and(|input| fit::is_object(input.get()));
    if misused {
        block.set("input", &fit::arguments(input.map(RawValue::get).unwrap_or_default()));
    }
    misnamed || misused
}

fn is_blank(block: &Object) -> bool {
    let text = block.get("text").and_then(|text| serde_json::from_str::<String>(text.get()).ok());
    text.is_none_or(|text| text.trim().is_empty())
}
