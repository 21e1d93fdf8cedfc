//! Reading what `/metrics` shows.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

use crate::world::{Node, client};

/// A series' labels.
pub type Labels = BTreeMap<String, String>;

/// What a node shows.
#[derive(Debug, Default, Clone)]
pub struct Scrape {
    /// Types of metrics by their names: `counter`, `gauge` or `histogram`.
    pub types: BTreeMap<String, String>,
    /// Values by the names of series, in which histograms have three: `_bucket`, `_sum` and `_count`.
    pub series: BTreeMap<String, Vec<(Labels, f64)>>,
}

impl Scrape {
    /// Asks a node.
    ///
    /// # Errors
    /// If it doesn't answer, or not in Prometheus's format.
    pub async fn of(address: &str) -> Result<Self> {
        let answer = client().get(format!("http://{address}/metrics")).send().await?;
        ensure!(answer.status() == 200, "{}", answer.status());
        Self::read(&answer.text().await?)
    }

    fn read(text: &str) -> Result<Self> {
        let mut scrape = Self::default();
        for line in text.lines() {
            if let Some(typed) = line.strip_prefix("# TYPE ") {
                let (name, kind) = typed.split_once(' ').context("a type without a name")?;
                let again = scrape.types.insert(name.to_owned(), kind.to_owned());
                ensure!(again.is_none(), "{name} is told twice");
            } else if !line.starts_with('#') && !line.is_empty() {
                let (series, value) = line.rsplit_once(' ').with_context(|| format!("no value: {line}"))?;
                let (name, labels) = match series.split_once('{') {
                    Some((name, rest)) => {
                        (name, labels(rest.strip_suffix('}').with_context(|| line.to_owned())?)?)
                    }
                    None => (series, Labels::new()),
                };
                scrape.series.entry(name.to_owned()).or_default().push((labels, value.parse()?));
            }
        }
        Ok(scrape)
    }

    /// The names of a metric's labels over all its series; those of a histogram without `le`.
    pub fn labels(&self, metric: &str) -> BTreeSet<&str> {
        let name = match self.types.get(metric).map(String::as_str) {
            Some("histogram") => format!("{metric}_count"),
            _ => metric.to_owned(),
        };
        let series = self.series.get(&name).map(Vec::as_slice).unwrap_or_default();
        series.iter().flat_map(|(labels, _)| labels.keys().map(String::as_str)).collect()
    }

    /// The sum of the series that have all these labels.
    ///
    /// # Errors
    /// If there is none.
    pub fn sum(&self, name: &str, wanted: &[(&str, &str)]) -> Result<f64> {
        let all = self.series.get(name).with_context(|| format!("no {name}"))?;
        let has = |labels: &Labels| {
            wanted.iter().all(|(name, value)| labels.get(*name).is_some_and(|found| found == value))
        };
        let mut found = all.iter().filter(|(labels, _)| has(labels)).map(|(_, value)| *value).peekable();
        ensure!(found.peek().is_some(), "no {name} with {wanted:?}: {all:?}");
        Ok(found.sum())
    }
}

/// `a="x",b="y"`; none of ours holds a quote or a comma in a value.
fn labels(text: &str) -> Result<Labels> {
    let mut labels = Labels::new();
    for pair in text.split("\",").filter(|pair| !pair.is_empty()) {
        let Some((name, value)) = pair.split_once("=\"") else { bail!("no label: {pair} in {text}") };
        labels.insert(name.to_owned(), value.trim_end_matches('"').to_owned());
    }
    Ok(labels)
}

/// Where a node's metrics are served, as its first lines say.
///
/// # Errors
/// If they don't.
pub fn metrics_address(node: &Node) -> Result<String> {
    let log = node.log_text();
    let started = log
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .find(|line| line["kind"] == "server.started")
        .with_context(|| format!("the node hasn't started: {log}"))?;
    Ok(started["metrics_bind"].as_str().with_context(|| format!("no address: {started}"))?.to_owned())
}
