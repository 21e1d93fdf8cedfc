//! What stands beside the messages.

use std::collections::HashSet;

use holdfast_engine::model::Flavor;
use serde_json::Value;

use super::{Found, Rule, is_blank, is_name};

/// The fields of OpenAI's chat completions reference; it answers any other with "Unknown parameter".
const OPENAI: &[&str] = &[
    "audio",
    "frequency_penalty",
    "function_call",
    "functions",
    "logit_bias",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "metadata",
    "modalities",
    "model",
    "n",
    "parallel_tool_calls",
    "prediction",
    "presence_penalty",
    "prompt_cache_key",
    "prompt_cache_retention",
    "reasoning_effort",
    "response_format",
    "safety_identifier",
    "seed",
    "service_tier",
    "stop",
    "store",
    "stream",
    "stream_options",
    "temperature",
    "tool_choice",
    "tools",
    "top_logprobs",
    "top_p",
    "user",
    "verbosity",
    "web_search_options",
];

/// The fields of Mistral's chat completion reference; it answers any other with "Extra inputs are not permitted".
const MISTRAL: &[&str] = &[
    "frequency_penalty",
    "guardrails",
    "max_tokens",
    "messages",
    "metadata",
    "model",
    "n",
    "parallel_tool_calls",
    "prediction",
    "presence_penalty",
    "prompt_cache_key",
    "prompt_mode",
    "random_seed",
    "reasoning_effort",
    "response_format",
    "safe_prompt",
    "stop",
    "stream",
    "temperature",
    "tool_choice",
    "tools",
    "top_p",
];

/// The fields of Anthropic's messages reference, beta ones included; it answers any other with "Extra inputs are
/// not permitted".
const ANTHROPIC: &[&str] = &[
    "cache_control",
    "container",
    "context_management",
    "inference_geo",
    "max_tokens",
    "mcp_servers",
    "messages",
    "metadata",
    "model",
    "output_config",
    "output_format",
    "service_tier",
    "speed",
    "stop_sequences",
    "stream",
    "system",
    "temperature",
    "thinking",
    "tool_choice",
    "tools",
    "top_k",
    "top_p",
];

pub(super) fn check(flavor: Flavor, body: &Value, found: &mut Found) {
    // Anthropic demands a limit, the others only what every request needs.
    let needed: &[&str] = match flavor {
        Flavor::Anthropic => &["model", "max_tokens", "messages"],
        _ => &["model", "messages"],
    };
    for &field in needed.iter().filter(|field| body[**field].is_null()) {
        found.add(Rule::MissingField, field, "it is demanded");
    }
    let known = match flavor {
        Flavor::OpenAIv1 => Some(OPENAI),
        Flavor::MistralV1 => Some(MISTRAL),
        Flavor::Anthropic => Some(ANTHROPIC),
        // These say nothing of fields that they don't know.
        Flavor::OpenAI | Flavor::KimiV1 | Flavor::OpenRouter | Flavor::Ollama => None,
    };
    let fields = body.as_object().into_iter().flat_map(|object| object.keys());
    for field in fields.filter(|field| known.is_some_and(|known| !known.contains(&field.as_str()))) {
        found.add(Rule::UnknownField, field, "there is no such field");
    }
    // OpenAI: "The 'stream_options' parameter is only allowed when 'stream' is enabled."
    if flavor == Flavor::OpenAIv1 && !body["stream_options"].is_null() && body["stream"] != true {
        found.add(Rule::UnknownField, "stream_options", "it is only allowed with stream");
    }
    if flavor == Flavor::Anthropic {
        system(&body["system"], found);
    }
    tools(flavor, &body["tools"], found);
}

/// Anthropic's system prompt: text, or blocks of text none of which is empty, nor all blank.
fn system(system: &Value, found: &mut Found) {
    match system {
        Value::Null => {}
        // An empty text counts as none; a blank one is refused.
        Value::String(text) if text.is_empty() || !is_blank(text) => {}
        Value::String(_) => found.add(Rule::EmptyContent, "system", "it is blank"),
        Value::Array(blocks) => {
            for (position, block) in blocks.iter().enumerate() {
                match block["text"].as_str() {
                    Some("") => found.add(Rule::EmptyContent, format!("system[{position}]"), "it is empty"),
                    Some(_) => {}
                    None => found.add(Rule::Form, format!("system[{position}]"), "it is no block of text"),
                }
            }
        }
        _ => found.add(Rule::Form, "system", "it is neither text nor blocks"),
    }
}

fn tools(flavor: Flavor, tools: &Value, found: &mut Found) {
    let tools = match tools {
        Value::Null => return,
        Value::Array(tools) => tools,
        _ => return found.add(Rule::Form, "tools", "it is no list"),
    };
    // OpenAI: "empty array. Expected an array with minimum length 1"; Anthropic takes an empty list.
    if tools.is_empty() && flavor != Flavor::Anthropic {
        found.add(Rule::EmptyList, "tools", "there is no tool");
    }
    let mut names = HashSet::new();
    for (position, tool) in tools.iter().enumerate() {
        let at = format!("tools[{position}]");
        let (spec, schema) = match flavor {
            Flavor::Anthropic => (tool, &tool["input_schema"]),
            _ => (&tool["function"], &tool["function"]["parameters"]),
        };
        // Anthropic's own tools, such as web search, have a type and no schema.
        if flavor == Flavor::Anthropic && tool["type"].as_str().is_some_and(|kind| kind != "custom") {
            continue;
        }
        if flavor != Flavor::Anthropic && tool["type"] != "function" {
            found.add(Rule::Form, &at, "its type is not function");
        }
        let name = spec["name"].as_str().unwrap_or_default();
        if !is_name(flavor, name) {
            found.add(Rule::ToolName, &at, format!("{name:?} is no name of a tool"));
        }
        // Anthropic: "tools: Tool names must be unique."; Moonshot: "function name … is duplicated".
        if !names.insert(name) && matches!(flavor, Flavor::Anthropic | Flavor::KimiV1) {
            found.add(Rule::ToolNameTwice, &at, format!("{name:?} is another tool's name, too"));
        }
        // Anthropic demands a schema; the others take a tool without parameters.
        let absent = schema.is_null() && flavor != Flavor::Anthropic;
        if !absent && schema["type"] != "object" {
            found.add(Rule::ToolSchema, &at, "its parameters are not of type object");
        }
    }
}
