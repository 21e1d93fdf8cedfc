//! DBOS Transact for Rust: workflows of steps, directly and through its queue; resume by send → recv.
//! Arguments and the conversation on standard input and output are those of `peer.py`.

use std::{
    error::Error,
    io::{BufRead, Write},
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use dbos::{Config, DBOS, Enqueue, QueueConflict, QueueOptions, StartOptions, WorkflowRef};
use serde_json::{Value, json};
use tokio::sync::{Semaphore, mpsc};

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// As in `peer.py`.
const RUN_STEPS: u32 = 10;
const SERIAL_STEPS: u32 = 200;
const SERIAL_RUNS: u32 = 3;
const MESSAGES: u32 = 1600;
const PARKED: usize = 100;
const PARK: Duration = Duration::from_millis(1500);
const RESUME: Duration = Duration::from_secs(6);
const WARM: Duration = Duration::from_millis(1500);
const CREATORS: usize = 8;

/// A queue's worker starts at the default poll of a second and takes a tenth off each time, whatever poll the
/// queue has: so long does it take to come down.
const WARM_POLL: Duration = Duration::from_secs(12);

/// More connections than this cost more than they bring on few cores.
const CONNECTIONS: usize = 40;

static STEPS: AtomicU64 = AtomicU64::new(0);
static BACKLOG: Semaphore = Semaphore::const_new(0);
static PAYLOAD: LazyLock<String> = LazyLock::new(payload);
static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// 1 KiB of text that compresses no better than text does.
fn payload() -> String {
    let mut state = 1_u64;
    (0..64)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            format!("{:016x}", state ^ (state >> 29))
        })
        .collect()
}

async fn store() -> dbos::Result<String> {
    STEPS.fetch_add(1, Relaxed);
    Ok(PAYLOAD.clone())
}

async fn steps(count: u32) -> dbos::Result<()> {
    for i in 0..count {
        dbos::step(&format!("step-{i}"), store).await?;
    }
    Ok(())
}

async fn run(count: u32) -> dbos::Result<u32> {
    steps(count).await?;
    BACKLOG.add_permits(1);
    Ok(count)
}

async fn serial(count: u32) -> dbos::Result<f64> {
    let began = Instant::now();
    steps(count).await?;
    Ok(began.elapsed().as_secs_f64())
}

/// Returns when each message's step began, in seconds.
async fn converse(messages: u32) -> dbos::Result<Vec<f64>> {
    let mut began = Vec::new();
    for i in 0..messages {
        began.push(START.elapsed().as_secs_f64());
        dbos::step(&format!("message-{i}"), store).await?;
    }
    Ok(began)
}

/// Returns when the step after the completion began, in seconds.
async fn wait(_: u32) -> dbos::Result<f64> {
    dbos::step("before", store).await?;
    let _completion: Option<String> = dbos::recv(None, Duration::from_secs(120)).await?;
    dbos::step("after", || async {
        Ok::<_, dbos::Error>(START.elapsed().as_secs_f64())
    })
    .await
}

/// What `measure.py` asked for.
struct Cell {
    url: String,
    workload: String,
    concurrency: usize,
    seconds: f64,
    poll: Option<Duration>,
}

impl Cell {
    fn from_arguments() -> Outcome<Self> {
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        let [url, workload, concurrency, seconds, poll] = arguments.as_slice() else {
            return Err("usage: dbos-peer URL WORKLOAD CONCURRENCY SECONDS POLL".into());
        };
        Ok(Self {
            url: url.clone(),
            workload: workload.clone(),
            concurrency: concurrency.parse()?,
            seconds: seconds.parse()?,
            poll: if poll == "default" {
                None
            } else {
                Some(Duration::from_secs_f64(poll.parse()?))
            },
        })
    }
}

/// The other end of standard input and output.
struct Driver {
    go: mpsc::Receiver<()>,
}

impl Driver {
    /// Listens; the program ends when its standard input does.
    fn listen() -> Self {
        let (said, go) = mpsc::channel(1);
        std::thread::spawn(move || {
            for line in std::io::stdin().lock().lines() {
                if line.is_ok_and(|line| line.trim() == "go") {
                    let _ = said.try_send(());
                }
            }
            std::process::exit(1);
        });
        Self { go }
    }

    fn say(&self, what: &Value) -> Outcome<()> {
        let mut out = std::io::stdout().lock();
        writeln!(out, "{what}")?;
        Ok(out.flush()?)
    }

    /// Says that the load runs and waits for the start of the count.
    async fn until_go(&mut self) -> Outcome<Instant> {
        self.say(&json!({"ready": true}))?;
        self.go.recv().await;
        Ok(Instant::now())
    }

