//! One HTTP exchange with a model provider.

use std::time::Duration;

use chrono::{DateTime, Utc};
use holdfast_engine::model::{Flavor, ModelAnswer, ModelTarget};
use reqwest::{
    Client, RequestBuilder, Response, StatusCode, Url,
    header::{self, HeaderMap, HeaderValue},
};
use serde_json::Value;

use super::{
    anthropic_answer, anthropic_stream,
    error::{self, Failure, FailureClass, ModelError},
    keys::ApiKey,
    openai_answer, openai_stream, sse,
};

/// How long connecting may take.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a provider may be silent in the middle of an answer. The wait for an answer's beginning is
/// bounded by the attempt's own timeout only, since models think before they speak.
pub const IDLE_TIMEOUT: Duration = Duration::from_secs(120);
/// The largest answer that is read, in bytes.
pub const MAX_ANSWER_BYTES: usize = 64 * 1024 * 1024;
/// How much of a refusal is read, in bytes.
const MAX_REFUSAL_BYTES: usize = 64 * 1024;
/// The version of Anthropic's API that is spoken.
const ANTHROPIC_VERSION: &str = "2023-06-01";

/// What an exchange needs beside its body.
#[derive(Clone, Copy)]
pub(super) struct Exchange<'a> {
    pub(super) client: &'a Client,
    pub(super) url: &'a Url,
    pub(super) target: &'a ModelTarget,
    pub(super) key: Option<&'a ApiKey>,
    pub(super) deltas: Option<&'a (dyn Fn(&str) + Send + Sync)>,
    pub(super) idle: Duration,
    pub(super) max_answer: usize,
}

/// The URL that a target's requests go to; a query of the base URL stays.
pub(super) fn endpoint(target: &ModelTarget) -> Result<Url, ModelError> {
    let invalid = |reason: &str| ModelError::Target { detail: format!("modelUrl {reason}") };
    let mut url =
        Url::parse(target.base_url.trim()).map_err(|error| invalid(&format!("is no URL: {error}")))?;
    if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none() {
        return Err(invalid("must be an http or https URL"));
    }
    let last = if target.flavor == Flavor::Anthropic { "messages" } else { "chat/completions" };
    let path = format!("{}/{last}", url.path().trim_end_matches('/'));
    url.set_path(&path);
    Ok(url)
}

