//! The agent and the model of the chaos: calls that run here, once or again, and calls that wait for
//! somebody outside.

use std::path::PathBuf;

use anyhow::Result;
use serde_json::{Value, json};

use crate::world::{AgentFiles, Model};

/// The tool that must not start twice for one call.
pub(super) const ONCE: &str = "bash_once";
/// The tool that may start again.
pub(super) const AGAIN: &str = "bash_again";
/// The deferred tool whose calls expire.
pub(super) const ASK_SOON: &str = "ask_soon";
/// After how many seconds they do.
pub(super) const DEADLINE_SECONDS: u64 = 3;

/// What a message may ask the model for; each makes it ask for other calls.
pub(super) const PLANS: [&str; 4] = ["plan-both", "plan-wait", "plan-local", "plan-talk"];

/// Every start is noted before anything else happens, in one write that appends.
const TOOL: &str = "echo \"$HOLDFAST_IDEMPOTENCY_KEY\" >> \"${0%/*}/../effects.log\"\nsleep \"$((RANDOM % 2)).$((RANDOM % 10))\"\necho done";

/// A model that does what the newest message says, and an agent for it.
///
/// # Errors
/// If the files can't be written or no port is free.
pub(super) async fn set() -> Result<(Model, AgentFiles, PathBuf)> {
    let record = tempfile::Builder::new().prefix("holdfast-chaos-").tempfile()?.into_temp_path().keep()?;
    let model = Model::start(&script(&record).to_string()).await?;
    let described = |slug: &str| {
        json!({"slug": slug, "description": "Does something.", "args": [
            {"name": "what", "description": "what to do", "type": "string", "backing_type": "string", "arity": "single", "mode": "positional"}]})
    };
    let config = json!({
        "slug": "chaos", "flavor": "OpenAIv1", "modelUrl": model.url, "modelName": "scripted",
        "systemPrompt": ["You do things."], "toolDirectory": "tools",
        "toolCallPolicyConfig": {"default": {"tag": "runSync"}, "rules": [
            {"tool": ASK_SOON, "disposition": {"tag": "defer", "reason": "soon"}, "deadlineSeconds": DEADLINE_SECONDS},
            {"tool": "ask_*", "disposition": {"tag": "defer", "reason": "a person"}},
            {"tool": AGAIN, "disposition": {"tag": "runSync"}, "idempotent": true}]}
    });
    let tools = [("once", described("once"), TOOL), ("again", described("again"), TOOL)];
    let agent = AgentFiles::with_tools(&config, &tools)?;
    Ok((model, agent, record))
}

/// Only messages make the model ask for calls, so every conversation ends.
fn script(record: &std::path::Path) -> Value {
    let call = |name: &str| match name {
        ONCE | AGAIN => json!({"name": name, "arguments": {"what": "it"}}),
        _ => json!({"name": name, "arguments": {"question": "why?"}}),
    };
    let rule = |plan: &str, delay: u64, names: &[&str]| {
        let calls: Vec<Value> = names.iter().map(|name| call(name)).collect();
        json!({"when": {"last": {"role": "user", "contains": plan}}, "reply": {"tool_calls": calls, "delay_ms": delay}})
    };
    json!({"record": record, "rules": [
        rule("plan-both", 150, &[ONCE, "ask_person", AGAIN, ASK_SOON]),
        rule("plan-wait", 50, &["ask_person", ASK_SOON, "ask_person"]),
        rule("plan-local", 250, &[ONCE, AGAIN, ONCE, AGAIN]),
        {"reply": {"text": "ok", "delay_ms": 120}}
    ]})
}
