//! The pages that go with the report say what it says.

use std::collections::BTreeSet;

use serde_json::Value;

use super::nights::eventful;
use crate::status::{
    as_json, as_text,
    verdict::{Slug, findings},
};

/// Slugs with a part of the runbook, and who points there.
fn runbook() -> Vec<(String, String)> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/operating/runbook.md");
    let text = std::fs::read_to_string(path).expect("the runbook");
    let mut parts = Vec::new();
    let mut slug = None;
    for line in text.lines() {
        if let Some(heading) = line.strip_prefix("### ") {
            assert_eq!(
                slug.replace(heading.to_owned()),
                None,
                "{heading} comes before the last one says who tells it"
            );
        } else if let Some(who) = line.strip_prefix("Told by: ") {
            parts.push((slug.take().expect("a heading before it"), who.to_owned()));
        }
    }
    assert_eq!(slug, None, "the last part says who tells it");
    parts
}

#[test]
fn every_slug_has_its_part_of_the_runbook_and_every_part_somebody_who_tells_it() {
    let parts = runbook();
    let told: BTreeSet<&str> = parts
        .iter()
        .filter(|(_, who)| who.contains("`holdfast status`"))
        .map(|(slug, _)| slug.as_str())
        .collect();
    let all: BTreeSet<&str> = Slug::ALL.iter().map(|slug| slug.word()).collect();
    assert_eq!(told, all);
    let unique: BTreeSet<&String> = parts.iter().map(|(slug, _)| slug).collect();
    assert_eq!(unique.len(), parts.len(), "an anchor stands once");
    for (slug, who) in &parts {
        assert!(who.contains("`holdfast status`") || alert_of(who).is_some(), "{slug}: nobody tells it");
        let plain = |byte: u8| byte.is_ascii_lowercase() || byte == b'-';
        assert!(slug.bytes().all(plain), "{slug} is its own anchor");
    }
}

/// The alert that a part of the runbook is told by.
fn alert_of(who: &str) -> Option<&str> {
    who.split_once("alert `")?.1.split('`').next()
}

#[test]
fn every_alert_has_its_part_of_the_runbook_and_the_part_its_name() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/prometheus/alerts.yml");
    let text = std::fs::read_to_string(path).expect("the alerts");
    let mut alerts = BTreeSet::new();
    let mut name = None;
    for line in text.lines().map(str::trim) {
        if let Some(one) = line.strip_prefix("- alert: ") {
            assert_eq!(
                name.replace(one.to_owned()),
                None,
                "the alert before {one} names no part of the runbook"
            );
        } else if let Some((_, slug)) = line.split_once("docs/operating/runbook.md#") {
            alerts.insert((slug.to_owned(), name.take().expect("an alert before its part")));
        }
    }
    assert!(!alerts.is_empty(), "no alert is read from {path}");
    let told = runbook().into_iter().filter_map(|(slug, who)| Some((slug, alert_of(&who)?.to_owned())));
    assert_eq!(told.collect::<BTreeSet<_>>(), alerts);
}

/// The paths of a value's leaves, those of lists with `[]`; an empty list and null hide what they could hold.
fn leaves(value: &Value, path: &str, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => {
            for (name, inner) in fields {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                leaves(inner, &path, found);
            }
        }
        Value::Array(items) if items.iter().any(Value::is_object) => {
            items.iter().for_each(|item| leaves(item, &format!("{path}[]"), found));
        }
        _ => {
            found.insert(path.to_owned());
        }
    }
}

#[test]
fn every_field_is_documented_and_every_documented_one_is_there() {
    let report = eventful();
    let found = findings(&report);
    assert_eq!(as_text::show(&report, &found), Ok(()));
    let mut told = BTreeSet::new();
    leaves(&as_json::report(&report, &found), "", &mut told);
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/operating/status.md");
    let text = std::fs::read_to_string(path).expect("the page");
    let (_, fields) = text.split_once("| field | meaning |").expect("a table of fields");
    let rows = fields.lines().skip(2).take_while(|line| line.starts_with("| "));
    let names = rows.flat_map(|row| row.split('|').nth(1).unwrap_or_default().split('`').skip(1).step_by(2));
    let documented: BTreeSet<String> = names.map(str::to_owned).collect();
    assert_eq!(documented, told);
}
