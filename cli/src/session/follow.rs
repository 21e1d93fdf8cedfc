//! Events of a session, as they come. A stream that breaks is opened again where it broke.

use std::time::Duration;

use futures::StreamExt as _;
use serde_json::Value;
use sse_stream::{Sse, SseStream};
use tokio::time::{sleep, timeout};
use uuid::Uuid;

use super::path;
use crate::{client::Client, failure::Failure, output};

/// The server says something every 15 seconds; three missed signs of life mean that it is gone.
const SILENCE: Duration = Duration::from_secs(45);
/// The longest pause before the stream is opened again.
const MAX_PAUSE: Duration = Duration::from_secs(5);
/// How often in a row opening it may fail.
const TRIES: u32 = 20;

/// When following ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Until {
    /// When the run stops, or the session is deleted.
    Stopped,
    /// When the session is deleted.
    Deleted,
}

/// Prints a session's events until the end, or Ctrl-C, and says with which status the run stopped if that was
/// the end. After `after` nothing is left out; without it only what is new is printed.
///
/// # Errors
/// If the server refuses, or can't be reached for too long.
pub(super) async fn run(
    client: &Client,
    id: Uuid,
    after: Option<String>,
    until: Until,
    json: bool,
) -> Result<Option<String>, Failure> {
    let mut place = after;
    let (mut failures, mut pause) = (0, Duration::from_millis(200));
    loop {
        match client.events(&path(id, "/events"), place.as_deref()).await {
            Ok(response) => {
                (failures, pause) = (0, Duration::from_millis(200));
                if let Some(End(status)) = pass_on(response, &mut place, until, json).await? {
                    return Ok(status);
                }
            }
            Err(Failure::Refused { status, .. }) if status == 503 && failures < TRIES => failures += 1,
            Err(Failure::Failed(_)) if place.is_some() && failures < TRIES => failures += 1,
            Err(failure) => return Err(failure),
        }
        sleep(pause).await;
        pause = (pause * 2).min(MAX_PAUSE);
    }
}

/// Where a session's stream stands now, as an id to go on after.
pub(super) async fn newest(client: &Client, id: Uuid) -> Result<String, Failure> {
    let response = client.events(&path(id, "/events"), None).await?;
    let mut events = SseStream::from_bytes_stream(response.bytes_stream());
    let broken = || Failure::Failed("the stream of events ended before its first event".into());
    let first = timeout(SILENCE, events.next()).await.map_err(|_| broken())?;
    let first = first.and_then(Result::ok).ok_or_else(broken)?;
    let data = data_of(&first);
    Ok(data["seq"].as_u64().map_or_else(|| "0".to_owned(), |seq| seq.to_string()))
}

/// The end of what is followed: the status with which the run stopped, if it was that.
struct End(Option<String>);

/// Prints what a stream brings; none when it only broke.
async fn pass_on(
    response: reqwest::Response,
    place: &mut Option<String>,
    until: Until,
    json: bool,
) -> Result<Option<End>, Failure> {
    let mut events = SseStream::from_bytes_stream(response.bytes_stream());
    // A broken stream, a silent one and one that ended are all opened again.
    while let Ok(Some(Ok(event))) = timeout(SILENCE, events.next()).await {
        if let Some(id) = &event.id {
            *place = Some(id.clone());
        }
        let data = data_of(&event);
        let kind = event.event.as_deref().unwrap_or_default();
        if kind.is_empty() && event.data.is_none() {
            continue;
        }
        if kind == "snapshot" && place.is_none() {
            // From here on a reconnect can say where it stands.
            *place = data["seq"].as_u64().map(|seq| seq.to_string());
        }
        match json {
            true => output::json(&data)?,
            false => line(kind, &data).map_or(Ok(()), output::line)?,
        }
        let ends = match until {
            Until::Stopped => kind == "run.stopped" || kind == "session.deleted",
            Until::Deleted => kind == "session.deleted",
        };
        if ends {
            let status = data["status"].as_str().filter(|_| kind == "run.stopped");
            return Ok(Some(End(status.map(str::to_owned))));
        }
    }
    Ok(None)
}

fn data_of(event: &Sse) -> Value {
    event.data.as_deref().and_then(|data| serde_json::from_str(data).ok()).unwrap_or_default()
}

/// An event for people; none for what only programs need.
fn line(kind: &str, data: &Value) -> Option<String> {
    let text = |name: &str| data[name].as_str().unwrap_or_default();
    let seq = data["seq"].as_u64().map_or_else(|| "    -".to_owned(), |seq| format!("{seq:>5}"));
    let detail = match kind {
        "text.delta" => return None,
        "run.started" => text("mode").to_owned(),
        "run.stopped" | "session.updated" | "snapshot" | "session.created" => text("status").to_owned(),
        "session.failed" => text("message").to_owned(),
        "calls.deferred" => {
            let calls = data["calls"].as_array().into_iter().flatten();
            let shown = calls.map(|call| {
                let token = call["continuation_token"].as_str().unwrap_or("-");
                format!("{} token {token}", call["tool"].as_str().unwrap_or("?"))
            });
            shown.collect::<Vec<_>>().join(", ")
        }
        "tool.completed" => {
            let how = if data["succeeded"] == false { "failed" } else { "succeeded" };
            format!("{} {how}", text("tool"))
        }
        "tool.progressed" => {
            format!("{} {}", text("tool"), data["progress"]["line"].as_str().unwrap_or(text("line")))
        }
        _ if kind.starts_with("tool.") => text("tool").to_owned(),
        _ if kind.starts_with("subcall.") => text("child_session_id").to_owned(),
        _ => String::new(),
    };
    Some(format!("{seq} {kind} {detail}").trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use axum::{Router, http::HeaderMap, routing::get};
    use serde_json::json;

    use super::*;

    #[test]
    fn events_are_told_in_one_line() {
        let told = |kind, data: Value| line(kind, &data);
        assert_eq!(
            told("run.stopped", json!({"seq": 7, "status": "idle"})).as_deref(),
            Some("    7 run.stopped idle")
        );
        assert_eq!(
            told("calls.deferred", json!({"seq": 3, "calls": [{"tool": "t", "continuation_token": "k"}]}))
                .as_deref(),
            Some("    3 calls.deferred t token k")
        );
        assert_eq!(told("text.delta", json!({"text": "x"})), None);
    }

    #[tokio::test]
    async fn a_broken_stream_goes_on_after_the_last_event() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&asked);
        let handler = move |headers: HeaderMap| {
            let mut seen = seen.lock().expect("no panic");
            let after = headers.get("last-event-id").map(|id| id.to_str().expect("text").to_owned());
            seen.push(after);
            // The first stream ends without the end of the run.
            let body = match seen.len() {
                1 => "id: 4\nevent: run.started\ndata: {\"seq\":4}\n\n: keepalive\n\n",
                _ => "id: 5\nevent: run.stopped\ndata: {\"seq\":5,\"status\":\"idle\"}\n\n",
            };
            std::future::ready(([("content-type", "text/event-stream")], body))
        };
        let id = Uuid::now_v7();
        let router = Router::new().route(&format!("/v1/sessions/{id}/events"), get(handler));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let base = format!("http://{}", listener.local_addr().expect("bound"));
        tokio::spawn(async move { axum::serve(listener, router).await });
        let client = Client::at(&base, None).expect("a client");
        let ended = run(&client, id, Some("3".into()), Until::Stopped, true).await;
        assert_eq!(ended, Ok(Some("idle".to_owned())));
        let asked = asked.lock().expect("no panic");
        assert_eq!(*asked, [Some("3".to_owned()), Some("4".to_owned())]);
    }
}
