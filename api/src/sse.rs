//! Event streams on the wire.

use std::convert::Infallible;

use axum::{
    body::{Body, Bytes},
    http::{HeaderName, HeaderValue, header},
    response::Response,
};
use futures::{Stream, StreamExt, stream};
use serde_json::Value;

/// Says, before the first frame, whether what was missed follows.
const REPLAY: HeaderName = HeaderName::from_static("agents-replay");

/// What became of what a client missed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Replay {
    /// It didn't ask.
    Live,
    /// It follows.
    Replayed,
    /// It is gone; a snapshot follows.
    Unavailable,
}

impl Replay {
    fn word(self) -> &'static str {
        match self {
            Self::Live => "live",
            Self::Replayed => "replayed",
            Self::Unavailable => "unavailable",
        }
    }
}

/// Sent when nothing happens, so that both ends notice a dead connection.
pub(crate) const KEEPALIVE: Bytes = Bytes::from_static(b": keepalive\n\n");

/// One event. JSON has no line breaks, so it is one line of data.
pub(crate) fn frame(id: Option<&str>, event: &str, data: &Value) -> Bytes {
    let id = id.map(|id| format!("id: {id}\n")).unwrap_or_default();
    Bytes::from(format!("{id}event: {event}\ndata: {data}\n\n"))
}

/// A source of frames; none when the stream has ended. It is asked for the next frame when the client has
/// taken the last, so a slow client holds up its own stream and nothing else.
pub(crate) trait Source: Send + 'static {
    fn next(&mut self) -> impl Future<Output = Option<Bytes>> + Send;
}

fn frames(source: impl Source) -> impl Stream<Item = Bytes> {
    stream::unfold(source, |mut source| async move { source.next().await.map(|frame| (frame, source)) })
}

/// The answer that streams a source.
pub(crate) fn response(replay: Replay, source: impl Source) -> Response {
    let body = Body::from_stream(frames(source).map(Ok::<_, Infallible>));
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    // Reverse proxies would keep events back until they have a bufferful.
    headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    headers.insert(REPLAY, HeaderValue::from_static(replay.word()));
    response
}
