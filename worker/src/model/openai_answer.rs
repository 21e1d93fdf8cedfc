//! Answers of chat completions APIs.

use holdfast_engine::{
    content::Usage,
    model::{Flavor, ModelAnswer, RequestedCall},
};
use serde::Deserialize;
use serde_json::{Value, value::RawValue};

use super::{error::Failure, keys::ApiKey, wire::Object};

#[derive(Deserialize)]
struct Body {
    choices: Option<Vec<Choice>>,
    #[serde(default)]
    usage: Value,
    #[serde(default)]
    error: Value,
}

#[derive(Deserialize)]
struct Choice {
    message: Option<Box<RawValue>>,
    #[serde(default)]
    finish_reason: Value,
}

/// Reads a whole answer.
pub(super) fn parse(text: &str, flavor: Flavor, key: Option<&ApiKey>) -> Result<ModelAnswer, Failure> {
    let body: Body = serde_json::from_str(text).map_err(|error| super::unreadable(&error))?;
    if !body.error.is_null() {
        return Err(Failure::reported(&body.error, key));
    }
    let choice = body.choices.into_iter().flatten().next();
    let Some(Choice { message: Some(message), finish_reason }) = choice else {
        return Err(Failure::malformed("it has no choice with a message"));
    };
    answer(message, flavor, finish_reason.as_str().map(str::to_owned), usage(&body.usage))
}

/// Makes an answer of a message object.
pub(super) fn answer(
    message: Box<RawValue>,
    flavor: Flavor,
    stop_reason: Option<String>,
    usage: Option<Usage>,
) -> Result<ModelAnswer, Failure> {
    let Some(object) = Object::parse(&message) else {
        return Err(Failure::malformed("its message is not a JSON object"));
    };
    let value = |key| object.get(key).and_then(|text| serde_json::from_str::<Value>(text.get()).ok());
    let content = value("content").unwrap_or_default();
    let text = text_of(&content).or_else(|| value("refusal").as_ref().and_then(text_of));
    let thinking = ["reasoning_content", "reasoning", "thinking"]
        .iter()
        .find_map(|key| value(key).as_ref().and_then(text_of))
        .or_else(|| thinking_parts(&content))
        .or_else(|| value("reasoning_details").as_ref().and_then(thinking_details));
    let calls = match object.get("tool_calls").filter(|list| list.get() != "null") {
        Some(list) => calls(list)?,
        None => Vec::new(),
    };
    Ok(ModelAnswer { text, thinking, calls, usage, flavor, raw: Some(message), stop_reason })
}

/// Reads the tokens spent; `None` unless the provider counted.
pub(super) fn usage(usage: &Value) -> Option<Usage> {
    let number = |pointer: &str| usage.pointer(pointer).and_then(Value::as_u64);
    let (input, output) = (number("/prompt_tokens"), number("/completion_tokens"));
    if input.is_none() && output.is_none() {
        return None;
    }
    // The first is OpenAI's place, the others are Moonshot's and DeepSeek's.
    let cached = ["/prompt_tokens_details/cached_tokens", "/cached_tokens", "/prompt_cache_hit_tokens"]
        .iter()
        .find_map(|pointer| number(pointer));
    Some(Usage {
        input_tokens: input.unwrap_or_default(),
        output_tokens: output.unwrap_or_default(),
        cached_tokens: cached.unwrap_or_default(),
    })
}

fn calls(list: &RawValue) -> Result<Vec<RequestedCall>, Failure> {
    let malformed = |_| Failure::malformed("its tool_calls are not a list of calls");
    #[derive(Deserialize)]
    struct Call {
        #[serde(default)]
        id: Value,
        function: Option<Function>,
    }
    #[derive(Deserialize)]
    struct Function {
        #[serde(default)]
        name: Value,
        arguments: Option<Box<RawValue>>,
    }
    let calls: Vec<Call> = serde_json::from_str(list.get()).map_err(malformed)?;
    let calls = calls.into_iter().map(|call| {
        let (name, arguments) =
            call.function.map_or((Value::Null, None), |function| (function.name, function.arguments));
        RequestedCall {
            provider_id: call.id.as_str().unwrap_or_default().to_owned(),
            name: name.as_str().unwrap_or_default().to_owned(),
            // Text as the API says, or an object as some servers send it.
            arguments: arguments
                .map(|text| {
                    serde_json::from_str::<String>(text.get()).unwrap_or_else(|_| text.get().to_owned())
                })
                .unwrap_or_default(),
        }
    });
    Ok(calls.collect())
}

/// Text, or the text parts of a list of parts; `None` when there is none.
fn text_of(content: &Value) -> Option<String> {
    let text = match content {
        Value::String(text) => text.clone(),
        Value::Array(parts) => {
            let texts = parts.iter().map(|part| match part {
                Value::String(text) => text.as_str(),
                part if part["type"] == "refusal" => part["refusal"].as_str().unwrap_or_default(),
                part if part["type"] == "text" => part["text"].as_str().unwrap_or_default(),
                _ => "",
            });
            texts.collect()
        }
        _ => return None,
    };
    (!text.is_empty()).then_some(text)
}

/// Reasoning that stands among the content's parts, as Mistral sends it.
fn thinking_parts(content: &Value) -> Option<String> {
    let parts = content.as_array()?.iter().filter(|part| part["type"] == "thinking");
    let text: String = parts.filter_map(|part| text_of(&part["thinking"])).collect();
    (!text.is_empty()).then_some(text)
}

/// Reasoning in OpenRouter's details.
fn thinking_details(details: &Value) -> Option<String> {
    let texts = details
        .as_array()?
        .iter()
        .filter_map(|item| item["text"].as_str().or_else(|| item["summary"].as_str()));
    let text: String = texts.collect();
    (!text.is_empty()).then_some(text)
}
