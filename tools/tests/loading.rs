//! Agent files, their tools, and tools that change while they are in use.

mod support;

use std::{fs, path::Path, sync::Arc, time::Duration};

use holdfast_engine::tool::Outcome;
use holdfast_tools::{
    DESCRIBES_AT_ONCE, LoadError, LoadedAgent, MAX_AGENT_FILE, Source, Toolbox, load_agent, load_agents,
};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use support::{PATIENCE, context, description, directory, failure, script_text, text, write};
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

fn agent(more: Value) -> Value {
    let mut agent = json!({"slug": "a", "flavor": "OpenAIv1", "modelUrl": "http://m", "modelName": "x"});
    agent.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    agent
}

/// An agent file beside tools `(file name, script)`, which stand in `tools/`.
fn project(agent: &Value, tools: &[(&str, String)]) -> TempDir {
    let directory = directory();
    fs::create_dir(directory.path().join("tools")).expect("created");
    for (name, script) in tools {
        write(&directory.path().join("tools").join(name), script);
    }
    fs::write(directory.path().join("agent.json"), agent.to_string()).expect("written");
    directory
}

fn tool(slug: &str) -> String {
    script_text(&description(slug), &format!("echo {slug}"))
}

async fn load(project: &TempDir) -> LoadedAgent {
    load_agent(&project.path().join("agent.json")).await.expect("loads")
}

fn names(loaded: &LoadedAgent) -> Vec<String> {
    loaded.toolbox.specs().into_iter().map(|spec| spec.name).collect()
}

async fn call(toolbox: &Toolbox, name: &str) -> Outcome {
    let (context, cancel) = (context(), CancellationToken::new());
    tokio::time::timeout(PATIENCE, Box::pin(toolbox.call(name, "", &context, &cancel, None)))
        .await
        .expect("ends")
}

fn warned(warnings: &[String], parts: &[&str]) -> bool {
    warnings.iter().any(|warning| parts.iter().all(|part| warning.contains(part)))
}

#[tokio::test]
async fn an_agent_finds_the_tools_beside_its_file() {
    let file = agent(json!({"toolDirectory": "tools", "bashToolboxes": [
        {"tag": "SingleTool", "contents": {"Path": "single"}}]}));
    let project = project(&file, &[("b.sh", tool("second")), ("a.sh", tool("first-one"))]);
    write(&project.path().join("single"), &tool("lone"));
    fs::write(project.path().join("tools/notes.txt"), "no tool").expect("written");
    write(&project.path().join("tools/.hidden"), "#!/bin/sh\nexit 1");
    write(&project.path().join("tools/a.sh~"), &tool("backup"));
    let loaded = load(&project).await;
    assert_eq!(names(&loaded), ["bash_first_one", "bash_second", "bash_lone"]);
    assert_eq!(loaded.agent.tools(), loaded.toolbox.specs());
    assert_eq!(loaded.agent.tools()[0].original, "first-one");
    assert_eq!(loaded.agent.tools()[0].description, "does first-one");
    assert_eq!(loaded.warnings, Vec::<String>::new());
    let digest = Sha256::digest(file.to_string().as_bytes());
    let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(loaded.agent.revision, hex[..16]);
    let text_of: Value = serde_json::from_str(&loaded.config_text).expect("JSON");
    assert_eq!(text_of["toolDirectory"], "tools");
    assert!(loaded.toolbox.has("bash_lone") && !loaded.toolbox.has("lone"));
    assert_eq!(text(call(&loaded.toolbox, "bash_first_one").await), "first-one\n");
    let message = failure(call(&loaded.toolbox, "bash_third").await);
    assert!(
        message.contains("\"bash_third\"") && message.contains("bash_first_one, bash_second"),
        "{message}"
    );
}

