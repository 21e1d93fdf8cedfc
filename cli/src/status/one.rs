//! `holdfast status --session`: one session explained, without a word of what was said in it.

use chrono::{DateTime, Utc};
use holdfast_engine::ids::SessionId;
use holdfast_store::{
    Store, StoreError,
    quota::Limits,
    status::{self, OneCall, OneRun, OneSession},
};
use holdfast_worker::{MAX_TAKEOVERS, cause::cause};
use serde_json::{Value, json};

use super::{
    as_text::shortened,
    report::owner_name,
    why::{Share, why},
};
use crate::{
    failure::{Failure, chain},
    output,
};

/// What keeps a session, with a stable name.
struct Reason {
    code: &'static str,
    text: String,
}

/// Explains a session.
pub(super) async fn tell(store: &Store, id: SessionId, as_json: bool) -> Result<(), Failure> {
    let failed = |error: StoreError| Failure::Failed(chain(&error));
    let one = match status::session(store, id).await.map_err(failed)? {
        None => return Err(Failure::Failed("reading the session took too long".to_owned())),
        Some(None) => return Err(Failure::Failed(format!("there is no session {id}"))),
        Some(Some(one)) => one,
    };
    let reasons = reasons(store, &one).await.map_err(failed)?;
    if as_json { output::json(&json_of(id, &one, &reasons)) } else { show(id, &one, &reasons) }
}

async fn reasons(store: &Store, one: &OneSession) -> Result<Vec<Reason>, StoreError> {
    let mut reasons = Vec::new();
    if let Some(at) = one.deleted_at {
        let text = format!("it was deleted {} s ago; its rows go with a pass of a scheduler", age(one, at));
        return Ok(vec![Reason { code: "deleted", text }]);
    }
    match &one.run {
        Some(run) => reasons.push(of_run(store, one, run).await?),
        None => reasons.extend(at_rest(one)),
    }
    for call in one.calls.iter().filter(|call| call.state == "deferred") {
        reasons.push(Reason { code: "deferred_call", text: deferred(one, call) });
    }
    if one.unread > 0 {
        let text = format!("{} letters are unread", one.unread);
        reasons.push(Reason { code: "unread_mail", text });
    }
    Ok(reasons)
}

async fn of_run(store: &Store, one: &OneSession, run: &OneRun) -> Result<Reason, StoreError> {
    let reason = |code, text| Reason { code, text };
    match run.state.as_str() {
        "claimed" => {
            let until = run.lease_until.unwrap_or(one.now);
            let worker = run.worker.map(|worker| worker.to_string()).unwrap_or_default();
            if until < one.now {
                let text = format!(
                    "worker {worker} lost its lease {} s ago; nobody has taken it over",
                    age(one, until)
                );
                return Ok(reason("lease_expired", text));
            }
            let running: Vec<String> = one
                .calls
                .iter()
                .filter(|call| call.state == "running")
                .map(|call| format!("{} for {} s", call.tool, age(one, call.since)))
                .collect();
            if running.is_empty() {
                let text = format!(
                    "worker {worker} asks the model, or is between two steps, for {} s",
                    age(one, one.updated_at)
                );
                return Ok(reason("model_request", text));
            }
            Ok(reason("tool_running", format!("worker {worker} runs {}", running.join(", "))))
        }
        "parked" => {
            let on = run.parked_on.as_deref().unwrap_or("something else");
            let until = run.available_at.map(|at| format!(" until {}", at.to_rfc3339())).unwrap_or_default();
            Ok(reason("parked", format!("the engine waits for {on}{until}")))
        }
        _ => match run.available_at.filter(|at| *at > one.now) {
            Some(at) => {
                let text = format!("it was put off after a fault until {}", at.to_rfc3339());
                Ok(reason("put_off", text))
            }
            None => {
                let queue = status::queue(store, Some(&one.owner)).await?;
                let workers = status::workers(store).await?.unwrap_or_default();
                let leases =
                    status::leases(store, None).await?.map(|leases| leases.workers).unwrap_or_default();
                let (limits, held) = match status::owner(store, &one.owner).await? {
                    Some((limits, usage)) => (limits, usage.running),
                    None => (Limits::default(), 0),
                };
                let bucket = queue.and_then(|queue| queue.largest.first().and_then(|owner| owner.bucket));
                let share = Share { limits: &limits, bucket, held };
                let agent = (one.agent.as_str(), run.revision.as_str(), one.current.as_deref());
                let found = why(agent, &share, &workers, &leases);
                let due = run.available_at.map_or(0, |at| age(one, at));
                Ok(reason(found.code(), format!("it has been due for {due} s: {}", found.text())))
            }
        },
    }
}

