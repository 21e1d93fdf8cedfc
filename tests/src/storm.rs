//! A storm of messages from many clients to few busy sessions.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use holdfast_engine::{
    content::Payload,
    turn::{Said, TurnBody},
};
use serde_json::{Value, json};
use tokio::time::Instant;
use uuid::Uuid;

use crate::{
    cluster::connect,
    world::{AgentFiles, Model, PATIENCE, World, client},
};

/// How large a storm is.
#[derive(Debug, Clone, Copy)]
pub struct Storm {
    /// Messages in all.
    pub messages: usize,
    /// Clients, each of which sends one message after the other.
    pub clients: usize,
    /// Sessions that they write to in turn.
    pub sessions: usize,
}

/// What came of it.
#[derive(Debug, Default)]
pub struct Weathered {
    /// How long each message took that was accepted.
    pub accepts: Vec<Duration>,
    /// How often a client was told that a mailbox is full, and came again.
    pub refused: usize,
    /// How often one was told that the node has no connection left, and came again.
    pub put_off: usize,
}

/// The name by which the model holds its answers until the mailboxes are full.
const FLOOD: &str = "flood";

/// A model that takes its time, so that sessions are busy, over a database.
///
/// # Errors
/// If the model or the files can't be made.
pub async fn world(database: &str) -> Result<World> {
    let reply = json!({"text": "noted", "delay_ms": 200, "hold": FLOOD});
    let script = json!({"rules": [{"reply": reply}]}).to_string();
    let model = Model::start(&script).await?;
    let config = json!({"slug": "busy", "flavor": "OpenAI", "modelUrl": model.url, "modelName": "m"});
    let agent = AgentFiles::with_tools(&config, &[])?;
    Ok(World::new(database, model, agent))
}

impl Storm {
    /// Lets it loose at an API node, waits until every session is idle, and checks that each message is said once and
    /// that what one client wrote to a session is said in its order. The model answers nobody until every client has
    /// met a full mailbox, or has written all that it has to.
    ///
    /// # Errors
    /// If something is lost, doubled or out of order.
    pub async fn rage(self, world: &World, api: &str) -> Result<Weathered> {
        let mut sessions = Vec::new();
        for _ in 0..self.sessions {
            sessions.push(world.create(api).await?);
        }
        let share = self.messages / self.clients;
        let full = AtomicUsize::new(0);
        // Made before any begins: that of fifty takes longer than an accept.
        let https: Vec<reqwest::Client> = (0..self.clients).map(|_| client()).collect();
        let clients = https.iter().enumerate().map(async |(number, http)| {
            let written = write(http, api, number, share, &sessions, &full).await?;
            if written.refused == 0 {
                full.fetch_add(1, Ordering::Relaxed);
            }
            Ok(written)
        });
        let filled = async {
            let mut pause = tokio::time::interval(Duration::from_millis(20));
            while full.load(Ordering::Relaxed) < self.clients {
                pause.tick().await;
            }
            world.model.release(FLOOD).await
        };
        let mut weathered = Weathered::default();
        let (written, ()) = futures::try_join!(futures::future::try_join_all(clients), filled)?;
        for one in written {
            weathered.accepts.extend(one.accepts);
            weathered.refused += one.refused;
            weathered.put_off += one.put_off;
        }
        for session in &sessions {
            world.until(api, *session, "idle").await?;
        }
        self.check(&world.url, &sessions, share).await?;
        Ok(weathered)
    }

    async fn check(self, database: &str, sessions: &[Uuid], share: usize) -> Result<()> {
        let sql = connect(database).await?;
        let mut total = 0;
        for session in sessions {
            let turns = "SELECT body FROM turns WHERE session_id = $1 AND tag = 'UserTurn' ORDER BY position";
            let mut newest: BTreeMap<usize, usize> = BTreeMap::new();
            for row in sql.query(turns, &[session]).await? {
                let TurnBody::User(user) = TurnBody::parse("UserTurn", row.get(0))? else { continue };
                for said in &user.said {
                    let Said::Query(Payload::Inline(query)) = said else { continue };
                    let Some((client, number)) = read(&query.text) else { continue };
                    let before = newest.insert(client, number);
                    ensure!(
                        before.is_none_or(|before| before < number),
                        "client {client}: {number} is said after {before:?}"
                    );
                    total += 1;
                }
            }
        }
        ensure!(total == share * self.clients, "{total} messages are said");
        Ok(())
    }
}

fn read(text: &str) -> Option<(usize, usize)> {
    let (client, number) = text.strip_prefix("client ")?.split_once(" number ")?;
    Some((client.parse().ok()?, number.parse().ok()?))
}

/// One client's part: as many messages as its share, to each session in turn. `full` counts the clients that have met
/// a full mailbox.
async fn write(
    http: &reqwest::Client,
    api: &str,
    number: usize,
    share: usize,
    sessions: &[Uuid],
    full: &AtomicUsize,
) -> Result<Weathered> {
    let mut weathered = Weathered::default();
    for message in 0..share {
        let session = sessions[(number + message) % sessions.len()];
        let query = format!("client {number} number {message}");
        let body = json!({"body": {"tag": "userMessage", "query": query}, "id": Uuid::now_v7()});
        let until = Instant::now() + PATIENCE;
        loop {
            let asked = Instant::now();
            let answer = http.post(format!("{api}/v1/sessions/{session}/mail")).json(&body).send().await?;
            if !matches!(answer.status().as_u16(), 429 | 503) {
                ensure!(answer.status().is_success(), "{} {}", answer.status(), answer.text().await?);
                weathered.accepts.push(asked.elapsed());
                break;
            }
            let pause: u64 = answer
                .headers()
                .get("retry-after")
                .and_then(|seconds| seconds.to_str().ok()?.parse().ok())
                .context("who refuses says when to come again")?;
            let refusal: Value = answer.json().await?;
            ensure!(Instant::now() < until, "{session} takes no mail: {refusal}");
            match refusal["error"].as_str() {
                Some("mailbox_full") => {
                    if weathered.refused == 0 {
                        full.fetch_add(1, Ordering::Relaxed);
                    }
                    weathered.refused += 1;
                }
                // The node has more to do than connections to do it with.
                Some("unavailable") => weathered.put_off += 1,
                _ => bail!("{refusal}"),
            }
            tokio::time::sleep(Duration::from_secs(pause)).await; // as the server asks
        }
    }
    Ok(weathered)
}
