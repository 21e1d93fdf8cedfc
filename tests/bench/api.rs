//! An API node in a process of its own, with a pool of a chosen size: this program started again.

use std::{
    io::{Read as _, Write as _},
    net::SocketAddr,
    process::Stdio,
};

use anyhow::{Context as _, Result, bail};
use holdfast_store::{
    Store,
    connect::{self, ConnectOptions},
    listen::Listener,
    notify::{Channel, Notifier},
};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::{Child, Command},
};
use tokio_util::sync::CancellationToken;

/// The first argument of such a process.
pub(crate) const ROLE: &str = "api";

/// Connections of the pool that are for what clients command; the others are for reading.
const HOT: usize = 2;

/// An API node. Dropping it kills it.
pub(crate) struct Api {
    /// Where it listens.
    pub(crate) address: SocketAddr,
    /// Its process.
    pub(crate) pid: u32,
    _child: Child,
}

impl Api {
    /// Starts a node and waits until it serves.
    pub(crate) async fn start(url: &str, connections: usize) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args([ROLE, url, &connections.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let pid = child.id().context("the API node ended at once")?;
        let mut lines = BufReader::new(child.stdout.take().context("no output")?).lines();
        let address = lines.next_line().await?.context("the API node ended at its start")?;
        Ok(Self { address: address.parse()?, pid, _child: child })
    }
}

/// The work of such a process: `URL CONNECTIONS`, until its standard input is closed.
pub(crate) fn main(arguments: &[String]) -> Result<()> {
    let [url, connections] = arguments else { bail!("usage: api URL CONNECTIONS") };
    let reading = u32::try_from(connections.parse::<usize>()?.saturating_sub(HOT).max(1))?;
    let shutdown = CancellationToken::new();
    let closing = shutdown.clone().drop_guard();
    std::thread::spawn(move || {
        let _ = std::io::stdin().read(&mut [0]);
        drop(closing);
    });
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let options = ConnectOptions {
            hot_connections: HOT,
            read_connections: reading,
            ..ConnectOptions::new(url, "bench-api")
        };
        let store = Store::new(connect::connect(options).await?, Some(Notifier::start(url, "bench-api")?));
        let listener = Listener::start(url, "bench-api", &Channel::ALL)?;
        let config = holdfast_api::Config { bind: ([127, 0, 0, 1], 0).into(), ..Default::default() };
        let tell = |bound: holdfast_api::Bound| {
            let _ = writeln!(std::io::stdout(), "{}", bound.bind);
        };
        Ok(Box::pin(holdfast_api::serve(store, listener, config, shutdown, tell)).await?)
    })
}
