//! The feed: the events of all sessions of an owner, or of everybody.
//!
//! It is read below the oldest transaction that may still write, so that nothing can appear before what was
//! sent; an event therefore shows up when every transaction that began before its own has ended.

use std::{collections::VecDeque, sync::Arc};

use axum::{body::Bytes, extract::State, http::HeaderMap, response::Response};
use holdfast_store::{
    feed::{self, EventRow, Place},
    sessions::{self, Filter},
};
use serde::Deserialize;
use serde_json::json;
use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until},
};
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use crate::{
    auth::Who,
    describe::ReadErrors,
    error::{Answer, ApiError},
    extract::Asked,
    limits,
    metrics::{Counted, delayed},
    render::Renderer,
    sse::{self, Replay, Source, frame},
    state::{Api, Shared},
    view::SessionMeta,
};

/// Whose events.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum Scope {
    /// The caller's.
    #[default]
    Owner,
    /// Everybody's; for admins.
    All,
}

/// Where the feed begins.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct FeedQuery {
    /// `owner` unless given.
    #[param(inline)]
    scope: Option<Scope>,
    /// After this event, as `Last-Event-ID` says it; the header wins.
    after: Option<String>,
    /// The bearer token, for clients that can't send headers.
    #[serde(rename = "access_token")]
    #[param(rename = "access_token")]
    _access_token: Option<String>,
}

/// Events across sessions as they happen, and those since the last one that the client saw.
#[utoipa::path(get, path = "/v1/events", tag = "events",
    params(FeedQuery,
        ("Last-Event-ID" = Option<String>, Header, description = "The last event that the client saw.")),
    responses(
        (status = 200, description = "`snapshot` first on a fresh connection; `Agents-Replay` says `live`, `replayed` or `unavailable`.",
         body = String, content_type = "text/event-stream"),
        ReadErrors))]
pub(crate) async fn stream(
    State(api): State<Shared>,
    who: Who,
    Asked(query): Asked<FeedQuery>,
    headers: HeaderMap,
) -> Answer<Response> {
    let owner = scope(&api, &who, query.scope.unwrap_or_default())?;
    let last = last(&headers, query.after.as_deref())?;
    let mut ticks = api.hub.ticks();
    ticks.mark_unchanged();
    let now = feed::now(&api.store).await?;
    let (replay, place) = match last {
        None => (Replay::Live, now),
        Some(Some(place))
            if place.feed == now.feed && feed::reaches(&api.store, owner.as_deref(), place).await? =>
        {
            (Replay::Replayed, place)
        }
        Some(_) => (Replay::Unavailable, now),
    };
    let first = match replay {
        Replay::Replayed => None,
        Replay::Live | Replay::Unavailable => Some(snapshot(&api, owner.as_deref()).await?),
    };
    let counted = Counted::up(&api.metrics.streams, limits::STREAMS)?;
    let stream = FeedStream {
        owner,
        ticks,
        first,
        place,
        live_from: now.xid,
        queue: VecDeque::new(),
        renderer: Renderer::default(),
        _counted: counted,
        api,
    };
    Ok(sse::response(replay, stream))
}

/// Where a client says that it was: at no event yet, or at one; none if no feed has such a one.
fn last(headers: &HeaderMap, after: Option<&str>) -> Answer<Option<Option<Place>>> {
    if let Some(last) = headers.get("last-event-id") {
        let last = last.to_str().map_or("?", str::trim);
        return Ok((!last.is_empty()).then(|| parse(last)));
    }
    let malformed = || ApiError::bad_request("after must be the id of an event");
    after.map(|text| parse(text).map(Some).ok_or_else(malformed)).transpose()
}

/// Whose events are shown: an owner's, or with `None` everybody's.
fn scope(api: &Api, who: &Who, scope: Scope) -> Answer<Option<Arc<str>>> {
    match scope {
        Scope::Owner => Ok(Some(Arc::clone(&who.owner))),
        // Without tokens there is one nameless owner, and all that it may see is its own.
        Scope::All if api.tokens.is_none() => Ok(Some(Arc::clone(&who.owner))),
        Scope::All if api.is_admin(who) => Ok(None),
        Scope::All => Err(ApiError::forbidden("only admins may follow the events of all owners")),
    }
}

