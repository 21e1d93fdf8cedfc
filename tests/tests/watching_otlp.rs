//! Real nodes against an OTLP server: one trace a run, the metrics of `/metrics`, the logs of standard error;
//! and against servers that are away or never answer, which must not matter.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use holdfast_tests::{
    cluster::fresh_database,
    otlp::{Hanging, Received, Sink, attribute, impatient},
    scrape::{Scrape, metrics_address},
    world::{AgentFiles, Model, Node, PATIENCE, Signal, World, answer, client},
};
use opentelemetry_proto::tonic::{
    common::v1::KeyValue,
    metrics::v1::{Metric, metric::Data, number_data_point},
    trace::v1::{Span, span::SpanKind, status::StatusCode},
};
use serde_json::{Value, json};

/// What stands in a prompt, an argument and a result, and nowhere else.
const CANARY: &str = "nobody-may-read-this";
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";

/// A model that calls `bash_where`, which says in which context it runs, and then repeats what that said; a
/// second session's call fails.
const SCRIPT: &str = r#"{"rules": [
    {"when": {"turn": 0}, "reply": {"tool_calls": [{"name": "bash_where", "arguments": {"what": "nobody-may-read-this"}}]}},
    {"when": {"turn": 1}, "reply": {"text": "{{tool_result:bash_where}}", "usage": {"input_tokens": 11, "output_tokens": 7}}}
]}"#;

async fn world(url: &str) -> Result<World> {
    let model = Model::start(SCRIPT).await?;
    let config = json!({"slug": "tracer", "flavor": "OpenAI", "modelUrl": model.url, "modelName": "scripted", "toolDirectory": "tools"});
    let described = json!({"slug": "where", "description": "Says where it runs.", "args": [
        {"name": "what", "description": "anything", "type": "string", "backing_type": "string", "arity": "single", "mode": "positional"}]});
    let agent = AgentFiles::with_tools(&config, &[("where", described, "printf '%s' \"$TRACEPARENT\"")])?;
    let mut world = World::new(url, model, agent);
    // A machine that stalls for a second takes no lease, and so makes no second run.
    world.lease_ttl = 30;
    Ok(world)
}

