//! What goes to providers.

use std::sync::Arc;

use holdfast_engine::{
    content::Media,
    model::{Flavor, Message, ModelRequest, ModelTarget, RequestedCall},
    tool::ToolSpec,
};
use serde_json::{Value, json, value::RawValue};

use super::{ModelError, encode};

pub(super) fn target(flavor: Flavor) -> ModelTarget {
    ModelTarget {
        flavor,
        base_url: "http://127.0.0.1:9/v1".into(),
        model: "m".into(),
        temperature: None,
        max_output_tokens: None,
        extra_body: None,
    }
}

pub(super) fn user(text: &str) -> Message {
    Message::User { text: text.into(), media: vec![] }
}

fn call(id: &str, arguments: &str) -> RequestedCall {
    RequestedCall { provider_id: id.into(), name: "look".into(), arguments: arguments.into() }
}

fn assistant(flavor: Flavor, text: Option<&str>, calls: Vec<RequestedCall>, raw: Option<&str>) -> Message {
    let raw = raw.map(|text| RawValue::from_string(text.into()).expect("JSON"));
    Message::Assistant { text: text.map(Into::into), calls, flavor, raw }
}

fn tool(id: &str, text: &str, media: Vec<Media>) -> Message {
    Message::Tool { provider_id: id.into(), name: "look".into(), text: text.into(), media }
}

fn image() -> Media {
    Media { mime_type: "image/png".into(), base64_data: "eA==".into(), filename: None }
}

fn request(messages: Vec<Message>) -> ModelRequest {
    ModelRequest {
        system: Arc::default(),
        tools: Arc::default(),
        messages: messages.into_iter().map(Into::into).collect(),
    }
}

fn text_of(target: &ModelTarget, request: &ModelRequest) -> String {
    String::from_utf8(encode(target, request, false).expect("a body")).expect("UTF-8")
}

fn body(target: &ModelTarget, request: &ModelRequest) -> Value {
    serde_json::from_str(&text_of(target, request)).expect("JSON")
}

fn look() -> ToolSpec {
    ToolSpec {
        name: "look".into(),
        original: "look".into(),
        description: "Looks.".into(),
        parameters: json!({ "type": "object", "properties": { "at": { "type": "string" } } }),
    }
}

