//! docs/cli.md says what the command line offers: commands and flags are written from here.

use std::{fs, path::Path};

use clap::{Arg, ArgAction, Command, CommandFactory as _};

use super::Cli;

/// Behind this line the page is what [`commands`] writes.
const MARK: &str = "<!-- Written from the command line itself. -->\n";

fn commands(command: &Command, path: &str, page: &mut String) {
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    page.push_str(&format!("\n## `{path}`\n\n{}.\n", about.trim_end_matches('.')));
    let shown = |arg: &&Arg| !arg.is_hide_set() && !matches!(arg.get_id().as_str(), "help" | "version");
    let mut arguments = command.get_arguments().filter(shown).peekable();
    if arguments.peek().is_some() {
        page.push_str("\n| | default | |\n|---|---|---|\n");
    }
    for argument in arguments {
        let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
        let values: Vec<String> =
            argument.get_possible_values().iter().map(|value| format!("`{}`", value.get_name())).collect();
        let switch = matches!(argument.get_action(), ArgAction::SetTrue);
        let one_of =
            if values.is_empty() || switch { String::new() } else { format!(": {}", values.join(", ")) };
        let defaults: Vec<String> = argument
            .get_default_values()
            .iter()
            .map(|value| format!("`{}`", value.to_string_lossy()))
            .collect();
        // Defaults that aren't values stand in words behind the help.
        let (help, in_words) = help.split_once(" [default: ").unwrap_or((&help, ""));
        let default = match in_words.trim_end_matches(']') {
            _ if switch => String::new(),
            "" => defaults.join(" "),
            words => words.to_owned(),
        };
        let help = help.replace('|', "\\|");
        page.push_str(&format!("| `{}` | {default} | {help}{one_of} |\n", name(argument)));
    }
    for inner in command.get_subcommands().filter(|inner| !inner.is_hide_set() && inner.get_name() != "help")
    {
        commands(inner, &format!("{path} {}", inner.get_name()), page);
    }
}

fn name(argument: &Arg) -> String {
    let value = argument.get_value_names().and_then(|names| names.first()).map(ToString::to_string);
    let value = value.unwrap_or_else(|| argument.get_id().as_str().to_uppercase());
    match argument.get_long() {
        Some(long) if matches!(argument.get_action(), ArgAction::SetTrue) => format!("--{long}"),
        Some(long) => format!("--{long} {value}"),
        None => value,
    }
}

#[test]
fn the_page_says_what_the_command_line_offers() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/cli.md");
    let page = fs::read_to_string(&path).expect("docs/cli.md");
    let (written, offered) = page.split_once(MARK).expect("a mark");
    let mut now = String::new();
    commands(&Cli::command(), "holdfast", &mut now);
    if std::env::var_os("HOLDFAST_WRITE_DOCS").is_some() {
        fs::write(&path, format!("{written}{MARK}{now}")).expect("docs/cli.md can be written");
        return;
    }
    assert!(offered == now, "docs/cli.md is old: run this test with HOLDFAST_WRITE_DOCS=1");
}
