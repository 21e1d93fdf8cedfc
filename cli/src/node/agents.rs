//! The agents that a process was given, and what clients are shown of them.

use std::collections::{BTreeSet, HashMap};

use holdfast_store::{Store, agents};
use holdfast_tools::{LoadedAgent, load_agent, load_dir};
use holdfast_worker::model::ApiKeys;
use serde_json::{Value, json};

use super::database::patiently;
use crate::{args::AgentArgs, failure::Failure};

/// Loads the agents that the flags name.
///
/// # Errors
/// [`Failure::Agent`] if one doesn't load, two have the same slug, or a slug that is asked for isn't there.
pub(crate) async fn load(args: &AgentArgs) -> Result<Vec<LoadedAgent>, Failure> {
    let refuse = |error: holdfast_tools::LoadError| Failure::Agent(error.to_string());
    let mut loaded = Vec::new();
    for file in &args.agent_file {
        loaded.push(load_agent(file).await.map_err(refuse)?);
    }
    for dir in &args.agents_dir {
        loaded.extend(load_dir(dir).await.map_err(refuse)?);
    }
    let mut files = HashMap::new();
    // The same file given twice, as by a directory and by its name, is one agent.
    let mut paths = BTreeSet::new();
    loaded.retain(|agent| paths.insert(agent.path.clone()));
    for agent in &loaded {
        let slug = agent.agent.slug.as_str();
        if let Some(first) = files.insert(slug, &agent.path) {
            return Err(Failure::Agent(format!(
                "{} and {} both describe the agent {slug:?}",
                first.display(),
                agent.path.display()
            )));
        }
    }
    if let Some(missing) = args.only_agent.iter().find(|slug| !files.contains_key(slug.as_str())) {
        let mut known: Vec<_> = files.keys().copied().collect();
        known.sort_unstable();
        return Err(Failure::Agent(format!("--agent {missing}: no such agent among: {}", known.join(", "))));
    }
    if !args.only_agent.is_empty() {
        loaded.retain(|agent| args.only_agent.contains(&agent.agent.slug));
    }
    Ok(loaded)
}

/// Adds a warning to each agent whose model key isn't among the keys at hand.
pub(crate) fn warn_of_missing_keys(loaded: &mut [LoadedAgent], keys: &ApiKeys) {
    for one in loaded {
        let id = &one.agent.api_key_id;
        if !id.is_empty() && keys.get(id).is_none() {
            one.warnings.push(format!("apiKeyId {id:?} is not among the model keys; see --api-keys"));
        }
    }
}

/// Logs what is odd of agents.
pub(super) fn log_warnings(loaded: &[LoadedAgent]) {
    for one in loaded {
        for warning in &one.warnings {
            tracing::warn!(kind = "agent.warning", agent = one.agent.slug, "{warning}");
        }
    }
}

/// Makes the agents' revisions the current ones.
pub(super) async fn record(store: &Store, loaded: &[LoadedAgent]) -> Result<(), Failure> {
    for one in loaded {
        let text = descriptor(one).to_string();
        let (slug, revision) = (&one.agent.slug, &one.agent.revision);
        patiently("recording agents", async || agents::record(store, slug, revision, &text).await).await?;
    }
    Ok(())
}

