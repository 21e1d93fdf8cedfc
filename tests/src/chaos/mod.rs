//! Chaos: many sessions at once over nodes that are killed, stopped, told to leave and cut off from the
//! database, and then a check of everything that is promised, against what clients were told.
//!
//! What a seed decides is what clients do and what befalls the nodes; which of it meets which is up to
//! the machine, so a seed makes a failure likelier to come again and no more than that.

mod check;
mod client;
mod dice;
mod fault;
mod fleet;
mod ground;
mod player;
mod post;
mod spells;
mod stage;
mod story;

use std::{collections::BTreeMap, fmt, sync::Arc, time::Duration};

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt, stream};
use tokio::time::{Instant, interval};
use tokio_postgres::Client as Postgres;
use uuid::Uuid;

pub use self::fault::Fault;
use self::{client::Client, dice::Dice, fleet::Fleet, player::Player, story::Story};
use crate::sse::Follower;

/// Sessions whose events somebody follows from their creation on, through all faults, at least; in large runs
/// one in a hundred.
const FOLLOWED: usize = 8;
/// How long sessions may take to come to rest once nothing befalls the nodes any more, and how much longer for each
/// of them: most wait for somebody by then.
const REST: Duration = Duration::from_secs(60);
const REST_OF_EACH: Duration = Duration::from_millis(100);
/// Requests of clients to a session, roughly: their pauses are made to fill the time.
const REQUESTS: u32 = 7;

/// How large a run is.
#[derive(Debug, Clone, Copy)]
pub struct Size {
    /// What decides everything that is left to chance.
    pub seed: u64,
    /// How many seconds nodes have trouble.
    pub seconds: u64,
    /// How many sessions are played.
    pub sessions: usize,
    /// How many of them at once.
    pub at_once: usize,
    /// How many workers there are.
    pub workers: usize,
    /// How many API nodes.
    pub apis: usize,
}

impl Size {
    /// What every change can afford.
    pub fn small(seed: u64) -> Self {
        Self { seed, seconds: 25, sessions: 60, at_once: 12, workers: 3, apis: 2 }
    }

    /// An hour.
    pub fn large(seed: u64) -> Self {
        Self { seed, seconds: 3_600, sessions: 10_000, at_once: 48, workers: 4, apis: 3 }
    }
}

/// What a run came to.
#[derive(Debug)]
pub struct Outcome {
    /// Faults by kind.
    pub faults: BTreeMap<Fault, usize>,
    /// What was there to be checked.
    pub seen: BTreeMap<&'static str, usize>,
    /// Promises that were broken.
    pub violations: Vec<String>,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "faults {:?}, seen {:?}", self.faults, self.seen)
    }
}

/// Plays sessions over a database in trouble and checks what is promised once all is quiet.
///
/// # Errors
/// If the run itself can't be carried out; broken promises are in the outcome.
pub async fn run(size: Size) -> Result<Outcome> {
    let mut fleet = Fleet::start(size).await?;
    let client = Arc::new(Client::new(fleet.addresses(), size.seed));
    let trouble_time = Duration::from_secs(size.seconds);
    let mut dice = Dice::part(size.seed, u64::MAX);
    let ((stories, followers), (mut fleet, faults)) = tokio::try_join!(
        play(&client, fleet.addresses(), size),
        // The nodes are other processes, so nothing here waits for what befalls them.
        Box::pin(async {
            let counts = fleet.trouble(&mut dice, trouble_time).await?;
            fleet.calm().await?;
            anyhow::Ok((fleet, counts))
        })
    )?;
    let admin = fleet.admin().await?;
    let mut report = check::Report::default();
    let stories = Box::pin(rest(&mut report, &client, &admin, size, stories)).await?;
    for alarm in fleet.alarms()? {
        report.violation(alarm);
    }
    Box::pin(check::all(&mut report, &admin, &mut fleet, &stories, &followers)).await?;
    Box::pin(check::finds_faults(&mut report, &admin, &stories)).await?;
    report.saw("requests tried again", usize::try_from(client.retries())?);
    let (seen, violations) = report.into_parts();
    Ok(Outcome { faults, seen, violations })
}

