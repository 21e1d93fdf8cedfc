//! Templates in what a script answers.

use serde_json::Value;

use super::view::View;

/// What may stand between `{{` and `}}`.
#[derive(Debug, PartialEq, Eq)]
enum Template<'a> {
    /// The text of the last message.
    Last,
    /// A tool's latest result.
    ToolResult(&'a str),
    /// A value in a tool's latest result that is JSON, by its JSON pointer.
    ToolJson(&'a str, &'a str),
    /// The provider's id of a tool's latest call.
    CallId(&'a str),
    /// The word behind the last occurrence of a text.
    After(&'a str),
}

impl<'a> Template<'a> {
    fn parse(inner: &'a str) -> Option<Self> {
        let inner = inner.trim();
        if inner == "last" {
            return Some(Self::Last);
        }
        let (kind, what) = inner.split_once(':').filter(|(_, what)| !what.is_empty())?;
        match kind {
            "tool_result" => Some(Self::ToolResult(what)),
            "tool_json" => {
                let (tool, pointer) = what.split_once(':')?;
                let pointed = pointer.is_empty() || pointer.starts_with('/');
                (!tool.is_empty() && pointed).then_some(Self::ToolJson(tool, pointer))
            }
            "call_id" => Some(Self::CallId(what)),
            "after" => Some(Self::After(what)),
            _ => None,
        }
    }

    /// What it stands for; where there is no such thing, a text that says so, as a model would be wrong, too.
    fn value(&self, view: &View) -> String {
        let (found, missing) = match self {
            Self::Last => {
                (Some(view.last().map(|last| last.text.clone()).unwrap_or_default()), String::new())
            }
            Self::ToolResult(tool) => {
                (view.results(tool).next_back().map(str::to_owned), format!("(no result of {tool})"))
            }
            Self::ToolJson(tool, pointer) => {
                let mut results = view.results(tool).rev();
                let latest = results.find_map(|text| serde_json::from_str::<Value>(text).ok());
                let value = latest.as_ref().and_then(|value| value.pointer(pointer));
                let text = value.map(|value| value.as_str().map_or_else(|| value.to_string(), str::to_owned));
                (text, format!("(no {pointer} in a result of {tool})"))
            }
            Self::CallId(tool) => (view.call_id(tool).map(str::to_owned), format!("(no call of {tool})")),
            Self::After(text) => (word_after(text, view), format!("(nothing after {text})")),
        };
        found.unwrap_or(missing)
    }
}

/// The word behind the last occurrence of a text in the conversation, blanks between them left out.
fn word_after(text: &str, view: &View) -> Option<String> {
    let ends = |c: char| c.is_whitespace() || matches!(c, '"' | '\'' | '`' | ',') || "()[]{}<>".contains(c);
    let rest = view.said().rev().find_map(|said| said.rfind(text).map(|at| &said[at + text.len()..]))?;
    let word = rest.trim_start().split(ends).next().unwrap_or_default();
    (!word.is_empty()).then(|| word.to_owned())
}

/// A piece of a text.
enum Piece<'a> {
    Plain(&'a str),
    /// What stands between `{{` and `}}`, and all of it.
    Braced(&'a str, &'a str),
}

/// A text in pieces. What is opened and not closed is plain.
fn pieces(text: &str) -> Vec<Piece<'_>> {
    let mut pieces = Vec::new();
    let mut rest = text;
    while let Some(begin) = rest.find("{{") {
        let Some(length) = rest[begin..].find("}}") else { break };
        let end = begin + length;
        pieces.push(Piece::Plain(&rest[..begin]));
        pieces.push(Piece::Braced(&rest[begin + 2..end], &rest[begin..end + 2]));
        rest = &rest[end + 2..];
    }
    pieces.push(Piece::Plain(rest));
    pieces
}

/// The first template of a text that nobody knows.
pub(super) fn unknown(text: &str) -> Option<String> {
    pieces(text).into_iter().find_map(|piece| match piece {
        Piece::Braced(inner, all) if Template::parse(inner).is_none() => Some(all.to_owned()),
        Piece::Braced(..) | Piece::Plain(_) => None,
    })
}

/// The first template of the texts in a value that nobody knows.
pub(super) fn unknown_within(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => unknown(text),
        Value::Array(items) => items.iter().find_map(unknown_within),
        Value::Object(fields) => fields.values().find_map(unknown_within),
        Value::Null | Value::Bool(_) | Value::Number(_) => None,
    }
}

