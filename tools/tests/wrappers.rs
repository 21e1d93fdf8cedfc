//! What is said of wrappers when an agent file is loaded.

mod support;

use std::fs;

use holdfast_tools::load_agent;
use serde_json::{Value, json};
use support::{description, directory, script_text, write};

#[tokio::test]
async fn wrappers_say_what_they_do_not_reach() {
    let hook = |target: Value| json!({"hook": target, "timeoutSeconds": 5});
    let tagged = |tag: &str, mut fields: Value| {
        fields["tag"] = json!(tag);
        fields
    };
    let fine = json!([
        tagged("timeout", json!({"seconds": 1})),
        tagged("cache", json!({"ttlSeconds": 1, "key": "k"})),
        tagged("label", json!({"text": "l"})),
        tagged("truncate", json!({"maxBytes": 256})),
        tagged("rateLimit", json!({"perMinute": 1, "burst": 1})),
        tagged("before", hook(json!({"command": "hooks/ok"}))),
        tagged("after", hook(json!({"tool": "bash_log"}))),
        tagged("retries", json!({"count": 1, "backoffMs": 1})),
        tagged("approve", json!({"when": {"args.x": "y"}, "then": "defer", "reason": "r"})),
        tagged("approve", json!({"when": true, "then": "deny", "message": "m"}))
    ]);
    let file = json!({"slug": "a", "flavor": "OpenAIv1", "modelUrl": "http://m", "modelName": "x",
 "toolDirectory": "tools", "toolCallPolicyConfig": {
        "rules": [
            {"tool": "bash_log", "disposition": {"tag": "runAsync", "attachSeconds": 3}, "idempotent": true},
            {"tool": "bash_ask", "disposition": {"tag": "decorate", "inner": {"tag": "defer"}, "decorators":
                [{"tag": "after", "hook": {"command": "hooks/gone"}}]}, "deadlineSeconds": 5,
                "onDeadline": {"answer": {"type": "text", "content": "x"}}}],
        "wrappers": [
            {"match": {"tool": "bash_log", "toolbox": "bash", "args": {"required": ["x"]}}, "decorators": fine},
            {"match": {"tool": "bash_lgo"}, "decorators": []},
            {"match": {"tols": "bash_*"}, "decorators": [{"tag": "retries", "count": 2, "backofMs": 1}], "note": "?"},
            {"match": {"tool": "bash_log"}, "decorators": [
                {"tag": "before", "hook": {"command": "hooks/plain"}}, {"tag": "before", "hook": {"tool": "bash_none"}}]}]}});
    let project = directory();
    for name in ["tools", "hooks"] {
        fs::create_dir(project.path().join(name)).expect("created");
    }
    for slug in ["log", "ask", "once"] {
        write(&project.path().join("tools").join(slug), &script_text(&description(slug), ""));
    }
    fs::write(project.path().join("agent.json"), file.to_string()).expect("written");
    write(&project.path().join("hooks/ok"), "#!/bin/sh\n");
    fs::write(project.path().join("hooks/plain"), "").expect("written");
    let loaded = load_agent(&project.path().join("agent.json")).await.expect("loads");
    for parts in [
        &["wrappers[1]: it matches no tool"][..],
        &["\"tols\" of toolCallPolicyConfig.wrappers[2].match is unknown"],
        &["\"backofMs\" of toolCallPolicyConfig.wrappers[2].decorators[0] is unknown"],
        &["\"note\" of toolCallPolicyConfig.wrappers[2] is unknown"],
        &["wrappers[2].decorators[0]: retries has no effect on calls that are deferred: bash_ask"],
        &["wrappers[2].decorators[0]: retries has no effect on what no rule calls idempotent: bash_once"],
        &["rules[1]: hook after", "hooks/gone is not an executable file; it is passed over"],
        &["wrappers[3]: hook before", "hooks/plain is not an executable file; every call is refused"],
        &["wrappers[3]: hook before: the agent has no tool \"bash_none\"; every call is refused"],
    ] {
        let warned = loaded.warnings.iter().any(|warning| parts.iter().all(|part| warning.contains(part)));
        assert!(warned, "{parts:?}: {:#?}", loaded.warnings);
    }
    assert_eq!(loaded.warnings.len(), 9, "{:#?}", loaded.warnings);
}
