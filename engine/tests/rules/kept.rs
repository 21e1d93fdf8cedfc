//! What is stored can be read again.

use std::{collections::HashMap, sync::Arc};

use holdfast_engine::{
    content::{MAX_DEPTH, Payload, ToolResult},
    ids::CallId,
    mail::{MailBody, Settled},
    turn::TurnBody,
};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::desk::Desk;

/// Arrays in arrays, with a text inside.
fn nested(levels: usize, text: &str) -> Value {
    (0..levels).fold(json!(text), |inner, _| json!([inner]))
}

#[test]
fn json_that_is_nested_too_deep_is_kept_as_its_text() {
    let deepest = nested(MAX_DEPTH, "x");
    assert_eq!(ToolResult::json(deepest.clone()), ToolResult::Json { content: deepest });
    let deeper = nested(MAX_DEPTH + 1, "x");
    let text = ToolResult::text(deeper.to_string());
    assert_eq!(ToolResult::json(deeper.clone()), text, "the model is shown the same");
    let unbounded = ToolResult::Json { content: deeper };
    assert!(unbounded.is_too_deep() && !text.is_too_deep());
    assert_eq!(unbounded.bounded(), text, "so is one that was kept before there was a bound");
}

#[test]
fn the_deepest_result_can_be_read_wherever_it_is_stored() {
    let deepest = || ToolResult::json(nested(MAX_DEPTH, "x"));
    let (result, _) = Payload::pack(deepest());
    let settled = Settled::Completed { result };
    let text = serde_json::to_string(&settled).expect("JSON");
    assert_eq!(serde_json::from_str::<Settled>(&text).expect("a call's end"), settled);
    let letter = MailBody::ToolCallFinished { tool_call_id: CallId(Uuid::nil()), settled: settled.clone() };
    let text = serde_json::to_string(&letter).expect("JSON");
    assert_eq!(serde_json::from_str::<MailBody>(&text).expect("a letter"), letter);

    let mut desk = Desk::with_calls(&["run"]);
    let call = desk.calls()[0];
    desk.decide();
    desk.ends(call, settled);
    desk.decide();
    let turn = desk.session.head().expect("it is told");
    let text = turn.body.to_json().expect("JSON");
    assert_eq!(TurnBody::parse(turn.body.tag(), &text).expect("a turn").to_json().expect("JSON"), text);

    let long = ToolResult::json(nested(MAX_DEPTH, &"x".repeat(9_000)));
    let (result, blob) = Payload::pack(long.clone());
    let blob = blob.expect("it is long");
    let blobs = HashMap::from([(blob.digest, Arc::clone(&blob.text))]);
    assert_eq!(result.open(&blobs).expect("a result"), long);
}

#[test]
fn statuses_of_statuses_are_kept_however_often_the_model_asks() {
    let agent = r#"{"slug": "desk", "flavor": "OpenAI", "modelUrl": "http://127.0.0.1", "modelName": "m",
        "builtinToolboxes": [{"tag": "SystemToolbox", "contents": {"Name": "self",
            "Capabilities": ["get-tool-call-status"]}}],
        "toolCallPolicyConfig": {"rules": [
            {"tool": "slow", "disposition": {"tag": "runAsync", "attachSeconds": 0}}]},
        "executionMode": "asynchronous"}"#;
    let mut desk = Desk::of(agent);
    desk.says("go");
    desk.decide();
    desk.answers_under(&[("deep", "slow")]);
    desk.decide();
    let slow = desk.session.calls[0].id;
    let (result, _) = Payload::pack(ToolResult::json(nested(MAX_DEPTH, "x")));
    desk.ends(slow, Settled::Completed { result });
    let mut of = "deep".to_owned();
    for round in 0..20 {
        desk.decide();
        let name = format!("status_{round}");
        let ask = json!({"capability": "get-tool-call-status", "tool_call_id": of}).to_string();
        desk.answers_with(&[(&name, "system_self_system_info", ask)]);
        desk.decide();
        for turn in &desk.session.turns {
            let text = turn.body.to_json().expect("JSON");
            TurnBody::parse(turn.body.tag(), &text).expect("a turn that can be read again");
        }
        of = name;
    }
}
