//! Reading requests: paths, queries and bodies, each refused with one code when it isn't what a route
//! takes.

use std::{fmt, marker::PhantomData, time::Duration};

use axum::{
    body::{BodyDataStream, Bytes},
    extract::{FromRequest, FromRequestParts, Path, Query, Request},
    http::{HeaderMap, Method, header, request::Parts},
};
use futures::StreamExt;
use holdfast_engine::ids::{SessionId, Token};
use holdfast_store::idempotency::Key;
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, MapAccess, Visitor, value::MapAccessDeserializer},
};
use sha2::{Digest, Sha256};
use utoipa::IntoParams;

use crate::{
    auth::Who,
    error::{Answer, ApiError},
    limits,
    state::Shared,
};

/// The session that a path names. One that can't be an id is as unknown as one that isn't there.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SessionPath(pub(crate) SessionId);

/// The token that a path names.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TokenPath(pub(crate) Token);

/// The owner that a path names.
#[derive(Debug, Clone)]
pub(crate) struct OwnerPath(pub(crate) String);

/// The agent that a path names.
#[derive(Debug, Clone)]
pub(crate) struct AgentPath(pub(crate) String);

/// The file that a path names.
#[derive(Debug, Clone)]
pub(crate) struct FilePath(pub(crate) String);

impl FromRequestParts<Shared> for FilePath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &Shared) -> Answer<Self> {
        segment(parts).await.map(Self).ok_or_else(ApiError::not_found)
    }
}

async fn segment(parts: &mut Parts) -> Option<String> {
    Path::<String>::from_request_parts(parts, &()).await.ok().map(|path| path.0)
}

impl FromRequestParts<Shared> for SessionPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &Shared) -> Answer<Self> {
        let id = segment(parts).await.and_then(|text| text.parse().ok());
        id.map(Self).ok_or_else(ApiError::unknown_session)
    }
}

impl FromRequestParts<Shared> for TokenPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &Shared) -> Answer<Self> {
        let token = segment(parts).await.and_then(|text| text.parse().ok());
        token.map(Self).ok_or_else(ApiError::unknown_token)
    }
}

impl FromRequestParts<Shared> for OwnerPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &Shared) -> Answer<Self> {
        let owner = segment(parts).await.unwrap_or_default();
        let possible = (1..=limits::OWNER).contains(&owner.len()) && !owner.contains('\0');
        if possible { Ok(Self(owner)) } else { Err(ApiError::not_found()) }
    }
}

impl FromRequestParts<Shared> for AgentPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &Shared) -> Answer<Self> {
        let slug = segment(parts).await.unwrap_or_default();
        let possible = (1..=limits::SLUG).contains(&slug.len()) && !slug.contains('\0');
        if possible { Ok(Self(slug)) } else { Err(ApiError::unknown_agent(&slug)) }
    }
}

/// The query of a request, in which nothing unknown may stand.
#[derive(Debug, Clone)]
pub(crate) struct Asked<T>(pub(crate) T);

impl<T: DeserializeOwned> FromRequestParts<Shared> for Asked<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &Shared) -> Answer<Self> {
        match Query::try_from_uri(&parts.uri) {
            Ok(Query(query)) => Ok(Self(query)),
            Err(rejection) => {
                let text = rejection.body_text();
                let cause = text.strip_prefix("Failed to deserialize query string: ").unwrap_or(&text);
                Err(ApiError::bad_request(format!("the query: {cause}")))
            }
        }
    }
}

/// `true`, `false`, or the bare name of the parameter, which means true.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Flag(pub(crate) bool);

impl<'de> Deserialize<'de> for Flag {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match String::deserialize(deserializer)?.as_str() {
            "" | "true" => Ok(Self(true)),
            "false" => Ok(Self(false)),
            other => Err(serde::de::Error::custom(format!("{other:?} is neither true nor false"))),
        }
    }
}

/// Seconds, maybe with a fraction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Seconds(Duration);

impl<'de> Deserialize<'de> for Seconds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let seconds = text.parse::<f64>().ok().filter(|seconds| *seconds >= 0.0);
        let seconds =
            seconds.ok_or_else(|| serde::de::Error::custom(format!("{text:?} is no number of seconds")))?;
        Ok(Self(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)))
    }
}

/// How long a request waits, from its `wait` and `timeout`: `None` doesn't.
pub(crate) fn patience(wait: Option<Flag>, timeout: Option<Seconds>) -> Option<Duration> {
    let wait = wait.is_some_and(|wait| wait.0);
    wait.then(|| timeout.map_or(limits::WAIT_DEFAULT, |seconds| seconds.0.min(limits::WAIT_MAX)))
}

/// Whether and how long to wait for the run.
#[derive(Debug, Clone, Copy, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct Waiting {
    /// Answer when the run stops; the bare name means true.
    #[param(value_type = Option<bool>)]
    wait: Option<Flag>,
    /// Seconds to wait at most: 120 unless given, and never more than 600.
    #[param(value_type = Option<f64>, minimum = 0)]
    timeout: Option<Seconds>,
}

