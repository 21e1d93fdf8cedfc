//! What requests are made of, and what a context limit leaves of them.

use std::{collections::HashMap, sync::Arc};

use holdfast_engine::{
    content::{Digest, INLINE_LIMIT, Media, Part, Payload, Query, ToolResult},
    decide::Next,
    ids::{CallId, SessionId, TurnId},
    mail::{MailBody, Settled},
    model::{Flavor, Message, ModelRequest},
    offer::Offer,
    session::{CallState, Session},
    tool::ToolSpec,
    transcript::{self, Rendered},
    turn::{Answer, LlmCall, LlmTurn, Said, Shown, Turn, TurnBody, UserTurn},
};
use serde_json::{json, value::RawValue};
use uuid::Uuid;

use crate::desk::{Desk, completed};

type Store = HashMap<Digest, Arc<str>>;

fn nothing() -> (Digest, Store) {
    (Digest::of(b"[]"), Store::from([(Digest::of(b"[]"), Arc::from("[]"))]))
}

fn push(session: &mut Session, body: TurnBody) {
    let position = session.length() + 1;
    let id = TurnId(Uuid::from_u128(u128::try_from(position).expect("positive")));
    session.turns.push(Arc::new(Turn { id, position, at: chrono::DateTime::UNIX_EPOCH, body }));
}

fn user(answers: Vec<Answer>, said: Vec<Said>) -> TurnBody {
    let (digest, _) = nothing();
    TurnBody::User(UserTurn {
        system: digest,
        tools: digest,
        answers,
        said,
        mail: Vec::new(),
        said_in_answer: false,
    })
}

fn says(text: &str) -> Said {
    Said::Query(Payload::Inline(Query { text: text.into(), media: Vec::new() }))
}

fn llm(text: &str, calls: Vec<LlmCall>) -> TurnBody {
    TurnBody::Llm(LlmTurn {
        text: Some(text.into()),
        thinking: None,
        calls,
        usage: None,
        flavor: Flavor::OpenAI,
        model: "m".into(),
        stop_reason: None,
        raw: None,
    })
}

fn call(n: u128) -> LlmCall {
    let (id, provider_id) = (CallId(Uuid::from_u128(n)), format!("c{n}"));
    LlmCall { id, provider_id, name: "run".into(), arguments: "{}".into() }
}

fn result(call: &LlmCall, text: String) -> Answer {
    let shown = Shown::Settled(completed(&text));
    Answer { call: call.id, provider_id: call.provider_id.clone(), name: call.name.clone(), shown }
}

/// Rounds of a question, two calls, their results, and an answer; the last question is open.
fn history(rounds: u128, weight: usize) -> Session {
    let mut session = Session::new(SessionId(Uuid::nil()));
    for round in 0..rounds {
        push(&mut session, user(Vec::new(), vec![says(&format!("question {round} {}", "q".repeat(weight)))]));
        let calls = vec![call(round * 2), call(round * 2 + 1)];
        let answers = calls.iter().map(|call| result(call, "r".repeat(weight))).collect();
        push(&mut session, llm("looking", calls));
        push(&mut session, user(answers, Vec::new()));
        push(&mut session, llm(&"a".repeat(weight), Vec::new()));
    }
    push(&mut session, user(Vec::new(), vec![says("the last question")]));
    session
}

fn first_text(request: &ModelRequest) -> &str {
    match request.messages.first().map(|message| &**message) {
        Some(Message::User { text, .. }) => text,
        other => panic!("requests begin with a user message: {other:?}"),
    }
}

/// Calls and tool messages pair up, in order, each right after its assistant message.
fn pairs_up(request: &ModelRequest) {
    let mut open: Vec<&str> = Vec::new();
    for message in &request.messages {
        match &**message {
            Message::Assistant { calls, .. } => {
                assert!(open.is_empty());
                open = calls.iter().rev().map(|call| call.provider_id.as_str()).collect();
            }
            Message::Tool { provider_id, .. } => assert_eq!(open.pop(), Some(provider_id.as_str())),
            Message::User { .. } => assert!(open.is_empty()),
        }
    }
    assert!(open.is_empty());
}