impl Exchange<'_> {
    /// Sends the body and reads the answer.
    pub(super) async fn run(self, body: bytes::Bytes) -> Result<ModelAnswer, Failure> {
        let request =
            self.client.post(self.url.clone()).header(header::CONTENT_TYPE, "application/json").body(body);
        let response = self.authorized(request)?.send().await.map_err(|error| self.broken(&error))?;
        if !response.status().is_success() {
            return Err(self.refusal(response).await);
        }
        let kind = response
            .headers()
            .get(header::CONTENT_TYPE)
            .and_then(|kind| kind.to_str().ok())
            .unwrap_or_default();
        if kind.trim_start().to_ascii_lowercase().starts_with("text/event-stream") {
            return self.stream(response).await;
        }
        let text = self.whole(response).await?;
        let answer = match self.target.flavor {
            Flavor::Anthropic => anthropic_answer::parse(&text, self.key)?,
            flavor => openai_answer::parse(&text, flavor, self.key)?,
        };
        if let (Some(deltas), Some(text)) = (self.deltas, &answer.text) {
            deltas(text);
        }
        Ok(answer)
    }

    fn authorized(&self, request: RequestBuilder) -> Result<RequestBuilder, Failure> {
        let anthropic = self.target.flavor == Flavor::Anthropic;
        let request =
            if anthropic { request.header("anthropic-version", ANTHROPIC_VERSION) } else { request };
        let Some(key) = self.key else { return Ok(request) };
        let text = if anthropic { key.secret().to_owned() } else { format!("Bearer {}", key.secret()) };
        let mut value = HeaderValue::try_from(text).map_err(|_| {
            Failure::Final(ModelError::Target {
                detail: format!("API key `{}` can't be sent in a header", key.id()),
            })
        })?;
        value.set_sensitive(true);
        Ok(if anthropic {
            request.header("x-api-key", value)
        } else {
            request.header(header::AUTHORIZATION, value)
        })
    }

    /// The next bytes of a body. Silence counts only once the body has begun: some servers send their
    /// headers at once and let the model think after.
    async fn chunk(&self, response: &mut Response, begun: bool) -> Result<Option<bytes::Bytes>, Failure> {
        let idle = if begun { self.idle } else { Duration::MAX };
        match tokio::time::timeout(idle, response.chunk()).await {
            Ok(chunk) => chunk.map_err(|error| self.broken(&error)),
            Err(_) => {
                let detail = format!("{} was silent for {} seconds", self.host(), self.idle.as_secs());
                Err(Failure::passing(FailureClass::Timeout, detail))
            }
        }
    }

    fn too_large(&self) -> Failure {
        Failure::Final(ModelError::TooLarge { limit: self.max_answer })
    }

    async fn whole(&self, mut response: Response) -> Result<String, Failure> {
        let mut bytes = Vec::new();
        while let Some(chunk) = self.chunk(&mut response, !bytes.is_empty()).await? {
            if bytes.len() + chunk.len() > self.max_answer {
                return Err(self.too_large());
            }
            bytes.extend_from_slice(&chunk);
        }
        String::from_utf8(bytes).map_err(|_| Failure::malformed("it is not UTF-8 text"))
    }

    async fn stream(&self, mut response: Response) -> Result<ModelAnswer, Failure> {
        let deltas = self.deltas.unwrap_or(&|_| {});
        let mut fold = Fold::new(self.target.flavor);
        let mut parser = sse::Parser::default();
        let mut size = 0_usize;
        while !fold.ended() {
            let chunk = match self.chunk(&mut response, size > 0).await {
                Ok(Some(chunk)) => chunk,
                Ok(None) => break,
                // The answer itself is there; what broke is only its end.
                Err(_) if fold.complete() => break,
                Err(failure) => return Err(failure),
            };
            size = size.saturating_add(chunk.len());
            if size > self.max_answer {
                return Err(self.too_large());
            }
            for event in parser.push(&chunk) {
                fold.event(&event, self.key, deltas)?;
            }
        }
        if !fold.complete() {
            let detail = format!("{} ended its stream before the answer was complete", self.host());
            return Err(Failure::passing(FailureClass::Unavailable, detail));
        }
        fold.finish()
    }

    /// Why a status is no success.
    async fn refusal(&self, mut response: Response) -> Failure {
        let status = response.status();
        let retry_after = retry_after(response.headers());
        let html = response
            .headers()
            .get(header::CONTENT_TYPE)
            .is_some_and(|kind| kind.as_bytes().starts_with(b"text/html"));
        let mut bytes = Vec::new();
        while bytes.len() < MAX_REFUSAL_BYTES {
            match self.chunk(&mut response, true).await {
                Ok(Some(chunk)) => bytes.extend_from_slice(&chunk),
                Ok(None) | Err(_) => break,
            }
        }
        let body: Value = serde_json::from_slice(&bytes).unwrap_or_default();
        let plain = String::from_utf8_lossy(&bytes);
        let said = match error::message_of(&body) {
            Some(message) => message,
            None if body.is_null() && !html && !plain.trim_start().starts_with(['<', '{', '[']) => {
                plain.into_owned()
            }
            None => String::new(),
        };
        let said = error::bounded(&said, self.key);
        let detail = match said.as_str() {
            "" => format!("{} answered {status}", self.host()),
            said => format!("{} answered {status}: {said}", self.host()),
        };
        self.classify(status, &body, detail, retry_after)
    }

    fn classify(
        &self,
        status: StatusCode,
        body: &Value,
        detail: String,
        retry_after: Option<Duration>,
    ) -> Failure {
        let code = status.as_u16();
        Failure::Final(match code {
            401 | 403 => ModelError::RefusedKey { key_id: self.key.map(|key| key.id().to_owned()), detail },
            404 => ModelError::UnknownModel { model: self.target.model.clone(), detail },
            429 if error::out_of_quota(body) => ModelError::Refused { status: code, detail },
            _ if error::passes(code) => {
                return Failure::Passing { detail, retry_after, class: FailureClass::of_status(code) };
            }
            300..=399 => {
                let detail =
                    format!("{detail} (redirects are not followed: set modelUrl to where the API is)");
                ModelError::Refused { status: code, detail }
            }
            _ => ModelError::Refused { status: code, detail },
        })
    }

    /// A failure of the connection, told without the URL, whose query may hold secrets.
    fn broken(&self, error: &reqwest::Error) -> Failure {
        let mut innermost: &dyn std::error::Error = error;
        while let Some(source) = innermost.source() {
            innermost = source;
        }
        let cause = match error.is_timeout() {
            true => "timed out".to_owned(),
            // An error without a source shows its URL.
            false if std::ptr::addr_eq(innermost, error) => "failed".to_owned(),
            false => error::bounded(&innermost.to_string(), self.key),
        };
        if error.is_builder() {
            return Failure::Final(ModelError::Target { detail: format!("no request can be made: {cause}") });
        }
        let doing = if error.is_connect() { "connecting to" } else { "the exchange with" };
        let class = if error.is_timeout() { FailureClass::Timeout } else { FailureClass::Unavailable };
        Failure::passing(class, format!("{doing} {}: {cause}", self.host()))
    }

    fn host(&self) -> String {
        let host = self.url.host_str().unwrap_or_default();
        match self.url.port() {
            Some(port) => format!("{host}:{port}"),
            None => host.to_owned(),
        }
    }
}

