//! A receiver of webhooks, and what it checks of each: docs/webhooks.md says the same in words.

use std::{
    collections::BTreeSet,
    future::pending,
    sync::{Arc, Mutex},
};

use anyhow::{Context, Result, ensure};
use axum::{
    Router,
    extract::State,
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use chrono::{DateTime, TimeDelta, Utc};
use hmac::{Hmac, KeyInit as _, Mac as _};
use serde_json::Value;
use sha2::Sha256;
use tokio::{net::TcpListener, sync::watch};
use tokio_util::sync::CancellationToken;

use crate::world::PATIENCE;

/// How far a message's time may be from the receiver's.
const TOLERANCE: TimeDelta = TimeDelta::minutes(5);

/// What a receiver knows: its secret, and the messages that it has taken.
#[derive(Debug)]
pub struct Verifier {
    secret: Vec<u8>,
    taken: BTreeSet<String>,
}

/// Why a message is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// A header is missing or none.
    Malformed,
    /// It was sent too long ago, or will be.
    Stale,
    /// Nobody who has the secret signed it.
    Forged,
}

/// What a message is that isn't refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Taken {
    /// It is the first with its id: to be acted upon.
    Fresh,
    /// It was taken before: to be answered with success, and nothing else.
    Repeat,
}

impl Verifier {
    /// A receiver with a secret, `whsec_` and base64.
    ///
    /// # Panics
    /// If it is none.
    pub fn new(secret: &str) -> Self {
        let secret = secret.strip_prefix("whsec_").and_then(|text| BASE64_STANDARD.decode(text).ok());
        Self { secret: secret.expect("a secret"), taken: BTreeSet::new() }
    }

    /// Checks a message: its time, then its signature over id, time and the body's very bytes, then its id.
    ///
    /// # Errors
    /// Why it is refused.
    pub fn verify(&mut self, message: &Message, now: DateTime<Utc>) -> Result<Taken, Refused> {
        let seconds: i64 = message.timestamp.parse().map_err(|_| Refused::Malformed)?;
        let sent = DateTime::from_timestamp(seconds, 0).ok_or(Refused::Malformed)?;
        if message.id.is_empty() || message.id.contains('.') {
            return Err(Refused::Malformed);
        }
        if (now - sent).abs() > TOLERANCE {
            return Err(Refused::Stale);
        }
        let signed = format!("{}.{}.{}", message.id, message.timestamp, message.text);
        let genuine = |signature: &str| {
            let given = signature.strip_prefix("v1,").and_then(|text| BASE64_STANDARD.decode(text).ok());
            let mac = Hmac::<Sha256>::new_from_slice(&self.secret).ok();
            // In constant time.
            given
                .zip(mac)
                .is_some_and(|(given, mac)| mac.chain_update(signed.as_bytes()).verify_slice(&given).is_ok())
        };
        if !message.signature.split(' ').any(genuine) {
            return Err(Refused::Forged);
        }
        Ok(if self.taken.insert(message.id.clone()) { Taken::Fresh } else { Taken::Repeat })
    }
}

/// A message as it arrived.
#[derive(Debug, Clone, PartialEq)]
pub struct Message {
    /// `webhook-id`.
    pub id: String,
    /// `webhook-timestamp`.
    pub timestamp: String,
    /// `webhook-signature`.
    pub signature: String,
    /// The body's text.
    pub text: String,
    /// The body.
    pub body: Value,
    /// Method, path and content type.
    pub head: String,
}

impl Message {
    /// What kind of event it tells of.
    pub fn kind(&self) -> &str {
        self.body["kind"].as_str().unwrap_or_default()
    }
}

/// Messages in a few words, in order.
pub fn briefly(messages: &[Message]) -> String {
    let one = |one: &Message| format!("{} {} {}", one.id, one.kind(), one.body["status"]);
    messages.iter().map(one).collect::<Vec<_>>().join("\n")
}

/// How a receiver answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// With this status.
    Status(u16),
    /// By pointing elsewhere.
    Redirect(String),
    /// With success and a body without end.
    Endless,
    /// Never.
    Hang,
}

type Answers = Arc<dyn Fn(&Message) -> Reply + Send + Sync>;

#[derive(Clone)]
struct Shared {
    answers: Answers,
    messages: Arc<Mutex<Vec<Message>>>,
    count: watch::Sender<usize>,
}

/// A receiver on a port of its own.
pub struct Receiver {
    /// Where it listens.
    pub url: String,
    shared: Shared,
    stop: CancellationToken,
}

