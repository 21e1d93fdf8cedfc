//! `holdfast session`: operating sessions of a running server.

mod calls;
mod follow;
mod list;
mod prompt;
mod show;

use serde_json::{Value, json};
use uuid::Uuid;

use crate::{
    args::{MessageArgs, SessionArgs, SessionCommand, StartArgs, WaitArgs},
    client::{Call, Client},
    failure::Failure,
    output,
};

pub(crate) use show::{answer_text, pending_calls};

/// Does what the command line says.
pub(crate) async fn run(args: SessionArgs) -> Result<(), Failure> {
    let client = Client::new(&args.client)?;
    let json = args.client.json;
    match args.command {
        SessionCommand::Start(start) => self::start(&client, start, json).await,
        SessionCommand::Message(message) => self::message(&client, message, json).await,
        SessionCommand::Step(step) => resume(&client, step.session.id, "step", &step.wait, json).await,
        SessionCommand::Resume(resume) => {
            self::resume(&client, resume.session.id, "until_blocked", &resume.wait, json).await
        }
        SessionCommand::Pause(session) => {
            let meta = client.send(Call::post(path(session.id, "/pause"), json!({}))).await?;
            changed(&meta, json)
        }
        SessionCommand::Cancel { session, deferred } => {
            let call = Call::post(path(session.id, "/cancel"), json!({ "deferred": deferred }));
            changed(&client.send(call).await?, json)
        }
        SessionCommand::Pending(pending) => calls::pending(&client, pending, json).await,
        SessionCommand::Complete(complete) => calls::complete(&client, complete, json).await,
        SessionCommand::Fail(fail) => calls::fail(&client, fail, json).await,
        SessionCommand::Show(show) => show::run(&client, show, json).await,
        SessionCommand::List(list) => list::run(&client, list, json).await,
        SessionCommand::Follow(follow) => {
            let ends = if follow.until_stopped { follow::Until::Stopped } else { follow::Until::Deleted };
            let after = follow.after.map(|seq| seq.to_string());
            follow::run(&client, follow.session.id, after, ends, json).await
        }
        SessionCommand::Delete { session, dry_run } => delete(&client, session.id, dry_run, json).await,
    }
}

/// A session's path, or one below it.
fn path(id: Uuid, rest: &str) -> String {
    format!("/v1/sessions/{id}{rest}")
}

impl WaitArgs {
    fn seconds(&self) -> Option<u64> {
        self.wait.then_some(self.timeout)
    }
}

async fn start(client: &Client, args: StartArgs, json: bool) -> Result<(), Failure> {
    let prompt = prompt::read(&args.prompt.parts).await?;
    let mut body = json!({ "agent": args.agent });
    prompt.put_into(&mut body);
    let run = if args.step { Some("step") } else { args.run.map(|mode| mode.name()) };
    if let Some(run) = run {
        body["run"] = run.into();
    }
    if !args.labels.is_empty() {
        body["labels"] = args.labels.into_iter().map(|(name, value)| (name, Value::String(value))).collect();
    }
    let view = client.send(Call::post("/v1/sessions", body).waiting(args.wait.seconds())).await?;
    if !args.follow {
        return shown(&view, json);
    }
    let id = session_id(&view)?;
    if !json {
        output::line(format!("session {id}"))?;
    }
    follow_run(client, &view, id, Some("0".to_owned()), json).await
}

async fn message(client: &Client, args: MessageArgs, json: bool) -> Result<(), Failure> {
    let prompt = prompt::read(&args.prompt.parts).await?;
    if prompt.is_empty() {
        return Err(Failure::Usage("a message needs a part: --prompt, --file, --shell or --media".into()));
    }
    let mut body = json!({});
    prompt.put_into(&mut body);
    if let Some(mode) = args.run {
        body["run"] = mode.name().into();
    }
    if let Some(id) = args.message_id {
        body["message_id"] = id.to_string().into();
    }
    let id = args.session.id;
    // Where the stream stands before the message, so that nothing after it is missed.
    let after = if args.follow { Some(follow::newest(client, id).await?) } else { None };
    let view = client.send(Call::post(path(id, "/messages"), body).waiting(args.wait.seconds())).await?;
    if args.follow {
        return follow_run(client, &view, id, after, json).await;
    }
    shown(&view, json)
}

/// Follows a session that was just set going; one that nothing runs in is only shown.
async fn follow_run(
    client: &Client,
    view: &Value,
    id: Uuid,
    after: Option<String>,
    json: bool,
) -> Result<(), Failure> {
    if matches!(view["status"].as_str(), Some("ready" | "paused")) {
        return shown(view, json);
    }
    follow::run(client, id, after, follow::Until::Stopped, json).await?;
    if json {
        return Ok(());
    }
    let view = client.send(Call::get(path(id, "")).with("turns", Some(1))).await?;
    output::line("")?;
    show::brief(&view)
}

async fn resume(client: &Client, id: Uuid, mode: &str, wait: &WaitArgs, json: bool) -> Result<(), Failure> {
    let call = Call::post(path(id, "/resume"), json!({ "mode": mode })).waiting(wait.seconds());
    shown(&client.send(call).await?, json)
}

async fn delete(client: &Client, id: Uuid, dry_run: bool, json: bool) -> Result<(), Failure> {
    let done = client.send(Call::delete(path(id, "")).with("dry_run", dry_run.then_some(true))).await?;
    if json {
        return output::json(&done);
    }
    let count = |name: &str| {
        done[name].as_array().map_or_else(|| done[name].as_u64().unwrap_or(0), |list| list.len() as u64)
    };
    let verb = if dry_run { "would delete" } else { "deleted" };
    output::line(format!(
        "{verb} {} sessions and {} deferred calls",
        count("sessions"),
        count("continuations")
    ))
}

/// Prints a view: all of it as JSON, its essence for people.
fn shown(view: &Value, json: bool) -> Result<(), Failure> {
    if json { output::json(view) } else { show::brief(view) }
}

/// Prints what a command changed of a session.
fn changed(meta: &Value, json: bool) -> Result<(), Failure> {
    if json { output::json(meta) } else { show::headline(meta) }
}

fn session_id(view: &Value) -> Result<Uuid, Failure> {
    let id = view["session_id"].as_str().and_then(|id| id.parse().ok());
    id.ok_or_else(|| Failure::Failed("the server's answer names no session".into()))
}
