//! I3 in what the model was sent: it keeps the provider's rules, so each call has one tool message; these are in
//! order; and history never changes.

use std::collections::BTreeMap;

use holdfast_cli::scripted_model::rules::check_messages;
use holdfast_engine::model::Flavor;
use serde_json::Value;

use super::Report;

/// The flavour of the chaos' agent.
const FLAVOR: Flavor = Flavor::OpenAIv1;

/// Checks the bodies of all requests.
pub(super) fn check(report: &mut Report, requests: &[Value]) {
    report.saw("model requests", requests.len());
    let mut sessions: BTreeMap<String, Vec<&[Value]>> = BTreeMap::new();
    for request in requests {
        let messages = request["messages"].as_array().map(Vec::as_slice).unwrap_or_default();
        for violation in check_messages(FLAVOR, messages) {
            report.violation(format!("I3: {violation} in {}", Value::from(messages.to_vec())));
        }
        in_order(report, messages);
        match name(messages) {
            Some(name) => sessions.entry(name).or_default().push(messages),
            None => report.violation(format!("I3: a request of no session: {request}")),
        }
    }
    for (name, requests) in sessions {
        history(report, &name, &requests);
    }
}

/// Which session a request is of, by its first message.
fn name(messages: &[Value]) -> Option<String> {
    let first = messages.iter().find(|message| message["role"] == "user")?;
    let text = first["content"].to_string();
    let from = text.find("[session ")?;
    let to = text[from..].find(']')?;
    Some(text[from..=from + to].to_owned())
}

/// The tool messages after a model's message answer its calls in the order of the calls, which providers don't ask.
fn in_order(report: &mut Report, messages: &[Value]) {
    for (at, message) in messages.iter().enumerate() {
        let asked = message["tool_calls"].as_array().into_iter().flatten().map(|call| &call["id"]);
        let answers = messages[at + 1..].iter().take_while(|message| message["role"] == "tool");
        let answers = answers.map(|message| &message["tool_call_id"]);
        // That each has one answer is the provider's rule.
        if let Some((asked, answer)) = asked.zip(answers).find(|(asked, answer)| asked != answer) {
            report.violation(format!(
                "I3: {answer} answers in the place of {asked} in {}",
                Value::from(messages.to_vec())
            ));
        }
    }
}

fn is_answer(message: &Value) -> bool {
    message["role"] == "assistant"
}

/// What the model has answered, and all before it, stands the same in every later request. What it has not
/// answered yet may grow, since more may be said.
fn history(report: &mut Report, name: &str, requests: &[&[Value]]) {
    let answers = |messages: &[Value]| messages.iter().filter(|message| is_answer(message)).count();
    let Some(longest) = requests.iter().max_by_key(|messages| answers(messages)) else { return };
    for messages in requests {
        let settled = messages.iter().rposition(is_answer).map_or(0, |last| last + 1);
        report.ensure(longest.get(..settled) == messages.get(..settled), || {
            format!(
                "I3 {name}: history differs:\n{}\n{}",
                Value::from(messages.to_vec()),
                Value::from(longest.to_vec())
            )
        });
    }
    // A conversation never goes back, and is asked on with one answer more each time or again with as many.
    let counts: Vec<usize> = requests.iter().map(|messages| answers(messages)).collect();
    let again = counts.windows(2).filter(|pair| pair[0] == pair[1]).count();
    report.saw("model requests repeated", again);
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn violations(requests: &[Value]) -> usize {
        let mut report = Report::default();
        check(&mut report, requests);
        report.into_parts().1.len()
    }

    fn request(answers: &[&str], last: &str) -> Value {
        let call = |id| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}});
        let mut messages = vec![
            json!({"role": "system", "content": "s"}),
            json!({"role": "user", "content": "[session 1] go"}),
            json!({"role": "assistant", "tool_calls": [call("a"), call("b")]}),
        ];
        messages
            .extend(answers.iter().map(|id| json!({"role": "tool", "tool_call_id": id, "content": last})));
        json!({"messages": messages})
    }

    #[test]
    fn calls_have_one_answer_each_in_order() {
        assert_eq!(violations(&[request(&["a", "b"], "x")]), 0);
        // A call without an answer; two out of their order; answers too many; none at all.
        let wrong =
            [(&["a"][..], 1), (&["b", "a"], 1), (&["a", "b", "b"], 1), (&["a", "b", "c"], 1), (&[], 2)];
        for (answers, count) in wrong {
            assert_eq!(violations(&[request(answers, "x")]), count, "{answers:?}");
        }
        let lone = json!({"messages": [
            {"role": "user", "content": "[session 2]"}, {"role": "tool", "tool_call_id": "a", "content": ""}]});
        assert_eq!(violations(&[lone]), 1);
    }

    #[test]
    fn history_stays_once_it_is_answered() {
        let mut later = request(&["a", "b"], "x");
        if let Some(messages) = later["messages"].as_array_mut() {
            messages.push(json!({"role": "assistant", "content": "done"}));
            messages.push(json!({"role": "user", "content": "more"}));
        }
        assert_eq!(violations(&[request(&["a", "b"], "x"), later.clone()]), 0);
        let mut other = later.clone();
        other["messages"][3]["content"] = json!("y");
        assert_eq!(violations(&[other, later]), 1);
    }
}
