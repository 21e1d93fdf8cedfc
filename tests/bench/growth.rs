//! Does a step cost more when the history is longer? One session, one worker in this process, a model
//! that asks for one more call each time; bytes of WAL and time per step, early against late.
//!
//! Prints ratios and exits with 1 if a ratio is above 1.3.

use std::{
    io::Write as _,
    path::PathBuf,
    process::ExitCode,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use futures::{FutureExt, future::BoxFuture};
use holdfast_engine::{
    content::{Payload, Query},
    decide::Mode,
    ids::{MailId, SessionId},
    model::{Flavor, ModelAnswer, ModelRequest, ModelTarget, RequestedCall},
};
use holdfast_store::{
    Store,
    accept::{self, Caller, Message, NewSession},
    connect::{self, ConnectOptions},
    embedded::{Cluster, EmbeddedOptions},
    listen::Listener,
    migrate,
    notify::{Channel, Notifier},
    sessions,
};
use holdfast_worker::{
    Config,
    model::{ApiKey, ApiKeys, Backoff, ModelClient, ModelError},
};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// Turns of the whole run.
const TURNS: usize = 200;

/// What a ratio may be.
const LIMIT: f64 = 1.3;

/// Answers with one call of a tool that isn't there, which costs no process, and notes when it was
/// asked and where the WAL stood.
struct Asking {
    wal: tokio_postgres::Client,
    marks: Mutex<Vec<(Instant, u64)>>,
    done: Notify,
}

impl ModelClient for Asking {
    fn complete<'a>(
        &'a self,
        _: &'a ModelTarget,
        _: Option<&'a ApiKey>,
        _: &'a ModelRequest,
        _: Option<&'a (dyn Fn(&str) + Send + Sync)>,
        _: &'a (dyn Fn(Backoff) + Send + Sync),
    ) -> BoxFuture<'a, Result<ModelAnswer, ModelError>> {
        async move {
            let row = self.wal.query_one("SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint", &[]).await;
            let bytes = row.map(|row| row.get::<_, i64>(0)).unwrap_or_default();
            let asked = {
                let mut marks = self.marks.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                marks.push((Instant::now(), bytes.unsigned_abs()));
                marks.len()
            };
            let last = asked >= TURNS / 2;
            if last {
                self.done.notify_one();
            }
            let call = RequestedCall {
                provider_id: format!("call_{asked}"),
                name: "no_such_tool".to_owned(),
                arguments: format!("{{\"note\": \"{}\"}}", "x".repeat(1000)),
            };
            Ok(ModelAnswer {
                text: Some("y".repeat(200)),
                thinking: None,
                calls: if last { Vec::new() } else { vec![call] },
                usage: None,
                flavor: Flavor::OpenAI,
                raw: None,
                stop_reason: None,
            })
        }
        .boxed()
    }
}

#[tokio::main]
async fn main() -> Result<ExitCode> {
    holdfast_store::install::ensure_installed().await?;
    let dir = tempfile::tempdir()?;
    let cluster = Cluster::start(EmbeddedOptions {
        data_dir: PathBuf::from(dir.path()),
        durable: true,
        // A checkpoint in the middle would write whole pages again and drown what is measured.
        settings: vec![
            ("full_page_writes".to_owned(), "off".to_owned()),
            ("checkpoint_timeout".to_owned(), "1h".to_owned()),
        ],
        port: None,
    })
    .await?;
    cluster.create_database("growth").await?;
    let url = cluster.url("growth");
    migrate::migrate(&url).await?;
    let (wal, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await?;
    let _connection = tokio::spawn(connection);
    let model = Arc::new(Asking { wal, marks: Mutex::default(), done: Notify::new() });
    run(&url, dir.path(), Arc::clone(&model)).await?;

    let marks = model.marks.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
    let loops: Vec<(f64, f64)> = marks
        .windows(2)
        .map(|pair| ((pair[1].0 - pair[0].0).as_secs_f64() * 1000.0, (pair[1].1 - pair[0].1) as f64))
        .collect();
    // Two turns a loop: turn 10 is in the fifth. The first loops warm caches.
    let window = loops.len() / 5;
    let (early, late) = (&loops[5..5 + window], &loops[loops.len() - window..]);
    let (time, bytes) = (ratio(early, late, |mark| mark.0), ratio(early, late, |mark| mark.1));
    let mut out = std::io::stdout();
    writeln!(out, "loops {} (of two turns and two commits)", loops.len())?;
    writeln!(out, "ms per loop    early {:.3}  late {:.3}  ratio {:.2}", time.0, time.1, time.2)?;
    writeln!(out, "WAL per loop   early {:.0}  late {:.0}  ratio {:.2}", bytes.0, bytes.1, bytes.2)?;
    Ok(if time.2 <= LIMIT && bytes.2 <= LIMIT { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn ratio(early: &[(f64, f64)], late: &[(f64, f64)], pick: fn(&(f64, f64)) -> f64) -> (f64, f64, f64) {
    let quartile = |marks: &[(f64, f64)]| {
        let mut values: Vec<f64> = marks.iter().map(pick).collect();
        values.sort_by(f64::total_cmp);
        // Others share these cores: the lower quartile is what the work itself takes.
        values[values.len() / 4]
    };
    let (early, late) = (quartile(early), quartile(late));
    (early, late, late / early)
}

async fn run(url: &str, dir: &std::path::Path, model: Arc<Asking>) -> Result<()> {
    let agent = dir.join("agent.json");
    std::fs::write(
        &agent,
        r#"{"slug":"growth","flavor":"openai","modelUrl":"http://127.0.0.1:1","modelName":"none"}"#,
    )?;
    let loaded = holdfast_tools::load_agent(&agent).await?;
    let db = connect::connect(ConnectOptions::new(url, "bench")).await?;
    let store = Store::new(db, Some(Notifier::start(url, "bench")?));
    holdfast_store::agents::record(&store, "growth", &loaded.agent.revision, "{}").await?;
    let listener = Listener::start(url, "bench", &[Channel::Runs])?;
    let stop = CancellationToken::new();
    let config = Config {
        slots: 1,
        lease_ttl: Duration::from_secs(15),
        shutdown_grace: Duration::from_secs(5),
        stream_tokens: false,
        labels: Vec::new(),
        agents: vec![loaded],
        keys: ApiKeys::default(),
    };
    let worker =
        holdfast_worker::run_with(store.clone(), listener, config, Arc::clone(&model) as _, stop.clone());
    let drive = async {
        let id = SessionId(Uuid::now_v7());
        let query = Query { text: "go on".to_owned(), media: Vec::new() };
        let new = NewSession {
            id,
            owner: String::new(),
            agent: "growth".to_owned(),
            parent: None,
            parent_call: None,
            labels: std::collections::BTreeMap::new(),
            priority: 0,
            message: Some(Message {
                id: MailId(Uuid::now_v7()),
                query: Payload::Inline(query),
                blobs: Vec::new(),
            }),
            run: Mode::UntilBlocked,
        };
        let caller = Caller { owner: Some(String::new()), traceparent: None, key: None };
        accept::create(&store, &caller, &new).await?;
        model.done.notified().await;
        let mut tick = tokio::time::interval(Duration::from_millis(20));
        loop {
            tick.tick().await;
            let row = sessions::get(&store, None, id).await?;
            if !row.active {
                anyhow::ensure!(row.status == "idle", "{row:?}");
                break;
            }
        }
        stop.cancel();
        Ok(())
    };
    let (worked, driven) = tokio::join!(worker, drive);
    worked.context("the worker")?;
    driven
}
