//! One attempt: a signed POST and what its answer means.

use std::time::Duration;

use holdfast_store::webhooks::Endpoint;
use reqwest::{Client, Response, StatusCode, header, redirect::Policy};

use super::Secrets;

/// How long an attempt may take, from connecting to the end of what is read of the answer.
pub(super) const TIMEOUT: Duration = Duration::from_secs(10);

/// How much of an answer's body is read, in bytes, so that its connection can be used again. It is thrown away.
const READ: usize = 64 * 1024;

/// How an attempt ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The receiver took it.
    Delivered,
    /// The receiver wants nothing more.
    Gone,
    /// Anything else: in a few words that quote nobody, and how long the receiver asks to be left alone.
    Failed { cause: String, asked: Duration },
}

impl Outcome {
    pub(super) fn failed(cause: impl Into<String>) -> Self {
        Self::Failed { cause: cause.into(), asked: Duration::ZERO }
    }
}

/// The client of all attempts: it follows no redirect, and speaks to nobody for longer than [`TIMEOUT`].
///
/// # Errors
/// If there is no TLS.
pub(super) fn client() -> Result<Client, reqwest::Error> {
    Client::builder()
        .redirect(Policy::none())
        .connect_timeout(TIMEOUT)
        .timeout(TIMEOUT)
        .user_agent(concat!("holdfast/", env!("CARGO_PKG_VERSION")))
        .build()
}

/// Sends a message at `timestamp`, in seconds since 1970.
pub(super) async fn send(
    client: &Client,
    secrets: &Secrets,
    endpoint: &Endpoint,
    id: &str,
    timestamp: i64,
    body: String,
) -> Outcome {
    let Some(signature) = secrets.sign(&endpoint.secret_id, id, timestamp, &body) else {
        return Outcome::failed("no secret");
    };
    let request = client
        .post(&endpoint.url)
        .header(header::CONTENT_TYPE, "application/json")
        .header("webhook-id", id)
        .header("webhook-timestamp", timestamp)
        .header("webhook-signature", signature)
        .body(body);
    match request.send().await {
        Ok(response) => judge(response).await,
        // Its own words show the URL.
        Err(error) if error.is_timeout() => Outcome::failed("timed out"),
        Err(error) if error.is_connect() => Outcome::failed("can't connect"),
        Err(error) if error.is_builder() => Outcome::failed("not a URL"),
        Err(_) => Outcome::failed("the connection broke"),
    }
}

async fn judge(response: Response) -> Outcome {
    let (status, asked) = (response.status(), asked(&response));
    drain(response).await;
    if status.is_success() {
        Outcome::Delivered
    } else if status == StatusCode::GONE {
        Outcome::Gone
    } else {
        Outcome::Failed { cause: format!("status {}", status.as_u16()), asked }
    }
}

/// `Retry-After` in seconds; dates are passed over.
fn asked(response: &Response) -> Duration {
    let value = response.headers().get(header::RETRY_AFTER).and_then(|value| value.to_str().ok());
    Duration::from_secs(value.and_then(|value| value.trim().parse::<u32>().ok()).unwrap_or(0).into())
}

async fn drain(mut response: Response) {
    let mut read = 0;
    while let Ok(Some(piece)) = response.chunk().await {
        read += piece.len();
        if read > READ {
            return;
        }
    }
}