impl Receiver {
    /// Starts a receiver that answers as `answers` says.
    ///
    /// # Errors
    /// If no port is free.
    pub async fn start(answers: impl Fn(&Message) -> Reply + Send + Sync + 'static) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}/hook", listener.local_addr()?);
        let (count, _) = watch::channel(0);
        let shared = Shared { answers: Arc::new(answers), messages: Arc::default(), count };
        let router = Router::new().fallback(receive).with_state(shared.clone());
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        let _serving = tokio::spawn(async move {
            tokio::select! {
                _ = axum::serve(listener, router) => {}
                () = stopped.cancelled() => {}
            }
        });
        Ok(Self { url, shared, stop })
    }

    /// What has arrived so far, in order.
    pub fn messages(&self) -> Vec<Message> {
        self.shared.messages.lock().map(|messages| messages.clone()).unwrap_or_default()
    }

    /// Waits until what has arrived is as wanted.
    ///
    /// # Errors
    /// If that takes too long.
    pub async fn until(&self, wanted: impl Fn(&[Message]) -> bool) -> Result<Vec<Message>> {
        let mut news = self.shared.count.subscribe();
        let waiting = tokio::time::timeout(PATIENCE, news.wait_for(|_| wanted(&self.messages()))).await;
        let messages = self.messages();
        ensure!(waiting.is_ok(), "webhooks are missing: {}", briefly(&messages));
        Ok(messages)
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

async fn receive(State(shared): State<Shared>, request: axum::extract::Request) -> Response {
    let (parts, body) = request.into_parts();
    let read = axum::body::to_bytes(body, 16 * 1024 * 1024).await;
    let message = read.context("a body").and_then(|bytes| {
        let text = String::from_utf8(bytes.to_vec())?;
        let header = |name: &str| header_text(&parts.headers, name);
        Ok(Message {
            id: header("webhook-id"),
            timestamp: header("webhook-timestamp"),
            signature: header("webhook-signature"),
            body: serde_json::from_str(&text)?,
            text,
            head: format!("{} {} {}", parts.method, parts.uri.path(), header("content-type")),
        })
    });
    let Ok(message) = message else { return StatusCode::BAD_REQUEST.into_response() };
    let reply = (shared.answers)(&message);
    if let Ok(mut messages) = shared.messages.lock() {
        messages.push(message);
    }
    shared.count.send_modify(|count| *count += 1);
    match reply {
        Reply::Status(status) => StatusCode::from_u16(status).unwrap_or(StatusCode::OK).into_response(),
        Reply::Redirect(url) => (StatusCode::TEMPORARY_REDIRECT, [(header::LOCATION, url)]).into_response(),
        Reply::Endless => {
            let piece = || Ok::<_, std::io::Error>("x".repeat(65_536));
            axum::body::Body::from_stream(futures::stream::repeat_with(piece)).into_response()
        }
        Reply::Hang => pending().await,
    }
}

fn header_text(headers: &HeaderMap, name: &str) -> String {
    headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `printf 'evt_1.1700000000.{"a":1}' | openssl dgst -sha256 -hmac 0123456789abcdef01234567 -binary | base64`
    fn message() -> Message {
        Message {
            id: "evt_1".to_owned(),
            timestamp: "1700000000".to_owned(),
            signature: "v1,AAAA v1,Z/jkivYuQapEc+CETDjLa/ymTZQRCdBx0WzhKRfU5wI=".to_owned(),
            text: r#"{"a":1}"#.to_owned(),
            body: Value::Null,
            head: String::new(),
        }
    }

    #[test]
    fn only_fresh_messages_of_those_who_have_the_secret_are_acted_upon() {
        let mut verifier = Verifier::new("whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3");
        let now = |seconds: i64| DateTime::from_timestamp(1_700_000_000 + seconds, 0).expect("a time");
        let forged = [
            Message { text: r#"{"a":2}"#.to_owned(), ..message() },
            Message { id: "evt_2".to_owned(), ..message() },
            Message { timestamp: "1700000001".to_owned(), ..message() },
            Message { signature: "v1,AAAA".to_owned(), ..message() },
            Message { signature: String::new(), ..message() },
        ];
        for one in forged {
            assert_eq!(verifier.verify(&one, now(0)), Err(Refused::Forged), "{one:?}");
        }
        assert_eq!(verifier.verify(&message(), now(301)), Err(Refused::Stale), "a replay");
        assert_eq!(verifier.verify(&message(), now(-301)), Err(Refused::Stale));
        let timeless = Message { timestamp: "now".to_owned(), ..message() };
        assert_eq!(verifier.verify(&timeless, now(0)), Err(Refused::Malformed));
        assert_eq!(verifier.verify(&message(), now(300)), Ok(Taken::Fresh));
        assert_eq!(verifier.verify(&message(), now(0)), Ok(Taken::Repeat));
        let mut stranger = Verifier::new("whsec_YWJjZGVmZ2hpamtsbW5vcHFyc3R1dnd4");
        assert_eq!(stranger.verify(&message(), now(0)), Err(Refused::Forged));
    }
}
