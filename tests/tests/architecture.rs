//! The house's rooms: which crate may know which, and what each may touch.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

/// Who may import whom. What is missing here is forbidden.
const ROOMS: &[(&str, &[&str])] = &[
    ("holdfast-engine", &[]),
    ("holdfast-store", &["holdfast-engine"]),
    ("holdfast-tools", &["holdfast-engine"]),
    ("holdfast-api", &["holdfast-engine", "holdfast-store"]),
    ("holdfast-scheduler", &["holdfast-engine", "holdfast-store"]),
    ("holdfast-worker", &["holdfast-engine", "holdfast-store", "holdfast-tools"]),
    (
        "holdfast",
        &[
            "holdfast-engine",
            "holdfast-store",
            "holdfast-tools",
            "holdfast-api",
            "holdfast-worker",
            "holdfast-scheduler",
        ],
    ),
    (
        "holdfast-tests",
        &[
            "holdfast-engine",
            "holdfast-store",
            "holdfast-tools",
            "holdfast-api",
            "holdfast-worker",
            "holdfast-scheduler",
            "holdfast",
        ],
    ),
    // The rules as they are meant to be, told apart from the code that follows them.
    ("holdfast-models", &[]),
];

/// A crate of the workspace as cargo has it.
struct Package {
    dir: PathBuf,
    /// Names and kinds of what it depends on: `normal`, `dev` or `build`.
    dependencies: Vec<(String, String)>,
}

fn packages() -> BTreeMap<String, Package> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--format-version", "1", "--offline"])
        .current_dir(root())
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let packages = metadata["packages"].as_array().expect("packages");
    packages
        .iter()
        .map(|package| {
            let text = |value: &Value| value.as_str().expect("a text").to_owned();
            let manifest = PathBuf::from(text(&package["manifest_path"]));
            let dependencies = package["dependencies"]
                .as_array()
                .expect("dependencies")
                .iter()
                .map(|one| (text(&one["name"]), one["kind"].as_str().unwrap_or("normal").to_owned()))
                .collect();
            let dir = manifest.parent().expect("a directory").to_path_buf();
            (text(&package["name"]), Package { dir, dependencies })
        })
        .collect()
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

#[test]
fn arrows_run_in_one_direction_only() {
    let packages = packages();
    let known: BTreeSet<&str> = ROOMS.iter().map(|(name, _)| *name).collect();
    let found: BTreeSet<&str> = packages.keys().map(String::as_str).collect();
    assert_eq!(found, known, "every crate of the workspace has its place in the list");
    let mut faults = Vec::new();
    for (name, allowed) in ROOMS {
        for (dependency, kind) in &packages[*name].dependencies {
            if known.contains(dependency.as_str()) && !allowed.contains(&dependency.as_str()) {
                faults.push(format!("{name} must not import {dependency} ({kind})"));
            }
        }
    }
    assert_eq!(faults, Vec::<String>::new());
}

#[test]
fn the_list_of_rooms_has_no_circle() {
    let mut settled: BTreeSet<&str> = BTreeSet::new();
    for (name, allowed) in ROOMS {
        assert!(allowed.iter().all(|one| settled.contains(one)), "{name} comes before what it imports");
        settled.insert(name);
    }
    for (one, other) in [("api", "worker"), ("api", "scheduler"), ("worker", "scheduler")] {
        for (from, to) in [(one, other), (other, one)] {
            let room = ROOMS.iter().find(|(name, _)| *name == format!("holdfast-{from}")).expect("a room");
            assert!(!room.1.contains(&format!("holdfast-{to}").as_str()), "{from} and {to} never meet");
        }
    }
}

/// Tests look into the database; of what is shipped only the store speaks SQL.
#[test]
fn the_store_is_the_only_room_with_sql() {
    let drivers = ["sqlx", "tokio-postgres", "deadpool-postgres", "tokio-postgres-rustls", "postgres"];
    for (name, package) in packages() {
        if name == "holdfast-store" || name == "holdfast-tests" {
            continue;
        }
        let has: Vec<&str> = package
            .dependencies
            .iter()
            .filter(|(dependency, kind)| kind != "dev" && drivers.contains(&dependency.as_str()))
            .map(|(dependency, _)| dependency.as_str())
            .collect();
        assert_eq!(has, Vec::<&str>::new(), "{name} has a database driver");
        for (path, source) in sources(&package.dir.join("src")) {
            for needle in
                ["sqlx::", "tokio_postgres::", "deadpool_postgres::", ".query_one(", ".batch_execute("]
            {
                assert!(!source.contains(needle), "{}: {needle}", path.display());
            }
        }
    }
}