/// Creates a session in a trace of the caller's and waits for its answer.
async fn asked(world: &World, api: &str) -> Result<(String, String)> {
    let body = json!({"agent": "tracer", "prompt": CANARY});
    let request = client()
        .post(format!("{api}/v1/sessions"))
        .header("traceparent", format!("00-{TRACE}-{PARENT}-01"))
        .json(&body);
    let view: Value = request.send().await?.error_for_status()?.json().await?;
    let id = view["session_id"].as_str().context("an id")?.to_owned();
    let view = world.until(api, id.parse()?, "idle").await?;
    Ok((id, answer(&view)?))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The spans of the caller's trace by name, once the run that made them has ended.
async fn trace_of(sink: &Sink) -> Result<BTreeMap<String, Vec<Span>>> {
    sink.until("the span of the run", |received| {
        let ours: Vec<&Span> =
            received.spans.iter().map(|(_, span)| span).filter(|span| hex(&span.trace_id) == TRACE).collect();
        ours.iter().any(|span| span.name == "run").then(|| {
            let mut named: BTreeMap<String, Vec<Span>> = BTreeMap::new();
            for span in ours {
                named.entry(span.name.clone()).or_default().push(span.clone());
            }
            named
        })
    })
    .await
}

fn has(span: &Span, wanted: &[(&str, &str)]) -> Result<()> {
    for (name, value) in wanted {
        let found = attribute(&span.attributes, name);
        ensure!(found.as_deref() == Some(value), "{}: {name} is {found:?}, not {value:?}", span.name);
    }
    Ok(())
}

fn as_given<'a>(variables: &'a [(&'static str, String)]) -> Vec<(&'static str, &'a str)> {
    variables.iter().map(|(name, value)| (*name, value.as_str())).collect()
}

/// Stops a node in order and checks that it ends well.
async fn stop(node: &mut Node) -> Result<()> {
    node.signal(Signal::TERM)?;
    let status = node.ended().await?;
    ensure!(status.success(), "{status}: {}", node.log_text());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_is_one_trace_with_its_steps_and_its_tools_know_it() -> Result<()> {
    let database = fresh_database().await;
    let (world, sink, soon) = (world(database.url()).await?, Sink::start().await?, impatient());
    let (_api, api) = world.node("api", &[], &[]).await?;
    let (mut worker, _) = world.node("worker", &["--otlp-endpoint", &sink.url], &as_given(&soon)).await?;
    let (session, said) = asked(&world, &api).await?;
    // The children of a run end before it does, and go out before it or with it.
    let spans = trace_of(&sink).await?;
    stop(&mut worker).await?;

    let counts: BTreeMap<&str, usize> = spans.iter().map(|(name, all)| (name.as_str(), all.len())).collect();
    ensure!(counts["run"] == 1 && counts["claim"] == 1 && counts["load"] == 1, "{counts:?}");
    ensure!(counts["model"] == 2 && counts["tool"] == 1 && counts["commit"] >= 3, "{counts:?}");
    ensure!(counts.len() == 6, "{counts:?}");
    let run = &spans["run"][0];
    ensure!(hex(&run.parent_span_id) == PARENT, "the request's span is the run's parent");
    has(
        run,
        &[
            ("gen_ai.operation.name", "invoke_agent"),
            ("gen_ai.agent.name", "tracer"),
            ("gen_ai.conversation.id", &session),
            ("session_id", &session),
            ("holdfast.outcome", "idle"),
        ],
    )?;
    for (name, all) in spans.iter().filter(|(name, _)| *name != "run") {
        for span in all {
            ensure!(span.parent_span_id == run.span_id, "{name} belongs to the run: {span:?}");
            ensure!(span.end_time_unix_nano >= span.start_time_unix_nano, "{span:?}");
        }
    }
    has(&spans["claim"][0], &[("holdfast.taken_over", "false")])?;
    for model in &spans["model"] {
        ensure!(model.kind == i32::from(SpanKind::Client), "{model:?}");
        has(
            model,
            &[
                ("gen_ai.operation.name", "chat"),
                ("gen_ai.provider.name", "openai"),
                ("gen_ai.request.model", "scripted"),
            ],
        )?;
        ensure!(attribute(&model.attributes, "gen_ai.usage.input_tokens").is_some(), "{model:?}");
    }
    let tool = &spans["tool"][0];
    has(tool, &[("gen_ai.operation.name", "execute_tool"), ("gen_ai.tool.name", "bash_where")])?;
    ensure!(attribute(&tool.attributes, "gen_ai.tool.call.id").is_some(), "{tool:?}");
    ensure!(said == format!("00-{TRACE}-{}-01", hex(&tool.span_id)), "the program was told {said}");
    let failed = spans
        .values()
        .flatten()
        .find(|span| span.status.as_ref().is_some_and(|status| status.code == i32::from(StatusCode::Error)));
    ensure!(failed.is_none(), "{failed:?}");

    let received = sink.received();
    let (resource, _) = received.spans.first().context("spans")?;
    for (name, value) in [("service.name", "holdfast"), ("holdfast.role", "worker")] {
        ensure!(attribute(&resource.attributes, name).as_deref() == Some(value), "{resource:?}");
    }
    ensure!(attribute(&resource.attributes, "service.instance.id").is_some(), "{resource:?}");
    nothing_private(&received)
}

/// What people and programs said is in nothing that was sent.
fn nothing_private(received: &Received) -> Result<()> {
    let leaks = |body: &&axum::body::Bytes| body.windows(CANARY.len()).any(|part| part == CANARY.as_bytes());
    ensure!(!received.bodies.is_empty(), "nothing was sent");
    ensure!(received.bodies.iter().find(leaks).is_none(), "a prompt, an argument or a result was sent");
    Ok(())
}

/// How many pushes a metric counts as sent, if it is the one that counts them.
fn pushes(metric: &Metric) -> f64 {
    let Some(Data::Sum(sum)) = metric.data.as_ref().filter(|_| metric.name == "holdfast_otlp_pushes_total")
    else {
        return 0.0;
    };
    let sent = |attributes: &[KeyValue]| attribute(attributes, "outcome").as_deref() == Some("sent");
    let values =
        sum.data_points.iter().filter(|point| sent(&point.attributes)).map(|point| match point.value {
            Some(number_data_point::Value::AsDouble(value)) => value,
            _ => 0.0,
        });
    values.sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_leave_by_both_doors_under_the_same_names() -> Result<()> {
    let database = fresh_database().await;
    let (world, sink, soon) = (world(database.url()).await?, Sink::start().await?, impatient());
    let more = ["--otlp-endpoint", &sink.url, "--metrics-bind", "127.0.0.1:0"];
    let (mut node, api) = world.node("serve", &more, &as_given(&soon)).await?;
    asked(&world, &api).await?;
    sink.until("a push that counts the one before", |received| {
        received.metrics.iter().any(|(_, metric)| pushes(metric) >= 1.0).then_some(())
    })
    .await?;
    let shown = Scrape::of(&metrics_address(&node)?).await?;
    stop(&mut node).await?;

    let received = sink.received();
    let pushed: BTreeMap<&str, &Data> = received
        .metrics
        .iter()
        .filter_map(|(_, metric)| Some((metric.name.as_str(), metric.data.as_ref()?)))
        .collect();
    let names: BTreeSet<&str> = pushed.keys().copied().collect();
    let expected: BTreeSet<&str> = shown.types.keys().map(String::as_str).collect();
    ensure!(names == expected, "only pushed or only shown: {:?}", names.symmetric_difference(&expected));
    for (name, data) in &pushed {
        let kind = match data {
            Data::Sum(sum) if sum.is_monotonic => "counter",
            Data::Gauge(_) => "gauge",
            Data::Histogram(_) => "histogram",
            other => panic!("{name}: {other:?}"),
        };
        ensure!(shown.types[*name] == kind, "{name} is pushed as a {kind}");
    }
    // The last push is newer than the scrape: counters may have risen, and what the run did is in both.
    let Some(Data::Sum(claimed)) = pushed.get("holdfast_runs_claimed_total") else { panic!("{pushed:?}") };
    let Some(number_data_point::Value::AsDouble(claimed)) = claimed.data_points[0].value else {
        panic!("{claimed:?}")
    };
    ensure!(claimed >= 1.0 && claimed >= shown.sum("holdfast_runs_claimed_total", &[])?, "{claimed}");
    let Some(Data::Histogram(commits)) = pushed.get("holdfast_commit_seconds") else { panic!("{pushed:?}") };
    let commits = &commits.data_points[0];
    ensure!(commits.count >= 3 && commits.bucket_counts.iter().sum::<u64>() == commits.count, "{commits:?}");
    ensure!(commits.bucket_counts.len() == commits.explicit_bounds.len() + 1, "{commits:?}");
    ensure!(shown.sum("holdfast_otlp_pushes_total", &[("outcome", "sent")])? >= 1.0);
    nothing_private(&received)
}

#[tokio::test(flavor = "multi_thread")]
async fn logs_go_out_with_their_fields_and_sending_them_feeds_nothing() -> Result<()> {
    let database = fresh_database().await;
    let (world, sink, soon) = (world(database.url()).await?, Sink::start().await?, impatient());
    // Everything is logged, what HTTP clients do to send metrics and logs included.
    let trace = ("RUST_LOG", "trace");
    let (mut api_node, api) = world.node("api", &[], &[trace]).await?;
    let (mut scheduler, _) = world.node("scheduler", &[], &[trace]).await?;
    let mut variables = as_given(&soon);
    variables.push(trace);
    let (mut worker, _) = world.node("worker", &["--otlp-endpoint", &sink.url], &variables).await?;
    let (session, _) = asked(&world, &api).await?;
    sink.until("the record of the run's end", |received| {
        received
            .records
            .iter()
            .any(|(_, _, record)| attribute(&record.attributes, "kind").as_deref() == Some("run.stopped"))
            .then_some(())
    })
    .await?;
    stop(&mut worker).await?;

    stop(&mut api_node).await?;
    stop(&mut scheduler).await?;
    let log = worker.log_text();
    for log in [&log, &api_node.log_text(), &scheduler.log_text()] {
        ensure!(log.contains(r#""level":"trace"#), "nothing is traced");
        ensure!(!log.contains(CANARY), "a prompt, an argument or a result is logged");
    }
    ensure!(log.contains(r#""target":"hyper_util"#), "the clients' own events are logged: {log}");
    let received = sink.received();
    for (_, scope, record) in &received.records {
        let library = scope.split("::").next().unwrap_or_default();
        let own = ["opentelemetry", "reqwest", "hyper", "h2", "rustls"]
            .iter()
            .any(|name| library.starts_with(name));
        ensure!(!own, "an event of the exporters' own was sent: {scope} {record:?}");
    }
    let line = log
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .find(|line| line["kind"] == "run.started" && line["session_id"] == session.as_str())
        .context("the line of the run's start")?;
    let (_, scope, record) = received
        .records
        .iter()
        .find(|(_, _, record)| {
            let is = |name: &str, value: &str| attribute(&record.attributes, name).as_deref() == Some(value);
            is("kind", "run.started") && is("session_id", &session)
        })
        .context("the record of the run's start")?;
    ensure!(scope == "holdfast_worker::lease", "{scope}");
    ensure!(hex(&record.trace_id) == TRACE && !record.span_id.is_empty(), "{record:?}");
    ensure!(record.severity_text == "INFO" && record.time_unix_nano > 0, "{record:?}");
    let sent: BTreeSet<&str> = record.attributes.iter().map(|one| one.key.as_str()).collect();
    let fields = line.as_object().context("an object")?;
    let shown: BTreeSet<&str> = fields
        .keys()
        .map(String::as_str)
        .filter(|name| !matches!(*name, "ts" | "level" | "message"))
        .collect();
    ensure!(sent == shown, "{sent:?} {shown:?}");
    nothing_private(&received)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_away_or_never_answers_matters_to_nobody() -> Result<()> {
    let hanging = Hanging::start().await?;
    let nobody = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    for (url, away) in [(hanging.url.clone(), false), (format!("http://{nobody}"), true)] {
        let database = fresh_database().await;
        let (world, soon) = (world(database.url()).await?, impatient());
        // One thread, which the push shares with all that the node does.
        let more = ["--otlp-endpoint", &url, "--metrics-bind", "127.0.0.1:0", "--threads", "1"];
        let (mut api_node, api) = world.node("api", &more, &as_given(&soon)).await?;
        let (mut worker, _) = world.node("worker", &more, &as_given(&soon)).await?;
        for _ in 0..3 {
            asked(&world, &api).await?;
        }
        if away {
            let until = Instant::now() + PATIENCE;
            let mut pause = tokio::time::interval(Duration::from_millis(50));
            let failed = [("outcome", "failed")];
            while Scrape::of(&metrics_address(&worker)?).await?.sum("holdfast_otlp_pushes_total", &failed)?
                < 2.0
            {
                ensure!(Instant::now() < until, "no push ever failed");
                pause.tick().await;
            }
            let said = worker.log_text().matches("otlp.unreachable").count();
            ensure!(said == 1, "said once, not at each try: {said}");
        } else {
            // Traces, logs and metrics of two nodes: all of them hang, and runs go on.
            hanging.asked(6).await?;
            asked(&world, &api).await?;
        }
        stop(&mut worker).await?;
        stop(&mut api_node).await?;
    }
    Ok(())
}
