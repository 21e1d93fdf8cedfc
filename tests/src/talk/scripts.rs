//! Scripts, agents and tools of the conversations.

use serde_json::{Value, json};

use super::Talk;

fn call(name: &str, arguments: Value) -> Value {
    json!({"name": name, "arguments": arguments})
}

fn system(arguments: Value) -> Value {
    call("system_self_system_info", arguments)
}

fn calls(calls: Vec<Value>) -> Value {
    json!({"tool_calls": calls})
}

fn says(text: &str) -> Value {
    json!({"text": text})
}

fn rule(when: Value, reply: Value) -> Value {
    json!({"when": when, "reply": reply})
}

/// What ends a conversation once the slow call has been told of.
fn when_slow_is_told(words: &str) -> Value {
    rule(json!({"model": "main", "contains": "(bash_slow) completed]"}), says(words))
}

/// The script of a conversation.
pub(super) fn script(talk: Talk) -> String {
    let rules = [with_calls(talk), with_agents(talk), with_people(talk)].concat();
    json!({"rules": rules}).to_string()
}

/// What begins a conversation.
fn first(reply: Value) -> Value {
    rule(json!({"model": "main", "turn": 0}), reply)
}

/// Of those in which programs run.
fn with_calls(talk: Talk) -> Vec<Value> {
    let fast_and_slow = || calls(vec![call("bash_fast", json!({})), call("bash_slow", json!({}))]);
    let slow = || calls(vec![call("bash_slow", json!({}))]);
    let last = || talk.last_words();
    match talk {
        Talk::OnAnyProgress | Talk::OnTimeout => {
            vec![
                when_slow_is_told(last()),
                first(fast_and_slow()),
                rule(json!({"model": "main"}), says("so far")),
            ]
        }
        Talk::WhenAllDone => vec![
            first(fast_and_slow()),
            rule(
                json!({"model": "main"}),
                says("fast: {{tool_result:bash_fast}} slow: {{tool_result:bash_slow}}"),
            ),
        ],
        Talk::Reads => vec![
            first(fast_and_slow()),
            rule(json!({"model": "main", "turn": 1}), calls(vec![call("bash_fast", json!({}))])),
            rule(
                json!({"model": "main"}),
                says("fast: {{tool_result:bash_fast}} slow: {{tool_result:bash_slow}}"),
            ),
        ],
        Talk::ReadsBeside => vec![
            rule(json!({"model": "main", "contains": "(bash_fast) completed]"}), says(last())),
            first(calls(vec![call("bash_slow", json!({})), call("bash_fast", json!({}))])),
            rule(json!({"model": "main"}), says("so far")),
        ],
        Talk::Attached | Talk::Interrupted => {
            vec![when_slow_is_told(last()), first(slow()), rule(json!({"model": "main"}), says("so far"))]
        }
        Talk::ReadFirst => vec![
            rule(json!({"model": "main", "contains": "\"result\":\"slow"}), says("read slow")),
            first(slow()),
            rule(
                json!({"model": "main"}),
                calls(vec![system(json!({"capability": "get-tool-call-status",
                    "tool_call_id": "{{call_id:bash_slow}}", "wait_for_completion": true, "timeout_seconds": 30}))]),
            ),
        ],
        Talk::WaitInterrupted => vec![
            when_slow_is_told(last()),
            first(slow()),
            rule(
                json!({"model": "main", "turn": 1}),
                calls(vec![system(
                    json!({"capability": "wait", "for": ["{{call_id:bash_slow}}"], "timeout_seconds": 60}),
                )]),
            ),
            rule(json!({"model": "main"}), says("so far")),
        ],
        Talk::RequestInterrupted | Talk::RequestLeftAlone => vec![
            rule(json!({"model": "main", "contains": "how is it going?"}), says(last())),
            rule(json!({"model": "main"}), json!({"text": "a thought", "hold": "thinking"})),
        ],
        Talk::Paused => vec![
            first(fast_and_slow()),
            rule(
                json!({"model": "main"}),
                says("fast: {{tool_result:bash_fast}} slow: {{tool_result:bash_slow}}"),
            ),
        ],
        _ => Vec::new(),
    }
}

