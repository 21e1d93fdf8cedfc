//! How the HTTP surface is served, and which combinations are refused.

use std::{collections::HashSet, net::SocketAddr, path::PathBuf, time::Duration};

use axum::http::{Uri, uri::Scheme};
use prometheus::Registry;

use crate::limits;

/// How to serve.
#[derive(Debug, Clone)]
pub struct Config {
    /// Address of the TCP listener; port 0 picks one.
    pub bind: SocketAddr,
    /// A Unix socket to serve too, with mode 0600.
    pub socket: Option<PathBuf>,
    /// File of bearer tokens; none serves everybody who can connect.
    pub auth_tokens: Option<PathBuf>,
    /// Owners who may follow the events of all.
    pub admin_owners: Vec<String>,
    /// Origins whose pages may read answers: `scheme://host[:port]`, or `*`.
    pub cors_origins: Vec<String>,
    /// Serve beyond loopback without tokens.
    pub allow_anonymous: bool,
    /// Bytes of a request body.
    pub max_body: usize,
    /// A listener of its own for `/metrics`.
    pub metrics_bind: Option<SocketAddr>,
    /// How long requests may take to end after a shutdown begins.
    pub shutdown_grace: Duration,
    /// Where the node counts; `/metrics` shows all of it.
    pub registry: Registry,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            bind: SocketAddr::from(([127, 0, 0, 1], 8080)),
            socket: None,
            auth_tokens: None,
            admin_owners: Vec::new(),
            cors_origins: Vec::new(),
            allow_anonymous: false,
            max_body: limits::MAX_BODY,
            metrics_bind: None,
            shutdown_grace: Duration::from_secs(10),
            registry: Registry::new(),
        }
    }
}

/// A configuration that isn't served.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// Anybody on the network would be served.
    #[error(
        "{0} is reachable from other machines: give --auth-tokens, or --allow-anonymous to serve everybody"
    )]
    Exposed(SocketAddr),
    /// Every page of every site could use a token that a browser holds.
    #[error("the origin `*` can't be combined with --auth-tokens: name the origins")]
    AnyOrigin,
    /// An origin that no browser would send.
    #[error("{0:?} is no origin: expected scheme://host or scheme://host:port, or `*`")]
    BadOrigin(String),
    /// Nothing could be sent.
    #[error("a body of {0} bytes is no useful limit: at least 1024 are needed")]
    TinyBody(usize),
    /// Owners are named by tokens only.
    #[error("--admin-owners needs --auth-tokens")]
    AdminsWithoutTokens,
}

impl Config {
    /// Refuses what would expose data by accident, or can't work.
    ///
    /// # Errors
    /// The first thing that is wrong; see [`ConfigError`].
    pub fn check(&self) -> Result<(), ConfigError> {
        let anonymous = self.auth_tokens.is_none();
        if anonymous && !self.bind.ip().is_loopback() && !self.allow_anonymous {
            return Err(ConfigError::Exposed(self.bind));
        }
        if anonymous && !self.admin_owners.is_empty() {
            return Err(ConfigError::AdminsWithoutTokens);
        }
        if self.max_body < 1024 {
            return Err(ConfigError::TinyBody(self.max_body));
        }
        for origin in &self.cors_origins {
            match origin.as_str() {
                "*" if anonymous => {}
                "*" => return Err(ConfigError::AnyOrigin),
                origin if is_origin(origin) => {}
                origin => return Err(ConfigError::BadOrigin(origin.to_owned())),
            }
        }
        Ok(())
    }

    /// The listed origins as browsers send them: in lower case.
    pub(crate) fn origins(&self) -> HashSet<String> {
        self.cors_origins.iter().map(|origin| origin.to_ascii_lowercase()).collect()
    }
}

fn is_origin(text: &str) -> bool {
    let Ok(uri) = text.parse::<Uri>() else { return false };
    let web = uri.scheme() == Some(&Scheme::HTTP) || uri.scheme() == Some(&Scheme::HTTPS);
    let bare = uri.path() == "/" && uri.query().is_none() && !text.ends_with('/') && !text.contains('@');
    web && bare && uri.host().is_some_and(|host| !host.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn beyond() -> Config {
        Config { bind: SocketAddr::from(([0, 0, 0, 0], 80)), ..Config::default() }
    }

    #[test]
    fn only_loopback_is_served_without_tokens() {
        assert_eq!(Config::default().check(), Ok(()));
        let loopback6 = Config { bind: "[::1]:0".parse().expect("an address"), ..Config::default() };
        assert_eq!(loopback6.check(), Ok(()));
        assert!(matches!(beyond().check(), Err(ConfigError::Exposed(_))));
        assert_eq!(Config { allow_anonymous: true, ..beyond() }.check(), Ok(()));
        assert_eq!(Config { auth_tokens: Some("tokens".into()), ..beyond() }.check(), Ok(()));
    }

    #[test]
    fn origins_are_exact() {
        let with = |origin: &str, tokens: Option<PathBuf>| Config {
            cors_origins: vec![origin.to_owned()],
            auth_tokens: tokens,
            ..Config::default()
        };
        assert_eq!(with("*", None).check(), Ok(()));
        assert_eq!(with("*", Some("tokens".into())).check(), Err(ConfigError::AnyOrigin));
        assert_eq!(with("https://app.example:8443", Some("tokens".into())).check(), Ok(()));
        for bad in
            ["app.example", "https://app.example/", "https://a/b", "ftp://a", "https://u@a", "", "null"]
        {
            assert_eq!(with(bad, None).check(), Err(ConfigError::BadOrigin(bad.to_owned())), "{bad}");
        }
    }

    #[test]
    fn useless_limits_and_admins_are_refused() {
        let tiny = Config { max_body: 10, ..Config::default() };
        assert_eq!(tiny.check(), Err(ConfigError::TinyBody(10)));
        let admins = Config { admin_owners: vec!["root".to_owned()], ..Config::default() };
        assert_eq!(admins.check(), Err(ConfigError::AdminsWithoutTokens));
    }
}
