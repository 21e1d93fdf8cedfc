//! The JSON Schema of a tool's arguments, and what is said to a model that doesn't keep to it.

use std::fmt::Write as _;

use jsonschema::{
    ValidationError, Validator,
    error::{TypeKind, ValidationErrorKind},
};
use serde_json::{Map, Value, json};

use crate::describe::{Arity, ScriptArg, ScriptInfo};

/// How many faults one answer names.
const MAX_FAULTS: usize = 5;
/// How much of a misfit value is shown, in characters.
const SHOWN: usize = 60;

/// A JSON type that an argument can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum JsonKind {
    String,
    Number,
    Integer,
    Boolean,
    Object,
    Array,
}

impl JsonKind {
    /// What descriptions may say, for messages.
    pub(crate) const NAMES: &str = "string, number, integer, boolean, object, array";

    /// The JSON type of an argument: `type` if that names one, else `backing_type`.
    pub(crate) fn of(arg: &ScriptArg) -> Option<Self> {
        Self::named(&arg.kind).or_else(|| Self::named(&arg.backing_type))
    }

    fn named(name: &str) -> Option<Self> {
        Some(match name.to_ascii_lowercase().as_str() {
            "string" | "str" | "text" => Self::String,
            "number" | "float" | "double" => Self::Number,
            "integer" | "int" => Self::Integer,
            "boolean" | "bool" => Self::Boolean,
            "object" => Self::Object,
            "array" => Self::Array,
            _ => return None,
        })
    }

    fn schema(self) -> Value {
        match self {
            Self::String => json!({"type": "string"}),
            Self::Number => json!({"type": "number"}),
            Self::Integer => json!({"type": "integer"}),
            Self::Boolean => json!({"type": "boolean"}),
            Self::Object => json!({"type": "object"}),
            Self::Array => json!({"type": "array", "items": {}}),
        }
    }
}

/// A tool's schema, ready for checking.
#[derive(Debug)]
pub(crate) struct Schema {
    parameters: Value,
    validator: Validator,
    names: Vec<String>,
    /// Arguments that may be absent; models like to write `null` for these.
    omissible: Vec<String>,
}

impl Schema {
    /// Builds the schema of a tool's arguments: an object without further properties, in which
    /// `single` arguments are required and `multiple` ones are arrays.
    pub(crate) fn new(info: &ScriptInfo) -> Result<Self, String> {
        let mut properties = Map::new();
        for arg in &info.args {
            let kind = JsonKind::of(arg).ok_or_else(|| format!("argument {:?} has no type", arg.name))?;
            let mut schema = match arg.arity {
                Arity::Single | Arity::Optional => kind.schema(),
                Arity::Multiple => json!({"type": "array", "items": kind.schema()}),
            };
            schema["description"] = Value::from(arg.description.as_str());
            properties.insert(arg.name.clone(), schema);
        }
        let (required, omissible): (Vec<_>, Vec<_>) =
            info.args.iter().partition(|arg| arg.arity == Arity::Single);
        let names = |args: Vec<&ScriptArg>| args.iter().map(|arg| arg.name.clone()).collect::<Vec<_>>();
        let parameters = json!({"type": "object", "properties": properties, "required": names(required),
            "additionalProperties": false});
        let validator = jsonschema::validator_for(&parameters).map_err(|error| error.to_string())?;
        let omissible = names(omissible);
        Ok(Self { parameters, validator, names: names(info.args.iter().collect()), omissible })
    }

    /// The schema as the model sees it.
    pub(crate) fn parameters(&self) -> &Value {
        &self.parameters
    }

    /// Reads the arguments that a model wrote. Nothing at all counts as no arguments.
    ///
    /// # Errors
    /// A text that tells the model what to change.
    pub(crate) fn check(&self, text: &str) -> Result<Map<String, Value>, String> {
        let value = match text.trim() {
            "" => json!({}),
            text => serde_json::from_str(text).map_err(|error| format!("they are not JSON: {error}"))?,
        };
        let Value::Object(mut object) = value else {
            return Err(format!("expected a JSON object, got {}", shown(&value)));
        };
        object.retain(|name, value| !(value.is_null() && self.omissible.contains(name)));
        let value = Value::Object(object);
        let mut faults = Vec::new();
        let mut more = 0;
        for error in self.validator.iter_errors(&value) {
            if faults.len() < MAX_FAULTS {
                faults.push(self.fault(&error));
            } else {
                more += 1;
            }
        }
        if !faults.is_empty() {
            let mut message = faults.join("; ");
            if more > 0 {
                let _ = write!(message, "; and {more} more");
            }
            return Err(message);
        }
        match value {
            Value::Object(object) => Ok(object),
            other => Err(format!("expected a JSON object, got {}", shown(&other))),
        }
    }

