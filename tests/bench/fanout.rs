//! Many event streams and waiting requests on one API node: how soon a committed event has been read by
//! its client, and what a stream costs the node in memory.
//!
//! The API node is a process of its own with a pool of few connections. Each session has a stream, some
//! also a `wait=true` request; events are committed by this process (letters that wake nobody) at a steady
//! rate, one session after the other. At last the waiting requests' runs are ended, one by one. Clients are
//! tasks of this process over plain sockets, so their work is part of what is measured. Usage:
//! `bench fanout [--streams=2000] [--waits=400] [--rate=500] [--seconds=20] [--connections=10]`; full size:
//! `--streams=5000 --waits=1000`.

use std::{
    collections::HashMap,
    io::Write as _,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use holdfast_engine::{
    agent::Agent,
    decide::Mode,
    ids::{MailId, SessionId},
    mail::{MailBody, Priority, Sender},
};
use holdfast_store::{
    Store, accept, create,
    letters::{Ask, Letter},
};
use holdfast_tests::{
    step::{Holder, claim, says},
    store::{AGENT, LONG, agent, message, new_session, record, roster},
};
use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::sync::Semaphore;
use uuid::Uuid;

use crate::{
    api::Api,
    clients,
    clients::{Stream, Wait},
    flags, processes, rig,
    rig::Rig,
    samples::Samples,
};

/// Clients that create sessions and commit events.
const WRITERS: usize = 8;

/// Sockets that are opened at the same time.
const OPENERS: usize = 32;

/// How long the last events may take.
const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) async fn measure(arguments: &[String]) -> Result<()> {
    // Children inherit it.
    let mut files = getrlimit(Resource::Nofile);
    files.current = files.maximum;
    setrlimit(Resource::Nofile, files)?;
    let known = [("streams", 2000), ("waits", 400), ("rate", 500), ("seconds", 20), ("connections", 10)];
    let [streams, waits, rate, seconds, connections] = flags::numbers(arguments, known)?;
    ensure!(waits <= streams, "each of the --waits has one of the --streams beside it");
    ensure!(rate * seconds <= streams * 250, "mailboxes would overflow: --rate or --seconds less");
    let rig = Rig::start().await?;
    let (store, agent) = (rig::store(&rig.url, "bench", WRITERS).await?, agent("r1"));
    record(&store, AGENT, &agent).await?;
    // Their runs are queued and nobody takes them: waiting for them takes as long as this likes.
    let sessions: Vec<SessionId> =
        stream::iter((0..streams).map(|_| create(&store))).buffered(WRITERS).try_collect().await?;

    let api = Api::start(&rig.url, connections).await?;
    // The first requests open connections and fill caches, which isn't the streams' cost.
    for session in sessions.iter().take(20) {
        clients::get(api.address, *session).await?;
    }
    let (_, bare) = processes::resident(api.pid)?;
    let open = |session: &SessionId| Wait::open(api.address, *session);
    let waiting: Vec<Wait> =
        stream::iter(sessions.iter().take(waits).map(open)).buffered(OPENERS).try_collect().await?;
    let open = |session: &SessionId| Stream::open(api.address, *session);
    let following: Vec<Stream> =
        stream::iter(sessions.iter().map(open)).buffered(OPENERS).try_collect().await?;
    let (_, opened) = processes::resident(api.pid)?;

    let events = Events { rate, count: rate * seconds };
    let began = Instant::now();
    let committed = events.commit(&store, &sessions).await?;
    let achieved = events.count as f64 / began.elapsed().as_secs_f64();
    let delivery = delivered(&following, &committed).await;
    let answered = end_runs(&store, &agent, &sessions[..waits], waiting).await?;
    let (peak, last) = processes::resident(api.pid)?;

    let mut out = std::io::stdout();
    writeln!(
        out,
        "{streams} streams and {waits} waiting requests, {connections} connections, {achieved:.0} events/s"
    )?;
    writeln!(out, "committed → read        {}", delivery.times)?;
    if delivery.missing > 0 {
        writeln!(out, "not read within {} s: {} events", PATIENCE.as_secs(), delivery.missing)?;
    }
    writeln!(out, "run ended → wait answers {answered}")?;
    let (mib, each) =
        (1_048_576.0, |bytes: u64| bytes.saturating_sub(bare) as f64 / 1024.0 / (streams + waits) as f64);
    for (name, bytes) in [("before", bare), ("opened", opened), ("at last", last), ("peak", peak)] {
        writeln!(
            out,
            "API node {name:<8} {:>7.1} MiB resident, {:>6.1} KiB a client",
            bytes as f64 / mib,
            each(bytes)
        )?;
    }
    Ok(())
}

