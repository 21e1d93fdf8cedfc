//! Answers of Anthropic's messages API.

use holdfast_engine::{
    content::Usage,
    model::{Flavor, ModelAnswer, RequestedCall},
};
use serde::Deserialize;
use serde_json::{Value, value::RawValue};

use super::{error::Failure, keys::ApiKey};

#[derive(Deserialize)]
struct Body {
    content: Option<Box<RawValue>>,
    #[serde(default)]
    stop_reason: Value,
    #[serde(default)]
    usage: Value,
    #[serde(default)]
    error: Value,
}

#[derive(Deserialize)]
struct Block {
    #[serde(rename = "type", default)]
    kind: String,
    #[serde(default)]
    text: Value,
    #[serde(default)]
    thinking: Value,
    #[serde(default)]
    id: Value,
    #[serde(default)]
    name: Value,
    input: Option<Box<RawValue>>,
}

/// Reads a whole answer.
pub(super) fn parse(text: &str, key: Option<&ApiKey>) -> Result<ModelAnswer, Failure> {
    let body: Body = serde_json::from_str(text).map_err(|error| super::unreadable(&error))?;
    if !body.error.is_null() {
        return Err(Failure::reported(&body.error, key));
    }
    let Some(content) = body.content else { return Err(Failure::malformed("it has no content")) };
    answer(content, body.stop_reason.as_str().map(str::to_owned), usage(&body.usage))
}

/// Makes an answer of an array of content blocks.
pub(super) fn answer(
    content: Box<RawValue>,
    stop_reason: Option<String>,
    usage: Option<Usage>,
) -> Result<ModelAnswer, Failure> {
    let blocks: Vec<Block> = serde_json::from_str(content.get())
        .map_err(|_| Failure::malformed("its content is not a list of blocks"))?;
    let (mut text, mut thinking, mut calls) = (String::new(), String::new(), Vec::new());
    for block in blocks {
        let string = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        match block.kind.as_str() {
            "text" => text.push_str(&string(&block.text)),
            "thinking" => thinking.push_str(&string(&block.thinking)),
            "tool_use" => calls.push(RequestedCall {
                provider_id: string(&block.id),
                name: string(&block.name),
                arguments: block.input.map(|input| input.get().to_owned()).unwrap_or_default(),
            }),
            _ => {}
        }
    }
    let some = |text: String| (!text.is_empty()).then_some(text);
    Ok(ModelAnswer {
        text: some(text),
        thinking: some(thinking),
        calls,
        usage,
        flavor: Flavor::Anthropic,
        raw: Some(content),
        stop_reason,
    })
}

/// Reads the tokens spent. The API counts tokens read from and written to its cache apart from the others.
pub(super) fn usage(usage: &Value) -> Option<Usage> {
    let number = |key: &str| usage.get(key).and_then(Value::as_u64);
    let (input, output) = (number("input_tokens"), number("output_tokens"));
    if input.is_none() && output.is_none() {
        return None;
    }
    let cached = number("cache_read_input_tokens").unwrap_or_default();
    let written = number("cache_creation_input_tokens").unwrap_or_default();
    Some(Usage {
        input_tokens: input.unwrap_or_default().saturating_add(cached).saturating_add(written),
        output_tokens: output.unwrap_or_default(),
        cached_tokens: cached,
    })
}
