use serde_json::json;

use super::*;

fn policy(config: &Value) -> Result<Policy, PolicyError> {
    let config: PolicyConfig = serde_json::from_value(config.clone()).expect("policy JSON");
    // What was read is written as it was meant.
    let again = serde_json::to_value(&config).expect("JSON");
    assert_eq!(serde_json::from_value::<PolicyConfig>(again).expect("policy JSON"), config);
    Policy::new(&config)
}

fn valid(config: &Value) -> Policy {
    policy(config).expect("a valid policy")
}

fn tags(disposition: &Disposition) -> Vec<&'static str> {
    disposition.decorators().map(Decorator::tag).collect()
}

#[test]
fn the_first_matching_rule_decides() {
    let policy = valid(&json!({"default": {"tag": "runSync"}, "rules": [
        {"tool": "fetch_b", "disposition": {"tag": "defer", "reason": "exact"}, "deadlineSeconds": 5,
         "onDeadline": {"answer": {"type": "text", "content": "nobody came"}}},
        {"tool": "fetch_*", "disposition": {"tag": "defer", "reason": "glob"}, "onDeadline": "fail"},
        {"tool": "slow", "disposition": {"tag": "runAsync", "attachSeconds": 10}}]}));
    let exact = policy.apply("fetch_b", "");
    assert_eq!(exact.decided_by, "rule:0");
    assert_eq!(exact.deadline_seconds, Some(5));
    assert_eq!(exact.on_deadline, Some(ToolResult::text("nobody came")));
    let glob = policy.apply("fetch_c", "{}");
    assert_eq!(glob.disposition, Disposition::Defer { reason: "glob".into() });
    assert_eq!(glob.on_deadline, None);
    assert_eq!(policy.apply("slow", "").disposition, Disposition::RunAsync { attach_seconds: Some(10) });
    assert_eq!(policy.apply("other", "").decided_by, "default");
}

#[test]
fn an_answer_that_could_not_be_kept_is_refused() {
    let config = |levels: usize| {
        let content = (0..levels).fold(json!(1), |inner, _| json!([inner]));
        let rule = json!({"tool": "sign", "disposition": {"tag": "defer"},
            "onDeadline": {"answer": {"type": "json", "content": content}}});
        Policy::new(&serde_json::from_value(json!({"rules": [rule]})).expect("a policy"))
    };
    assert!(config(100).is_ok());
    let refused = config(101).expect_err("too deep").to_string();
    assert!(refused.ends_with("rule 0: onDeadline must be nested at most 100 levels deep"), "{refused}");
}

#[test]
fn decorators_are_read_from_the_outside_in_and_the_shortest_timeout_wins() {
    let d: Disposition = serde_json::from_value(json!({"tag": "decorate",
        "decorators": [{"tag": "withTimeout", "contents": 30}, {"tag": "withLabel", "contents": "out"}],
        "inner": {"tag": "decorate", "inner": {"tag": "runSync"}, "decorators": [
            {"tag": "timeout", "seconds": 5}, {"tag": "label", "text": "in"}, {"tag": "timeout", "seconds": 60},
            {"tag": "withRetries", "contents": 2}, {"tag": "retries", "count": 9}]}}))
    .expect("a disposition");
    assert_eq!(
        tags(&d),
        ["withTimeout", "withLabel", "timeout", "label", "timeout", "withRetries", "retries"]
    );
    assert_eq!((d.timeout_seconds(), d.retries(), d.label()), (Some(5), 2, Some("in")));
    assert_eq!(d.tag(), "runSync");
}

