//! Who is at the other end of a connection.

use std::{io, net::SocketAddr};

use axum::{
    extract::{ConnectInfo, connect_info::Connected},
    http::Extensions,
    serve::{IncomingStream, Listener},
};
use tokio::net::{TcpListener, TcpStream, UnixListener};

/// Who is at the other end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer {
    /// Somebody at this address.
    Tcp(SocketAddr),
    /// Somebody who may open the socket's file.
    Unix,
}

impl Peer {
    /// Whether it is on this machine.
    pub(crate) fn is_local(self) -> bool {
        match self {
            Self::Tcp(address) => address.ip().to_canonical().is_loopback(),
            Self::Unix => true,
        }
    }

    /// The peer of a request, where it came by a connection.
    pub(crate) fn of(extensions: &Extensions) -> Option<Self> {
        extensions.get::<ConnectInfo<Self>>().map(|info| info.0)
    }
}

/// A TCP listener whose connections send small frames at once: events are small.
#[derive(Debug)]
pub(crate) struct Tcp(pub(crate) TcpListener);

impl Listener for Tcp {
    type Io = TcpStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (TcpStream, SocketAddr) {
        // Tries again by itself when the process is out of descriptors.
        let (stream, address) = Listener::accept(&mut self.0).await;
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "a connection collects small frames");
        }
        (stream, address)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }
}

impl Connected<IncomingStream<'_, Tcp>> for Peer {
    fn connect_info(stream: IncomingStream<'_, Tcp>) -> Self {
        Self::Tcp(*stream.remote_addr())
    }
}

impl Connected<IncomingStream<'_, UnixListener>> for Peer {
    fn connect_info(_: IncomingStream<'_, UnixListener>) -> Self {
        Self::Unix
    }
}
