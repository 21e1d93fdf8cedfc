//! Settings that don't come from the command line: flags win, then the environment, then `holdfast.toml`,
//! then the built-in default. What the environment or the file gives becomes the default that the command
//! line's parser knows, after it was checked as the flag would be.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsString,
    path::{Path, PathBuf},
};

use clap::{Arg, ArgAction, Args, Command, CommandFactory, ValueHint};

use crate::{
    args::{
        AgentArgs, ApiArgs, Cli, ClientArgs, CommonArgs, DatabaseArgs, RetentionArgs, WebhookArgs, WorkerArgs,
    },
    failure::Failure,
};

/// The file's name.
pub(crate) const FILE: &str = "holdfast.toml";
/// The largest file that is read, in bytes.
const MAX_FILE: u64 = 1024 * 1024;
/// The id of the flag that [`DATABASE_URL`] is for, too.
const DATABASE_FLAG: &str = "database_url";
const DATABASE_URL: &str = "DATABASE_URL";

/// Where settings are found besides the command line.
pub(crate) struct Sources<'a> {
    /// The environment.
    pub(crate) variable: &'a dyn Fn(&str) -> Option<OsString>,
    /// The nearest file, if there is one.
    pub(crate) file: Option<SettingsFile>,
}

/// A `holdfast.toml`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SettingsFile {
    path: PathBuf,
    values: toml::Table,
}

impl SettingsFile {
    /// The file in `start` or the nearest directory above it.
    pub(crate) fn find(start: &Path) -> Result<Option<Self>, Failure> {
        let Some(path) = start.ancestors().map(|dir| dir.join(FILE)).find(|path| path.is_file()) else {
            return Ok(None);
        };
        let unreadable = |reason: String| Failure::Config(format!("{}: {reason}", path.display()));
        let size = std::fs::metadata(&path).map_err(|error| unreadable(error.to_string()))?.len();
        if size > MAX_FILE {
            return Err(unreadable(format!("it has {size} bytes; at most {MAX_FILE} are read")));
        }
        let text = std::fs::read_to_string(&path).map_err(|error| unreadable(error.to_string()))?;
        Self::parse(path, &text).map(Some)
    }

    fn parse(path: PathBuf, text: &str) -> Result<Self, Failure> {
        let values: toml::Table =
            toml::from_str(text).map_err(|error| Failure::Config(format!("{}: {error}", path.display())))?;
        let known = known_flags();
        if let Some(key) = values.keys().find(|key| !known.contains(key.as_str())) {
            let all = known.into_iter().collect::<Vec<_>>().join(", ");
            return Err(Failure::Config(format!("{}: unknown key `{key}`; known are {all}", path.display())));
        }
        Ok(Self { path, values })
    }

    /// A flag's values, as they would be written on the command line.
    fn get(&self, long: &str, is_path: bool) -> Result<Option<Vec<String>>, String> {
        let Some(value) = self.values.get(long) else { return Ok(None) };
        let items = match value {
            toml::Value::Array(items) => items.as_slice(),
            one => std::slice::from_ref(one),
        };
        let text = |item: &toml::Value| match item {
            toml::Value::String(text) if is_path => Ok(self.beside(text)),
            toml::Value::String(text) => Ok(text.clone()),
            toml::Value::Integer(number) => Ok(number.to_string()),
            toml::Value::Boolean(yes) => Ok(yes.to_string()),
            other => Err(format!("a {} can't be its value", other.type_str())),
        };
        items.iter().map(text).collect::<Result<_, _>>().map(Some)
    }

    /// Paths in the file are relative to it.
    fn beside(&self, path: &str) -> String {
        let dir = self.path.parent().unwrap_or(Path::new("."));
        dir.join(path).to_string_lossy().into_owned()
    }
}

/// The flags that may come from elsewhere: those of servers and of their clients.
fn configurable() -> Vec<Arg> {
    let bare = Command::new("flags");
    let all = [
        DatabaseArgs::augment_args(bare.clone()),
        AgentArgs::augment_args(bare.clone()),
        ApiArgs::augment_args(bare.clone()),
        WorkerArgs::augment_args(bare.clone()),
        RetentionArgs::augment_args(bare.clone()),
        WebhookArgs::augment_args(bare.clone()),
        CommonArgs::augment_args(bare.clone()),
        ClientArgs::augment_args(bare),
    ];
    let mut flags: Vec<Arg> = all.iter().flat_map(Command::get_arguments).cloned().collect();
    // What to print is for the person at the terminal to say.
    flags.retain(|flag| flag.get_id() != "json");
    flags.extend(Cli::command().get_arguments().filter(|flag| flag.get_id() == "log_format").cloned());
    flags
}

fn known_flags() -> BTreeSet<String> {
    configurable().iter().filter_map(|flag| flag.get_long().map(str::to_owned)).collect()
}

/// Flags of which one only counts: what the environment says of either wins over what the file says of the
/// other.
const ALTERNATIVES: [&str; 2] = ["token", "token_file"];

