//! One reading of a connection URL for both drivers.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgSslMode};
use tokio_postgres::config::SslMode;
use tokio_postgres::tls::MakeTlsConnect;
use tokio_postgres::{Client, Connection, Socket};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::tls::{self, Mode};
use super::{CONNECT_TIMEOUT, ConnectError};

/// A connection of tokio-postgres, before something drives it.
pub(crate) type RawConnection = Connection<Socket, <MakeRustlsConnect as MakeTlsConnect<Socket>>::Stream>;

/// What a session is told at its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Session {
    /// UTC, and bounds on statements, locks and idle transactions.
    Bounded,
    /// As `Bounded`; each statement is planned once, and for tables of any size: a plan that reads small
    /// tables as a whole would be kept while they grow.
    Hot,
    /// UTC and no notices, without bounds: a migration may take its time.
    Migrating,
    /// Nothing: a transaction-mode pooler refuses start-up options that it doesn't track.
    Plain,
}

impl Session {
    fn options(self) -> &'static str {
        match self {
            Session::Bounded => {
                "-c TimeZone=UTC -c statement_timeout=30s -c lock_timeout=10s \
                 -c idle_in_transaction_session_timeout=5s"
            }
            Session::Hot => {
                "-c TimeZone=UTC -c statement_timeout=30s -c lock_timeout=10s \
                 -c plan_cache_mode=force_generic_plan -c enable_seqscan=off -c enable_bitmapscan=off -c enable_hashjoin=off \
                 -c enable_mergejoin=off -c idle_in_transaction_session_timeout=5s"
            }
            Session::Migrating => {
                "-c TimeZone=UTC -c client_min_messages=warning -c statement_timeout=0 -c lock_timeout=0 \
                 -c idle_in_transaction_session_timeout=0"
            }
            Session::Plain => "",
        }
    }
}

/// Where and how to connect, for either driver.
#[derive(Clone)]
pub(crate) struct Target {
    pub(super) config: tokio_postgres::Config,
    pub(super) tls: MakeRustlsConnect,
    pub(crate) sqlx: PgConnectOptions,
}

impl Target {
    /// Reads a `postgres://` URL. Its own `options` come after the session's and so override them.
    /// Errors never quote the URL, which may hold a password.
    pub(crate) fn parse(url: &str, role: &str, session: Session) -> Result<Target, ConnectError> {
        if !url.starts_with("postgres://") && !url.starts_with("postgresql://") {
            return Err(ConnectError::Url("it doesn't start with postgres:// or postgresql://".to_owned()));
        }
        let parts = Parts::split(url, session)?;
        let name = format!("holdfast-{role}");
        let mut config = tokio_postgres::Config::from_str(&parts.for_hot())
            .map_err(|error| ConnectError::Url(with_cause(&error)))?;
        config.application_name(&name).connect_timeout(CONNECT_TIMEOUT);
        if !parts.keepalives_given {
            config.keepalives_idle(Duration::from_secs(30)).keepalives_interval(Duration::from_secs(10));
            config.keepalives_retries(3).tcp_user_timeout(Duration::from_secs(30));
        }
        config.ssl_mode(match parts.mode {
            Mode::Disable => SslMode::Disable,
            Mode::Prefer => SslMode::Prefer,
            Mode::Require | Mode::VerifyCa | Mode::VerifyFull => SslMode::Require,
        });
        let tls = tls::connector(parts.mode, parts.authority.as_deref()).map_err(ConnectError::Tls)?;

        let mut sqlx = PgConnectOptions::from_str(&parts.for_sqlx())
            .map_err(|error| ConnectError::Url(with_cause(&error)))?
            .application_name(&name)
            .ssl_mode(match parts.mode {
                Mode::Disable => PgSslMode::Disable,
                Mode::Prefer => PgSslMode::Prefer,
                Mode::Require => PgSslMode::Require,
                Mode::VerifyCa => PgSslMode::VerifyCa,
                Mode::VerifyFull => PgSslMode::VerifyFull,
            });
        if let Some(authority) = &parts.authority {
            sqlx = sqlx.ssl_root_cert(authority);
        }
        if session == Session::Plain {
            // A named statement would outlive its transaction's server connection, and this start-up
            // parameter of sqlx's is one that poolers refuse.
            sqlx = sqlx.statement_cache_capacity(0).extra_float_digits(None);
        }
        Ok(Target { config, tls, sqlx })
    }

    /// Opens a connection outside the pools, in at most twice [`CONNECT_TIMEOUT`]: the driver's own
    /// bound covers the socket but not the handshake.
    pub(crate) async fn open(&self) -> Result<(Client, RawConnection), ConnectError> {
        let limit = CONNECT_TIMEOUT * 2;
        match tokio::time::timeout(limit, self.config.connect(self.tls.clone())).await {
            Ok(done) => Ok(done?),
            Err(_) => Err(ConnectError::Slow { what: "connecting", limit }),
        }
    }
}

/// A URL taken apart at its query.
struct Parts {
    base: String,
    /// Parameters as they were, without those named below.
    rest: Vec<(String, String)>,
    /// The session's options and then the URL's own, percent-encoded.
    options: String,
    mode: Mode,
    authority: Option<PathBuf>,
    keepalives_given: bool,
}

