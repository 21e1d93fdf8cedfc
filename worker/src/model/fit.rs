//! Calls that a model wrote wrongly, in the shape in which a later request can tell of them.
//!
//! A model may ask for a tool without a name, or with arguments that are no JSON object. The call has its
//! answer and stays in the history, but providers refuse a request whose history holds it as it was written.

use serde_json::{Map, Value, json, value::RawValue};

use super::wire::{Object, raw};

/// The key under which arguments travel that are no JSON object: APIs take only objects.
pub(super) const MALFORMED_ARGUMENTS: &str = "_malformed";

/// What a call of a tool is called whose name no API takes.
pub(super) const INVALID_NAME: &str = "invalid_tool";

/// The longest name that every API takes, in bytes.
const MAX_NAME: usize = 64;

/// A tool's name as every API takes it: the name itself wherever it may go out.
pub(super) fn name(name: &str) -> &str {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    if (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(plain) { name } else { INVALID_NAME }
}

/// Whether a text is an object that can be read throughout. A raw value passes over what stands within texts: half
/// of a surrogate pair, say, for which APIs refuse the whole request as no JSON.
pub(super) fn is_object(text: &str) -> bool {
    serde_json::from_str::<Map<String, Value>>(text).is_ok()
}

/// Arguments as an object, in the model's own spelling if they are one.
pub(super) fn arguments(text: &str) -> Box<RawValue> {
    if text.trim().is_empty() {
        return raw(&json!({}));
    }
    match serde_json::from_str::<Box<RawValue>>(text) {
        Ok(object) if is_object(object.get()) => object,
        _ => raw(&json!({ MALFORMED_ARGUMENTS: text })),
    }
}

/// What has to be put in the place of a chat API's `function`; `None` if it may go back as it came.
pub(super) fn repaired_function(function: Option<&RawValue>) -> Option<Object> {
    let mut fit = function.and_then(Object::parse).unwrap_or_default();
    let text =
        |value: Option<&RawValue>| value.and_then(|value| serde_json::from_str::<String>(value.get()).ok());
    let given_name = text(fit.get("name"));
    let named = given_name.as_deref().map(name);
    let name_fits = named.is_some() && named == given_name.as_deref();
    let given = fit.get("arguments").filter(|given| given.get() != "null");
    // Text as the API says, or an object as some servers send it; they take it back, too.
    let repaired = match (text(given), given) {
        // An object keeps its text but for blanks around it; anything else has become another text.
        (Some(text), _) => Some(arguments(&text)).filter(|fit| fit.get() != text.trim()),
        (None, Some(value)) if is_object(value.get()) => None,
        (None, Some(value)) => Some(arguments(value.get())),
        (None, None) => Some(raw(&json!({}))),
    };
    if name_fits && repaired.is_none() {
        return None;
    }
    if !name_fits {
        fit.set("name", INVALID_NAME);
    }
    if let Some(object) = repaired {
        fit.set("arguments", object.get());
    }
    Some(fit)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn repaired(function: &str) -> Option<String> {
        let function: Box<RawValue> = serde_json::from_str(function).expect("JSON");
        repaired_function(Some(&function)).map(|object| raw(&object).get().to_owned())
    }

    #[test]
    fn names_stay_where_every_api_takes_them() {
        let long = "a".repeat(MAX_NAME);
        for fit in ["bash_x", "get-pet", "9", long.as_str()] {
            assert_eq!(name(fit), fit);
        }
        let longer = "a".repeat(MAX_NAME + 1);
        for unfit in ["", "two words", "functions.look", "é", longer.as_str()] {
            assert_eq!(name(unfit), INVALID_NAME, "{unfit:?}");
        }
    }

    #[test]
    fn arguments_are_an_object() {
        assert_eq!(arguments(r#"{"at": 1.50}"#).get(), r#"{"at": 1.50}"#);
        assert_eq!(arguments(" \n").get(), "{}");
        for text in ["[1", "[1]", "7", "\"x\"", "{\"a\":1} x", "{\"cut", r#"{"a":"\ud800"}"#] {
            let wrapped: serde_json::Value = serde_json::from_str(arguments(text).get()).expect("JSON");
            assert_eq!(wrapped, json!({ "_malformed": text }));
        }
    }

    #[test]
    fn only_what_would_be_refused_is_repaired() {
        for fit in [
            r#"{"name":"look","arguments":"{\"at\":1.50}"}"#,
            r#"{"name":"look","arguments":" {\"at\":1} \n"}"#,
            r#"{"name":"look","arguments":{"at":1.50}}"#,
        ] {
            assert_eq!(repaired(fit), None, "{fit}");
        }
        let pairs = [
            (
                r#"{"name":"","arguments":"{}","x":1.0}"#,
                r#"{"name":"invalid_tool","arguments":"{}","x":1.0}"#,
            ),
            (r#"{"name":"look","arguments":""}"#, r#"{"name":"look","arguments":"{}"}"#),
            (r#"{"name":"look","arguments":null}"#, r#"{"name":"look","arguments":"{}"}"#),
            (
                r#"{"name":"look","arguments":"[1"}"#,
                r#"{"name":"look","arguments":"{\"_malformed\":\"[1\"}"}"#,
            ),
            (
                r#"{"name":"look","arguments":[1]}"#,
                r#"{"name":"look","arguments":"{\"_malformed\":\"[1]\"}"}"#,
            ),
            (
                r#"{"name":"look","arguments":"{\"a\":\"\\ud800\"}"}"#,
                r#"{"name":"look","arguments":"{\"_malformed\":\"{\\\"a\\\":\\\"\\\\ud800\\\"}\"}"}"#,
            ),
            (r#"{"arguments":"{}"}"#, r#"{"arguments":"{}","name":"invalid_tool"}"#),
            (r#"7"#, r#"{"name":"invalid_tool","arguments":"{}"}"#),
        ];
        for (unfit, fit) in pairs {
            assert_eq!(repaired(unfit).as_deref(), Some(fit), "{unfit}");
        }
        let missing = repaired_function(None).map(|object| raw(&object).get().to_owned());
        assert_eq!(missing.as_deref(), Some(r#"{"name":"invalid_tool","arguments":"{}"}"#));
    }
}
