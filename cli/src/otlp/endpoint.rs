//! Where an OTLP server takes what.

use crate::failure::Failure;

const TRACES: &str = "/v1/traces";
const METRICS: &str = "/v1/metrics";
const LOGS: &str = "/v1/logs";

/// The base URL of an OTLP server, without a slash at its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Endpoint(String);

impl Endpoint {
    /// Takes an `http` or `https` URL, with or without the path of one of the three.
    ///
    /// # Errors
    /// [`Failure::Config`] that says what is wrong with it.
    pub(crate) fn parse(text: &str) -> Result<Self, Failure> {
        let url =
            reqwest::Url::parse(text).map_err(|error| refused(&format!("{text:?} is no URL: {error}")))?;
        if !matches!(url.scheme(), "http" | "https") {
            return Err(refused(&format!("{text:?} must start with http:// or https://")));
        }
        let base = text.trim_end_matches('/');
        let base = [TRACES, METRICS, LOGS].iter().find_map(|path| base.strip_suffix(path)).unwrap_or(base);
        Ok(Self(base.trim_end_matches('/').to_owned()))
    }

    pub(super) fn traces(&self) -> String {
        format!("{}{TRACES}", self.0)
    }

    pub(super) fn metrics(&self) -> String {
        format!("{}{METRICS}", self.0)
    }

    pub(super) fn logs(&self) -> String {
        format!("{}{LOGS}", self.0)
    }
}

pub(super) fn refused(reason: &str) -> Failure {
    Failure::Config(format!("--otlp-endpoint: {reason}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_paths_are_added_once() {
        for text in
            ["http://c:4318", "http://c:4318/", "http://c:4318/v1/traces/", "http://c:4318/v1/metrics"]
        {
            let endpoint = Endpoint::parse(text).expect("a URL");
            assert_eq!(endpoint.traces(), "http://c:4318/v1/traces", "{text}");
            assert_eq!(endpoint.metrics(), "http://c:4318/v1/metrics", "{text}");
            assert_eq!(endpoint.logs(), "http://c:4318/v1/logs", "{text}");
        }
        assert_eq!(Endpoint::parse("https://c/otlp").expect("a URL").logs(), "https://c/otlp/v1/logs");
        for bad in ["c:4318", "nonsense", ""] {
            assert!(matches!(Endpoint::parse(bad), Err(Failure::Config(_))), "{bad}");
        }
    }
}
