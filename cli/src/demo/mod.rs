//! `holdfast demo`: a session that outlives its servers, played on an embedded database with a scripted
//! model. It needs no key and no network.

mod servers;
mod stage;

use std::time::Duration;

use holdfast_store::embedded;
use serde_json::{Value, json};
use tokio::{net::TcpListener, time::Instant};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

use self::{
    servers::{Server, program},
    stage::{ANSWER, OUTSIDE, QUESTION, SLUG, Stage},
};
use crate::{
    args::DemoArgs,
    client::{Call, Client},
    failure::Failure,
    node::{Database, store, watch_signals},
    output::line,
    scripted_model::{self, Script},
    session::{answer_text, pending_calls},
};

/// How long the session may take to a point that it must reach.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long a single question waits.
const WAIT: u64 = 20;

/// Plays the demo.
///
/// # Errors
/// If the answer isn't the right one, or anything on the way to it fails.
pub(crate) async fn run(args: DemoArgs) -> Result<(), Failure> {
    let shutdown = CancellationToken::new();
    let signals = watch_signals(shutdown.clone(), true)?;
    let (model_url, _model) = model(&shutdown).await?;
    let stage = Stage::set(&args.data_dir, &model_url)?;
    line("Holdfast demo: a question, a crash, answers from outside, one right answer.")?;
    line(format!(
        "Everything is kept in {}; logs of the servers are in logs/ there.\n",
        stage.home.display()
    ))?;

    if embedded::usable().is_none() {
        line(
            "There is no Postgres on this machine yet: it is being installed, which takes a minute or more.\n",
        )?;
    }
    let database = Database::embedded(&stage.home).await?;
    let done = match shutdown.run_until_cancelled(Box::pin(play(&stage, &database))).await {
        Some(Ok(standing)) => finish(&stage, standing, args.keep, &shutdown).await,
        Some(Err(failure)) => Err(failure),
        None => Err(Failure::Failed("interrupted".into())),
    };
    database.close().await;
    drop(signals);
    done
}

/// Starts the scripted model; it ends with the handle.
async fn model(shutdown: &CancellationToken) -> Result<(String, AbortOnDropHandle<()>), Failure> {
    let script = Script::parse(stage::MODEL).map_err(|error| Failure::Failed(error.to_string()))?;
    let failed = |error: std::io::Error| Failure::Failed(format!("the scripted model: {error}"));
    let listener = TcpListener::bind("127.0.0.1:0").await.map_err(failed)?;
    let url = format!("http://{}/v1", listener.local_addr().map_err(failed)?);
    let shutdown = shutdown.clone();
    let serving = tokio::spawn(async move {
        if let Err(error) = scripted_model::serve(script, listener, shutdown).await {
            tracing::error!(%error, "the scripted model ended");
        }
    });
    Ok((url, AbortOnDropHandle::new(serving)))
}

/// What is left when the answer has come: a session, and the servers that outlived the crash.
struct Standing {
    session: String,
    api: Server,
    worker: Server,
}

async fn play(stage: &Stage, database: &Database) -> Result<Standing, Failure> {
    let Some(cluster) = database.cluster().filter(|cluster| cluster.is_owner()) else {
        return Err(Failure::Failed(format!(
            "another process uses the database in {}: stop it, or give --data-dir",
            stage.home.display()
        )));
    };
    store(database, "demo", false).await?.db().close().await;
    line(format!(
        "1. An embedded Postgres {} is up on port {}.",
        cluster.installation().major,
        cluster.port()
    ))?;

    let url = database.url();
    let first_api = Server::start(stage, url, "api-1", "api").await?;
    let second_api = Server::start(stage, url, "api-2", "api").await?;
    let first_worker = Server::start(stage, url, "worker-1", "worker").await?;
    line("2. Three processes share it, which know nothing of each other:")?;
    for server in [&first_api, &second_api] {
        line(format!("     {} (pid {}) at {}", server.name, server.pid(), server.url()))?;
    }
    line(format!("     {} (pid {})", first_worker.name, first_worker.pid()))?;

    let asking = Client::at(&first_api.url(), None)?;
    let other = Client::at(&second_api.url(), None)?;
    let created = asking.send(Call::post("/v1/sessions", json!({"agent": SLUG, "prompt": QUESTION}))).await?;
    let id = text(&created, "session_id")?;
    line(format!("3. At api-1 somebody asks: {QUESTION}\n     session {id}"))?;

    let waiting = until(&asking, &id, "waiting_external").await?;
    let calls = outside_calls(&waiting)?;
    line("4. The model asked for three tool calls. The worker ran fetch_local; two wait for the outside:")?;
    for call in &calls {
        line(format!("     {} token {}", call.tool, call.token))?;
    }

    first_worker.kill().await?;
    first_api.kill().await?;
    line("5. kill -9 of worker-1 and api-1. What they knew and hadn't stored is gone: nothing.")?;
    let second_worker = Server::start(stage, url, "worker-2", "worker").await?;
    let view = other.send(Call::get(format!("/v1/sessions/{id}"))).await?;
    line(format!(
        "6. worker-2 (pid {}) takes over; api-2 says of the session: {}, {} open calls.",
        second_worker.pid(),
        text(&view, "status")?,
        pending_calls(&view).len()
    ))?;

    line("7. The outside completes both calls by their tokens, at api-2:")?;
    let view = complete(&other, &calls).await?;
    let view = if view["status"] == "idle" { view } else { until(&other, &id, "idle").await? };
    let answer = answer_text(&view).unwrap_or_default();
    line(format!("8. The model got all three results and answers:\n     {answer}"))?;
    check(stage, &id, &view, answer)?;
    line("9. Checked: the answer is right, fetch_local ran once, and the model saw each result once.\n")?;

    Ok(Standing { session: id, api: second_api, worker: second_worker })
}