fn at_rest(one: &OneSession) -> Option<Reason> {
    let (code, text) = match one.status.as_str() {
        "paused" => {
            ("paused", "it is paused; only `session resume` or a message of a person goes on".to_owned())
        }
        "idle" => ("idle", "nothing: the model's last answer ended its run".to_owned()),
        "ready" => ("ready", "nothing: it has been asked nothing yet".to_owned()),
        "failed" => {
            let cause = cause(one.detail.as_deref().unwrap_or_default());
            ("failed", format!("it failed: {cause}; `session resume` tries again"))
        }
        _ => return None,
    };
    Some(Reason { code, text })
}

fn deferred(one: &OneSession, call: &OneCall) -> String {
    let reason = call.reason.as_deref().map(shortened).unwrap_or_default();
    let deadline = match call.expires_at {
        Some(at) if at <= one.now => format!(", {} s past its deadline", age(one, at)),
        Some(at) => format!(", deadline {}", at.to_rfc3339()),
        None => ", without a deadline".to_owned(),
    };
    format!("call {} of {} has waited {} s ({reason}){deadline}", call.id, call.tool, age(one, call.since))
}

fn age(one: &OneSession, since: DateTime<Utc>) -> i64 {
    one.now.signed_duration_since(since).num_seconds().max(0)
}

fn json_of(id: SessionId, one: &OneSession, reasons: &[Reason]) -> Value {
    json!({
        "session_id": id.0,
        "at": one.now,
        "owner": one.owner, "agent": one.agent, "current_revision": one.current, "status": one.status,
        "cause": (one.status == "failed").then(|| cause(one.detail.as_deref().unwrap_or_default())),
        "hold": one.hold, "version": one.version, "turns": one.turns, "unread_mail": one.unread,
        "parent_session_id": one.parent, "created_at": one.created_at, "updated_at": one.updated_at,
        "deleted_at": one.deleted_at,
        "run": one.run.as_ref().map(|run| json!({
            "state": run.state, "mode": run.mode, "agent_revision": run.revision, "available_at": run.available_at,
            "worker": run.worker, "lease_until": run.lease_until, "epoch": run.epoch, "takeovers": run.takeovers,
            "parked_on": run.parked_on, "since": run.since,
        })),
        "waits_for": reasons.iter().map(|one| json!({"code": one.code, "text": one.text})).collect::<Vec<_>>(),
        "calls": one.calls.iter().map(|call| json!({
            "call_id": call.id, "tool": call.tool, "state": call.state, "idempotent": call.idempotent,
            "attempt": call.attempt, "since": call.since, "seconds": age(one, call.since),
            "expires_at": call.expires_at, "reason": call.reason,
        })).collect::<Vec<_>>(),
        "events": one.events.iter()
            .map(|event| json!({"seq": event.seq, "kind": event.kind, "at": event.at})).collect::<Vec<_>>(),
    })
}

fn show(id: SessionId, one: &OneSession, reasons: &[Reason]) -> Result<(), Failure> {
    let owner = owner_name(&one.owner);
    let (status, agent, version, turns) = (&one.status, &one.agent, one.version, one.turns);
    output::line(format!("session {id} of owner {owner}, agent {agent}: {status}"))?;
    let (changed, created) = (age(one, one.updated_at), one.created_at.to_rfc3339());
    output::line(format!("version {version}, {turns} turns, created {created}, changed {changed} s ago"))?;
    if let Some(run) = &one.run {
        let (state, mode, takeovers) = (&run.state, &run.mode, run.takeovers);
        output::line(format!(
            "run: {state}, {mode}, for {} s, outlived {takeovers} workers of {MAX_TAKEOVERS}",
            age(one, run.since)
        ))?;
        if let (Some(worker), Some(until)) = (run.worker, run.lease_until) {
            output::line(format!(
                "lease: worker {worker}, epoch {}, until {}",
                run.epoch,
                until.to_rfc3339()
            ))?;
        }
    } else {
        output::line("run: none")?;
    }
    for reason in reasons {
        output::line(format!("waits for: {} [{}]", reason.text, reason.code))?;
    }
    output::line("")?;
    let rows = one
        .events
        .iter()
        .map(|event| [event.seq.to_string(), event.kind.clone(), format!("{} s ago", age(one, event.at))]);
    output::table(["EVENT", "KIND", "WHEN"], rows)
}
