//! What a model is asked and what it answers, apart from any provider's wire format.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Value, value::RawValue};

use crate::{
    content::{Media, Usage},
    tool::ToolSpec,
};

/// A dialect of a model API.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Flavor {
    /// OpenAI's chat completions, in full.
    OpenAIv1,
    /// Chat completions as most others understand them.
    OpenAI,
    /// Moonshot's.
    KimiV1,
    /// Mistral's.
    MistralV1,
    /// OpenRouter's.
    OpenRouter,
    /// Ollama's (vLLM's too).
    Ollama,
    /// Anthropic's messages API.
    Anthropic,
}

impl Flavor {
    /// All, in the order in which errors list them.
    pub const ALL: [Self; 7] = [
        Self::OpenAIv1,
        Self::OpenAI,
        Self::KimiV1,
        Self::MistralV1,
        Self::OpenRouter,
        Self::Ollama,
        Self::Anthropic,
    ];

    /// The name that agent files use; reading disregards case.
    pub fn name(self) -> &'static str {
        match self {
            Self::OpenAIv1 => "OpenAIv1",
            Self::OpenAI => "OpenAI",
            Self::KimiV1 => "KimiV1",
            Self::MistralV1 => "MistralV1",
            Self::OpenRouter => "OpenRouter",
            Self::Ollama => "Ollama",
            Self::Anthropic => "Anthropic",
        }
    }

    /// Finds a flavour by its name, in any case.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|flavor| flavor.name().eq_ignore_ascii_case(name))
    }
}

/// A tool call that a model asks for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestedCall {
    /// The provider's id; may be empty or repeat.
    pub provider_id: String,
    /// The tool's name as the model wrote it.
    pub name: String,
    /// The arguments as the model wrote them: JSON text, hopefully.
    pub arguments: String,
}

/// A message of a request, in the order in which the model reads them.
#[derive(Debug, Clone)]
pub enum Message {
    /// From the user's side: a query, or mail.
    User {
        /// The text.
        text: String,
        /// Attachments.
        media: Vec<Media>,
    },
    /// An earlier answer of the model.
    Assistant {
        /// The text, if any.
        text: Option<String>,
        /// The calls that it asked for.
        calls: Vec<RequestedCall>,
        /// The flavour of the provider that gave the answer.
        flavor: Flavor,
        /// The provider's own message as it came, unknown fields included; goes back to a
        /// provider of the same flavour.
        raw: Option<Box<RawValue>>,
    },
    /// The one answer to a call of the last assistant message.
    Tool {
        /// The call's provider id.
        provider_id: String,
        /// The tool's name.
        name: String,
        /// What the model is shown.
        text: String,
        /// Attachments of the result.
        media: Vec<Media>,
    },
}

/// A request to a model. The same stored session always builds the same request.
#[derive(Debug, Clone)]
pub struct ModelRequest {
    /// The system prompt's parts, in order.
    pub system: Arc<Vec<String>>,
    /// The tools on offer.
    pub tools: Arc<Vec<ToolSpec>>,
    /// The conversation so far; shared with the requests before and after this one.
    pub messages: Vec<Arc<Message>>,
}

/// A model's answer.
#[derive(Debug, Clone)]
pub struct ModelAnswer {
    /// The text, if any.
    pub text: Option<String>,
    /// Reasoning that the provider shows, if any.
    pub thinking: Option<String>,
    /// The calls that the model asks for, in order.
    pub calls: Vec<RequestedCall>,
    /// Tokens spent.
    pub usage: Option<Usage>,
    /// The flavour that parsed it.
    pub flavor: Flavor,
    /// The provider's message as it came: for chat completions the `message` object, for
    /// Anthropic the `content` array. It goes back unchanged in later requests.
    pub raw: Option<Box<RawValue>>,
    /// Why the provider stopped, in its own words.
    pub stop_reason: Option<String>,
}

/// How to reach a model: the part of an agent that the model client needs.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelTarget {
    /// The dialect.
    pub flavor: Flavor,
    /// Base URL; requests go to `{base_url}/chat/completions` or `{base_url}/messages`.
    pub base_url: String,
    /// The model's name.
    pub model: String,
    /// Sampling temperature, if set.
    pub temperature: Option<f64>,
    /// Upper bound of the answer's tokens, if set.
    pub max_output_tokens: Option<u64>,
    /// Merged into the request body last, top-level keys replacing.
    pub extra_body: Option<Value>,
}