#[tokio::test]
async fn filters_match_file_names_and_slugs_and_excluding_wins() {
    let toolbox = json!({"Path": "tools", "Include": ["read_*", "*.py", "nothing*"], "Exclude": ["secret.sh", "*_all"]});
    let file = agent(json!({"bashToolboxes": [{"tag": "FileSystemDirectory", "contents": toolbox}]}));
    let ran = "#!/bin/sh\ntouch \"$(dirname \"$0\")/../ran\"; exit 1".to_owned();
    let tools = [
        ("one.sh", tool("read_one")),
        ("two.py", tool("write_two")),
        ("three.sh", tool("write_three")),
        ("four.sh", tool("read_all")),
        ("secret.sh", ran),
    ];
    let project = project(&file, &tools);
    let loaded = load(&project).await;
    assert_eq!(names(&loaded), ["bash_read_one", "bash_write_two"]);
    assert!(!project.path().join("ran").exists(), "an excluded file isn't even asked");
    assert!(warned(&loaded.warnings, &["\"nothing*\"", "matches no tool"]), "{:?}", loaded.warnings);
    assert_eq!(loaded.warnings.len(), 1);
}

#[tokio::test]
async fn what_is_odd_is_a_warning_and_hides_only_itself() {
    let inner = json!({"tag": "defer", "reason": "later", "raeson": "?"});
    let decorated = json!({"tag": "decorate", "inner": inner, "decorators":
        [{"tag": "withTimeout", "contents": 5, "unit": "hours"}]});
    let file = agent(json!({"toolDirectory": "tools", "sulg": 1, "mcpServers": {}, "extraAgents": null,
        "asyncYieldStrategy": "yieldOnAnyProgress", "parameters": null,
        "toolCallPolicyConfig": {"default": {"tag": "runSync", "reason": "none"}, "wrapers": [], "rules":
            [{"tool": "bash_sam?", "disposition": {"tag": "runSync"}, "note": "?"},
             {"tool": "bash_odd*", "disposition": decorated},
             {"tool": "odd", "disposition": {"tag": "runSync"}},
             {"tool": "bash_odd", "disposition": {"tag": "defer"}, "readOnly": true}]},
        "bashToolboxes": [
            {"tag": "FileSystemDirectory", "contents": {"Path": "empty", "BasenameFilter": "x"}},
            {"tag": "FileSystemDirectory", "contents": {"Path": "absent"}},
            {"tag": "SingleTool", "contents": {"Path": "agent.json"}},
            {"tag": "SingleTool", "contents": {"Path": "tools/a.sh", "Bindings": []}}]}));
    let mut odd = description("odd");
    odd["colour"] = json!("red");
    let tools = [
        ("a.sh", tool("same")),
        ("b.sh", tool("same")),
        ("broken.sh", "#!/bin/sh\necho nonsense".to_owned()),
        ("odd.sh", script_text(&odd, "")),
    ];
    let project = project(&file, &tools);
    fs::create_dir(project.path().join("empty")).expect("created");
    let loaded = load(&project).await;
    assert_eq!(names(&loaded), ["bash_same", "bash_same_2", "bash_odd"]);
    for parts in [
        &["\"sulg\"", "unknown"][..],
        &["asyncYieldStrategy has no effect while executionMode"],
        &["\"reason\" of toolCallPolicyConfig.default is unknown"],
        &["\"raeson\" of toolCallPolicyConfig.rules[1].disposition.inner is unknown"],
        &["\"unit\" of toolCallPolicyConfig.rules[1].disposition.decorators[0] is unknown"],
        &["toolCallPolicyConfig.rules[2]: \"odd\" matches no tool"],
        &["toolCallPolicyConfig.rules[3]: readOnly", "without runSync"],
        &["\"wrapers\"", "toolCallPolicyConfig"],
        &["\"note\"", "rules[0]"],
        &["\"BasenameFilter\"", "bashToolboxes[0]"],
        &["empty has no executable files"],
        &["absent", "No such file"],
        &["agent.json is not an executable file"],
        &["a.sh is named more than once"],
        &["broken.sh is hidden", "no JSON object"],
        &["b.sh", "bash_same_2"],
        &["odd.sh", "\"colour\""],
    ] {
        assert!(warned(&loaded.warnings, parts), "{parts:?}: {:#?}", loaded.warnings);
    }
    assert_eq!(loaded.warnings.len(), 17, "{:#?}", loaded.warnings);
}

