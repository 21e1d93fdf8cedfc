//! A wire between a node and its database that can be cut, slowed down and stalled. It knows nothing of
//! what goes over it.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use anyhow::Result;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::watch,
};
use tokio_util::task::AbortOnDropHandle;

/// How a wire is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weather {
    /// What is sent arrives at once.
    Fair,
    /// Each piece arrives this much later, in both directions.
    Slow(Duration),
    /// Nothing arrives until the weather changes, and then everything does.
    Stalled,
}

/// The wire. It ends with this value.
#[derive(Debug)]
pub struct Wire {
    address: SocketAddr,
    shared: Arc<Shared>,
    _accepting: AbortOnDropHandle<()>,
}

#[derive(Debug)]
struct Shared {
    server: SocketAddr,
    weather: watch::Sender<Weather>,
    /// Rises when every connection is to be cut.
    cut: watch::Sender<u64>,
}

impl Wire {
    /// A wire to a server, from a free port of loopback.
    ///
    /// # Errors
    /// If no port is free.
    pub async fn to(server: SocketAddr) -> Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let address = listener.local_addr()?;
        let (weather, cut) = (watch::channel(Weather::Fair).0, watch::channel(0).0);
        let shared = Arc::new(Shared { server, weather, cut });
        let serving = Arc::clone(&shared);
        let accepting = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let shared = Arc::clone(&serving);
                // However a connection ends, both of its sides close.
                tokio::spawn(async move { serve(client, &shared).await });
            }
        });
        Ok(Self { address, shared, _accepting: AbortOnDropHandle::new(accepting) })
    }

    /// Where it begins.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Changes the weather, for connections that stand and those to come.
    pub fn set(&self, weather: Weather) {
        self.shared.weather.send_replace(weather);
    }

    /// Cuts every connection that stands.
    pub fn cut_all(&self) {
        self.shared.cut.send_modify(|count| *count += 1);
    }
}

async fn serve(client: TcpStream, shared: &Shared) -> Result<()> {
    let mut cut = shared.cut.subscribe();
    let server = TcpStream::connect(shared.server).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (client_reads, client_writes) = client.into_split();
    let (server_reads, server_writes) = server.into_split();
    tokio::select! {
        ended = pump(client_reads, server_writes, shared.weather.subscribe()) => ended,
        ended = pump(server_reads, client_writes, shared.weather.subscribe()) => ended,
        _ = cut.changed() => Ok(()),
    }
}

async fn pump(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    mut weather: watch::Receiver<Weather>,
) -> Result<()> {
    let mut buffer = vec![0_u8; 64 * 1024];
    loop {
        let count = from.read(&mut buffer).await?;
        if count == 0 {
            return Ok(());
        }
        let now = *weather.wait_for(|weather| *weather != Weather::Stalled).await?;
        if let Weather::Slow(delay) = now {
            tokio::time::sleep(delay).await;
        }
        to.write_all(&buffer[..count]).await?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn echo() -> Result<SocketAddr> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let address = listener.local_addr()?;
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (mut reads, mut writes) = stream.into_split();
                tokio::spawn(async move { tokio::io::copy(&mut reads, &mut writes).await });
            }
        });
        Ok(address)
    }

    #[tokio::test]
    async fn a_wire_stalls_goes_on_and_is_cut() -> Result<()> {
        let wire = Wire::to(echo().await?).await?;
        let mut stream = TcpStream::connect(wire.address()).await?;
        let mut buffer = [0_u8; 4];
        stream.write_all(b"fair").await?;
        stream.read_exact(&mut buffer).await?;
        assert_eq!(&buffer, b"fair");

        wire.set(Weather::Stalled);
        stream.write_all(b"wait").await?;
        let early = tokio::time::timeout(Duration::from_millis(100), stream.read_exact(&mut buffer)).await;
        assert!(early.is_err(), "nothing arrives over a stalled wire");
        wire.set(Weather::Slow(Duration::from_millis(50)));
        stream.read_exact(&mut buffer).await?;
        assert_eq!(&buffer, b"wait", "what was sent meanwhile arrives");

        wire.cut_all();
        assert!(matches!(stream.read(&mut buffer).await, Ok(0) | Err(_)));
        wire.set(Weather::Fair);
        let mut again = TcpStream::connect(wire.address()).await?;
        again.write_all(b"more").await?;
        again.read_exact(&mut buffer).await?;
        assert_eq!(&buffer, b"more", "a cut ends connections, not the wire");
        Ok(())
    }
}
