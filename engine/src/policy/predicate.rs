//! Predicates on the arguments of calls: JSON Schema, or globs of values.

use std::sync::Arc;

use globset::{Glob, GlobMatcher};
use jsonschema::{Draft, PatternOptions, Validator};
use serde_json::{Map, Value};

/// The longest predicate, in bytes of JSON.
pub const MAX_PREDICATE: usize = 64 * 1024;

/// The keywords of JSON Schema 2020-12 that predicates may use. What isn't checked by itself (`format`) or
/// leads elsewhere (`$ref`) is not among them.
const KEYWORDS: &[&str] = &[
    "type",
    "enum",
    "const",
    "minLength",
    "maxLength",
    "pattern",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "required",
    "dependentRequired",
    "minProperties",
    "maxProperties",
    "minItems",
    "maxItems",
    "uniqueItems",
    "minContains",
    "maxContains",
    "title",
    "description",
    "$comment",
    "default",
    "examples",
];

/// Keywords whose value is a schema.
const OF_SCHEMA: &[&str] =
    &["not", "if", "then", "else", "items", "contains", "additionalProperties", "propertyNames"];

/// Keywords whose value is a list of schemas.
const OF_LIST: &[&str] = &["anyOf", "allOf", "oneOf", "prefixItems"];

/// Keywords whose value is an object of schemas.
const OF_OBJECT: &[&str] = &["properties", "patternProperties", "dependentSchemas"];

/// The arguments of a call as a value: nothing at all counts as no arguments, and what isn't JSON is none.
pub fn arguments(text: &str) -> Option<Value> {
    match text.trim() {
        "" => Some(Value::Object(Map::new())),
        text => serde_json::from_str(text).ok(),
    }
}

/// A predicate, ready to be asked.
#[derive(Debug, Clone)]
pub struct Predicate(Test);

#[derive(Debug, Clone)]
enum Test {
    Schema(Arc<Validator>),
    /// All of them hold.
    Globs(Vec<Place>),
}

/// A value somewhere in the arguments, which one of the globs has to match.
#[derive(Debug, Clone)]
struct Place {
    path: Vec<String>,
    globs: Vec<GlobMatcher>,
}

impl Predicate {
    /// Reads a predicate: an object of places (`args.a.b`, or a JSON pointer) to globs, or a JSON Schema.
    ///
    /// # Errors
    /// What is wrong with it, in words.
    pub fn new(config: &Value) -> Result<Self, String> {
        let size = config.to_string().len();
        if size > MAX_PREDICATE {
            return Err(format!("it has {size} bytes; at most {MAX_PREDICATE} are taken"));
        }
        let is_place = |key: &String| key.starts_with("args.") || key.starts_with('/');
        match config {
            Value::Object(places) if places.keys().any(is_place) => {
                if let Some(other) = places.keys().find(|key| !is_place(key)) {
                    return Err(format!(
                        "{other:?} is no place in the arguments, as the others are; \
                         one begins with \"args.\" or \"/\""
                    ));
                }
                let places = places.iter().map(|(key, globs)| Place::new(key, globs));
                Ok(Self(Test::Globs(places.collect::<Result<_, _>>()?)))
            }
            Value::Object(_) | Value::Bool(_) => {
                known(config)?;
                let options = jsonschema::options()
                    .with_draft(Draft::Draft202012)
                    .with_pattern_options(PatternOptions::regex());
                let validator = options.build(config).map_err(|error| {
                    let place = error.instance_path().to_string();
                    format!(
                        "it is no JSON Schema: {error}{}{place}",
                        if place.is_empty() { "" } else { " at " }
                    )
                })?;
                Ok(Self(Test::Schema(Arc::new(validator))))
            }
            _ => Err("it is neither a JSON Schema nor an object of places and globs".to_owned()),
        }
    }

    /// Whether it holds for these arguments.
    pub fn holds(&self, arguments: &Value) -> bool {
        match &self.0 {
            Test::Schema(validator) => validator.is_valid(arguments),
            Test::Globs(places) => places.iter().all(|place| place.holds(arguments)),
        }
    }
}

impl Place {
    fn new(key: &str, globs: &Value) -> Result<Self, String> {
        let path = match key.strip_prefix("args.") {
            Some(dotted) => dotted.split('.').map(str::to_owned).collect(),
            None => key.split('/').skip(1).map(|part| part.replace("~1", "/").replace("~0", "~")).collect(),
        };
        let glob = |glob: &Value| {
            let text = glob.as_str().ok_or_else(|| format!("{key:?}: {glob} is no glob"))?;
            let glob = Glob::new(text)
                .map_err(|error| format!("{key:?}: {text:?} is no valid glob: {}", error.kind()))?;
            Ok(glob.compile_matcher())
        };
        let globs: Vec<GlobMatcher> = match globs {
            Value::Array(several) => several.iter().map(glob).collect::<Result<_, String>>()?,
            one => vec![glob(one)?],
        };
        if globs.is_empty() {
            return Err(format!("{key:?}: no glob is given"));
        }
        Ok(Self { path, globs })
    }

