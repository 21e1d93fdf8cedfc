//! I2 and I6: a session's events, in the database and from any node.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use anyhow::Result;
use uuid::Uuid;

use super::{Report, rows::Rows};
use crate::{
    chaos::{Followed, fleet::Fleet},
    sse::{Follower, Frame, check_dense},
};

/// Sessions whose events are read from every node.
const SAMPLE: usize = 16;

/// Checks the stored events of a session that is at rest.
pub(super) fn check(report: &mut Report, rows: &Rows) {
    let id = rows.id;
    let numbers: Vec<i64> = rows.events.iter().map(|event| event.seq).collect();
    report.saw("events", numbers.len());
    report.ensure(numbers == (1..=rows.event_seq).collect::<Vec<_>>(), || {
        format!("I6 session {id}: events {numbers:?} of {}", rows.event_seq)
    });
    let count = |kind: &str| rows.events.iter().filter(|event| event.kind == kind).count();
    let (started, stopped) = (count("run.started"), count("run.stopped"));
    report.saw("runs", started);
    report.ensure(started == stopped, || {
        format!("I6 session {id}: {started} runs started and {stopped} stopped")
    });
    report.ensure(count("mail.accepted") == rows.mail.len(), || {
        format!("I6 session {id}: {} letters were told of {}", count("mail.accepted"), rows.mail.len())
    });
    versions(report, rows);
    for event in rows.events.iter().filter(|event| event.kind == "session.failed") {
        // A run that loses its workers time and again is ended: that is what faults like these may do to
        // one, and it goes on when somebody says so.
        let message = event.body["message"].as_str().unwrap_or_default();
        report.ensure(message == "poison", || format!("session {id} failed: {message}"));
        report.saw("runs given up as poison", 1);
    }
}

/// Versions are told one after another; accepting mail tells the same one again.
fn versions(report: &mut Report, rows: &Rows) {
    let updates = rows.events.iter().filter(|event| event.kind == "session.updated");
    let told: Vec<i64> = updates.filter_map(|event| event.body["version"].as_i64()).collect();
    let mut version = 1;
    let mut dense = true;
    for &next in &told {
        dense &= next == version || next == version + 1;
        version = next;
    }
    report.ensure(dense && version == rows.version, || {
        format!("I2 session {}: versions {told:?} were told of {}", rows.id, rows.version)
    });
}

/// Reads events of some sessions from every node, and holds what was followed through the faults against
/// the database.
pub(super) async fn check_streams(
    report: &mut Report,
    fleet: &Fleet,
    rows: &HashMap<Uuid, Rows>,
    followed: &[Followed],
) -> Result<()> {
    let addresses = fleet.addresses().lock().map(|all| all.clone()).unwrap_or_default();
    for rows in rows.values().take(SAMPLE) {
        let path = format!("/v1/sessions/{}/events?after=0", rows.id);
        let mut replays: Vec<Vec<Frame>> = Vec::new();
        for address in &addresses {
            let follower = Follower::start(Arc::new(Mutex::new(vec![address.clone()])), path.clone());
            replays.push(until_last(&follower, rows).await?);
        }
        report.saw("replays", replays.len());
        for frames in &replays {
            same(report, "replayed", frames, rows);
        }
        report.ensure(replays.windows(2).all(|pair| pair[0] == pair[1]), || {
            format!("I6 session {}: nodes replay different events: {replays:#?}", rows.id)
        });
    }
    for (id, follower) in followed {
        let Some(rows) = rows.get(id) else { continue };
        report.saw("streams followed", 1);
        same(report, "followed", &until_last(follower, rows).await?, rows);
    }
    Ok(())
}

async fn until_last(follower: &Follower, rows: &Rows) -> Result<Vec<Frame>> {
    let last = rows.event_seq.to_string();
    follower.until(|frames| frames.iter().any(|frame| frame.id.as_deref() == Some(last.as_str()))).await
}

fn same(report: &mut Report, how: &str, frames: &[Frame], rows: &Rows) {
    if let Err(error) = check_dense(frames) {
        report.violation(format!("I6 session {} {how}: {error:#}", rows.id));
    }
    let kinds = frames.iter().filter(|frame| frame.id.is_some()).map(|frame| frame.kind.as_str());
    let stored = rows.events.iter().map(|event| event.kind.as_str());
    report.ensure(kinds.eq(stored), || {
        format!("I6 session {} {how}: not the events that are stored: {frames:#?}", rows.id)
    });
}
