//! Who asks: bearer tokens from a file, each an owner's.

use std::{
    collections::HashMap,
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, PoisonError, RwLock},
};

use axum::{
    extract::{FromRequestParts, Request, State},
    http::{HeaderMap, HeaderValue, Uri, header, request::Parts},
    middleware::Next,
    response::{IntoResponse, Response},
};
use holdfast_store::{accept::Caller, idempotency::Key};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use subtle::{Choice, ConditionallySelectable, ConstantTimeEq};

use crate::{
    error::ApiError,
    limits,
    state::{Api, Shared},
};

/// A token file that can't be used. The text never quotes a token.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokensError {
    /// The file can't be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file isn't what it should be.
    #[error("{}: {problem}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    tokens: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    owner: String,
    #[serde(default)]
    sha256: Option<String>,
    #[serde(default)]
    token: Option<String>,
}

struct Known {
    digest: [u8; 32],
    owner: Arc<str>,
}

/// The tokens that are valid now.
pub(crate) struct Tokens {
    path: PathBuf,
    known: RwLock<Arc<Vec<Known>>>,
}

impl Tokens {
    pub(crate) fn read(path: &Path) -> Result<Self, TokensError> {
        let known = RwLock::new(Arc::new(read(path)?));
        Ok(Self { path: path.to_path_buf(), known })
    }

    /// Reads the file again. A file that can't be used leaves the tokens as they are.
    pub(crate) fn reread(&self) -> Result<usize, TokensError> {
        let known = read(&self.path)?;
        let count = known.len();
        *self.known.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(known);
        Ok(count)
    }

    /// Whose a token is. Takes as long for a wrong token as for a right one, wherever it stands.
    fn owner(&self, token: &str) -> Option<Arc<str>> {
        let known = Arc::clone(&self.known.read().unwrap_or_else(PoisonError::into_inner));
        let given: [u8; 32] = Sha256::digest(token.as_bytes()).into();
        let (mut found, mut index) = (Choice::from(0), 0_u64);
        for (at, entry) in (0_u64..).zip(known.iter()) {
            let same = entry.digest.ct_eq(&given);
            index.conditional_assign(&at, same);
            found |= same;
        }
        let index = usize::try_from(index).ok()?;
        bool::from(found).then(|| known.get(index).map(|entry| Arc::clone(&entry.owner))).flatten()
    }
}

fn read(path: &Path) -> Result<Vec<Known>, TokensError> {
    let io = |source| TokensError::Io { path: path.to_path_buf(), source };
    let malformed = |problem: String| TokensError::Malformed { path: path.to_path_buf(), problem };
    if fs::metadata(path).map_err(io)?.len() > limits::TOKEN_FILE {
        return Err(malformed(format!("larger than {} bytes", limits::TOKEN_FILE)));
    }
    let text = fs::read_to_string(path).map_err(io)?;
    // Where, but not what: the parser's own message may quote a token.
    let file: File = serde_json::from_str(&text).map_err(|error| {
        let (line, column) = (error.line(), error.column());
        malformed(format!(
            "expected {{\"tokens\": [{{\"owner\", \"sha256\" or \"token\"}}]}}; see line {line}, column {column}"
        ))
    })?;
    let known: Vec<Known> = (1..)
        .zip(file.tokens)
        .map(|(number, entry): (usize, Entry)| {
            known(entry).map_err(|problem| malformed(format!("token {number}: {problem}")))
        })
        .collect::<Result<_, _>>()?;
    let mut numbers = HashMap::new();
    for (number, entry) in (1_usize..).zip(&known) {
        if let Some(before) = numbers.insert(entry.digest, number) {
            return Err(malformed(format!(
                "token {number} is token {before} again: each stands for one owner"
            )));
        }
    }
    if known.is_empty() {
        return Err(malformed("it names no token, so nobody could ask for anything".to_owned()));
    }
    Ok(known)
}

fn known(entry: Entry) -> Result<Known, &'static str> {
    let owner = entry.owner;
    if owner.is_empty() || owner.len() > limits::OWNER || owner.chars().any(char::is_control) {
        return Err("owner must be 1 to 200 bytes without control characters");
    }
    let digest = match (entry.sha256, entry.token) {
        (Some(hex), None) => {
            let digest: Result<holdfast_engine::content::Digest, _> = hex.parse();
            digest.map_err(|_| "sha256 must be 64 hex digits")?.0
        }
        (None, Some(token)) if token.is_empty() => return Err("token must not be empty"),
        (None, Some(token)) => Sha256::digest(token.as_bytes()).into(),
        _ => return Err("give exactly one of sha256 and token"),
    };
    Ok(Known { digest, owner: owner.into() })
}

/// The caller of a request: the owner its token names, and how the request is traced.
#[derive(Debug, Clone)]
pub(crate) struct Who {
    /// Empty where clients don't name themselves.
    pub(crate) owner: Arc<str>,
    traceparent: Option<String>,
}

impl Who {
    pub(crate) fn caller(&self, key: Option<Key>) -> Caller {
        Caller { owner: Some(self.owner.to_string()), traceparent: self.traceparent.clone(), key }
    }
}

impl FromRequestParts<Shared> for Who {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &Shared) -> Result<Self, ApiError> {
        // `require` has put it there on every path that has owners.
        parts.extensions.get::<Who>().cloned().ok_or_else(ApiError::unauthorized)
    }
}

