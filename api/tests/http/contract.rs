//! The OpenAPI document against the router.

use std::collections::{BTreeMap, BTreeSet};

use axum::http::{Method, StatusCode};
use serde_json::Value;

use crate::support::{Node, ask};

/// The routes of this part of the contract.
const ROUTES: &[(&str, &[&str])] = &[
    ("/docs", &["get"]),
    ("/docs/", &["get"]),
    ("/docs/{file}", &["get"]),
    ("/healthz", &["get"]),
    ("/metrics", &["get"]),
    ("/openapi.json", &["get"]),
    ("/readyz", &["get"]),
    ("/v1/agents", &["get"]),
    ("/v1/agents/{slug}", &["get"]),
    ("/v1/continuations/{token}", &["get", "post"]),
    ("/v1/events", &["get"]),
    ("/v1/pending", &["get"]),
    ("/v1/sessions", &["get", "post"]),
    ("/v1/sessions/{id}", &["delete", "get"]),
    ("/v1/sessions/{id}/cancel", &["post"]),
    ("/v1/sessions/{id}/cancel-attached", &["post"]),
    ("/v1/sessions/{id}/events", &["get"]),
    ("/v1/sessions/{id}/mail", &["get", "post"]),
    ("/v1/sessions/{id}/messages", &["post"]),
    ("/v1/sessions/{id}/pause", &["post"]),
    ("/v1/sessions/{id}/pending", &["get"]),
    ("/v1/sessions/{id}/resume", &["post"]),
    ("/v1/sessions/{id}/turns", &["get"]),
    ("/v1/tenants/{owner}/limits", &["get", "put"]),
];

#[tokio::test]
async fn the_document_lists_exactly_the_routes() {
    let node = Node::new().await;
    let document = node.get("/openapi.json").await.json();
    assert!(document["openapi"].as_str().is_some_and(|version| version.starts_with("3.1")));
    let documented: BTreeMap<&str, BTreeSet<&str>> = document["paths"]
        .as_object()
        .expect("paths")
        .iter()
        .map(|(path, item)| {
            (path.as_str(), item.as_object().expect("an item").keys().map(String::as_str).collect())
        })
        .collect();
    let expected: BTreeMap<&str, BTreeSet<&str>> =
        ROUTES.iter().map(|(path, methods)| (*path, methods.iter().copied().collect())).collect();
    assert_eq!(documented, expected);

    for (path, methods) in documented {
        let id = uuid::Uuid::now_v7().to_string();
        let filled = path
            .replace("{id}", &id)
            .replace("{token}", &id)
            .replace("{slug}", "x")
            .replace("{file}", "x")
            .replace("{owner}", "-");
        for method in [Method::GET, Method::POST, Method::PUT, Method::PATCH, Method::DELETE, Method::TRACE] {
            let known = methods.contains(method.as_str().to_lowercase().as_str());
            if known && path.ends_with("/events") && path.starts_with("/v1/events") {
                continue; // It answers for ever.
            }
            let reply = node.send(ask(method.clone(), &filled, None)).await;
            assert_eq!(reply.status == StatusCode::METHOD_NOT_ALLOWED, !known, "{method} {path}");
            if !known {
                assert_eq!(reply.refusal(), (405, "method_not_allowed".to_owned()));
                assert!(reply.header("allow").is_some(), "{method} {path}");
            }
        }
    }
}

#[tokio::test]
async fn every_refusal_is_documented_and_every_reference_leads_somewhere() {
    let document = serde_json::to_value(holdfast_api::openapi()).expect("JSON");
    for (path, item) in document["paths"].as_object().expect("paths") {
        for (method, operation) in item.as_object().expect("an item") {
            let responses = operation["responses"].as_object().expect("responses");
            let mut wanted = vec!["403", "405", "500", "503"];
            if path.starts_with("/v1") {
                wanted.extend(["400", "401", "429"]);
            }
            if path.contains('{') {
                wanted.push("404");
            }
            if method == "post" {
                wanted.extend(["404", "413", "415", "422"]);
                let parameters = operation["parameters"].as_array().expect("parameters");
                assert!(parameters.iter().any(|parameter| parameter["name"] == "Idempotency-Key"), "{path}");
            }
            for status in wanted {
                assert!(responses.contains_key(status), "{method} {path} lacks {status}");
            }
        }
    }
    let schemas = document["components"]["schemas"].as_object().expect("schemas");
    let mut references = BTreeSet::new();
    collect(&document, &mut references);
    assert!(references.len() > 10);
    for reference in references {
        let name = reference.strip_prefix("#/components/schemas/").expect("a schema");
        assert!(schemas.contains_key(name), "{reference} leads nowhere");
    }
}

#[test]
fn what_json_results_keep_of_numbers_is_said() {
    let document = serde_json::to_value(holdfast_api::openapi()).expect("JSON");
    let result = &document["components"]["schemas"]["CompleteBody"]["properties"]["result"];
    assert!(result["description"].as_str().is_some_and(|text| text.contains("64-bit")), "{result}");
}

fn collect(value: &Value, references: &mut BTreeSet<String>) {
    match value {
        Value::Object(map) => {
            if let Some(Value::String(reference)) = map.get("$ref") {
                references.insert(reference.clone());
            }
            map.values().for_each(|value| collect(value, references));
        }
        Value::Array(items) => items.iter().for_each(|value| collect(value, references)),
        _ => {}
    }
}
