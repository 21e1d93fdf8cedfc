//! Agents that call agents: what is loaded with an agent file.

mod support;

use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::Path,
};

use holdfast_engine::builtin::BuiltinKind;
use holdfast_tools::{LoadError, MAX_AGENT_FILE, MAX_LEVELS, MAX_REACHED, load_agent, load_agents};
use serde_json::{Value, json};
use support::{
    tree::{Tree, agent, all_warnings, extra, helpers, slugs, tools},
    write,
};

#[tokio::test]
async fn everything_that_is_reached_is_loaded_once_and_called_by_its_tool() {
    let tree = Tree::new();
    tree.put(
        "a/boss.json",
        agent("boss", &extra(&[("senior", "../b/senior.json"), ("junior", "../c/junior.json")])),
    )
    .put(
        "b/senior.json",
        agent("senior", &extra(&[("junior", "../c/./junior.json"), ("boss", "../a/boss.json")])),
    )
    .put("c/junior.json", agent("junior", &json!({"announce": "Does it.", "toolDirectory": "tools"})))
    .tool("c/tools/git", "git");
    let loaded = tree.load(&["a/boss.json"]).await;
    assert_eq!(slugs(&loaded), ["boss", "senior", "junior"], "the one asked for, then the nearest");
    let [boss, senior, junior] = &loaded[..] else { panic!("three agents") };
    assert_eq!(helpers(boss), ["senior", "junior"]);
    assert_eq!(tools(boss), ["prompt_agent_senior", "prompt_agent_junior"]);
    assert_eq!(tools(senior), ["prompt_agent_junior", "prompt_agent_boss"]);
    assert_eq!(tools(junior), ["bash_git"], "paths are relative to the file that names them");
    let tool = &boss.agent.tools()[1];
    assert!(
        tool.description.contains("Does it.") && tool.parameters["required"] == json!(["what"]),
        "{tool:?}"
    );
    let builtin = boss.agent.builtin("prompt_agent_junior").expect("the engine's");
    assert!(matches!(&builtin.kind, BuiltinKind::Helper(helper) if helper.slug == "junior"));
    let text: Value = serde_json::from_str(&boss.config_text).expect("JSON");
    assert_eq!(text["extraAgents"][0], json!({"slug": "senior", "path": "../b/senior.json"}));
    let alone = load_agent(&tree.path("a/boss.json")).await.expect("loads");
    assert_eq!((alone.agent.slug.as_str(), tools(&alone)), ("boss", tools(boss)));

    let before = [&boss.agent.revision, &junior.agent.revision].map(String::clone);
    tree.put("c/junior.json", agent("junior", &json!({"announce": "Does more."})));
    let after = tree.load(&["a/boss.json"]).await;
    assert_eq!(after[0].agent.revision, before[0], "a revision is of the agent's own file");
    assert_ne!(after[2].agent.revision, before[1]);
    assert!(after[0].agent.tools()[1].description.contains("Does more."));
}

#[tokio::test]
async fn circles_are_allowed_and_told_once() {
    let tree = Tree::new();
    tree.put("self.json", agent("self", &extra(&[("self", "./self.json")])))
        .put("planner.json", agent("planner", &extra(&[("executor", "executor.json")])))
        .put(
            "executor.json",
            agent("executor", &extra(&[("planner", "planner.json"), ("leaf", "leaf.json")])),
        )
        .put("leaf.json", agent("leaf", &json!({})));
    let loaded = tree.load(&["self.json", "executor.json", "planner.json"]).await;
    assert_eq!(slugs(&loaded), ["self", "executor", "planner", "leaf"]);
    assert_eq!((helpers(&loaded[0]), tools(&loaded[0])), (vec!["self"], vec!["prompt_agent_self"]));
    assert_eq!(helpers(&loaded[2]), ["executor"]);
    let told = "calls can go in a circle, until maxRecursionDepth: ";
    assert_eq!(loaded[0].warnings, [format!("{told}self → self")]);
    assert_eq!(loaded[1].warnings, [format!("{told}executor → planner → executor")]);
    assert_eq!(all_warnings(&loaded[2..]), Vec::<&str>::new(), "told where it is entered, and nowhere else");
}

