//! The part of the report that is about webhooks.

use holdfast_store::status::EndpointState;
use serde_json::{Value, json};

use super::{
    as_text::counted,
    report::Report,
    verdict::{Finding, Slug, finding},
};
use crate::{failure::Failure, output};

/// Seconds for which a webhook may wait, or an event may be unread, before somebody should look.
const LATE: i64 = 600;

/// How many endpoints are told of in the verdict.
const TOLD: usize = 3;

/// The endpoints for people; nothing where there are none.
pub(super) fn show(report: &Report, endpoints: &[EndpointState]) -> Result<(), Failure> {
    if endpoints.is_empty() {
        return output::line("webhooks: none are configured");
    }
    let rows = endpoints.iter().map(|one| {
        let oldest = one.oldest.map_or_else(|| "-".to_owned(), |since| format!("{} s", report.age(since)));
        let state = if one.disabled_at.is_some() { "disabled" } else { "enabled" };
        let failure = one.last_error.clone().unwrap_or_default();
        [one.name.clone(), state.to_owned(), counted(one.pending), oldest, counted(one.dead), failure]
    });
    output::table(["WEBHOOK ENDPOINT", "STATE", "PENDING", "OLDEST", "GIVEN UP", "LAST FAILURE"], rows)
}

/// The endpoints as JSON.
pub(crate) fn as_json(endpoints: &[EndpointState]) -> Value {
    let list = endpoints.iter().map(|one| {
        json!({
            "name": one.name, "disabled_at": one.disabled_at, "pending": one.pending, "oldest": one.oldest,
            "given_up": one.dead, "unread_since": one.unread_since, "last_failure": one.last_error,
        })
    });
    Value::Array(list.collect())
}

/// What needs attention of them.
pub(super) fn findings(report: &Report) -> Vec<Finding> {
    let endpoints = report.webhooks.iter().flatten();
    let told = endpoints.filter_map(|one| Some(finding(Slug::WebhooksUndelivered, &trouble(report, one)?)));
    told.take(TOLD).collect()
}

fn trouble(report: &Report, one: &EndpointState) -> Option<String> {
    let name = &one.name;
    if let Some(since) = one.disabled_at {
        let (age, dead) = (report.age(since), counted(one.dead));
        return Some(format!(
            "webhook endpoint {name} was disabled by its receiver {age} s ago; given up: {dead}"
        ));
    }
    if one.dead > 0 {
        return Some(format!("webhooks to {name} that were given up: {}", counted(one.dead)));
    }
    let late = one.oldest.into_iter().chain(one.unread_since).min().map(|since| report.age(since))?;
    let why = one.last_error.as_deref().unwrap_or("no scheduler sends them");
    (late >= LATE).then(|| format!("webhooks to {name} are {late} s late: {why}"))
}