/// A stream of events that was followed through all faults, and whose it is.
type Followed = (Uuid, Follower);

async fn play(
    client: &Arc<Client>,
    addresses: client::Addresses,
    size: Size,
) -> Result<(Vec<Story>, Vec<Followed>)> {
    let rounds = size.sessions.div_ceil(size.at_once);
    let each = Duration::from_secs(size.seconds) / u32::try_from(rounds.max(1))?;
    // Pauses last half of the most on average; a quarter of the time goes into the requests themselves.
    let pace = each * 3 / (2 * REQUESTS);
    let every = size.sessions.div_ceil(FOLLOWED.max(size.sessions / 100));
    let players = stream::iter(0..size.sessions).map(|number| {
        let addresses = Arc::clone(&addresses);
        async move {
            let player = Player::create(client, size.seed, number, pace).await?;
            let id = player.story.id;
            let path = format!("/v1/sessions/{id}/events?after=0");
            let follower = (number % every == 0).then(|| (id, Follower::start(addresses, path)));
            let story = player.play().await.with_context(|| format!("session {number}"))?;
            anyhow::Ok((story, follower))
        }
    });
    let done: Vec<(Story, Option<Followed>)> = players.buffer_unordered(size.at_once).try_collect().await?;
    let (stories, followers): (Vec<_>, Vec<_>) = done.into_iter().unzip();
    Ok((stories, followers.into_iter().flatten().collect()))
}

/// Brings every session to its end: what is held goes on, what is open is completed.
async fn rest(
    report: &mut check::Report,
    client: &Arc<Client>,
    admin: &Postgres,
    size: Size,
    stories: Vec<Story>,
) -> Result<Vec<Story>> {
    let until = Instant::now() + REST + REST_OF_EACH * u32::try_from(stories.len()).unwrap_or(u32::MAX);
    let mut tick = interval(Duration::from_millis(250));
    let mut stories: BTreeMap<Uuid, Story> = stories.into_iter().map(|story| (story.id, story)).collect();
    for row in admin.query("SELECT id FROM sessions", &[]).await? {
        let id: Uuid = row.try_get(0)?;
        if !stories.contains_key(&id) {
            report.violation(format!("nobody created session {id}"));
        }
    }
    loop {
        tick.tick().await;
        let sql = "SELECT s.id, s.status, r.session_id IS NOT NULL FROM sessions s
                   LEFT JOIN runs r ON r.session_id = s.id
                   WHERE s.deleted_at IS NULL AND (s.status <> 'idle' OR r.session_id IS NOT NULL)";
        let mut stuck: Vec<(Uuid, String, bool)> = Vec::new();
        for row in admin.query(sql, &[]).await? {
            stuck.push((row.try_get(0)?, row.try_get(1)?, row.try_get(2)?));
        }
        stuck.retain(|(id, ..)| stories.contains_key(id));
        if Instant::now() >= until {
            report.violation(format!("sessions don't come to rest: {stuck:?}"));
            stuck.clear();
        }
        if stuck.is_empty() {
            return Ok(stories.into_values().collect());
        }
        let quiet = stuck.into_iter().filter(|(_, _, active)| !active);
        let moves = quiet.filter_map(|(id, status, _)| Some((stories.remove(&id)?, status)));
        let moves: Vec<(Story, String)> = moves.collect();
        let moved = stream::iter(moves).map(|(story, status)| async move {
            match status.as_str() {
                "waiting_external" => Player::finish(client, size.seed, story).await,
                _ => Player::go_on(client, story).await,
            }
        });
        let moved: Vec<Story> = moved.buffer_unordered(size.at_once).try_collect().await?;
        stories.extend(moved.into_iter().map(|story| (story.id, story)));
    }
}