#[test]
fn a_chat_request_in_full() {
    let request = ModelRequest {
        system: vec!["Be brief.".into(), String::new(), "Be kind.".into()].into(),
        tools: vec![look()].into(),
        messages: vec![
            user("hello"),
            assistant(
                Flavor::Anthropic,
                None,
                vec![call("a", r#"{"at": "x"}"#), call("b", "not json")],
                Some("[]"),
            ),
            tool("a", "seen", vec![]),
            tool("b", "failed", vec![]),
            assistant(Flavor::OpenAI, Some("done"), vec![], None),
        ]
        .into_iter()
        .map(Into::into)
        .collect(),
    };
    let target = ModelTarget {
        temperature: Some(0.5),
        max_output_tokens: Some(100),
        extra_body: Some(json!({ "top_p": 1, "temperature": 0.7 })),
        ..target(Flavor::OpenAI)
    };
    let expected = json!({
        "model": "m",
        "messages": [
            { "role": "system", "content": "Be brief.\n\nBe kind." },
            { "role": "user", "content": "hello" },
            { "role": "assistant", "content": null, "tool_calls": [
                { "id": "a", "type": "function", "function": { "name": "look", "arguments": "{\"at\": \"x\"}" } },
                { "id": "b", "type": "function", "function": {
                    "name": "look", "arguments": "{\"_malformed\":\"not json\"}" } },
            ] },
            { "role": "tool", "tool_call_id": "a", "content": "seen" },
            { "role": "tool", "tool_call_id": "b", "content": "failed" },
            { "role": "assistant", "content": "done" },
        ],
        "tools": [{ "type": "function", "function": {
            "name": "look",
            "description": "Looks.",
            "parameters": { "type": "object", "properties": { "at": { "type": "string" } } },
        } }],
        "temperature": 0.7,
        "max_tokens": 100,
        "top_p": 1,
    });
    assert_eq!(body(&target, &request), expected);
    assert_eq!(text_of(&target, &request), text_of(&target, &request.clone()));
}

#[test]
fn only_openai_itself_gets_its_own_fields() {
    for flavor in Flavor::ALL {
        let target = ModelTarget { max_output_tokens: Some(9), ..target(flavor) };
        let bytes = encode(&target, &request(vec![user("x")]), true).expect("a body");
        let body: Value = serde_json::from_slice(&bytes).expect("JSON");
        let own = flavor == Flavor::OpenAIv1;
        assert_eq!(body["stream"], true);
        assert_eq!(body.get("stream_options").is_some(), own, "{flavor:?}");
        assert_eq!(body.get("max_completion_tokens").is_some(), own, "{flavor:?}");
        assert_eq!(body.get("max_tokens").is_some(), !own, "{flavor:?}");
        assert!(body.get("tools").is_none(), "no empty list of tools");
    }
}

#[test]
fn a_providers_own_message_goes_back_byte_for_byte() {
    let own = r#"{"role":"assistant","content":null,"reasoning_content":"h\u00e9","x":1.0000000000000000001,"tool_calls":[{"index":0,"id":"c","type":"function","function":{"name":"look","arguments":"{}"},"extra":[1e3]}]}"#;
    let request = request(vec![
        user("x"),
        assistant(Flavor::KimiV1, None, vec![call("c", "{}")], Some(own)),
        tool("c", "ok", vec![]),
    ]);
    let text = text_of(&target(Flavor::OpenRouter), &request);
    assert!(text.contains(own), "{text}");
    let text = text_of(&target(Flavor::Anthropic), &request);
    assert!(!text.contains("reasoning_content"), "{text}");
}

#[test]
fn repeated_ids_are_rewritten_in_the_providers_message_and_its_answers() {
    let own = r#"{"content":"","later":{"b":1,"a":2},"tool_calls":[{"id":"","function":{"name":"look","arguments":{"at":1.50}}},{"id":"","function":{"name":"look","arguments":{}}}]}"#;
    let request = request(vec![
        assistant(Flavor::Ollama, None, vec![call("n1", ""), call("n2", "")], Some(own)),
        tool("n1", "1", vec![]),
        tool("n2", "2", vec![]),
    ]);
    let text = text_of(&target(Flavor::Ollama), &request);
    assert!(
        text.contains(r#""later":{"b":1,"a":2}"#) && text.contains(r#""arguments":{"at":1.50}"#),
        "{text}"
    );
    let messages = body(&target(Flavor::Ollama), &request)["messages"].clone();
    assert_eq!(messages[0]["tool_calls"][0]["id"], "n1");
    assert_eq!(messages[0]["tool_calls"][1]["id"], "n2");
    assert_eq!(messages[0]["role"], "assistant");
    assert_eq!((&messages[1]["tool_call_id"], &messages[2]["tool_call_id"]), (&json!("n1"), &json!("n2")));
}

#[test]
fn calls_that_the_model_wrote_wrongly_are_told_in_a_form_that_is_taken() {
    let own = r#"{"role":"assistant","content":null,"reasoning_content":"h\u00e9","tool_calls":[{"index":0,"id":"a","type":"function","function":{"name":"look","arguments":"{\"at\":1.50}"},"extra":[1e3]},{"id":"b","type":"function","function":{"name":"","arguments":"{}"},"extra":2},{"id":"c","type":"function","function":{"name":"look","arguments":"{\"at\":"}}]}"#;
    let unnamed = RequestedCall { name: String::new(), ..call("b", "{}") };
    let nameless =
        Message::Tool { provider_id: "b".into(), name: String::new(), text: "no".into(), media: vec![] };
    let request = request(vec![
        assistant(
            Flavor::KimiV1,
            None,
            vec![call("a", r#"{"at":1.50}"#), unnamed, call("c", r#"{"at":"#)],
            Some(own),
        ),
        tool("a", "ok", vec![]),
        nameless,
        tool("c", "no", vec![]),
    ]);
    let text = text_of(&target(Flavor::KimiV1), &request);
    let kept = r#"{"index":0,"id":"a","type":"function","function":{"name":"look","arguments":"{\"at\":1.50}"},"extra":[1e3]}"#;
    assert!(text.contains(kept) && text.contains(r#""reasoning_content":"h\u00e9""#), "{text}");
    let messages = body(&target(Flavor::KimiV1), &request)["messages"].clone();
    let sent = &messages[0]["tool_calls"];
    assert_eq!((&sent[1]["function"]["name"], &sent[1]["extra"]), (&json!("invalid_tool"), &json!(2)));
    assert_eq!(sent[2]["function"]["arguments"], r#"{"_malformed":"{\"at\":"}"#);
    assert_eq!(messages[2]["name"], "invalid_tool", "the result is of the tool that the call names");

    let chat = body(&target(Flavor::Anthropic), &request)["messages"].clone();
    assert_eq!(chat[0]["content"][1]["name"], "invalid_tool");
    let own = r#"[{"type":"tool_use","id":"a","name":"look","input":{"at":1.50}},{"type":"tool_use","id":"b","name":"a b","input":[1],"x":1}]"#;
    let request = super::request_tests::request(vec![assistant(
        Flavor::Anthropic,
        None,
        vec![call("a", r#"{"at":1.50}"#), call("b", "[1]")],
        Some(own),
    )]);
    let text = text_of(&target(Flavor::Anthropic), &request);
    assert!(text.contains(r#"{"type":"tool_use","id":"a","name":"look","input":{"at":1.50}}"#), "{text}");
    let repaired = r#"{"type":"tool_use","id":"b","name":"invalid_tool","input":{"_malformed":"[1]"},"x":1}"#;
    assert!(text.contains(repaired), "{text}");
}

#[test]
fn what_apis_send_but_refuse_is_left_out() {
    let own = r#"{"role":"assistant","content":null,"refusal":null,"function_call":null,"tool_calls":[]}"#;
    let messages = body(
        &target(Flavor::OpenAI),
        &request(vec![
            assistant(Flavor::OpenAI, None, vec![], Some(own)),
            assistant(Flavor::OpenAI, None, vec![], Some("7")),
        ]),
    );
    assert_eq!(messages["messages"][0], json!({ "role": "assistant", "content": "", "refusal": null }));
    assert_eq!(messages["messages"][1], json!({ "role": "assistant", "content": "" }));
}

#[test]
fn attachments_of_results_follow_the_whole_block() {
    let request = request(vec![
        assistant(Flavor::OpenAI, None, vec![call("a", "{}"), call("b", "{}")], None),
        tool("a", "[image]", vec![image()]),
        tool("b", "text", vec![]),
        Message::User { text: "next".into(), media: vec![image()] },
    ]);
    let image_part = json!({ "type": "image_url", "image_url": { "url": "data:image/png;base64,eA==" } });
    let messages = body(&target(Flavor::OpenAI), &request)["messages"].clone();
    let roles: Vec<_> = messages.as_array().expect("a list").iter().map(|message| &message["role"]).collect();
    assert_eq!(roles, ["assistant", "tool", "tool", "user", "user"]);
    let note = json!({ "type": "text", "text": "attachments of tool result look (a):" });
    assert_eq!(messages[3]["content"], json!([note, image_part]));
    assert_eq!(messages[4]["content"], json!([{ "type": "text", "text": "next" }, image_part]));

    let at_the_end = ModelRequest { messages: request.messages[..3].to_vec(), ..request };
    assert_eq!(body(&target(Flavor::OpenAI), &at_the_end)["messages"].as_array().map(Vec::len), Some(4));
}

#[test]
fn an_anthropic_request_in_full() {
    let request = ModelRequest {
        system: vec!["One.".into(), "Two.".into()].into(),
        tools: vec![look(), ToolSpec { name: "bare".into(), parameters: json!({}), ..look() }].into(),
        messages: vec![
            user("hello"),
            assistant(
                Flavor::OpenAI,
                Some("hm"),
                vec![call("a:1", r#"{"at": 1.50}"#), call("b", "[1")],
                Some("{}"),
            ),
            tool("a:1", "", vec![image()]),
            tool("b", "failed", vec![]),
            user("and?"),
        ]
        .into_iter()
        .map(Into::into)
        .collect(),
    };
    let cached = json!({ "type": "ephemeral" });
    let expected = json!({
        "model": "m",
        "max_tokens": 8192,
        "system": [{ "type": "text", "text": "One." }, { "type": "text", "text": "Two.", "cache_control": cached }],
        "tools": [
            { "name": "look", "description": "Looks.", "input_schema": look().parameters },
            { "name": "bare", "description": "Looks.", "cache_control": cached,
              "input_schema": { "type": "object", "properties": {} } },
        ],
        "messages": [
            { "role": "user", "content": [{ "type": "text", "text": "hello" }] },
            { "role": "assistant", "content": [
                { "type": "text", "text": "hm" },
                { "type": "tool_use", "id": "a_1", "name": "look", "input": { "at": 1.5 } },
                { "type": "tool_use", "id": "b", "name": "look", "input": { "_malformed": "[1" } },
            ] },
            { "role": "user", "content": [
                { "type": "tool_result", "tool_use_id": "a_1", "content": [
                    { "type": "image", "source": { "type": "base64", "media_type": "image/png", "data": "eA==" } },
                ] },
                { "type": "tool_result", "tool_use_id": "b", "content": [{ "type": "text", "text": "failed" }] },
                { "type": "text", "text": "and?" },
            ] },
        ],
    });
    assert_eq!(body(&target(Flavor::Anthropic), &request), expected);
    assert!(
        text_of(&target(Flavor::Anthropic), &request).contains(r#"{"at": 1.50}"#),
        "the model's own spelling"
    );
}

#[test]
fn anthropic_blocks_go_back_with_their_signatures() {
    let thinking = r#"{"type":"thinking","thinking":"h\u00e9","signature":"s=="}"#;
    let own = format!(
        r#"[{thinking},{{"type":"text","text":" "}},{{"type":"tool_use","id":"x","name":"look","input":{{}}}},{{"type":"server_tool_use","id":"s"}}]"#
    );
    let request = request(vec![
        user("x"),
        assistant(Flavor::Anthropic, None, vec![call("y", "{}")], Some(&own)),
        tool("y", "ok", vec![]),
        assistant(Flavor::Anthropic, None, vec![], Some("[]")),
        user(""),
    ]);
    let text = text_of(&target(Flavor::Anthropic), &request);
    assert!(text.contains(thinking), "{text}");
    let messages = body(&target(Flavor::Anthropic), &request)["messages"].clone();
    assert_eq!(messages[1]["content"].as_array().map(Vec::len), Some(3), "the blank text is left out");
    assert_eq!(messages[1]["content"][1]["id"], "y");
    assert_eq!(messages[2]["content"][0]["tool_use_id"], "y");
    assert_eq!(messages[2]["content"][1]["text"], "(empty message)", "the empty answer leaves no turn");
    assert_eq!(messages.as_array().map(Vec::len), Some(3));
}

#[test]
fn extra_body_must_be_an_object() {
    for flavor in Flavor::ALL {
        let target = ModelTarget { extra_body: Some(json!([1])), ..target(flavor) };
        let error = encode(&target, &request(vec![user("x")]), false).expect_err("refused");
        assert!(matches!(error, ModelError::Target { .. }), "{error}");
    }
}

#[test]
fn mistral_ids_agree_between_calls_and_results() {
    let request = request(vec![
        assistant(Flavor::OpenAI, None, vec![call("call_abcdef", "{}")], None),
        tool("call_abcdef", "ok", vec![]),
    ]);
    let messages = body(&target(Flavor::MistralV1), &request)["messages"].clone();
    let id = messages[0]["tool_calls"][0]["id"].as_str().expect("an id");
    assert_eq!((id.len(), messages[1]["tool_call_id"].as_str()), (9, Some(id)));
    assert_eq!(messages[1]["name"], "look");
}

#[test]
fn mistral_gets_an_assistant_between_a_result_and_the_user() {
    let request = request(vec![
        assistant(Flavor::OpenAI, None, vec![call("a", "{}")], None),
        tool("a", "[image]", vec![image()]),
        user("and?"),
        assistant(Flavor::OpenAI, None, vec![call("b", "{}")], None),
        tool("b", "ok", vec![]),
        user("mail"),
    ]);
    let roles = |flavor| {
        let messages = body(&target(flavor), &request)["messages"].clone();
        let roles = messages.as_array().expect("a list").iter().map(|message| message["role"].clone());
        (roles.collect::<Vec<_>>(), messages)
    };
    let (mistral, messages) = roles(Flavor::MistralV1);
    let bridged =
        ["assistant", "tool", "assistant", "user", "user", "assistant", "tool", "assistant", "user"];
    assert_eq!(mistral, bridged);
    assert_eq!(messages[2], json!({ "role": "assistant", "content": "Done." }));
    assert_eq!(roles(Flavor::OpenAI).0, ["assistant", "tool", "user", "user", "assistant", "tool", "user"]);
}

#[test]
fn an_empty_answer_is_left_out_where_it_is_refused() {
    let thought = r#"{"role":"assistant","content":"","reasoning_content":"hm"}"#;
    let request = request(vec![
        user("x"),
        assistant(Flavor::KimiV1, None, vec![], Some(thought)),
        assistant(Flavor::OpenAI, Some(" "), vec![], None),
        assistant(Flavor::OpenAI, None, vec![call("a", "{}")], None),
        tool("a", "", vec![]),
        assistant(Flavor::MistralV1, None, vec![], Some(r#"{"content":[{"type":"text","text":"y"}]}"#)),
        user(" "),
    ]);
    for (flavor, count) in [(Flavor::KimiV1, 5), (Flavor::MistralV1, 5), (Flavor::OpenAI, 7)] {
        let messages = body(&target(flavor), &request)["messages"].clone();
        assert_eq!(messages.as_array().map(Vec::len), Some(count), "{flavor:?}");
        let last = if flavor == Flavor::KimiV1 { "(empty message)" } else { " " };
        assert_eq!(messages[count - 1]["content"], last, "{flavor:?}");
    }
}

#[test]
fn half_a_surrogate_pair_goes_nowhere_as_it_is() {
    let arguments = r#"{"at":"\ud800"}"#;
    let chat = r#"{"role":"assistant","tool_calls":[{"id":"a","type":"function","function":{"name":"look","arguments":"{\"at\":\"\\ud800\"}"}}]}"#;
    let blocks = format!(r#"[{{"type":"tool_use","id":"a","name":"look","input":{arguments}}}]"#);
    for flavor in Flavor::ALL {
        let anthropic = flavor == Flavor::Anthropic;
        for raw in [None, Some(if anthropic { blocks.as_str() } else { chat })] {
            let request = request(vec![
                user("x"),
                assistant(flavor, None, vec![call("a", arguments)], raw),
                tool("a", "no", vec![]),
            ]);
            let message = body(&target(flavor), &request)["messages"][1].clone();
            let told = match anthropic {
                true => message["content"][0]["input"].clone(),
                false => {
                    let text = message["tool_calls"][0]["function"]["arguments"].as_str().expect("text");
                    serde_json::from_str(text).expect("JSON")
                }
            };
            assert_eq!(told, json!({ "_malformed": arguments }), "{flavor:?} {raw:?}");
        }
    }
}
