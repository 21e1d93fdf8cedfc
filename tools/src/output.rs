//! What becomes of a finished program's output: the result or the failure that the model sees.

use std::{os::unix::process::ExitStatusExt, process::ExitStatus, time::Duration};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use holdfast_engine::{
    content::{Media, ToolResult},
    tool::Outcome,
};

use crate::{
    capture::{Capture, TAIL},
    describe::{EmptyResult, ScriptInfo},
    process::{Ended, Finished},
};

/// How many bytes of a textual result are kept; the rest is read, counted and dropped.
pub const MAX_OUTPUT: usize = 1024 * 1024;
/// The largest image, sound, film or other file that a tool may return, in bytes before base64.
pub const MAX_MEDIA: usize = 8 * 1024 * 1024;
/// How many bytes of a failed program's standard error are shown: its end.
pub const STDERR_TAIL: usize = TAIL;

/// How a program's output is understood.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Text,
    Json,
    Media,
}

fn form(media_type: Option<&str>) -> Form {
    let Some(media_type) = media_type else { return Form::Text };
    match media_type.split_once('/') {
        Some(("text", _)) => Form::Text,
        Some(("image" | "audio" | "video", _)) => Form::Media,
        Some((_, subtype)) if subtype == "json" || subtype.ends_with("+json") => Form::Json,
        Some((_, subtype)) if subtype == "xml" || subtype.ends_with("+xml") => Form::Text,
        _ => Form::Media,
    }
}

/// How many bytes of a tool's standard output are kept.
pub(crate) fn keep(info: &ScriptInfo) -> usize {
    match form(info.output_media_type.as_deref()) {
        Form::Media => MAX_MEDIA,
        Form::Text | Form::Json => MAX_OUTPUT,
    }
}

/// The outcome of a call.
pub(crate) fn outcome(info: &ScriptInfo, finished: &Finished, limit: Option<Duration>) -> Outcome {
    match finished.ended {
        Ended::Exited(status) if status.success() => success(info, &finished.stdout),
        Ended::Exited(status) => Outcome::Failed(failure_text(status, finished)),
        Ended::TimedOut => {
            let limit = limit.unwrap_or_default().as_secs_f64();
            let mut text = format!("the tool was stopped: it ran longer than {limit} seconds");
            add_streams(&mut text, finished);
            Outcome::Failed(text)
        }
        Ended::Cancelled => Outcome::Cancelled("the call was cancelled and the tool stopped".to_owned()),
    }
}

fn success(info: &ScriptInfo, stdout: &Capture) -> Outcome {
    let head = stdout.head();
    let blank = stdout.cut() == 0 && head.iter().all(u8::is_ascii_whitespace);
    if blank {
        return Outcome::Completed(match &info.empty_result {
            EmptyResult::DoNothing => ToolResult::text(""),
            EmptyResult::AddMessage(message) => ToolResult::text(message.as_str()),
        });
    }
    let media_type = info.output_media_type.as_deref();
    match form(media_type) {
        Form::Text => Outcome::Completed(ToolResult::text(noted_text(stdout, None))),
        Form::Json => Outcome::Completed(match serde_json::from_slice(head) {
            Ok(content) if stdout.cut() == 0 => ToolResult::json(content),
            _ => {
                let note = "the tool promised JSON, but this is none";
                ToolResult::text(noted_text(stdout, (stdout.cut() == 0).then_some(note)))
            }
        }),
        Form::Media if stdout.total() > MAX_MEDIA as u64 => Outcome::Failed(format!(
            "the tool returned {} bytes of {}; at most {MAX_MEDIA} are taken",
            stdout.total(),
            media_type.unwrap_or_default()
        )),
        Form::Media => Outcome::Completed(ToolResult::Media(Media {
            mime_type: media_type.unwrap_or_default().to_owned(),
            base64_data: STANDARD.encode(head),
            filename: None,
        })),
    }
}

