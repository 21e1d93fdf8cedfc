mod documents;
mod nights;

use std::collections::BTreeSet;

use holdfast_store::quota::{Limits, Usage};
use serde_json::json;

use super::{
    as_json, as_text,
    verdict::{Slug, findings},
};
use nights::{calm, load, troubles, waiting};

#[test]
fn a_calm_night_needs_no_attention() {
    let report = calm();
    assert_eq!(findings(&report), []);
    assert_eq!(as_text::verdict(&findings(&report)), "ok");
    let value = as_json::report(&report, &[]);
    assert_eq!(value["verdict"], json!({"ok": true, "findings": []}));
    assert!(!value.to_string().contains("secret words"), "prompts are nobody's business here");
    assert_eq!(as_text::show(&report, &[]), Ok(()));
}

#[test]
fn each_trouble_is_found_by_its_slug_and_alone() {
    let mut seen = BTreeSet::new();
    for (slug, make) in troubles() {
        let mut report = calm();
        make(&mut report);
        let found = findings(&report);
        let words: Vec<&str> = found.iter().map(|one| one.slug.word()).collect();
        assert_eq!(words, [slug.word()], "{found:?}");
        let line = as_text::verdict(&found);
        assert!(
            line.starts_with("needs attention: ") && line.contains(&format!("[{}]", slug.word())),
            "{line}"
        );
        assert!(!line.contains('\n'), "{line}");
        let value = as_json::report(&report, &found);
        assert_eq!(value["verdict"]["findings"][0]["slug"], slug.word());
        assert_eq!(as_text::show(&report, &found), Ok(()));
        seen.insert(slug.word());
    }
    let all: BTreeSet<&str> = Slug::ALL.iter().map(|slug| slug.word()).collect();
    assert_eq!(seen, all, "each slug has a trouble that shows it");
}

#[test]
fn a_name_breaks_no_line_of_the_verdict() {
    let mut report = calm();
    let queue = report.queue.as_mut().expect("a queue");
    (queue.queued, queue.largest) = (1_500, vec![load("two\nlines", 1_000)]);
    let line = as_text::verdict(&findings(&report));
    assert!(line.contains("two lines") && !line.contains('\n'), "{line}");
}

#[test]
fn limits_that_do_what_they_are_for_are_no_trouble() {
    let mut report = calm();
    let mut one = waiting(600);
    one.owner.limits.max_running = Some(1);
    one.owner.held = 1;
    report.queue.as_mut().expect("a queue").waiting = vec![one];
    assert_eq!(findings(&report), []);
    let value = as_json::report(&report, &[]);
    assert_eq!(value["queue"]["waiting"][0]["why"], "owner_max_running");

    let mut one = waiting(600);
    one.owner.limits.runs_per_minute = Some(6);
    one.owner.bucket = Some(0.5);
    report.queue.as_mut().expect("a queue").waiting = vec![one];
    assert_eq!(as_json::report(&report, &[])["queue"]["waiting"][0]["why"], "owner_runs_per_minute");

    // With all slots taken it is said so, and it is a trouble.
    report.queue.as_mut().expect("a queue").waiting = vec![waiting(600)];
    report.leases.as_mut().expect("leases").workers[0].held = 8;
    assert_eq!(as_json::report(&report, &[])["queue"]["waiting"][0]["why"], "no_free_slot");
    assert_eq!(findings(&report)[0].slug, Slug::QueueTooOld);
}

#[test]
fn the_report_has_the_fields_that_programs_know() {
    let report = calm();
    let value = as_json::report(&report, &findings(&report));
    assert_eq!(value["runs"]["claimed"], 1);
    assert_eq!(value["runs"]["queued"], 3);
    assert_eq!(value["runs"]["parked"], 3);
    assert_eq!(value["runs"]["put_off"], 1);
    assert_eq!(value["open_deferred_calls"], 4);
    assert_eq!(value["oldest_due_seconds"], 5.0);
    assert_eq!(value["workers"][0]["silent_seconds"], 2);
    assert_eq!(value["unserved"], json!([]));
    assert_eq!(value["feed"]["lag_seconds"], 2.5);
    assert_eq!(value["feed"]["events_held_back"], 7);
    assert_eq!(value["feed"]["oldest_writer"], json!(null));
    assert_eq!(value["deploy"]["tool_once"], 2);
    assert_eq!(value["deploy"]["model_request"], 3);
    assert_eq!(value["failures"]["by_cause"][0]["cause"], "model_unavailable");
    assert_eq!(value["failures"]["by_cause"][0]["model"], "m-1");
    assert_eq!(value["database"]["cache_hit"], 0.99);
    assert_eq!(value["queue"]["largest"][0]["share"], 2.0 / 3.0);
}

#[test]
fn of_one_owner_only_what_is_its_own_is_told() {
    let mut report = calm();
    (report.feed, report.database, report.webhooks) = (None, None, None);
    let limits = Limits { max_running: Some(3), ..Limits::default() };
    report.owner = Some(("o".into(), Some((limits, Usage { running: 1, queued: 2 }))));
    assert_eq!(findings(&report), [], "what isn't told of an owner wasn't too slow");
    let value = as_json::report(&report, &[]);
    assert_eq!(value["owner"]["limits"]["max_running"], 3);
    assert!(value.get("database").is_none() && value.get("feed").is_none());
    assert_eq!(as_text::show(&report, &[]), Ok(()));
}
