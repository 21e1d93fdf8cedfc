//! Clients that cost little: a socket and a small buffer each.

use std::{net::SocketAddr, time::Instant};

use anyhow::{Result, ensure};
use holdfast_engine::ids::SessionId;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::TcpStream,
    sync::watch,
    task::JoinHandle,
};

/// Bytes of a client's buffer.
const BUFFER: usize = 512;

/// Sends a request for a session.
async fn ask(address: SocketAddr, session: SessionId, what: &str) -> Result<BufReader<TcpStream>> {
    let mut socket = TcpStream::connect(address).await?;
    let path = format!("/v1/sessions/{session}{what}");
    let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    socket.write_all(request.as_bytes()).await?;
    Ok(BufReader::with_capacity(BUFFER, socket))
}

/// The rest of an answer, whose head has to be that of a success.
async fn whole(mut socket: BufReader<TcpStream>) -> Result<Instant> {
    let mut answer = Vec::new();
    socket.read_to_end(&mut answer).await?;
    let read = Instant::now();
    let head = String::from_utf8_lossy(&answer[..answer.len().min(200)]);
    ensure!(head.starts_with("HTTP/1.1 20"), "{head}");
    Ok(read)
}

/// Reads a session once.
pub(crate) async fn get(address: SocketAddr, session: SessionId) -> Result<()> {
    whole(ask(address, session, "").await?).await.map(|_| ())
}

/// A request that waits for a session's run to stop.
pub(crate) struct Wait {
    /// Gives when it was answered.
    pub(crate) answered: JoinHandle<Result<Instant>>,
}

impl Wait {
    /// Sends the request.
    pub(crate) async fn open(address: SocketAddr, session: SessionId) -> Result<Self> {
        let socket = ask(address, session, "?wait=true&timeout=600").await?;
        Ok(Self { answered: tokio::spawn(whole(socket)) })
    }
}

/// A session's event stream.
pub(crate) struct Stream {
    read: watch::Receiver<Vec<Instant>>,
}

impl Stream {
    /// Opens it and reads its snapshot.
    pub(crate) async fn open(address: SocketAddr, session: SessionId) -> Result<Self> {
        let mut socket = ask(address, session, "/events").await?;
        let mut line = Vec::new();
        while line != b"event: snapshot\n" {
            line.clear();
            ensure!(socket.read_until(b'\n', &mut line).await? > 0, "the stream of {session} isn't served");
        }
        let (tell, read) = watch::channel(Vec::new());
        tokio::spawn(async move {
            loop {
                line.clear();
                match socket.read_until(b'\n', &mut line).await {
                    // A snapshot has no id, so each of these is an event.
                    Ok(1..) if line.starts_with(b"id: ") => {
                        tell.send_modify(|read| read.push(Instant::now()))
                    }
                    Ok(1..) => {}
                    _ => return,
                }
            }
        });
        Ok(Self { read })
    }

    /// When events were read, once there are `count` of them or it is too late.
    pub(crate) async fn until(&self, count: usize, deadline: tokio::time::Instant) -> Vec<Instant> {
        let mut read = self.read.clone();
        let _ = tokio::time::timeout_at(deadline, read.wait_for(|read| read.len() >= count)).await;
        self.read.borrow().clone()
    }
}
