mod hooks;

use std::{fs, os::unix::fs::PermissionsExt as _};

use holdfast_engine::{content::ToolResult, policy::Disposition};
use holdfast_store::connect::{ConnectOptions, connect};
use holdfast_tools::{Source, agent_id};
use serde_json::{Value, json};
use uuid::Uuid;

use super::*;

const PATIENCE: Duration = Duration::from_secs(30);

fn disposition(decorators: Value) -> Disposition {
    let inner = json!({"tag": "runSync"});
    serde_json::from_value(json!({"tag": "decorate", "decorators": decorators, "inner": inner}))
        .expect("valid")
}

/// A directory with hooks, and with tools in `tools/`. No database answers.
struct Bench {
    dir: tempfile::TempDir,
    store: Store,
}

impl Bench {
    async fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        fs::create_dir(dir.path().join("tools")).expect("created");
        let options = ConnectOptions {
            hot_connections: 1,
            read_connections: 1,
            wait: Duration::from_secs(1),
            ..ConnectOptions::new("postgres://x@127.0.0.1:9/x", "tests")
        };
        let bench = Self { dir, store: Store::new(connect(options).await.expect("no connection yet"), None) };
        // The tool of most tests: says what it was given, and notes it.
        bench.tool("echo", "echo \"tool $2\" >> log; echo \"got $2\"");
        bench
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.dir.path().join(name);
        fs::write(&path, text).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("executable");
    }

    /// A tool with an optional text argument `what`, which is `$2`.
    fn tool(&self, slug: &str, body: &str) {
        self.tool_with(slug, &["what"], body);
    }

    fn tool_with(&self, slug: &str, arguments: &[&str], body: &str) {
        let args: Vec<Value> = arguments
            .iter()
            .map(|name| {
                json!({"name": name, "description": "", "type": "string", "backing_type": "string",
                    "arity": "optional", "mode": "positional"})
            })
            .collect();
        let about = json!({"slug": slug, "description": "", "args": args});
        self.write(
            &format!("tools/{slug}"),
            &format!(
                "#!/bin/bash\nif [ \"$1\" = describe ]; then cat <<'EOF'\n{about}\nEOF\nexit; fi\n\
                 cd \"$(dirname \"$0\")/..\"\n{body}\n"
            ),
        );
    }

    /// A hook that reads its question into `$q` and runs `body` in the directory.
    fn hook(&self, name: &str, body: &str) {
        self.write(name, &format!("#!/bin/bash\ncd \"$(dirname \"$0\")\"\nq=$(cat)\n{body}\n"));
    }

    fn log(&self) -> Vec<String> {
        let text = fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    async fn wrapped(&self, tool: &str, decorators: Value) -> Wrapped {
        let source = Source::directory(self.dir.path().join("tools"), None, &[]).expect("a source");
        let (toolbox, warnings) = Toolbox::open(vec![source]).await;
        assert_eq!(warnings, Vec::<String>::new());
        Wrapped {
            store: self.store.clone(),
            toolbox: Arc::new(toolbox),
            owner: "o".into(),
            agent: "a".into(),
            dir: self.dir.path().to_owned(),
            tool: tool.into(),
            system: None,
            context: CallContext {
                session_id: Uuid::from_u128(1).into(),
                turn_id: Uuid::from_u128(2).into(),
                call_id: Uuid::from_u128(3).into(),
                agent_id: agent_id("a", "r"),
                idempotent: true,
                session_json: None,
                traceparent: None,
                timeout: None,
            },
            watcher: Arc::new(|_| {}),
            layers: layers(&disposition(decorators), None),
            failed_hooks: Mutex::default(),
        }
    }

    /// A call of `echo` with `{"what": "x"}`, and the hooks that failed.
    async fn call(&self, decorators: Value) -> (Reply, Vec<HookFailed>) {
        let wrapped = self.wrapped("bash_echo", decorators).await;
        let reply = carried(&wrapped, r#"{"what": "x"}"#).await;
        (reply, wrapped.failed_hooks())
    }
}

async fn carried(wrapped: &Wrapped, arguments: &str) -> Reply {
    let calling = wrapped.carry_out(arguments.to_owned(), CancellationToken::new());
    tokio::time::timeout(PATIENCE, Box::pin(calling)).await.expect("the call ends")
}

fn completed(text: &str) -> Reply {
    Reply::Ended(Outcome::Completed(ToolResult::text(text)))
}

fn failed(reply: &Reply) -> &str {
    match reply {
        Reply::Ended(Outcome::Failed(text)) => text,
        other => panic!("no failure: {other:?}"),
    }
}

#[test]
fn layers_follow_the_decorators_and_the_innermost_timeout_is_the_programs() {
    let seconds = Duration::from_secs;
    let made = |decorators: Value, agents: Option<u64>| layers(&disposition(decorators), agents.map(seconds));
    let rate = Rate { per_minute: 6, burst: 6 };
    assert_eq!(
        made(
            json!([{"tag": "rateLimit", "perMinute": 6}, {"tag": "withTimeout", "contents": 9},
                {"tag": "rateLimit", "perMinute": 6}, {"tag": "rateLimit", "perMinute": 6, "burst": 1},
                {"tag": "retries", "count": 2}, {"tag": "withRetries", "contents": 3},
                {"tag": "withCacheKey", "contents": "k"}, {"tag": "timeout", "seconds": 5},
                {"tag": "label", "text": "l"}, {"tag": "truncate", "maxBytes": 256}]),
            Some(60)
        ),
        [
            Layer::Rate(rate),
            Layer::Timeout(seconds(9)),
            Layer::Rate(Rate { burst: 1, ..rate }),
            Layer::Retries { count: 2, backoff: Duration::from_millis(500) },
            Layer::Cache { ttl: seconds(3600), key: Some("k".into()) },
            Layer::ToolTimeout(seconds(5)),
            Layer::Truncate(256),
        ]
    );
    // The agent's timeout is around everything; around nothing that waits it is the program's.
    let cache = Layer::Cache { ttl: seconds(7), key: None };
    assert_eq!(
        made(json!([{"tag": "cache", "ttlSeconds": 7}]), Some(60)),
        [Layer::Timeout(seconds(60)), cache]
    );
    assert_eq!(made(json!([]), Some(60)), [Layer::ToolTimeout(seconds(60))]);
    assert_eq!(made(json!([{"tag": "timeout", "seconds": 90}]), Some(60)), [Layer::ToolTimeout(seconds(90))]);
    assert_eq!(layers(&Disposition::RunSync, None), []);
}

#[test]
fn pauses_double_up_to_a_minute() {
    let millis = |backoff: u64, attempt| pause(Some(Duration::from_millis(backoff)), attempt).as_millis();
    assert_eq!([1, 2, 3, 4].map(|attempt| millis(500, attempt)), [0, 500, 1000, 2000]);
    assert_eq!((millis(500, 9), millis(500, u32::MAX), millis(0, 5)), (60_000, 60_000, 0));
    assert_eq!(pause(None, 2), Duration::from_millis(500));
}

#[test]
fn what_is_denied_or_waits_for_an_approval_is_not_carried_out() {
    let inner = Box::new(Disposition::RunSync);
    assert_eq!(gated(&Disposition::Deny { message: "no".into() }), Some("no".into()));
    let approve = Disposition::Approve { reason: "prod".into(), inner };
    assert!(gated(&approve).is_some_and(|text| text.contains("prod")));
    assert_eq!(gated(&disposition(json!([]))), None);
}

#[tokio::test]
async fn what_fails_is_tried_again_and_each_time_told() {
    let bench = Bench::new().await;
    bench.tool("echo", "echo run >> log; [ $(wc -l < log) -ge 3 ] || { echo sorry >&2; exit 1; }; echo fine");
    let heard = Arc::new(Mutex::new(Vec::new()));
    let mut wrapped =
        bench.wrapped("bash_echo", json!([{"tag": "retries", "count": 5, "backoffMs": 2}])).await;
    let hears = Arc::clone(&heard);
    wrapped.watcher = Arc::new(move |report| {
        let report = serde_json::to_value(report).expect("JSON");
        hears.lock().expect("not poisoned").push(report);
    });
    assert_eq!(carried(&wrapped, "{}").await, completed("fine\n"));
    assert_eq!(bench.log().len(), 3);
    let heard: Vec<Value> = heard.lock().expect("not poisoned").clone();
    let again: Vec<&Value> = heard.iter().filter(|report| report["attempt"].is_u64()).collect();
    assert_eq!(again.len(), 2, "{heard:?}");
    assert_eq!(
        (&again[1]["attempt"], &again[1]["of"], &again[1]["pause_ms"]),
        (&json!(2), &json!(6), &json!(4))
    );
    assert!(heard.iter().any(|report| report["line"] == "fine"), "{heard:?}");
}

#[tokio::test]
async fn attempts_end_when_they_are_used_up_or_can_not_help() {
    let bench = Bench::new().await;
    bench.tool("echo", "echo run >> log; exit 1");
    let retries = |count: u32, ms: u64| json!({"tag": "retries", "count": count, "backoffMs": ms});
    let (reply, _) = bench.call(json!([retries(2, 0)])).await;
    assert!(failed(&reply).contains("exit code 1"));
    assert_eq!(bench.log().len(), 3);
    // Arguments that don't fit never will; nor does a tool appear that isn't there.
    for (tool, arguments) in [("bash_echo", r#"{"nonsense": 1}"#), ("bash_none", "{}")] {
        let wrapped = bench.wrapped(tool, json!([retries(20, 60_000)])).await;
        failed(&carried(&wrapped, arguments).await);
    }
    // A pause that would end after the call's time isn't begun.
    let (reply, _) = bench.call(json!([{"tag": "timeout", "seconds": 50}, retries(3, 60_000)])).await;
    assert!(failed(&reply).contains("exit code 1"));
    assert_eq!(bench.log().len(), 4);
}

#[tokio::test]
async fn the_shorter_timeout_ends_what_is_inside() {
    let bench = Bench::new().await;
    bench.tool("echo", "echo working >&2; sleep 1000");
    bench.hook("hangs", "echo $$ > pid; sleep 1000");
    let timeout = |seconds: u64| json!({"tag": "timeout", "seconds": seconds});
    for decorators in [json!([timeout(60), timeout(1)]), json!([timeout(60), timeout(1), timeout(60)])] {
        let (reply, _) = bench.call(decorators).await;
        assert!(failed(&reply).contains("longer than 1 seconds"), "{reply:?}");
    }
    let (reply, _) = bench.call(json!([timeout(1)])).await;
    assert!(failed(&reply).contains("working"), "the program's own timeout shows what it printed: {reply:?}");
    let hook = json!({"tag": "before", "hook": {"command": "hangs"}});
    let (reply, hooks) = bench.call(json!([timeout(1), hook])).await;
    assert!(failed(&reply).contains("took longer than 1 seconds"), "{reply:?}");
    assert_eq!(hooks, [], "the hook hasn't failed: its call has ended");
    let pid = fs::read_to_string(bench.dir.path().join("pid")).expect("it began");
    assert!(!Path::new("/proc").join(pid.trim()).exists(), "the hook is gone");
}

#[tokio::test]
async fn an_order_ends_a_call_wherever_it_is() {
    let bench = Bench::new().await;
    bench.hook("hangs", "echo $$ > pid; sleep 1000");
    bench.hook("notes", r#"echo "told" >> log; echo '{"action": "continue"}'"#);
    let hangs = json!({"tag": "before", "hook": {"command": "hangs"}});
    let notes = json!({"tag": "after", "hook": {"command": "notes"}});
    let wrapped = bench.wrapped("bash_echo", json!([notes, {"tag": "timeout", "seconds": 60}, hangs])).await;
    let cancel = CancellationToken::new();
    let begun = async {
        let mut tick = tokio::time::interval(Duration::from_millis(5));
        while !fs::read_to_string(bench.dir.path().join("pid")).is_ok_and(|text| text.ends_with('\n')) {
            tick.tick().await;
        }
        cancel.cancel();
    };
    let calling = wrapped.carry_out("{}".to_owned(), cancel.clone());
    let both = Box::pin(async { tokio::join!(calling, begun).0 });
    let reply = tokio::time::timeout(PATIENCE, both).await.expect("it ends");
    assert!(matches!(reply, Reply::Ended(Outcome::Cancelled(_))), "{reply:?}");
    assert_eq!((bench.log(), wrapped.failed_hooks()), (vec![], vec![]));
}

#[tokio::test]
async fn while_the_database_is_away_nothing_is_remembered_and_no_turn_is_had() {
    let bench = Bench::new().await;
    for _ in 0..2 {
        assert_eq!(bench.call(json!([{"tag": "cache"}])).await.0, completed("got x\n"));
    }
    assert_eq!(bench.log().len(), 2);
    let rate = json!({"tag": "rateLimit", "perMinute": 60_000});
    let (reply, _) = bench.call(json!([{"tag": "timeout", "seconds": 1}, rate])).await;
    let told = match &reply {
        Reply::Refused(text) | Reply::Ended(Outcome::Failed(text)) => text,
        other => panic!("{other:?}"),
    };
    assert!(told.contains("rate limit") || told.contains("longer than 1 seconds"), "{told}");
    assert_eq!(bench.log().len(), 2, "the tool didn't run");
}

#[tokio::test]
async fn results_are_cut_where_the_layer_stands() {
    let bench = Bench::new().await;
    bench.tool("echo", "head -c 1000 /dev/zero | tr '\\0' x");
    bench.hook("notes", r#"echo "${#q}" >> log; echo '{"action": "annotate", "text": "seen"}'"#);
    let cut = json!({"tag": "truncate", "maxBytes": 300});
    let notes = json!({"tag": "after", "hook": {"command": "notes"}});
    let texts = async |decorators: Value| match bench.call(decorators).await.0 {
        Reply::Ended(Outcome::Completed(ToolResult::Text { content })) => content,
        other => panic!("{other:?}"),
    };
    let (inside, outside) = (texts(json!([notes, cut])).await, texts(json!([cut, notes])).await);
    assert!(inside.len() <= 305 && inside.ends_with("not shown]\nseen"), "{inside}");
    assert!(outside.len() <= 300 && outside.ends_with("not shown]"), "{outside}");
    let lengths: Vec<usize> = bench.log().iter().map(|line| line.parse().expect("a length")).collect();
    assert!(lengths[0] < 700 && lengths[1] > 1000, "{lengths:?}");
}

#[tokio::test]
async fn a_result_is_known_by_its_tool_or_name_and_by_all_arguments() {
    let bench = Bench::new().await;
    let mut call = bench.wrapped("bash_echo", json!([])).await;
    let arguments = r#"{"a": 1, "b": [2]}"#;
    let own = call.key(None, arguments);
    assert!(own.is_some());
    assert_eq!(call.key(None, r#" {"b":[2],"a":1}"#), own);
    let named = call.key(Some("n"), arguments);
    for other in
        [call.key(None, r#"{"a": 1, "b": [3]}"#), call.key(None, "{}"), call.key(Some("m"), arguments)]
    {
        assert!(other.is_some() && other != own && other != named);
    }
    assert_eq!((call.key(None, "{"), call.key(Some("n"), "x")), (None, None));
    // A name is shared; without one each agent and each tool has its own.
    call.agent = "b".to_owned();
    let of_agent = call.key(None, arguments);
    call.tool = "bash_other".to_owned();
    let of_tool = call.key(None, arguments);
    assert!(own != named && own != of_agent && of_agent != of_tool);
    assert_eq!(call.key(Some("n"), arguments), named);
}