#[test]
fn without_a_limit_everything_is_shown() {
    let (_, blobs) = nothing();
    let session = history(5, 100);
    let request = transcript::request(&session, None, &blobs).expect("a request");
    pairs_up(&request);
    assert_eq!(request.messages.len(), 5 * 6 - 5 + 1);
    assert!(first_text(&request).starts_with("question 0"));
    let roomy = transcript::request(&session, Some(1_000_000), &blobs).expect("a request");
    assert_eq!(format!("{request:?}"), format!("{roomy:?}"));
}

#[test]
fn a_limit_leaves_out_the_oldest_and_never_splits_a_call_from_its_result() {
    let (_, blobs) = nothing();
    for tokens in [1, 50, 100, 150, 200, 300, 500, 800, 1_200] {
        for rounds in 1..12 {
            let session = history(rounds, 100);
            let request = transcript::request(&session, Some(tokens), &blobs).expect("a request");
            pairs_up(&request);
            let Some(Message::User { text, .. }) = request.messages.last().map(|message| &**message) else {
                panic!("a question")
            };
            assert!(text.ends_with("the last question"), "the newest turn stays: {text}");
            let full = transcript::request(&session, None, &blobs).expect("a request").messages.len();
            let cut = request.messages.len() < full;
            assert_eq!(
                first_text(&request).contains("were left out"),
                cut,
                "{tokens} tokens, {rounds} rounds"
            );
            let again = transcript::request(&session, Some(tokens), &blobs).expect("a request");
            assert_eq!(format!("{request:?}"), format!("{again:?}"));
        }
    }
}

/// How many turns a request for the session's first `length` turns leaves out.
fn left_out(session: &Session, length: usize, tokens: u64) -> usize {
    let (_, blobs) = nothing();
    let mut prefix = session.clone();
    prefix.turns.truncate(length);
    let request = transcript::request(&prefix, Some(tokens), &blobs).expect("a request");
    let answered = |message: &&Arc<Message>| matches!(&***message, Message::Assistant { .. });
    // Model turns are never dropped by half, so they count what is left.
    length / 2 - request.messages.iter().filter(answered).count()
}

#[test]
fn the_cut_only_moves_forward_and_in_leaps() {
    let session = history(40, 100);
    let lengths = (1..=session.turns.len()).step_by(2);
    let cuts: Vec<usize> = lengths.map(|length| left_out(&session, length, 500)).collect();
    assert!(cuts.windows(2).all(|pair| pair[0] <= pair[1]), "{cuts:?}");
    let moves = cuts.windows(2).filter(|pair| pair[0] < pair[1]).count();
    assert!(cuts.last() > Some(&60), "most of a long history is left out: {cuts:?}");
    assert!((5..=cuts.len() / 3).contains(&moves), "{moves} moves over {} requests: {cuts:?}", cuts.len());
}

#[test]
fn what_was_just_asked_for_is_shown_whatever_its_size() {
    let (_, blobs) = nothing();
    let mut session = history(3, 100);
    let calls = vec![call(900), call(901)];
    let answers = calls.iter().map(|call| result(call, "huge ".repeat(5_000))).collect();
    push(&mut session, llm("looking", calls));
    push(&mut session, user(answers, Vec::new()));
    let request = transcript::request(&session, Some(100), &blobs).expect("a request");
    pairs_up(&request);
    assert!(first_text(&request).contains("were left out"));
    assert!(first_text(&request).ends_with("the last question"));
    let results = request.messages.iter().filter(|message| matches!(***message, Message::Tool { .. }));
    assert_eq!(results.count(), 2, "a model that isn't shown its results asks again");
}

#[test]
fn what_no_model_has_read_stays() {
    let (_, blobs) = nothing();
    let mut session = history(3, 100);
    push(&mut session, user(Vec::new(), vec![says(&"and another ".repeat(500))]));
    push(&mut session, user(Vec::new(), vec![says("and a third")]));
    let request = transcript::request(&session, Some(100), &blobs).expect("a request");
    assert_eq!(request.messages.len(), 3);
    assert!(first_text(&request).ends_with("the last question"));
}

