//! However a call ends, nothing of it stays behind.

mod support;

use std::{
    env, fs,
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Child, ChildStdout, Command, Stdio},
    sync::Mutex,
    time::{Duration, Instant},
};

use holdfast_engine::tool::Outcome;
use holdfast_tools::{MARKS_VARIABLE, Progress, Stream, end_marked, marks_for_child};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use support::{Bench, PATIENCE, context, failure, gone, pid, text};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// Starts a descendant that would live on and writes down its id.
const DESCENDANT: &str = r#"cd "$(dirname "$0")"; sleep 1000 & echo $! > pid; mv pid child;"#;

/// Calls and cancels as soon as the program prints a line.
async fn cancelled_when_ready(bench: &Bench) -> Outcome {
    let cancel = CancellationToken::new();
    let ready = |_: Progress| cancel.cancel();
    let context = context();
    let call = bench.script.call("{}", &context, &cancel, Some(&ready));
    tokio::time::timeout(PATIENCE, Box::pin(call)).await.expect("the call ends")
}

#[tokio::test]
async fn a_timeout_ends_descendants_too() {
    let bench = Bench::plain(&format!("{DESCENDANT} echo waiting >&2; wait")).await;
    let mut context = context();
    context.timeout = Some(Duration::from_millis(1500));
    let message = failure(bench.call_in(&json!({}), &context).await);
    assert!(message.contains("longer than 1.5 seconds") && message.contains("waiting"), "{message}");
    gone(pid(&bench.file("child"))).await;
}

#[tokio::test]
async fn cancelling_ends_descendants_too() {
    let bench = Bench::plain(&format!("{DESCENDANT} echo ready; wait")).await;
    assert!(matches!(cancelled_when_ready(&bench).await, Outcome::Cancelled(_)));
    gone(pid(&bench.file("child"))).await;
}