impl Waiting {
    pub(crate) fn patience(self) -> Option<Duration> {
        patience(self.wait, self.timeout)
    }
}

/// Makes a request idempotent for 24 hours: a repeat does nothing and answers with the first success code
/// and the resource as it is then.
#[derive(IntoParams)]
#[into_params(parameter_in = Header)]
#[expect(dead_code, reason = "describes a header for the document; `receive` reads it")]
pub(crate) struct KeyHeader {
    /// 1 to 200 visible ASCII characters. With another method, path or body it is refused.
    #[param(rename = "Idempotency-Key", min_length = 1, max_length = 200, pattern = "^[!-~]+$")]
    idempotency_key: Option<String>,
}

/// Nothing may be asked.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Nothing {}

/// How many items a list shows: 1 to 500.
pub(crate) fn page_size(limit: Option<i64>, default: i64) -> Answer<i64> {
    match limit.unwrap_or(default) {
        limit @ 1..=limits::LIST_MAX => Ok(limit),
        _ => Err(ApiError::bad_request(format!("limit must be 1 to {}", limits::LIST_MAX))),
    }
}

/// Refuses a text that a filter can't be: too long, or with a character that no stored text has.
pub(crate) fn filter_text(name: &str, text: Option<String>, limit: usize) -> Answer<Option<String>> {
    match text {
        Some(text) if text.len() > limit || text.contains('\0') => {
            Err(ApiError::bad_request(format!("{name} must be at most {limit} bytes, without NUL")))
        }
        text => Ok(text),
    }
}

/// Refuses a text that is too long to be kept where it stands.
pub(crate) fn inline_text(name: &str, text: String) -> Answer<String> {
    let limit = limits::INLINE_TEXT;
    if text.len() > limit {
        return Err(ApiError::bad_request(format!("{name} must be at most {limit} bytes")));
    }
    Ok(text)
}

/// What is written as an object; serde would take the fields' values in an array as well.
struct Object<T>(T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for Fields<T> {
            type Value = T;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map))
            }
        }

        deserializer.deserialize_map(Fields(PhantomData)).map(Self)
    }
}

/// Reads a field that has to be an object.
pub(crate) fn object<'de, T: Deserialize<'de>, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    Object::deserialize(deserializer).map(|object| object.0)
}

/// Reads a field whose items have to be objects.
pub(crate) fn objects<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Vec<T>>, D::Error> {
    let items: Option<Vec<Object<T>>> = Option::deserialize(deserializer)?;
    Ok(items.map(|items| items.into_iter().map(|item| item.0).collect()))
}

/// A JSON body, and the idempotency key that came with it.
#[derive(Debug)]
pub(crate) struct Posted<T> {
    pub(crate) body: T,
    key: Option<Key>,
}

impl<T> Posted<T> {
    /// The body, and the key with the code that the first success answers with.
    pub(crate) fn open(self, code: i16) -> (T, Option<Key>) {
        (self.body, self.key.map(|key| Key { code, ..key }))
    }
}

impl<T: DeserializeOwned> FromRequest<Shared> for Posted<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, api: &Shared) -> Answer<Self> {
        let (bytes, key) = receive(request, api).await?;
        Ok(Self { body: parse(&bytes)?, key })
    }
}

/// As [`Posted`], where no body at all means the default.
#[derive(Debug)]
pub(crate) struct MaybePosted<T>(pub(crate) Posted<T>);

impl<T: DeserializeOwned + Default> FromRequest<Shared> for MaybePosted<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, api: &Shared) -> Answer<Self> {
        let (bytes, key) = receive(request, api).await?;
        let body = if bytes.is_empty() { T::default() } else { parse(&bytes)? };
        Ok(Self(Posted { body, key }))
    }
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Answer<T> {
    match serde_json::from_slice(bytes) {
        Ok(Object(body)) => Ok(body),
        Err(error) => Err(ApiError::bad_request(format!("the body: {error}"))),
    }
}

async fn receive(request: Request, api: &Shared) -> Answer<(Bytes, Option<Key>)> {
    let (parts, body) = request.into_parts();
    let who = parts.extensions.get::<Who>().ok_or_else(ApiError::unauthorized)?;
    let name = key_name(&parts.headers)?;
    let limit = api.config.max_body;
    let declared = parts.headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok());
    let mut body = body.into_data_stream();
    if declared.and_then(|text| text.parse::<u64>().ok()).is_some_and(|bytes| bytes > limit as u64) {
        // Who asks before sending has sent nothing yet.
        if !parts.headers.contains_key(header::EXPECT) {
            discard(&mut body).await;
        }
        return Err(ApiError::payload_too_large(limit));
    }
    let bytes = collect(&mut body, limit).await?;
    if !bytes.is_empty() {
        if !is_plain(&parts.headers) {
            return Err(ApiError::unsupported_encoding());
        }
        if !is_json(&parts.headers) {
            return Err(ApiError::unsupported_media_type());
        }
    }
    let key = name.map(|key| Key {
        principal: who.owner.to_string(),
        key,
        hash: digest(&parts.method, parts.uri.path(), &bytes),
        code: 0,
    });
    Ok((bytes, key))
}