async fn create(store: &Store) -> Result<SessionId> {
    let new = create::NewSession {
        owner: String::new(),
        ..new_session(Some(message("go on")), Mode::UntilBlocked)
    };
    Box::pin(create::create(store, &caller(), new.clone())).await?;
    Ok(new.id)
}

/// Who sends letters: the one owner that there is without tokens.
fn caller() -> accept::Caller {
    accept::Caller { owner: Some(String::new()), traceparent: None, key: None }
}

struct Events {
    rate: usize,
    count: usize,
}

impl Events {
    /// Commits events at the rate, or as fast as it goes. Returns when each was committed, by session and
    /// in the order of the session's stream.
    async fn commit(&self, store: &Store, sessions: &[SessionId]) -> Result<Vec<Vec<Instant>>> {
        let mut tick = tokio::time::interval(Duration::from_secs(1).div_f64(self.rate.max(1) as f64));
        let writers = Arc::new(Semaphore::new(WRITERS));
        let mut committing = Vec::with_capacity(self.count);
        for event in 0..self.count {
            tick.tick().await;
            let (permit, store) = (Arc::clone(&writers).acquire_owned().await?, store.clone());
            let place = event % sessions.len();
            let session = sessions[place];
            committing.push(tokio::spawn(async move {
                Box::pin(accept::send(&store, &caller(), session, letter(), Ask::Nothing, &[])).await?;
                drop(permit);
                Ok::<_, anyhow::Error>((place, Instant::now()))
            }));
        }
        let mut committed = vec![Vec::new(); sessions.len()];
        for one in committing {
            let (place, at) = one.await??;
            committed[place].push(at);
        }
        Ok(committed)
    }
}

/// A letter that wakes nobody: one event, and nothing else happens.
fn letter() -> Letter {
    Letter {
        id: MailId(Uuid::now_v7()),
        from: Sender::User { owner: None },
        priority: Priority::Normal,
        hops: 0,
        body: MailBody::AgentMessage { text: "news".to_owned(), in_reply_to: None, expects_reply: false },
    }
}

struct Delivery {
    times: Samples,
    missing: usize,
}

/// Pairs what was committed with what was read, once all has been read or patience is over. A stream has
/// neither gaps nor duplicates, so that the n-th event read is the n-th committed since it was opened.
async fn delivered(following: &[Stream], committed: &[Vec<Instant>]) -> Delivery {
    let until = tokio::time::Instant::now() + PATIENCE;
    let mut delivery = Delivery { times: Samples::default(), missing: 0 };
    for (stream, committed) in following.iter().zip(committed) {
        let read = stream.until(committed.len(), until).await;
        for (at, read) in committed.iter().zip(&read) {
            delivery.times.add(read.saturating_duration_since(*at));
        }
        delivery.missing += committed.len() - read.len().min(committed.len());
    }
    delivery
}

/// Ends the runs that somebody waits for, as a worker would, and times the answers.
async fn end_runs(
    store: &Store,
    agent: &Agent,
    awaited: &[SessionId],
    waiting: Vec<Wait>,
) -> Result<Samples> {
    let mut waiting: HashMap<SessionId, Wait> = awaited.iter().copied().zip(waiting).collect();
    let mut answers = Vec::new();
    while !waiting.is_empty() {
        let leases = claim(store, &roster(agent), 16, LONG).await;
        ensure!(!leases.is_empty(), "a run that is waited for is gone");
        for lease in leases {
            let Some(wait) = waiting.remove(&lease.session) else { continue };
            let mut holder = Holder::load(store, agent, lease).await;
            Box::pin(holder.drive_with(vec![says("done")])).await;
            answers.push((Instant::now(), wait));
        }
    }
    let mut times = Samples::default();
    for (ended, wait) in answers {
        let answered =
            tokio::time::timeout(PATIENCE, wait.answered).await.context("a wait isn't answered")?;
        times.add(answered??.saturating_duration_since(ended));
    }
    Ok(times)
}
