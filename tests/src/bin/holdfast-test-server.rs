//! Runs a Postgres for the tests: its URL on the first line of stdout, until stdin closes or SIGTERM
//! or SIGINT comes.

use std::io::Write as _;

use anyhow::Result;
use holdfast_tests::cluster;
use tokio::{
    io::AsyncReadExt as _,
    signal::unix::{SignalKind, signal},
};

#[tokio::main]
async fn main() -> Result<()> {
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let dir = tempfile::Builder::new().prefix("holdfast-test-server-").tempdir()?;
    let cluster = cluster::start(dir.path()).await?;
    let mut out = std::io::stdout();
    writeln!(out, "{}", cluster.url("postgres"))?;
    out.flush()?;
    let closed = async {
        let (mut input, mut buffer) = (tokio::io::stdin(), [0_u8; 1024]);
        while input.read(&mut buffer).await.is_ok_and(|count| count > 0) {}
    };
    tokio::select! {
        () = closed => {}
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
    cluster.destroy().await?;
    drop(dir);
    // The runtime would wait for the read of stdin, which nothing ends.
    std::process::exit(0);
}