#[tokio::test]
async fn a_file_is_one_agent_by_whatever_path_it_is_reached() {
    let tree = Tree::new();
    tree.put(
        "root.json",
        agent("root", &extra(&[("h", "h.json"), ("h", "link.json"), ("h", "./x/../h.json")])),
    )
    .put("h.json", agent("h", &json!({})))
    .put("x/none.txt", "");
    symlink(tree.path("h.json"), tree.path("link.json")).expect("linked");
    let (files, dir) = ([tree.path("root.json"), tree.path("link.json")], tree.0.path().to_owned());
    let loaded = load_agents(&files, &[dir]).await.expect("loads");
    assert_eq!(slugs(&loaded), ["root", "h"]);
    assert_eq!(helpers(&loaded[0]), ["h"]);
    assert_eq!(loaded[1].path, tree.path("link.json"), "the way by which it was reached first");
    let [one, two] = &loaded[0].warnings[..] else { panic!("{:?}", loaded[0].warnings) };
    assert!(one.contains("extraAgents[1]: \"h\" is named by extraAgents[0] already"), "{one}");
    assert!(two.contains("extraAgents[2]"), "{two}");

    tree.put("again.json", agent("h", &json!({})))
        .put("twice.json", agent("twice", &extra(&[("h", "h.json"), ("h", "again.json")])));
    let error = tree.refused("twice.json").await;
    let text = error.to_string();
    assert!(
        text.contains("h.json and ") && text.contains("again.json both describe the agent \"h\""),
        "{text}"
    );
    assert!(text.contains("twice.json"), "who reaches it: {text}");
}

#[tokio::test]
async fn a_slug_without_a_path_means_an_agent_that_is_loaded() {
    let tree = Tree::new();
    let by_slug = json!({"extraAgents": [{"slug": "b"}]});
    tree.put("a.json", agent("a", &by_slug)).put("b.json", agent("b", &by_slug));
    let loaded = tree.load(&["a.json", "b.json"]).await;
    assert_eq!((helpers(&loaded[0]), helpers(&loaded[1])), (vec!["b"], vec!["b"]));
    tree.put("c.json", agent("c", &extra(&[("b", "b.json"), ("a", "a.json")])));
    let loaded = tree.load(&["c.json"]).await;
    assert_eq!(slugs(&loaded), ["c", "b", "a"]);
    assert_eq!(helpers(&loaded[2]), ["b"], "also one that was only reached");
    let error = tree.refused("a.json").await;
    let text = error.to_string();
    assert!(matches!(error, LoadError::UnknownHelper { index: 0, .. }), "{text}");
    assert!(text.contains("a.json: extraAgents[0]") && text.contains("no agent \"b\" among: a"), "{text}");
}