/// Lets only known callers through to `/v1`.
pub(crate) async fn require(State(api): State<Shared>, mut request: Request, next: Next) -> Response {
    let path = request.uri().path();
    if path != "/v1" && !path.starts_with("/v1/") {
        return next.run(request).await;
    }
    let mut response = match owner(&api, request.uri(), request.headers()) {
        Some(owner) => {
            let traceparent = traceparent(request.headers());
            request.extensions_mut().insert(Who { owner, traceparent });
            next.run(request).await
        }
        None => ApiError::unauthorized().into_response(),
    };
    // What one caller may see is no business of caches.
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

fn owner(api: &Api, uri: &Uri, headers: &HeaderMap) -> Option<Arc<str>> {
    let Some(tokens) = &api.tokens else { return Some("".into()) };
    match headers.get(header::AUTHORIZATION) {
        Some(value) => {
            let (scheme, token) = value.to_str().ok()?.split_once(' ')?;
            if !scheme.eq_ignore_ascii_case("bearer") {
                return None;
            }
            tokens.owner(token.trim())
        }
        // A browser's EventSource can't send headers.
        None if is_stream(uri.path()) => tokens.owner(&access_token(uri)?),
        None => None,
    }
}

fn is_stream(path: &str) -> bool {
    path == "/v1/events"
        || path
            .strip_prefix("/v1/sessions/")
            .and_then(|rest| rest.strip_suffix("/events"))
            .is_some_and(|id| !id.is_empty() && !id.contains('/'))
}

fn access_token(uri: &Uri) -> Option<String> {
    #[derive(Deserialize)]
    struct Query {
        access_token: String,
    }
    axum::extract::Query::<Query>::try_from_uri(uri).ok().map(|query| query.0.access_token)
}

/// The W3C trace context of a request; one that isn't well formed is as if it weren't there.
fn traceparent(headers: &HeaderMap) -> Option<String> {
    let text = headers.get("traceparent")?.to_str().ok()?.trim();
    let lower = |part: &str, len: usize| {
        part.len() == len && part.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    };
    let some = |part: &str| part.bytes().any(|byte| byte != b'0');
    let mut parts = text.split('-');
    let (version, trace, span, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    let whole = version != "00" || parts.next().is_none();
    let valid = lower(version, 2)
        && version != "ff"
        && lower(trace, 32)
        && some(trace)
        && lower(span, 16)
        && some(span)
        && lower(flags, 2)
        && whole;
    valid.then(|| format!("00-{trace}-{span}-{flags}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_context_is_kept_only_if_it_is_one() {
        let of = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("traceparent", text.parse().expect("a header value"));
            traceparent(&headers)
        };
        let good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        assert_eq!(of(good).as_deref(), Some(good));
        let newer = format!("01{}-what-comes", &good[2..]);
        assert_eq!(of(&newer).as_deref(), Some(good), "a later version is read as far as it is known");
        let bad = [
            "",
            "00-0",
            &good[1..],
            &format!("{good}-more"),
            &good.to_uppercase(),
            &format!("ff{}", &good[2..]),
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
        ];
        for text in bad {
            assert_eq!(of(text), None, "{text}");
        }
    }

    #[test]
    fn only_event_streams_take_a_token_from_the_query() {
        assert!(is_stream("/v1/events") && is_stream("/v1/sessions/x/events"));
        for path in ["/v1/sessions//events", "/v1/sessions/a/b/events", "/v1/sessions/x", "/v1/eventss"] {
            assert!(!is_stream(path), "{path}");
        }
    }

    #[test]
    fn token_files_are_read_strictly_and_kept_when_a_new_one_is_bad() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("tokens.json");
        let hash = holdfast_engine::content::Digest::of(b"two");
        let text = format!(
            r#"{{"tokens": [{{"owner": "a", "token": "one"}}, {{"owner": "b", "sha256": "{hash}"}}]}}"#
        );
        fs::write(&path, text).expect("written");
        let tokens = Tokens::read(&path).expect("a good file");
        assert_eq!(tokens.owner("one").as_deref(), Some("a"));
        assert_eq!(tokens.owner("two").as_deref(), Some("b"));
        assert_eq!(tokens.owner("three"), None);

        let secret = holdfast_engine::content::Digest::of(b"secret-token");
        let twice = format!(
            r#"{{"tokens": [{{"owner": "a", "token": "secret-token"}}, {{"owner": "b", "sha256": "{secret}"}}]}}"#
        );
        let bad = [
            r#"{"tokens": []}"#,
            r#"{"tokens": [{"owner": "a"}]}"#,
            r#"{"tokens": [{"owner": "", "token": "secret-token"}]}"#,
            r#"{"tokens": [{"owner": "a", "token": ""}]}"#,
            r#"{"tokens": [{"owner": "a", "token": "secret-token", "sha256": "00"}]}"#,
            r#"{"tokens": [{"owner": "a", "sha256": "secret-token"}]}"#,
            r#"{"tokens": ["secret-token"]}"#,
            r#"{"tokens": [{"owner": "a", "token": "secret-token"}, {"owner": "b", "token": "secret-token"}]}"#,
            &twice,
            "secret-token",
        ];
        for text in bad {
            fs::write(&path, text).expect("written");
            let error = tokens.reread().expect_err(text).to_string();
            assert!(!error.contains("secret-token"), "{error}");
            assert_eq!(tokens.owner("one").as_deref(), Some("a"), "the old tokens stay");
        }
        fs::write(&path, r#"{"tokens": [{"owner": "c", "token": "three"}]}"#).expect("written");
        assert_eq!(tokens.reread().expect("a good file"), 1);
        assert_eq!(tokens.owner("one"), None);
        assert_eq!(tokens.owner("three").as_deref(), Some("c"));
    }
}
