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
        SessionCommand::Cancel { session, deferred, attached } => {
            let call = match attached {
                true => Call::post(path(session.id, "/cancel-attached"), json!({})),
                false => Call::post(path(session.id, "/cancel"), json!({ "deferred": deferred })),
            };
            changed(&client.send(call).await?, json)
        }
        SessionCommand::Pending(pending) => calls::pending(&client, pending, json).await,
        SessionCommand::Complete(complete) => calls::complete(&client, complete, json).await,
        SessionCommand::Fail(fail) => calls::fail(&client, fail, json).await,
        SessionCommand::Approve(approve) => calls::approve(&client, approve, json).await,
        SessionCommand::Show(show) => show::run(&client, show, json).await,
        SessionCommand::List(list) => list::run(&client, list, json).await,
        SessionCommand::Follow(follow) => {
            let ends = if follow.until_stopped { follow::Until::Stopped } else { follow::Until::Deleted };
            let after = follow.after.map(|seq| seq.to_string());
            follow::run(&client, follow.session.id, after, ends, json).await.map(drop)
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
    if !args.label.is_empty() {
        body["labels"] = args.label.into_iter().map(|(name, value)| (name, Value::String(value))).collect();
    }
    let view = client.send(Call::post("/v1/sessions", body).waiting(args.wait.seconds())).await?;
    if !args.follow {
        return stopped(&view, &args.wait, json);
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
    if args.interrupt {
        body["interrupt"] = true.into();
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
    stopped(&view, &args.wait, json)
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
    let status = follow::run(client, id, after, follow::Until::Stopped, json).await?;
    if json {
        return success(status.as_deref(), None);
    }
    let view = client.send(Call::get(path(id, "")).with("turns", Some(1))).await?;
    output::line("")?;
    show::brief(&view)?;
    success(status.as_deref(), view["status_detail"].as_str())
}

async fn resume(client: &Client, id: Uuid, mode: &str, wait: &WaitArgs, json: bool) -> Result<(), Failure> {
    let call = Call::post(path(id, "/resume"), json!({ "mode": mode })).waiting(wait.seconds());
    stopped(&client.send(call).await?, wait, json)
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

/// Prints a view; where the run's end was waited for, a session that failed is a failure of the command.
fn stopped(view: &Value, wait: &WaitArgs, json: bool) -> Result<(), Failure> {
    shown(view, json)?;
    if wait.wait { success(view["status"].as_str(), view["status_detail"].as_str()) } else { Ok(()) }
}

/// Whether a run that stopped with a status did what it was for.
fn success(status: Option<&str>, detail: Option<&str>) -> Result<(), Failure> {
    match (status, detail) {
        (Some("failed"), Some(detail)) => Err(Failure::Failed(format!("the session failed: {detail}"))),
        (Some("failed"), None) => Err(Failure::Failed("the session failed".into())),
        _ => Ok(()),
    }
}

/// Prints what a command changed of a session.
fn changed(meta: &Value, json: bool) -> Result<(), Failure> {
    if json { output::json(meta) } else { show::headline(meta) }
}

fn session_id(view: &Value) -> Result<Uuid, Failure> {
    let id = view["session_id"].as_str().and_then(|id| id.parse().ok());
    id.ok_or_else(|| Failure::Failed("the server's answer names no session".into()))
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use axum::{
        Json, Router,
        http::{StatusCode, Uri},
        routing::{get, post},
    };
    use clap::Parser as _;

    use super::*;
    use crate::args::{Cli, Command};

    const ID: &str = "01a22d2c-31b9-709a-b42b-ae7054a40db6";

    /// Runs a command line against a server whose sessions stop with a status.
    async fn ended(line: &[&str], status: &'static str) -> Result<(), Failure> {
        let view = json!({"session_id": ID, "agent": "a", "status": status, "status_detail": "poison"});
        let events = format!(
            "id: 1\nevent: session.updated\ndata: {{\"seq\":1,\"status\":\"running\"}}\n\n\
             id: 2\nevent: run.stopped\ndata: {{\"seq\":2,\"status\":\"{status}\"}}\n\n"
        );
        let (created, sent, shown) = (view.clone(), view.clone(), view);
        let router = Router::new()
            .route("/v1/sessions", post(async move || (StatusCode::CREATED, Json(created))))
            .route(&format!("/v1/sessions/{ID}/messages"), post(async move || Json(sent)))
            .route(&format!("/v1/sessions/{ID}"), get(async move || Json(shown)))
            .route(
                &format!("/v1/sessions/{ID}/events"),
                get(async move || ([("content-type", "text/event-stream")], events)),
            );
        send(router, line).await
    }

    async fn send(router: Router, line: &[&str]) -> Result<(), Failure> {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let base = format!("http://{}", listener.local_addr().expect("bound"));
        tokio::spawn(async move { axum::serve(listener, router).await });
        let line = ["holdfast", "session", "--server", base.as_str()].into_iter().chain(line.iter().copied());
        match Cli::try_parse_from(line).expect("parses").command {
            Command::Session(args) => run(*args).await,
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn a_session_that_failed_while_it_was_waited_for_is_a_failure() {
        let start = ["start", "--agent", "a", "-p", "x"];
        let message = ["message", ID, "-p", "x"];
        for command in [&start[..], &message[..]] {
            for watch in [&["--wait"][..], &["--follow"], &["--follow", "--json"], &["--wait", "--json"]] {
                let line = [command, watch].concat();
                let failure = ended(&line, "failed").await.expect_err("the session failed");
                assert_eq!(failure.code(), 1, "{line:?}");
                assert!(failure.to_string().starts_with("the session failed"), "{failure}");
                for fine in ["idle", "waiting_external"] {
                    assert_eq!(ended(&line, fine).await, Ok(()), "{line:?}");
                }
            }
            assert_eq!(ended(command, "failed").await, Ok(()), "nobody waited for the run");
        }
    }

    #[tokio::test]
    async fn orders_are_sent_as_the_server_knows_them() {
        let asked = Arc::new(Mutex::new(Vec::new()));
        for line in [
            &["cancel", ID][..],
            &["cancel", ID, "--deferred"],
            &["cancel", ID, "--attached"],
            &["approve", ID],
            &["approve", ID, "--no-resume"],
            &["message", ID, "-p", "x", "--interrupt"],
            &["message", ID, "-p", "x"],
        ] {
            let seen = Arc::clone(&asked);
            let order = move |uri: Uri, Json(body): Json<Value>| {
                let path = uri.path().replace(ID, "ID");
                seen.lock().expect("no panic").push(format!("{path} {body}"));
                std::future::ready(Json(json!({"session_id": ID, "agent": "a", "status": "idle"})))
            };
            let router = Router::new().fallback(order);
            assert_eq!(send(router, line).await, Ok(()), "{line:?}");
        }
        assert_eq!(
            *asked.lock().expect("no panic"),
            [
                r#"/v1/sessions/ID/cancel {"deferred":false}"#,
                r#"/v1/sessions/ID/cancel {"deferred":true}"#,
                r#"/v1/sessions/ID/cancel-attached {}"#,
                r#"/v1/continuations/ID {"approve":true,"resume":true}"#,
                r#"/v1/continuations/ID {"approve":true,"resume":false}"#,
                r#"/v1/sessions/ID/messages {"interrupt":true,"prompt":"x"}"#,
                r#"/v1/sessions/ID/messages {"prompt":"x"}"#,
            ]
        );
    }

    #[tokio::test]
    async fn a_list_asks_for_a_label_as_the_server_writes_it() {
        let asked = Arc::new(Mutex::new(String::new()));
        let seen = Arc::clone(&asked);
        let list = move |uri: Uri| {
            *seen.lock().expect("no panic") = uri.query().unwrap_or_default().to_owned();
            std::future::ready(Json(json!({"sessions": []})))
        };
        let router = Router::new().route("/v1/sessions", get(list));
        assert_eq!(send(router, &["list", "--label", "team=a=b"]).await, Ok(()));
        assert_eq!(*asked.lock().expect("no panic"), "label=team%3Aa%3Db");
    }
}
