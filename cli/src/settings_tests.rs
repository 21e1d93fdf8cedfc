use std::collections::HashMap;

use clap::FromArgMatches as _;

use super::*;
use crate::args::{Command as Do, Credential};

fn file(text: &str) -> Result<SettingsFile, Failure> {
    SettingsFile::parse("/etc/hold/holdfast.toml".into(), text)
}

fn parse(line: &[&str], variables: &[(&str, &str)], toml: &str) -> Result<Cli, Failure> {
    let variables: HashMap<&str, &str> = variables.iter().copied().collect();
    let variable = |name: &str| variables.get(name).map(OsString::from);
    let sources = Sources { variable: &variable, file: Some(file(toml)?) };
    let command = layered(Cli::command(), &sources)?;
    let matches = command.try_get_matches_from(std::iter::once("holdfast").chain(line.iter().copied()));
    let matches = matches.map_err(|error| Failure::Usage(error.to_string()))?;
    Cli::from_arg_matches(&matches).map_err(|error| Failure::Usage(error.to_string()))
}

fn serve(line: &[&str], variables: &[(&str, &str)], toml: &str) -> crate::args::ServeNode {
    let line: Vec<&str> = std::iter::once("serve").chain(line.iter().copied()).collect();
    match parse(&line, variables, toml).expect("parses").command {
        Do::Serve(node) => *node,
        other => panic!("{other:?}"),
    }
}

#[test]
fn flags_win_then_the_environment_then_the_file() {
    let (env, toml) = ([("HOLDFAST_SLOTS", "20")], "slots = 10");
    assert_eq!(serve(&[], &[], "").worker.slots, 256);
    assert_eq!(serve(&[], &[], toml).worker.slots, 10);
    assert_eq!(serve(&[], &env, toml).worker.slots, 20);
    assert_eq!(serve(&["--slots", "30"], &env, toml).worker.slots, 30);
    assert_eq!(serve(&[], &[("HOLDFAST_SLOTS", "")], toml).worker.slots, 10, "empty is unset");
}

#[test]
fn how_long_things_are_kept_is_said_once_for_schedulers_and_for_the_report() {
    let (env, toml) = ([("HOLDFAST_RETIRE_AFTER_DAYS", "90")], "keep-events-days = 3\narchive = true");
    let kept = serve(&[], &env, toml).retention;
    assert_eq!((kept.keep_events_days, kept.retire_after_days, kept.archive), (3, 90, true));
    let Do::Status(status) = parse(&["status"], &env, toml).expect("parses").command else {
        panic!("a status")
    };
    assert_eq!((status.keep_events_days, status.retire_after_days, status.keep_archives_days), (3, 90, 0));
}

#[test]
fn lists_switches_and_paths_are_read_from_each_source() {
    let toml =
        "agent-file = [\"a.json\", \"/b.json\"]\nallow-anonymous = true\nadmin-owners = [\"x\", \"y\"]";
    let node = serve(&[], &[], toml);
    let expected: [PathBuf; 2] = ["/etc/hold/a.json".into(), "/b.json".into()];
    assert_eq!(node.agents.agent_file, expected, "relative to the file");
    assert!(node.api.allow_anonymous);
    assert_eq!(node.api.admin_owners, ["x", "y"]);

    let env = [
        ("HOLDFAST_AGENT_FILE", "c,1.json:d.json"),
        ("HOLDFAST_ALLOW_ANONYMOUS", "off"),
        ("HOLDFAST_ADMIN_OWNERS", "z,w"),
        ("HOLDFAST_LOG_FORMAT", "text"),
    ];
    let node = serve(&[], &env, toml);
    let expected: [PathBuf; 2] = ["c,1.json".into(), "d.json".into()];
    assert_eq!(node.agents.agent_file, expected);
    assert!(!node.api.allow_anonymous);
    assert_eq!(node.api.admin_owners, ["z", "w"]);
    let cli = parse(&["serve"], &env, "").expect("parses");
    assert_eq!(cli.log_format, crate::logs::Format::Text);
    let node = serve(&["--agent-file", "e.json"], &env, toml);
    assert_eq!(node.agents.agent_file, [PathBuf::from("e.json")], "a flag replaces the list");
}

#[test]
fn database_url_is_part_of_the_environment() {
    let toml = "database-url = \"postgres://file\"";
    let url = |variables: &[(&str, &str)]| serve(&[], variables, toml).database.database_url;
    assert_eq!(url(&[]).as_deref(), Some("postgres://file"));
    assert_eq!(url(&[("DATABASE_URL", "postgres://plain")]).as_deref(), Some("postgres://plain"));
    let both = [("DATABASE_URL", "postgres://plain"), ("HOLDFAST_DATABASE_URL", "postgres://own")];
    assert_eq!(url(&both).as_deref(), Some("postgres://own"));
}