/// A flag's value from elsewhere.
struct Found {
    values: Vec<String>,
    /// Where it stands, for messages.
    place: String,
    in_file: bool,
}

/// The command line's parser with the defaults that the sources give.
///
/// # Errors
/// [`Failure::Config`] for a value that the flag wouldn't take; the text says where it stands.
pub(crate) fn layered(command: Command, sources: &Sources<'_>) -> Result<Command, Failure> {
    let mut found = BTreeMap::new();
    let mut of_file = BTreeSet::new();
    for flag in configurable() {
        if let Some(Found { values, place, in_file }) = value_of(&flag, sources)? {
            let values =
                checked(&flag, values).map_err(|reason| Failure::Config(format!("{place}: {reason}")))?;
            found.insert(flag.get_id().to_string(), values);
            if in_file {
                of_file.insert(flag.get_id().to_string());
            }
        }
    }
    if ALTERNATIVES.iter().any(|id| found.contains_key(*id) && !of_file.contains(*id)) {
        found.retain(|id, _| !(ALTERNATIVES.contains(&id.as_str()) && of_file.contains(id)));
    }
    Ok(with_defaults(command, &found))
}

fn with_defaults(command: Command, found: &BTreeMap<String, Vec<String>>) -> Command {
    command
        .mut_args(|flag| match found.get(flag.get_id().as_str()) {
            Some(values) => flag.default_values(values.clone()).required(false),
            None => flag,
        })
        .mut_subcommands(|inner| with_defaults(inner, found))
}

/// A flag's values and the place they come from.
fn value_of(flag: &Arg, sources: &Sources<'_>) -> Result<Option<Found>, Failure> {
    let Some(long) = flag.get_long() else { return Ok(None) };
    let variable = format!("HOLDFAST_{}", long.to_uppercase().replace('-', "_"));
    let also = (flag.get_id() == DATABASE_FLAG).then(|| DATABASE_URL.to_owned());
    for name in std::iter::once(variable).chain(also) {
        // An empty variable is one that isn't set.
        let Some(value) = (sources.variable)(&name).filter(|value| !value.is_empty()) else { continue };
        let is_list = matches!(flag.get_action(), ArgAction::Append);
        let values = if is_list && is_path(flag) {
            // As PATH does it, since commas may well be part of a name.
            std::env::split_paths(&value).map(PathBuf::into_os_string).collect()
        } else {
            vec![value]
        };
        let texts = values.into_iter().map(OsString::into_string).collect::<Result<Vec<_>, _>>();
        let texts = texts.map_err(|_| Failure::Config(format!("{name}: it is not UTF-8")))?;
        return Ok(Some(Found { values: texts, place: name, in_file: false }));
    }
    let Some(file) = &sources.file else { return Ok(None) };
    let place = format!("{}: `{long}`", file.path.display());
    let values =
        file.get(long, is_path(flag)).map_err(|reason| Failure::Config(format!("{place}: {reason}")))?;
    Ok(values.map(|values| Found { values, place, in_file: true }))
}

fn is_path(flag: &Arg) -> bool {
    matches!(flag.get_value_hint(), ValueHint::FilePath | ValueHint::DirPath | ValueHint::AnyPath)
}

/// The values as the parser takes them, or what is wrong with them.
fn checked(flag: &Arg, values: Vec<String>) -> Result<Vec<String>, String> {
    let long = flag.get_long().unwrap_or_default();
    let single = !matches!(flag.get_action(), ArgAction::Append);
    let [value] = &values[..] else {
        return if single {
            Err(format!("--{long} takes one value"))
        } else {
            probe(flag, &values).map(|()| values)
        };
    };
    if !matches!(flag.get_action(), ArgAction::SetTrue) {
        return probe(flag, &values).map(|()| values);
    }
    match value.to_lowercase().as_str() {
        "true" | "1" | "yes" | "on" => Ok(vec!["true".to_owned()]),
        "false" | "0" | "no" | "off" => Ok(vec!["false".to_owned()]),
        _ => Err(format!("--{long} is on or off: true or false, not {value:?}")),
    }
}

/// Whether a parser with this flag alone takes the values.
fn probe(flag: &Arg, values: &[String]) -> Result<(), String> {
    let long = flag.get_long().unwrap_or_default();
    let alone = Arg::new("probe")
        .long(long.to_owned())
        .value_name(flag.get_value_names().and_then(<[_]>::first).cloned().unwrap_or_else(|| "VALUE".into()))
        .value_parser(flag.get_value_parser().clone())
        .value_delimiter(flag.get_value_delimiter())
        .action(flag.get_action().clone());
    let line = values.iter().map(|value| format!("--{long}={value}"));
    match Command::new("probe").no_binary_name(true).arg(alone).try_get_matches_from(line) {
        Ok(_) => Ok(()),
        Err(error) => {
            let text = error.to_string();
            let first = text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned();
            Err(first)
        }
    }
}

#[cfg(test)]
#[path = "settings_tests.rs"]
mod tests;
