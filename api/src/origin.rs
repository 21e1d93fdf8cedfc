//! Which pages may ask: the Origin and Host of a request, and CORS.
//!
//! Without tokens whoever can connect is served, so a page that a person has open elsewhere must not be
//! able to connect in their stead: its origin is refused, and so is a name that was rebound to loopback.

use std::{collections::HashSet, net::IpAddr};

use axum::{
    extract::{Request, State},
    http::{
        HeaderMap, HeaderValue, Method, StatusCode, Uri,
        header::{self, HeaderName},
        uri::Authority,
    },
    middleware::Next,
    response::{IntoResponse, Response},
};

use crate::{config::Config, error::ApiError, limits, peer::Peer, state::Shared};

const METHODS: &str = "GET, POST, PUT, DELETE, OPTIONS";
const HEADERS: &str = "Authorization, Content-Type, Last-Event-ID, Idempotency-Key, traceparent";
const EXPOSED: &str = "Location, Agents-Replay, Retry-After, X-Request-Id";
/// Headers with this prefix carry parameters.
const PARAMETERS: &str = "agents-param-";

/// Which origins are served, and which may read answers.
#[derive(Debug)]
pub(crate) struct Origins {
    listed: HashSet<String>,
    any: bool,
    /// Requests carry no tokens, so origins are all there is to go by.
    anonymous: bool,
    /// Only names of this machine are served.
    local: bool,
}

impl Origins {
    pub(crate) fn new(config: &Config) -> Self {
        let listed = config.origins();
        let anonymous = config.auth_tokens.is_none();
        let any = listed.contains("*");
        Self { any, anonymous, local: anonymous && !config.allow_anonymous, listed }
    }

    fn lists(&self, origin: &str) -> bool {
        self.any || self.listed.contains(&origin.to_ascii_lowercase())
    }

    fn check(&self, peer: Option<Peer>, uri: &Uri, headers: &HeaderMap) -> Result<(), ApiError> {
        // No page reaches a Unix socket, whatever name its clients make up for it.
        if self.local && peer != Some(Peer::Unix) {
            let host = uri.authority().map(Authority::as_str).or_else(|| {
                let host = headers.get(header::HOST)?;
                // What can't be read as text is no name of this machine either.
                Some(host.to_str().unwrap_or("?"))
            });
            if host.is_some_and(|host| !is_loopback(host)) {
                let message = "only names of this machine are served without --auth-tokens";
                return Err(ApiError::forbidden_origin(message));
            }
        }
        if self.anonymous
            && let Some(origin) = headers.get(header::ORIGIN)
        {
            let origin = origin.to_str().unwrap_or("?");
            let local = origin.split_once("://").is_some_and(|(_, host)| is_loopback(host));
            if !local && !self.lists(origin) {
                let message = "pages of this origin aren't served; --cors-origin lists those that are";
                return Err(ApiError::forbidden_origin(message));
            }
        }
        Ok(())
    }

    /// The origin, if its pages may read the answer.
    fn readable<'a>(&self, headers: &'a HeaderMap) -> Option<&'a HeaderValue> {
        let origin = headers.get(header::ORIGIN)?;
        origin.to_str().is_ok_and(|text| self.lists(text)).then_some(origin)
    }
}

/// Whether `host`, with or without a port, names this machine.
fn is_loopback(host: &str) -> bool {
    let Ok(authority) = host.parse::<Authority>() else { return false };
    let name = authority.host().trim_start_matches('[').trim_end_matches(']');
    let name = name.strip_suffix('.').unwrap_or(name);
    let is_ip = name.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
    is_ip || name.eq_ignore_ascii_case("localhost") || name.to_ascii_lowercase().ends_with(".localhost")
}

/// Refuses foreign pages, answers preflights, and lets listed pages read answers.
pub(crate) async fn guard(State(api): State<Shared>, request: Request, next: Next) -> Response {
    let origins = &api.origins;
    if let Err(error) = origins.check(Peer::of(request.extensions()), request.uri(), request.headers()) {
        return error.into_response();
    }
    let readable = origins.readable(request.headers()).cloned();
    let asks = HeaderName::from_static("access-control-request-method");
    let preflight = request.method() == Method::OPTIONS
        && request.headers().contains_key(header::ORIGIN)
        && request.headers().contains_key(asks);
    let mut response = if preflight {
        let mut response = StatusCode::NO_CONTENT.into_response();
        if readable.is_some() {
            allow(response.headers_mut(), request.headers());
        }
        response
    } else {
        next.run(request).await
    };
    let headers = response.headers_mut();
    headers.append(header::VARY, HeaderValue::from_static("Origin"));
    if let Some(origin) = readable {
        let origin = if origins.any { HeaderValue::from_static("*") } else { origin };
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        if !preflight {
            headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static(EXPOSED));
        }
    }
    response
}

fn allow(answer: &mut HeaderMap, asked: &HeaderMap) {
    answer.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static(METHODS));
    answer.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static(limits::PREFLIGHT_AGE));
    let wanted = asked.get(header::ACCESS_CONTROL_REQUEST_HEADERS).and_then(|value| value.to_str().ok());
    // A prefix can't be allowed, so the parameters that were asked for are allowed by name.
    let parameters = wanted.unwrap_or_default().split(',').map(str::trim).filter(|name| {
        name.to_ascii_lowercase().starts_with(PARAMETERS) && HeaderName::from_bytes(name.as_bytes()).is_ok()
    });
    let names: Vec<&str> = std::iter::once(HEADERS).chain(parameters).collect();
    if let Ok(names) = HeaderValue::from_str(&names.join(", ")) {
        answer.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, names);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_this_machine() {
        for host in [
            "localhost",
            "LOCALHOST:80",
            "127.0.0.1",
            "127.8.8.8:1",
            "[::1]:9",
            "app.localhost",
            "localhost.",
        ] {
            assert!(is_loopback(host), "{host}");
        }
        for host in ["localhost.example", "10.0.0.1", "127.0.0.1.example", "", "?", "a b", "[::2]", "0.0.0.0"]
        {
            assert!(!is_loopback(host), "{host}");
        }
    }
}
