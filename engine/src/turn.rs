//! Turns: what the model was shown and what it answered. A turn never changes once it is stored.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::{
    Time,
    content::{Digest, Payload, Query, ToolResult, Usage},
    ids::{CallId, MailId, TurnId},
    mail::{Envelope, Sender, Settled},
    model::Flavor,
};

/// The format of stored turn bodies that this build writes. Older ones are upcast where they are
/// loaded and nowhere else.
pub const TURN_FORMAT: i16 = 1;

/// One turn of a session.
#[derive(Debug, Clone)]
pub struct Turn {
    /// Its id.
    pub id: TurnId,
    /// Its place: dense from 1.
    pub position: i64,
    /// When it was decided.
    pub at: Time,
    /// What it holds.
    pub body: TurnBody,
}

/// What a turn holds.
#[derive(Debug, Clone)]
pub enum TurnBody {
    /// What the model was shown.
    User(UserTurn),
    /// What it answered.
    Llm(LlmTurn),
}

impl TurnBody {
    /// `UserTurn` or `LlmTurn`.
    pub fn tag(&self) -> &'static str {
        match self {
            Self::User(_) => "UserTurn",
            Self::Llm(_) => "LlmTurn",
        }
    }

    /// The body as JSON text, which [`Self::parse`] reads back.
    ///
    /// # Errors
    /// None in practice: every part of a body has a JSON form.
    pub fn to_json(&self) -> Result<String, serde_json::Error> {
        match self {
            Self::User(turn) => serde_json::to_string(turn),
            Self::Llm(turn) => serde_json::to_string(turn),
        }
    }

    /// Reads a stored body. From text, never through a [`serde_json::Value`]: the provider's
    /// message has to keep its bytes.
    ///
    /// # Errors
    /// If the tag or the text isn't one that [`Self::tag`] and [`Self::to_json`] give.
    pub fn parse(tag: &str, text: &str) -> Result<Self, serde_json::Error> {
        match tag {
            "UserTurn" => serde_json::from_str(text).map(Self::User),
            "LlmTurn" => serde_json::from_str(text).map(Self::Llm),
            other => Err(serde::de::Error::custom(format!("unknown turn tag {other:?}"))),
        }
    }
}

/// What the model was shown: one answer for each call of the turn before, then what came by mail.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UserTurn {
    /// The system prompt in force: a blob of a JSON array of texts.
    pub system: Digest,
    /// The tools on offer: a blob of a JSON array of [`crate::tool::ToolSpec`].
    pub tools: Digest,
    /// One for each call of the turn before, in its order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub answers: Vec<Answer>,
    /// What was said, in order of arrival.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub said: Vec<Said>,
    /// Where that came from.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mail: Vec<Origin>,
    /// Whether the model is shown what was said at the end of the last answer.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub said_in_answer: bool,
}

/// The one answer to a call.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Answer {
    /// The call.
    pub call: CallId,
    /// Its provider's id.
    pub provider_id: String,
    /// Its tool.
    pub name: String,
    /// What the model was shown.
    pub shown: Shown,
}

/// What the model was shown of a call.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Shown {
    /// Its end.
    Settled(Settled),
    /// That it is still open; the text says so.
    Placeholder(String),
}

/// A part of what was said.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Said {
    /// A person's message.
    Query(Payload<Query>),
    /// Text that came by mail, header included.
    Text(String),
    /// A result that came after its placeholder.
    Late {
        /// The header that tells the model which call it belongs to.
        header: String,
        /// The result.
        result: Payload<ToolResult>,
    },
}

/// Where a part of a turn came from: an envelope without its body.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Origin {
    /// The letter's id.
    pub id: MailId,
    /// Its place in the mailbox; 0 for the end of a call that this session's own worker saw.
    pub seq: i64,
    /// Who sent it.
    pub from: Sender,
    /// What kind of letter it was.
    pub tag: String,
    /// How many sessions had passed it on.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub hops: u32,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

impl From<&Envelope> for Origin {
    fn from(envelope: &Envelope) -> Self {
        Self {
            id: envelope.id,
            seq: envelope.seq,
            from: envelope.from.clone(),
            tag: envelope.body.tag().to_owned(),
            hops: envelope.hops,
        }
    }
}

/// What the model answered.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LlmTurn {
    /// The text, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// Reasoning that the provider shows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thinking: Option<String>,
    /// The calls that it asks for, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub calls: Vec<LlmCall>,
    /// Tokens spent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
    /// The dialect that it was parsed from.
    pub flavor: Flavor,
    /// The model that answered.
    pub model: String,
    /// Why the provider stopped, in its own words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_reason: Option<String>,
    /// The provider's message, byte for byte.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub raw: Option<Box<RawValue>>,
}

/// A call that a model asked for, under the engine's id.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LlmCall {
    /// The engine's id.
    pub id: CallId,
    /// The provider's id; unique within the turn, made up where the provider's wasn't.
    pub provider_id: String,
    /// The tool's name as the model wrote it.
    pub name: String,
    /// The arguments as the model wrote them.
    pub arguments: String,
}
