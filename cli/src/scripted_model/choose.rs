//! Which rule answers a request.

use super::{
    script::{Last, Rule, When},
    view::{Seen, View},
};

/// The position of the first rule that fits, or what kept each from fitting. `used` counts how often each
/// rule has answered.
pub(super) fn choose(rules: &[Rule], used: &[u64], view: &View) -> Result<usize, String> {
    let mut reasons = Vec::new();
    for (position, (rule, used)) in rules.iter().zip(used).enumerate() {
        match misfit(&rule.when, *used, view) {
            None => return Ok(position),
            Some(reason) => reasons.push(format!("rule {}: {reason}", position + 1)),
        }
    }
    let last = match view.last() {
        Some(Seen { role, text, .. }) => format!("the last message of role {role} is {}", quoted(text)),
        None => "there is no message".to_owned(),
    };
    let reasons = if reasons.is_empty() { "there is no rule".to_owned() } else { reasons.join("; ") };
    Err(format!("no rule of the script fits (model {}, turn {}, {last}): {reasons}", view.model, view.turn))
}

/// Which condition doesn't hold.
fn misfit(when: &When, used: u64, view: &View) -> Option<String> {
    if let Some(times) = when.times.filter(|times| used >= *times) {
        return Some(format!("it has been used {times} times"));
    }
    if let Some(glob) = when.model.as_ref().filter(|glob| !fits(glob, &view.model)) {
        return Some(format!("the model is not {glob}"));
    }
    if let Some(turn) = when.turn.filter(|turn| *turn != view.turn) {
        return Some(format!("the turn is not {turn}"));
    }
    if let Some(tool) = when.has_tools.iter().find(|tool| !view.tools.contains(tool)) {
        return Some(format!("there is no tool {tool}"));
    }
    for (tool, part) in &when.tool_results {
        if !view.results(tool).any(|result| result.contains(part)) {
            return Some(format!("no result of {tool} contains {}", quoted(part)));
        }
    }
    if let Some(part) = when.system.as_ref().filter(|part| !view.system.contains(*part)) {
        return Some(format!("the system prompt lacks {}", quoted(part)));
    }
    if let Some(part) = when.contains.as_ref().filter(|part| !view.says(part)) {
        return Some(format!("no message contains {}", quoted(part)));
    }
    if when.not.as_ref().is_some_and(|not| misfit(not, used, view).is_none()) {
        return Some("what it excludes holds".to_owned());
    }
    last_misfit(when.last.as_ref()?, view.last())
}

fn last_misfit(wanted: &Last, last: Option<&Seen>) -> Option<String> {
    let Some(last) = last else { return Some("there is no last message".to_owned()) };
    let lacks = |part: &String| {
        (!last.text.contains(part)).then(|| format!("the last message lacks {}", quoted(part)))
    };
    match wanted {
        Last::Contains(part) => lacks(part),
        Last::Fits(wanted) => {
            if let Some(role) = wanted.role.as_ref().filter(|role| **role != last.role) {
                return Some(format!("the last message is not of role {role}"));
            }
            if let Some(text) = wanted.equals.as_ref().filter(|text| **text != last.text) {
                return Some(format!("the last message is not {}", quoted(text)));
            }
            if let Some(glob) = wanted.glob.as_ref().filter(|glob| !fits(glob, &last.text)) {
                return Some(format!("the last message doesn't fit {}", quoted(glob)));
            }
            wanted.contains.as_ref().and_then(lacks)
        }
    }
}

fn quoted(text: &str) -> String {
    const SHOWN: usize = 60;
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{:?}…", &text[..end]),
        None => format!("{text:?}"),
    }
}

