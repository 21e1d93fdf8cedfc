//! Runs a Postgres for the tests: its URL on the first line of stdout, until stdin closes or SIGTERM
//! or SIGINT comes.
//!
//! `--database NAME` makes a migrated database of that name anew on the server that
//! `HOLDFAST_TEST_SERVER` names, prints its URL and ends.

use std::io::Write as _;

use anyhow::{Result, bail};
use holdfast_tests::cluster;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::oneshot,
};

#[tokio::main]
async fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.as_slice() {
        [] => serve().await,
        [option, name] if option == "--database" => {
            writeln!(std::io::stdout(), "{}", cluster::named_database(name).await?)?;
            Ok(())
        }
        _ => bail!("usage: holdfast-test-server [--database NAME]"),
    }
}

async fn serve() -> Result<()> {
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let dir = tempfile::Builder::new().prefix("holdfast-test-server-").tempdir()?;
    let cluster = cluster::start(dir.path()).await?;
    let mut out = std::io::stdout();
    writeln!(out, "{}", cluster.url("postgres"))?;
    out.flush()?;
    let (tell, closed) = oneshot::channel();
    // A thread of its own: nothing ends a read of stdin, and the process doesn't wait for it.
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        let _ = tell.send(());
    });
    tokio::select! {
        _ = closed => {}
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
    cluster.destroy().await?;
    drop(dir);
    Ok(())
}