/// The fold of either family.
enum Fold {
    Chat(Flavor, openai_stream::Fold),
    Anthropic(anthropic_stream::Fold),
}

impl Fold {
    fn new(flavor: Flavor) -> Self {
        match flavor {
            Flavor::Anthropic => Self::Anthropic(anthropic_stream::Fold::default()),
            chat => Self::Chat(chat, openai_stream::Fold::default()),
        }
    }

    fn event(
        &mut self,
        event: &sse::Event,
        key: Option<&ApiKey>,
        deltas: &(dyn Fn(&str) + Send + Sync),
    ) -> Result<(), Failure> {
        match self {
            Self::Chat(_, fold) => fold.event(event, key, deltas),
            Self::Anthropic(fold) => fold.event(event, key, deltas),
        }
    }

    fn complete(&self) -> bool {
        match self {
            Self::Chat(_, fold) => fold.complete(),
            Self::Anthropic(fold) => fold.complete(),
        }
    }

    fn ended(&self) -> bool {
        match self {
            Self::Chat(_, fold) => fold.ended(),
            Self::Anthropic(fold) => fold.ended(),
        }
    }

    fn finish(self) -> Result<ModelAnswer, Failure> {
        match self {
            Self::Chat(flavor, fold) => fold.finish(flavor),
            Self::Anthropic(fold) => fold.finish(),
        }
    }
}

/// The pause that a provider asks for: seconds, or a date, which is compared with the provider's own clock.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = |name| headers.get(name)?.to_str().ok().map(str::trim);
    let asked = text(header::RETRY_AFTER)?;
    if let Ok(seconds) = asked.parse::<f64>() {
        return Duration::try_from_secs_f64(seconds).ok();
    }
    let date = |text| DateTime::parse_from_rfc2822(text).ok().map(|date| date.to_utc());
    let now = text(header::DATE).and_then(date).unwrap_or_else(Utc::now);
    Some((date(asked)? - now).to_std().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(flavor: Flavor, base_url: &str) -> ModelTarget {
        ModelTarget {
            flavor,
            base_url: base_url.into(),
            model: "m".into(),
            temperature: None,
            max_output_tokens: None,
            extra_body: None,
        }
    }

    #[test]
    fn endpoints() {
        let url = |flavor, base| endpoint(&target(flavor, base)).map(|url| url.to_string());
        assert_eq!(url(Flavor::OpenAI, "http://h:1/v1/").expect("a URL"), "http://h:1/v1/chat/completions");
        assert_eq!(
            url(Flavor::OpenAI, "https://h/d?api-version=1").expect("a URL"),
            "https://h/d/chat/completions?api-version=1"
        );
        assert_eq!(url(Flavor::Anthropic, "https://h/v1").expect("a URL"), "https://h/v1/messages");
        for bad in ["", "h/v1", "file:///etc", "ftp://h/v1"] {
            assert!(matches!(url(Flavor::OpenAI, bad), Err(ModelError::Target { .. })), "{bad}");
        }
    }

    #[test]
    fn retry_after_in_seconds_or_as_a_date() {
        let headers = |pairs: &[(header::HeaderName, &'static str)]| {
            pairs
                .iter()
                .map(|(name, value)| (name.clone(), HeaderValue::from_static(value)))
                .collect::<HeaderMap>()
        };
        let date = "Sun, 06 Nov 1994 08:49:37 GMT";
        let later = "Sun, 06 Nov 1994 08:50:07 GMT";
        let cases = [
            (headers(&[(header::RETRY_AFTER, "3")]), Some(Duration::from_secs(3))),
            (headers(&[(header::RETRY_AFTER, "0.5")]), Some(Duration::from_millis(500))),
            (headers(&[(header::RETRY_AFTER, later), (header::DATE, date)]), Some(Duration::from_secs(30))),
            (headers(&[(header::RETRY_AFTER, date)]), Some(Duration::ZERO)),
            (headers(&[(header::RETRY_AFTER, "soon")]), None),
            (headers(&[(header::RETRY_AFTER, "-4")]), None),
            (headers(&[]), None),
        ];
        for (headers, expected) in cases {
            assert_eq!(retry_after(&headers), expected, "{headers:?}");
        }
    }
}
