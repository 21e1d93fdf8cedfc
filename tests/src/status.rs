//! What `holdfast status` of the real binary says.

use std::process::Stdio;

use serde_json::Value;
use tokio::{
    process::Command,
    time::{Duration, Instant},
};

use crate::world::{PATIENCE, binary};

/// What one call of the command said.
#[derive(Debug, Clone)]
pub struct Told {
    /// Its exit code.
    pub code: i32,
    /// What it printed.
    pub text: String,
    /// The same as JSON; null if it is none.
    pub json: Value,
}

impl Told {
    /// The slugs of its findings.
    pub fn slugs(&self) -> Vec<&str> {
        let findings = self.json["verdict"]["findings"].as_array().map(Vec::as_slice).unwrap_or_default();
        findings.iter().filter_map(|one| one["slug"].as_str()).collect()
    }

    /// What a finding says, if it is there; the runbook must have a part for it.
    ///
    /// # Panics
    /// If the runbook has none.
    pub fn finding(&self, slug: &str) -> Option<&str> {
        let findings = self.json["verdict"]["findings"].as_array()?;
        let found = findings.iter().find(|one| one["slug"] == slug)?;
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/operating/runbook.md");
        let runbook = std::fs::read_to_string(path).expect("the runbook");
        assert!(runbook.lines().any(|line| line == format!("### {slug}")), "the runbook has no part {slug}");
        found["text"].as_str()
    }
}

/// Runs `holdfast status` on a database with more arguments.
///
/// # Panics
/// If the binary can't be run.
pub async fn status(url: &str, more: &[&str]) -> Told {
    let mut command = Command::new(binary().expect("the binary"));
    command.arg("status").args(["--database-url", url]).args(more).stdin(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(PATIENCE, command.output()).await.expect("it ends").expect("it runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let json = serde_json::from_str(&text).unwrap_or_default();
    Told { code: output.status.code().unwrap_or(-1), text, json }
}

/// Asks until the report is as wanted.
///
/// # Panics
/// If it isn't in time; the text shows the last report.
pub async fn until(url: &str, more: &[&str], wanted: impl Fn(&Told) -> bool) -> Told {
    let deadline = Instant::now() + PATIENCE;
    let mut pause = tokio::time::interval(Duration::from_millis(200));
    loop {
        pause.tick().await;
        let told = status(url, more).await;
        if wanted(&told) {
            return told;
        }
        assert!(Instant::now() < deadline, "the report never was as wanted: {}", told.text);
    }
}
