//! What the dashboard and the alerts ask for, what docs/metrics.md promises and what nodes show are the same.

use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use holdfast_tests::{
    cluster::{Database, fresh_database},
    scrape::{Scrape, metrics_address},
    sse::Follower,
    world::{CANONICAL_ANSWER, Node, PATIENCE, Signal, World, answer, token},
};
use promql_parser::{
    label::MatchOp,
    parser::{Expr, VectorSelector, parse},
    util::{ExprVisitor, walk_expr},
};
use serde_json::Value;

/// Labels that Prometheus adds to what it scrapes, or makes of it.
const ADDED: [&str; 3] = ["job", "instance", "le"];

/// Parts of the runbook that alerts may name.
const SLUGS: [&str; 15] = [
    "queue-too-old",
    "no-worker",
    "leases-lost",
    "worker-cannot-renew",
    "takeovers-rising",
    "poison-runs",
    "model-errors",
    "deferred-call-overdue",
    "feed-lag",
    "listener-down",
    "commit-latency",
    "database-unavailable",
    "scheduler-silent",
    "backlog-refused",
    "webhooks-undelivered",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn file(path: &str) -> Result<String> {
    fs::read_to_string(root().join(path)).with_context(|| path.to_owned())
}

/// A metric as docs/metrics.md has it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Documented {
    kind: String,
    /// Names of labels, with their values where these are listed.
    labels: BTreeMap<String, BTreeSet<String>>,
}

/// The tables of docs/metrics.md: by section, each metric.
fn documented() -> Result<BTreeMap<String, BTreeMap<String, Documented>>> {
    let mut sections: BTreeMap<String, BTreeMap<String, Documented>> = BTreeMap::new();
    let mut section = String::new();
    for line in file("docs/metrics.md")?.lines() {
        if let Some(title) = line.strip_prefix("### ") {
            section = title.to_owned();
        }
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        if let ["", name, kind, labels, _unit, _meaning, ""] = cells[..]
            && let Some(name) = name.strip_prefix("`holdfast_")
        {
            let name = format!("holdfast_{}", name.trim_end_matches('`'));
            let metric = Documented { kind: kind.to_owned(), labels: documented_labels(labels)? };
            let again = sections.entry(section.clone()).or_default().insert(name.clone(), metric);
            ensure!(again.is_none(), "{name} is documented twice in {section}");
        }
    }
    Ok(sections)
}

/// `` `a`, `b` (`x`, `y`) ``
fn documented_labels(text: &str) -> Result<BTreeMap<String, BTreeSet<String>>> {
    let words = |text: &str| -> Vec<String> {
        text.split(',')
            .map(|word| word.trim().trim_matches('`').to_owned())
            .filter(|word| !word.is_empty())
            .collect()
    };
    let (mut labels, mut rest) = (BTreeMap::new(), text);
    while !rest.is_empty() {
        let (names, values, after) = match rest.split_once('(') {
            Some((names, more)) => {
                let (values, after) = more.split_once(')').with_context(|| text.to_owned())?;
                (names, values, after)
            }
            None => (rest, "", ""),
        };
        let mut names = words(names);
        let last = names.pop().with_context(|| format!("values of no label: {text}"))?;
        labels.extend(names.into_iter().map(|name| (name, BTreeSet::new())));
        labels.insert(last, words(values).into_iter().collect());
        rest = after.trim_start_matches(',').trim();
    }
    Ok(labels)
}

/// The sections that a role shows.
fn sections(role: &str) -> Vec<&'static str> {
    let all = [
        ("Every role", ["api", "worker", "scheduler"].as_slice()),
        ("`api` and `serve`", &["api"]),
        ("`worker` and `serve`", &["worker"]),
        ("`scheduler` and `serve`", &["scheduler"]),
    ];
    let shows = |roles: &[&str]| role == "serve" || roles.contains(&role);
    all.into_iter().filter(|(_, roles)| shows(roles)).map(|(title, _)| title).collect()
}

