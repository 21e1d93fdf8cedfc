//! How soon the model is asked on an idle system: from the POST of a continuation, and from that of a new
//! session, to the first bytes of the model's request; beside the floor of the same server in the same
//! run: a row inserted with its NOTIFY on one connection, heard and selected on another.
//!
//! API node and worker are processes of their own; the model and the client are this one. The three kinds
//! take turns, one at a time, with pauses of 10 to 30 ms at random, so that no timer of the nodes is in
//! step with them. Usage: `bench resume [--samples=200]`.

use std::{
    io::Write as _,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use futures::{StreamExt as _, stream};
use holdfast_tests::world;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_postgres::{AsyncMessage, Client, NoTls, Statement};
use uuid::Uuid;

use crate::{flags, model::Model, nodes, nodes::Node, rig::Rig, samples::Samples};

/// Rounds before those that count.
const WARM_UP: usize = 5;

pub(crate) async fn measure(arguments: &[String]) -> Result<()> {
    let [samples] = flags::numbers(arguments, [("samples", 200)])?;
    let rig = Rig::start().await?;
    let mut floor = Floor::new(&rig).await?;
    let model = Model::start(Duration::ZERO, 1).await?;
    let agent = nodes::agent_file(&rig, &model)?;
    let _worker = Node::start(&rig, &agent, "worker", &[]).await?;
    let api = Node::start(&rig, &agent, "api", &[]).await?;
    let mut client = Api { base: api.url.clone(), http: world::client(), model };
    let (mut bare, mut created, mut resumed) = (Samples::default(), Way::default(), Way::default());
    for round in 0..WARM_UP + samples {
        if round == WARM_UP {
            (bare, created, resumed) = (Samples::default(), Way::default(), Way::default());
        }
        pause().await;
        bare.add(floor.sample().await?);
        pause().await;
        let new = json!({"agent": nodes::AGENT, "prompt": "go on"});
        let id = client.sample("/v1/sessions", &new, &mut created).await?;
        let view = client.stopped(&id).await?;
        let token = view["pending"][0]["continuation_token"].as_str().context("no call is pending")?;
        pause().await;
        let path = format!("/v1/continuations/{token}");
        client.sample(&path, &json!({"result": "yes"}), &mut resumed).await?;
        let view = client.stopped(&id).await?;
        ensure!(view["status"] == "idle", "the session didn't go on: {view}");
    }
    report(&bare, &created, &resumed)
}

fn report(bare: &Samples, created: &Way, resumed: &Way) -> Result<()> {
    let mut out = std::io::stdout();
    writeln!(out, "floor: insert, NOTIFY, select        {bare}")?;
    for (name, way) in [("new session ", created), ("continuation", resumed)] {
        writeln!(out, "{name}: POST sent → model asked {}", way.asked)?;
        writeln!(out, "{name}: POST sent → answered    {}", way.answered)?;
        let above = |percent| way.asked.percentile(percent) - bare.percentile(percent);
        let ratio = way.asked.percentile(50) / bare.percentile(50);
        writeln!(
            out,
            "{name}: asked, less the floor   p50 {:>8.2}  p90 {:>8.2}  p99 {:>8.2}   p50 {ratio:.1} times the floor's",
            above(50),
            above(90),
            above(99)
        )?;
    }
    Ok(())
}

/// Twenty milliseconds on average, never the same twice.
async fn pause() {
    let chance = u64::from(Uuid::new_v4().as_fields().0) % 20_000;
    tokio::time::sleep(Duration::from_micros(10_000 + chance)).await;
}

/// What one kind of POST takes.
#[derive(Default)]
struct Way {
    asked: Samples,
    answered: Samples,
}

struct Api {
    base: String,
    http: reqwest::Client,
    model: Model,
}

impl Api {
    /// Sends a POST that makes the model be asked once. Returns the session.
    async fn sample(&mut self, path: &str, body: &Value, way: &mut Way) -> Result<String> {
        let url = format!("{}{path}", self.base);
        let began = Instant::now();
        let post = async {
            let answer = self.http.post(url).json(body).send().await?;
            let (answered, status) = (began.elapsed(), answer.status());
            let view: Value = answer.json().await?;
            ensure!(status.is_success(), "{status} {view}");
            Ok((answered, view))
        };
        let ((answered, view), asked) = tokio::try_join!(post, self.model.next())?;
        way.answered.add(answered);
        way.asked.add(asked.at.duration_since(began));
        Ok(view["session_id"].as_str().context("no session id")?.to_owned())
    }

    /// A session's view once its run has stopped.
    async fn stopped(&self, id: &str) -> Result<Value> {
        let url = format!("{}/v1/sessions/{id}?wait=true&timeout=30", self.base);
        Ok(self.http.get(url).send().await?.error_for_status()?.json().await?)
    }
}

/// The least that waking somebody through Postgres takes.
struct Floor {
    sender: Client,
    insert: Statement,
    hearer: Client,
    select: Statement,
    heard: mpsc::UnboundedReceiver<String>,
}

impl Floor {
    async fn new(rig: &Rig) -> Result<Self> {
        let sender = rig.connect().await?;
        sender.batch_execute("CREATE TABLE bare (id uuid PRIMARY KEY, body text NOT NULL)").await?;
        let (hearer, mut connection) = tokio_postgres::connect(&rig.url, NoTls).await?;
        let (tell, heard) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            let mut messages = stream::poll_fn(move |cx| connection.poll_message(cx));
            while let Some(Ok(message)) = messages.next().await {
                if let AsyncMessage::Notification(notification) = message
                    && tell.send(notification.payload().to_owned()).is_err()
                {
                    return;
                }
            }
        });
        hearer.batch_execute("LISTEN bare").await?;
        let insert = "INSERT INTO bare VALUES ($1, repeat('x', 1000)) RETURNING pg_notify('bare', id::text)";
        let insert = sender.prepare(insert).await?;
        let select = hearer.prepare("SELECT body FROM bare WHERE id = $1").await?;
        Ok(Self { sender, insert, hearer, select, heard })
    }

    async fn sample(&mut self) -> Result<Duration> {
        let id = Uuid::now_v7();
        let began = Instant::now();
        let inserted = async { Ok::<_, anyhow::Error>(self.sender.execute(&self.insert, &[&id]).await?) };
        let read = async {
            let heard: Uuid = self.heard.recv().await.context("the connection is gone")?.parse()?;
            self.hearer.query_one(&self.select, &[&heard]).await?;
            Ok(began.elapsed())
        };
        let (_, took) = tokio::try_join!(inserted, read)?;
        Ok(took)
    }
}
