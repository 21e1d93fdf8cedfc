//! The secrets that sign webhooks, and signing: Standard Webhooks, symmetric.

use std::{
    collections::BTreeMap,
    fmt, fs, io,
    path::{Path, PathBuf},
};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use hmac::{Hmac, KeyInit as _, Mac as _};
use serde_json::Value;
use sha2::Sha256;

/// The largest file of secrets that is read, in bytes.
pub const MAX_SECRETS_FILE: u64 = 1024 * 1024;

/// Secrets that sign one endpoint's webhooks at most: the old ones and the new ones of a rotation.
pub const MOST_SECRETS: usize = 8;

/// How secrets begin, before their bytes in base64.
const PREFIX: &str = "whsec_";

/// How many bytes a secret has.
const BYTES: std::ops::RangeInclusive<usize> = 24..=64;

/// A secret. It has no form in which it can be shown or serialised.
#[derive(Clone, PartialEq, Eq)]
struct Secret(Vec<u8>);

impl Secret {
    fn parse(text: &str) -> Option<Self> {
        let bytes = BASE64_STANDARD.decode(text.trim().strip_prefix(PREFIX)?).ok()?;
        BYTES.contains(&bytes.len()).then_some(Self(bytes))
    }
}

/// Why secrets can't be used. The message names the file and never shows what is in it.
#[derive(Debug, thiserror::Error)]
pub enum SecretsError {
    /// The file can't be read.
    #[error("can't read the webhook secrets in {}: {reason}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system says.
        reason: io::Error,
    },
    /// The file isn't what it should be.
    #[error("the webhook secrets in {}: {reason}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
}

/// The secrets at hand, by the ids under which endpoints name them.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Secrets(BTreeMap<String, Vec<Secret>>);

impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map()
            .entries(self.0.iter().map(|(id, list)| (id, format!("{} secrets", list.len()))))
            .finish()
    }
}

impl Secrets {
    /// Reads a JSON object of id to secret, or to a list of secrets which sign side by side while one replaces
    /// another: `whsec_` and 24 to 64 bytes in base64 each.
    ///
    /// # Errors
    /// When the file can't be read, is larger than [`MAX_SECRETS_FILE`] or isn't such an object.
    pub fn load(path: &Path) -> Result<Self, SecretsError> {
        let unreadable = |reason| SecretsError::Unreadable { path: path.to_owned(), reason };
        let malformed = |reason: String| SecretsError::Malformed { path: path.to_owned(), reason };
        if fs::metadata(path).map_err(unreadable)?.len() > MAX_SECRETS_FILE {
            return Err(malformed(format!("more than {MAX_SECRETS_FILE} bytes")));
        }
        Self::parse(&fs::read_to_string(path).map_err(unreadable)?).map_err(malformed)
    }

    fn parse(text: &str) -> Result<Self, String> {
        // A parser's own message may quote what it found, so only the place is told.
        let value: Value = serde_json::from_str(text)
            .map_err(|error| format!("no JSON at line {} column {}", error.line(), error.column()))?;
        let Value::Object(entries) = value else { return Err("must be a JSON object".to_owned()) };
        let mut secrets = BTreeMap::new();
        for (id, value) in entries {
            let texts = match value {
                Value::Array(list) if (1..=MOST_SECRETS).contains(&list.len()) => list,
                one @ Value::String(_) => vec![one],
                _ => return Err(format!("`{id}` must be a secret, or a list of 1 to {MOST_SECRETS}")),
            };
            let parsed: Option<Vec<Secret>> =
                texts.iter().map(|text| text.as_str().and_then(Secret::parse)).collect();
            let Some(parsed) = parsed else {
                let (least, most) = (BYTES.start(), BYTES.end());
                return Err(format!(
                    "each secret of `{id}` must be {PREFIX} and {least} to {most} bytes in base64"
                ));
            };
            secrets.insert(id, parsed);
        }
        Ok(Self(secrets))
    }

    /// Whether there are secrets of an id.
    pub fn has(&self, id: &str) -> bool {
        self.0.contains_key(id)
    }

    /// The signatures of a message by all secrets of an id, as the header `webhook-signature` has them; `None`
    /// without secrets.
    pub fn sign(&self, secret_id: &str, id: &str, timestamp: i64, body: &str) -> Option<String> {
        let signatures = self.0.get(secret_id)?.iter().filter_map(|secret| {
            // A key of any length will do, so this never fails.
            let mut mac = Hmac::<Sha256>::new_from_slice(&secret.0).ok()?;
            mac.update(format!("{id}.{timestamp}.").as_bytes());
            mac.update(body.as_bytes());
            Some(format!("v1,{}", BASE64_STANDARD.encode(mac.finalize().into_bytes())))
        });
        Some(signatures.collect::<Vec<_>>().join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3";
    const TWO: &str = "whsec_YWJjZGVmZ2hpamtsbW5vcHFyc3R1dnd4";

    #[test]
    fn a_message_is_signed_by_each_secret_as_others_compute_it() {
        let secrets = Secrets::parse(&format!(r#"{{"default": ["{ONE}", "{TWO}"], "b": "{TWO}"}}"#));
        let secrets = secrets.expect("secrets");
        // printf 'evt_1.1700000000.{"a":1}' | openssl dgst -sha256 -hmac 0123456789abcdef01234567 -binary | base64
        let (one, two) =
            ("Z/jkivYuQapEc+CETDjLa/ymTZQRCdBx0WzhKRfU5wI=", "euQ1P7Yudp5w/pnMd/8yGuIFFiSLpw7raT+/HWjfmkI=");
        let sign = |id: &str| secrets.sign(id, "evt_1", 1_700_000_000, r#"{"a":1}"#);
        assert_eq!(sign("default"), Some(format!("v1,{one} v1,{two}")));
        assert_eq!(sign("b"), Some(format!("v1,{two}")));
        assert_eq!(sign("c"), None, "nobody else's secret signs");
        assert!(secrets.has("b") && !secrets.has("c"));
    }

    #[test]
    fn a_file_that_is_wrong_is_told_without_what_is_in_it() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("secrets.json");
        for (text, wrong) in [
            ("whsec_hidden", "no JSON at line 1"),
            ("[1]", "JSON object"),
            (r#"{"a": 7}"#, "list of 1 to 8"),
            (r#"{"a": []}"#, "list of 1 to 8"),
            (r#"{"a": "hidden"}"#, "`a` must be whsec_ and 24 to 64 bytes"),
            (r#"{"a": "whsec_hidden"}"#, "24 to 64 bytes"),
            (r#"{"a": ["whsec_aGlkZGVu"]}"#, "24 to 64 bytes"),
        ] {
            fs::write(&path, text).expect("written");
            let told = Secrets::load(&path).expect_err(text).to_string();
            assert!(told.contains(wrong) && told.contains("secrets.json"), "{told}");
            assert!(!told.contains("hidden") && !told.contains("aGlk"), "{told}");
        }
        assert!(Secrets::load(&dir.path().join("absent")).is_err());
        let secrets = Secrets::parse(&format!(r#"{{"default": "{ONE}"}}"#)).expect("secrets");
        assert_eq!(format!("{secrets:?}"), r#"{"default": "1 secrets"}"#);
    }
}
