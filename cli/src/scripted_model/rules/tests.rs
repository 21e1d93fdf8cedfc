//! Each rule with a request that breaks it, for the flavours that refuse it and those that take it.

mod anthropic;
mod chat;

use std::collections::BTreeSet;

use holdfast_engine::model::Flavor::{
    self, Anthropic, KimiV1, MistralV1, Ollama, OpenAI, OpenAIv1, OpenRouter,
};
use serde_json::{Value, json};

use super::{Rule, check, check_messages};

const CHAT: &[Flavor] = &[OpenAIv1, OpenAI, KimiV1, MistralV1, OpenRouter, Ollama];

/// A rule, the flavours that have it, and what breaks it where in a request that keeps all rules.
type Case = (Rule, &'static [Flavor], fn(&mut Value), &'static str);

fn request(flavor: Flavor) -> Value {
    if flavor == Anthropic { anthropic::request() } else { chat::request() }
}

/// Takes a message away.
fn remove(body: &mut Value, position: usize) {
    body["messages"].as_array_mut().expect("messages").remove(position);
}

/// Puts a message in.
fn insert(body: &mut Value, position: usize, message: Value) {
    body["messages"].as_array_mut().expect("messages").insert(position, message);
}

#[test]
fn each_rule_is_kept_and_broken() {
    for flavor in Flavor::ALL {
        assert_eq!(check(flavor, &request(flavor)), [], "{flavor:?}");
    }
    let mut seen = BTreeSet::new();
    for (flavors, cases) in [(CHAT, chat::cases()), (&[Anthropic], anthropic::cases())] {
        for (number, (rule, refusing, break_it, at)) in cases.iter().enumerate() {
            for flavor in flavors {
                let mut body = request(*flavor);
                break_it(&mut body);
                let found: Vec<_> =
                    check(*flavor, &body).into_iter().map(|found| (found.rule, found.at)).collect();
                let expected = refusing.contains(flavor).then(|| (*rule, (*at).to_owned()));
                assert_eq!(found, Vec::from_iter(expected), "case {number}, {flavor:?}");
            }
            seen.insert(*rule);
        }
    }
    let untested: Vec<_> = Rule::ALL.into_iter().filter(|rule| !seen.contains(rule)).collect();
    assert_eq!(untested, [], "each rule has a case");
}

#[test]
fn names_are_unique_and_all_there() {
    let names: BTreeSet<_> = Rule::ALL.into_iter().map(Rule::name).collect();
    assert_eq!(names.len(), Rule::ALL.len());
    let documented = include_str!("../../../../docs/scripted-model.md");
    for name in names {
        assert!(
            documented.contains(&format!("| `{name}` |")),
            "docs/scripted-model.md has no row for {name}"
        );
    }
}

#[test]
fn a_violation_names_its_rule_and_place() {
    let found = check(OpenAI, &json!([]));
    assert_eq!(found[0].to_string(), "the body: it is no JSON object (rule form)");
    let found = check_messages(Anthropic, &[json!({ "role": "assistant", "content": "x" })]);
    let told: Vec<_> = found.iter().map(ToString::to_string).collect();
    assert_eq!(told[0], "messages[0]: it is not the user's (rule first_message)");
    assert_eq!(
        serde_json::to_value(&found[1]).expect("JSON"),
        json!({ "rule": "last_message", "at": "messages[0]", "detail": "it is the model's own" })
    );
}
