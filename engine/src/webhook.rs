//! What an agent file says of where the events of its sessions are sent.

use serde::{Deserialize, Serialize};

/// The kinds of events that webhooks are sent, each with something to do for whoever listens.
pub const KINDS: [&str; 3] = ["calls.deferred", "run.stopped", "session.failed"];

/// The longest URL of an endpoint, in bytes.
pub const MAX_URL: usize = 2_000;

/// The name of the secrets that sign where nothing else is said.
pub const DEFAULT_SECRET: &str = "default";

/// An endpoint for the events of one agent's sessions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct WebhookConfig {
    /// Where they are sent: http or https, without a user's name or password.
    pub url: String,
    /// Which secrets of the schedulers' file sign; [`DEFAULT_SECRET`] when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_id: Option<String>,
    /// Which of [`KINDS`] are sent; all when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub events: Option<Vec<String>>,
}

/// Why an endpoint can't be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WebhookError {
    /// The URL isn't one that can be sent to.
    #[error("url must be http:// or https:// and a host, of at most {MAX_URL} bytes")]
    BadUrl,
    /// The URL would show a password to whoever reads it.
    #[error("url must not hold a user's name or password")]
    Credentials,
    /// No such kind of event, or none at all.
    #[error("events must be some of {}", KINDS.join(", "))]
    BadKinds,
    /// No name of secrets.
    #[error("secretId must have 1 to 100 characters")]
    BadSecretId,
}

impl WebhookConfig {
    /// Whether it can be used.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn check(&self) -> Result<(), WebhookError> {
        check_url(&self.url)?;
        let known = |kind: &String| KINDS.contains(&kind.as_str());
        if self.events.as_ref().is_some_and(|kinds| kinds.is_empty() || !kinds.iter().all(known)) {
            return Err(WebhookError::BadKinds);
        }
        if self.secret_id.as_ref().is_some_and(|id| !(1..=100).contains(&id.chars().count())) {
            return Err(WebhookError::BadSecretId);
        }
        Ok(())
    }

    /// Which secrets sign.
    pub fn secret_id(&self) -> &str {
        self.secret_id.as_deref().unwrap_or(DEFAULT_SECRET)
    }

    /// Which kinds of events are sent.
    pub fn kinds(&self) -> Vec<String> {
        self.events.clone().unwrap_or_else(|| KINDS.map(str::to_owned).to_vec())
    }
}

/// Whether events can be sent to a URL.
///
/// # Errors
/// [`WebhookError::BadUrl`] and [`WebhookError::Credentials`].
pub fn check_url(url: &str) -> Result<(), WebhookError> {
    let rest = url.strip_prefix("https://").or_else(|| url.strip_prefix("http://"));
    let rest = rest.filter(|_| url.len() <= MAX_URL && url.bytes().all(|byte| byte.is_ascii_graphic()));
    let authority = rest.and_then(|rest| rest.split(['/', '?', '#', '\\']).next()).unwrap_or_default();
    if authority.contains('@') {
        return Err(WebhookError::Credentials);
    }
    if authority.is_empty() || authority.starts_with(':') {
        return Err(WebhookError::BadUrl);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_endpoint_may_say() {
        let read = |text: &str| serde_json::from_str::<WebhookConfig>(text);
        let plain = read(r#"{"url": "https://example.com/hook?x=1"}"#).expect("an endpoint");
        assert_eq!(plain.check(), Ok(()));
        assert_eq!((plain.secret_id(), plain.kinds()), ("default", KINDS.map(str::to_owned).to_vec()));
        let full = read(r#"{"url": "http://h:1", "secretId": "billing", "events": ["run.stopped"]}"#);
        let full = full.expect("an endpoint");
        assert_eq!(full.check(), Ok(()));
        assert_eq!((full.secret_id(), full.kinds()), ("billing", vec!["run.stopped".to_owned()]));
        assert!(read(r#"{"url": "http://h", "secret": "whsec_x"}"#).is_err(), "secrets have no place here");
        for (url, wrong) in [
            ("ftp://h/", WebhookError::BadUrl),
            ("https://", WebhookError::BadUrl),
            ("https:///path", WebhookError::BadUrl),
            ("https://:80/path", WebhookError::BadUrl),
            ("https://h/a b", WebhookError::BadUrl),
            ("https://user:word@h/", WebhookError::Credentials),
        ] {
            assert_eq!(check_url(url), Err(wrong), "{url}");
        }
        assert_eq!(check_url(&format!("https://h/{}", "x".repeat(MAX_URL))), Err(WebhookError::BadUrl));
        for events in [vec![], vec!["session.updated".to_owned()]] {
            let one = WebhookConfig { events: Some(events), ..plain.clone() };
            assert_eq!(one.check(), Err(WebhookError::BadKinds));
        }
        let nameless = WebhookConfig { secret_id: Some(String::new()), ..plain };
        assert_eq!(nameless.check(), Err(WebhookError::BadSecretId));
    }
}