/// The kept head as text, with a note for everything that isn't as the program wrote it.
fn noted_text(stdout: &Capture, first: Option<&str>) -> String {
    let (mut text, invalid, nuls) = readable(stdout.head());
    let mut notes: Vec<String> = first.map(str::to_owned).into_iter().collect();
    if stdout.cut() > 0 {
        notes.push(format!("output cut: {} more bytes are not shown", stdout.cut()));
    }
    if invalid > 0 {
        notes.push(format!("{invalid} invalid UTF-8 sequences were replaced with U+FFFD"));
    }
    if nuls > 0 {
        notes.push(format!("{nuls} NUL characters were replaced with U+FFFD"));
    }
    for note in notes {
        if !text.ends_with('\n') {
            text.push('\n');
        }
        text.push('[');
        text.push_str(&note);
        text.push(']');
    }
    text
}

/// Bytes as text without NUL, with the numbers of invalid sequences and of NULs.
fn readable(bytes: &[u8]) -> (String, usize, usize) {
    let mut text = String::with_capacity(bytes.len());
    let mut invalid = 0;
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        if !chunk.invalid().is_empty() {
            invalid += 1;
            text.push(char::REPLACEMENT_CHARACTER);
        }
    }
    let nuls = text.bytes().filter(|byte| *byte == 0).count();
    if nuls > 0 {
        text = text.replace('\0', "\u{FFFD}");
    }
    (text, invalid, nuls)
}

/// How a program failed, and what it said last.
pub(crate) fn failure_text(status: ExitStatus, finished: &Finished) -> String {
    let mut text = ending(status);
    add_streams(&mut text, finished);
    text
}

/// How a program ended.
pub(crate) fn ending(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("ended by signal {signal}{}", signal_name(signal)),
        (None, None) => "ended abnormally".to_owned(),
    }
}

/// Adds the end of standard error, or of standard output if there is none.
fn add_streams(text: &mut String, finished: &Finished) {
    for (name, stream) in [("stderr", &finished.stderr), ("stdout", &finished.stdout)] {
        let (tail, before) = stream.tail();
        let (tail, _, _) = readable(tail);
        let tail = tail.trim();
        if tail.is_empty() {
            continue;
        }
        if before > 0 {
            text.push_str(&format!("\n{name} (its end, after {before} bytes that are not shown):\n{tail}"));
        } else {
            text.push_str(&format!("\n{name}:\n{tail}"));
        }
        return;
    }
}

fn signal_name(signal: i32) -> &'static str {
    match signal {
        1 => " (SIGHUP)",
        2 => " (SIGINT)",
        3 => " (SIGQUIT)",
        4 => " (SIGILL)",
        6 => " (SIGABRT)",
        8 => " (SIGFPE)",
        9 => " (SIGKILL)",
        11 => " (SIGSEGV)",
        13 => " (SIGPIPE)",
        15 => " (SIGTERM)",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn media_types_decide_the_form() {
        for (media_type, expected) in [
            ("text/csv", Form::Text),
            ("application/json", Form::Json),
            ("application/ld+json", Form::Json),
            ("application/xml", Form::Text),
            ("image/svg+xml", Form::Media),
            ("audio/ogg", Form::Media),
            ("video/mp4", Form::Media),
            ("application/pdf", Form::Media),
            ("application/zip", Form::Media),
            ("application/octet-stream", Form::Media),
        ] {
            assert_eq!(form(Some(media_type)), expected, "{media_type}");
        }
        assert_eq!(form(None), Form::Text);
    }

    #[test]
    fn every_repair_is_said() {
        let mut capture = Capture::new(6);
        capture.push(b"a\0\xFFb\0c tail");
        assert_eq!(
            noted_text(&capture, Some("first")),
            "a\u{FFFD}\u{FFFD}b\u{FFFD}c\n[first]\n[output cut: 5 more bytes are not shown]\n\
             [1 invalid UTF-8 sequences were replaced with U+FFFD]\n[2 NUL characters were replaced with U+FFFD]"
        );
    }
}
