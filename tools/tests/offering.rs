//! What an agent offers beside its programs: system toolboxes and helpers, by which names, and what is odd of them.

mod support;

use holdfast_engine::builtin::BuiltinKind;
use holdfast_tools::{LoadError, offered};
use serde_json::{Value, json};
use support::{
    context, failure,
    tree::{Tree, agent, all_warnings, system, tools},
};
use tokio_util::sync::CancellationToken;

#[tokio::test]
async fn names_are_given_in_order_and_are_different() {
    let tree = Tree::new();
    tree.put(
        "root.json",
        agent(
            "root",
            &json!({
            "toolDirectory": "tools",
            "builtinToolboxes": [system("own", &["wait", "get-tool-call-status"]), system("more", &["wait"])],
            "extraAgents": [{"slug": "x-y", "path": "1.json"}, {"slug": "x.y", "path": "2.json"},
                {"slug": "x_y_2", "path": "3.json"}],
            "toolCallPolicyConfig": {"rules": [
                {"tool": "prompt_agent_x_y_2", "disposition": {"tag": "runSync"}},
                {"tool": "system_own_*", "disposition": {"tag": "runSync"}},
                {"tool": "prompt_agent_z*", "disposition": {"tag": "runSync"}}]}}),
        ),
    )
    .put("1.json", agent("x-y", &json!({})))
    .put("2.json", agent("x.y", &json!({})))
    .put("3.json", agent("x_y_2", &json!({})))
    .tool("tools/t", "t");
    let loaded = tree.load(&["root.json"]).await;
    let root = &loaded[0];
    let expected = [
        "bash_t",
        "system_own_system_info",
        "system_more_system_info",
        "prompt_agent_x_y",
        "prompt_agent_x_y_2",
        "prompt_agent_x_y_2_2",
    ];
    assert_eq!(tools(root), expected);
    for (name, slug) in expected[3..].iter().zip(["x-y", "x.y", "x_y_2"]) {
        let kind = &root.agent.builtin(name).expect("the engine's").kind;
        assert!(matches!(kind, BuiltinKind::Helper(helper) if helper.slug == slug), "{name}: {kind:?}");
    }
    let words = &root.agent.tools()[1].parameters["properties"]["capability"]["enum"];
    assert_eq!(*words, json!(["get-tool-call-status", "wait"]));
    let [second, third, idle] = &root.warnings[..] else { panic!("{:?}", root.warnings) };
    assert!(
        second.contains("\"prompt_agent_x.y\"") && second.contains("called prompt_agent_x_y_2"),
        "{second}"
    );
    assert!(third.contains("called prompt_agent_x_y_2_2"), "{third}");
    assert!(idle.contains("rules[2]") && idle.contains("matches no tool"), "{idle}");

    let answer = root.toolbox.call("nothing", "", &context(), &CancellationToken::new(), None).await;
    let text = failure(answer);
    assert!(
        text.contains("this agent has: bash_t, system_own_system_info"),
        "a model is told of all: {text}"
    );
    tree.tool("tools/u", "u");
    root.toolbox.refresh().await;
    let now: Vec<_> =
        offered(&root.toolbox, &root.agent.builtins).into_iter().map(|tool| tool.name).collect();
    assert_eq!(now[..2], ["bash_t", "bash_u"]);
    assert_eq!(now[2..], expected[1..], "the others stay while programs come");
}

#[tokio::test]
async fn toolboxes_that_are_not_there_are_refused_by_name() {
    let refused = async |toolboxes: Value| {
        let tree = Tree::new();
        tree.put("a.json", agent("a", &json!({"builtinToolboxes": toolboxes})));
        let error = tree.refused("a.json").await;
        assert!(matches!(error, LoadError::Agent { .. }), "{error}");
        error.to_string()
    };
    let fine = system("own", &["wait"]);
    for tag in ["DeveloperToolbox", "LuaToolbox", "SqliteToolbox"] {
        let text = refused(json!([fine, {"tag": tag, "contents": {"Name": "x"}}])).await;
        for part in ["a.json: builtinToolboxes[1]: ", tag, "known is SystemToolbox"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
    for word in ["date", "env-vars"] {
        let text = refused(json!([system("own", &["wait", word])])).await;
        for part in [
            "builtinToolboxes[0]: ",
            &format!("{word:?}"),
            "known are get-tool-call-status, ",
            "unwatch-session",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
    for (toolbox, part) in [
        (json!({"contents": {}}), "must have a tag; known is SystemToolbox"),
        (json!({"tag": "SystemToolbox", "contents": {"Name": "x"}}), "missing field `Capabilities`"),
        (
            json!({"tag": "SystemToolbox", "contents": {"Name": "x", "Capabilities": [1]}}),
            "builtinToolboxes[1]: ",
        ),
        (system("own", &["wait"]), "another toolbox has this Name"),
    ] {
        let text = refused(json!([fine, toolbox])).await;
        assert!(text.contains("builtinToolboxes[1]: ") && text.contains(part), "{part}: {text}");
    }
}

#[tokio::test]
async fn what_has_no_effect_is_a_warning() {
    let tree = Tree::new();
    let mut toolbox = system("own", &["spawn-session"]);
    toolbox["contents"]["EnvVars"] = json!([]);
    let odd = json!({"builtinToolboxes": [toolbox], "executionMode": "synchronous",
        "asyncYieldStrategy": {"tag": "yieldOnTimeout", "milliseconds": 5}});
    tree.put("a.json", agent("a", &odd));
    let loaded = tree.load(&["a.json"]).await;
    let [unknown, strategy, spawn] = &loaded[0].warnings[..] else { panic!("{:?}", loaded[0].warnings) };
    assert!(unknown.contains("\"EnvVars\" of builtinToolboxes[0] is unknown"), "{unknown}");
    assert!(strategy.contains("asyncYieldStrategy has no effect"), "{strategy}");
    assert!(spawn.contains("system_own_system_info") && spawn.contains("no helpers"), "{spawn}");

    tree.put("h.json", agent("h", &json!({}))).put(
        "a.json",
        agent(
            "a",
            &json!({
        "builtinToolboxes": [system("own", &["spawn-session"])],
        "extraAgents": [{"slug": "h", "path": "h.json", "narrow": true, "with": {}}],
        "executionMode": "asynchronous", "asyncYieldStrategy": "yieldOnAnyProgress"}),
        ),
    );
    let loaded = tree.load(&["a.json"]).await;
    assert_eq!(all_warnings(&loaded), ["field \"narrow\" of extraAgents[0] is unknown and has no effect"]);
    tree.put("a.json", agent("a", &json!({"asyncYieldStrategy": "yieldWhenAllDone"})));
    assert_eq!(all_warnings(&tree.load(&["a.json"]).await), Vec::<&str>::new(), "what it does anyway");
}