/// A query of the dashboard or the alerts, and where it stands.
struct Query {
    place: String,
    text: String,
}

fn queries() -> Result<Vec<Query>> {
    let mut queries = Vec::new();
    let dashboard: Value = serde_json::from_str(&file("deploy/grafana/holdfast.json")?)?;
    for panel in dashboard["panels"].as_array().context("panels")? {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let text = target["expr"].as_str().context("an expression")?;
            // Grafana fills these in before Prometheus sees them.
            let text = text.replace("$__rate_interval", "1m").replace("$job", ".*");
            ensure!(!text.contains('$'), "an unknown variable: {text}");
            queries.push(Query { place: format!("panel {}", panel["title"]), text });
        }
    }
    for rule in rules()? {
        let text = rule["expr"].as_str().context("an expression")?.to_owned();
        queries.push(Query { place: format!("alert {}", rule["alert"]), text });
    }
    Ok(queries)
}

fn rules() -> Result<Vec<Value>> {
    let alerts: Value = yaml_serde::from_str(&file("deploy/prometheus/alerts.yml")?)?;
    let groups = alerts["groups"].as_array().context("groups")?;
    Ok(groups.iter().flat_map(|group| group["rules"].as_array().cloned().unwrap_or_default()).collect())
}

/// Everything that a query selects, and the labels that it groups by, with the selectors beneath.
#[derive(Default)]
struct Asked {
    selectors: Vec<VectorSelector>,
    grouped: Vec<(Vec<String>, Vec<VectorSelector>)>,
}

impl ExprVisitor for Asked {
    type Error = Infallible;

    fn pre_visit(&mut self, expr: &Expr) -> Result<bool, Infallible> {
        match expr {
            Expr::VectorSelector(selector) => self.selectors.push(selector.clone()),
            Expr::MatrixSelector(matrix) => self.selectors.push(matrix.vs.clone()),
            Expr::Aggregate(aggregate) => {
                if let Some(modifier) = &aggregate.modifier {
                    let mut beneath = Self::default();
                    walk_expr(&mut beneath, &aggregate.expr)?;
                    self.grouped.push((modifier.labels().labels.clone(), beneath.selectors));
                }
            }
            _ => {}
        }
        Ok(true)
    }
}

/// What a query asks for that no node shows.
fn missing(query: &Query, shown: &Scrape) -> Result<Vec<String>> {
    let expr = parse(&query.text).map_err(|error| anyhow::anyhow!("{}: {error}", query.place))?;
    let mut asked = Asked::default();
    let Ok(_) = walk_expr(&mut asked, &expr);
    let mut faults = Vec::new();
    let mut fault = |what: String| faults.push(format!("{}: {what} in {}", query.place, query.text));
    if asked.selectors.is_empty() {
        fault("nothing is asked for".to_owned());
    }
    for selector in &asked.selectors {
        let name = selector.name.as_deref().unwrap_or_default();
        let Some(series) = shown.series.get(name) else {
            fault(format!("no {name:?}"));
            continue;
        };
        for matcher in &selector.matchers.matchers {
            if ADDED.contains(&matcher.name.as_str()) {
                continue;
            }
            let values: BTreeSet<&str> = series
                .iter()
                .filter_map(|(labels, _)| labels.get(&matcher.name))
                .map(String::as_str)
                .collect();
            let wanted: Vec<&str> = match &matcher.op {
                MatchOp::Equal | MatchOp::NotEqual => vec![matcher.value.as_str()],
                MatchOp::Re(_) | MatchOp::NotRe(_) => matcher.value.split('|').collect(),
            };
            for value in wanted.into_iter().filter(|value| !values.contains(value)) {
                fault(format!("no {name} has {}={value:?}, but {values:?}", matcher.name));
            }
        }
    }
    for (labels, selectors) in &asked.grouped {
        for label in labels.iter().filter(|label| !ADDED.contains(&label.as_str())) {
            for selector in selectors {
                let name = selector.name.as_deref().unwrap_or_default();
                let has = shown
                    .series
                    .get(name)
                    .is_some_and(|series| series.iter().all(|(labels, _)| labels.contains_key(label)));
                if !has {
                    fault(format!("{name} has no {label:?} to group by"));
                }
            }
        }
    }
    Ok(faults)
}