/// Whether a glob, in which `*` stands for any text and `?` for any character, fits all of a text.
fn fits(glob: &str, text: &str) -> bool {
    let (glob, text): (Vec<char>, Vec<char>) = (glob.chars().collect(), text.chars().collect());
    let (mut at, mut position) = (0, 0);
    // Where the last star is and where the text that it stands for ends, to try a longer one.
    let mut star = None;
    while position < text.len() {
        match glob.get(at) {
            Some('*') => {
                star = Some((at, position));
                at += 1;
            }
            Some(c) if *c == '?' || *c == text[position] => {
                at += 1;
                position += 1;
            }
            _ => {
                let Some((place, end)) = star else { return false };
                star = Some((place, end + 1));
                at = place + 1;
                position = end + 1;
            }
        }
    }
    glob[at..].iter().all(|c| *c == '*')
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::scripted_model::{script::Script, view::Dialect};

    #[test]
    fn globs() {
        for (glob, text, expected) in [
            ("*", "", true),
            ("gpt-*", "gpt-5", true),
            ("gpt-*", "my-gpt-5", false),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("*a*b", "xaxbxab", true),
            ("*a*b", "xaxbx", false),
            ("[x]{y}", "[x]{y}", true),
            ("é*", "éclair\nline", true),
        ] {
            assert_eq!(fits(glob, text), expected, "{glob} {text}");
        }
    }

    fn rules(when: &[Value]) -> Vec<Rule> {
        let rules: Vec<_> = when.iter().map(|when| json!({ "when": when, "reply": {} })).collect();
        Script::parse(&json!({ "rules": rules }).to_string()).expect("a script").rules
    }

    fn view() -> View {
        let body = json!({
            "model": "gpt-5",
            "tools": [{ "function": { "name": "look" } }],
            "messages": [
                { "role": "system", "content": "You must be kind." },
                { "role": "user", "content": "hi" },
                { "role": "assistant", "tool_calls": [{ "id": "a", "function": { "name": "look" } }] },
                { "role": "tool", "tool_call_id": "a", "content": "a red door" },
            ],
        });
        View::new(Dialect::Chat, &body)
    }

    #[test]
    fn each_condition_must_hold() {
        for (when, expected) in [
            (json!({}), None),
            (
                json!({ "model": "gpt-*", "turn": 1, "has_tools": ["look"], "tool_results": { "look": "red" } }),
                None,
            ),
            (json!({ "last": "door" }), None),
            (
                json!({ "last": { "role": "tool", "contains": "red", "equals": "a red door", "glob": "a*door" } }),
                None,
            ),
            (json!({ "model": "claude*" }), Some("the model is not claude*")),
            (json!({ "turn": 0 }), Some("the turn is not 0")),
            (json!({ "has_tools": ["look", "go"] }), Some("there is no tool go")),
            (json!({ "tool_results": { "look": "blue" } }), Some("no result of look contains \"blue\"")),
            (json!({ "tool_results": { "go": "" } }), Some("no result of go contains \"\"")),
            (json!({ "last": "window" }), Some("the last message lacks \"window\"")),
            (json!({ "last": { "role": "user" } }), Some("the last message is not of role user")),
            (json!({ "last": { "equals": "a red" } }), Some("the last message is not \"a red\"")),
            (json!({ "last": { "glob": "b*" } }), Some("the last message doesn't fit \"b*\"")),
            (json!({ "times": 0 }), Some("it has been used 0 times")),
            (json!({ "system": "be kind", "contains": "hi" }), None),
            (json!({ "system": "be cruel" }), Some("the system prompt lacks \"be cruel\"")),
            (json!({ "contains": "red door" }), None),
            (json!({ "contains": "be kind" }), Some("no message contains \"be kind\"")),
            (json!({ "not": { "turn": 0 } }), None),
            (json!({ "not": { "turn": 1, "last": "window" } }), None),
            (json!({ "not": { "turn": 1, "last": "door" } }), Some("what it excludes holds")),
            (json!({ "not": { "not": { "turn": 1 } } }), None),
            (json!({ "not": {} }), Some("what it excludes holds")),
        ] {
            let chosen = choose(&rules(&[when]), &[0], &view());
            match expected {
                None => assert_eq!(chosen, Ok(0)),
                Some(expected) => {
                    let reason = chosen.expect_err("no rule");
                    assert!(reason.ends_with(&format!("rule 1: {expected}")), "{reason}");
                }
            }
        }
    }

    #[test]
    fn the_first_that_fits_wins_until_it_is_used_up() {
        let rules = rules(&[json!({ "turn": 0 }), json!({ "times": 2 }), json!({})]);
        assert_eq!(choose(&rules, &[0, 0, 0], &view()), Ok(1));
        assert_eq!(choose(&rules, &[0, 2, 9], &view()), Ok(2));
        assert!(choose(&rules[..2], &[0, 2], &view()).expect_err("none").contains("used 2 times"));
    }
}
