//! What the OpenAPI document says of every route's refusals.

use std::collections::BTreeMap;

use utoipa::{
    IntoResponses,
    openapi::{ContentBuilder, RefOr, Response, ResponseBuilder, ResponsesBuilder, schema::Ref},
};

const ALWAYS: &[(&str, &str)] = &[
    ("403", "`forbidden_origin`: the page or the name that asks isn't served."),
    ("405", "`method_not_allowed`."),
    ("500", "`internal_error`."),
    ("503", "`unavailable`: the database is away; `Retry-After` says when to try again."),
];
const OWN: &[(&str, &str)] = &[
    ("400", "`bad_request`: an unknown or malformed query parameter, field or body."),
    ("401", "`unauthorized`: no valid bearer token."),
    ("429", "`rate_limited`; `Retry-After` says when to try again."),
];
const POSTED: &[(&str, &str)] = &[
    ("413", "`payload_too_large`: the message names the limit."),
    ("415", "`unsupported_media_type`: bodies are JSON, and not encoded otherwise."),
    ("422", "`idempotency_mismatch`: the key was used with another method, path or body."),
];

/// Refusals of routes that anybody may ask.
pub(crate) struct OpenErrors;
/// Refusals of routes that only read.
pub(crate) struct ReadErrors;
/// Refusals of routes that take a body.
pub(crate) struct PostErrors;

fn refusals(groups: &[&[(&str, &str)]]) -> BTreeMap<String, RefOr<Response>> {
    let body = || ContentBuilder::new().schema(Some(Ref::from_schema_name("ErrorBody"))).build();
    groups
        .iter()
        .copied()
        .flatten()
        .fold(ResponsesBuilder::new(), |all, (status, description)| {
            let response = ResponseBuilder::new().description(*description);
            all.response(*status, response.content("application/json", body()))
        })
        .build()
        .responses
        .into_iter()
        .collect()
}

impl IntoResponses for OpenErrors {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        refusals(&[ALWAYS])
    }
}

impl IntoResponses for ReadErrors {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        refusals(&[ALWAYS, OWN])
    }
}

impl IntoResponses for PostErrors {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        refusals(&[ALWAYS, OWN, POSTED])
    }
}
