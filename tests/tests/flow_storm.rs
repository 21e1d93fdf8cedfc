//! A storm of messages, at a bounded size; `bench storm` has the full one, with times.

use anyhow::{Result, ensure};
use holdfast_tests::{
    cluster::fresh_database,
    memory,
    storm::{self, Storm},
};

#[tokio::test(flavor = "multi_thread")]
async fn each_message_of_a_storm_is_said_once_and_in_its_senders_order() -> Result<()> {
    let database = fresh_database().await;
    let world = storm::world(database.url()).await?;
    let (api_node, api) = world.node("api", &[], &[]).await?;
    let (worker, _) = world.node("worker", &[], &[]).await?;
    let weathered = Storm { messages: 1_500, clients: 30, sessions: 3 }.rage(&world, &api).await?;
    ensure!(weathered.accepts.len() == 1_500, "{} were accepted", weathered.accepts.len());
    for node in [&api_node, &worker] {
        let peak = node.peak_memory()?;
        ensure!(peak <= 4 * memory::BASE, "{peak} bytes");
    }
    Ok(())
}