/// A call that waits for the outside.
struct OutsideCall {
    tool: &'static str,
    token: String,
    result: &'static str,
}

fn outside_calls(view: &Value) -> Result<Vec<OutsideCall>, Failure> {
    let pending = pending_calls(view);
    if pending.len() != OUTSIDE.len() {
        return Err(Failure::Failed(format!(
            "{} calls are open instead of {}",
            pending.len(),
            OUTSIDE.len()
        )));
    }
    let found = OUTSIDE.iter().map(|(tool, result)| {
        let call = pending.iter().find(|call| call["tool"] == *tool);
        let call = call.ok_or_else(|| Failure::Failed(format!("no call of {tool} is open")))?;
        Ok(OutsideCall { tool, token: text(call, "continuation_token")?, result })
    });
    found.collect()
}

/// Completes the calls, the last one waiting for what the session makes of it.
async fn complete(client: &Client, calls: &[OutsideCall]) -> Result<Value, Failure> {
    let mut view = Value::Null;
    for (index, call) in calls.iter().enumerate() {
        let last = index + 1 == calls.len();
        let body = json!({"result": {"type": "text", "content": call.result}});
        let request = Call::post(format!("/v1/continuations/{}", call.token), body);
        view = client.send(request.waiting(last.then_some(WAIT))).await?;
        let waited = if last { ", with wait=true" } else { "" };
        line(format!(
            "     {} = {:?}{waited}: the session is {}",
            call.tool,
            call.result,
            text(&view, "status")?
        ))?;
    }
    Ok(view)
}

/// Waits until a session has a status.
async fn until(client: &Client, id: &str, status: &str) -> Result<Value, Failure> {
    let deadline = Instant::now() + PATIENCE;
    let mut pause = tokio::time::interval(Duration::from_millis(200));
    loop {
        // The server waits while something runs; between two runs this does.
        pause.tick().await;
        let view = client.send(Call::get(format!("/v1/sessions/{id}")).waiting(Some(WAIT))).await?;
        let is = text(&view, "status")?;
        if is == status {
            return Ok(view);
        }
        let detail = view["status_detail"].as_str().unwrap_or("no detail");
        if is == "failed" || Instant::now() > deadline {
            return Err(Failure::Failed(format!("the session is {is} ({detail}) instead of {status}")));
        }
    }
}

fn check(stage: &Stage, id: &str, view: &Value, answer: &str) -> Result<(), Failure> {
    if answer != ANSWER {
        return Err(Failure::Failed(format!("the answer is wrong; expected: {ANSWER}")));
    }
    let runs = stage.local_runs(id);
    if runs != 1 {
        return Err(Failure::Failed(format!("fetch_local ran {runs} times instead of once")));
    }
    let turns = view["session"]["turns"].as_array().map(Vec::as_slice).unwrap_or_default();
    let told = |turn: &Value| turn["contents"]["userToolResponses"].as_array().map_or(0, Vec::len);
    let told: usize = turns.iter().map(told).sum();
    let calls = OUTSIDE.len() + 1;
    if told != calls {
        return Err(Failure::Failed(format!("the model was told {told} results instead of {calls}")));
    }
    Ok(())
}

/// Says how to look at the session; with `keep` waits until it was looked at enough. Then stops what runs.
async fn finish(
    stage: &Stage,
    standing: Standing,
    keep: bool,
    shutdown: &CancellationToken,
) -> Result<(), Failure> {
    let Standing { session, api, worker } = standing;
    let program = program();
    let told = if keep {
        line(format!(
            "{} and {} stay up until Ctrl-C. Look at the session:\n  {program} session show {session} --server {}",
            api.name,
            worker.name,
            api.url()
        ))
    } else {
        line(format!(
            "Look at the session with a server of your own:\n  {program} serve --data-dir {}\nand beside it:\n  {program} session show {session}",
            stage.home.display()
        ))
    };
    if keep && told.is_ok() {
        shutdown.cancelled().await;
    }
    worker.stop().await;
    api.stop().await;
    told
}

fn text(value: &Value, name: &str) -> Result<String, Failure> {
    let found = value[name].as_str().map(str::to_owned);
    found.ok_or_else(|| Failure::Failed(format!("the server's answer has no {name}")))
}
