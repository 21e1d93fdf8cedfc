//! Workers in processes of their own: this program started again, with a model that costs nothing. Each
//! says on its standard output how many sessions it has finished.

use std::{
    io::{Read as _, Write as _},
    process::Stdio,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::{Child, Command},
    sync::watch,
};
use tokio_util::sync::CancellationToken;

use crate::rig::{self, Asking};

/// The first argument of such a process.
pub(crate) const ROLE: &str = "worker";

/// What a worker process is to do.
#[derive(Clone)]
pub(crate) struct Orders {
    pub(crate) url: String,
    pub(crate) agent: String,
    pub(crate) slots: usize,
    pub(crate) loops: usize,
}

/// Worker processes. Dropping it kills them.
pub(crate) struct Workers {
    children: Vec<Child>,
    finished: watch::Sender<usize>,
}

impl Workers {
    /// Starts `count` workers and waits until they are ready.
    pub(crate) async fn start(count: usize, orders: &Orders) -> Result<Self> {
        let finished = watch::Sender::new(0);
        let mut children = Vec::new();
        for _ in 0..count {
            let mut child = Command::new(std::env::current_exe()?)
                .args([ROLE, &orders.url, &orders.agent])
                .args([orders.slots.to_string(), orders.loops.to_string()])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .kill_on_drop(true)
                .spawn()?;
            let mut lines = BufReader::new(child.stdout.take().context("no output")?).lines();
            lines.next_line().await?.context("a worker ended at its start")?;
            let finished = finished.clone();
            tokio::spawn(async move {
                while let Ok(Some(line)) = lines.next_line().await {
                    let more: usize = line.parse().unwrap_or(0);
                    finished.send_modify(|finished| *finished += more);
                }
            });
            children.push(child);
        }
        Ok(Self { children, finished })
    }

    /// Their process ids.
    pub(crate) fn pids(&self) -> Vec<u32> {
        self.children.iter().filter_map(Child::id).collect()
    }

    /// How many sessions have had their last answer.
    pub(crate) fn finished(&self) -> usize {
        *self.finished.borrow()
    }

    /// Waits until that many sessions have had their last answer.
    pub(crate) async fn until_finished(&self, sessions: usize) -> Result<()> {
        self.finished.subscribe().wait_for(|finished| *finished >= sessions).await?;
        Ok(())
    }

    /// Ends them in good order.
    pub(crate) async fn stop(mut self) -> Result<()> {
        for child in &mut self.children {
            drop(child.stdin.take());
        }
        for child in &mut self.children {
            child.wait().await?;
        }
        Ok(())
    }
}

/// The work of a worker process: `URL AGENT SLOTS LOOPS`, until its standard input is closed.
pub(crate) fn main(arguments: &[String]) -> Result<()> {
    let [url, agent, slots, loops] = arguments else { anyhow::bail!("usage: worker URL AGENT SLOTS LOOPS") };
    let (slots, loops) = (slots.parse()?, loops.parse()?);
    // A worker's own work fits one core; a second thread would only pass it to and fro.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let model = Asking::new(loops, None);
        let store = rig::store(url, "bench-worker", 8).await?;
        let agent = holdfast_tools::load_agent(agent.as_ref()).await?;
        let closed = CancellationToken::new();
        let closing = closed.clone().drop_guard();
        std::thread::spawn(move || {
            let _ = std::io::stdin().read(&mut [0]);
            drop(closing);
        });
        let work = async {
            let mut out = std::io::stdout();
            writeln!(out, "ready")?;
            let mut finished = model.finished.subscribe();
            let mut told = 0;
            let mut tick = tokio::time::interval(Duration::from_millis(2));
            loop {
                let news = async {
                    tick.tick().await;
                    finished.changed().await
                };
                tokio::select! {
                    () = closed.cancelled() => return Ok(()),
                    changed = news => changed?,
                }
                let now = *finished.borrow();
                writeln!(out, "{}", now - told)?;
                told = now;
            }
        };
        Box::pin(rig::with_worker(url, &store, agent, slots, Arc::clone(&model), work)).await
    })
}