    fn fault(&self, error: &ValidationError<'_>) -> String {
        let place = place(error.instance_path().as_str());
        match error.kind() {
            ValidationErrorKind::Required { property } => {
                format!("argument {property} is required and missing")
            }
            ValidationErrorKind::AdditionalProperties { unexpected } => {
                let known = match self.names.as_slice() {
                    [] => "the tool takes none".to_owned(),
                    names => format!("known are {}", names.join(", ")),
                };
                let unexpected: Vec<String> = unexpected
                    .iter()
                    .take(MAX_FAULTS)
                    .map(|name| shown(&Value::from(name.as_str())))
                    .collect();
                format!("no argument is called {}; {known}", unexpected.join(" or "))
            }
            ValidationErrorKind::Type { kind } => {
                let expected = match kind {
                    TypeKind::Single(one) => one.to_string(),
                    TypeKind::Multiple(set) => format!("{set:?}"),
                };
                format!("{place}: expected {expected}, got {}", shown(error.instance()))
            }
            _ => format!("{place}: {} (got {})", error.masked(), shown(error.instance())),
        }
    }
}

/// `/tags/0` as `argument "tags"[0]`.
fn place(pointer: &str) -> String {
    let mut parts = pointer.split('/').skip(1).map(|part| part.replace("~1", "/").replace("~0", "~"));
    let mut text = format!("argument {:?}", parts.next().unwrap_or_default());
    for part in parts {
        let _ = write!(text, "[{part}]");
    }
    text
}

/// A value, shortened.
fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}… ({} bytes)", &text[..end], text.len()),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schema() -> Schema {
        let arg = |name: &str, kind: &str, arity: &str| {
            json!({"name": name, "description": format!("the {name}"), "type": kind,
                "backing_type": "string", "arity": arity, "mode": "positional"})
        };
        let document = json!({"slug": "s", "description": "d", "args": [
            arg("city", "string", "single"), arg("days", "int", "optional"),
            arg("tags", "string", "multiple"), arg("file", "path", "optional")]});
        Schema::new(&ScriptInfo::parse(document.to_string().as_bytes()).expect("valid")).expect("a schema")
    }

    #[test]
    fn the_schema_says_what_is_required_and_refuses_the_rest() {
        assert_eq!(
            *schema().parameters(),
            json!({"type": "object", "required": ["city"], "additionalProperties": false, "properties": {
                "city": {"type": "string", "description": "the city"},
                "days": {"type": "integer", "description": "the days"},
                "tags": {"type": "array", "items": {"type": "string"}, "description": "the tags"},
                "file": {"type": "string", "description": "the file"}}})
        );
    }

    #[test]
    fn messages_name_the_argument_and_what_was_expected() {
        let schema = schema();
        let long = "x".repeat(500);
        let cases = [
            (r#"{"#.to_owned(), vec!["not JSON"]),
            ("[1]".to_owned(), vec!["JSON object", "[1]"]),
            ("null".to_owned(), vec!["JSON object"]),
            ("{}".to_owned(), vec!["\"city\"", "required"]),
            (r#"{"city": 3}"#.to_owned(), vec!["\"city\"", "string", "got 3"]),
            (r#"{"city": null}"#.to_owned(), vec!["\"city\"", "string", "null"]),
            (r#"{"city": "a", "days": 1.5}"#.to_owned(), vec!["\"days\"", "integer", "1.5"]),
            (format!(r#"{{"city": "a", "days": "{long}"}}"#), vec!["\"days\"", "… (502 bytes)"]),
            (r#"{"city": "a", "tags": ["b", 4]}"#.to_owned(), vec!["\"tags\"[1]", "string", "got 4"]),
            (r#"{"city": "a", "town": "b"}"#.to_owned(), vec!["\"town\"", "city, days, tags, file"]),
        ];
        for (text, expected) in cases {
            let message = schema.check(&text).expect_err("a misfit");
            for part in expected {
                assert!(message.contains(part), "{text}: {message}");
            }
            assert!(message.len() < 400, "{}", message.len());
        }
        let many: Vec<String> = (0..20).map(|n| n.to_string()).collect();
        let message =
            schema.check(&format!(r#"{{"city": "a", "tags": [{}]}}"#, many.join(","))).expect_err("misfits");
        assert!(message.ends_with("and 15 more"), "{message}");
    }

    #[test]
    fn nothing_is_no_arguments_and_null_is_an_absent_option() {
        let none = json!({"slug": "s", "description": "d", "args": []});
        let none =
            Schema::new(&ScriptInfo::parse(none.to_string().as_bytes()).expect("valid")).expect("a schema");
        assert!(none.check(" \n").expect("empty").is_empty());
        assert!(none.check(r#"{"x": 1}"#).expect_err("no arguments").contains("takes none"));
        let values = schema().check(r#"{"city": "a", "days": null, "tags": null}"#).expect("fits");
        assert_eq!(values.keys().collect::<Vec<_>>(), ["city"]);
    }
}
