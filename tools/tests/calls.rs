//! What programs are given, and what becomes of what they print.

mod support;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use holdfast_engine::{content::ToolResult, tool::Outcome};
use holdfast_tools::{DescribeError, MAX_MEDIA, MAX_OUTPUT, STDERR_TAIL, Script, describe};
use serde_json::json;
use support::{Bench, arg, context, description, directory, failure, script_text, text, write};

#[tokio::test]
async fn every_mode_and_arity_reaches_the_program() {
    let mut about = description("modes");
    about["args"] = json!([
        arg("first", "string", "single", "positional"),
        arg("spaced", "number", "optional", "dashdashspace"),
        arg("equal", "boolean", "multiple", "dashdashequal"),
        arg("in", "string", "multiple", "stdin"),
        arg("my-token", "string", "optional", "env"),
    ]);
    let body = r#"printf '<%s>' "$@"; echo; echo "token=${MY_TOKEN-unset}"; cat"#;
    let bench = Bench::new(about, body).await;
    let full = json!({"first": "a b\n$(c)", "spaced": 2.5, "equal": [true, false], "in": ["x", "y"], "my-token": "s3"});
    assert_eq!(
        text(bench.call(&full).await),
        "<a b\n$(c)><--spaced><2.5><--equal=true><--equal=false>\ntoken=s3\nx\n\ny"
    );
    assert_eq!(text(bench.call(&json!({"first": ""})).await), "<>\ntoken=unset\n");
}

