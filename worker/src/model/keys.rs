//! Keys of model APIs.

use std::{
    collections::BTreeMap,
    fmt, fs, io,
    path::{Path, PathBuf},
};

use serde_json::Value;

/// The largest key file that is read, in bytes.
pub const MAX_FILE_BYTES: u64 = 1024 * 1024;

/// A key and the id under which agents name it. It has no form in which the secret can be shown or
/// serialised.
#[derive(Clone, PartialEq, Eq)]
pub struct ApiKey {
    id: String,
    secret: String,
}

impl ApiKey {
    /// Makes a key.
    ///
    /// # Errors
    /// When the secret is empty or has characters that can't travel in an HTTP header.
    pub fn new(id: impl Into<String>, secret: impl Into<String>) -> Result<Self, UnusableKey> {
        let (id, secret) = (id.into(), secret.into());
        if secret.is_empty() || !secret.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(UnusableKey { id });
        }
        Ok(Self { id, secret })
    }

    /// The id, which is no secret.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The secret, for a header.
    pub(super) fn secret(&self) -> &str {
        &self.secret
    }
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("ApiKey").field("id", &self.id).field("secret", &"redacted").finish()
    }
}

/// A key that no HTTP header can carry.
#[derive(Debug, thiserror::Error)]
#[error("API key `{id}` must be visible ASCII characters without spaces, and at least one")]
pub struct UnusableKey {
    /// The key's id.
    pub id: String,
}

/// Why keys could not be read. The message names the file and never shows what is in it.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    /// The file can't be read.
    #[error("can't read the API keys in {}: {reason}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system says.
        reason: io::Error,
    },
    /// The file isn't what it should be.
    #[error("the API keys in {} must be a JSON object of key id to key: {reason}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong and where.
        reason: String,
    },
}

/// The keys at hand, by id.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ApiKeys(BTreeMap<String, ApiKey>);

impl ApiKeys {
    /// Reads a JSON object of key id to key. `optional` is for a default path: a missing file then
    /// means no keys.
    ///
    /// # Errors
    /// When the file can't be read, is larger than [`MAX_FILE_BYTES`] or isn't such an object.
    pub fn load(path: &Path, optional: bool) -> Result<Self, KeysError> {
        let unreadable = |reason| KeysError::Unreadable { path: path.to_owned(), reason };
        let malformed = |reason: String| KeysError::Malformed { path: path.to_owned(), reason };
        match fs::metadata(path) {
            Err(error) if optional && error.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(error) => return Err(unreadable(error)),
            Ok(found) if found.len() > MAX_FILE_BYTES => {
                return Err(malformed(format!("it has more than {MAX_FILE_BYTES} bytes")));
            }
            Ok(_) => {}
        }
        let text = fs::read_to_string(path).map_err(unreadable)?;
        Self::parse(&text).map_err(malformed)
    }

    /// The key with an id.
    pub fn get(&self, id: &str) -> Option<&ApiKey> {
        self.0.get(id)
    }

    /// The ids, in alphabetical order.
    pub fn ids(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// Whether there is no key.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn parse(text: &str) -> Result<Self, String> {
        // A parser's own message may quote what it found, so only the place is told.
        let value: Value = serde_json::from_str(text)
            .map_err(|error| format!("no JSON at line {} column {}", error.line(), error.column()))?;
        let Value::Object(entries) = value else { return Err("it is something else".to_owned()) };
        let keys = entries.into_iter().map(|(id, secret)| match secret {
            Value::String(secret) => match ApiKey::new(id.clone(), secret.trim()) {
                Ok(key) => Ok((id, key)),
                Err(error) => Err(error.to_string()),
            },
            _ => Err(format!("`{id}` is not text")),
        });
        keys.collect::<Result<_, _>>().map(Self)
    }
}

impl FromIterator<ApiKey> for ApiKeys {
    fn from_iter<I: IntoIterator<Item = ApiKey>>(keys: I) -> Self {
        Self(keys.into_iter().map(|key| (key.id.clone(), key)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(name: &str, content: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("holdfast-keys-{}-{name}", std::process::id()));
        fs::write(&path, content).expect("a temporary file");
        path
    }

    #[test]
    fn keys_are_read_and_never_shown() {
        let path = file("good", r#"{"main": "sk-very-secret\n", "b": "other"}"#);
        let keys = ApiKeys::load(&path, false).expect("keys");
        fs::remove_file(&path).expect("removed");
        assert_eq!(keys.ids().collect::<Vec<_>>(), ["b", "main"]);
        assert_eq!(keys.get("main").map(ApiKey::secret), Some("sk-very-secret"));
        assert!(keys.get("none").is_none());
        let shown = format!("{keys:?} {:#?}", keys.get("main"));
        assert!(!shown.contains("very-secret") && shown.contains("main"), "{shown}");
    }

    #[test]
    fn errors_name_the_file_and_not_its_content() {
        let bad = [
            r#""sk-secret""#,
            r#"{"a": "sk-secret""#,
            r#"{"a": ["sk-secret"]}"#,
            r#"{"a": "sk secret"}"#,
            r#"{"a": ""}"#,
        ];
        for (number, content) in bad.into_iter().enumerate() {
            let path = file(&format!("bad{number}"), content);
            let error = ApiKeys::load(&path, true).expect_err("refused");
            fs::remove_file(&path).expect("removed");
            let shown = format!("{error} {error:?}");
            assert!(shown.contains(&format!("bad{number}")), "{shown}");
            assert!(!shown.contains("sk-secret") && !shown.contains("sk secret"), "{shown}");
        }
    }

    #[test]
    fn only_a_default_file_may_be_missing() {
        let path = Path::new("/nonexistent/holdfast/keys");
        assert!(ApiKeys::load(path, true).expect("no keys").is_empty());
        let error = ApiKeys::load(path, false).expect_err("missing");
        assert!(error.to_string().contains("/nonexistent/holdfast/keys"), "{error}");
    }

    #[test]
    fn a_huge_file_is_refused() {
        let path = file("huge", &" ".repeat(usize::try_from(MAX_FILE_BYTES).expect("small") + 1));
        let error = ApiKeys::load(&path, false).expect_err("refused");
        fs::remove_file(&path).expect("removed");
        assert!(error.to_string().contains("1048576"), "{error}");
    }
}
