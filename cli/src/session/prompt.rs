//! From a prompt's parts to what a request holds.

use std::path::{Path, PathBuf};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde_json::{Value, json};

use crate::{args::Part, failure::Failure};

/// The largest file that becomes a part, in bytes: what a request holds by default.
const MAX_FILE: u64 = 32 * 1024 * 1024;

/// A prompt: text and attachments.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Prompt {
    text: Option<String>,
    media: Vec<Value>,
}

impl Prompt {
    /// Whether there is nothing in it.
    pub(super) fn is_empty(&self) -> bool {
        self.text.is_none() && self.media.is_empty()
    }

    /// Adds it to a request's body.
    pub(super) fn put_into(self, body: &mut Value) {
        if let Some(text) = self.text {
            body["prompt"] = text.into();
        }
        if !self.media.is_empty() {
            body["media"] = self.media.into();
        }
    }
}

/// Reads the parts: texts become one text, each on lines of its own; attachments stand beside it.
///
/// # Errors
/// If a file can't be read or a shell command fails.
pub(super) async fn read(parts: &[Part]) -> Result<Prompt, Failure> {
    let mut texts = Vec::new();
    let mut media = Vec::new();
    for part in parts {
        match part {
            Part::Text(text) => texts.push(text.clone()),
            Part::Separator { text, times } => texts.push(text.repeat(*times)),
            Part::File(path) => texts.push(text_of(path, bytes_of(path).await?)?),
            Part::Shell(command) => texts.push(shell(command).await?),
            Part::Media(text) => {
                let (mime, path) = media_parts(text)?;
                let filename = path.file_name().map(|name| name.to_string_lossy().into_owned());
                let base64 = STANDARD.encode(bytes_of(&path).await?);
                media.push(json!({"mime": mime, "base64": base64, "filename": filename}));
            }
        }
    }
    let text = (!texts.is_empty()).then(|| texts.join("\n"));
    Ok(Prompt { text, media })
}

async fn bytes_of(path: &Path) -> Result<Vec<u8>, Failure> {
    let failed = |reason: String| Failure::Failed(format!("{}: {reason}", path.display()));
    let size = tokio::fs::metadata(path).await.map_err(|error| failed(error.to_string()))?.len();
    if size > MAX_FILE {
        return Err(failed(format!("it has {size} bytes; at most {MAX_FILE} are sent")));
    }
    tokio::fs::read(path).await.map_err(|error| failed(error.to_string()))
}

fn text_of(path: &Path, bytes: Vec<u8>) -> Result<String, Failure> {
    let text = String::from_utf8(bytes)
        .map_err(|_| Failure::Failed(format!("{}: it is not text; send it with --media", path.display())))?;
    // The line's end of a text file is not part of what it says.
    Ok(text.strip_suffix('\n').unwrap_or(&text).to_owned())
}

async fn shell(command: &str) -> Result<String, Failure> {
    let failed = |reason: String| Failure::Failed(format!("--shell {command:?}: {reason}"));
    let output = tokio::process::Command::new("sh")
        .arg("-c")
        .arg(command)
        .stdin(std::process::Stdio::null())
        .stderr(std::process::Stdio::inherit())
        .kill_on_drop(true)
        .output()
        .await
        .map_err(|error| failed(error.to_string()))?;
    if !output.status.success() {
        return Err(failed(output.status.to_string()));
    }
    let text = String::from_utf8(output.stdout).map_err(|_| failed("it printed no text".into()))?;
    Ok(text.strip_suffix('\n').unwrap_or(&text).to_owned())
}

/// The type and the file of `[MIME;]FILE`.
fn media_parts(text: &str) -> Result<(String, PathBuf), Failure> {
    if let Some((mime, path)) = text.split_once(';')
        && mime.contains('/')
        && !mime.starts_with(['/', '.'])
    {
        return Ok((mime.to_owned(), path.into()));
    }
    let path = PathBuf::from(text);
    let extension = path.extension().map(|end| end.to_string_lossy().to_lowercase()).unwrap_or_default();
    let mime = MIMES.iter().find(|(end, _)| *end == extension).map(|(_, mime)| (*mime).to_owned());
    let mime = mime.ok_or_else(|| {
        Failure::Usage(format!("--media {text}: the type isn't known from the name; write MIME;FILE"))
    })?;
    Ok((mime, path))
}

/// Types by the end of a file's name.
const MIMES: [(&str, &str); 24] = [
    ("png", "image/png"),
    ("jpg", "image/jpeg"),
    ("jpeg", "image/jpeg"),
    ("gif", "image/gif"),
    ("webp", "image/webp"),
    ("svg", "image/svg+xml"),
    ("bmp", "image/bmp"),
    ("pdf", "application/pdf"),
    ("json", "application/json"),
    ("csv", "text/csv"),
    ("txt", "text/plain"),
    ("md", "text/markdown"),
    ("html", "text/html"),
    ("xml", "application/xml"),
    ("mp3", "audio/mpeg"),
    ("wav", "audio/wav"),
    ("ogg", "audio/ogg"),
    ("flac", "audio/flac"),
    ("m4a", "audio/mp4"),
    ("mp4", "video/mp4"),
    ("webm", "video/webm"),
    ("mov", "video/quicktime"),
    ("zip", "application/zip"),
    ("gz", "application/gzip"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn parts_become_one_text_in_order_and_attachments_beside_it() {
        let dir = tempfile::tempdir().expect("a directory");
        let (note, picture) = (dir.path().join("note.txt"), dir.path().join("p.png"));
        std::fs::write(&note, "from a file\n").expect("written");
        std::fs::write(&picture, [1, 2, 3]).expect("written");
        let parts = [
            Part::File(note),
            Part::Separator { text: "-".into(), times: 4 },
            Part::Media(picture.display().to_string()),
            Part::Shell("printf 'from %s\\n' a-shell".into()),
            Part::Text("said".into()),
        ];
        let mut body = json!({});
        read(&parts).await.expect("read").put_into(&mut body);
        assert_eq!(body["prompt"], "from a file\n----\nfrom a-shell\nsaid");
        assert_eq!(body["media"], json!([{"mime": "image/png", "base64": "AQID", "filename": "p.png"}]));
    }

    #[tokio::test]
    async fn no_parts_add_nothing() {
        let prompt = read(&[]).await.expect("read");
        assert!(prompt.is_empty());
        let mut body = json!({"agent": "a"});
        prompt.put_into(&mut body);
        assert_eq!(body, json!({"agent": "a"}));
    }

    #[tokio::test]
    async fn what_cannot_be_read_is_named() {
        let absent = read(&[Part::File("/absent/file".into())]).await.expect_err("absent");
        assert!(absent.to_string().contains("/absent/file"), "{absent}");
        let failing = read(&[Part::Shell("exit 3".into())]).await.expect_err("fails");
        assert!(failing.to_string().contains("exit 3"), "{failing}");
    }

    #[test]
    fn a_type_is_given_or_guessed() {
        let parts = |text: &str| media_parts(text).map(|(mime, path)| (mime, path.display().to_string()));
        assert_eq!(parts("image/x;a;b"), Ok(("image/x".into(), "a;b".into())));
        assert_eq!(parts("./dir/a.PDF"), Ok(("application/pdf".into(), "./dir/a.PDF".into())));
        assert_eq!(parts("/odd;dir/a.png"), Ok(("image/png".into(), "/odd;dir/a.png".into())));
        assert_eq!(parts("unknown.xyz").expect_err("unknown").code(), 2);
    }
}