/// Nodes of every role over one database, each with a port for its metrics.
struct Cluster {
    world: World,
    _database: Database,
    nodes: Vec<(&'static str, Node, String)>,
    api: String,
}

impl Cluster {
    async fn start() -> Result<Self> {
        let database = fresh_database().await;
        let mut world = World::canonical(database.url(), false).await?;
        // A machine that stalls for a second takes no lease.
        world.lease_ttl = 6;
        let (mut nodes, mut api) = (Vec::new(), String::new());
        for role in ["api", "worker", "scheduler", "serve"] {
            let (node, bind) = world.node(role, &["--metrics-bind", "127.0.0.1:0"], &[]).await?;
            let address = metrics_address(&node)?;
            ensure!(!address.ends_with(":0"), "{role} doesn't say which port it took: {address}");
            if matches!(role, "api" | "serve") {
                ensure!(bind != format!("http://{address}"), "metrics have an address of their own");
                api.clone_from(&bind);
                world.call("GET", &format!("{bind}/v1/agents"), None).await?;
            }
            nodes.push((role, node, address));
        }
        Ok(Self { world, _database: database, nodes, api })
    }

    /// The canonical flow once, followed on a session's stream and on the feed.
    async fn work(&self) -> Result<()> {
        let (world, api) = (&self.world, &self.api);
        let id = world.create(api).await?;
        let apis = || Arc::new(Mutex::new(vec![api.clone()]));
        let stream = Follower::start(apis(), format!("/v1/sessions/{id}/events"));
        let feed = Follower::start(apis(), "/v1/events".to_owned());
        for follower in [&stream, &feed] {
            follower.until(|frames| !frames.is_empty()).await?;
        }
        let view = world.until(api, id, "waiting_external").await?;
        for (tool, result) in [("fetch_remote_a", "A"), ("fetch_remote_b", "B")] {
            world.complete(api, &token(&view, tool)?, result, false).await?;
        }
        let view = world.until(api, id, "idle").await?;
        ensure!(answer(&view)? == CANONICAL_ANSWER, "{view}");
        for follower in [stream, feed] {
            let ended = |frame: &holdfast_tests::sse::Frame| {
                frame.kind == "run.stopped" && frame.data["status"] == "idle"
            };
            follower.until(|frames| frames.iter().any(ended)).await?;
        }
        Ok(())
    }

    /// As [`Self::scrapes`], once the database has answered the API node in time, and leases were renewed.
    async fn scrapes_while_up(&self) -> Result<BTreeMap<&'static str, Scrape>> {
        let until = Instant::now() + PATIENCE;
        let mut pause = tokio::time::interval(Duration::from_millis(100));
        loop {
            pause.tick().await;
            let scrapes = self.scrapes().await?;
            let api = &scrapes["api"];
            let known =
                ["holdfast_runs", "holdfast_workers", "holdfast_feed_lag_seconds", "holdfast_queue_due_runs"];
            let all = known.iter().all(|name| api.series.contains_key(*name));
            let renewed =
                scrapes["worker"].sum("holdfast_heartbeats_total", &[("outcome", "renewed")])? > 0.0;
            if all && renewed && api.sum("holdfast_database_up", &[])? > 0.0 {
                return Ok(scrapes);
            }
            ensure!(Instant::now() < until, "the database never answered in time");
        }
    }

    async fn scrapes(&self) -> Result<BTreeMap<&'static str, Scrape>> {
        let mut scrapes = BTreeMap::new();
        for (role, _, address) in &self.nodes {
            scrapes.insert(*role, Scrape::of(address).await?);
        }
        Ok(scrapes)
    }
}

