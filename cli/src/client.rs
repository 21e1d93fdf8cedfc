//! Talking to a server over HTTP.

use std::{fmt, time::Duration};

use reqwest::{Method, RequestBuilder, Response, Url, header};
use serde_json::Value;
use tokio::time::sleep;
use uuid::Uuid;

use crate::{
    args::{ClientArgs, Credential},
    failure::{Failure, chain},
};

/// How long opening a connection may take.
const CONNECT: Duration = Duration::from_secs(10);
/// How long an answer may take beyond the time that the server was asked to wait.
const ANSWER: Duration = Duration::from_secs(60);
/// How often a request is sent that didn't reach the server, or that a database's absence kept from being
/// answered.
const TRIES: u32 = 4;
/// The largest token file that is read, in bytes.
const MAX_TOKEN: u64 = 64 * 1024;

/// A server as one caller sees it.
#[derive(Clone)]
pub(crate) struct Client {
    http: reqwest::Client,
    base: Url,
    token: Option<String>,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("base", &self.base.as_str()).finish_non_exhaustive()
    }
}

/// A request to be.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    method: Method,
    path: String,
    query: Vec<(String, String)>,
    body: Option<Value>,
    /// How long the server is asked to wait.
    patience: Duration,
}

impl Call {
    /// A request for what is there.
    pub(crate) fn get(path: impl Into<String>) -> Self {
        Self::new(Method::GET, path)
    }

    /// A request that changes something. A repeat of it does nothing more.
    pub(crate) fn post(path: impl Into<String>, body: Value) -> Self {
        Self { body: Some(body), ..Self::new(Method::POST, path) }
    }

    /// A request to delete something.
    pub(crate) fn delete(path: impl Into<String>) -> Self {
        Self::new(Method::DELETE, path)
    }

    fn new(method: Method, path: impl Into<String>) -> Self {
        Self { method, path: path.into(), query: Vec::new(), body: None, patience: Duration::ZERO }
    }

    /// With a query parameter, if there is a value for it.
    pub(crate) fn with(mut self, name: &str, value: Option<impl ToString>) -> Self {
        self.query.extend(value.map(|value| (name.to_owned(), value.to_string())));
        self
    }

    /// Waiting for the run to stop, if so many seconds are given.
    pub(crate) fn waiting(mut self, seconds: Option<u64>) -> Self {
        if let Some(seconds) = seconds {
            self = self.with("wait", Some(true)).with("timeout", Some(seconds));
            self.patience = Duration::from_secs(seconds);
        }
        self
    }
}

impl Client {
    /// A client of the server that the flags name.
    pub(crate) fn new(args: &ClientArgs) -> Result<Self, Failure> {
        let token = match &args.credential {
            Credential::Token(token) => Some(token.clone()),
            Credential::File(path) => {
                let refuse =
                    |reason: String| Failure::Config(format!("--token-file {}: {reason}", path.display()));
                let size = std::fs::metadata(path).map_err(|error| refuse(error.to_string()))?.len();
                if size > MAX_TOKEN {
                    return Err(refuse(format!("it has {size} bytes; at most {MAX_TOKEN} are read")));
                }
                let text = std::fs::read_to_string(path).map_err(|error| refuse(error.to_string()))?;
                Some(text.trim().to_owned())
            }
            Credential::None => None,
        };
        Self::at(&args.server, token)
    }