#[tokio::test]
async fn a_cancelled_call_does_not_start() {
    let bench = Bench::plain(r#"touch "$(dirname "$0")/started""#).await;
    let cancel = CancellationToken::new();
    cancel.cancel();
    let outcome = bench.script.call("", &context(), &cancel, None).await;
    assert!(matches!(outcome, Outcome::Cancelled(_)), "{outcome:?}");
    assert!(!bench.file("started").exists());
}

#[tokio::test]
async fn who_ignores_sigterm_is_killed() {
    let bench = Bench::plain(&format!("trap '' TERM; {DESCENDANT} echo ready; while :; do wait; done")).await;
    let before = Instant::now();
    assert!(matches!(cancelled_when_ready(&bench).await, Outcome::Cancelled(_)));
    assert!(before.elapsed() < PATIENCE);
    gone(pid(&bench.file("child"))).await;
}

#[tokio::test]
async fn who_heeds_sigterm_may_clean_up() {
    let body =
        r#"cd "$(dirname "$0")"; trap 'echo clean > left; exit 0' TERM; sleep 1000 & echo ready; wait"#;
    let mut bench = Bench::plain(body).await;
    bench.script = bench.script.with_stop_time(PATIENCE);
    let before = Instant::now();
    assert!(matches!(cancelled_when_ready(&bench).await, Outcome::Cancelled(_)));
    assert!(before.elapsed() < PATIENCE, "the stop time isn't waited out");
    assert_eq!(fs::read_to_string(bench.file("left")).expect("cleaned up"), "clean\n");
}

#[tokio::test]
async fn dropping_the_call_ends_everything() {
    let bench = Bench::plain(&format!("trap '' TERM; {DESCENDANT} echo ready; while :; do wait; done")).await;
    let ready = Notify::new();
    let tell = |_: Progress| ready.notify_one();
    let (context, cancel) = (context(), CancellationToken::new());
    tokio::select! {
        outcome = bench.script.call("{}", &context, &cancel, Some(&tell)) => panic!("it ended: {outcome:?}"),
        () = ready.notified() => {}
    }
    gone(pid(&bench.file("child"))).await;
}

#[tokio::test]
async fn a_descendant_that_holds_the_output_delays_nothing() {
    let bench = Bench::plain(&format!("{DESCENDANT} echo done")).await;
    assert_eq!(text(bench.call(&json!({})).await), "done\n");
    gone(pid(&bench.file("child"))).await;
}

/// Starts a daemon: a child of a child that has gone, in a session of its own, with `how` before it, which lives on
/// and notes its id.
fn daemon(how: &str) -> String {
    format!(
        r#"cd "$(dirname "$0")"; {how} setsid bash -c 'trap "" TERM HUP; (echo $BASHPID > pid; mv pid child; exec sleep 1000) & exit' </dev/null >/dev/null 2>&1 &
        until [ -e child ]; do sleep 0.01; done;"#
    )
}

#[tokio::test]
async fn a_descendant_that_left_the_group_ends_with_the_call() {
    let body = r#"cd "$(dirname "$0")"; setsid sleep 1000 & echo $! > child; echo done"#;
    let bench = Bench::plain(body).await;
    assert_eq!(text(bench.call(&json!({})).await), "done\n");
    gone(pid(&bench.file("child"))).await;
}

#[tokio::test]
async fn a_daemon_ends_with_the_call() {
    let bench = Bench::plain(&format!("{} echo done", daemon(""))).await;
    assert_eq!(text(bench.call(&json!({})).await), "done\n");
    gone(pid(&bench.file("child"))).await;
}

#[tokio::test]
async fn a_daemon_ends_with_a_call_that_is_dropped() {
    let bench = Bench::plain(&format!("{} echo ready; sleep 1000", daemon(""))).await;
    let ready = Notify::new();
    let tell = |_: Progress| ready.notify_one();
    let (context, cancel) = (context(), CancellationToken::new());
    tokio::select! {
        outcome = bench.script.call("{}", &context, &cancel, Some(&tell)) => panic!("it ended: {outcome:?}"),
        () = ready.notified() => {}
    }
    gone(pid(&bench.file("child"))).await;
}

#[tokio::test]
async fn a_daemon_without_an_environment_ends_when_no_call_can_have_started_it() {
    let bench = Bench::plain(&format!("{} echo done", daemon("env -i PATH=\"$PATH\""))).await;
    assert_eq!(text(bench.call(&json!({})).await), "done\n");
    gone(pid(&bench.file("child"))).await;
}

/// Starts a process of this test's own, no tool's, and reads the first line that it prints.
fn stranger(script: &str) -> (Child, BufReader<ChildStdout>, String) {
    let mut command = Command::new("setsid");
    command.args(["bash", "-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("started");
    let mut says = BufReader::new(child.stdout.take().expect("a pipe"));
    let line = line(&mut says);
    (child, says, line)
}

fn line(says: &mut impl BufRead) -> String {
    let mut line = String::new();
    says.read_line(&mut line).expect("a line");
    line.trim().to_owned()
}

fn kill(pid: i32) {
    kill_process(Pid::from_raw(pid).expect("an id"), Signal::KILL).expect("it lived");
}

fn there(pid: i32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

/// Polls for something that takes no longer than `limit`.
async fn until(limit: Duration, what: &str, condition: impl Fn() -> bool) {
    let waited = tokio::time::timeout(limit, async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    waited.await.unwrap_or_else(|_| panic!("{what}"));
}

/// Leaves a process without a mark and a parent, in a session of its own, and prints its id.
const NEWCOMER: &str = "setsid sleep 1000 </dev/null >/dev/null 2>&1 & echo $!";

#[tokio::test]
async fn who_was_there_before_any_tool_is_left_alone_with_all_its_own() {
    let (mut child, mut says, ready) = stranger(&format!("echo ready; read; {NEWCOMER}"));
    assert_eq!(ready, "ready");
    let bench = Bench::plain("echo done").await;
    assert_eq!(text(bench.call(&json!({})).await), "done\n");
    assert!(child.try_wait().expect("its status").is_none(), "it lives");
    writeln!(child.stdin.take().expect("a pipe")).expect("told");
    let left: i32 = line(&mut says).parse().expect("an id");
    assert!(child.wait().expect("its status").success());
    assert_eq!(text(bench.call(&json!({})).await), "done\n");
    kill(left);
}

/// Runs one of these tests in a process of its own, which `program` starts.
fn again(program: &[&str], test: &str) -> Command {
    let this = env::current_exe().expect("this program");
    let mut command = match program {
        [] => Command::new(this),
        [first, others @ ..] => {
            let mut command = Command::new(first);
            command.args(others).arg(this);
            command
        }
    };
    command.args(["--exact", test, "--nocapture"]).stdout(Stdio::null());
    command
}

#[tokio::test]
async fn the_first_process_of_a_container_kills_no_stranger() {
    const NAMESPACE: [&str; 3] = ["unshare", "-Urpf", "--mount-proc"];
    if std::process::id() != 1 {
        let may = Command::new(NAMESPACE[0]).args(&NAMESPACE[1..]).arg("true").status();
        // Not everybody may make a namespace.
        if may.is_ok_and(|status| status.success()) {
            let mut inside = again(&NAMESPACE, "the_first_process_of_a_container_kills_no_stranger");
            assert!(inside.status().expect("started").success(), "what it says is above");
        }
        return;
    }
    let bench = Bench::plain(&format!("{} echo done", daemon(""))).await;
    let (mut child, _says, newcomer) = stranger(NEWCOMER);
    assert!(child.wait().expect("its status").success());
    assert_eq!(text(bench.call(&json!({})).await), "done\n");
    gone(pid(&bench.file("child"))).await;
    kill(newcomer.parse().expect("an id"));
}

#[tokio::test]
async fn who_dies_later_is_reaped_without_another_call() {
    // Without a mark, in a group of its own, but in this session: the call leaves it.
    let body = r#"cd "$(dirname "$0")"; env -i PATH="$PATH" bash -c 'set -m; sleep 1000 </dev/null >/dev/null 2>&1 & echo $! > child'; echo done"#;
    let bench = Bench::plain(body).await;
    assert_eq!(text(bench.call(&json!({})).await), "done\n");
    let left = pid(&bench.file("child"));
    kill(left);
    until(PATIENCE * 3, "it is reaped", || !there(left)).await;
}

#[tokio::test]
async fn a_child_of_this_process_that_nobody_has_waited_for_yet_keeps_its_status() {
    let mut child = Command::new("sh").args(["-c", "exit 7"]).spawn().expect("started");
    let stat = format!("/proc/{}/stat", child.id());
    until(PATIENCE, "it ends", || fs::read_to_string(&stat).is_ok_and(|stat| stat.contains(") Z "))).await;
    let bench = Bench::plain("echo done").await;
    // Longer than it takes to take a dead child for an orphan.
    let seen = Instant::now();
    until(PATIENCE, "time goes by", || seen.elapsed() > Duration::from_secs(6)).await;
    assert_eq!(text(bench.call(&json!({})).await), "done\n");
    assert_eq!(child.wait().expect("its status").code(), Some(7));
}

#[tokio::test]
async fn what_the_tools_of_a_killed_process_left_is_ended_by_its_marks() {
    const TEST: &str = "what_the_tools_of_a_killed_process_left_is_ended_by_its_marks";
    if env::var_os(MARKS_VARIABLE).is_some() {
        let body = format!(
            r#"cd "$NOTES"; echo $$ > leader; {} exec sleep 1000"#,
            daemon("").replace("$(dirname \"$0\")", "$NOTES")
        );
        let _ = Bench::plain(&body).await.call(&json!({})).await;
        return;
    }
    let notes = support::directory();
    let (marks, others) = (marks_for_child(), marks_for_child());
    let mut child = again(&[], TEST)
        .envs([(MARKS_VARIABLE, marks.as_str())])
        .envs([("NOTES", notes.path()), ("TMPDIR", notes.path())])
        .spawn()
        .expect("started");
    let daemon = notes.path().join("child");
    until(PATIENCE, "the tool starts", || daemon.exists()).await;
    let left = [pid(&notes.path().join("leader")), pid(&daemon)];
    child.kill().expect("it lived");
    child.wait().expect("its status");
    end_marked(&others).await;
    end_marked("").await;
    assert!(there(left[0]), "other marks");
    end_marked(&marks).await;
    for pid in left {
        assert!(!there(pid), "killed and reaped");
    }
}

#[tokio::test]
async fn the_daemon_of_a_call_that_goes_on_is_left_alone() {
    let going = Bench::plain(&format!(
        "{} echo ready; until [ -e end ]; do sleep 0.01; done; kill -0 $(cat child) && echo lives",
        daemon("")
    ))
    .await;
    let other = Bench::plain(&format!("{} echo done", daemon(""))).await;
    let ready = Notify::new();
    let tell = |_: Progress| ready.notify_one();
    let (context, cancel) = (context(), CancellationToken::new());
    let others = async {
        ready.notified().await;
        assert_eq!(text(other.call(&json!({})).await), "done\n");
        gone(pid(&other.file("child"))).await;
        fs::write(going.file("end"), "").expect("written");
    };
    let (outcome, ()) = tokio::join!(going.script.call("{}", &context, &cancel, Some(&tell)), others);
    assert_eq!(text(outcome), "ready\nlives\n");
    gone(pid(&going.file("child"))).await;
}

#[tokio::test]
async fn a_storm_of_processes_ends_with_the_call() {
    // Each is a session of its own, and starts the next two until there are a few hundred.
    let storm = r#"cd "$(dirname "$0")"
cat > storm.sh <<'STORM'
echo $$ >> pids
[ "$1" -gt 0 ] && for i in 1 2; do setsid bash storm.sh $(($1 - 1)) </dev/null >/dev/null 2>&1 & done
exec sleep 1000
STORM
bash storm.sh 6 & while [ "$(wc -l < pids 2>/dev/null || echo 0)" -lt 60 ]; do sleep 0.01; done; echo done"#;
    let bench = Bench::plain(storm).await;
    assert_eq!(text(bench.call(&json!({})).await), "done\n");
    let pids = fs::read_to_string(bench.file("pids")).expect("they noted their ids");
    for id in pids.lines() {
        gone(id.parse().expect("an id")).await;
    }
}

#[tokio::test]
async fn who_closes_its_output_and_goes_on_is_waited_for() {
    let bench = Bench::plain("echo said; exec >&- 2>&-; sleep 0.5; touch \"$(dirname \"$0\")/later\"").await;
    assert_eq!(text(bench.call(&json!({})).await), "said\n");
    assert!(bench.file("later").exists(), "it had its time");
    let endless = Bench::plain(&format!("{DESCENDANT} exec >&- 2>&-; while :; do wait; done")).await;
    let mut context = context();
    context.timeout = Some(Duration::from_millis(700));
    let message = failure(endless.call_in(&json!({}), &context).await);
    assert!(message.contains("longer than"), "{message}");
    gone(pid(&endless.file("child"))).await;
}

#[tokio::test]
async fn who_never_reads_its_input_holds_up_nothing() {
    let description = json!({"slug": "deaf", "description": "Hears nothing.", "args": [
        {"name": "text", "description": "", "type": "string", "backing_type": "string", "arity": "single", "mode": "stdin"}]});
    let bench = Bench::new(description, "echo heard nothing").await;
    let text_in = "x".repeat(4 << 20);
    assert_eq!(text(bench.call(&json!({"text": text_in})).await), "heard nothing\n");
}

#[tokio::test]
async fn a_quiet_descendant_ends_with_the_call() {
    let body = r#"cd "$(dirname "$0")"; sleep 1000 </dev/null >/dev/null 2>&1 & echo $! > child; echo done"#;
    let bench = Bench::plain(body).await;
    assert_eq!(text(bench.call(&json!({})).await), "done\n");
    gone(pid(&bench.file("child"))).await;
}

#[tokio::test]
async fn endless_output_is_read_on_and_bounded() {
    let bench = Bench::plain("yes >&2 & yes").await;
    let mut context = context();
    context.timeout = Some(Duration::from_millis(500));
    let message = failure(bench.call_in(&json!({}), &context).await);
    assert!(message.contains("not shown") && message.len() < 10_000, "{}", message.len());
}

#[tokio::test]
async fn progress_tells_the_newest_lines_now_and_then() {
    let told = Mutex::new(Vec::new());
    let tell = |progress: Progress| told.lock().expect("not poisoned").push(progress);
    let bench = Bench::plain("for i in {1..5000}; do echo line $i; done; echo oops >&2").await;
    let outcome = bench.script.call("", &context(), &CancellationToken::new(), Some(&tell)).await;
    assert!(outcome.succeeded());
    let told = told.into_inner().expect("not poisoned");
    let out: Vec<_> = told.iter().filter(|progress| progress.stream == Stream::Stdout).collect();
    assert!(out.len() < 100, "{} reports", out.len());
    let last = out.last().expect("a report");
    assert_eq!((last.line.as_str(), last.lines), ("line 5000", 5000));
    assert_eq!(last.bytes, text(outcome).len() as u64);
    assert!(told.iter().any(|progress| progress.stream == Stream::Stderr && progress.line == "oops"));
}