fn picture(name: &str) -> Media {
    Media { mime_type: "image/png".into(), base64_data: "AAAA".into(), filename: Some(name.into()) }
}

#[test]
fn attachments_travel_beside_the_text_that_names_them() {
    let (_, blobs) = nothing();
    let mut session = Session::new(SessionId(Uuid::nil()));
    let query = Query { text: "look".into(), media: vec![picture("a.png")] };
    push(&mut session, user(Vec::new(), vec![Said::Query(Payload::Inline(query))]));
    let one = call(1);
    let mixed =
        ToolResult::Mixed { parts: vec![Part::Text { text: "here".into() }, Part::Media(picture("b.png"))] };
    let shown = Shown::Settled(Settled::Completed { result: Payload::Inline(mixed) });
    let answer = Answer { shown, ..result(&one, String::new()) };
    push(&mut session, llm("", vec![one]));
    let late =
        Said::Late { header: "[late]".into(), result: Payload::Inline(ToolResult::Media(picture("c.png"))) };
    let bare = Query { text: String::new(), media: vec![picture("d.png")] };
    push(&mut session, user(vec![answer], vec![late, Said::Query(Payload::Inline(bare))]));
    let messages = transcript::request(&session, None, &blobs).expect("a request").messages;
    let names = |media: &[Media]| media.iter().filter_map(|media| media.filename.clone()).collect::<Vec<_>>();
    let Message::User { media, .. } = &*messages[0] else { panic!("a question") };
    assert_eq!(names(media), ["a.png"]);
    let Message::Tool { text, media, .. } = &*messages[2] else { panic!("a result") };
    assert_eq!((text.as_str(), names(media)), ("here\n[image/png attachment: b.png]", vec!["b.png".into()]));
    let Message::User { text, media, .. } = &*messages[3] else { panic!("mail") };
    assert_eq!(text, "[late]\n[image/png attachment: c.png]");
    assert_eq!(names(media), ["c.png", "d.png"]);
}

#[test]
fn large_values_are_fetched_as_blobs_and_a_missing_one_is_named() {
    let (nothing, mut blobs) = nothing();
    let (packed, blob) = Payload::pack(ToolResult::text("x".repeat(INLINE_LIMIT)));
    let blob = blob.expect("too large to stand in a turn");
    let mut session = Session::new(SessionId(Uuid::nil()));
    push(&mut session, user(Vec::new(), vec![says("go")]));
    let one = call(1);
    let shown = Shown::Settled(Settled::Completed { result: packed });
    let answer = Answer { shown, ..result(&one, String::new()) };
    push(&mut session, llm("", vec![one]));
    push(&mut session, user(vec![answer], Vec::new()));
    let mut needed = vec![nothing, blob.digest];
    needed.sort_unstable();
    assert_eq!(transcript::needs(&session, None), needed);

    let missing = transcript::request(&session, None, &blobs).expect_err("a blob is missing");
    assert_eq!(missing.digest, blob.digest);
    blobs.insert(blob.digest, Arc::from("{}"));
    let broken = transcript::request(&session, None, &blobs).expect_err("a blob holds something else");
    assert!(broken.problem.contains("can't be read"), "{broken}");
    blobs.insert(blob.digest, Arc::clone(&blob.text));
    let request = transcript::request(&session, None, &blobs).expect("all is there");
    let Some(Message::Tool { text, .. }) = request.messages.last().map(|message| &**message) else {
        panic!("a result")
    };
    assert_eq!(text.len(), INLINE_LIMIT);
    let no_prompt = transcript::request(&session, None, &Store::new()).expect_err("no prompt");
    assert_eq!(no_prompt.digest, nothing);
}

