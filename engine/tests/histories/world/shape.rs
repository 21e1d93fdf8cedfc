//! The agents that histories are about, and what their models ask for.

use holdfast_engine::{
    Time,
    agent::{Agent, AgentConfig},
    builtin::Helper,
    conduct::{ExecutionMode, YieldStrategy},
    policy::Disposition,
    session::{Session, TrackedCall},
    tool::ToolSpec,
};
use serde_json::{Value, json};

use crate::dice::Dice;

/// One kind of agent.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape(u8);

/// How many kinds there are.
pub(crate) const SHAPES: u8 = 24;

pub(crate) const HELPER: &str = "prompt_agent_helper";
const SYSTEM: &str = "system_self_system_info";

/// A tool that only reads.
pub(crate) const LOOK: &str = "look";

const PLAIN_TOOLS: [&str; 5] = ["run", "again", LOOK, "ask_person", "sign"];
const TOOLS: [&str; 11] =
    ["run", "again", LOOK, "ask_person", "slow_a", "slow_ten", HELPER, SYSTEM, SYSTEM, SYSTEM, SYSTEM];

impl Shape {
    pub(crate) fn new(number: u8) -> Self {
        Self(number % SHAPES)
    }

    /// Whether it waits for all that it asks for, and has no tools of the engine's.
    pub(crate) fn is_plain(self) -> bool {
        self.0.is_multiple_of(6)
    }

    pub(crate) fn tools(self) -> &'static [&'static str] {
        if self.is_plain() { &PLAIN_TOOLS } else { &TOOLS }
    }

    pub(crate) fn agent(self) -> Agent {
        let mut file = json!({
            "slug": "sim", "flavor": "OpenAI", "modelUrl": "http://127.0.0.1", "modelName": "m",
            "systemPrompt": ["be brief"], "maxConcurrency": 2, "asyncCallTimeoutSeconds": 90,
            "interruptCompletions": self.0 / 6 % 2 == 1, "pauseCancelsCalls": self.0 / 12 % 2 == 1,
            "toolCallPolicyConfig": {"default": {"tag": "runSync"}, "rules": [
                {"tool": "again", "idempotent": true, "disposition": {"tag": "decorate",
                    "decorators": [{"tag": "withRetries", "contents": 2}], "inner": {"tag": "runSync"}}},
                {"tool": LOOK, "readOnly": true, "disposition": {"tag": "decorate",
                    "decorators": [{"tag": "withRetries", "contents": 1}], "inner": {"tag": "runSync"}}},
                {"tool": "slow_ten", "disposition": {"tag": "runAsync", "attachSeconds": 10}},
                {"tool": "slow*", "disposition": {"tag": "runAsync"}},
                {"tool": HELPER, "disposition": {"tag": "runAsync"}},
                {"tool": "ask_*", "disposition": {"tag": "defer", "reason": "a person decides"}},
                {"tool": "sign", "disposition": {"tag": "defer"}, "deadlineSeconds": 60}]}
        });
        let conduct = match self.0 % 6 {
            0 | 1 => json!({}),
            2 => json!({"executionMode": "asynchronous"}),
            3 => json!({"executionMode": "asynchronous", "asyncYieldStrategy": "yieldOnAnyProgress"}),
            4 => json!({"executionMode": "asynchronous",
                "asyncYieldStrategy": {"tag": "yieldOnTimeout", "milliseconds": 7000}}),
            _ => json!({"executionMode": "asynchronous", "mailInToolResult": true,
                "asyncYieldStrategy": {"tag": "yieldOnTimeout", "milliseconds": 0}}),
        };
        let fields = file.as_object_mut().expect("an object");
        fields.extend(conduct.as_object().expect("an object").clone());
        if !self.is_plain() {
            let toolbox = json!({"tag": "SystemToolbox", "contents": {"Name": "self", "Capabilities":
                ["get-tool-call-status", "list-running-tool-calls", "cancel-tool-call", "wait", "sleep-until",
                 "ask-human", "spawn-session"]}});
            fields.insert("builtinToolboxes".to_owned(), json!([toolbox]));
        }
        let spec = ToolSpec {
            name: "run".into(),
            original: "run".into(),
            description: "runs".into(),
            parameters: json!({"type": "object"}),
        };
        let config = AgentConfig::parse(&file.to_string()).expect("the simulator's agent is valid");
        let mut agent = config.prepare("r1".into(), vec![spec]).expect("the simulator's agent is usable");
        if !self.is_plain() {
            let helper = Helper { slug: "helper".into(), announce: String::new() };
            agent.builtins.push(helper.tool());
            agent.helpers.push(helper);
        }
        agent
    }
}

/// What a model says to a tool; `names` are those of calls that it may mean.
pub(crate) fn arguments(tool: &str, names: &[String], dice: &mut Dice) -> String {
    let name = |dice: &mut Dice| match names.len() as u64 {
        0 => "nobody".to_owned(),
        many => names[usize::try_from(dice.below(many)).expect("few")].clone(),
    };
    let seconds = 1 + dice.below(20);
    let value: Value = match tool {
        HELPER if dice.below(8) == 0 => json!({"what": 3}),
        HELPER => json!({"what": "the work"}),
        SYSTEM => match dice.below(12) {
            0 | 1 => json!({"capability": "get-tool-call-status", "tool_call_id": name(dice)}),
            2 | 3 => json!({"capability": "get-tool-call-status", "tool_call_id": name(dice),
                "include_progress": true, "wait_for_completion": true, "timeout_seconds": seconds}),
            4 => {
                json!({"capability": "wait", "for": [name(dice), name(dice)], "timeout_seconds": seconds})
            }
            5 => json!({"capability": "wait", "for": "any-call", "timeout_seconds": seconds}),
            6 => json!({"capability": "wait", "for": "mail", "timeout_seconds": seconds}),
            7 => json!({"capability": "cancel-tool-call", "tool_call_id": name(dice)}),
            8 => json!({"capability": "sleep-until", "seconds": seconds - 1}),
            9 => json!({"capability": "ask-human", "question": "may I?"}),
            10 => json!({"capability": "spawn-session", "agent": "helper", "message": "look"}),
            _ => json!({"capability": "list-running-tool-calls"}),
        },
        _ => json!({}),
    };
    value.to_string()
}

/// Whether an agent's rules let a call of the newest round go on by itself now, although nobody has interrupted:
/// said again in other words than the engine's.
pub(crate) fn may_detach(agent: &Agent, call: &TrackedCall, session: &Session, now: Time) -> bool {
    if agent.conduct.execution_mode == ExecutionMode::Synchronous {
        return false;
    }
    let waited = (now - call.created_at).num_milliseconds();
    let strategy = agent.conduct.async_yield_strategy;
    let milliseconds = match (call.policy.disposition.base(), strategy) {
        (Disposition::RunAsync { attach_seconds: Some(seconds) }, _) => seconds * 1000,
        (Disposition::RunAsync { attach_seconds: None }, YieldStrategy::OnTimeout(milliseconds)) => {
            milliseconds
        }
        (Disposition::RunAsync { attach_seconds: None }, YieldStrategy::OnAnyProgress) => {
            return session.calls.iter().any(|other| other.turn == call.turn && other.state.is_final());
        }
        _ => return false,
    };
    waited >= i64::try_from(milliseconds).expect("small")
}
