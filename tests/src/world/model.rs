//! A scripted model in this process.

use anyhow::Result;
use holdfast_cli::scripted_model::{Script, serve};
use serde_json::Value;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::client;

/// The canonical script: three calls first, then an answer that names their results.
pub const CANONICAL: &str = r#"{"rules": [
    {"when": {"turn": 0}, "reply": {"tool_calls": [
        {"name": "bash_fetch_local", "arguments": {"what": "local data"}},
        {"name": "fetch_remote_a", "arguments": {"query": "a"}},
        {"name": "fetch_remote_b", "arguments": {"query": "b"}}]}},
    {"when": {"turn": 1}, "reply": {"text": "local: {{tool_result:bash_fetch_local}} a: {{tool_result:fetch_remote_a}} b: {{tool_result:fetch_remote_b}}"}}
]}"#;

/// The answer that [`CANONICAL`] ends with when the deferred calls are completed with `A` and `B`.
pub const CANONICAL_ANSWER: &str = "local: got local data\n a: A b: B";

/// A scripted model, served in this process.
pub struct Model {
    /// Where it listens, as agents name it.
    pub url: String,
    stop: CancellationToken,
    /// Making one takes long enough to hold up whoever polls.
    http: reqwest::Client,
}

impl Model {
    /// Serves a script.
    ///
    /// # Errors
    /// If the script is none, or no port is free.
    pub async fn start(script: &str) -> Result<Self> {
        let script = Script::parse(script)?;
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}/v1", listener.local_addr()?);
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        let _serving = tokio::spawn(async move { serve(script, listener, stopped).await });
        Ok(Self { url, stop, http: client() })
    }

    /// The bodies of the requests that it was sent, in order.
    ///
    /// # Errors
    /// If it doesn't answer.
    pub async fn requests(&self) -> Result<Vec<Value>> {
        Ok(self.list("requests").await?.into_iter().map(|mut entry| entry["body"].take()).collect())
    }

    /// What the requests break of the providers' rules, a line each; a test that expects no refusal wants none.
    ///
    /// # Errors
    /// If it doesn't answer.
    pub async fn violations(&self) -> Result<Vec<String>> {
        let mut lines = Vec::new();
        for entry in self.list("requests").await? {
            for violation in entry["violations"].as_array().into_iter().flatten() {
                lines.push(format!("request {}: {violation}", entry["seq"]));
            }
        }
        Ok(lines)
    }

    /// The names that answers wait for, oldest first.
    ///
    /// # Errors
    /// If it doesn't answer.
    pub async fn held(&self) -> Result<Vec<String>> {
        let held = self.list("held").await?;
        Ok(held.iter().filter_map(|held| held["name"].as_str()).map(str::to_owned).collect())
    }

    /// Lets the answers that the script holds by a name go, now and from now on.
    ///
    /// # Errors
    /// If it doesn't answer, or the script has no such name.
    pub async fn release(&self, name: &str) -> Result<()> {
        let url = format!("{}/release/{name}", self.base());
        self.http.post(url).send().await?.error_for_status()?;
        Ok(())
    }

    fn base(&self) -> &str {
        self.url.trim_end_matches("/v1")
    }

    async fn list(&self, what: &str) -> Result<Vec<Value>> {
        Ok(self.http.get(format!("{}/{what}", self.base())).send().await?.json().await?)
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

#[cfg(test)]
mod tests {
    use anyhow::ensure;
    use serde_json::json;

    use super::*;
    use crate::world::PATIENCE;

    #[tokio::test]
    async fn what_is_held_and_what_is_broken_is_told() -> Result<()> {
        let model = Model::start(r#"{"rules": [{"reply": {"text": "ok", "hold": "gate"}}]}"#).await?;
        let url = format!("{}/chat/completions", model.url);
        let ask = |role: &str| {
            let body = json!({"model": "m", "messages": [{"role": role, "content": "x"}]});
            let request = client().post(&url).json(&body);
            tokio::spawn(async move { request.send().await.map(|answer| answer.status().as_u16()) })
        };
        let held = ask("user");
        let waiting = async {
            while model.held().await? != ["gate"] {
                tokio::task::yield_now().await;
            }
            Ok::<_, anyhow::Error>(())
        };
        tokio::time::timeout(PATIENCE, waiting).await??;
        ensure!(model.violations().await?.is_empty());
        ensure!(model.release("other").await.is_err());
        model.release("gate").await?;
        ensure!(held.await?? == 200 && model.held().await?.is_empty());
        ensure!(ask("nobody").await?? == 400);
        let told = model.violations().await?;
        ensure!(told.len() == 1 && told[0].starts_with("request 2:") && told[0].contains("form"), "{told:?}");
        ensure!(model.requests().await?.len() == 2);
        Ok(())
    }
}