#[tokio::test]
async fn an_entry_that_is_wrong_names_both_files() {
    let tree = Tree::new();
    tree.put("a.json", agent("a", &extra(&[("a", "a.json"), ("helper", "b.json")])))
        .put("b.json", agent("my-helper", &json!({})));
    let text = tree.refused("a.json").await.to_string();
    assert!(text.contains("a.json: extraAgents[1]: ") && text.contains("b.json describes"), "{text}");
    assert!(text.contains("\"my-helper\", not \"helper\""), "{text}");
    tree.put("b.json", r#"{"slug": "helper"}"#);
    let text = tree.refused("a.json").await.to_string();
    assert!(text.contains("a.json: helper: ") && text.contains("b.json: not an agent"), "{text}");
    fs::remove_file(tree.path("b.json")).expect("removed");
    let text = tree.refused("a.json").await.to_string();
    assert!(text.contains("a.json: helper: ") && text.contains("b.json: No such file"), "{text}");
    tree.put("a.json", agent("a", &json!({"extraAgents": [{"path": "b.json"}]})));
    let text = tree.refused("a.json").await.to_string();
    assert!(text.contains("missing field `slug`"), "{text}");
}

#[tokio::test]
async fn agents_in_the_tool_directory_are_helpers_and_no_programs() {
    let tree = Tree::new();
    tree.put(
        "root.json",
        agent(
            "root",
            &json!({"toolDirectory": "tools", "extraAgents": [
            {"slug": "far", "path": "far.json"}, {"slug": "near-b", "path": "tools/b.json"}]}),
        ),
    )
    .put("far.json", agent("far", &json!({})))
    .put("tools/b.json", agent("near-b", &json!({"toolDirectory": "."})))
    .put(
        "tools/c.json",
        json!({"tag": "OpenAIAgentDescription", "contents":
            agent("near-c", &json!({}))}),
    )
    .put("tools/.hidden.json", agent("hidden", &json!({})))
    .put("tools/below/d.json", agent("below", &json!({})))
    .put("tools/package.json", r#"{"name": "x", "slug": "y"}"#)
    .put("tools/list.json", "[1, 2]")
    .put("tools/tsconfig.json", "{ // comments\n \"slug\": 1 }")
    .put("tools/large.json", "x".repeat(usize::try_from(MAX_AGENT_FILE).expect("small") + 1));
    fs::create_dir(tree.path("tools/directory.json")).expect("created");
    for json in ["c.json", "package.json", "tsconfig.json"] {
        fs::set_permissions(tree.path("tools").join(json), fs::Permissions::from_mode(0o755)).expect("set");
    }
    let loaded = tree.load(&["root.json"]).await;
    assert_eq!(slugs(&loaded), ["root", "near-b", "near-c", "far"]);
    assert_eq!(helpers(&loaded[0]), ["near-b", "near-c", "far"], "each once");
    assert_eq!(helpers(&loaded[1]), ["near-c"], "its own file isn't meant to be called by itself");
    assert_eq!(tools(&loaded[0]), ["prompt_agent_near_b", "prompt_agent_near_c", "prompt_agent_far"]);
    let large = |warning: &&str| warning.contains("large.json") && warning.contains("passed over");
    let warnings = all_warnings(&loaded);
    assert!(
        warnings.len() == 2 && warnings.iter().all(large),
        "neither empty nor broken programs: {warnings:?}"
    );
}

#[tokio::test]
async fn a_json_file_that_is_a_program_stays_one() {
    let tree = Tree::new();
    tree.put("root.json", agent("root", &json!({"toolDirectory": "tools"}))).tool("tools/odd.json", "odd");
    let loaded = tree.load(&["root.json"]).await;
    assert_eq!((slugs(&loaded), tools(&loaded[0])), (vec!["root"], vec!["bash_odd"]));
}

#[tokio::test]
async fn a_broken_agent_in_the_tool_directory_is_an_error() {
    let broken = |content: String| async move {
        let tree = Tree::new();
        tree.put("root.json", agent("root", &json!({"toolDirectory": "tools"}))).put("tools/h.json", content);
        tree.refused("root.json").await.to_string()
    };
    let whole = agent("h", &json!({})).to_string();
    for content in [
        whole[..whole.len() - 1].to_owned(),
        whole.replace("OpenAIv1", "telepathy"),
        whole.replace("\"slug\"", "\"sulg\""),
        r#"{"tag": "OpenAIAgentDescription"}"#.to_owned(),
        r#"{"tag": "OpenAIAgentDescription", "contents": {"#.to_owned(),
        json!({"tag": "OpenAIAgentDescriptoin", "contents": agent("h", &json!({}))}).to_string(),
    ] {
        let text = broken(content).await;
        assert!(text.contains("root.json: helper: ") && text.contains("h.json: "), "{text}");
    }
}

#[tokio::test]
async fn no_program_is_started_before_all_files_are_known_to_be_usable() {
    let tree = Tree::new();
    tree.put(
        "root.json",
        agent(
            "root",
            &json!({"toolDirectory": "tools",
            "extraAgents": [{"slug": "h", "path": "h.json"}]}),
        ),
    )
    .put("h.json", agent("h", &json!({"mcpServers": [{}]})))
    .put("tools/none.txt", "");
    write(&tree.path("tools/t"), "#!/bin/sh\ntouch \"$0.ran~\"; exit 1");
    let error = tree.refused("root.json").await;
    let LoadError::Helper { source, .. } = &error else { panic!("{error}") };
    assert!(matches!(&**source, LoadError::Unsupported { field, .. } if field == "mcpServers"), "{error}");
    assert!(!tree.path("tools/t.ran~").exists());
}

fn chain(tree: &Tree, length: usize) {
    for n in 0..length {
        let (slug, file) = (format!("s{}", n + 1), format!("{}.json", n + 1));
        let more = if n + 1 < length { extra(&[(&slug, &file)]) } else { json!({}) };
        tree.put(&format!("{n}.json"), agent(&format!("s{n}"), &more));
    }
}

#[tokio::test]
async fn so_many_levels_of_files_and_no_more() {
    let tree = Tree::new();
    chain(&tree, MAX_LEVELS);
    assert_eq!(tree.load(&["0.json"]).await.len(), MAX_LEVELS);
    chain(&tree, MAX_LEVELS + 1);
    let error = tree.refused("0.json").await;
    let text = error.to_string();
    assert!(text.contains("32.json: at most 32 levels"), "{text}");
    let shorter = tree.load(&["0.json", "5.json"]).await;
    assert_eq!(shorter.len(), MAX_LEVELS + 1, "the shortest way counts");
}

#[tokio::test]
async fn so_many_agents_are_reached_and_no_more() {
    let tree = Tree::new();
    for n in 0..MAX_REACHED {
        tree.put(&format!("tools/{n:03}.json"), agent(&format!("s{n}"), &json!({})));
    }
    tree.put("root.json", agent("root", &json!({"toolDirectory": "tools"})))
        .put("one.json", agent("one", &json!({})));
    let loaded = tree.load(&["root.json", "one.json"]).await;
    assert_eq!((loaded.len(), loaded[0].agent.helpers.len()), (MAX_REACHED + 2, MAX_REACHED));
    tree.put("tools/more.json", agent("more", &json!({})));
    let text = tree.refused("root.json").await.to_string();
    assert!(text.contains("more.json: at most 256 agents"), "{text}");
    let given = load_agents(&[tree.path("root.json")], &[tree.path("tools")]).await.expect("loads");
    assert_eq!(given.len(), MAX_REACHED + 2, "those that are asked for aren't counted");
    assert!(Path::new(&given[0].path).ends_with("root.json"));
}
