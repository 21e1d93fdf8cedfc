//! What a model's answer becomes.

use std::collections::HashSet;

use holdfast_engine::{decide::MAX_CALLS, model::Message, turn::TurnBody};

use crate::desk::Desk;

fn asked() -> Desk {
    let mut desk = Desk::new();
    desk.says("hello");
    desk.decide();
    desk
}

#[test]
fn empty_and_repeating_ids_become_unique_and_the_rest_stays() {
    let mut desk = asked();
    desk.answers_under(&[("", "ask"), ("x", "ask"), ("x", "ask"), ("", "ask"), ("y", "ask")]);
    let ids: Vec<String> = desk.session.calls.iter().map(|call| call.provider_id.clone()).collect();
    assert_eq!((ids[1].as_str(), ids[4].as_str()), ("x", "y"));
    assert_eq!(ids.iter().collect::<HashSet<_>>().len(), 5, "{ids:?}");
    assert!(ids.iter().all(|id| !id.is_empty()));
    desk.decide();
    desk.says("go on");
    desk.decide();
    let messages = desk.request().messages;
    let Message::Assistant { calls, raw, .. } = &*messages[1] else { panic!("the answer comes second") };
    let named: Vec<&str> = calls.iter().map(|call| call.provider_id.as_str()).collect();
    assert_eq!(named, ids);
    assert!(raw.is_some(), "the provider's own message is kept");
    let answered = messages[2..7].iter().map(|message| match &**message {
        Message::Tool { provider_id, .. } => provider_id.as_str(),
        other => panic!("each call has its tool message: {other:?}"),
    });
    assert_eq!(answered.collect::<Vec<_>>(), ids);
}

#[test]
fn an_id_may_come_back_in_a_later_turn() {
    let mut desk = asked();
    let first = desk.answers_under(&[("functions.ask:0", "ask")])[0];
    desk.decide();
    desk.says("go on");
    desk.decide();
    let second = desk.answers_under(&[("functions.ask:0", "ask")])[0];
    assert_ne!(first, second);
    desk.result(first, "of the first");
    desk.result(second, "of the second");
    desk.decide();
    assert_eq!(desk.shown(), ["of the second"], "the engine's id decides");
    assert!(desk.said()[0].ends_with("of the first"));
}

#[test]
fn an_answer_with_too_many_calls_is_cut() {
    let mut desk = asked();
    let ids: Vec<String> = (0..MAX_CALLS + 3).map(|n| format!("c{n}")).collect();
    let calls: Vec<(&str, &str)> = ids.iter().map(|id| (id.as_str(), "ask")).collect();
    desk.answers_under(&calls);
    assert_eq!(desk.session.calls.len(), MAX_CALLS);
    let Some(TurnBody::Llm(turn)) = desk.session.head().map(|turn| &turn.body) else { panic!("an answer") };
    assert_eq!(turn.calls.len(), MAX_CALLS);
    assert!(turn.raw.is_none(), "a message with more calls than answers can't go back to its provider");

    let mut desk = asked();
    desk.answers_under(&calls[..MAX_CALLS]);
    let Some(TurnBody::Llm(turn)) = desk.session.head().map(|turn| &turn.body) else { panic!("an answer") };
    assert!(turn.calls.len() == MAX_CALLS && turn.raw.is_some(), "the limit itself is allowed");
}

#[test]
fn a_call_records_who_decided_how_it_is_handled() {
    let mut desk = asked();
    desk.answers(&["run", "again", "sign"]);
    let decided: Vec<&str> = desk.session.calls.iter().map(|call| call.policy.decided_by.as_str()).collect();
    assert_eq!(decided, ["default", "rule:0", "rule:2"]);
    assert_eq!(desk.session.calls[2].policy.deadline_seconds, Some(60));
    let places: Vec<(i64, i32)> = desk.session.calls.iter().map(|call| (call.turn, call.index)).collect();
    assert_eq!(places, [(2, 0), (2, 1), (2, 2)]);
}
