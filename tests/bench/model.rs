//! A model over HTTP, in this process, that says when each request reached it.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::mpsc,
};

/// What is said of a request.
#[derive(Debug)]
pub(crate) struct Asked {
    /// When its first bytes arrived.
    pub(crate) at: Instant,
    /// What the session's user said first.
    pub(crate) prompt: String,
}

/// A model that is being served.
pub(crate) struct Model {
    /// Where, as agents name it.
    pub(crate) url: String,
    /// What it has been asked.
    pub(crate) asked: mpsc::UnboundedReceiver<Asked>,
}

#[derive(Debug, Clone, Copy)]
struct Manner {
    thinks: Duration,
    rounds: usize,
}

impl Model {
    /// Serves a model that thinks for so long before each answer. Its first `rounds` answers to a session are
    /// calls of a tool that it wasn't offered; all others are text.
    pub(crate) async fn start(thinks: Duration, rounds: usize) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}/v1", listener.local_addr()?);
        let (tell, asked) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                // A connection that breaks is the worker's to open again.
                tokio::spawn(serve(socket, tell.clone(), Manner { thinks, rounds }));
            }
        });
        Ok(Self { url, asked })
    }

    /// The next request.
    pub(crate) async fn next(&mut self) -> Result<Asked> {
        let waiting = tokio::time::timeout(Duration::from_secs(60), self.asked.recv());
        waiting.await.context("the model wasn't asked for a minute")?.context("the model is gone")
    }
}

async fn serve(mut socket: TcpStream, tell: mpsc::UnboundedSender<Asked>, manner: Manner) -> Result<()> {
    socket.set_nodelay(true)?;
    let mut request = Vec::new();
    loop {
        request.clear();
        let mut began = None;
        let body: Value = loop {
            if socket.read_buf(&mut request).await? == 0 {
                return Ok(());
            }
            began.get_or_insert_with(Instant::now);
            if let Some(body) = body(&request) {
                break serde_json::from_slice(body)?;
            }
        };
        let messages = body["messages"].as_array().context("no messages")?;
        let of = |role: &'static str| messages.iter().filter(move |message| message["role"] == role);
        let prompt = of("user").next().and_then(|message| message["content"].as_str()).unwrap_or_default();
        let asked = Asked { at: began.context("no request")?, prompt: prompt.to_owned() };
        tell.send(asked)?;
        let message = match of("assistant").count() < manner.rounds {
            true => json!({"role": "assistant", "tool_calls": [
                {"id": "call_0", "type": "function", "function": {"name": "ask_somebody", "arguments": "{}"}}]}),
            false => json!({"role": "assistant", "content": "done"}),
        };
        let answer = json!({"choices": [{"index": 0, "message": message}]}).to_string();
        if !manner.thinks.is_zero() {
            tokio::time::sleep(manner.thinks).await;
        }
        let head = format!(
            "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            answer.len()
        );
        socket.write_all((head + &answer).as_bytes()).await?;
    }
}

/// The body of a request, once all of it is there.
fn body(request: &[u8]) -> Option<&[u8]> {
    let end = request.windows(4).position(|bytes| bytes == b"\r\n\r\n")? + 4;
    let head = std::str::from_utf8(&request[..end]).ok()?.to_ascii_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length:"))?.trim();
    request.get(end..end + length.parse::<usize>().ok()?)
}