/// Of those in which agents call, start and write to agents.
fn with_agents(talk: Talk) -> Vec<Value> {
    match talk {
        Talk::Helpers => vec![
            rule(json!({"model": "echo"}), says("echo {{last}}")),
            first(calls(vec![
                json!({"name": "prompt_agent_echo", "arguments": {"what": "one"}, "id": "call_one"}),
                json!({"name": "prompt_agent_echo", "arguments": {"what": "two"}, "id": "call_two"}),
            ])),
            rule(
                json!({"model": "main", "contains": "echo one"}),
                says("one: echo one; two: {{tool_result:prompt_agent_echo}}"),
            ),
        ],
        Talk::Mail => vec![
            rule(
                json!({"model": "writer", "turn": 0}),
                calls(vec![system(
                    json!({"capability": "send-message", "to": "parent", "text": "the news"}),
                )]),
            ),
            rule(json!({"model": "writer"}), says("written")),
            rule(
                json!({"model": "main", "contains": "the news", "not": {"last": {"role": "tool"}}}),
                says("heard it"),
            ),
            first(calls(vec![system(
                json!({"capability": "spawn-session", "agent": "writer", "message": "what is new?"}),
            )])),
            rule(
                json!({"model": "main"}),
                calls(vec![system(json!({"capability": "wait", "for": "mail", "timeout_seconds": 60}))]),
            ),
        ],
        Talk::PingPong => vec![
            rule(
                json!({"model": "main", "tool_results": {"system_self_system_info": "too_many_hops"}}),
                says("enough"),
            ),
            first(calls(vec![system(
                json!({"capability": "spawn-session", "agent": "writer", "message": "ping"}),
            )])),
            rule(json!({"last": {"role": "tool"}}), says("sent")),
            rule(
                json!({"model": "writer"}),
                calls(vec![system(json!({"capability": "send-message", "to": "parent", "text": "ping"}))]),
            ),
            rule(
                json!({"model": "main"}),
                calls(vec![system(
                    json!({"capability": "send-message", "to": "{{after:from session}}", "text": "pong"}),
                )]),
            ),
        ],
        Talk::Watched => vec![
            rule(json!({"model": "writer"}), json!({"text": "written", "hold": "writer"})),
            rule(
                json!({"model": "main", "contains": "event run.stopped of session", "not": {"last": {"role": "tool"}}}),
                says("it stopped"),
            ),
            first(calls(vec![system(
                json!({"capability": "spawn-session", "agent": "writer", "message": "what is new?"}),
            )])),
            rule(
                json!({"model": "main", "turn": 1}),
                calls(vec![system(json!({"capability": "watch-session", "events": ["run.stopped"],
                    "session_id": "{{tool_json:system_self_system_info:/session_id}}"}))]),
            ),
            rule(
                json!({"model": "main"}),
                calls(vec![system(json!({"capability": "wait", "for": "mail", "timeout_seconds": 60}))]),
            ),
        ],
        _ => Vec::new(),
    }
}

/// Of those in which a person or a time is waited for.
fn with_people(talk: Talk) -> Vec<Value> {
    match talk {
        Talk::Sleep => vec![
            first(calls(vec![system(json!({"capability": "sleep-until", "seconds": 1}))])),
            rule(
                json!({"model": "main", "tool_results": {"system_self_system_info": "woken_by"}}),
                says("awake"),
            ),
        ],
        Talk::Question => vec![
            first(calls(vec![system(
                json!({"capability": "ask-human", "question": "may I?", "choices": ["ship it", "no"]}),
            )])),
            rule(json!({"model": "main"}), says("they said: {{tool_result:system_self_system_info}}")),
        ],
        Talk::Unanswered => vec![
            first(calls(vec![system(json!({"capability": "ask-human", "question": "may I?",
                "choices": ["ship it", "no"], "deadline_seconds": 1, "default": "no"}))])),
            rule(json!({"model": "main"}), says("they said: {{tool_result:system_self_system_info}}")),
        ],
        Talk::Approvals => vec![
            first(calls(vec![
                json!({"name": "bash_fast", "arguments": {}, "id": "call_fast"}),
                json!({"name": "bash_force", "arguments": {"how": "by force"}, "id": "call_force"}),
                json!({"name": "bash_hooked", "arguments": {}, "id": "call_hooked"}),
            ])),
            rule(
                json!({"model": "main"}),
                says(
                    "allowed: {{tool_result:bash_fast}} denied: {{tool_result:bash_force}} asked: {{tool_result:bash_hooked}}",
                ),
            ),
        ],
        _ => Vec::new(),
    }
}