#[tokio::test]
async fn unusable_files_are_errors_that_name_them() {
    let refused = async |file: &Value| {
        let project = project(file, &[]);
        load_agent(&project.path().join("agent.json")).await.expect_err("refused").to_string()
    };
    let message = refused(&json!({"slug": "a"})).await;
    assert!(message.contains("agent.json") && message.contains("flavor"), "{message}");
    let message = refused(&agent(json!({"flavor": "telepathy"}))).await;
    assert!(message.contains("telepathy") && message.contains("Anthropic"), "{message}");
    let glob = json!({"bashToolboxes": [{"tag": "FileSystemDirectory", "contents": {"Path": "t", "Exclude": ["a["]}}]});
    let message = refused(&agent(glob)).await;
    assert!(message.contains("bashToolboxes[0]") && message.contains("a["), "{message}");
    let rate = json!({"tag": "rateLimit", "perMinute": 0});
    let wrapper = json!({"toolCallPolicyConfig": {"wrappers": [{"decorators": [rate]}]}});
    let message = refused(&agent(wrapper)).await;
    assert!(
        message.contains("wrapper 0, decorator 0 (rateLimit): perMinute must be 1 to 60000"),
        "{message}"
    );
    let long = agent(json!({"announce": "x".repeat(usize::try_from(MAX_AGENT_FILE).expect("small"))}));
    let message = refused(&long).await;
    assert!(message.contains("too many for an agent file"), "{message}");
    let missing = load_agent(Path::new("/no/such/agent.json")).await.expect_err("no file");
    assert!(matches!(missing, LoadError::Read { .. }));
}

#[tokio::test]
async fn what_an_agent_cannot_do_without_is_refused_until_it_is_supported() {
    let refused = async |file: &Value| {
        let ran = "#!/bin/sh\ntouch \"$0.ran~\"; exit 1".to_owned();
        let project = project(file, &[("a", ran)]);
        let error = load_agent(&project.path().join("agent.json")).await.expect_err("refused");
        assert!(!project.path().join("tools/a.ran~").exists(), "no program is started");
        let LoadError::Unsupported { field, .. } = &error else { panic!("{error}") };
        assert!(error.to_string().contains("agent.json") && error.to_string().contains(field), "{error}");
        field.clone()
    };
    for field in ["mcpServers", "parameters"] {
        let file = agent(json!({"toolDirectory": "tools", field: [{}]}));
        assert_eq!(refused(&file).await, field);
        let tagged = json!({"tag": "OpenAIAgentDescription", "contents": file});
        assert_eq!(refused(&tagged).await, field);
    }
    let bound = json!({"Path": "tools", "Bindings": [{"name": "who", "value": "me"}]});
    let file = agent(json!({"bashToolboxes": [
        {"tag": "SingleTool", "contents": {"Path": "tools/a", "Bindings": []}},
        {"tag": "FileSystemDirectory", "contents": bound}]}));
    assert_eq!(refused(&file).await, "bashToolboxes[1].Bindings");
    for (field, value) in
        [("with", json!({"who": "me"})), ("narrowable", json!(false)), ("bindings", json!([{"tool": "x"}]))]
    {
        let mut helpers =
            json!([{"slug": "a", "path": "agent.json", "with": {}, "bindings": []}, {"slug": "a"}]);
        helpers[1][field] = value;
        let file = agent(json!({"toolDirectory": "tools", "extraAgents": helpers}));
        assert_eq!(refused(&file).await, format!("extraAgents[1].{field}"));
    }
}

