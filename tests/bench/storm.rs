//! A storm of messages from many clients to few busy sessions: how long accepts take, how often mailboxes are full, and
//! what memory the nodes have. Nothing is lost, doubled or out of a sender's order, or the program fails. Usage:
//! `bench storm [--messages=10000] [--clients=50] [--sessions=20]`.

use std::io::Write as _;

use anyhow::Result;
use holdfast_tests::storm::{self, Storm};
use tokio::time::Instant;

use crate::{flags, rig::Rig, samples::Samples};

pub(crate) async fn measure(arguments: &[String]) -> Result<()> {
    let known = [("messages", 10_000), ("clients", 50), ("sessions", 20)];
    let [messages, clients, sessions] = flags::numbers(arguments, known)?;
    let rig = Rig::start().await?;
    let world = storm::world(&rig.url).await?;
    let (api_node, api) = world.node("api", &[], &[]).await?;
    let (worker, _) = world.node("worker", &[], &[]).await?;
    let began = Instant::now();
    let weathered = Storm { messages, clients, sessions }.rage(&world, &api).await?;
    let mut accepts = Samples::default();
    for took in &weathered.accepts {
        accepts.add(*took);
    }
    let mib = |bytes: u64| bytes / (1024 * 1024);
    writeln!(
        std::io::stdout(),
        "{messages} messages, {clients} clients, {sessions} sessions: {:.1} s; accepts {accepts}; {} refusals, {} put off; memory of api {} MiB, worker {} MiB",
        began.elapsed().as_secs_f64(),
        weathered.refused,
        weathered.put_off,
        mib(api_node.peak_memory()?),
        mib(worker.peak_memory()?)
    )?;
    Ok(())
}
