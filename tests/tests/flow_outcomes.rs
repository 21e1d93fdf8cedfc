//! Every way in which a deferred call may be completed, in time or not: what the program that completes it is
//! answered, and what the model is told. docs/agents.md has the table.

use std::{fs, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use holdfast_tests::{
    cluster::{Database, fresh_database},
    world::{AgentFiles, Model, Node, PATIENCE, World},
};
use serde_json::{Value, json};
use tokio::time::Instant;
use uuid::Uuid;

/// What a session is asked whose model calls a slow tool too.
const BESIDE: &str = "beside a slow call";

/// What a session is asked whose model asks a person.
const PERSON: &str = "ask a person";

/// What a session is asked whose call has a deadline.
const SOON: &str = "ask soon";

fn script() -> String {
    let call =
        |id: &str, name: &str, arguments: Value| json!({"id": id, "name": name, "arguments": arguments});
    let first = |prompt: &str, calls: Vec<Value>| json!({"when": {"turn": 0, "contains": prompt}, "reply": {"tool_calls": calls}});
    let question =
        json!({"capability": "ask-human", "question": "may I?", "deadline_seconds": 1, "default": "no"});
    json!({"rules": [
        first(BESIDE, vec![call("call_1", "ask_outside", json!({})), call("call_2", "bash_slow", json!({}))]),
        first(PERSON, vec![call("call_1", "system_self_system_info", question)]),
        first(SOON, vec![call("call_1", "ask_soon", json!({}))]),
        first("", vec![call("call_1", "ask_outside", json!({}))]),
        {"reply": {"text": "noted"}},
    ]})
    .to_string()
}

/// Nodes, and a session whose call is handed out.
struct Case {
    world: World,
    api: String,
    id: Uuid,
    token: String,
    _nodes: Vec<Node>,
    _database: Database,
}

impl Case {
    async fn new(prompt: &str) -> Result<Self> {
        let database = fresh_database().await;
        let model = Model::start(&script()).await?;
        let config = json!({"slug": "main", "flavor": "OpenAI", "modelUrl": model.url, "modelName": "main",
            "systemPrompt": ["You ask."], "toolDirectory": "tools",
            "builtinToolboxes": [{"tag": "SystemToolbox", "contents": {"Name": "self", "Capabilities": ["ask-human"]}}],
            "toolCallPolicyConfig": {"default": {"tag": "runSync"}, "rules": [
                {"tool": "ask_soon", "disposition": {"tag": "defer"}, "deadlineSeconds": 1},
                {"tool": "ask_*", "disposition": {"tag": "defer"}}]}});
        let slow = json!({"slug": "slow", "description": "Takes its time.", "args": []});
        let run = "dir=$(dirname \"$(dirname \"$0\")\")\nuntil [ -e \"$dir/go-on\" ]; do sleep 0.02; done\necho slow";
        let agent = AgentFiles::with_tools(&config, &[("slow", slow, run)])?;
        let world = World::new(database.url(), model, agent);
        let (api_node, api) = world.node("api", &[], &[]).await?;
        let (worker, _) = world.node("worker", &[], &[]).await?;
        let body = json!({"agent": "main", "prompt": prompt});
        let (status, view) = world.call("POST", &format!("{api}/v1/sessions"), Some(&body)).await?;
        ensure!(status == 201, "{status} {view}");
        let id: Uuid = view["session_id"].as_str().context("no id")?.parse()?;
        let nodes = vec![api_node, worker];
        let mut case = Self { world, api, id, token: String::new(), _nodes: nodes, _database: database };
        case.token = case.handed_out().await?;
        Ok(case)
    }

    /// A case whose deadlines somebody sees to.
    async fn with_scheduler(prompt: &str) -> Result<Self> {
        let mut case = Self::new(prompt).await?;
        let (scheduler, _) = case.world.node("scheduler", &[], &[]).await?;
        case._nodes.push(scheduler);
        Ok(case)
    }

    /// The token of the only call that is handed out.
    async fn handed_out(&self) -> Result<String> {
        let url = format!("{}/v1/sessions/{}/pending", self.api, self.id);
        let until = Instant::now() + PATIENCE;
        let mut pause = tokio::time::interval(Duration::from_millis(20));
        loop {
            let (status, list) = self.world.call("GET", &url, None).await?;
            ensure!(status == 200, "{status} {list}");
            if let Some(token) = list["calls"][0]["continuation_token"].as_str() {
                return Ok(token.to_owned());
            }
            ensure!(Instant::now() < until, "no call is handed out");
            pause.tick().await;
        }
    }

    /// Completes the call. Returns the status, the code of a refusal and what it says of the earlier result.
    async fn complete(&self, body: Value) -> Result<(u16, Value, Value)> {
        let url = format!("{}/v1/continuations/{}", self.api, self.token);
        let (status, view) = self.world.call("POST", &url, Some(&body)).await?;
        Ok((status, view["error"].clone(), view["same_result"].clone()))
    }

    /// Completes the call, and makes sure that the answer is this one.
    async fn answered(&self, body: Value, status: u16, error: Value, same: Value) -> Result<()> {
        let shown = body.to_string();
        let answer = self.complete(body).await?;
        ensure!(answer == (status, error, same), "{shown}: {answer:?}");
        Ok(())
    }

    async fn post(&self, what: &str, body: Value) -> Result<Value> {
        let url = format!("{}/v1/sessions/{}/{what}", self.api, self.id);
        let (status, view) = self.world.call("POST", &url, Some(&body)).await?;
        ensure!(matches!(status, 200 | 202), "{status} {view}");
        Ok(view)
    }

    /// Says something, and waits until the model has answered it.
    async fn say(&self, text: &str) -> Result<()> {
        let asked = self.requests().await?;
        self.post("messages", json!({"prompt": text})).await?;
        self.asked(asked + 1).await
    }

    async fn requests(&self) -> Result<usize> {
        Ok(self.world.model.requests().await?.len())
    }

    /// Waits until the model has been asked so often, has answered, and nothing goes on; it is asked no more.
    async fn asked(&self, times: usize) -> Result<()> {
        let until = Instant::now() + PATIENCE;
        let mut pause = tokio::time::interval(Duration::from_millis(20));
        loop {
            let view = self.world.view(&self.api, self.id).await?;
            let asked = self.requests().await?;
            ensure!(asked <= times, "the model was asked {asked} times: {view}");
            if asked == times && view["status"] != "running" {
                return Ok(());
            }
            ensure!(Instant::now() < until, "the model was asked {asked} times: {view}");
            pause.tick().await;
        }
    }

    /// What the model was told last, from its calls on: a role and a text each.
    async fn told(&self) -> Result<Vec<(String, String)>> {
        let violations = self.world.model.violations().await?;
        ensure!(violations.is_empty(), "{violations:?}");
        let requests = self.world.model.requests().await?;
        let messages = requests.last().and_then(|last| last["messages"].as_array()).context("no request")?;
        let calls = messages.iter().position(|message| message["tool_calls"].is_array());
        let Some(calls) = calls else { bail!("no calls: {messages:?}") };
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let told = messages[calls + 1..].iter();
        Ok(told.map(|message| (text(&message["role"]), text(&message["content"]))).collect())
    }

    /// Makes sure of what the model was told last: a role and a part of a text each.
    async fn was_told(&self, wanted: &[(&str, &str)]) -> Result<()> {
        let told = self.told().await?;
        let fits = told.len() == wanted.len()
            && told.iter().zip(wanted).all(|((role, text), (wanted, part))| {
                let whole = part.strip_prefix('=').map(|part| text.trim_end() == part);
                role == wanted && whole.unwrap_or_else(|| text.contains(part))
            });
        ensure!(fits, "the model was told {told:#?}, not {wanted:#?}");
        Ok(())
    }

    /// Whatever is said from now on, nothing more of the call is told.
    async fn nothing_more_is_told(&self, wanted: &[(&str, &str)]) -> Result<()> {
        self.say("anything else?").await?;
        let more = [("assistant", "=noted"), ("user", "=anything else?")];
        self.was_told(&[wanted, &more].concat()).await
    }
}

const ACCEPTED: (u16, Value, Value) = (202, Value::Null, Value::Null);

#[tokio::test(flavor = "multi_thread")]
async fn a_result_that_comes_before_the_run_stops_is_the_calls_answer() -> Result<()> {
    let case = Case::new(BESIDE).await?;
    ensure!(case.complete(json!({"result": "42"})).await? == ACCEPTED);
    ensure!(case.world.view(&case.api, case.id).await?["status"] == "running", "the round goes on");
    ensure!(case.requests().await? == 1, "the model waits for the whole round");
    fs::write(case.world.agent.dir().join("go-on"), "")?;
    case.asked(2).await?;
    let told = [("tool", "=42"), ("tool", "=slow")];
    case.was_told(&told).await?;
    case.nothing_more_is_told(&told).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_result_in_time_is_the_calls_answer() -> Result<()> {
    let case = Case::new("ask").await?;
    ensure!(case.world.until(&case.api, case.id, "waiting_external").await?["parked_on"].is_null());
    ensure!(case.complete(json!({"result": "42"})).await? == ACCEPTED);
    case.asked(2).await?;
    case.was_told(&[("tool", "=42")]).await?;
    case.nothing_more_is_told(&[("tool", "=42")]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_is_the_answer_of_a_failed_call() -> Result<()> {
    let case = Case::new("ask").await?;
    ensure!(case.complete(json!({"error": "there is none"})).await? == ACCEPTED);
    case.asked(2).await?;
    case.was_told(&[("tool", "=Error: there is none")]).await?;
    let sql = case._database.connect().await;
    let kept = sql.query_one("SELECT state FROM continuations", &[]).await?;
    ensure!(kept.get::<_, &str>(0) == "failed");
    let ended = "SELECT body FROM events WHERE kind = 'tool.completed'";
    let event: Value = serde_json::from_str(sql.query_one(ended, &[]).await?.get(0))?;
    ensure!(event["succeeded"] == false && event["state"] == "failed", "{event}");
    case.answered(json!({"result": "42"}), 409, json!("token_already_completed"), json!(false)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_end_is_told_once_as_mail() -> Result<()> {
    for (body, word, text) in [
        (json!({"result": "42"}), "(ask_outside) completed]", "42"),
        (json!({"error": "there is none"}), "(ask_outside) failed]", "there is none"),
    ] {
        let case = Case::new("ask").await?;
        case.say("how is it going?").await?;
        let before =
            [("tool", "\"status\":\"deferred\""), ("user", "=how is it going?"), ("assistant", "=noted")];
        case.was_told(&before[..2]).await?;
        ensure!(case.complete(body.clone()).await? == ACCEPTED);
        case.asked(3).await?;
        let told = [&before[..], &[("user", word)]].concat();
        case.was_told(&told).await?;
        ensure!(case.told().await?.last().is_some_and(|(_, said)| said.contains(text)), "{text}");
        case.answered(body, 409, json!("token_already_completed"), json!(true)).await?;
        case.nothing_more_is_told(&told).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn of_several_completions_the_first_one_counts() -> Result<()> {
    let case = Case::new("ask").await?;
    ensure!(case.complete(json!({"result": "42"})).await? == ACCEPTED);
    let already = || json!("token_already_completed");
    case.answered(json!({"result": "42"}), 409, already(), json!(true)).await?;
    case.answered(json!({"result": {"type": "text", "content": "42"}}), 409, already(), json!(true)).await?;
    for other in [
        json!({"result": "43"}),
        json!({"result": {"type": "json", "content": "42"}}),
        json!({"error": "42"}),
        json!({"approve": true}),
        json!({"approve": false}),
    ] {
        case.answered(other, 409, already(), json!(false)).await?;
    }
    case.asked(2).await?;
    case.was_told(&[("tool", "=42")]).await?;
    case.nothing_more_is_told(&[("tool", "=42")]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_completion_that_is_sent_again_with_its_key_is_the_same_one() -> Result<()> {
    let case = Case::new("ask").await?;
    let send = async |result: &str| {
        let url = format!("{}/v1/continuations/{}", case.api, case.token);
        let request = holdfast_tests::world::client().post(url).header("Idempotency-Key", "mine");
        Ok::<_, anyhow::Error>(request.json(&json!({"result": result})).send().await?.status().as_u16())
    };
    ensure!(send("42").await? == 202 && send("42").await? == 202);
    ensure!(send("43").await? == 422, "a key names one request");
    case.asked(2).await?;
    case.nothing_more_is_told(&[("tool", "=42")]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_completion_after_a_cancel_is_refused_and_the_model_hears_of_the_cancel() -> Result<()> {
    let case = Case::new("ask").await?;
    case.world.until(&case.api, case.id, "waiting_external").await?;
    case.post("cancel", json!({"deferred": true})).await?;
    for body in [json!({"result": "42"}), json!({"error": "no"}), json!({"approve": true})] {
        case.answered(body, 409, json!("token_cancelled"), Value::Null).await?;
    }
    ensure!(case.requests().await? == 1, "a cancel asks nobody");
    case.say("go on").await?;
    let told = [
        ("tool", "=Error: cancelled: the call of ask_outside was ended by order before it had a result."),
        ("user", "=go on"),
    ];
    case.was_told(&told).await?;
    case.nothing_more_is_told(&told).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_completion_after_a_delete_is_of_an_unknown_token() -> Result<()> {
    let case = Case::new("ask").await?;
    case.world.until(&case.api, case.id, "waiting_external").await?;
    let url = format!("{}/v1/sessions/{}", case.api, case.id);
    let (status, deleted) = case.world.call("DELETE", &url, None).await?;
    ensure!(status == 200 && deleted["continuations"] == 1, "{status} {deleted}");
    case.answered(json!({"result": "42"}), 404, json!("unknown_token"), Value::Null).await?;
    let token = format!("{}/v1/continuations/{}", case.api, case.token);
    ensure!(case.world.call("GET", &token, None).await?.0 == 404);
    ensure!(case.requests().await? == 1);
    let nobodys = Case { token: Uuid::new_v4().to_string(), ..case };
    nobodys.answered(json!({"result": "42"}), 404, json!("unknown_token"), Value::Null).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_completion_after_the_deadline_is_refused_and_the_model_hears_that_nobody_came() -> Result<()> {
    const NOBODY: &str = "=Error: expired: nobody completed this call before its deadline.";
    let case = Case::with_scheduler(SOON).await?;
    case.asked(2).await?;
    case.was_told(&[("tool", NOBODY)]).await?;
    for body in [json!({"result": "42"}), json!({"error": "no"}), json!({"approve": true})] {
        case.answered(body, 410, json!("token_expired"), Value::Null).await?;
    }
    case.nothing_more_is_told(&[("tool", NOBODY)]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_behind_a_placeholder_is_told_once_as_mail() -> Result<()> {
    // No scheduler yet: whoever completes the call in vain lets it expire.
    let case = Case::new(SOON).await?;
    case.say("how is it going?").await?;
    let sql = case._database.connect().await;
    sql.execute("UPDATE continuations SET expires_at = now() - interval '1 second'", &[]).await?;
    case.answered(json!({"result": "42"}), 410, json!("token_expired"), Value::Null).await?;
    case.asked(3).await?;
    let told = [
        ("tool", "\"status\":\"deferred\""),
        ("user", "=how is it going?"),
        ("assistant", "=noted"),
        ("user", "(ask_soon) failed]"),
    ];
    case.was_told(&told).await?;
    ensure!(case.told().await?.last().is_some_and(|(_, said)| said.contains("expired: nobody")));
    case.nothing_more_is_told(&told).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_with_a_default_is_answered_by_it() -> Result<()> {
    let case = Case::with_scheduler(PERSON).await?;
    case.asked(2).await?;
    case.was_told(&[("tool", "=no")]).await?;
    case.answered(json!({"result": "yes"}), 410, json!("token_expired"), Value::Null).await?;
    case.nothing_more_is_told(&[("tool", "=no")]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_result_for_a_session_that_is_to_stay_where_it_is_is_told_when_it_goes_on() -> Result<()> {
    let paused = Case::new("ask").await?;
    paused.world.until(&paused.api, paused.id, "waiting_external").await?;
    paused.post("pause", json!({})).await?;
    let (status, error, _) = paused.complete(json!({"result": "42"})).await?;
    ensure!(matches!(status, 200 | 202) && error.is_null(), "{status} {error}");
    let unresumed = Case::new("ask").await?;
    unresumed.world.until(&unresumed.api, unresumed.id, "waiting_external").await?;
    let (status, error, _) = unresumed.complete(json!({"result": "42", "resume": false})).await?;
    ensure!(status == 200 && error.is_null(), "{status} {error}");
    for case in [paused, unresumed] {
        let view = case.world.view(&case.api, case.id).await?;
        ensure!(view["status"] != "running" && view["pending"] == json!([]), "{view}");
        ensure!(case.requests().await? == 1, "nobody is asked yet");
        case.post("resume", json!({})).await?;
        case.asked(2).await?;
        case.was_told(&[("tool", "=42")]).await?;
        case.nothing_more_is_told(&[("tool", "=42")]).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_word_that_a_call_may_run_is_refused_where_a_result_is_waited_for() -> Result<()> {
    let case = Case::new("ask").await?;
    case.answered(json!({"approve": true}), 409, json!("nothing_to_approve"), Value::Null).await?;
    ensure!(case.complete(json!({"approve": false, "error": "not today"})).await? == ACCEPTED);
    case.asked(2).await?;
    case.was_told(&[("tool", "=Error: denied: not today")]).await?;
    case.nothing_more_is_told(&[("tool", "=Error: denied: not today")]).await
}