#[test]
fn all_matching_wrappers_apply_in_their_order_around_the_rule() {
    let policy = valid(&json!({
        "rules": [{"tool": "bash_deploy", "idempotent": true, "disposition": {"tag": "decorate",
            "decorators": [{"tag": "withTimeout", "contents": 9}], "inner": {"tag": "runSync"}}},
            {"tool": "bash_ask", "disposition": {"tag": "defer"}}],
        "wrappers": [
            {"match": {"tool": "*"}, "decorators": [{"tag": "truncate", "maxBytes": 65536}]},
            {"match": {"toolbox": "bash", "args": {"args.env": "prod*"}}, "decorators":
                [{"tag": "before", "hook": {"command": "hooks/ask"}}, {"tag": "after", "hook": {"tool": "bash_audit"}}]},
            {"match": {"tool": "bash_*", "toolbox": "mcp"}, "decorators": [{"tag": "cache"}]},
            {"decorators": [{"tag": "retries", "count": 2}, {"tag": "rateLimit", "perMinute": 6}]}]}));
    let prod = policy.apply("bash_deploy", r#"{"env": "prod-1"}"#);
    let Disposition::Decorate { decorators, inner } = &prod.disposition else { panic!("{prod:?}") };
    let outer: Vec<_> = decorators.iter().map(Decorator::tag).collect();
    assert_eq!(outer, ["truncate", "before", "after", "retries", "rateLimit"]);
    assert_eq!(tags(inner), ["withTimeout"]);
    assert_eq!((prod.decided_by.as_str(), prod.disposition.tag()), ("rule:0", "runSync"));
    // Read again as it is stored.
    let stored = serde_json::to_string(&prod.disposition).expect("JSON");
    assert_eq!(serde_json::from_str::<Disposition>(&stored).expect("a disposition"), prod.disposition);

    let dev = policy.apply("bash_deploy", r#"{"env": "dev"}"#).disposition;
    assert_eq!(tags(&dev), ["truncate", "retries", "rateLimit", "withTimeout"]);
    // Retries are for tools that may run again; predicates aren't for what is no JSON.
    for text in ["env=prod", "[", r#"{"env": 1}"#] {
        assert_eq!(tags(&policy.apply("bash_other", text).disposition), ["truncate", "rateLimit"], "{text}");
    }
    assert_eq!(tags(&policy.apply("mcp_x", "").disposition), ["truncate", "rateLimit"]);
    assert_eq!(tags(&policy.apply("bash_ask", "").disposition), ["truncate", "rateLimit"]);
    assert!(policy.wraps(1, "bash_x") && policy.wraps(1, "bash") && !policy.wraps(1, "bashful"));
    assert!(!policy.wraps(2, "bash_x") && !policy.wraps(2, "mcp_x") && !policy.wraps(4, "bash_x"));
}

#[test]
fn an_approval_is_decided_by_the_arguments() {
    let policy = valid(&json!({
        "rules": [{"tool": "bash_asked", "disposition": {"tag": "defer", "reason": "elsewhere"}},
            {"tool": "bash_own", "disposition": {"tag": "decorate", "inner": {"tag": "runSync"}, "decorators": [
                {"tag": "approve", "when": {"required": ["force"]}, "then": "deny", "message": "never by force"}]}}],
        "wrappers": [
            {"match": {"tool": "bash_*"}, "decorators": [
                {"tag": "approve", "when": {"args.env": "prod*"}, "then": "defer", "reason": "deploys to prod"},
                {"tag": "timeout", "seconds": 5}]},
            {"decorators": [
                {"tag": "approve", "when": {"properties": {"n": {"minimum": 10}}, "required": ["n"]}, "then": "defer"},
                {"tag": "approve", "when": {"args.env": "production"}, "then": "deny"}]}]}));
    let says = |tool: &str, arguments: &str| policy.apply(tool, arguments).disposition;
    let prod = says("bash_x", r#"{"env": "prod-2"}"#);
    let Disposition::Approve { reason, inner } = &prod else { panic!("{prod:?}") };
    assert_eq!((reason.as_str(), tags(inner), inner.tag()), ("deploys to prod", vec!["timeout"], "runSync"));
    assert_eq!((prod.tag(), prod.base(), prod.timeout_seconds()), ("defer", &prod, None));
    let both = says("bash_x", r#"{"env": "prod-2", "n": 10}"#);
    let Disposition::Approve { reason, .. } = &both else { panic!("{both:?}") };
    assert_eq!(reason, "deploys to prod; this call needs an approval");
    // A denial needs no approval, wherever it stands.
    let denied = says("bash_x", r#"{"env": "production"}"#);
    assert_eq!(denied, Disposition::Deny { message: DENIED.into() });
    assert_eq!(denied.tag(), "deny");
    let own = says("bash_own", r#"{"force": true, "env": "prod"}"#);
    assert_eq!(own, Disposition::Deny { message: "never by force".into() });
    assert_eq!(tags(&says("bash_own", "{}")), ["timeout"]);
    let asked = says("bash_asked", r#"{"env": "prod"}"#);
    let Disposition::Approve { inner, .. } = &asked else { panic!("{asked:?}") };
    assert_eq!(inner.base(), &Disposition::Defer { reason: "elsewhere".into() });
    for text in ["prod", "", r#"{"env": "dev", "n": 9}"#] {
        assert_eq!(tags(&says("bash_x", text)), ["timeout"], "{text}");
    }
    assert_eq!(says("other", r#"{"env": "prod"}"#), Disposition::RunSync);
    // Nothing is known of arguments: nothing holds.
    assert_eq!(policy.of_tool("bash_own").disposition.tag(), "runSync");
    for disposition in [prod, both, denied, asked] {
        let stored = serde_json::to_string(&disposition).expect("JSON");
        assert_eq!(serde_json::from_str::<Disposition>(&stored).expect("a disposition"), disposition);
    }
}

#[test]
fn retries_need_idempotence() {
    for decorator in [json!({"tag": "withRetries", "contents": 2}), json!({"tag": "retries", "count": 1})] {
        let with = |idempotent: bool| {
            policy(&json!({"rules": [{"tool": "t", "idempotent": idempotent, "disposition":
                {"tag": "decorate", "decorators": [decorator], "inner": {"tag": "runSync"}}}]}))
        };
        assert!(with(true).is_ok());
        let place = "rule 0".into();
        assert_eq!(with(false).map(|_| ()), Err(PolicyError::RetriesWithoutIdempotence { place }));
    }
}

#[test]
fn a_broken_glob_is_named() {
    let error = policy(&json!({"rules": [{"tool": "a[", "disposition": {"tag": "runSync"}}]})).map(|_| ());
    assert!(matches!(&error, Err(PolicyError::Glob { place, .. }) if place == "rule 0"), "{error:?}");
    let error = policy(&json!({"wrappers": [{"match": {"tool": "a["}, "decorators": []}]})).map(|_| ());
    assert!(matches!(&error, Err(PolicyError::Glob { place, .. }) if place == "wrapper 0"), "{error:?}");
}

#[test]
fn every_number_has_bounds_and_every_fault_a_place() {
    let long = "x".repeat(MAX_PATH + 1);
    let approve = |more: Value| {
        let mut approve = json!({"tag": "approve", "when": {}, "then": "deny"});
        approve.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        approve
    };
    for (decorator, field) in [
        (json!({"tag": "withTimeout", "contents": 0}), "contents must be 1 to 604800"),
        (json!({"tag": "timeout", "seconds": 604_801}), "seconds must be 1 to 604800"),
        (json!({"tag": "withRetries", "contents": 21}), "contents must be 0 to 20"),
        (json!({"tag": "retries", "count": 21}), "count must be 0 to 20"),
        (json!({"tag": "retries", "count": 1, "backoffMs": 60_001}), "backoffMs must be 0 to 60000"),
        (json!({"tag": "withCacheKey", "contents": ""}), "contents must be 1 to 200 bytes"),
        (json!({"tag": "withLabel", "contents": long}), "contents must be 1 to 200 bytes"),
        (json!({"tag": "cache", "ttlSeconds": 0}), "ttlSeconds must be 1 to 604800"),
        (json!({"tag": "cache", "key": long}), "key must be 1 to 200 bytes"),
        (json!({"tag": "label", "text": ""}), "text must be 1 to 200 bytes"),
        (json!({"tag": "truncate", "maxBytes": 255}), "maxBytes must be 256 to 1048576"),
        (json!({"tag": "before", "hook": {"command": ""}}), "hook must be 1 to 4096 bytes"),
        (json!({"tag": "after", "hook": {"tool": long}}), "hook must be 1 to 4096 bytes"),
        (
            json!({"tag": "after", "hook": {"tool": "t"}, "timeoutSeconds": 601}),
            "timeoutSeconds must be 1 to 600",
        ),
        (json!({"tag": "rateLimit", "perMinute": 0}), "perMinute must be 1 to 60000"),
        (json!({"tag": "rateLimit", "perMinute": 1, "burst": 0}), "burst must be 1 to 60000"),
        (approve(json!({"message": ""})), "message must be 1 to 1000 bytes"),
        (approve(json!({"reason": "why"})), "reason must be absent here: the text is \"message\""),
        (
            approve(json!({"then": "defer", "message": "no"})),
            "message must be absent here: the text is \"reason\"",
        ),
        (approve(json!({"when": {"propertys": {}}})), "when: keyword \"propertys\""),
    ] {
        let message = |error: Result<(), PolicyError>| error.expect_err("refused").to_string();
        let rule = json!({"tool": "t", "idempotent": true, "disposition":
            {"tag": "decorate", "decorators": [decorator], "inner": {"tag": "runSync"}}});
        let of_rule = message(policy(&json!({"rules": [rule]})).map(|_| ()));
        let wrappers =
            json!({"wrappers": [{"decorators": []}, {"decorators": [{"tag": "cache"}, decorator]}]});
        let of_wrapper = message(policy(&wrappers).map(|_| ()));
        let tag = decorator["tag"].as_str().expect("a tag");
        assert!(of_rule.contains(&format!("rule 0, decorator 0 ({tag}): {field}")), "{of_rule}");
        assert!(of_wrapper.contains(&format!("wrapper 1, decorator 1 ({tag}): {field}")), "{of_wrapper}");
    }
    let many = vec![json!({"tag": "cache"}); MAX_DECORATORS + 1];
    for (config, word) in [
        (json!({"default": {"tag": "runAsync", "attachSeconds": 86_401}}), "default: attachSeconds"),
        (json!({"default": {"tag": "runIsolated"}}), "\"runIsolated\" is not supported"),
        (json!({"default": {"tag": "deny", "message": "x"}}), "can't be \"deny\""),
        (
            json!({"default": {"tag": "approve", "reason": "x", "inner": {"tag": "runSync"}}}),
            "can't be \"approve\"",
        ),
        (
            json!({"rules": [{"tool": "t", "disposition": {"tag": "defer"}, "deadlineSeconds": 0}]}),
            "rule 0: deadlineSeconds must be 1 to 315360000",
        ),
        (json!({"wrappers": [{"match": {"toolbox": "a*"}, "decorators": []}]}), "wrapper 0: match.toolbox"),
        (
            json!({"wrappers": [{"match": {"args": {"x": 1}}, "decorators": []}]}),
            "wrapper 0: match.args: keyword",
        ),
        (json!({"wrappers": vec![json!({"decorators": []}); MAX_WRAPPERS + 1]}), "wrappers must be 0 to 64"),
        (json!({"wrappers": [{"decorators": many}]}), "decorators must be 0 to 128"),
    ] {
        let message = policy(&config).map(|_| ()).expect_err("refused").to_string();
        assert!(message.contains(word), "{word}: {message}");
    }
}

#[test]
fn a_hook_asks_either_a_program_or_a_tool() {
    for hook in [json!({}), json!({"command": "a", "tool": "b"}), json!("a"), json!({"url": "x"})] {
        let config = json!({"wrappers": [{"decorators": [{"tag": "before", "hook": hook}]}]});
        assert!(serde_json::from_value::<PolicyConfig>(config).is_err(), "{hook}");
    }
}
