//! The event stream of one session.

use std::{collections::VecDeque, sync::Arc};

use axum::{body::Bytes, extract::State, http::HeaderMap, response::Response};
use holdfast_engine::ids::SessionId;
use holdfast_store::{
    feed::{self, EventRow},
    sessions,
};
use serde::Deserialize;
use serde_json::Value;
use tokio::time::{Instant, sleep, sleep_until};
use utoipa::IntoParams;

use crate::{
    auth::Who,
    describe::ReadErrors,
    error::{Answer, ApiError, ErrorBody},
    extract::{Asked, SessionPath},
    hub::{Seen, Watch},
    limits,
    metrics::{Counted, delayed},
    render::{Renderer, snapshot},
    sse::{self, Replay, Source, frame},
    state::Shared,
};

/// Where a stream begins.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct EventsQuery {
    /// After this event, as `Last-Event-ID` says it; the header wins.
    after: Option<String>,
    /// The bearer token, for clients that can't send headers.
    #[serde(rename = "access_token")]
    #[param(rename = "access_token")]
    _access_token: Option<String>,
}

/// A session's events as they happen, and those since the last one that the client saw.
///
/// A `text.delta` has the `position` of the turn that is being written and an `index` that counts from 0 in
/// each request to the model; it is sent neither twice nor after that turn.
#[utoipa::path(get, path = "/v1/sessions/{id}/events", tag = "events",
    params(("id" = String, Path, description = "The session."), EventsQuery,
        ("Last-Event-ID" = Option<String>, Header, description = "The last event that the client saw.")),
    responses(
        (status = 200, description = "`snapshot` first on a fresh connection; `Agents-Replay` says `live`, `replayed` or `unavailable`.",
         body = String, content_type = "text/event-stream"),
        (status = 404, description = "`unknown_session`.", body = ErrorBody),
        ReadErrors))]
pub(crate) async fn stream(
    State(api): State<Shared>,
    who: Who,
    SessionPath(id): SessionPath,
    Asked(query): Asked<EventsQuery>,
    headers: HeaderMap,
) -> Answer<Response> {
    let place = place(&headers, query.after.as_deref())?;
    // Watched before it is read, so that nothing falls in between.
    let watch = api.hub.watch(id);
    let row = sessions::get(&api.store, Some(&who.owner), id).await?;
    let (replay, after, queue) = match place {
        Place::Fresh => (Replay::Live, row.event_seq, Vec::new()),
        Place::After(after) if (0..=row.event_seq).contains(&after) => {
            let page = feed::after(&api.store, id, after, limits::EVENT_PAGE).await?;
            // The next event is there, or there is none yet; else it was retained away.
            match page.first() {
                Some(next) if next.seq == after + 1 => (Replay::Replayed, after, page),
                None if after == row.event_seq => (Replay::Replayed, after, page),
                _ => (Replay::Unavailable, row.event_seq, Vec::new()),
            }
        }
        Place::After(_) | Place::Unknown => (Replay::Unavailable, row.event_seq, Vec::new()),
    };
    let first = match replay {
        Replay::Replayed => None,
        Replay::Live | Replay::Unavailable => Some(frame(None, "snapshot", &snapshot(&row)?)),
    };
    let head = if after == row.event_seq { row.turns } else { 0 };
    let counted = Counted::up(&api.metrics.streams, limits::STREAMS)?;
    let stream = SessionStream {
        id,
        watch,
        first,
        after,
        live_after: row.event_seq,
        head,
        queue: queue.into(),
        renderer: Renderer::knowing(row),
        ended: false,
        _counted: counted,
        api,
    };
    Ok(sse::response(replay, stream))
}

/// Where a client says that it was.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    /// Nowhere yet.
    Fresh,
    /// At this event.
    After(i64),
    /// At one that is no event of any session.
    Unknown,
}

fn place(headers: &HeaderMap, after: Option<&str>) -> Answer<Place> {
    // Only as it was sent: no sign, no blanks.
    let number =
        |text: &str| text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten();
    if let Some(last) = headers.get("last-event-id") {
        let last = last.to_str().ok().map(str::trim);
        return Ok(match last {
            Some("") => Place::Fresh,
            last => last.and_then(number).map_or(Place::Unknown, Place::After),
        });
    }
    match after {
        None => Ok(Place::Fresh),
        Some(text) => number(text)
            .map(Place::After)
            .ok_or_else(|| ApiError::bad_request("after must be the number of an event")),
    }
}

struct SessionStream {
    api: Shared,
    id: SessionId,
    watch: Watch,
    first: Option<Bytes>,
    /// The last event that was sent.
    after: i64,
    /// Events above this one happened while the client was connected.
    live_after: i64,
    /// Position of the newest turn that the client knows of, as far as this stream can tell.
    head: i64,
    queue: VecDeque<EventRow>,
    renderer: Renderer,
    ended: bool,
    _counted: Counted,
}

/// Why waiting ended.
enum Woken {
    /// There may be more to read.
    News,
    /// This goes out as it is.
    Frame(Bytes),
    /// The stream ends.
    End,
}