/// The agent of a conversation.
pub(super) fn agent(talk: Talk, model_url: &str) -> Value {
    let slow = match talk {
        Talk::Attached => json!({"tag": "runAsync", "attachSeconds": 1}),
        Talk::Interrupted | Talk::Reads => json!({"tag": "runSync"}),
        Talk::ReadsBeside | Talk::ReadFirst | Talk::WaitInterrupted => {
            json!({"tag": "runAsync", "attachSeconds": 0})
        }
        _ => json!({"tag": "runAsync"}),
    };
    let strategy = match talk {
        Talk::OnAnyProgress | Talk::ReadsBeside => json!("yieldOnAnyProgress"),
        Talk::OnTimeout => json!({"tag": "yieldOnTimeout", "milliseconds": 300}),
        _ => json!("yieldWhenAllDone"),
    };
    let (slow_reads, fast_reads) = (talk == Talk::Reads, matches!(talk, Talk::Reads | Talk::ReadsBeside));
    json!({
        "slug": "main", "flavor": "OpenAI", "modelUrl": model_url, "modelName": "main",
        "systemPrompt": ["You talk."], "toolDirectory": "tools",
        "maxConcurrency": if talk == Talk::ReadsBeside { 1 } else { 4 },
        "executionMode": "asynchronous", "asyncYieldStrategy": strategy,
        "extraAgents": [{"slug": "echo", "path": "echo.json"}, {"slug": "writer", "path": "writer.json"}],
        "builtinToolboxes": [toolbox()],
        "maxMailHops": if talk == Talk::PingPong { 3 } else { 16 },
        "interruptCompletions": talk == Talk::RequestInterrupted,
        "toolCallPolicyConfig": {"default": {"tag": "runSync"}, "wrappers": wrappers(talk), "rules": [
            {"tool": "bash_slow", "disposition": slow, "idempotent": true, "readOnly": slow_reads},
            {"tool": "bash_fast", "disposition": {"tag": "runSync"}, "idempotent": true, "readOnly": fast_reads},
            {"tool": "bash_hooked", "disposition": {"tag": "runSync"}, "idempotent": true}]}
    })
}

fn wrappers(talk: Talk) -> Value {
    if talk != Talk::Approvals {
        return json!([]);
    }
    json!([
        {"match": {"tool": "bash_fast"}, "decorators": [
            {"tag": "approve", "when": {"type": "object"}, "then": "defer", "reason": "a person decides"}]},
        {"match": {"tool": "bash_force"}, "decorators": [
            {"tag": "approve", "when": {"args.how": "*force*"}, "then": "deny", "message": "never by force"}]},
        {"match": {"tool": "bash_hooked"}, "decorators": [{"tag": "before", "hook": {"command": "tools/hook"}}]}])
}

fn toolbox() -> Value {
    json!({"tag": "SystemToolbox", "contents": {"Name": "self", "Capabilities": [
        "get-tool-call-status", "list-running-tool-calls", "cancel-tool-call", "wait", "sleep-until", "ask-human",
        "send-message", "spawn-session", "list-sessions", "read-session", "search-sessions", "get-session-stats",
        "watch-session", "unwatch-session"]}})
}

/// The files of the agents that are called.
pub(super) fn helpers(model_url: &str) -> Vec<(&'static str, Value)> {
    let agent = |slug: &str| {
        json!({"slug": slug, "flavor": "OpenAI", "modelUrl": model_url, "modelName": slug,
            "systemPrompt": [format!("You are {slug}.")], "builtinToolboxes": [toolbox()]})
    };
    vec![("echo.json", agent("echo")), ("writer.json", agent("writer"))]
}

/// A tool that ends at once, and one that ends when it is let go.
pub(super) fn tools() -> Vec<(&'static str, Value, &'static str)> {
    let described = |slug: &str| json!({"slug": slug, "description": slug, "args": []});
    vec![
        ("fast", described("fast"), "echo fast"),
        (
            "force",
            json!({"slug": "force", "description": "force", "args": [{"name": "how", "description": "how",
                "type": "string", "backing_type": "string", "arity": "single", "mode": "positional"}]}),
            "echo forced",
        ),
        ("hooked", described("hooked"), "echo never"),
        (
            "hook",
            described("hook"),
            r#"cat > /dev/null; echo '{"action": "defer", "reason": "a person does it"}'"#,
        ),
        (
            "slow",
            described("slow"),
            "dir=$(dirname \"$(dirname \"$0\")\")\necho \"$HOLDFAST_IDEMPOTENCY_KEY\" >> \"$dir/effects.log\"\nfor _ in $(seq 6000); do [ -e \"$dir/go-on\" ] && break; sleep 0.02; done\necho slow",
        ),
    ]
}
