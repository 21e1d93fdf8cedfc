//! A model server that answers from a script, for tests and demonstrations.
//!
//! It speaks OpenAI's chat completions at any path that ends in `/chat/completions` and Anthropic's
//! messages API at any path that ends in `/messages`, streamed or whole. `GET /requests` lists what it was
//! asked, `GET /held` what waits for `POST /release/NAME`. A request that a provider would refuse is refused: see
//! [`rules`].
//!
//! Scripts are described in `docs/scripted-model.md`: a JSON object of `rules`, and optionally `record`, a file that
//! gets a JSON line for each request, `lenient` and `flavor`. The first rule whose `when` fits answers with its
//! `reply`; if none fits, the answer is 400 and says what kept each rule from fitting. An unknown field or template
//! is an error.

mod answer;
mod choose;
mod hold;
mod record;
pub mod rules;
mod script;
mod template;
#[cfg(test)]
mod tests;
mod view;

use std::{
    io,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use axum::{
    Json, Router,
    body::{Body, Bytes},
    extract::{DefaultBodyLimit, Path, State},
    http::{HeaderValue, Method, StatusCode, Uri, header},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use futures::{StreamExt, stream};
use holdfast_engine::model::Flavor;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

pub use self::script::{Script, ScriptError};
use self::{
    answer::Answer,
    hold::Holds,
    record::Log,
    script::{Reply, Rule},
    view::{Dialect, View},
};

/// How many requests `GET /requests` remembers.
pub const MAX_REMEMBERED: usize = 10_000;
/// How many bytes of requests `GET /requests` remembers.
pub const MAX_REMEMBERED_BYTES: usize = 256 * 1024 * 1024;
/// The largest request that is read, in bytes.
pub const MAX_REQUEST_BYTES: usize = 64 * 1024 * 1024;
/// How long answers that are under way may still take once the server shall stop.
const GRACE: Duration = Duration::from_secs(2);

struct Server {
    rules: Vec<Rule>,
    lenient: bool,
    flavor: Flavor,
    holds: Holds,
    used: Mutex<Vec<u64>>,
    log: tokio::sync::Mutex<Log>,
    shutdown: CancellationToken,
}

/// The server's routes, for serving in another way than [`serve`].
pub fn router(script: Script) -> Router {
    routes(script, CancellationToken::new())
}

/// Serves a script until `shutdown`; answers under way get two seconds more.
///
/// # Errors
/// When the listener fails.
pub async fn serve(script: Script, listener: TcpListener, shutdown: CancellationToken) -> io::Result<()> {
    let router = routes(script, shutdown.clone());
    let server = axum::serve(listener, router).with_graceful_shutdown(shutdown.clone().cancelled_owned());
    tokio::select! {
        result = async { server.await } => result,
        () = async { shutdown.cancelled().await; tokio::time::sleep(GRACE).await } => Ok(()),
    }
}

fn routes(script: Script, shutdown: CancellationToken) -> Router {
    let server = Server {
        used: Mutex::new(vec![0; script.rules.len()]),
        lenient: script.lenient,
        flavor: script.flavor,
        holds: Holds::new(&script.rules),
        rules: script.rules,
        log: tokio::sync::Mutex::new(Log::new(script.record)),
        shutdown,
    };
    Router::new()
        .route("/requests", get(requests))
        .route("/held", get(held))
        .route("/release/{name}", post(release))
        .fallback(complete)
        .layer(DefaultBodyLimit::max(MAX_REQUEST_BYTES))
        .with_state(Arc::new(server))
}

async fn requests(State(server): State<Arc<Server>>) -> Response {
    let body = server.log.lock().await.to_json();
    ([(header::CONTENT_TYPE, "application/json")], body).into_response()
}

async fn held(State(server): State<Arc<Server>>) -> Json<Value> {
    Json(server.holds.to_json())
}

async fn release(State(server): State<Arc<Server>>, Path(name): Path<String>) -> Response {
    if server.holds.release(&name) {
        return Json(json!({ "released": name })).into_response();
    }
    failure(Dialect::Chat, 404, "the script holds nothing by this name", None)
}

async fn complete(State(server): State<Arc<Server>>, method: Method, uri: Uri, body: Bytes) -> Response {
    let dialect = match uri.path() {
        path if path.ends_with("/chat/completions") => Dialect::Chat,
        path if path.ends_with("/messages") => Dialect::Anthropic,
        _ => {
            return failure(
                Dialect::Chat,
                404,
                "ask at …/chat/completions, …/messages, GET /requests, GET /held or POST /release/NAME",
                None,
            );
        }
    };
    if method != Method::POST {
        return failure(dialect, 405, "only POST is answered here", None);
    }
    let Ok(body) = serde_json::from_slice::<Value>(&body) else {
        return failure(dialect, 400, "the request is not JSON", None);
    };
    let flavor = match dialect {
        Dialect::Chat => server.flavor,
        Dialect::Anthropic => Flavor::Anthropic,
    };
    let violations = rules::check(flavor, &body);
    let view = View::new(dialect, &body);
    let chosen = match violations.first().filter(|_| !server.lenient) {
        Some(violation) => Err(answer::refusal(flavor, violation)),
        None => server.choose(&view).map_err(|reason| answer::error_body(dialect, 400, &reason)),
    };
    let number = chosen.as_ref().ok().map(|position| position + 1);
    let noted = server.log.lock().await.add(uri.path(), number, &violations, &body).await;
    let seq = match noted {
        Ok(seq) => seq,
        Err(error) => return failure(dialect, 500, &format!("the request can't be recorded: {error}"), None),
    };
    match chosen {
        Ok(position) => server.reply(&server.rules[position].reply, &view, seq).await,
        Err(body) => (StatusCode::BAD_REQUEST, Json(body)).into_response(),
    }
}

impl Server {
    /// Chooses a rule and counts its use, as one step.
    fn choose(&self, view: &View) -> Result<usize, String> {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let position = choose::choose(&self.rules, &used, view)?;
        used[position] += 1;
        Ok(position)
    }

    async fn reply(&self, reply: &Reply, view: &View, seq: u64) -> Response {
        if let Some(name) = &reply.hold {
            tokio::select! {
                () = self.holds.wait(name, seq) => {}
                () = self.shutdown.cancelled() => return failure(view.dialect, 503, "the server stops", None),
            }
        }
        if reply.delay_ms > 0 {
            tokio::select! {
                () = tokio::time::sleep(Duration::from_millis(reply.delay_ms)) => {}
                () = self.shutdown.cancelled() => {}
            }
        }
        if reply.hang && reply.break_stream_after.is_none() {
            self.shutdown.cancelled().await;
            return failure(view.dialect, 503, "the server stops", None);
        }
        let error = reply.error.as_ref().map(|message| template::fill(message, view));
        match (reply.status.filter(|status| *status >= 300), error) {
            (Some(status), error) => {
                let message = error.unwrap_or_else(|| "the script says so".to_owned());
                failure(view.dialect, status, &message, reply.retry_after)
            }
            (None, Some(message)) if view.stream => {
                let event = answer::error_event(view.dialect, 500, &message);
                self.stream(reply, vec![event])
            }
            (None, Some(message)) => Json(answer::error_body(view.dialect, 500, &message)).into_response(),
            (None, None) => {
                let answer = Answer::new(reply, view, seq);
                match view.stream {
                    true => self.stream(reply, answer.events(view)),
                    false => self.whole(reply, &answer.whole(view.dialect)),
                }
            }
        }
    }

    fn whole(&self, reply: &Reply, answer: &Value) -> Response {
        if reply.break_stream_after.is_none() {
            return Json(answer).into_response();
        }
        let mut text = answer.to_string();
        text.truncate(text.floor_char_boundary(text.len() / 2));
        ([(header::CONTENT_TYPE, "application/json")], self.broken_body(vec![text], reply.hang))
            .into_response()
    }

    fn stream(&self, reply: &Reply, mut events: Vec<String>) -> Response {
        let body = match reply.break_stream_after {
            Some(count) => {
                events.truncate(count);
                self.broken_body(events, reply.hang)
            }
            None => Body::from_stream(stream::iter(events.into_iter().map(Ok::<_, io::Error>))),
        };
        let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-cache")];
        (headers, body).into_response()
    }

    /// A body that ends without its end, or falls silent until the server stops.
    fn broken_body(&self, pieces: Vec<String>, silent: bool) -> Body {
        let shutdown = self.shutdown.clone();
        let end = stream::once(async move {
            if silent {
                shutdown.cancelled().await;
            } else {
                // The server sends what it has when a body has nothing more for the moment.
                tokio::task::yield_now().await;
            }
            Err(io::Error::other("the script breaks the connection"))
        });
        Body::from_stream(stream::iter(pieces.into_iter().map(Ok)).chain(end))
    }
}

fn failure(dialect: Dialect, status: u16, message: &str, retry_after: Option<u64>) -> Response {
    let code = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = (code, Json(answer::error_body(dialect, status, message))).into_response();
    if let Some(seconds) = retry_after {
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    response
}