#[tokio::test]
async fn a_directory_of_agents_is_read_in_order() {
    let directory = directory();
    let put = |name: &str, slug: &str| {
        fs::write(directory.path().join(name), agent(json!({"slug": slug})).to_string()).expect("written");
    };
    put("b.json", "one");
    put("a.json", "two");
    put(".c.json", "three");
    put("d.txt", "four");
    let dir = async || load_agents(&[], &[directory.path().to_owned()]).await;
    let slugs: Vec<String> = dir().await.expect("loads").into_iter().map(|a| a.agent.slug).collect();
    assert_eq!(slugs, ["two", "one"]);
    put("e.json", "one");
    let error = dir().await.expect_err("two of a slug");
    assert!(matches!(&error, LoadError::SameSlug { slug, .. } if slug == "one"), "{error}");
}

async fn reloading(tools: &[(&str, String)]) -> (TempDir, Toolbox) {
    let directory = directory();
    for (name, script) in tools {
        write(&directory.path().join(name), script);
    }
    let source = Source::directory(directory.path().to_owned(), None, &[]).expect("a source");
    let (toolbox, _) = Toolbox::open(vec![source]).await;
    (directory, toolbox)
}

fn offered(toolbox: &Toolbox) -> Vec<String> {
    toolbox.specs().into_iter().map(|spec| spec.name).collect()
}

#[tokio::test]
async fn only_what_changed_is_described_again() {
    let counting = |slug: &str| {
        format!(
            "#!/bin/sh\nif [ \"$1\" = describe ]; then echo x >> \"$0.count~\"; echo '{}'; exit; fi\necho v1",
            description(slug)
        )
    };
    let (directory, toolbox) = reloading(&[("a", counting("a")), ("b", counting("b"))]).await;
    let counts = || {
        ["a", "b"]
            .map(|name| fs::read(directory.path().join(format!("{name}.count~"))).expect("counted").len() / 2)
    };
    assert_eq!(counts(), [1, 1]);
    let calm = toolbox.refresh().await;
    assert!(!calm.changed && calm.warnings.is_empty(), "{calm:?}");
    assert_eq!(counts(), [1, 1]);
    write(&directory.path().join("b"), &counting("c").replace("v1", "v2"));
    assert!(toolbox.refresh().await.changed);
    assert_eq!(counts(), [1, 2]);
    assert_eq!(offered(&toolbox), ["bash_a", "bash_c"]);
}

#[tokio::test]
async fn names_stay_while_tools_come_and_go() {
    let (directory, toolbox) = reloading(&[("a", tool("x-y")), ("b", tool("x_y"))]).await;
    assert_eq!(offered(&toolbox), ["bash_x_y", "bash_x_y_2"]);
    fs::remove_file(directory.path().join("a")).expect("removed");
    toolbox.refresh().await;
    assert_eq!(offered(&toolbox), ["bash_x_y_2"], "the one that stays keeps its name");
    fs::rename(directory.path().join("b"), directory.path().join("c")).expect("renamed");
    write(&directory.path().join("a"), &tool("x.y"));
    toolbox.refresh().await;
    assert_eq!(offered(&toolbox), ["bash_x_y", "bash_x_y_2"]);
    assert_eq!(text(call(&toolbox, "bash_x_y_2").await), "x_y\n");
}

#[tokio::test]
async fn a_script_that_breaks_hides_itself_until_it_is_repaired() {
    let (directory, toolbox) = reloading(&[("a", tool("a")), ("b", tool("b"))]).await;
    write(&directory.path().join("a"), "#!/bin/sh\nexit 7");
    let broken = toolbox.refresh().await;
    assert!(broken.changed && warned(&broken.warnings, &["a is hidden", "exit code 7"]), "{broken:?}");
    assert_eq!(offered(&toolbox), ["bash_b"]);
    assert!(failure(call(&toolbox, "bash_a").await).contains("this agent has: bash_b"));
    write(&directory.path().join("a"), &tool("a"));
    assert_eq!(text(call(&toolbox, "bash_a").await), "a\n", "a call looks for itself");
    assert_eq!(offered(&toolbox), ["bash_a", "bash_b"]);
}