#[test]
fn what_is_wrong_outside_the_command_line_is_a_configuration_error_that_says_where() {
    let message = |variables: &[(&str, &str)], toml: &str| match parse(&["serve"], variables, toml) {
        Err(failure @ Failure::Config(_)) => failure.to_string(),
        other => panic!("{other:?}"),
    };
    let unknown = message(&[], "slot = 1");
    assert!(unknown.contains("/etc/hold/holdfast.toml: unknown key `slot`"), "{unknown}");
    assert!(message(&[], "json = true").contains("unknown key"));
    assert!(message(&[], "bind = ").contains("holdfast.toml"));
    assert!(message(&[], "slots = 0").contains("`slots`"));
    assert!(message(&[], "slots = [1, 2]").contains("one value"));
    assert!(message(&[], "[slots]\nx = 1").contains("table"));
    assert!(message(&[("HOLDFAST_BIND", "nowhere")], "").starts_with("HOLDFAST_BIND: "));
    assert!(message(&[("HOLDFAST_NO_MIGRATE", "perhaps")], "").contains("HOLDFAST_NO_MIGRATE"));
}

#[test]
fn other_commands_flags_of_the_same_name_are_left_alone() {
    let env = [("HOLDFAST_BIND", "127.0.0.1:1"), ("HOLDFAST_AGENT", "a"), ("HOLDFAST_SERVER", "http://s")];
    match parse(&["scripted-model", "--script", "s"], &env, "").expect("parses").command {
        Do::ScriptedModel(model) => assert_eq!(model.bind.port(), 8081),
        other => panic!("{other:?}"),
    }
    match parse(&["session", "list"], &env, "").expect("parses").command {
        Do::Session(session) => {
            assert_eq!(session.client.server, "http://s");
            assert!(
                matches!(session.command, crate::args::SessionCommand::List(list) if list.agent.is_none())
            );
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn no_flag_takes_the_setting_of_another() {
    fn look(command: &Command, flags: &[Arg]) {
        for argument in command.get_arguments() {
            if let Some(flag) = flags.iter().find(|flag| flag.get_id() == argument.get_id()) {
                assert_eq!(argument.get_long(), flag.get_long(), "{} {}", command.get_name(), flag.get_id());
            }
        }
        command.get_subcommands().for_each(|inner| look(inner, flags));
    }
    look(&Cli::command(), &configurable());

    let env = [("HOLDFAST_LABELS", "gpu")];
    let start = &["session", "start", "--agent", "a", "--label", "team=a=b"];
    match parse(start, &env, "labels = [\"docker\"]").expect("parses").command {
        Do::Session(session) => match session.command {
            crate::args::SessionCommand::Start(start) => {
                assert_eq!(start.label, [("team".to_owned(), "a=b".to_owned())]);
            }
            other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    }
    assert_eq!(serve(&[], &env, "").worker.labels, ["gpu"]);
}

#[test]
fn the_strongest_source_says_who_the_caller_is() {
    let credential = |line: &[&str], variables: &[(&str, &str)], toml: &str| {
        let line: Vec<&str> = std::iter::once("session").chain(line.iter().copied()).collect();
        parse(&line, variables, toml).map(|cli| match cli.command {
            Do::Session(session) => session.client.credential,
            other => panic!("{other:?}"),
        })
    };
    let token = |text: &str| Ok(Credential::Token(text.into()));
    let file = |path: &str| Ok(Credential::File(path.into()));
    let env = [("HOLDFAST_TOKEN", "e")];
    assert_eq!(credential(&["list"], &[], ""), Ok(Credential::None));
    assert_eq!(credential(&["list"], &env, "token-file = \"f\""), token("e"));
    assert_eq!(credential(&["list", "--token-file", "g"], &env, "token = \"t\""), file("g"));
    assert_eq!(credential(&["--token-file", "g", "list"], &env, ""), file("g"));
    assert_eq!(credential(&["list", "--token", "u"], &[("HOLDFAST_TOKEN_FILE", "g")], ""), token("u"));
    assert_eq!(credential(&["list"], &[("HOLDFAST_TOKEN_FILE", "g")], "token = \"t\""), file("g"));
    for both in [
        &["list", "--token", "t", "--token-file", "f"][..],
        &["--token", "t", "list", "--token-file", "f"],
        &["--token-file", "f", "list", "--token", "t"],
    ] {
        assert_eq!(credential(both, &env, "").expect_err("refused").code(), 2, "{both:?}");
    }
}

#[test]
fn the_nearest_file_upward_is_found() {
    let dir = tempfile::tempdir().expect("a directory");
    let deep = dir.path().join("a/b");
    std::fs::create_dir_all(&deep).expect("created");
    std::fs::write(dir.path().join(FILE), "slots = 1").expect("written");
    std::fs::write(dir.path().join("a").join(FILE), "slots = 2").expect("written");
    let found = SettingsFile::find(&deep).expect("readable").expect("there");
    assert_eq!(found.get("slots", false), Ok(Some(vec!["2".to_owned()])));
}

#[test]
fn flags_of_later_work_are_wrong_usage() {
    let flags = [
        "--no-ui",
        "--set",
        "--set-json",
        "--pin",
        "--pin-json",
        "--params-file",
        "--secret-key-file",
        "--secret-store",
        "--isolate-tools",
        "--owner-api-keys",
        "--require-owner-keys",
        "--jwt-jwks",
        "--jwt-issuer",
        "--jwt-audience",
        "--jwt-owner-claim",
    ];
    for flag in flags {
        let failure = parse(&["serve", flag, "x"], &[], "").expect_err("not offered");
        assert_eq!(failure.code(), 2, "{flag}");
    }
    assert_eq!(parse(&["session", "fork"], &[], "").expect_err("not offered").code(), 2);
    let fork = ["session", "start", "--agent", "a", "--fork", "x"];
    assert_eq!(parse(&fork, &[], "").expect_err("not offered").code(), 2);
}

#[test]
fn the_command_line_is_sound() {
    Cli::command().debug_assert();
}

#[test]
fn every_command_is_read_from_its_line() {
    const ID: &str = "01a22d2c-31b9-709a-b42b-ae7054a40db6";
    let lines: &[&[&str]] = &[
        &["serve", "--slots", "1", "--bind", "127.0.0.1:0", "--metrics-bind", "127.0.0.1:0"],
        &["api", "--socket", "s", "--auth-tokens", "f", "--admin-owners", "a,b", "--max-body", "2048"],
        &["worker", "--labels", "gpu,docker", "--lease-ttl", "2", "--stream-tokens", "--api-keys", "k"],
        &["scheduler", "--no-migrate", "--database-url", "postgres://h/d", "--otlp-endpoint", "http://o"],
        &["migrate", "--check", "--json"],
        &["demo", "--data-dir", "d", "--keep"],
        &["scripted-model", "--script", "f", "--bind", "127.0.0.1:0"],
        &["check", "--agents-dir", "d", "--tools", "openai", "--show-config", "--json"],
        &["status", "--json", "--data-dir", "d"],
        &["tool", "call", "p", "{}", "--timeout", "1", "--json"],
        &["tool", "describe", "p"],
        &["tool", "validate", "p", "-"],
        &[
            "session",
            "start",
            "--agent",
            "a",
            "-p",
            "x",
            "--step",
            "--label",
            "a=b",
            "--wait",
            "--timeout",
            "5",
        ],
        &["session", "start", "--agent", "a", "--run", "until_blocked", "--follow", "--token", "t"],
        &["session", "step", ID, "--wait"],
        &["session", "resume", ID],
        &["session", "pause", ID],
        &["session", "cancel", ID, "--deferred"],
        &["session", "pending"],
        &["session", "pending", ID, "--json"],
        &["session", "complete", ID, "-", "--no-resume", "--token-file", "f"],
        &["session", "cancel", ID, "--attached"],
        &["session", "fail", ID, "why", "--wait"],
        &["session", "approve", ID, "--wait"],
        &["session", "message", ID, "--prompt", "x", "--interrupt"],
        &["session", "message", ID, "--prompt", "x", "--message-id", ID],
        &["session", "show", ID, "--turns", "3"],
        &["session", "list", "--status", "idle,failed", "--limit", "5", "--server", "http://s"],
        &["session", "follow", ID, "--after", "0"],
        &["session", "delete", ID, "--dry-run", "--log-format", "text"],
    ];
    // Everything that may come from elsewhere does, so that it is seen not to get in the way.
    let env = [("HOLDFAST_TOKEN", "t"), ("HOLDFAST_SERVER", "http://s"), ("HOLDFAST_AGENT", "a")];
    for line in lines {
        if let Err(failure) = parse(line, &env, "slots = 3") {
            panic!("{line:?}: {failure}");
        }
    }
}

#[test]
fn what_contradicts_itself_is_wrong_usage() {
    let lines: &[&[&str]] = &[
        &["session", "start", "--agent", "a", "--step", "--run", "none"],
        &["session", "start", "--agent", "a", "--timeout", "5"],
        &["session", "start"],
        &["session", "list", "--limit", "501"],
        &["session", "cancel", "00000000-0000-7000-8000-000000000001", "--attached", "--deferred"],
        &["session", "list", "--label", "team:a"],
        &["session", "start", "--agent", "a", "--label", "te:am=a"],
        &["serve", "--slots", "0"],
        &["worker", "--bind", "127.0.0.1:0"],
        &["scripted-model"],
        &["nonsense"],
    ];
    for line in lines {
        assert_eq!(parse(line, &[], "").expect_err("refused").code(), 2, "{line:?}");
    }
}
