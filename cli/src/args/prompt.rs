//! A prompt's parts, in the order in which they stand on the command line whatever their kinds.

use std::path::PathBuf;

use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches, ValueHint, parser::ValueSource};

/// A part of a prompt as it was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Part {
    /// This text.
    Text(String),
    /// A file's text.
    File(PathBuf),
    /// What a shell command prints.
    Shell(String),
    /// A separator: the text, so many times.
    Separator {
        /// What is repeated.
        text: String,
        /// How often.
        times: usize,
    },
    /// An attachment: `[MIME;]FILE`.
    Media(String),
}

/// The parts of a prompt, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PromptArgs {
    pub(crate) parts: Vec<Part>,
}

const SHORT: usize = 4;
const LONG: usize = 40;

type Kind = (&'static str, fn(String) -> Part);

const KINDS: [Kind; 6] = [
    ("prompt", Part::Text),
    ("file", |path| Part::File(path.into())),
    ("shell", Part::Shell),
    ("sep4", |text| Part::Separator { text, times: SHORT }),
    ("sep40", |text| Part::Separator { text, times: LONG }),
    ("media", Part::Media),
];

impl Args for PromptArgs {
    fn augment_args(command: Command) -> Command {
        let part = |name: &'static str, value: &'static str, help: &'static str| {
            Arg::new(name)
                .long(name)
                .value_name(value)
                .help(help)
                .action(ArgAction::Append)
                .help_heading("Prompt")
        };
        let separator = |name, help| {
            part(name, "TEXT", help).num_args(0..=1).require_equals(true).default_missing_value("-")
        };
        command
            .arg(part("prompt", "TEXT", "Text of the prompt").short('p'))
            .arg(part("file", "FILE", "A file's text").short('f').value_hint(ValueHint::FilePath))
            .arg(part("shell", "COMMAND", "What a shell command prints"))
            .arg(separator("sep4", "A line of four dashes, or of TEXT four times"))
            .arg(separator("sep40", "A line of forty dashes, or of TEXT forty times"))
            .arg(
                part(
                    "media",
                    "[MIME;]FILE",
                    "An attachment; its type is guessed from its name if it isn't given",
                )
                .short('m')
                .value_hint(ValueHint::FilePath),
            )
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for PromptArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut parts = Vec::new();
        for (name, make) in KINDS {
            if matches.value_source(name) != Some(ValueSource::CommandLine) {
                continue;
            }
            let values = matches.get_many::<String>(name).into_iter().flatten();
            let places = matches.indices_of(name).into_iter().flatten();
            parts.extend(places.zip(values).map(|(place, value)| (place, make(value.clone()))));
        }
        parts.sort_by_key(|(place, _)| *place);
        Ok(Self { parts: parts.into_iter().map(|(_, part)| part).collect() })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(arguments: &[&str]) -> Vec<Part> {
        let command = PromptArgs::augment_args(Command::new("x").no_binary_name(true)).arg(Arg::new("id"));
        let matches = command.try_get_matches_from(arguments).expect("parses");
        PromptArgs::from_arg_matches(&matches).expect("parts").parts
    }

    #[test]
    fn parts_keep_their_order_across_kinds() {
        let found = parts(&[
            "--file",
            "a.txt",
            "--prompt",
            "one",
            "--sep4",
            "--shell",
            "ls -l",
            "--prompt=two",
            "--media",
            "image/png;b.png",
            "--sep40==",
            "-f",
            "c.txt",
            "-p",
            "three",
        ]);
        let expected = [
            Part::File("a.txt".into()),
            Part::Text("one".into()),
            Part::Separator { text: "-".into(), times: 4 },
            Part::Shell("ls -l".into()),
            Part::Text("two".into()),
            Part::Media("image/png;b.png".into()),
            Part::Separator { text: "=".into(), times: 40 },
            Part::File("c.txt".into()),
            Part::Text("three".into()),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn a_separator_takes_nothing_that_follows_it() {
        let found = parts(&["--sep4", "the-id", "--sep4", "--sep4=+"]);
        let separator = |text: &str| Part::Separator { text: text.into(), times: 4 };
        assert_eq!(found, [separator("-"), separator("-"), separator("+")]);
    }

    #[test]
    fn no_parts_are_no_prompt() {
        assert_eq!(parts(&[]), []);
    }
}
