//! Sessions for people.

use holdfast_engine::content::ToolResult;
use serde_json::Value;

use super::{calls, path};
use crate::{
    args::ShowArgs,
    client::{Call, Client},
    failure::Failure,
    output,
};

/// How many characters of a tool's result, or of a call's arguments, are shown.
const SHOWN: usize = 400;

/// `holdfast session show`.
pub(super) async fn run(client: &Client, args: ShowArgs, json: bool) -> Result<(), Failure> {
    let call =
        Call::get(path(args.session.id, "")).with("turns", Some(args.turns)).waiting(args.wait.seconds());
    let view = client.send(call).await?;
    if json {
        return output::json(&view);
    }
    headline(&view)?;
    let turns = view["session"]["turns"].as_array().map(Vec::as_slice).unwrap_or_default();
    for turn in turns.iter().rev() {
        output::line("")?;
        output::line(turn_text(turn))?;
    }
    pending(&view)
}

/// The session's status and its newest answer.
pub(super) fn brief(view: &Value) -> Result<(), Failure> {
    headline(view)?;
    if view["status"] == "idle"
        && let Some(answer) = answer_text(view)
    {
        output::line("")?;
        output::line(answer)?;
    }
    pending(view)
}

/// Id, agent and status on one line.
pub(super) fn headline(meta: &Value) -> Result<(), Failure> {
    let text = |name: &str| meta[name].as_str().unwrap_or("?").to_owned();
    let mut line =
        format!("session {} agent {} status {}", text("session_id"), text("agent"), text("status"));
    for (name, label) in [("status_detail", "detail"), ("parked_on", "parked on"), ("wakes_at", "wakes at")] {
        if let Some(value) = meta[name].as_str() {
            line.push_str(&format!(" {label} {value}"));
        }
    }
    output::line(line)
}

fn pending(view: &Value) -> Result<(), Failure> {
    let calls = pending_calls(view);
    if calls.is_empty() {
        return Ok(());
    }
    output::line("")?;
    calls::table(calls)
}

/// The deferred calls of a view that are open.
pub(crate) fn pending_calls(view: &Value) -> &[Value] {
    view["pending"].as_array().map(Vec::as_slice).unwrap_or_default()
}

/// The text of the newest model turn of a view.
pub(crate) fn answer_text(view: &Value) -> Option<&str> {
    let turns = view["session"]["turns"].as_array()?;
    let newest = turns.iter().find(|turn| turn["tag"] == "LlmTurn")?;
    response_text(&newest["contents"])
}

fn response_text(contents: &Value) -> Option<&str> {
    let response = &contents["llmResponse"];
    response.as_str().or_else(|| response["responseText"].as_str()).filter(|text| !text.is_empty())
}

fn turn_text(turn: &Value) -> String {
    let contents = &turn["contents"];
    let at = turn["at"].as_str().unwrap_or_default();
    let mut text = String::new();
    let mut add = |line: String| {
        if !text.is_empty() {
            text.push('\n');
        }
        text.push_str(&line);
    };
    if turn["tag"] == "LlmTurn" {
        add(format!("model {at}"));
        response_text(contents).into_iter().for_each(|answer| add(indented(answer)));
        for call in contents["llmToolCalls"].as_array().into_iter().flatten() {
            let function = if call["function"].is_object() { &call["function"] } else { call };
            let name = function["name"].as_str().unwrap_or("?");
            let arguments = function["arguments"].as_str().map(str::to_owned);
            let arguments = arguments.unwrap_or_else(|| function["arguments"].to_string());
            add(indented(&format!("call {name} {}", shortened(&arguments))));
        }
        return text;
    }
    add(format!("user {at}"));
    let query = &contents["userQuery"];
    let said = query.as_str().or_else(|| query["text"].as_str());
    said.filter(|said| !said.is_empty()).into_iter().for_each(|said| add(indented(said)));
    for media in query["media"].as_array().into_iter().flatten() {
        let name = media["filename"].as_str().or_else(|| media["mimeType"].as_str()).unwrap_or("attachment");
        add(indented(&format!("attachment {name}")));
    }
    for answer in contents["userToolResponses"].as_array().into_iter().flatten() {
        add(indented(&answer_line(answer)));
    }
    text
}

/// A tool's answer: `[call, result]`, or an object that holds both.
fn answer_line(answer: &Value) -> String {
    let (call, result) = match answer.as_array().map(Vec::as_slice) {
        Some([call, result, ..]) => (call, result),
        _ => (answer, if answer["response"].is_null() { &answer["result"] } else { &answer["response"] }),
    };
    let names = [&call["function"]["name"], &call["call"]["function"]["name"], &call["name"], &call["tool"]];
    let name = names.into_iter().find_map(Value::as_str).unwrap_or("tool");
    let shown = match result {
        Value::String(text) => text.clone(),
        other => match serde_json::from_value::<ToolResult>(other.clone()) {
            Ok(result) => result.as_text(),
            Err(_) => other.to_string(),
        },
    };
    format!("{name}: {}", shortened(&shown))
}

fn indented(text: &str) -> String {
    let lines: Vec<_> = text.lines().map(|line| format!("  {line}")).collect();
    lines.join("\n")
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}… ({} bytes)", &text[..end], text.len()),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_newest_answer_is_found() {
        let view = json!({"session": {"turns": [
            {"tag": "UserTurn", "contents": {}},
            {"tag": "LlmTurn", "contents": {"llmResponse": "new"}},
            {"tag": "LlmTurn", "contents": {"llmResponse": "old"}},
        ]}});
        assert_eq!(answer_text(&view), Some("new"));
        let nested = json!({"session": {"turns": [
            {"tag": "LlmTurn", "contents": {"llmResponse": {"responseText": "deep"}}}]}});
        assert_eq!(answer_text(&nested), Some("deep"));
        assert_eq!(answer_text(&json!({"session": {"turns": []}})), None);
    }

    #[test]
    fn turns_are_told_with_calls_and_results() {
        let model = json!({"tag": "LlmTurn", "at": "T", "contents": {"llmResponse": "so\nbe it", "llmToolCalls": [
            {"id": "c", "type": "function", "function": {"name": "bash_x", "arguments": "{\"a\":1}"}}]}});
        assert_eq!(turn_text(&model), "model T\n  so\n  be it\n  call bash_x {\"a\":1}");
        let user = json!({"tag": "UserTurn", "at": "T", "contents": {
            "userQuery": {"text": "do it", "media": [{"mimeType": "image/png", "filename": "p.png"}]},
            "userToolResponses": [[{"function": {"name": "bash_x"}}, {"type": "text", "content": "done"}]]}});
        assert_eq!(turn_text(&user), "user T\n  do it\n  attachment p.png\n  bash_x: done");
    }

    #[test]
    fn long_results_are_cut_between_characters() {
        let text = "é".repeat(SHOWN + 1);
        assert_eq!(shortened(&text), format!("{}… (802 bytes)", "é".repeat(SHOWN)));
        assert_eq!(shortened("short"), "short");
    }
}