#[test]
fn what_a_limit_leaves_out_is_not_fetched() {
    let (nothing, _) = nothing();
    let (packed, blob) = Payload::pack(Query { text: "x".repeat(INLINE_LIMIT), media: Vec::new() });
    assert!(blob.is_some());
    let mut session = Session::new(SessionId(Uuid::nil()));
    push(&mut session, user(Vec::new(), vec![Said::Query(packed)]));
    push(&mut session, llm("long", Vec::new()));
    push(&mut session, user(Vec::new(), vec![says("short")]));
    assert_eq!(transcript::needs(&session, Some(100)), [nothing]);
    assert_eq!(transcript::needs(&session, None).len(), 2);
}

#[test]
fn failures_and_cancels_read_as_errors() {
    let mut desk = Desk::with_calls(&["run", "ask"]);
    let calls = desk.calls();
    desk.decide();
    desk.ends(calls[0], Settled::Failed { message: "no such file".into() });
    let settled = Settled::Cancelled { message: "stopped".into() };
    desk.post(MailBody::ContinuationResult { tool_call_id: calls[1], settled });
    assert_eq!(desk.decide().next, Next::AskModel);
    let texts: Vec<String> = desk
        .request()
        .messages
        .iter()
        .filter_map(|message| match &**message {
            Message::Tool { text, .. } => Some(text.clone()),
            Message::User { .. } | Message::Assistant { .. } => None,
        })
        .collect();
    assert_eq!(texts, ["Error: no such file", "Error: stopped"]);
}

#[test]
fn placeholders_are_json_that_says_how_the_call_stands() {
    let mut desk = Desk::with_calls(&["ask", "run"]);
    desk.decide();
    let calls = &mut desk.session.calls;
    let read = |text: String| serde_json::from_str::<serde_json::Value>(&text).expect("JSON");
    let deferred = read(transcript::placeholder(&calls[0]));
    assert_eq!(
        deferred,
        json!({
            "status": "deferred",
            "tool_call_id": "p2_0",
            "reason": "a person decides",
            "message": "This call is handled outside. Its result will come later, as a message.",
        })
    );
    calls[0].provider_id = "quote \" and \u{0} NUL".into();
    assert_eq!(read(transcript::placeholder(&calls[0]))["tool_call_id"], "quote \" and \u{0} NUL");
    assert_eq!(calls[1].state, CallState::Running);
    assert_eq!(read(transcript::placeholder(&calls[1]))["status"], "running");
}

#[test]
fn stored_turns_give_the_same_bytes_again() {
    let raw = r#"{"role":"assistant",  "content":null,"z":1.0,"a":[1e2,"\u0000"]}"#;
    let mut body = llm("text", vec![call(1)]);
    if let TurnBody::Llm(turn) = &mut body {
        turn.raw = Some(RawValue::from_string(raw.into()).expect("JSON"));
    }
    let text = body.to_json().expect("JSON");
    let read = TurnBody::parse(body.tag(), &text).expect("it was just written");
    assert_eq!(read.to_json().expect("JSON"), text);
    let TurnBody::Llm(turn) = &read else { panic!("a model turn") };
    assert_eq!(turn.raw.as_ref().map(|raw| raw.get()), Some(raw), "the provider's bytes are kept");

    let late = Said::Late { header: "h".into(), result: Payload::Inline(ToolResult::text("t")) };
    let answers = vec![
        result(&call(1), "r".into()),
        Answer { shown: Shown::Placeholder("p".into()), ..result(&call(2), String::new()) },
    ];
    let shown = user(answers, vec![says("q"), Said::Text("t".into()), late]);
    let text = shown.to_json().expect("JSON");
    let read = TurnBody::parse(shown.tag(), &text).expect("it was just written");
    assert_eq!(format!("{read:?}"), format!("{shown:?}"));
    assert!(TurnBody::parse("OtherTurn", &text).is_err());
}

#[test]
fn digests_have_one_spelling_of_digits() {
    let digest = Digest::of(b"x");
    assert_eq!(digest.to_string().parse(), Ok(digest));
    for bad in ["", "00", &"+f".repeat(32), &"é".repeat(32), &"0".repeat(65)] {
        assert!(bad.parse::<Digest>().is_err(), "{bad}");
    }
}