#[tokio::test]
async fn the_context_is_in_the_environment() {
    let bench = Bench::plain(
        r#"for v in AGENT_SESSION_ID AGENT_CONVERSATION_ID AGENT_TURN_ID AGENT_AGENT_ID AGENT_SESSION_JSON \
            TRACEPARENT HOLDFAST_IDEMPOTENCY_KEY HOLDFAST_IDEMPOTENT; do echo "$v=${!v-unset}"; done"#,
    )
    .await;
    let mut context = context();
    let [session, turn, call, agent] =
        [context.session_id.0, context.turn_id.0, context.call_id.0, context.agent_id]
            .map(|id| id.to_string());
    let ids = format!(
        "AGENT_SESSION_ID={session}\nAGENT_CONVERSATION_ID={session}\nAGENT_TURN_ID={turn}\nAGENT_AGENT_ID={agent}\n"
    );
    let without = format!(
        "{ids}AGENT_SESSION_JSON=unset\nTRACEPARENT=unset\nHOLDFAST_IDEMPOTENCY_KEY={call}\nHOLDFAST_IDEMPOTENT=true\n"
    );
    assert_eq!(text(bench.call_in(&json!({}), &context).await), without);
    context.session_json = Some(r#"{"turns": []}"#.into());
    context.traceparent = Some("00-a-b-01".into());
    context.idempotent = false;
    let with = format!(
        "{ids}AGENT_SESSION_JSON={{\"turns\": []}}\nTRACEPARENT=00-a-b-01\nHOLDFAST_IDEMPOTENCY_KEY={call}\nHOLDFAST_IDEMPOTENT=false\n"
    );
    assert_eq!(text(bench.call_in(&json!({}), &context).await), with);
}

/// Run once more below by [`the_workers_settings_are_withheld`], in an environment with settings.
#[tokio::test]
async fn no_setting_is_in_the_environment() {
    let bench =
        Bench::plain("env | grep -E '^(HOLDFAST_|DATABASE_URL|AGENT_SESSION_JSON|PLAIN)' | sort").await;
    let seen = text(bench.call(&json!({})).await);
    let names: Vec<&str> = seen.lines().filter_map(|line| line.split('=').next()).collect();
    let mut expected = vec!["HOLDFAST_IDEMPOTENCY_KEY", "HOLDFAST_IDEMPOTENT"];
    expected.extend(std::env::var_os("PLAIN").map(|_| "PLAIN"));
    assert_eq!(names, expected);
}

#[test]
fn the_workers_settings_are_withheld() {
    let again = std::process::Command::new(std::env::current_exe().expect("this test's program"))
        .args(["--exact", "no_setting_is_in_the_environment"])
        .envs([
            ("HOLDFAST_DATABASE_URL", "x"),
            ("DATABASE_URL", "x"),
            ("AGENT_SESSION_JSON", "x"),
            ("PLAIN", "x"),
        ])
        .output()
        .expect("it runs");
    let said = String::from_utf8_lossy(&again.stdout);
    assert!(again.status.success() && said.contains("1 passed"), "{said}");
}

#[tokio::test]
async fn misfit_arguments_start_nothing() {
    let mut about = description("strict");
    about["args"] =
        json!([arg("n", "integer", "single", "positional"), arg("s", "string", "optional", "positional")]);
    let bench = Bench::new(about, r#"touch "$(dirname "$0")/started"; echo ran"#).await;
    for (arguments, expected) in [
        (json!({}), "\"n\" is required"),
        (json!({"n": "1"}), "expected integer"),
        (json!({"n": 1, "x": 1}), "\"x\""),
    ] {
        let message = failure(bench.call(&arguments).await);
        assert!(message.contains("arguments of strict") && message.contains(expected), "{message}");
    }
    let nul = failure(bench.call(&json!({"n": 1, "s": "a\u{0}b"})).await);
    assert!(nul.contains("\"s\" contains a NUL"), "{nul}");
    assert!(!bench.file("started").exists());
    assert_eq!(text(bench.call(&json!({"n": 1.0})).await), "ran\n");
    assert!(bench.file("started").exists());
}

#[tokio::test]
async fn arguments_that_no_program_can_get_fail_clearly() {
    let mut about = description("long");
    about["args"] = json!([arg("s", "string", "single", "positional")]);
    let bench = Bench::new(about, "echo ran").await;
    let message = failure(bench.call(&json!({"s": "x".repeat(4 * 1024 * 1024)})).await);
    assert!(message.contains("\"s\" with 4194304 bytes") && message.contains("shorten"), "{message}");
}

#[tokio::test]
async fn a_program_need_not_read_its_input() {
    let mut about = description("deaf");
    about["args"] = json!([arg("s", "string", "single", "stdin")]);
    let bench = Bench::new(about, "echo deaf").await;
    assert_eq!(text(bench.call(&json!({"s": "x".repeat(1 << 20)})).await), "deaf\n");
}

#[tokio::test]
async fn large_input_and_output_flow_at_the_same_time() {
    let mut about = description("echo");
    about["args"] = json!([arg("s", "string", "single", "stdin")]);
    let bench = Bench::new(about, "cat").await;
    let long = "é".repeat(400_000);
    assert!(text(bench.call(&json!({"s": long})).await) == long);
}

#[tokio::test]
async fn emptiness_is_answered_as_the_tool_says() {
    assert_eq!(text(Bench::plain("echo; echo noise >&2").await.call(&json!({})).await), "");
    let mut about = description("empty");
    about["empty-result"] = json!({"tag": "AddMessage", "contents": "nothing found"});
    about["output-media-type"] = json!("image/png");
    let bench = Bench::new(about, "").await;
    assert_eq!(text(bench.call(&json!({})).await), "nothing found");
}

#[tokio::test]
async fn failures_carry_the_code_and_the_last_words() {
    let quiet = failure(Bench::plain("exit 3").await.call(&json!({})).await);
    assert_eq!(quiet, "exit code 3");
    let loud =
        failure(Bench::plain("echo out; echo 'no such city' >&2; exit 4").await.call(&json!({})).await);
    assert_eq!(loud, "exit code 4\nstderr:\nno such city");
    let out = failure(Bench::plain("echo only out; exit 5").await.call(&json!({})).await);
    assert_eq!(out, "exit code 5\nstdout:\nonly out");
    let signal = failure(Bench::plain("kill -SEGV $$").await.call(&json!({})).await);
    assert!(signal.starts_with("ended by signal 11 (SIGSEGV)"), "{signal}");
    let flood = "for i in {1..20000}; do echo \"line $i\"; done >&2; echo last >&2; exit 1";
    let flood = failure(Bench::plain(flood).await.call(&json!({})).await);
    assert!(flood.contains("not shown") && flood.ends_with("line 20000\nlast"), "{flood}");
    assert!(flood.len() < STDERR_TAIL + 200);
}

#[tokio::test]
async fn long_text_is_cut_at_a_character_and_said() {
    let body = format!("printf x; head -c {} /dev/zero | sed 's/\\x00/é/g'", MAX_OUTPUT);
    let cut = text(Bench::plain(&body).await.call(&json!({})).await);
    let total = 1 + 2 * MAX_OUTPUT;
    let kept = MAX_OUTPUT - 1;
    assert!(cut.starts_with("xéé"));
    let note = format!("é\n[output cut: {} more bytes are not shown]", total - kept);
    assert!(cut.ends_with(&note), "{}", &cut[cut.len() - 120..]);
    assert_eq!(cut.len(), kept + note.len() - "é".len());
}

#[tokio::test]
async fn what_is_no_text_is_replaced_and_said() {
    let shown = text(Bench::plain(r"printf 'a\xff\x00b'").await.call(&json!({})).await);
    assert!(shown.starts_with("a\u{FFFD}\u{FFFD}b\n["), "{shown}");
    assert!(shown.contains("1 invalid UTF-8") && shown.contains("1 NUL"), "{shown}");
    let failed = failure(Bench::plain(r"printf 'a\xff\x00b' >&2; exit 1").await.call(&json!({})).await);
    assert_eq!(failed, "exit code 1\nstderr:\na\u{FFFD}\u{FFFD}b");
}

#[tokio::test]
async fn media_are_carried_whole_or_not_at_all() {
    let media = |slug: &str, kind: &str| {
        let mut about = description(slug);
        about["output-media-type"] = json!(kind);
        about
    };
    let bench = Bench::new(media("png", "image/png"), r"printf '\x89PNG\x00\xff\n'").await;
    let Outcome::Completed(ToolResult::Media(image)) = bench.call(&json!({})).await else {
        panic!("no media")
    };
    assert_eq!(image.mime_type, "image/png");
    assert_eq!(STANDARD.decode(image.base64_data).expect("base64"), b"\x89PNG\x00\xff\n");
    let exact = Bench::new(media("max", "application/pdf"), &format!("head -c {MAX_MEDIA} /dev/zero")).await;
    assert!(exact.call(&json!({})).await.succeeded());
    let large = Bench::new(media("big", "video/mp4"), &format!("head -c {} /dev/zero", MAX_MEDIA + 1)).await;
    let message = failure(large.call(&json!({})).await);
    assert!(message.contains(&format!("{} bytes of video/mp4", MAX_MEDIA + 1)), "{message}");
    let plain = Bench::new(media("csv", "text/csv; charset=utf-8"), "echo a,b").await;
    assert_eq!(text(plain.call(&json!({})).await), "a,b\n");
}

#[tokio::test]
async fn json_is_a_value_if_it_is_json() {
    let mut about = description("json");
    about["output-media-type"] = json!("application/json");
    let good = Bench::new(about.clone(), r#"echo '{"a": [1, null]}'"#).await;
    let expected = Outcome::Completed(ToolResult::Json { content: json!({"a": [1, null]}) });
    assert_eq!(good.call(&json!({})).await, expected);
    let bad = text(Bench::new(about, "echo '{a}'").await.call(&json!({})).await);
    assert!(bad.starts_with("{a}\n[") && bad.contains("promised JSON"), "{bad}");
}

#[tokio::test]
async fn programs_that_are_no_tools_say_why() {
    let directory = directory();
    let path = directory.path().join("tool");
    let refused = async |content: &str| {
        write(&path, content);
        describe(&path).await.expect_err("no tool").to_string()
    };
    let message = refused("#!/bin/sh\necho hello").await;
    assert!(message.contains("no JSON object"), "{message}");
    let message = refused("#!/bin/sh\necho broken >&2; exit 9").await;
    assert!(message.contains("exit code 9") && message.contains("broken"), "{message}");
    let message = refused("#!/no/such/interpreter\n").await;
    assert!(message.contains("interpreter"), "{message}");
    let message = refused("\u{1}\u{2}").await;
    assert!(message.contains("#!"), "{message}");
    let message = refused("#!/bin/sh\nyes | head -c 1000000").await;
    assert!(message.contains("1000000 bytes"), "{message}");
    let missing = describe(&directory.path().join("none")).await.expect_err("no file");
    assert!(missing.to_string().contains("does not exist"), "{missing}");
    std::fs::write(directory.path().join("plain"), "x").expect("written");
    let plain = describe(&directory.path().join("plain")).await.expect_err("not executable");
    assert!(
        matches!(plain, DescribeError::Start(_)) && plain.to_string().contains("not executable"),
        "{plain}"
    );
}

#[tokio::test]
async fn a_busy_file_is_waited_for() {
    use std::os::unix::fs::PermissionsExt;
    let directory = directory();
    let path = directory.path().join("tool");
    std::fs::write(&path, script_text(&description("busy"), "echo ran")).expect("written");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("made executable");
    let writer = std::fs::OpenOptions::new().append(true).open(&path).expect("opened");
    let waiting = async {
        tokio::task::yield_now().await;
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        drop(writer);
    };
    let (script, ()) = tokio::join!(Script::load(&path), waiting);
    assert_eq!(script.expect("describes itself").info().slug, "busy");
}