impl Parts {
    fn split(url: &str, session: Session) -> Result<Parts, ConnectError> {
        let (base, query) = url.split_once('?').unwrap_or((url, ""));
        let mut parts = Parts {
            base: base.to_owned(),
            rest: Vec::new(),
            options: encode(session.options()),
            mode: Mode::Prefer,
            authority: None,
            keepalives_given: false,
        };
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair
                .split_once('=')
                .ok_or_else(|| ConnectError::Url("a parameter in its query has no value".to_owned()))?;
            match key {
                "sslmode" => {
                    let told = "sslmode must be disable, prefer, require, verify-ca or verify-full";
                    parts.mode = Mode::parse(value).ok_or_else(|| ConnectError::Url(told.to_owned()))?;
                }
                "sslrootcert" if value == "system" => {}
                "sslrootcert" => parts.authority = Some(PathBuf::from(decode(value)?)),
                "options" if parts.options.is_empty() => parts.options = value.to_owned(),
                "options" => parts.options = format!("{}%20{value}", parts.options),
                _ => {
                    parts.keepalives_given |= key.starts_with("keepalives") || key == "tcp_user_timeout";
                    parts.rest.push((key.to_owned(), value.to_owned()));
                }
            }
        }
        Ok(parts)
    }

    fn for_hot(&self) -> String {
        self.join(|_| true)
    }

    /// Only what sqlx knows: it logs the rest as unrecognized, values included.
    fn for_sqlx(&self) -> String {
        self.join(|key| matches!(key, "host" | "hostaddr" | "port" | "dbname" | "user" | "password"))
    }

    fn join(&self, keep: impl Fn(&str) -> bool) -> String {
        let kept = self.rest.iter().filter(|(key, _)| keep(key));
        let mut pairs: Vec<String> = kept.map(|(key, value)| format!("{key}={value}")).collect();
        if !self.options.is_empty() {
            pairs.push(format!("options={}", self.options));
        }
        if pairs.is_empty() { self.base.clone() } else { format!("{}?{}", self.base, pairs.join("&")) }
    }
}

fn encode(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    text.bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

fn decode(text: &str) -> Result<String, ConnectError> {
    let broken = || ConnectError::Url("a percent escape in its query is broken".to_owned());
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let digits = [rest.next().ok_or_else(broken)?, rest.next().ok_or_else(broken)?];
        let digits = std::str::from_utf8(&digits).map_err(|_| broken())?;
        bytes.push(u8::from_str_radix(digits, 16).map_err(|_| broken())?);
    }
    String::from_utf8(bytes).map_err(|_| broken())
}

/// An error with its cause, as one line.
fn with_cause(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(url: &str, session: Session) -> Result<Target, ConnectError> {
        Target::parse(url, "test", session)
    }

    #[test]
    fn both_drivers_get_the_same_session() {
        let url =
            "postgres://u:p%40ss@db.example:6000/name?sslmode=require&options=-c%20statement_timeout%3D5s";
        let read = target(url, Session::Bounded).expect("a good URL");
        let options = read.config.get_options().expect("options").to_owned();
        assert!(
            options.ends_with("-c idle_in_transaction_session_timeout=5s -c statement_timeout=5s"),
            "{options}"
        );
        assert_eq!(read.sqlx.get_options(), Some(options.as_str()));
        assert_eq!(read.config.get_application_name(), Some("holdfast-test"));
        assert_eq!(read.sqlx.get_application_name(), Some("holdfast-test"));
        assert_eq!(read.config.get_password(), Some(&b"p@ss"[..]));
        assert_eq!((read.sqlx.get_host(), read.sqlx.get_port()), ("db.example", 6000));
        assert_eq!(read.config.get_ssl_mode(), SslMode::Require);
        assert!(matches!(read.sqlx.get_ssl_mode(), PgSslMode::Require));
        assert_eq!(read.config.get_connect_timeout(), Some(&CONNECT_TIMEOUT));
    }

    #[test]
    fn a_pooler_gets_no_options_and_keepalives_can_be_chosen() {
        let read = target("postgres://u@h/d?keepalives_idle=7", Session::Plain).expect("a good URL");
        assert_eq!(read.config.get_options(), None);
        assert_eq!(read.config.get_keepalives_idle(), Duration::from_secs(7));
        assert_eq!(read.config.get_ssl_mode(), SslMode::Prefer);
    }

    #[test]
    fn verifying_modes_need_a_readable_authority_or_take_the_public_ones() {
        let full =
            target("postgres://u@h/d?sslmode=verify-full", Session::Bounded).expect("public authorities");
        assert_eq!(full.config.get_ssl_mode(), SslMode::Require);
        assert!(target("postgres://u@h/d?sslmode=verify-ca&sslrootcert=system", Session::Bounded).is_ok());
        let missing =
            target("postgres://u@h/d?sslmode=verify-ca&sslrootcert=/no/such%20file", Session::Bounded);
        let text = missing.err().expect("no such file").to_string();
        assert!(text.contains("/no/such file"), "{text}");
    }

    #[test]
    fn errors_never_quote_the_password() {
        for url in [
            "mysql://u:hunter2@h/d",
            "postgres://u:hunter2@h/d?sslmode=maybe",
            "postgres://u:hunter2@h:port/d",
            "postgres://u:hunter2@h/d?flag",
            "postgres://u:hunter2@h/d?unknown=x",
            "postgres://u:hunter2@[::/d",
        ] {
            let text = target(url, Session::Bounded).err().map(|error| format!("{error} {error:?}"));
            let text = text.unwrap_or_else(|| panic!("{url} is accepted"));
            assert!(!text.contains("hunter2"), "{text}");
        }
    }
}
