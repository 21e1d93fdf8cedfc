//! What the server was asked.

use std::{collections::VecDeque, io, path::PathBuf};

use serde_json::{Value, json};
use tokio::{fs::OpenOptions, io::AsyncWriteExt};

use super::{MAX_REMEMBERED, MAX_REMEMBERED_BYTES, rules::Violation};

/// The latest requests, as JSON texts, and the file that gets all of them.
#[derive(Debug)]
pub(super) struct Log {
    file: Option<PathBuf>,
    seq: u64,
    entries: VecDeque<String>,
    bytes: usize,
    limits: (usize, usize),
}

impl Log {
    pub(super) fn new(file: Option<PathBuf>) -> Self {
        let limits = (MAX_REMEMBERED, MAX_REMEMBERED_BYTES);
        Self { file, seq: 0, entries: VecDeque::new(), bytes: 0, limits }
    }

    /// Notes a request and gives its number, from 1.
    pub(super) async fn add(
        &mut self,
        path: &str,
        rule: Option<usize>,
        violations: &[Violation],
        body: &Value,
    ) -> io::Result<u64> {
        self.seq += 1;
        let entry =
            json!({ "seq": self.seq, "path": path, "rule": rule, "violations": violations, "body": body });
        let entry = entry.to_string();
        if let Some(file) = &self.file {
            let mut file = OpenOptions::new().create(true).append(true).open(file).await?;
            file.write_all(format!("{entry}\n").as_bytes()).await?;
            file.flush().await?;
        }
        self.bytes += entry.len();
        self.entries.push_back(entry);
        let (count, bytes) = self.limits;
        while self.entries.len() > count || self.bytes > bytes {
            let Some(oldest) = self.entries.pop_front() else { break };
            self.bytes -= oldest.len();
        }
        Ok(self.seq)
    }

    /// The requests as a JSON list, oldest first.
    pub(super) fn to_json(&self) -> String {
        let entries: Vec<&str> = self.entries.iter().map(String::as_str).collect();
        format!("[{}]", entries.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_the_latest_are_remembered() {
        let mut log = Log { limits: (2, 1000), ..Log::new(None) };
        for number in 1..=3 {
            assert_eq!(log.add("/x", None, &[], &json!(number)).await.expect("noted"), number);
        }
        let seen: Value = serde_json::from_str(&log.to_json()).expect("JSON");
        assert_eq!(
            (&seen[0]["seq"], &seen[1]["body"], seen.as_array().map(Vec::len)),
            (&json!(2), &json!(3), Some(2))
        );
        log.add("/x", None, &[], &json!("y".repeat(2000))).await.expect("noted");
        assert_eq!(log.to_json(), "[]");
    }
}
