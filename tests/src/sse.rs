//! A client of event streams that reconnects with `Last-Event-ID`, as browsers do.

use std::sync::{Arc, Mutex};

use anyhow::{Result, ensure};
use futures::StreamExt;
use serde_json::Value;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// An event as it arrived.
#[derive(Debug, Clone, PartialEq)]
pub struct Frame {
    /// Its id; snapshots and text deltas have none.
    pub id: Option<String>,
    /// Its kind.
    pub kind: String,
    /// Its data.
    pub data: Value,
}

/// Follows a stream through any number of disconnects, at one node after another.
pub struct Follower {
    frames: Arc<Mutex<Vec<Frame>>>,
    news: watch::Receiver<usize>,
    stop: CancellationToken,
}

impl Follower {
    /// Follows `path` at `nodes`, in turn. The nodes' addresses may change while it follows.
    pub fn start(nodes: Arc<Mutex<Vec<String>>>, path: String) -> Self {
        let frames = Arc::new(Mutex::new(Vec::new()));
        let (sender, news) = watch::channel(0);
        let stop = CancellationToken::new();
        let (kept, stopped) = (Arc::clone(&frames), stop.clone());
        let _following = tokio::spawn(async move {
            let mut last: Option<String> = None;
            let mut turn = 0;
            let mut pause = tokio::time::interval(std::time::Duration::from_millis(50));
            while !stopped.is_cancelled() {
                pause.tick().await;
                let node = nodes.lock().map(|nodes| nodes[turn % nodes.len()].clone()).unwrap_or_default();
                turn += 1;
                let url = format!("{node}{path}");
                // However a stream ends, the next one begins behind the last id.
                let _ended = tokio::select! {
                    () = stopped.cancelled() => return,
                    followed = follow(&url, &mut last, &kept, &sender) => followed,
                };
            }
        });
        Self { frames, news, stop }
    }

    /// What has arrived so far.
    pub fn frames(&self) -> Vec<Frame> {
        self.frames.lock().map(|frames| frames.clone()).unwrap_or_default()
    }

    /// Waits until what has arrived fulfils `wanted`.
    ///
    /// # Errors
    /// If that takes too long.
    pub async fn until(&self, wanted: impl Fn(&[Frame]) -> bool) -> Result<Vec<Frame>> {
        let mut news = self.news.clone();
        let waiting = tokio::time::timeout(crate::world::PATIENCE, async {
            while !wanted(&self.frames()) {
                if news.changed().await.is_err() {
                    return;
                }
            }
        });
        let ended = waiting.await;
        let frames = self.frames();
        ensure!(ended.is_ok() && wanted(&frames), "the stream lacks something: {frames:#?}");
        Ok(frames)
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

async fn follow(
    url: &str,
    last: &mut Option<String>,
    frames: &Mutex<Vec<Frame>>,
    news: &watch::Sender<usize>,
) -> Result<()> {
    let client = reqwest::Client::builder().build()?;
    let mut request = client.get(url);
    if let Some(id) = &last {
        request = request.header("Last-Event-ID", id);
    }
    let mut body = request.send().await?.error_for_status()?.bytes_stream();
    let mut pending = Vec::new();
    while let Some(bytes) = body.next().await {
        pending.extend_from_slice(&bytes?);
        while let Some(end) = pending.windows(2).position(|pair| pair == b"\n\n") {
            let block: Vec<u8> = pending.drain(..end + 2).collect();
            if let Some(frame) = parse(&String::from_utf8(block)?)? {
                if frame.id.is_some() {
                    last.clone_from(&frame.id);
                }
                if let Ok(mut frames) = frames.lock() {
                    frames.push(frame);
                }
                news.send_modify(|count| *count += 1);
            }
        }
    }
    Ok(())
}

fn parse(block: &str) -> Result<Option<Frame>> {
    let (mut id, mut kind, mut data) = (None, String::new(), String::new());
    for line in block.lines() {
        match line.split_once(':').map(|(field, value)| (field, value.strip_prefix(' ').unwrap_or(value))) {
            Some(("id", value)) => id = Some(value.to_owned()),
            Some(("event", value)) => kind = value.to_owned(),
            Some(("data", value)) => data.push_str(value),
            _ => {}
        }
    }
    if data.is_empty() {
        return Ok(None);
    }
    Ok(Some(Frame { id, kind, data: serde_json::from_str(&data)? }))
}

/// Checks that the numbered frames are a session's events from the first on, each once and in order,
/// and that its versions rise by one.
///
/// # Errors
/// Says what is missing or doubled.
pub fn check_dense(frames: &[Frame]) -> Result<()> {
    let ids: Vec<i64> = frames.iter().filter_map(|frame| frame.id.as_deref()?.parse().ok()).collect();
    let expected: Vec<i64> = (1..).take(ids.len()).collect();
    ensure!(ids == expected, "events are missing or doubled: {ids:?}");
    let mut version = 1;
    for frame in frames.iter().filter(|frame| frame.kind == "session.updated") {
        let next = frame.data["version"].as_i64().unwrap_or_default();
        ensure!(next == version || next == version + 1, "version {next} after {version}: {frames:#?}");
        version = next;
    }
    Ok(())
}
