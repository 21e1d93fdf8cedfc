//! Hearing the hints of other processes through LISTEN.
//!
//! The connection is its own, outside every pool, and comes back for ever. Whatever may have been missed,
//! at a reconnect or by a slow subscriber, is told as [`Heard::Resync`], upon which the subscriber scans.

use std::sync::Arc;
use std::time::Duration;

use futures::stream::{self, StreamExt};
use tokio::sync::{broadcast, watch};
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_postgres::{AsyncMessage, Client, Notification};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::AbortOnDropHandle;

use crate::connect::{Backoff, ConnectError, RawConnection, Session, Target};
use crate::counters::COUNTERS;
use crate::notify::Channel;

/// How many hints a subscriber may lag behind before it is told to scan instead.
const CAPACITY: usize = 16_384;

/// What a subscriber hears.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Heard {
    /// Something happened.
    Item {
        /// What it is about.
        channel: Channel,
        /// The sender's item: a key, or one JSON value for [`Channel::Deltas`].
        item: Arc<str>,
    },
    /// Hints may have been lost up to now: look at everything.
    Resync,
}

/// When a silent connection counts as dead.
#[derive(Debug, Clone, Copy)]
struct Timing {
    keepalive: Duration,
    answer: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self { keepalive: Duration::from_secs(15), answer: Duration::from_secs(5) }
    }
}

/// Listens on channels and hands what it hears to its subscribers. Cheap to clone; the task ends when the
/// last clone is dropped.
#[derive(Debug, Clone)]
pub struct Listener {
    heard: broadcast::Sender<Heard>,
    connected: watch::Receiver<bool>,
    _stop_on_drop: Arc<DropGuard>,
}

/// One subscriber's place in what is heard.
#[derive(Debug)]
pub struct Subscription {
    heard: broadcast::Receiver<Heard>,
    first: bool,
}

impl Listener {
    /// Starts the listening task on the current runtime; it connects in the background. `url` must lead to
    /// the server directly. The session is named `holdfast-<role>-listen`.
    ///
    /// # Errors
    /// [`ConnectError::Url`] and [`ConnectError::Tls`].
    pub fn start(url: &str, role: &str, channels: &[Channel]) -> Result<Listener, ConnectError> {
        Self::start_with(url, role, channels, Timing::default())
    }

    fn start_with(
        url: &str,
        role: &str,
        channels: &[Channel],
        timing: Timing,
    ) -> Result<Listener, ConnectError> {
        let target = Target::parse(url, &format!("{role}-listen"), Session::Bounded)?;
        let listen: String = channels.iter().map(|channel| format!("LISTEN {};", channel.name())).collect();
        let (heard, _) = broadcast::channel(CAPACITY);
        let (up, connected) = watch::channel(false);
        let stop = CancellationToken::new();
        let (sender, stopped) = (heard.clone(), stop.clone());
        tokio::spawn(async move {
            stopped.run_until_cancelled(run(target, listen, timing, sender, up)).await;
        });
        Ok(Listener { heard, connected, _stop_on_drop: Arc::new(stop.drop_guard()) })
    }

    /// Hears everything from now on, beginning with a [`Heard::Resync`] for what came before.
    pub fn subscribe(&self) -> Subscription {
        Subscription { heard: self.heard.subscribe(), first: true }
    }

    /// Whether the connection stands now.
    pub fn is_connected(&self) -> bool {
        *self.connected.borrow()
    }

    /// Waits until the connection stands.
    pub async fn connected(&self) {
        let mut connected = self.connected.clone();
        // An error means that the runtime is shutting down, and with it whoever waits.
        let _ = connected.wait_for(|connected| *connected).await;
    }
}

impl Subscription {
    /// The next hint, or none when the listener was dropped. Hints lost because this subscriber is slow
    /// come as one [`Heard::Resync`]. May be cancelled without losing anything.
    pub async fn recv(&mut self) -> Option<Heard> {
        if std::mem::take(&mut self.first) {
            return Some(Heard::Resync);
        }
        match self.heard.recv().await {
            Ok(heard) => Some(heard),
            Err(broadcast::error::RecvError::Lagged(_)) => {
                // What is still in the channel is covered by the scan that follows.
                self.heard = self.heard.resubscribe();
                Some(Heard::Resync)
            }
            Err(broadcast::error::RecvError::Closed) => None,
        }
    }
}

async fn run(
    target: Target,
    listen: String,
    timing: Timing,
    heard: broadcast::Sender<Heard>,
    up: watch::Sender<bool>,
) {
    let mut backoff = Backoff::new();
    loop {
        let lost = serve(&target, &listen, timing, &heard, &up, &mut backoff).await;
        if up.send_replace(false) {
            tracing::warn!(error = %lost, "the listener lost its connection; reconnecting");
        } else {
            tracing::debug!(error = %lost, "the listener can't connect; trying again");
        }
        tokio::time::sleep(backoff.step()).await;
    }
}

/// Why a connection is given up.
#[derive(Debug, thiserror::Error)]
enum Lost {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("the server closed the connection")]
    Closed,
    #[error("no answer within {} ms", .0.as_millis())]
    Silent(Duration),
}

impl From<tokio_postgres::Error> for Lost {
    fn from(error: tokio_postgres::Error) -> Self {
        Lost::Connect(ConnectError::Postgres(error))
    }
}

