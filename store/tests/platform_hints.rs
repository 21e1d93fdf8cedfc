//! Notifier and listener together, over restarts of the server.

use std::collections::BTreeSet;
use std::time::Duration;

use holdfast_store::embedded::{Cluster, EmbeddedOptions, StopMode};
use holdfast_store::listen::{Heard, Listener, Subscription};
use holdfast_store::notify::{Channel, Notifier};
use tempfile::TempDir;
use tokio::time::timeout;

const PATIENCE: Duration = Duration::from_secs(30);

async fn cluster() -> (TempDir, Cluster) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let options = EmbeddedOptions { durable: false, ..EmbeddedOptions::new(dir.path()) };
    let cluster = Cluster::start(options).await.expect("a cluster");
    (dir, cluster)
}

async fn next(heard: &mut Subscription) -> Heard {
    timeout(PATIENCE, heard.recv()).await.expect("something is heard").expect("the listener lives")
}

fn item(channel: Channel, item: &str) -> Heard {
    Heard::Item { channel, item: item.into() }
}

#[tokio::test]
async fn hints_arrive_whole_in_few_statements() {
    let (_dir, cluster) = cluster().await;
    let url = cluster.url("postgres");
    let listener = Listener::start(&url, "test", &Channel::ALL).expect("a listener");
    listener.connected().await;
    let mut heard = listener.subscribe();
    assert_eq!(next(&mut heard).await, Heard::Resync);

    let notifier = Notifier::start(&url, "test").expect("a notifier");
    let runs: BTreeSet<String> = (0..2_000).map(|n| format!("session-{n:0>28}")).collect();
    for run in runs.iter().chain(&runs) {
        notifier.send(Channel::Runs, run.clone());
    }
    let deltas = [r#"{"text":"one, two"}"#, r#"{"text":"Ä\n,"}"#, r#"{"text":"one, two"}"#];
    for delta in deltas {
        notifier.send(Channel::Deltas, delta.to_owned());
    }
    timeout(PATIENCE, notifier.flush()).await.expect("flushed");

    // Channels have no order between them; each keeps its own.
    let (mut got, mut texts) = (BTreeSet::new(), Vec::new());
    while got.len() < runs.len() || texts.len() < deltas.len() {
        match next(&mut heard).await {
            Heard::Item { channel: Channel::Runs, item } => assert!(got.insert(item.to_string())),
            Heard::Item { channel: Channel::Deltas, item } => texts.push(item.to_string()),
            other => panic!("unexpected {other:?}"),
        }
    }
    assert_eq!(got, runs);
    assert_eq!(texts, deltas);
    let stats = notifier.stats();
    assert_eq!((stats.sent, stats.dropped, stats.waiting), (2_003, 0, 0));
    assert!(stats.payloads >= 10 && stats.batches < 10, "{stats:?}");
    cluster.destroy().await.expect("destroyed");
}

#[tokio::test]
async fn a_crash_of_the_server_gives_a_resync_and_later_hints() {
    let (_dir, cluster) = cluster().await;
    let url = cluster.url("postgres");
    let listener = Listener::start(&url, "test", &[Channel::Events, Channel::Runs]).expect("a listener");
    let notifier = Notifier::start(&url, "test").expect("a notifier");
    listener.connected().await;
    let mut heard = listener.subscribe();
    assert_eq!(next(&mut heard).await, Heard::Resync);
    notifier.send(Channel::Events, "before".to_owned());
    notifier.flush().await;
    assert_eq!(next(&mut heard).await, item(Channel::Events, "before"));

    for (round, mode) in [StopMode::Immediate, StopMode::Fast].into_iter().enumerate() {
        cluster.stop(mode).await.expect("stopped");
        // Hints wait for the server; what listeners miss meanwhile the resync covers.
        notifier.send(Channel::Runs, format!("during-{round}"));
        cluster.restart(mode).await.expect("started");
        // A hint may come at any time, and again if its statement was interrupted.
        let during = item(Channel::Runs, &format!("during-{round}"));
        let mut wanted = async |wanted: Heard| {
            let mut seen = next(&mut heard).await;
            while seen == during {
                seen = next(&mut heard).await;
            }
            assert_eq!(seen, wanted);
        };
        wanted(Heard::Resync).await;
        timeout(PATIENCE, notifier.flush()).await.expect("flushed");
        notifier.send(Channel::Events, format!("after-{round}"));
        wanted(item(Channel::Events, &format!("after-{round}"))).await;
        // A hint whose statement was interrupted is sent again, so the next round begins without any.
        timeout(PATIENCE, notifier.flush()).await.expect("flushed");
        assert!(listener.is_connected());
    }
    let stats = notifier.stats();
    assert!(stats.connected && stats.connections >= 3, "{stats:?}");
    assert_eq!(stats.waiting, 0);
    notifier.close().await;
    cluster.destroy().await.expect("destroyed");
}

#[tokio::test]
async fn a_server_that_is_away_from_the_start_costs_only_waiting() {
    let (_dir, cluster) = cluster().await;
    let url = cluster.url("postgres");
    cluster.stop(StopMode::Fast).await.expect("stopped");
    let listener = Listener::start(&url, "test", &[Channel::Runs]).expect("a listener");
    let notifier = Notifier::start(&url, "test").expect("a notifier");
    for n in 0..10_050 {
        notifier.send(Channel::Runs, n.to_string());
    }
    let stats = notifier.stats();
    assert_eq!((stats.waiting, stats.dropped, stats.connected), (10_000, 50, false));
    assert!(!listener.is_connected());
    cluster.restart(StopMode::Fast).await.expect("started");
    timeout(PATIENCE, async { tokio::join!(listener.connected(), notifier.flush()) })
        .await
        .expect("both are back");
    assert_eq!(notifier.stats().sent, 10_000);
    cluster.destroy().await.expect("destroyed");
}

#[tokio::test]
async fn wrong_urls_are_refused_at_once() {
    assert!(Notifier::start("mysql://localhost/x", "test").is_err());
    assert!(Listener::start("postgres://h/d?sslmode=maybe", "test", &Channel::ALL).is_err());
}
