//! Results that are given again.

use std::{fmt::Write as _, time::Duration};

use holdfast_engine::{content::Digest, policy, tool::Outcome};
use holdfast_store::tool_results;
use serde_json::Value;
use tokio::time::timeout;

use super::{Frame, Reply, Wrapped, not_begun};
use crate::metrics::{self, Wrap};

/// How long the database may take: a call that takes longer to look up is carried out.
const PATIENCE: Duration = Duration::from_secs(2);

impl Wrapped {
    /// Gives the result of an earlier call with the same arguments, or keeps that of this one. While the
    /// database is away nothing is remembered.
    pub(super) async fn remembered(
        &self,
        next: usize,
        frame: Frame,
        ttl: Duration,
        name: Option<&str>,
    ) -> Reply {
        let Some(key) = self.key(name, &frame.arguments) else { return self.inside(next, frame).await };
        let known = tokio::select! {
            biased;
            () = frame.cancel.cancelled() => return not_begun(),
            known = timeout(PATIENCE, tool_results::recall(&self.store, &self.owner, &key, ttl)) => known,
        };
        match known {
            Ok(Ok(Some(result))) => {
                metrics::wrapped(Wrap::CacheHit);
                return Reply::Ended(Outcome::Completed(result));
            }
            Ok(Ok(None)) => {}
            Ok(Err(error)) => tracing::debug!(%error, "a result couldn't be looked up"),
            Err(_) => tracing::debug!("looking up a result took too long"),
        }
        metrics::wrapped(Wrap::CacheMiss);
        let reply = self.inside(next, frame).await;
        if let Reply::Ended(Outcome::Completed(result)) = &reply {
            let keeping = tool_results::remember(&self.store, &self.owner, &key, result, ttl);
            match timeout(PATIENCE, keeping).await {
                Ok(Ok(_)) => {}
                Ok(Err(error)) => tracing::debug!(%error, "a result couldn't be kept"),
                Err(_) => tracing::debug!("keeping a result took too long"),
            }
        }
        reply
    }

    /// What a result is known by, beside its owner: the name, or this agent's tool, and the arguments, however
    /// they are spaced and ordered. Values that are bound to arguments will belong to it, and a call with a
    /// secret one will have no key, as one without JSON arguments has none.
    pub(super) fn key(&self, name: Option<&str>, arguments: &str) -> Option<Digest> {
        let arguments = policy::arguments(arguments)?;
        let mut text = match name {
            Some(name) => serde_json::json!(["named", name]).to_string(),
            None => serde_json::json!(["tool", self.agent, self.tool]).to_string(),
        };
        canonical(&arguments, &mut text);
        Some(Digest::of(text.as_bytes()))
    }
}

/// Writes JSON with sorted keys, whatever order the JSON library keeps.
fn canonical(value: &Value, text: &mut String) {
    match value {
        Value::Object(fields) => {
            let mut fields: Vec<_> = fields.iter().collect();
            fields.sort_unstable_by_key(|(key, _)| *key);
            text.push('{');
            for (key, value) in fields {
                let _ = write!(text, "{}:", Value::from(key.as_str()));
                canonical(value, text);
                text.push(',');
            }
            text.push('}');
        }
        Value::Array(items) => {
            text.push('[');
            for item in items {
                canonical(item, text);
                text.push(',');
            }
            text.push(']');
        }
        other => {
            let _ = write!(text, "{other}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spaces_and_order_make_no_difference_and_everything_else_does() {
        let of = |text: &str| {
            let mut written = String::new();
            canonical(&policy::arguments(text).expect("JSON"), &mut written);
            written
        };
        assert_eq!(
            of(r#"{"a": 1, "b": {"d": [1, "x"], "c": null}}"#),
            of(r#"{"b":{"c":null,"d":[1,"x"]},"a":1}"#)
        );
        assert_eq!(of(""), of(" {} "));
        let different = [
            "{}",
            "[]",
            "[[]]",
            "[1,2]",
            "[2,1]",
            "[12]",
            r#"["1,2"]"#,
            r#"{"a":1}"#,
            r#"{"a":"1"}"#,
            r#"{"a":{},"b":1}"#,
            r#"{"a":{"b":1}}"#,
            r#"{"a\":1,\"b":2}"#,
            r#"{"a":1,"b":2}"#,
            "null",
            "\"\"",
        ];
        let mut written: Vec<String> = different.iter().map(|text| of(text)).collect();
        written.sort();
        written.dedup();
        assert_eq!(written.len(), different.len());
    }
}