/// Listens on one connection until it is lost, and returns why.
async fn serve(
    target: &Target,
    listen: &str,
    timing: Timing,
    heard: &broadcast::Sender<Heard>,
    up: &watch::Sender<bool>,
    backoff: &mut Backoff,
) -> Lost {
    let (client, connection) = match target.open().await {
        Ok(opened) => opened,
        Err(error) => return error.into(),
    };
    let mut driver = AbortOnDropHandle::new(tokio::spawn(drive(connection, heard.clone())));
    if let Err(lost) = ask(&client, listen, timing.answer).await {
        return lost;
    }
    COUNTERS.listener_connections.add(1);
    // Only now is nothing missed any more.
    let _ = heard.send(Heard::Resync);
    up.send_replace(true);
    let mut keepalive = interval(timing.keepalive);
    keepalive.set_missed_tick_behavior(MissedTickBehavior::Delay);
    keepalive.reset();
    loop {
        tokio::select! {
            ended = &mut driver => {
                return match ended {
                    Ok(Err(error)) => error.into(),
                    _ => Lost::Closed,
                };
            }
            _ = keepalive.tick() => {
                if let Err(lost) = ask(&client, "SELECT 1", timing.answer).await {
                    return lost;
                }
                // A connection that has lived this long makes the next loss a new one.
                backoff.reset();
            }
        }
    }
}

async fn ask(client: &Client, sql: &str, limit: Duration) -> Result<(), Lost> {
    match timeout(limit, client.batch_execute(sql)).await {
        Ok(done) => Ok(done?),
        Err(_) => Err(Lost::Silent(limit)),
    }
}

/// Drives the connection and hands on its notifications. Nobody subscribed is no error.
async fn drive(
    mut connection: RawConnection,
    heard: broadcast::Sender<Heard>,
) -> Result<(), tokio_postgres::Error> {
    let mut messages = stream::poll_fn(move |context| connection.poll_message(context));
    while let Some(message) = messages.next().await {
        if let AsyncMessage::Notification(notification) = message? {
            hand_on(&notification, &heard);
        }
    }
    Ok(())
}

fn hand_on(notification: &Notification, heard: &broadcast::Sender<Heard>) {
    let Some(channel) = Channel::of_name(notification.channel()) else { return };
    match channel.items(notification.payload()) {
        Some(items) => {
            for item in items {
                COUNTERS.heard(channel);
                let _ = heard.send(Heard::Item { channel, item: item.into() });
            }
        }
        None => tracing::debug!(channel = channel.name(), "a foreign notification was ignored"),
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::copy_bidirectional;
    use tokio::net::{TcpListener, TcpStream};

    use super::*;
    use crate::embedded::{Cluster, EmbeddedOptions};

    /// Forwards connections to the server until told to fall silent: sockets stay open, bytes stop.
    async fn proxy(server: u16, mut silent: watch::Receiver<bool>) -> u16 {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
        let port = listener.local_addr().expect("an address").port();
        tokio::spawn(async move {
            let mut held = Vec::new();
            while let Ok((mut client, _)) = listener.accept().await {
                silent.wait_for(|silent| !silent).await.expect("the test goes on");
                let mut upstream = TcpStream::connect(("127.0.0.1", server)).await.expect("the server");
                let mut silent = silent.clone();
                held.push(tokio::spawn(async move {
                    let silenced = tokio::select! {
                        _ = copy_bidirectional(&mut client, &mut upstream) => false,
                        _ = silent.wait_for(|silent| *silent) => true,
                    };
                    if silenced {
                        std::future::pending::<()>().await;
                    }
                }));
            }
        });
        port
    }

    #[tokio::test]
    async fn a_silently_dead_connection_is_replaced() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let options = EmbeddedOptions { durable: false, ..EmbeddedOptions::new(dir.path()) };
        let cluster = Cluster::start(options).await.expect("a cluster");
        let (silence, silent) = watch::channel(false);
        let port = proxy(cluster.port(), silent).await;
        let url = cluster.url("postgres").replace(&format!(":{}/", cluster.port()), &format!(":{port}/"));
        let timing = Timing { keepalive: Duration::from_millis(50), answer: Duration::from_millis(500) };
        let listener = Listener::start_with(&url, "test", &Channel::ALL, timing).expect("a listener");
        listener.connected().await;
        let mut heard = listener.subscribe();
        assert_eq!(heard.recv().await, Some(Heard::Resync), "what came before");

        silence.send_replace(true);
        let mut connected = listener.connected.clone();
        connected.wait_for(|connected| !connected).await.expect("the silence is noticed");
        silence.send_replace(false);
        assert_eq!(heard.recv().await, Some(Heard::Resync), "after the new connection");
        cluster.destroy().await.expect("destroyed");
    }

    #[tokio::test]
    async fn a_slow_subscriber_is_told_to_scan() {
        let (sender, receiver) = broadcast::channel(4);
        let mut subscription = Subscription { heard: receiver, first: true };
        assert_eq!(subscription.recv().await, Some(Heard::Resync));
        for n in 0..10 {
            let item = n.to_string().into();
            sender.send(Heard::Item { channel: Channel::Runs, item }).expect("a receiver");
        }
        assert_eq!(subscription.recv().await, Some(Heard::Resync));
        let item = Heard::Item { channel: Channel::Runs, item: "new".into() };
        sender.send(item.clone()).expect("a receiver");
        assert_eq!(subscription.recv().await, Some(item));
        drop(sender);
        assert_eq!(subscription.recv().await, None);
    }
}
