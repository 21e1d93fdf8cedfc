//! What people, tools and models exchange: text, JSON and media.

use std::{fmt, str::FromStr, sync::Arc};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use serde_json::Value;
use sha2::{Digest as _, Sha256};

/// How deep the JSON of a result may be nested. Where it is stored it stands some levels deeper, and the reader ends at
/// 128.
pub const MAX_DEPTH: usize = 100;

/// A media attachment as turns and results hold it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Media {
    /// MIME type, such as `image/png`.
    pub mime_type: String,
    /// The bytes in standard base64.
    pub base64_data: String,
    /// The name that the sender gave it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub filename: Option<String>,
}

/// What a user asks: text and attachments.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Query {
    /// The text.
    pub text: String,
    /// Attachments, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub media: Vec<Media>,
}

/// A part of a mixed result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum Part {
    /// Plain text.
    Text {
        /// The text.
        text: String,
    },
    /// An attachment.
    Media(Media),
}

/// The result of a tool call, in the form that clients send and read.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum ToolResult {
    /// Plain text.
    Text {
        /// The text.
        content: String,
    },
    /// A JSON value.
    Json {
        /// The value.
        content: Value,
    },
    /// One attachment.
    Media(Media),
    /// Text and attachments, alternating.
    Mixed {
        /// The parts, in order.
        parts: Vec<Part>,
    },
}

impl ToolResult {
    /// A plain text result.
    pub fn text(content: impl Into<String>) -> Self {
        Self::Text { content: content.into() }
    }

    /// A JSON value as a result: as its text if it is nested deeper than [`MAX_DEPTH`].
    pub fn json(content: Value) -> Self {
        if is_deeper(&content, MAX_DEPTH) { Self::text(content.to_string()) } else { Self::Json { content } }
    }

    /// A result that was kept before there was a bound: as [`ToolResult::json`] makes it.
    #[must_use]
    pub fn bounded(self) -> Self {
        match self {
            Self::Json { content } => Self::json(content),
            other => other,
        }
    }

    /// Whether it is JSON that is nested deeper than [`MAX_DEPTH`], which can't be kept.
    pub fn is_too_deep(&self) -> bool {
        matches!(self, Self::Json { content } if is_deeper(content, MAX_DEPTH))
    }

    /// What a model that reads text only is shown of the result.
    pub fn as_text(&self) -> String {
        match self {
            Self::Text { content } => content.clone(),
            Self::Json { content } => content.to_string(),
            Self::Media(media) => describe(media),
            Self::Mixed { parts } => {
                let shown = parts.iter().map(|part| match part {
                    Part::Text { text } => text.clone(),
                    Part::Media(media) => describe(media),
                });
                shown.collect::<Vec<_>>().join("\n")
            }
        }
    }

    /// The attachments of the result, in order.
    pub fn media(&self) -> Vec<&Media> {
        match self {
            Self::Media(media) => vec![media],
            Self::Mixed { parts } => parts
                .iter()
                .filter_map(|part| match part {
                    Part::Media(media) => Some(media),
                    Part::Text { .. } => None,
                })
                .collect(),
            Self::Text { .. } | Self::Json { .. } => Vec::new(),
        }
    }
}

fn is_deeper(value: &Value, levels: usize) -> bool {
    match value {
        Value::Array(_) | Value::Object(_) if levels == 0 => true,
        Value::Array(items) => items.iter().any(|item| is_deeper(item, levels - 1)),
        Value::Object(fields) => fields.values().any(|field| is_deeper(field, levels - 1)),
        _ => false,
    }
}

fn describe(media: &Media) -> String {
    match &media.filename {
        Some(name) => format!("[{} attachment: {name}]", media.mime_type),
        None => format!("[{} attachment]", media.mime_type),
    }
}

/// Tokens that a model request cost, as the provider counted them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Usage {
    /// Tokens read.
    pub input_tokens: u64,
    /// Tokens written.
    pub output_tokens: u64,
    /// Those of the tokens read that came from the provider's cache.
    pub cached_tokens: u64,
}

/// The SHA-256 of a blob's bytes, which is its name.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// The digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

impl FromStr for Digest {
    type Err = &'static str;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        // Signs, which number parsing takes, aren't digits.
        if text.len() != 64 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err("a digest is 64 hex digits");
        }
        let mut bytes = [0; 32];
        for (index, byte) in bytes.iter_mut().enumerate() {
            let pair = &text[index * 2..index * 2 + 2];
            *byte = u8::from_str_radix(pair, 16).map_err(|_| "a digest is 64 hex digits")?;
        }
        Ok(Self(bytes))
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

/// Values whose JSON is longer than this many bytes are stored as blobs.
pub const INLINE_LIMIT: usize = 8 * 1024;

/// A value that is small enough to stand where it is used, or the name of the blob that holds its JSON.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Payload<T> {
    /// The value's JSON is the blob of this name.
    Blob {
        /// The blob's name.
        #[serde(rename = "$blob")]
        blob: Digest,
        /// Length of the blob in bytes.
        bytes: u64,
    },
    /// The value itself.
    Inline(T),
}

/// A blob that has to be stored before what names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blob {
    /// Its name.
    pub digest: Digest,
    /// Its text: JSON of what it holds.
    pub text: Arc<str>,
}

impl Blob {
    /// Names a text by its digest.
    pub fn new(text: impl Into<Arc<str>>) -> Self {
        let text = text.into();
        Self { digest: Digest::of(text.as_bytes()), text }
    }
}

/// A blob that was needed wasn't at hand, or doesn't hold what it should.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("blob {digest} {problem}")]
pub struct BlobError {
    /// The blob's name.
    pub digest: Digest,
    /// What is wrong.
    pub problem: String,
}

/// Where blobs that were fetched are found.
pub trait Blobs {
    /// The text of a blob, if it was fetched.
    fn get(&self, digest: &Digest) -> Option<&str>;
}

impl<S: std::hash::BuildHasher> Blobs for std::collections::HashMap<Digest, std::sync::Arc<str>, S> {
    fn get(&self, digest: &Digest) -> Option<&str> {
        std::collections::HashMap::get(self, digest).map(|text| &**text)
    }
}

impl<T: Serialize + for<'de> Deserialize<'de> + Clone> Payload<T> {
    /// Keeps a small value and turns a large one into a blob, which the caller has to store.
    pub fn pack(value: T) -> (Self, Option<Blob>) {
        let text = serde_json::to_string(&value).unwrap_or_default();
        if text.len() <= INLINE_LIMIT {
            return (Self::Inline(value), None);
        }
        let bytes = text.len() as u64;
        let blob = Blob::new(text);
        (Self::Blob { blob: blob.digest, bytes }, Some(blob))
    }

    /// The value, from where it stands.
    ///
    /// # Errors
    /// [`BlobError`] if the blob wasn't fetched or holds something else.
    pub fn open(&self, blobs: &dyn Blobs) -> Result<T, BlobError> {
        match self {
            Self::Inline(value) => Ok(value.clone()),
            Self::Blob { blob, .. } => {
                let text = blobs
                    .get(blob)
                    .ok_or_else(|| BlobError { digest: *blob, problem: "was not fetched".to_owned() })?;
                serde_json::from_str(text)
                    .map_err(|error| BlobError { digest: *blob, problem: format!("can't be read: {error}") })
            }
        }
    }

    /// The blob's name, where there is one.
    pub fn digest(&self) -> Option<Digest> {
        match self {
            Self::Blob { blob, .. } => Some(*blob),
            Self::Inline(_) => None,
        }
    }
}
