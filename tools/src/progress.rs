//! Lines of a running program, told now and then to whoever watches.

use std::time::Duration;

use serde::Serialize;
use tokio::time::Instant;

/// The least time between two reports of one stream.
pub const PROGRESS_EVERY: Duration = Duration::from_millis(500);
/// How much of a line is reported, in bytes.
pub const MAX_PROGRESS_LINE: usize = 1024;

/// Which stream a line is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// How far a program has come: the newest line of one of its streams.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Progress {
    /// The stream.
    pub stream: Stream,
    /// Its newest whole line, at most [`MAX_PROGRESS_LINE`] bytes of it.
    pub line: String,
    /// How many lines the stream has had.
    pub lines: u64,
    /// How many bytes they were.
    pub bytes: u64,
}

/// Somebody who watches. Called at most once each [`PROGRESS_EVERY`] for each stream; must not block.
pub type ProgressFn<'a> = dyn Fn(Progress) + Send + Sync + 'a;

/// Watches one stream on behalf of a [`ProgressFn`].
pub(crate) struct LineWatch<'a> {
    stream: Stream,
    tell: Option<&'a ProgressFn<'a>>,
    partial: Vec<u8>,
    latest: Option<Vec<u8>>,
    lines: u64,
    bytes: u64,
    total: u64,
    told: Option<Instant>,
}

impl<'a> LineWatch<'a> {
    pub(crate) fn new(stream: Stream, tell: Option<&'a ProgressFn<'a>>) -> Self {
        Self { stream, tell, partial: Vec::new(), latest: None, lines: 0, bytes: 0, total: 0, told: None }
    }

    /// Takes the next bytes; reports if that is due.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        if self.tell.is_none() {
            return;
        }
        let before = self.total;
        self.total += bytes.len() as u64;
        let Some(end) = bytes.iter().rposition(|byte| *byte == b'\n') else {
            self.extend_partial(bytes);
            return;
        };
        let breaks = bytes.iter().filter(|byte| **byte == b'\n').count() as u64;
        match bytes[..end].iter().rposition(|byte| *byte == b'\n') {
            Some(start) => self.partial = bounded(&bytes[start + 1..end]).to_vec(),
            None => self.extend_partial(&bytes[..end]),
        }
        self.latest = Some(std::mem::take(&mut self.partial));
        self.lines += breaks;
        self.bytes = before + end as u64 + 1;
        self.extend_partial(&bytes[end + 1..]);
        if self.due_at().is_none_or(|at| at <= Instant::now()) {
            self.flush();
        }
    }

    /// When the newest line is to be reported, if it has not been.
    pub(crate) fn pending(&self) -> Option<Instant> {
        self.latest.as_ref().map(|_| self.due_at().unwrap_or_else(Instant::now))
    }

    /// Reports the newest line, if it has not been.
    pub(crate) fn flush(&mut self) {
        if let (Some(tell), Some(line)) = (self.tell, self.latest.take()) {
            self.told = Some(Instant::now());
            let line = String::from_utf8_lossy(&line).trim_end_matches('\r').replace('\0', "\u{FFFD}");
            tell(Progress { stream: self.stream, line, lines: self.lines, bytes: self.bytes });
        }
    }

    fn due_at(&self) -> Option<Instant> {
        self.told.map(|told| told + PROGRESS_EVERY)
    }

    fn extend_partial(&mut self, bytes: &[u8]) {
        let room = MAX_PROGRESS_LINE - self.partial.len();
        self.partial.extend_from_slice(&bytes[..bytes.len().min(room)]);
    }
}

fn bounded(bytes: &[u8]) -> &[u8] {
    &bytes[..bytes.len().min(MAX_PROGRESS_LINE)]
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn the_first_line_is_told_at_once_and_the_newest_later() {
        let told = Mutex::new(Vec::new());
        let tell = |progress: Progress| told.lock().expect("not poisoned").push(progress);
        let mut watch = LineWatch::new(Stream::Stdout, Some(&tell));
        watch.push(b"on");
        assert!(watch.pending().is_none());
        watch.push(b"e\r\n");
        watch.push(b"two\nthr");
        watch.push(b"ee\nfour\nfi");
        assert!(watch.pending().is_some());
        watch.flush();
        watch.push(&[b'x'; 5000]);
        watch.push(b"\n");
        watch.flush();
        let told = told.lock().expect("not poisoned");
        let first = Progress { stream: Stream::Stdout, line: "one".into(), lines: 1, bytes: 5 };
        assert_eq!(told[0], first);
        let newest = Progress { stream: Stream::Stdout, line: "four".into(), lines: 4, bytes: 20 };
        assert_eq!(told[1], newest);
        assert_eq!((told[2].lines, told[2].line.len()), (5, MAX_PROGRESS_LINE));
        assert_eq!(
            serde_json::to_value(&told[0]).expect("JSON"),
            serde_json::json!({"stream": "stdout", "line": "one", "lines": 1, "bytes": 5})
        );
    }
}