    /// Counts steps for so long, once the load is warm.
    async fn measure(&mut self, warm: Duration, seconds: f64) -> Outcome<()> {
        tokio::time::sleep(warm).await;
        let began = self.until_go().await?;
        let before = STEPS.load(Relaxed);
        tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
        self.say(&json!({
            "steps": STEPS.load(Relaxed) - before, "seconds": began.elapsed().as_secs_f64(),
        }))
    }
}

#[tokio::main(worker_threads = 2)]
async fn main() -> Outcome<()> {
    let cell = Cell::from_arguments()?;
    LazyLock::force(&START);
    let mut driver = Driver::listen();
    let dbos = DBOS::new(Config {
        app_version: Some("1".to_owned()),
        max_connections: u32::try_from((cell.concurrency + CREATORS).min(CONNECTIONS))?,
        ..Config::new("peer", cell.url.clone())
    });
    let run = dbos.register_workflow("run", run)?;
    let serial = dbos.register_workflow("serial", serial)?;
    let converse = dbos.register_workflow("converse", converse)?;
    let wait = dbos.register_workflow("wait", wait)?;
    dbos.launch().await?;
    driver.say(&json!({"up": true}))?;
    match cell.workload.as_str() {
        "serial" => {
            serial.run(SERIAL_STEPS).await?;
            driver.until_go().await?;
            let mut seconds = 0.0;
            for _ in 0..SERIAL_RUNS {
                seconds += serial.run(SERIAL_STEPS).await?;
            }
            driver.say(&json!({"steps": SERIAL_RUNS * SERIAL_STEPS, "seconds": seconds}))?;
        }
        "direct" => {
            for _ in 0..cell.concurrency {
                let run = run.clone();
                tokio::spawn(async move { while or_die(run.run(RUN_STEPS).await) {} });
            }
            driver.measure(WARM, cell.seconds).await?;
        }
        "queue" => {
            let mut options = QueueOptions {
                worker_concurrency: Some(i32::try_from(cell.concurrency)?),
                ..QueueOptions::default()
            };
            options.polling_interval = cell.poll.unwrap_or(options.polling_interval);
            dbos.register_queue("runs", options, QueueConflict::UpdateIfLatestVersion)
                .await?;
            BACKLOG.add_permits(2 * cell.concurrency);
            for _ in 0..CREATORS {
                let run = run.clone();
                tokio::spawn(async move {
                    while let Ok(permit) = BACKLOG.acquire().await {
                        permit.forget();
                        let queue = Some(Enqueue::new("runs"));
                        or_die(
                            run.start_with(
                                RUN_STEPS,
                                StartOptions {
                                    queue,
                                    ..StartOptions::default()
                                },
                            )
                            .await,
                        );
                    }
                });
            }
            driver
                .measure(if cell.poll.is_some() { WARM_POLL } else { WARM }, cell.seconds)
                .await?;
        }
        "resume" => resume(&dbos, &wait, &mut driver).await?,
        "growth" => {
            driver.until_go().await?;
            driver.say(&growth(&converse.run(MESSAGES).await?))?;
        }
        other => return Err(format!("no workload {other}").into()),
    }
    // Until measure.py has read the CPU time and ends it.
    std::future::pending().await
}

async fn resume(dbos: &DBOS, wait: &WorkflowRef<u32, f64>, driver: &mut Driver) -> Outcome<()> {
    let mut parked = Vec::new();
    for _ in 0..PARKED {
        parked.push(wait.start(0).await?);
    }
    tokio::time::sleep(PARK).await;
    let began = driver.until_go().await?;
    let mut delays = Vec::new();
    for handle in parked {
        if began.elapsed() > RESUME {
            break;
        }
        let sent = START.elapsed().as_secs_f64();
        dbos.send(handle.workflow_id(), &*PAYLOAD).await?;
        delays.push((handle.result().await? - sent) * 1000.0);
        tokio::time::sleep(Duration::from_millis(10 + delays.len() as u64 * 7 % 20)).await;
    }
    driver.say(&json!({"steps": delays.len(), "seconds": began.elapsed().as_secs_f64(), "delays_ms": delays}))
}

/// Time per step at messages 100 and 1,600: the lower quartile, as in `peer.py`.
fn growth(began: &[f64]) -> Value {
    let at = |message: usize| {
        let window = &began[message - 41..message];
        let mut took: Vec<f64> = window
            .windows(2)
            .map(|pair| (pair[1] - pair[0]) * 1000.0)
            .collect();
        took.sort_by(f64::total_cmp);
        took[took.len() / 4]
    };
    let seconds = began[began.len() - 1] - began[0];
    json!({"steps": began.len(), "seconds": seconds, "early_ms": at(100), "late_ms": at(began.len())})
}

/// True, or the end of the program with the error: a load that lost a client measures nothing.
fn or_die<T>(outcome: dbos::Result<T>) -> bool {
    if let Err(error) = outcome {
        eprintln!("{error}");
        std::process::exit(1);
    }
    true
}