/// Fills in the templates of a text, in one pass: what comes in is never read as a template.
pub(super) fn fill(text: &str, view: &View) -> String {
    let pieces = pieces(text).into_iter().map(|piece| match piece {
        Piece::Plain(text) => text.to_owned(),
        Piece::Braced(inner, all) => {
            Template::parse(inner).map_or_else(|| all.to_owned(), |template| template.value(view))
        }
    });
    pieces.collect()
}

/// A value with the templates in its texts filled in.
pub(super) fn fill_within(value: &Value, view: &View) -> Value {
    match value {
        Value::String(text) => Value::String(fill(text, view)),
        Value::Array(items) => items.iter().map(|item| fill_within(item, view)).collect(),
        Value::Object(fields) => {
            let filled = fields.iter().map(|(key, value)| (key.clone(), fill_within(value, view)));
            Value::Object(filled.collect())
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => value.clone(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::scripted_model::view::Dialect;

    fn view() -> View {
        let call = |id: &str, name: &str| json!({ "id": id, "function": { "name": name } });
        let body = json!({ "messages": [
            { "role": "system", "content": "token: none" },
            { "role": "user", "content": "token: t-1, or token:\n t-2. {\"id\": \"x\"}" },
            { "role": "assistant", "tool_calls": [call("a", "look"), call("b", "spawn")] },
            { "role": "tool", "tool_call_id": "a", "content": "old" },
            { "role": "tool", "tool_call_id": "b", "content": "{\"session\": {\"id\": \"s/1\", \"n\": [1, 2]}}" },
            { "role": "assistant", "tool_calls": [call("c", "look"), call("d", "spawn")] },
            { "role": "tool", "tool_call_id": "c", "content": "{{last}} door" },
            { "role": "tool", "tool_call_id": "d", "content": "it failed" },
            { "role": "user", "content": "why?" },
        ] });
        View::new(Dialect::Chat, &body)
    }

    #[test]
    fn templates_are_filled_in_once() {
        let filled = fill("{{last}} {{tool_result:look}} {{ tool_result:go }} {{", &view());
        assert_eq!(filled, "why? {{last}} door (no result of go) {{");
        let value = fill_within(&json!({ "a": ["{{last}}", 1] }), &view());
        assert_eq!(value, json!({ "a": ["why?", 1] }));
    }

    #[test]
    fn each_template_finds_its_value() {
        for (template, expected) in [
            ("{{tool_json:spawn:/session/id}}", "s/1"),
            ("{{tool_json:spawn:/session/n}}", "[1,2]"),
            ("{{tool_json:spawn:/session/n/1}}", "2"),
            ("{{tool_json:spawn:}}", r#"{"session":{"id":"s/1","n":[1,2]}}"#),
            ("{{tool_json:spawn:/other}}", "(no /other in a result of spawn)"),
            ("{{tool_json:look:/other}}", "(no /other in a result of look)"),
            ("{{call_id:look}}", "c"),
            ("{{call_id:go}}", "(no call of go)"),
            ("{{after:token:}}", "t-2."),
            ("{{after:or}}", "(nothing after or)"),
            ("{{after:token: t-1}}", "(nothing after token: t-1)"),
            (r#"{{after:"id": "}}"#, "s/1"),
            ("{{after:none}}", "(nothing after none)"),
        ] {
            assert_eq!(fill(template, &view()), expected, "{template}");
        }
    }

    #[test]
    fn unknown_templates_are_found() {
        for text in [
            "{{other}}",
            "{{tool_result:}}",
            "{{tool_json:a}}",
            "{{tool_json:a:b}}",
            "{{tool_json::/a}}",
            "{{}}",
        ] {
            assert_eq!(unknown(text).as_deref(), Some(text));
            assert_eq!(unknown_within(&json!({ "a": [1, { "b": text }] })).as_deref(), Some(text));
        }
        assert_eq!(unknown("{{last}} {{after:a:b}} {{tool_json:a:/b:c}} {\"a\":{\"b\":{}}} {{ open"), None);
    }
}