    /// A client of the server at a URL.
    pub(crate) fn at(server: &str, token: Option<String>) -> Result<Self, Failure> {
        let base = Url::parse(server).ok().filter(|url| matches!(url.scheme(), "http" | "https"));
        let base = base.ok_or_else(|| {
            Failure::Config(format!("--server {server:?} must be a URL that starts with http:// or https://"))
        })?;
        let unusable =
            |token: &String| token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic());
        if token.as_ref().is_some_and(unusable) {
            return Err(Failure::Config(
                "the token must be visible ASCII characters, and at least one".into(),
            ));
        }
        let http = reqwest::Client::builder()
            .connect_timeout(CONNECT)
            .user_agent(concat!("holdfast/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|error| Failure::Failed(format!("the HTTP client: {}", chain(&error))))?;
        Ok(Self { http, base, token })
    }

    /// The server's base URL.
    pub(crate) fn base(&self) -> &str {
        self.base.as_str().trim_end_matches('/')
    }

    /// Sends a request and reads the answer.
    ///
    /// # Errors
    /// [`Failure::Refused`] with the server's code and message, or [`Failure::Failed`] if it can't be
    /// reached.
    pub(crate) async fn send(&self, call: Call) -> Result<Value, Failure> {
        self.send_with_status(call).await.map(|(_, value)| value)
    }

    /// As [`Self::send`], with the status of the answer.
    pub(crate) async fn send_with_status(&self, call: Call) -> Result<(u16, Value), Failure> {
        // The same key at every try, so that a request whose answer was lost isn't carried out twice.
        let key = (call.method == Method::POST).then(|| Uuid::now_v7().to_string());
        let mut pause = Duration::from_millis(250);
        for attempt in 1.. {
            let mut request = self.request(&call)?.timeout(call.patience + ANSWER);
            if let Some(key) = &key {
                request = request.header("Idempotency-Key", key);
            }
            match request.send().await {
                Ok(response) if response.status().as_u16() == 503 && attempt < TRIES => {}
                Ok(response) => return answer(response).await,
                // Nobody listens there: trying again would only keep a person waiting.
                Err(error) if error.is_connect() || error.is_timeout() || attempt >= TRIES => {
                    return Err(self.unreachable(&error));
                }
                Err(_) => {}
            }
            sleep(pause).await;
            pause *= 2;
        }
        Err(Failure::Failed("the request was never sent".into()))
    }

    /// Opens a stream of events after a position, if one is given.
    pub(crate) async fn events(&self, path: &str, after: Option<&str>) -> Result<Response, Failure> {
        let mut request = self.request(&Call::get(path))?.header(header::ACCEPT, "text/event-stream");
        if let Some(after) = after {
            request = request.header("Last-Event-ID", after);
        }
        let response = request.send().await.map_err(|error| self.unreachable(&error))?;
        if response.status().is_success() {
            return Ok(response);
        }
        Err(refusal(response).await)
    }

    fn request(&self, call: &Call) -> Result<RequestBuilder, Failure> {
        let url = Url::parse(&format!("{}{}", self.base(), call.path))
            .map_err(|error| Failure::Config(format!("--server: {error}")))?;
        let mut request = self.http.request(call.method.clone(), url).query(&call.query);
        if let Some(token) = &self.token {
            request = request.bearer_auth(token);
        }
        Ok(match &call.body {
            Some(body) => request.json(body),
            None => request,
        })
    }

    fn unreachable(&self, error: &reqwest::Error) -> Failure {
        // Without the URL, which may hold a query that is nobody's business.
        let reason = if error.is_timeout() { "it took too long".to_owned() } else { causes(error) };
        Failure::Failed(format!("can't reach the server at {}: {reason}", self.base()))
    }
}

/// The innermost cause, which is what says something.
fn causes(error: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

async fn answer(response: Response) -> Result<(u16, Value), Failure> {
    if !response.status().is_success() {
        return Err(refusal(response).await);
    }
    let status = response.status().as_u16();
    let read = response.json().await;
    let value = read.map_err(|error| Failure::Failed(format!("the server's answer: {}", causes(&error))))?;
    Ok((status, value))
}

/// What a server's error says.
async fn refusal(response: Response) -> Failure {
    let status = response.status();
    let body: Value = response.json().await.unwrap_or_default();
    let field = |name: &str| body[name].as_str().map(str::to_owned);
    Failure::Refused {
        status: status.as_u16(),
        code: field("error"),
        message: field("message")
            .unwrap_or_else(|| status.canonical_reason().unwrap_or("the server refused").to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use axum::{Json, Router, http::HeaderMap, http::StatusCode, routing::post};
    use serde_json::json;
    use std::sync::{Arc, Mutex};

    use super::*;

    async fn server(router: Router) -> Client {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let base = format!("http://{}", listener.local_addr().expect("bound"));
        tokio::spawn(async move { axum::serve(listener, router).await });
        Client::at(&base, Some("secret".into())).expect("a client")
    }

    #[tokio::test]
    async fn a_request_is_repeated_under_one_key_while_the_database_is_away() {
        let keys = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&keys);
        let handler = move |headers: HeaderMap, Json(body): Json<Value>| {
            let mut seen = seen.lock().expect("no panic");
            seen.push(headers["idempotency-key"].to_str().expect("text").to_owned());
            assert_eq!(headers["authorization"], "Bearer secret");
            let status = if seen.len() < 3 { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::CREATED };
            std::future::ready((status, Json(body)))
        };
        let client = server(Router::new().route("/v1/sessions", post(handler))).await;
        let answer = client.send_with_status(Call::post("/v1/sessions", json!({"agent": "a"}))).await;
        assert_eq!(answer, Ok((201, json!({"agent": "a"}))));
        let keys = keys.lock().expect("no panic");
        assert!(keys.len() == 3 && keys.iter().all(|key| key == &keys[0]), "{keys:?}");
    }

    #[tokio::test]
    async fn a_servers_error_keeps_its_code_and_message() {
        let refuse =
            || async { (StatusCode::CONFLICT, Json(json!({"error": "no_active_run", "message": "idle"}))) };
        let client = server(Router::new().route("/x", post(refuse))).await;
        let failure = client.send(Call::post("/x", json!({}))).await.expect_err("refused");
        assert_eq!(failure.to_string(), "idle (no_active_run, HTTP 409)");
        assert_eq!(failure.code(), 1);
        let missing = client.send(Call::get("/nowhere")).await.expect_err("not found");
        assert_eq!(missing.to_string(), "Not Found (HTTP 404)");
    }

    #[tokio::test]
    async fn an_absent_server_is_told_at_once() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let base = format!("http://{}", listener.local_addr().expect("bound"));
        drop(listener);
        let failure =
            Client::at(&base, None).expect("a client").send(Call::get("/x")).await.expect_err("absent");
        assert!(failure.to_string().starts_with(&format!("can't reach the server at {base}: ")), "{failure}");
    }

    #[test]
    fn unusable_servers_and_tokens_are_configuration_errors() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        assert_eq!(Client::at("localhost:8080", None).expect_err("no scheme").code(), 3);
        assert_eq!(Client::at("http://h", Some("two words".into())).expect_err("a space").code(), 3);
    }
}