impl Source for SessionStream {
    async fn next(&mut self) -> Option<Bytes> {
        if let Some(first) = self.first.take() {
            return Some(first);
        }
        loop {
            if self.ended {
                return None;
            }
            let tried = match self.queue.pop_front() {
                Some(event) => self.send(event).await,
                None => self.read().await,
            };
            let woken = match tried {
                Ok(Woken::News) => continue,
                Ok(woken) => woken,
                Err(error) if error.is_unavailable() => {
                    // The database is away: the stream stays, and goes on where it was.
                    tokio::select! {
                        () = sleep(limits::SCAN) => Woken::Frame(sse::KEEPALIVE),
                        () = self.api.closing.cancelled() => Woken::End,
                    }
                }
                Err(_) => Woken::End,
            };
            match woken {
                Woken::News => {}
                Woken::Frame(frame) => return Some(frame),
                Woken::End => self.ended = true,
            }
        }
    }
}

impl SessionStream {
    async fn send(&mut self, event: EventRow) -> Answer<Woken> {
        let data: Value = match self.renderer.data(&self.api, &event).await {
            Ok(data) => data,
            Err(error) => {
                self.queue.push_front(event);
                return Err(error);
            }
        };
        if event.seq > self.live_after {
            delayed(&self.api.metrics.session_delay, event.at);
        }
        self.after = event.seq;
        self.head = self.head.max(head(&event));
        self.ended = event.kind == "session.deleted";
        Ok(Woken::Frame(frame(Some(&event.seq.to_string()), &event.kind, &data)))
    }

    /// Reads what follows, or waits until something may.
    async fn read(&mut self) -> Answer<Woken> {
        let page = feed::after(&self.api.store, self.id, self.after, limits::EVENT_PAGE).await?;
        match page.first() {
            // What came in between was retained away while the client was slow: it has to connect anew.
            Some(next) if next.seq != self.after + 1 => Ok(Woken::End),
            Some(_) => {
                self.renderer.refresh(&self.api, &page).await?;
                self.queue = page.into();
                Ok(Woken::News)
            }
            None => Ok(self.wait().await),
        }
    }

    async fn wait(&mut self) -> Woken {
        let closing = self.api.closing.clone();
        let silence = Instant::now() + limits::KEEPALIVE;
        loop {
            tokio::select! {
                seen = self.watch.next_or_delta() => match seen {
                    Ok(Seen::At(pulse)) if pulse.event_seq > self.after => return Woken::News,
                    // Its last events are gone with it, or were sent.
                    Ok(Seen::At(pulse)) if pulse.deleted => return Woken::End,
                    Ok(Seen::Gone) => return Woken::End,
                    Ok(Seen::At(_) | Seen::Nowhere) => {}
                    Err(delta) => if let Some(frame) = text_delta(&delta, self.head) {
                        return Woken::Frame(frame);
                    },
                },
                () = sleep_until(silence) => return Woken::Frame(sse::KEEPALIVE),
                () = closing.cancelled() => return Woken::End,
            }
        }
    }
}

/// Position of the turn that an event shows; 0 if it shows none.
fn head(event: &EventRow) -> i64 {
    #[derive(Deserialize)]
    struct Updated {
        head: Option<i64>,
    }
    let updated = event.kind == "session.updated";
    let body = updated.then(|| serde_json::from_str::<Updated>(&event.body).ok()).flatten();
    body.and_then(|body| body.head).unwrap_or(0)
}

/// A piece of an answer that is being written; it has no place in the stream and isn't replayed. What was
/// overtaken by its turn, at or below `head`, is passed over.
fn text_delta(delta: &Arc<str>, head: i64) -> Option<Bytes> {
    let mut data: serde_json::Map<String, Value> = serde_json::from_str(delta).ok()?;
    if data.get("position").and_then(Value::as_i64).is_some_and(|position| position <= head) {
        return None;
    }
    data.insert("kind".to_owned(), "text.delta".into());
    Some(frame(None, "text.delta", &Value::Object(data)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_wins_over_the_query() {
        let with = |last: Option<&'static str>, after: Option<&str>| {
            let mut headers = HeaderMap::new();
            if let Some(last) = last {
                headers.insert("last-event-id", last.parse().expect("a header value"));
            }
            place(&headers, after).ok()
        };
        assert_eq!(with(None, None), Some(Place::Fresh));
        assert_eq!(with(Some(""), None), Some(Place::Fresh));
        assert_eq!(with(Some("7"), Some("3")), Some(Place::After(7)));
        assert_eq!(with(Some("feed.1.x.2"), Some("3")), Some(Place::Unknown));
        for unknown in ["-1", "+3", "3 4", "99999999999999999999"] {
            assert_eq!(with(Some(unknown), None), Some(Place::Unknown), "{unknown}");
        }
        assert_eq!(with(None, Some("0")), Some(Place::After(0)));
        for bad in ["", "x", "-1", "+3", " 3", "1.5", "99999999999999999999"] {
            assert_eq!(with(None, Some(bad)), None, "{bad}");
        }
    }
}