/// What clients are shown of an agent.
pub(crate) fn descriptor(one: &LoadedAgent) -> Value {
    let (agent, config) = (&one.agent, &one.config);
    let tools = agent.tools.iter().map(|tool| {
        json!({
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
            "activation": "always",
            "disposition": agent.policy.apply(&tool.name).disposition.tag(),
        })
    });
    json!({
        "slug": agent.slug,
        "revision": agent.revision,
        "announce": config.announce,
        "model": agent.target.model,
        "flavor": agent.target.flavor,
        "systemPrompt": agent.system_prompt,
        "tools": tools.collect::<Vec<_>>(),
        "toolCallPolicyConfig": config.tool_call_policy_config,
        "executionMode": config.execution_mode,
        "maxConcurrency": agent.max_concurrency,
        "parameters": [],
        "helpers": [],
        "source": "file",
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn write(dir: &Path, name: &str, slug: &str) -> std::path::PathBuf {
        let path = dir.join(name);
        let text = json!({"slug": slug, "flavor": "OpenAIv1", "modelUrl": "http://m/v1", "modelName": "x",
            "announce": "helps", "systemPrompt": ["Be brief."]});
        std::fs::write(&path, text.to_string()).expect("written");
        path
    }

    fn args(files: &[&Path], dirs: &[&Path], only: &[&str]) -> AgentArgs {
        AgentArgs {
            agent_file: files.iter().map(|path| path.to_path_buf()).collect(),
            agents_dir: dirs.iter().map(|path| path.to_path_buf()).collect(),
            only_agent: only.iter().map(|slug| (*slug).to_owned()).collect(),
        }
    }

    #[tokio::test]
    async fn agents_are_loaded_once_filtered_and_told_apart() {
        let dir = tempfile::tempdir().expect("a directory");
        let (a, _) = (write(dir.path(), "a.json", "alpha"), write(dir.path(), "b.json", "beta"));
        let slugs =
            |loaded: Vec<LoadedAgent>| loaded.into_iter().map(|one| one.agent.slug).collect::<Vec<_>>();
        let both = load(&args(&[&a], &[dir.path()], &[])).await.expect("loads");
        assert_eq!(slugs(both), ["alpha", "beta"]);
        let one = load(&args(&[], &[dir.path()], &["beta"])).await.expect("loads");
        assert_eq!(slugs(one), ["beta"]);
        let missing = load(&args(&[&a], &[], &["gamma"])).await.expect_err("no such agent");
        assert!(missing.code() == 4 && missing.to_string().contains("gamma"), "{missing}");

        let elsewhere = tempfile::tempdir().expect("a directory");
        let again = write(elsewhere.path(), "c.json", "alpha");
        let twice = load(&args(&[&a, &again], &[], &[])).await.expect_err("the same slug");
        assert!(twice.code() == 4 && twice.to_string().contains("c.json"), "{twice}");
        assert_eq!(load(&args(&[Path::new("/absent")], &[], &[])).await.expect_err("absent").code(), 4);
    }

    #[tokio::test]
    async fn warnings_are_told_by_those_who_asked_for_the_agents() {
        use std::sync::{Arc, Mutex};

        use tracing_subscriber::{Layer, layer::Context, layer::SubscriberExt as _, registry};

        struct Logged(Arc<Mutex<Vec<&'static str>>>);
        impl<S: tracing::Subscriber> Layer<S> for Logged {
            fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
                if *event.metadata().level() <= tracing::Level::WARN {
                    self.0.lock().expect("no panic").push(event.metadata().target());
                }
            }
        }

        let dir = tempfile::tempdir().expect("a directory");
        let file = write(dir.path(), "a.json", "alpha");
        let text = std::fs::read_to_string(&file).expect("read");
        let odd = text.replacen('{', r#"{"sulg": 1, "toolDirectory": "absent","#, 1);
        std::fs::write(&file, odd).expect("written");
        let logged = Arc::new(Mutex::new(Vec::new()));
        let guard = tracing::subscriber::set_default(registry().with(Logged(Arc::clone(&logged))));
        let loaded = load(&args(&[&file], &[], &[])).await.expect("loads");
        assert_eq!(loaded[0].warnings.len(), 2, "{:?}", loaded[0].warnings);
        assert_eq!(*logged.lock().expect("no panic"), Vec::<&str>::new(), "`check` prints them");
        log_warnings(&loaded);
        assert_eq!(logged.lock().expect("no panic").len(), 2, "a server logs each once");
        drop(guard);
    }

    #[tokio::test]
    async fn a_key_that_is_not_at_hand_is_a_warning() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = write(dir.path(), "a.json", "alpha");
        let text = std::fs::read_to_string(&file).expect("read");
        std::fs::write(&file, text.replacen('{', r#"{"apiKeyId": "main","#, 1)).expect("written");
        let keyless = write(dir.path(), "b.json", "beta");
        let keys = ["main", "other"].map(|id| {
            ApiKeys::from_iter([holdfast_worker::model::ApiKey::new(id, "secret").expect("a key")])
        });
        let mut loaded = load(&args(&[&file, &keyless], &[], &[])).await.expect("loads");
        warn_of_missing_keys(&mut loaded, &keys[0]);
        assert!(loaded.iter().all(|one| one.warnings.is_empty()), "the key is there, or none is wanted");
        warn_of_missing_keys(&mut loaded, &keys[1]);
        let [a, b] = &loaded[..] else { panic!("two agents") };
        assert!(matches!(&a.warnings[..], [one] if one.contains("\"main\"")), "{:?}", a.warnings);
        assert_eq!(b.warnings, Vec::<String>::new());
    }

    #[tokio::test]
    async fn a_descriptor_names_what_clients_ask_for() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = write(dir.path(), "a.json", "alpha");
        let [one] = &load(&args(&[&file], &[], &[])).await.expect("loads")[..] else { panic!("one agent") };
        let value = descriptor(one);
        assert_eq!(value["slug"], "alpha");
        assert_eq!(value["announce"], "helps");
        assert_eq!(value["model"], "x");
        assert_eq!(value["systemPrompt"], json!(["Be brief."]));
        assert_eq!(value["source"], "file");
        assert_eq!(value["revision"].as_str().map(str::len), Some(16));
        for list in ["tools", "parameters", "helpers"] {
            assert_eq!(value[list], json!([]), "{list}");
        }
    }
}