/// All that the nodes show, as one Prometheus has it.
fn together(scrapes: &BTreeMap<&'static str, Scrape>) -> Scrape {
    let mut all = Scrape::default();
    for scrape in scrapes.values() {
        all.types.extend(scrape.types.clone());
        for (name, series) in &scrape.series {
            all.series.entry(name.clone()).or_default().extend(series.clone());
        }
    }
    all
}

/// Where what a role shows differs from what its sections of the page say.
fn differences(
    role: &str,
    scrape: &Scrape,
    pages: &BTreeMap<String, BTreeMap<String, Documented>>,
) -> Vec<String> {
    let promised: BTreeMap<&String, &Documented> =
        sections(role).into_iter().filter_map(|title| pages.get(title)).flatten().collect();
    let mut faults = Vec::new();
    for (name, kind) in scrape.types.iter().filter(|(name, _)| name.starts_with("holdfast_")) {
        let Some(metric) = promised.get(name) else {
            faults.push(format!("{role} shows {name}, which its part of docs/metrics.md doesn't have"));
            continue;
        };
        if metric.kind != *kind {
            faults.push(format!("{name} is a {kind}, not a {}", metric.kind));
        }
        let labels: BTreeSet<&str> = metric.labels.keys().map(String::as_str).collect();
        if labels != scrape.labels(name) {
            faults.push(format!("{role}: {name} has the labels {:?}, not {labels:?}", scrape.labels(name)));
        }
        let series = if kind == "histogram" { format!("{name}_count") } else { name.clone() };
        for (label, values) in metric.labels.iter().filter(|(_, values)| !values.is_empty()) {
            let shown: BTreeSet<&String> =
                scrape.series[&series].iter().filter_map(|(labels, _)| labels.get(label)).collect();
            if shown != values.iter().collect() {
                faults.push(format!("{role}: {name} has {label} of {shown:?}, not of {values:?}"));
            }
        }
    }
    for name in promised.keys().filter(|name| !scrape.types.contains_key(**name)) {
        faults.push(format!("{role} doesn't show {name}, which docs/metrics.md promises"));
    }
    faults
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_show_what_is_documented_and_what_dashboard_and_alerts_ask_for() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    cluster.work().await?;
    let scrapes = cluster.scrapes_while_up().await?;

    let pages = documented()?;
    ensure!(pages.len() == 4, "{:?}", pages.keys());
    let mut faults: Vec<String> =
        scrapes.iter().flat_map(|(role, scrape)| differences(role, scrape, &pages)).collect();
    let all = together(&scrapes);
    let queries = queries()?;
    ensure!(queries.len() > 60, "{} queries", queries.len());
    for query in &queries {
        faults.extend(missing(query, &all)?);
    }
    ensure!(faults.is_empty(), "{}", faults.join("\n"));

    for (name, labels) in [
        ("holdfast_runs_claimed_total", [].as_slice()),
        ("holdfast_runs_ended_total", &[("outcome", "idle")]),
        ("holdfast_runs_ended_total", &[("outcome", "waiting_external")]),
        ("holdfast_claim_seconds_count", &[]),
        ("holdfast_load_seconds_count", &[]),
        ("holdfast_commit_seconds_count", &[]),
        ("holdfast_commit_group_steps_count", &[]),
        ("holdfast_heartbeats_total", &[("outcome", "renewed")]),
        ("holdfast_model_request_seconds_count", &[("model", "scripted"), ("outcome", "ok")]),
        ("holdfast_tool_calls_total", &[("outcome", "completed")]),
        ("holdfast_events_written_total", &[]),
        ("holdfast_notifications_sent_total", &[]),
        ("holdfast_notifications_heard_total", &[("channel", "runs")]),
        ("holdfast_listener_connections_total", &[]),
        ("holdfast_store_connection_wait_seconds_count", &[("pool", "hot")]),
        ("holdfast_store_connection_wait_seconds_count", &[("pool", "leases")]),
        ("holdfast_stream_delay_seconds_count", &[("stream", "session")]),
        ("holdfast_stream_delay_seconds_count", &[("stream", "feed")]),
        ("holdfast_scheduler_passes_total", &[("pass", "promote_timers"), ("outcome", "done")]),
    ] {
        ensure!(all.sum(name, labels)? > 0.0, "{name} {labels:?} counts nothing");
    }
    let api = &scrapes["api"];
    ensure!(api.sum("holdfast_workers", &[])? >= 2.0 && api.sum("holdfast_database_up", &[])? == 1.0);
    ensure!(scrapes["worker"].sum("holdfast_worker_slots", &[])? == 256.0);
    ensure!(scrapes["worker"].sum("holdfast_lease_ttl_seconds", &[])? == 6.0);
    for (_, node, _) in &mut cluster.nodes {
        node.signal(Signal::TERM)?;
        ensure!(node.ended().await?.success(), "{}", node.log_text());
    }
    Ok(())
}