async fn collect(stream: &mut BodyDataStream, limit: usize) -> Answer<Bytes> {
    let mut whole: Vec<u8> = Vec::new();
    loop {
        let next = tokio::time::timeout(limits::BODY_PAUSE, stream.next()).await;
        let part = match next {
            Ok(None) => return Ok(whole.into()),
            Ok(Some(Ok(part))) => part,
            Ok(Some(Err(_))) | Err(_) => {
                return Err(ApiError::bad_request("the body ended before it was complete"));
            }
        };
        if whole.len() + part.len() > limit {
            drop(whole);
            discard(stream).await;
            return Err(ApiError::payload_too_large(limit));
        }
        whole.extend_from_slice(&part);
    }
}

/// Reads on in a body that is refused, within bounds.
async fn discard(stream: &mut BodyDataStream) {
    let rest = async {
        let mut left = limits::DISCARDED;
        while let Some(Ok(part)) = stream.next().await {
            let Some(rest) = left.checked_sub(part.len()) else { return };
            left = rest;
        }
    };
    // Whoever sends for longer meets a closed connection.
    let _ = tokio::time::timeout(limits::DISCARD_TIME, rest).await;
}

/// Whether a body is sent as it is.
fn is_plain(headers: &HeaderMap) -> bool {
    let mut encodings = headers.get_all(header::CONTENT_ENCODING).iter();
    encodings.all(|encoding| encoding.as_bytes().trim_ascii().eq_ignore_ascii_case(b"identity"))
}

fn is_json(headers: &HeaderMap) -> bool {
    let Some(value) = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()) else {
        return false;
    };
    let essence = value.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    essence == "application/json" || (essence.starts_with("application/") && essence.ends_with("+json"))
}

fn key_name(headers: &HeaderMap) -> Answer<Option<String>> {
    let mut keys = headers.get_all("idempotency-key").iter();
    let (Some(key), None) = (keys.next(), keys.next()) else {
        return if headers.contains_key("idempotency-key") {
            Err(ApiError::bad_request("one Idempotency-Key at most"))
        } else {
            Ok(None)
        };
    };
    match key.to_str() {
        Ok(key)
            if (1..=limits::KEY).contains(&key.len()) && key.bytes().all(|byte| byte.is_ascii_graphic()) =>
        {
            Ok(Some(key.to_owned()))
        }
        _ => Err(ApiError::bad_request(format!(
            "Idempotency-Key must be 1 to {} visible ASCII characters",
            limits::KEY
        ))),
    }
}

/// What a repeat has to have in common with the first request. The query isn't part of it: a repeat may
/// wait although the first one didn't.
fn digest(method: &Method, path: &str, body: &[u8]) -> [u8; 32] {
    let mut digest = Sha256::new();
    digest.update(method.as_str());
    digest.update("\n");
    digest.update(path);
    digest.update("\n");
    digest.update(body);
    digest.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_is_asked_for_in_few_words() {
        let of = |query: &str| {
            let uri = format!("/?{query}").parse().expect("a URI");
            Query::<Waiting>::try_from_uri(&uri)
                .map(|query| query.0.patience())
                .map_err(|error| error.body_text())
        };
        assert_eq!(of(""), Ok(None));
        assert_eq!(of("wait"), Ok(Some(Duration::from_secs(120))));
        assert_eq!(of("wait="), Ok(Some(Duration::from_secs(120))));
        assert_eq!(of("wait=true&timeout=0.5"), Ok(Some(Duration::from_millis(500))));
        assert_eq!(of("wait=true&timeout=601"), Ok(Some(Duration::from_secs(600))));
        assert_eq!(of("wait=true&timeout=1e300"), Ok(Some(Duration::from_secs(600))));
        assert_eq!(of("wait=false&timeout=5"), Ok(None));
        for bad in ["wait=yes", "wait=1", "timeout=-1", "timeout=x", "timeout=NaN", "wait&wait", "waits=true"]
        {
            assert!(of(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn json_is_known_by_its_type() {
        let of = |text: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::CONTENT_TYPE, header::HeaderValue::from_static(text));
            is_json(&headers)
        };
        assert!(of("application/json") && of("Application/JSON; charset=utf-8") && of("application/x+json"));
        assert!(!of("text/json") && !of("text/plain") && !of("application/x-www-form-urlencoded"));
        assert!(!is_json(&HeaderMap::new()));
    }
}
