//! What every request passes on its way in and out: its id, its log line, its count, and the catching of
//! panics.

use std::{panic::AssertUnwindSafe, time::Instant};

use axum::{
    extract::{MatchedPath, Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, Method, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use futures::FutureExt;
use uuid::Uuid;

use crate::{error::ApiError, limits, state::Shared};

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Stands around every route and around what has none.
pub(crate) async fn pass(State(api): State<Shared>, request: Request, next: Next) -> Response {
    let begun = Instant::now();
    let id = request_id(request.headers());
    let method = request.method().clone();
    let path = request.uri().path().to_owned();
    let route = request.extensions().get::<MatchedPath>().cloned();
    let mut response = caught(next.run(request)).await.unwrap_or_else(|| {
        tracing::error!(kind = "http.panicked", request_id = id.to_str().unwrap_or_default());
        ApiError::internal().into_response()
    });
    let took = begun.elapsed();
    let status = response.status().as_u16();
    let route = route.as_ref().map_or("none", MatchedPath::as_str);
    api.metrics.answered(counted(&method), route, status, took);
    tracing::info!(
        kind = "http.request",
        method = method.as_str(),
        // Whoever knows a token may complete its call, so that path isn't written down.
        path = if route.ends_with("{token}") { route } else { path.as_str() },
        status,
        ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
        request_id = id.to_str().unwrap_or_default(),
    );
    let headers = response.headers_mut();
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(REQUEST_ID, id);
    response
}

/// What `answering` comes to; none if it panics.
async fn caught<T>(answering: impl Future<Output = T>) -> Option<T> {
    AssertUnwindSafe(answering).catch_unwind().await.ok()
}

/// The client's own id if it is short and plain, else a new one.
fn request_id(headers: &HeaderMap) -> HeaderValue {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.:/+=".contains(byte);
    headers
        .get(REQUEST_ID)
        .filter(|id| (1..=limits::REQUEST_ID).contains(&id.len()) && id.as_bytes().iter().all(plain))
        .cloned()
        .or_else(|| HeaderValue::from_str(&Uuid::now_v7().to_string()).ok())
        .unwrap_or(HeaderValue::from_static("unknown"))
}

/// The method as a label: clients may invent others, which mustn't become series.
fn counted(method: &Method) -> &str {
    match *method {
        Method::GET | Method::POST | Method::PUT | Method::DELETE | Method::HEAD | Method::OPTIONS => {
            method.as_str()
        }
        _ => "other",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_ends_one_request_only() {
        assert_eq!(caught(async { 1 }).await, Some(1));
        assert_eq!(caught(async { panic!("on purpose") }).await, None::<()>);
    }

    #[test]
    fn a_sane_request_id_is_kept() {
        let of = |text: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(REQUEST_ID, HeaderValue::from_static(text));
            request_id(&headers)
        };
        assert_eq!(of("abc-1.2:3"), "abc-1.2:3");
        for bad in ["", "a b", "quote\"", "semi;colon"] {
            assert_ne!(of(bad), bad);
            assert!(of(bad).to_str().is_ok_and(|id| id.parse::<Uuid>().is_ok()));
        }
        let long: &'static str = "x".repeat(limits::REQUEST_ID + 1).leak();
        assert_ne!(of(long), long);
    }
}