#[test]
fn alerts_say_how_bad_it_is_and_where_to_read_on() -> Result<()> {
    let page = file("docs/metrics.md")?;
    let mut named = BTreeSet::new();
    for rule in rules()? {
        let name = rule["alert"].as_str().context("a name")?;
        ensure!(rule["for"].as_str().is_some_and(|text| !text.is_empty()), "{name} has no `for`");
        let severity = rule["labels"]["severity"].as_str().unwrap_or_default();
        ensure!(matches!(severity, "page" | "ticket"), "{name}: severity {severity:?}");
        ensure!(rule["annotations"]["summary"].as_str().is_some_and(|text| text.len() > 20), "{name}");
        let url = rule["annotations"]["runbook"].as_str().unwrap_or_default();
        let Some(slug) = url.strip_prefix("docs/operating/runbook.md#") else { bail!("{name}: {url:?}") };
        ensure!(SLUGS.contains(&slug), "{name}: the runbook has no {slug}");
        ensure!(named.insert(slug.to_owned()), "{slug} has two alerts");
    }
    for slug in SLUGS {
        ensure!(named.contains(slug), "nothing leads to {slug}");
        ensure!(page.contains(&format!("- `{slug}`\n")), "docs/metrics.md doesn't list {slug}");
    }
    Ok(())
}

#[test]
fn the_example_configuration_names_files_that_are_there() -> Result<()> {
    let config: Value = yaml_serde::from_str(&file("deploy/prometheus/prometheus.yml")?)?;
    for rules in config["rule_files"].as_array().context("rule files")? {
        file(&format!("deploy/prometheus/{}", rules.as_str().context("a name")?))?;
    }
    let jobs = config["scrape_configs"].as_array().context("jobs")?;
    ensure!(jobs.iter().any(|job| job["job_name"] == "holdfast"), "{config}");
    Ok(())
}

#[test]
fn a_query_for_what_is_not_there_is_found() -> Result<()> {
    let mut shown = Scrape::default();
    let labels = BTreeMap::from([("state".to_owned(), "queued".to_owned())]);
    shown.series.insert("holdfast_runs".to_owned(), vec![(labels, 1.0)]);
    for (text, faults) in [
        (r#"max by (state) (holdfast_runs{job=~".*"})"#, 0),
        (r#"max(holdfast_runs{state="queued"}) > 3"#, 0),
        ("rate(holdfast_run[5m])", 1),
        (r#"holdfast_runs{state="queue"}"#, 1),
        (r#"holdfast_runs{state=~"queued|parkd"}"#, 1),
        (r#"holdfast_runs{stat="queued"}"#, 1),
        ("sum by (owner) (rate(holdfast_runs[5m]))", 1),
        ("vector(1)", 1),
    ] {
        let found = missing(&Query { place: "test".to_owned(), text: text.to_owned() }, &shown)?;
        ensure!(found.len() == faults, "{text}: {found:?}");
    }
    let broken = Query { place: "test".to_owned(), text: "sum(holdfast_runs".to_owned() };
    ensure!(missing(&broken, &shown).is_err());
    Ok(())
}
