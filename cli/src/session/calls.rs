//! Deferred calls: which are open, and how they end.

use std::{io::Read as _, path::Path};

use holdfast_engine::content::ToolResult;
use serde_json::{Value, json};
use uuid::Uuid;

use super::{path, stopped};
use crate::{
    args::{ApproveArgs, CallsArgs, CompleteArgs, FailArgs, WaitArgs},
    client::{Call, Client},
    failure::Failure,
    output,
};

/// The largest result that is sent, in bytes: what a request holds by default.
const MAX_RESULT: u64 = 32 * 1024 * 1024;
/// How long a server holds a question for calls, at most.
const HELD: u64 = 600;

/// `holdfast session pending`.
pub(super) async fn pending(client: &Client, args: CallsArgs, json: bool) -> Result<(), Failure> {
    let call = match args.id {
        Some(id) => Call::get(path(id, "/pending")),
        None => Call::get("/v1/pending")
            .with("tool", args.tool)
            .with("agent", args.agent)
            .with("limit", args.limit)
            .waiting(args.wait.then_some(HELD)),
    };
    let found = client.send(call).await?;
    if json {
        return output::json(&found);
    }
    let calls = found["calls"].as_array().map(Vec::as_slice).unwrap_or_default();
    if calls.is_empty() {
        return output::line("no open calls");
    }
    table(calls)
}

/// Prints open calls with the tokens that complete them.
pub(super) fn table(calls: &[Value]) -> Result<(), Failure> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let rows = calls.iter().map(|call| {
        let function = &call["call"]["function"];
        [
            text(&call["tool"]),
            text(&call["continuation_token"]),
            text(&call["reason"]),
            text(&call["expires_at"]),
            text(&function["arguments"]),
        ]
    });
    output::table(["TOOL", "TOKEN", "REASON", "EXPIRES", "ARGUMENTS"], rows)
}

/// `holdfast session complete`.
pub(super) async fn complete(client: &Client, args: CompleteArgs, json: bool) -> Result<(), Failure> {
    let result = parse(&read(&args.file)?);
    let body = json!({ "result": result, "resume": !args.no_resume });
    settle(client, args.call_token, body, &args.wait, json).await
}

/// `holdfast session fail`.
pub(super) async fn fail(client: &Client, args: FailArgs, json: bool) -> Result<(), Failure> {
    let body = json!({ "error": args.reason, "resume": !args.no_resume });
    settle(client, args.call_token, body, &args.wait, json).await
}

/// `holdfast session approve`.
pub(super) async fn approve(client: &Client, args: ApproveArgs, json: bool) -> Result<(), Failure> {
    let body = json!({ "approve": true, "resume": !args.no_resume });
    settle(client, args.call_token, body, &args.wait, json).await
}

async fn settle(
    client: &Client,
    token: Uuid,
    body: Value,
    wait: &WaitArgs,
    json: bool,
) -> Result<(), Failure> {
    let call = Call::post(format!("/v1/continuations/{token}"), body).waiting(wait.seconds());
    stopped(&client.send(call).await?, wait, json)
}

fn read(file: &Path) -> Result<String, Failure> {
    let failed = |reason: String| Failure::Failed(format!("{}: {reason}", file.display()));
    let mut bytes = Vec::new();
    let read = if file == Path::new("-") {
        std::io::stdin().take(MAX_RESULT + 1).read_to_end(&mut bytes)
    } else {
        std::fs::File::open(file).and_then(|open| open.take(MAX_RESULT + 1).read_to_end(&mut bytes))
    };
    read.map_err(|error| failed(error.to_string()))?;
    if bytes.len() as u64 > MAX_RESULT {
        return Err(failed(format!("it has more than {MAX_RESULT} bytes")));
    }
    String::from_utf8(bytes)
        .map_err(|_| failed("it is not text; give media as {\"type\": \"media\", …}".into()))
}

/// A result as it is sent: JSON in a result form as it is, anything else as plain text.
fn parse(text: &str) -> Value {
    match serde_json::from_str::<Value>(text) {
        Ok(Value::String(text)) => Value::String(text),
        Ok(value) if serde_json::from_value::<ToolResult>(value.clone()).is_ok() => value,
        // The line's end of a text file is not part of the result.
        _ => Value::String(text.strip_suffix('\n').unwrap_or(text).to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn result_forms_are_sent_as_they_are() {
        assert_eq!(parse("\"just text\""), json!("just text"));
        for form in [
            json!({"type": "text", "content": "42"}),
            json!({"type": "json", "content": {"a": [1]}}),
            json!({"type": "media", "mimeType": "image/png", "base64Data": "AQID", "filename": "p.png"}),
            json!({"type": "mixed", "parts": [{"type": "text", "text": "see"},
                {"type": "media", "mimeType": "image/png", "base64Data": "AQID"}]}),
        ] {
            assert_eq!(parse(&form.to_string()), form);
        }
    }

    #[test]
    fn anything_else_is_plain_text() {
        assert_eq!(parse("forty-two\n"), json!("forty-two"));
        assert_eq!(parse("42"), json!("42"), "a number is no result form");
        assert_eq!(parse("{\"a\": 1}\n"), json!("{\"a\": 1}"));
        assert_eq!(parse("{\"type\": \"telepathy\"}"), json!("{\"type\": \"telepathy\"}"));
        assert_eq!(parse("{\"type\": \"text\"}"), json!("{\"type\": \"text\"}"), "content is missing");
        assert_eq!(parse(""), json!(""));
    }

    #[test]
    fn a_result_that_cannot_be_read_is_named() {
        let failure = read(Path::new("/absent/result")).expect_err("absent");
        assert!(failure.to_string().contains("/absent/result"), "{failure}");
        let dir = tempfile::tempdir().expect("a directory");
        let binary = dir.path().join("b");
        std::fs::write(&binary, [0xff, 0xfe]).expect("written");
        assert!(read(&binary).expect_err("not text").to_string().contains("media"));
    }
}