#[tokio::test]
async fn a_call_uses_the_tool_as_it_is_now() {
    let (directory, toolbox) = reloading(&[("a", tool("a"))]).await;
    let mut about = description("a");
    about["args"] = json!([support::arg("who", "string", "single", "positional")]);
    write(&directory.path().join("a"), &script_text(&about, "echo hello $1"));
    assert!(failure(call(&toolbox, "bash_a").await).contains("\"who\" is required"));
    fs::remove_file(directory.path().join("a")).expect("removed");
    assert!(failure(call(&toolbox, "bash_a").await).contains("has no tools"));
}

#[tokio::test]
async fn watching_notices_by_itself_and_ends_when_told() {
    let (directory, toolbox) = reloading(&[("a", tool("a"))]).await;
    let toolbox = Arc::new(toolbox);
    let cancel = CancellationToken::new();
    let task = Arc::clone(&toolbox).watch(Duration::from_millis(10), cancel.clone());
    write(&directory.path().join("b"), &tool("b"));
    let noticed = tokio::time::timeout(PATIENCE, async {
        while !toolbox.has("bash_b") {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    noticed.await.expect("the new tool is noticed");
    cancel.cancel();
    tokio::time::timeout(PATIENCE, task).await.expect("the task ends").expect("without a panic");
}

#[tokio::test]
async fn a_toolbox_without_tools_says_so() {
    assert!(failure(call(&Toolbox::default(), "x").await).contains("has no tools"));
}

#[tokio::test]
async fn so_many_describe_themselves_at_once_and_no_more() {
    let counting = |slug: &str| {
        format!(
            "#!/bin/bash\ncd \"$(dirname \"$0\")\"; touch .run.$$; ls -A | grep -c '^.run' >> .counts; sleep 0.05\n\
             rm .run.$$; echo '{}'",
            description(slug)
        )
    };
    let scripts: Vec<(String, String)> =
        (0..3 * DESCRIBES_AT_ONCE).map(|n| (format!("t{n:02}"), counting(&format!("t{n:02}")))).collect();
    let scripts: Vec<(&str, String)> =
        scripts.iter().map(|(name, text)| (name.as_str(), text.clone())).collect();
    let (directory, toolbox) = reloading(&scripts).await;
    let expected: Vec<String> = scripts.iter().map(|(name, _)| format!("bash_{name}")).collect();
    assert_eq!(offered(&toolbox), expected, "in the order of their files");
    let counts = fs::read_to_string(directory.path().join(".counts")).expect("counted");
    let most = counts.lines().filter_map(|line| line.trim().parse().ok()).max();
    assert!(most.is_some_and(|most: usize| most > 1 && most <= DESCRIBES_AT_ONCE), "{most:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_run_side_by_side_in_tasks_of_their_own() {
    // Each call waits for the other's file.
    let meet = r#"cd "$(dirname "$0")"; touch ".$1"; until [ -e ".$2" ]; do sleep 0.01; done; echo met"#;
    let mut about = description("meet");
    about["args"] = json!([
        support::arg("own", "string", "single", "positional"),
        support::arg("other", "string", "single", "positional"),
    ]);
    let (_directory, toolbox) = reloading(&[("meet", script_text(&about, meet))]).await;
    let toolbox = Arc::new(toolbox);
    let task = |own: &str, other: &str| {
        let (toolbox, arguments) = (Arc::clone(&toolbox), json!({"own": own, "other": other}).to_string());
        tokio::spawn(async move {
            toolbox.call("bash_meet", &arguments, &context(), &CancellationToken::new(), None).await
        })
    };
    let (one, two) = (task("a", "b"), task("b", "a"));
    assert_eq!(text(one.await.expect("no panic")), "met\n");
    assert_eq!(text(two.await.expect("no panic")), "met\n");
}
