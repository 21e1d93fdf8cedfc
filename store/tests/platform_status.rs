//! What operators are told of the feed across sessions: who holds it back, and how far it is behind.

use holdfast_store::{
    Store,
    connect::{ConnectOptions, connect},
    embedded::{Cluster, EmbeddedOptions},
    migrate::migrate,
    status::{FeedState, feed},
};
use tokio_postgres::{Client, NoTls};

async fn client(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.expect("connected");
    tokio::spawn(connection);
    client
}

async fn process(client: &Client) -> i32 {
    client.query_one("SELECT pg_backend_pid()", &[]).await.expect("an answer").get(0)
}

fn writer(state: &FeedState) -> Option<i32> {
    state.oldest_writer.as_ref().and_then(|writer| writer.pid)
}

#[tokio::test]
async fn a_forgotten_writer_of_any_database_is_named_with_what_it_holds_back() {
    const EVENTS: &str = "INSERT INTO events (session_id, seq, owner, kind, body, at)
        SELECT gen_random_uuid(), 1, 'o', 'session.created', '{}', now() - n * interval '1 hour'
        FROM generate_series(1, 3) n";
    let dir = tempfile::tempdir().expect("a temporary directory");
    let options = EmbeddedOptions { durable: false, ..EmbeddedOptions::new(dir.path()) };
    let cluster = Cluster::start(options).await.expect("a cluster");
    cluster.create_database("holdfast").await.expect("created");
    let url = cluster.url("holdfast");
    migrate(&url).await.expect("migrated");
    let store = Store::new(connect(ConnectOptions::new(url.clone(), "test")).await.expect("connected"), None);
    let sql = client(&url).await;
    sql.execute(EVENTS, &[]).await.expect("written");
    let calm = feed(&store).await.expect("a state");
    assert_eq!((calm.held_back, calm.lag_micros), (0, 0), "{calm:?}");

    let forgotten = client(&format!("{}?application_name=forgotten", cluster.url("postgres"))).await;
    forgotten.batch_execute("BEGIN; SELECT pg_current_xact_id()").await.expect("begun");
    let later = client(&url).await;
    later.batch_execute("BEGIN; SELECT pg_current_xact_id()").await.expect("begun");
    sql.execute(EVENTS, &[]).await.expect("written");
    let stalled = feed(&store).await.expect("a state");
    assert_eq!(writer(&stalled), Some(process(&forgotten).await), "{stalled:?}");
    let oldest = stalled.oldest_writer.as_ref().expect("a writer");
    assert_eq!((oldest.name.as_str(), oldest.database.as_deref()), ("forgotten", Some("postgres")));
    assert_eq!(oldest.state.as_deref(), Some("idle in transaction"));
    assert!(oldest.since.is_some());
    assert_eq!(stalled.held_back, 3, "what was written before it isn't held back");
    let hours = stalled.lag_micros / 3_600_000_000;
    assert_eq!(hours, 3, "the oldest counts: {stalled:?}");

    forgotten.batch_execute("COMMIT").await.expect("ended");
    let next = feed(&store).await.expect("a state");
    assert_eq!(writer(&next), Some(process(&later).await), "{next:?}");
    later.batch_execute("ROLLBACK").await.expect("ended");
    let calm = feed(&store).await.expect("a state");
    assert_eq!((calm.held_back, calm.lag_micros, calm.oldest_writer), (0, 0, None));
    store.db().close().await;
    cluster.destroy().await.expect("destroyed");
}