#[test]
fn a_request_after_others_is_the_one_that_is_built_alone() {
    let (_, blobs) = nothing();
    let whole = history(12, 100);
    for tokens in [None, Some(50), Some(300), Some(900)] {
        let mut rendered = Rendered::default();
        for length in (1..=whole.turns.len()).step_by(2) {
            let mut session = whole.clone();
            session.turns.truncate(length);
            let alone = transcript::request(&session, tokens, &blobs).expect("a request");
            // What was rendered before needs no blob any more, but for a turn at a cut.
            transcript::needs_after(&session, tokens, &mut rendered);
            let after =
                transcript::request_after(&session, tokens, &blobs, &mut rendered).expect("a request");
            assert_eq!(format!("{after:?}"), format!("{alone:?}"), "{tokens:?} tokens, {length} turns");
        }
    }
}

#[test]
fn what_was_rendered_needs_no_blobs() {
    let (nothing, mut blobs) = nothing();
    let (large, blob) = Payload::pack(ToolResult::Text { content: "x".repeat(INLINE_LIMIT * 2) });
    let blob = blob.expect("too large to stand inline");
    blobs.insert(blob.digest, Arc::clone(&blob.text));
    let mut session = Session::new(SessionId(Uuid::nil()));
    let asked = call(1);
    let settled = Shown::Settled(Settled::Completed { result: large });
    let answer = Answer {
        call: asked.id,
        provider_id: asked.provider_id.clone(),
        name: asked.name.clone(),
        shown: settled,
    };
    push(&mut session, user(Vec::new(), vec![says("go")]));
    push(&mut session, llm("looking", vec![asked]));
    push(&mut session, user(vec![answer], Vec::new()));
    let mut rendered = Rendered::default();
    let needed = transcript::needs_after(&session, None, &mut rendered);
    assert!(needed.contains(&blob.digest) && needed.contains(&nothing), "{needed:?}");
    transcript::request_after(&session, None, &blobs, &mut rendered).expect("a request");
    assert!(!transcript::needs_after(&session, None, &mut rendered).contains(&blob.digest));
}

#[test]
fn what_the_agent_offers_needs_no_blobs_and_what_it_offered_before_does() {
    let (nothing, blobs) = nothing();
    let mut session = Session::new(SessionId(Uuid::nil()));
    push(&mut session, user(Vec::new(), vec![says("go")]));
    let alone = format!("{:?}", transcript::request(&session, None, &blobs).expect("a request"));
    let offered = |system: &[&str]| {
        let mut rendered = Rendered::default();
        rendered.know(&Offer::new(system.iter().map(|&part| part.to_owned()).collect(), Vec::new()));
        rendered
    };
    let mut rendered = offered(&[]);
    assert!(transcript::needs_after(&session, None, &mut rendered).is_empty());
    let request = transcript::request_after(&session, None, &Store::new(), &mut rendered);
    assert_eq!(format!("{:?}", request.expect("all is known")), alone);
    // Other tools with the same prompt.
    let spec = ToolSpec {
        name: "run".into(),
        original: "run".into(),
        description: "runs".into(),
        parameters: json!({"type": "object"}),
    };
    let mut rendered = Rendered::default();
    let offer = Offer::new(Vec::new(), Vec::new()).with_tools(vec![spec]);
    assert_eq!(offer.system, Offer::new(Vec::new(), Vec::new()).system);
    rendered.know(&offer);
    assert_eq!(transcript::needs_after(&session, None, &mut rendered), [nothing]);
    let request = transcript::request_after(&session, None, &blobs, &mut rendered);
    assert_eq!(format!("{:?}", request.expect("a request")), alone, "what was shown then");
    // The agent's tools are the same blob as the prompt that it had, and still that has to be fetched.
    let mut rendered = offered(&["be brief"]);
    assert_eq!(transcript::needs_after(&session, None, &mut rendered), [nothing]);
    let missing = transcript::request_after(&session, None, &Store::new(), &mut rendered);
    assert_eq!(missing.expect_err("not fetched").digest, nothing);
    let request = transcript::request_after(&session, None, &blobs, &mut rendered);
    assert_eq!(format!("{:?}", request.expect("a request")), alone, "what was shown then");
}
