use super::*;

#[tokio::test]
async fn hooks_are_asked_from_the_outside_in_and_told_from_the_inside_out() {
    let bench = Bench::new().await;
    for name in ["b1", "b2"] {
        bench.hook(
            name,
            &format!(
                r#"w=$(sed 's/.*"what":"\([^"]*\)".*/\1/' <<< "$q"); echo "{name} $w" >> log
                   echo "{{\"action\": \"continue\", \"arguments\": {{\"what\": \"$w-{name}\"}}}}""#
            ),
        );
    }
    bench.hook("a1", r#"echo "a1 $q" >> log; echo '{"action": "annotate", "text": "note"}'"#);
    bench.hook("a2", r#"echo "a2 $q" >> log; echo '{"action": "continue", "result": "rewritten"}'"#);
    let hook = |tag: &str, path: &str| json!({"tag": tag, "hook": {"command": path}});
    let all = [hook("after", "a1"), hook("before", "b1"), hook("before", "b2"), hook("after", "a2")];
    assert_eq!(bench.call(json!(all)).await, (completed("rewritten\nnote"), Vec::new()));
    let log = bench.log();
    assert_eq!(log[..3], ["b1 x", "b2 x-b1", "tool x-b1-b2"]);
    let told = |line: &str, name: &str| -> Value {
        serde_json::from_str(line.strip_prefix(name).expect("its line")).expect("JSON")
    };
    let (a2, a1) = (told(&log[3], "a2 "), told(&log[4], "a1 "));
    assert_eq!(a2["arguments"], json!({"what": "x-b1-b2"}));
    assert_eq!(a2["result"], json!({"type": "text", "content": "got x-b1-b2\n"}));
    // Each is told what it has around it: the arguments as they came in, the result as it came out.
    assert_eq!((&a1["arguments"], &a1["result"]["content"]), (&json!({"what": "x"}), &json!("rewritten")));
    assert_eq!((&a1["status"], a1["duration_ms"].is_u64()), (&json!("completed"), true));
    let (call, session) = (Uuid::from_u128(3).to_string(), Uuid::from_u128(1).to_string());
    for (name, value) in
        [("tool", "bash_echo"), ("agent", "a"), ("tool_call_id", &call), ("session_id", &session)]
    {
        assert_eq!(a1[name], value);
    }
    assert_eq!(log.len(), 5);
}

#[tokio::test]
async fn a_hook_before_may_deny_defer_or_answer_and_the_tool_does_not_run() {
    let bench = Bench::new().await;
    bench.hook("told", r#"echo "told" >> log; echo '{"action": "continue"}'"#);
    let around = |answer: &str| {
        bench.hook("h", &format!("echo '{answer}'"));
        json!([{"tag": "after", "hook": {"command": "told"}}, {"tag": "retries", "count": 3, "backoffMs": 0},
            {"tag": "before", "hook": {"command": "h"}}])
    };
    let denied = around(r#"{"action": "deny", "message": "not today"}"#);
    assert_eq!(bench.call(denied).await, (Reply::Refused("not today".into()), vec![]));
    let deferred = around(r#"{"action": "defer", "reason": "ask Anna"}"#);
    assert_eq!(bench.call(deferred).await, (Reply::Deferred("ask Anna".into()), vec![]));
    let answered = around(r#"{"action": "answer", "result": {"type": "text", "content": "known"}}"#);
    assert_eq!(bench.call(answered).await, (completed("known"), vec![]));
    assert_eq!(bench.log(), ["told", "told"], "of what is deferred nobody is told yet");
}

#[tokio::test]
async fn a_hook_that_fails_denies_before_and_changes_nothing_after() {
    let bench = Bench::new().await;
    bench.hook("exits", "echo '{\"action\": \"continue\"}'; exit 3");
    bench.hook("talks", "echo secret; echo \"$q\"");
    bench.hook("typo", r#"echo '{"action": "continue", "argumnets": {}}'"#);
    bench.hook("hangs", "sleep 1000");
    bench.hook("floods", "head -c 2000000 /dev/zero");
    bench.tool("sick", "exit 1");
    let hook = |tag: &str, hook: &Value| json!([{"tag": tag, "hook": hook, "timeoutSeconds": 1}]);
    for (target, reason) in [
        (json!({"command": "exits"}), "exit code 3"),
        (json!({"command": "talks"}), "no JSON"),
        (json!({"command": "typo"}), "no known action"),
        (json!({"command": "hangs"}), "within 1 seconds"),
        (json!({"command": "floods"}), "2000000 bytes"),
        (json!({"command": "absent"}), "does not exist"),
        (json!({"tool": "bash_sick"}), "the tool failed"),
        (json!({"tool": "bash_none"}), "no such tool"),
    ] {
        let (reply, hooks) = bench.call(hook("before", &target)).await;
        assert_eq!(reply, Reply::Refused(hooks_text().into()), "{target}");
        assert!(
            hooks.len() == 1 && hooks[0].when == "before" && hooks[0].reason.contains(reason),
            "{hooks:?}"
        );
        assert!(!hooks[0].reason.contains("secret") && !hooks[0].reason.contains("what"), "{hooks:?}");
        assert_eq!(bench.log(), Vec::<String>::new(), "{target}: the tool doesn't run");
        let (reply, hooks) = bench.call(hook("after", &target)).await;
        assert_eq!(reply, completed("got x\n"), "{target}");
        assert!(
            hooks.len() == 1 && hooks[0].when == "after" && hooks[0].reason.contains(reason),
            "{hooks:?}"
        );
        fs::remove_file(bench.dir.path().join("log")).expect("the tool ran");
    }
}

fn hooks_text() -> &'static str {
    "denied: the hook that decides about this call gave no usable answer; the call was not run"
}

#[tokio::test]
async fn a_tool_as_a_hook_gets_what_its_schema_takes() {
    let bench = Bench::new().await;
    bench.tool_with(
        "guard",
        &["tool", "arguments", "other"],
        r#"echo "guard $2 $3 $4" >> log; echo '{"action": "continue"}'"#,
    );
    let (reply, hooks) = bench.call(json!([{"tag": "before", "hook": {"tool": "bash_guard"}}])).await;
    assert_eq!((reply, hooks), (completed("got x\n"), vec![]));
    assert_eq!(bench.log(), [r#"guard bash_echo {"what":"x"} "#, "tool x"]);
}

#[tokio::test]
async fn a_hook_has_a_key_of_its_own_and_gets_what_the_model_wrote() {
    let bench = Bench::new().await;
    let print = "echo \"$HOLDFAST_IDEMPOTENCY_KEY $AGENT_SESSION_ID ${DATABASE_URL-none}\" >> log";
    bench.tool("echo", print);
    bench.hook("h", &format!("{print}; echo \"$q\" >> log; echo '{{\"action\": \"continue\"}}'"));
    let hook = json!({"tag": "before", "hook": {"command": "h"}});
    let wrapped = bench.wrapped("bash_echo", json!([hook, hook])).await;
    let reply = carried(&wrapped, "no json").await;
    assert!(failed(&reply).contains("not JSON"), "{reply:?}");
    carried(&wrapped, "{}").await;
    let log = bench.log();
    let session = Uuid::from_u128(1).to_string();
    assert_eq!(log.len(), 9, "{log:?}");
    let key = |line: usize| {
        let [key, of, database] = log[line].split(' ').collect::<Vec<_>>()[..] else { panic!("{log:?}") };
        assert_eq!((of, database), (session.as_str(), "none"));
        key.to_owned()
    };
    let question: Value = serde_json::from_str(&log[1]).expect("JSON");
    assert_eq!(question["arguments"], "no json");
    // Two hooks of a call have two keys, which are the same at every attempt, and none is the call's.
    assert_eq!((key(0), key(2)), (key(4), key(6)));
    assert!(key(0) != key(2) && key(8) == Uuid::from_u128(3).to_string());
    assert!(key(0) != key(8) && key(2) != key(8));
}