async fn snapshot(api: &Api, owner: Option<&str>) -> Answer<Bytes> {
    let newest = Filter {
        owner: owner.map(str::to_owned),
        tree: true,
        limit: limits::FEED_SNAPSHOT,
        ..Filter::default()
    };
    let rows = sessions::list(&api.store, &newest).await?;
    let sessions = rows.iter().map(SessionMeta::of).collect::<Result<Vec<_>, _>>()?;
    Ok(frame(None, "snapshot", &json!({"kind": "snapshot", "sessions": sessions})))
}

fn id(place: Place) -> String {
    format!("{}.{}.{}.{}", place.feed.simple(), place.xid, place.session.simple(), place.seq)
}

fn parse(text: &str) -> Option<Place> {
    let mut parts = text.split('.');
    let mut next = || parts.next();
    let place = Place {
        feed: next()?.parse::<Uuid>().ok()?,
        xid: next()?.parse().ok().filter(|xid| *xid >= 0)?,
        session: next()?.parse::<Uuid>().ok()?,
        seq: next()?.parse().ok().filter(|seq| *seq >= 0)?,
    };
    // Only as it was sent: no signs, no other ways to write an id.
    (id(place) == text).then_some(place)
}

struct FeedStream {
    api: Shared,
    owner: Option<Arc<str>>,
    ticks: watch::Receiver<u64>,
    first: Option<Bytes>,
    /// The last event that was sent.
    place: Place,
    /// Events of this transaction and of later ones appeared while the client was connected.
    live_from: i64,
    queue: VecDeque<EventRow>,
    renderer: Renderer,
    _counted: Counted,
}

impl Source for FeedStream {
    async fn next(&mut self) -> Option<Bytes> {
        if let Some(first) = self.first.take() {
            return Some(first);
        }
        let closing = self.api.closing.clone();
        let mut silence = Instant::now() + limits::KEEPALIVE;
        loop {
            match self.step().await {
                Ok(Some(frame)) => return Some(frame),
                Ok(None) => {}
                Err(error) if error.is_unavailable() => silence = Instant::now() + limits::SCAN,
                Err(_) => return None,
            }
            // However much happens, one reader looks at most so often.
            let news = async {
                sleep(limits::FEED_PAUSE).await;
                self.ticks.changed().await
            };
            tokio::select! {
                _ = news => {}
                () = sleep_until(silence) => return Some(sse::KEEPALIVE),
                () = closing.cancelled() => return None,
            }
        }
    }
}

impl FeedStream {
    /// The next frame, if there is one by now.
    async fn step(&mut self) -> Answer<Option<Bytes>> {
        if self.queue.is_empty() {
            self.ticks.mark_unchanged();
            let owner = self.owner.as_deref();
            let page = feed::across(&self.api.store, owner, self.place, limits::EVENT_PAGE).await?;
            if page.is_empty() {
                return Ok(None);
            }
            self.renderer.refresh(&self.api, &page).await?;
            self.queue = page.into();
        }
        let Some(event) = self.queue.front() else { return Ok(None) };
        let data = self.renderer.data(&self.api, event).await?;
        let place = Place { xid: event.xid, session: event.session_id, seq: event.seq, ..self.place };
        let frame = frame(Some(&id(place)), &event.kind, &data);
        if event.xid >= self.live_from {
            delayed(&self.api.metrics.feed_delay, event.at);
        }
        self.place = place;
        self.queue.pop_front();
        Ok(Some(frame))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_come_back_and_others_are_none() {
        let place = Place { feed: Uuid::now_v7(), xid: 77, session: Uuid::now_v7(), seq: 3 };
        assert_eq!(parse(&id(place)), Some(place));
        let good = Place { feed: Uuid::nil(), xid: 77, session: Uuid::nil(), seq: 3 };
        let other = |from: &str, to: &str| id(good).replace(from, to);
        let hyphens = other(&Uuid::nil().simple().to_string(), &Uuid::nil().to_string());
        for bad in
            ["", "7", "a.b.c.d", &other(".3", ".3.1"), &other("77", "-77"), &other("77", "+77"), &hyphens]
        {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}