    fn holds(&self, arguments: &Value) -> bool {
        let mut value = arguments;
        for part in &self.path {
            let inner = match value {
                Value::Object(fields) => fields.get(part),
                Value::Array(items) => part.parse().ok().and_then(|index: usize| items.get(index)),
                _ => None,
            };
            let Some(inner) = inner else { return false };
            value = inner;
        }
        self.matches(value)
    }

    /// Strings match by their text, numbers and the like by their JSON, and a list if one of its items does.
    fn matches(&self, value: &Value) -> bool {
        let any = |text: &str| self.globs.iter().any(|glob| glob.is_match(text));
        match value {
            Value::String(text) => any(text),
            Value::Array(items) => items.iter().any(|item| !item.is_array() && self.matches(item)),
            Value::Object(_) => false,
            other => any(&other.to_string()),
        }
    }
}

/// Refuses keywords that would have no effect: a predicate with a typing mistake would hold for anything.
fn known(schema: &Value) -> Result<(), String> {
    let Value::Object(keywords) = schema else {
        return if schema.is_boolean() { Ok(()) } else { Err(format!("{schema} is no JSON Schema")) };
    };
    for (keyword, value) in keywords {
        let keyword = keyword.as_str();
        if OF_SCHEMA.contains(&keyword) {
            known(value)?;
        } else if OF_LIST.contains(&keyword) {
            value.as_array().into_iter().flatten().try_for_each(known)?;
        } else if OF_OBJECT.contains(&keyword) {
            value.as_object().into_iter().flat_map(Map::values).try_for_each(known)?;
        } else if !KEYWORDS.contains(&keyword) {
            return Err(format!("keyword {keyword:?} is not one that predicates know"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn holds(predicate: &Value, text: &str) -> bool {
        let predicate = Predicate::new(predicate).unwrap_or_else(|reason| panic!("{predicate}: {reason}"));
        arguments(text).is_some_and(|arguments| predicate.holds(&arguments))
    }

    #[test]
    fn globs_look_at_places() {
        let prod = json!({"args.env": "prod*"});
        assert!(holds(&prod, r#"{"env": "production"}"#) && holds(&prod, r#"{"env": "prod\n/x"}"#));
        for other in [r#"{"env": "dev"}"#, "{}", "", r#"{"env": {"prod": 1}}"#, "[1]", "prod", r#"{"env": "#]
        {
            assert!(!holds(&prod, other), "{other}");
        }
        let several = json!({"args.target.hosts": ["db-*", "web-?"], "/dry run": "false", "/a~1b/1": "[37]"});
        assert!(holds(&several, r#"{"target": {"hosts": ["x", "web-1"]}, "dry run": false, "a/b": [0, 7]}"#));
        assert!(!holds(&several, r#"{"target": {"hosts": ["x"]}, "dry run": false, "a/b": [0, 7]}"#));
        assert!(!holds(&several, r#"{"target": {"hosts": ["db-1"]}, "dry run": true, "a/b": [0, 7]}"#));
        assert!(!holds(&several, r#"{"target": {"hosts": ["db-1"]}, "dry run": false, "a/b": [7, 0]}"#));
        // The last of two fields of a name counts, as it does for the tool.
        assert!(holds(&prod, r#"{"env": "dev", "env": "prod"}"#));
    }

    #[test]
    fn schemas_are_json_schema() {
        let schema = json!({"properties": {"env": {"type": "string", "pattern": "^prod"}, "n": {"minimum": 3}},
            "required": ["env"], "not": {"required": ["dry_run"]}});
        assert!(holds(&schema, r#"{"env": "prod"}"#) && holds(&schema, r#"{"env": "prod", "n": 3}"#));
        for other in
            [r#"{"env": "dev"}"#, "{}", r#"{"env": "prod", "n": 2}"#, r#"{"env": "prod", "dry_run": 1}"#]
        {
            assert!(!holds(&schema, other), "{other}");
        }
        assert!(holds(&json!(true), "") && !holds(&json!(false), ""));
        assert!(holds(&json!({"maxProperties": 0}), " "), "nothing is no arguments");
        assert!(!holds(&json!({}), "no json"));
    }

    #[test]
    fn what_would_have_no_effect_is_refused() {
        let deep = json!({"properties": {"a": {"anyOf": [{"items": {"patern": "x"}}]}}});
        for (predicate, word) in [
            (json!({"propertys": {}}), "\"propertys\""),
            (deep, "\"patern\""),
            (json!({"$ref": "http://127.0.0.1/x"}), "\"$ref\""),
            (json!({"properties": {"a": {"format": "email"}}}), "\"format\""),
            (json!({"type": "strin"}), "no JSON Schema"),
            (json!({"pattern": "(?=x)"}), "no JSON Schema"),
            (json!({"args.a": "x", "type": "object"}), "\"type\" is no place"),
            (json!({"args.a": "a["}), "no valid glob"),
            (json!({"args.a": 3}), "3 is no glob"),
            (json!({"args.a": []}), "no glob is given"),
            (json!({"items": 3}), "no JSON Schema"),
            (json!("x"), "neither"),
            (json!({"const": "x".repeat(MAX_PREDICATE)}), "at most 65536"),
        ] {
            let reason = Predicate::new(&predicate).expect_err("refused");
            assert!(reason.contains(word), "{word}: {reason}");
        }
    }
}
