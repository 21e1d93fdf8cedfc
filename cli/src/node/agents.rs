//! The agents that a process was given, and what clients are shown of them.

use std::collections::{BTreeMap, HashSet};

use holdfast_store::{
    Store, StoreError, agents,
    webhooks::{self, Endpoint},
};
use holdfast_tools::{LoadedAgent, load_agents};
use holdfast_worker::model::ApiKeys;
use serde_json::{Value, json};

use super::database::patiently;
use crate::{args::AgentArgs, failure::Failure};

/// Loads the agents that the flags name, and all that these reach.
///
/// # Errors
/// [`Failure::Agent`] if one doesn't load, two have the same slug, or a slug that is asked for isn't there.
pub(crate) async fn load(args: &AgentArgs) -> Result<Vec<LoadedAgent>, Failure> {
    let loading = load_agents(&args.agent_file, &args.agents_dir);
    let mut loaded = loading.await.map_err(|error| Failure::Agent(error.to_string()))?;
    if !args.only_agent.is_empty() {
        let kept = reach(&loaded, &args.only_agent)?;
        loaded.retain(|one| kept.contains(&one.agent.slug));
    }
    Ok(loaded)
}

/// The slugs of the agents asked for, and of all that these call.
fn reach(loaded: &[LoadedAgent], asked: &[String]) -> Result<HashSet<String>, Failure> {
    let agents: BTreeMap<&str, &LoadedAgent> =
        loaded.iter().map(|one| (one.agent.slug.as_str(), one)).collect();
    let mut kept = HashSet::new();
    let mut open: Vec<&str> = asked.iter().map(String::as_str).collect();
    while let Some(slug) = open.pop() {
        let Some(one) = agents.get(slug) else {
            let known: Vec<_> = agents.into_keys().collect();
            return Err(Failure::Agent(format!("--agent {slug}: no such agent among: {}", known.join(", "))));
        };
        if kept.insert(slug.to_owned()) {
            open.extend(one.agent.helpers.iter().map(|helper| helper.slug.as_str()));
        }
    }
    Ok(kept)
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
        let agent = agents::Record {
            slug: &one.agent.slug,
            revision: &one.agent.revision,
            descriptor: &text,
            waking: &one.agent.waking,
        };
        patiently("recording agents", async || agents::record(store, &agent).await).await?;
        patiently("recording agents", async || record_webhook(store, one).await).await?;
    }
    Ok(())
}

/// Makes an agent's webhook what its file says.
async fn record_webhook(store: &Store, one: &LoadedAgent) -> Result<(), StoreError> {
    let (name, agent) = (webhooks::of_agent(&one.agent.slug), Some(one.agent.slug.clone()));
    let Some(config) = &one.config.webhook else {
        return webhooks::withdraw(store, &name).await.map(|_| ());
    };
    let (url, secret_id) = (config.url.clone(), config.secret_id().to_owned());
    webhooks::declare(store, &Endpoint { name, agent, url, secret_id, kinds: config.kinds() }).await
}

/// What clients are shown of an agent.
pub(crate) fn descriptor(one: &LoadedAgent) -> Value {
    let (agent, config) = (&one.agent, &one.config);
    let tools = agent.tools().iter().map(|tool| {
        json!({
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
            "activation": "always",
            "disposition": agent.policy.of_tool(&tool.name).disposition.tag(),
        })
    });
    json!({
        "slug": agent.slug,
        "revision": agent.revision,
        "announce": config.announce,
        "model": agent.target.model,
        "flavor": agent.target.flavor,
        "systemPrompt": agent.offer.system.value,
        "tools": tools.collect::<Vec<_>>(),
        "toolCallPolicyConfig": config.tool_call_policy_config,
        "executionMode": config.conduct.execution_mode,
        "maxConcurrency": agent.max_concurrency,
        "parameters": [],
        "helpers": agent.helpers.iter().map(|helper| &helper.slug).collect::<Vec<_>>(),
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
    async fn an_agent_is_kept_with_everything_that_it_reaches() {
        let dir = tempfile::tempdir().expect("a directory");
        let elsewhere = tempfile::tempdir().expect("a directory");
        let names = |path: &Path, helpers: Value| {
            let mut config: Value =
                serde_json::from_slice(&std::fs::read(path).expect("read")).expect("an agent");
            config["extraAgents"] = helpers;
            std::fs::write(path, config.to_string()).expect("written");
        };
        let (a, b) = (write(dir.path(), "a.json", "alpha"), write(dir.path(), "b.json", "beta"));
        let (c, d) = (write(elsewhere.path(), "c.json", "gamma"), write(elsewhere.path(), "d.json", "delta"));
        names(&a, json!([{"slug": "gamma", "path": c}]));
        names(&c, json!([{"slug": "delta", "path": d}]));
        names(&d, json!([{"slug": "alpha", "path": a}]));
        names(&b, json!([{"slug": "alpha"}]));
        let slugs = async |only: &[&str]| {
            let loaded = load(&args(&[], &[dir.path()], only)).await.expect("loads");
            loaded.into_iter().map(|one| one.agent.slug).collect::<Vec<_>>()
        };
        assert_eq!(slugs(&[]).await, ["alpha", "beta", "gamma", "delta"]);
        assert_eq!(slugs(&["alpha"]).await, ["alpha", "gamma", "delta"]);
        assert_eq!(slugs(&["delta"]).await, ["alpha", "gamma", "delta"], "also one that was only reached");
        assert_eq!(slugs(&["beta"]).await, ["alpha", "beta", "gamma", "delta"]);
        let missing = load(&args(&[&b], &[], &[])).await.expect_err("alpha isn't given");
        assert!(missing.code() == 4 && missing.to_string().contains("no agent \"alpha\""), "{missing}");

        let loaded = load(&args(&[&a], &[], &[])).await.expect("loads");
        let value = descriptor(&loaded[0]);
        assert_eq!(value["helpers"], json!(["gamma"]));
        assert_eq!(value["tools"][0]["name"], "prompt_agent_gamma");
        assert_eq!(value["tools"][0]["disposition"], "runSync");
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