#[test]
fn the_engine_has_no_io_no_clock_and_no_randomness() {
    let packages = packages();
    let engine = &packages["holdfast-engine"];
    let banned = ["tokio", "rand", "futures", "reqwest", "tokio-util", "getrandom", "rustix", "tracing"];
    for (dependency, kind) in &engine.dependencies {
        let of_build = kind != "dev";
        assert!(!(of_build && banned.contains(&dependency.as_str())), "the engine depends on {dependency}");
    }
    let sources = sources(&engine.dir.join("src"));
    assert!(sources.len() >= 10, "the engine's sources are where they are looked for");
    let needles = [
        "Utc::now",
        "Local::now",
        "now_v7",
        "new_v4",
        "SystemTime",
        "Instant::now",
        "std::fs",
        "std::net",
        "std::env",
        "std::process",
        "std::thread",
        "async fn",
        "tokio::",
        "rand::",
        "println!",
    ];
    for (path, source) in sources {
        let production = source.split("#[cfg(test)]").next().unwrap_or_default();
        for (number, line) in production.lines().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            for needle in needles {
                assert!(!code.contains(needle), "{}:{}: {needle}", path.display(), number + 1);
            }
        }
    }
}

/// A type lives where it is owned.
#[test]
fn no_file_is_named_for_nothing() {
    for (_, package) in packages() {
        for (path, _) in sources(&package.dir.join("src")) {
            let name = path.file_stem().and_then(|name| name.to_str()).unwrap_or_default();
            assert!(!["common", "utils", "util", "helpers", "misc"].contains(&name), "{}", path.display());
        }
    }
}

/// Rust files below a directory, with their text.
fn sources(dir: &Path) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    let mut waiting = vec![dir.to_path_buf()];
    while let Some(dir) = waiting.pop() {
        for entry in fs::read_dir(&dir).expect("a directory") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                waiting.push(path);
            } else if path.extension().is_some_and(|kind| kind == "rs") {
                let text = fs::read_to_string(&path).expect("a source file");
                found.push((path, text));
            }
        }
    }
    found
}

/// Every test of the tree: functions that are marked as such, and those that a macro makes of a table `name = Variant,`.
fn tests(dir: &Path) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for part in fs::read_dir(dir).expect("a directory") {
        let path = part.expect("an entry").path();
        let hidden =
            path.file_name().is_some_and(|name| name == "target" || name.as_encoded_bytes()[0] == b'.');
        if !path.is_dir() || hidden {
            continue;
        }
        for (_, text) in sources(&path) {
            let marks = text.match_indices("test").map(|(at, mark)| &text[at + mark.len()..]);
            for marked in marks.filter(|rest| rest.starts_with([']', '('])) {
                let name = marked.split_once("fn ").and_then(|(_, rest)| rest.split(['(', '<']).next());
                found.extend(name.map(str::to_owned));
            }
            let made = text.lines().filter_map(|line| line.trim().strip_suffix(',')?.split_once(" = "));
            let made =
                made.filter(|(_, variant)| variant.starts_with(char::is_uppercase) && !variant.contains(' '));
            found.extend(made.map(|(name, _)| name.to_owned()));
        }
    }
    found
}

#[test]
fn every_promise_names_tests_that_exist() {
    let found = tests(&root());
    let page = fs::read_to_string(root().join("docs/INVARIANTS.md")).expect("the page");
    let rows = page.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| #"));
    let rows: Vec<&str> = rows.filter(|line| !line.starts_with("| promise")).collect();
    for row in &rows {
        let (_, proofs) = row.trim_end_matches(" |").rsplit_once(" | ").expect("a table");
        let named: Vec<&str> = proofs.split('`').skip(1).step_by(2).collect();
        assert!(!named.is_empty(), "no test proves {row}");
        for name in named {
            assert!(found.contains(name), "{name} is named in docs/INVARIANTS.md and is no test");
        }
    }
    assert!(rows.len() > 30, "{} promises", rows.len());
}
