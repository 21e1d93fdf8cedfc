//! A proxy between a store and its server that reads the client's messages and breaks the connection
//! at a chosen one.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
};

use anyhow::{Result, bail};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{Semaphore, watch},
    time::timeout,
};
use tokio_util::task::AbortOnDropHandle;

use crate::{cluster::Database, gates::PATIENCE};

/// What happens to the next COMMIT that comes by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The server never sees it: both connections are cut before it is forwarded.
    CutBefore,
    /// The server carries it out; its answer is swallowed and both connections are cut.
    CutAfter,
    /// It is forwarded, and both connections are cut without waiting for what becomes of it.
    CutAtOnce,
    /// It is held until [`Proxy::release`], and then forwarded.
    Hold,
    /// It and everything after it is swallowed while the connections stand.
    Swallow,
}

/// The proxy. It ends with this value.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    _accepting: AbortOnDropHandle<()>,
}

#[derive(Debug)]
struct Shared {
    server: (String, u16),
    armed: Mutex<Option<Fault>>,
    tripped: Semaphore,
    go: Semaphore,
    /// Rises when every connection is to be cut.
    cut: watch::Sender<u64>,
}

impl Proxy {
    /// A proxy to a database's server, on a free port of loopback.
    ///
    /// # Panics
    /// If no port is free.
    pub async fn before(database: &Database) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let shared = Arc::new(Shared {
            server: database.address(),
            armed: Mutex::new(None),
            tripped: Semaphore::new(0),
            go: Semaphore::new(0),
            cut: watch::channel(0).0,
        });
        let serving = Arc::clone(&shared);
        let accepting = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let shared = Arc::clone(&serving);
                // However a connection ends, both of its sides close.
                tokio::spawn(async move { serve(client, &shared).await });
            }
        });
        Self { address, shared, _accepting: AbortOnDropHandle::new(accepting) }
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Lets a fault happen to the next COMMIT, once.
    pub fn arm(&self, fault: Fault) {
        *self.shared.armed.lock().unwrap_or_else(PoisonError::into_inner) = Some(fault);
    }

    /// Waits until the fault has happened.
    ///
    /// # Panics
    /// If it doesn't.
    pub async fn tripped(&self) {
        let met = timeout(PATIENCE, self.shared.tripped.acquire()).await;
        met.expect("a COMMIT comes by").expect("never closed").forget();
    }

    /// Forwards what [`Fault::Hold`] holds.
    pub fn release(&self) {
        self.shared.go.add_permits(1);
    }

    /// Cuts every connection that stands.
    pub fn cut_all(&self) {
        self.shared.cut.send_modify(|count| *count += 1);
    }
}

async fn serve(client: TcpStream, shared: &Shared) -> Result<()> {
    let mut cut = shared.cut.subscribe();
    let server = TcpStream::connect((shared.server.0.as_str(), shared.server.1)).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (from_client, mut to_client) = client.into_split();
    let (mut from_server, to_server) = server.into_split();
    // Answers stop being passed on when a COMMIT's answer is to be swallowed.
    let (mute, muted) = watch::channel(false);
    let (answered, answers) = watch::channel(0_u64);
    let down = async {
        let mut buffer = vec![0_u8; 16 * 1024];
        loop {
            let count = from_server.read(&mut buffer).await?;
            if count == 0 {
                return Ok(());
            }
            answered.send_modify(|seen| *seen += 1);
            if !*muted.borrow() {
                to_client.write_all(&buffer[..count]).await?;
            }
        }
    };
    tokio::select! {
        ended = down => ended,
        ended = forward(from_client, to_server, shared, &mute, answers) => ended,
        _ = cut.changed() => Ok(()),
    }
}

async fn forward(
    mut client: OwnedReadHalf,
    mut server: OwnedWriteHalf,
    shared: &Shared,
    mute: &watch::Sender<bool>,
    mut answers: watch::Receiver<u64>,
) -> Result<()> {
    let mut started = false;
    loop {
        let frame = read_frame(&mut client, started).await?;
        // The start-up message's version is 3.0; requests for TLS come before it.
        started = started || frame.get(4..8) == Some(&[0, 3, 0, 0]);
        let fault = if is_commit(&frame) {
            shared.armed.lock().unwrap_or_else(PoisonError::into_inner).take()
        } else {
            None
        };
        match fault {
            None => server.write_all(&frame).await?,
            Some(Fault::CutBefore) => {
                shared.tripped.add_permits(1);
                return Ok(());
            }
            Some(Fault::CutAfter) => {
                mute.send_replace(true);
                answers.mark_unchanged();
                server.write_all(&frame).await?;
                answers.changed().await?;
                shared.tripped.add_permits(1);
                return Ok(());
            }
            Some(Fault::CutAtOnce) => {
                mute.send_replace(true);
                server.write_all(&frame).await?;
                shared.tripped.add_permits(1);
                return Ok(());
            }
            Some(Fault::Hold) => {
                shared.tripped.add_permits(1);
                shared.go.acquire().await?.forget();
                server.write_all(&frame).await?;
            }
            Some(Fault::Swallow) => {
                shared.tripped.add_permits(1);
                std::future::pending::<()>().await;
            }
        }
    }
}

/// One message of the client: a type byte (absent before the start-up is over), a length that counts
/// itself, and the rest.
async fn read_frame(client: &mut OwnedReadHalf, typed: bool) -> Result<Vec<u8>> {
    let head = if typed { 5 } else { 4 };
    let mut frame = vec![0_u8; head];
    client.read_exact(&mut frame).await?;
    let mut length = [0_u8; 4];
    length.copy_from_slice(&frame[head - 4..]);
    let length = usize::try_from(u32::from_be_bytes(length))?;
    if length < 4 {
        bail!("a message of {length} bytes");
    }
    frame.resize(head + length - 4, 0);
    client.read_exact(&mut frame[head..]).await?;
    Ok(frame)
}

fn is_commit(frame: &[u8]) -> bool {
    frame.first() == Some(&b'Q') && frame.get(5..) == Some(b"COMMIT\0")
}
