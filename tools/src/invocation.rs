//! How the model's arguments become words, variables and standard input of a program.

use std::ffi::OsString;

use serde_json::{Map, Value};

use crate::{
    describe::{Arity, Mode, ScriptArg, ScriptInfo},
    schema::JsonKind,
};

/// What a program is started with, apart from its context.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Invocation {
    /// Words after `run`.
    pub(crate) words: Vec<OsString>,
    /// Variables.
    pub(crate) variables: Vec<(String, String)>,
    /// Standard input; none where the tool has no argument there.
    pub(crate) stdin: Option<Vec<u8>>,
    /// The argument with the longest value outside standard input, and the value's length in bytes.
    pub(crate) longest: Option<(String, usize)>,
}

impl Invocation {
    /// Lays out `values`, which fit the tool's schema.
    ///
    /// # Errors
    /// A text for the model when a value can't be passed to any program.
    pub(crate) fn new(info: &ScriptInfo, values: &Map<String, Value>) -> Result<Self, String> {
        let mut invocation = Self::default();
        let mut blocks = Vec::new();
        for arg in &info.args {
            let texts = texts(arg, values.get(&arg.name));
            if arg.mode != Mode::Stdin && texts.iter().any(|text| text.contains('\0')) {
                return Err(format!(
                    "argument {:?} contains a NUL character, which can't be passed to a program; leave it out",
                    arg.name
                ));
            }
            if arg.mode != Mode::Stdin
                && let Some(length) = texts.iter().map(String::len).max()
                && invocation.longest.as_ref().is_none_or(|(_, longest)| length > *longest)
            {
                invocation.longest = Some((arg.name.clone(), length));
            }
            match arg.mode {
                Mode::Positional => invocation.words.extend(texts.into_iter().map(OsString::from)),
                Mode::DashDashSpace => {
                    for text in texts {
                        invocation.words.push(format!("--{}", arg.name).into());
                        invocation.words.push(text.into());
                    }
                }
                Mode::DashDashEqual => {
                    invocation.words.extend(texts.iter().map(|text| format!("--{}={text}", arg.name).into()));
                }
                Mode::Stdin => {
                    invocation.stdin.get_or_insert_default();
                    blocks.extend(texts);
                }
                Mode::Env => {
                    let value = match (arg.arity, values.get(&arg.name)) {
                        (_, None) => continue,
                        (Arity::Multiple, Some(all)) => all.to_string(),
                        (_, Some(_)) => texts.into_iter().next().unwrap_or_default(),
                    };
                    invocation.variables.push((arg.variable(), value));
                }
            }
        }
        if let Some(stdin) = &mut invocation.stdin {
            *stdin = blocks.join("\n\n").into_bytes();
        }
        Ok(invocation)
    }
}

/// The texts of an argument's values, in order.
fn texts(arg: &ScriptArg, value: Option<&Value>) -> Vec<String> {
    match (arg.arity, value) {
        (_, None) => Vec::new(),
        (Arity::Multiple, Some(Value::Array(values))) => {
            values.iter().map(|value| text(arg, value)).collect()
        }
        (_, Some(value)) => vec![text(arg, value)],
    }
}

/// Strings are passed as they are, everything else as compact JSON.
fn text(arg: &ScriptArg, value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        // JSON Schema takes 3.0 for an integer; programs don't.
        Value::Number(number) if JsonKind::of(arg) == Some(JsonKind::Integer) => {
            let text = number.to_string();
            text.strip_suffix(".0").map_or(text.clone(), str::to_owned)
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn info(args: &[(&str, &str, &str, &str)]) -> ScriptInfo {
        let args: Vec<Value> = args
            .iter()
            .map(|(name, kind, arity, mode)| {
                json!({"name": name, "description": "", "type": kind, "backing_type": kind,
                    "arity": arity, "mode": mode})
            })
            .collect();
        let document = json!({"slug": "s", "description": "d", "args": args});
        ScriptInfo::parse(document.to_string().as_bytes()).expect("valid")
    }

    fn lay_out(info: &ScriptInfo, values: Value) -> Result<Invocation, String> {
        Invocation::new(info, values.as_object().expect("an object"))
    }

    #[test]
    fn every_mode_has_its_place_and_order() {
        let info = info(&[
            ("a", "string", "single", "positional"),
            ("b", "number", "optional", "dashdashspace"),
            ("c", "boolean", "multiple", "dashdashequal"),
            ("d", "string", "multiple", "stdin"),
            ("e", "object", "single", "stdin"),
            ("f-g", "string", "optional", "env"),
            ("h", "integer", "multiple", "env"),
            ("i", "integer", "multiple", "positional"),
        ]);
        let all = lay_out(
            &info,
            json!({"i": [3.0, 4], "h": [1, 2], "f-g": "v w", "e": {"k": [1]}, "d": ["x", "y"],
                "c": [true, false], "b": 1.5, "a": "-z"}),
        )
        .expect("laid out");
        assert_eq!(all.words, ["-z", "--b", "1.5", "--c=true", "--c=false", "3", "4"]);
        assert_eq!(
            all.variables,
            [("F_G".to_owned(), "v w".to_owned()), ("H".to_owned(), "[1,2]".to_owned())]
        );
        assert_eq!(all.stdin.as_deref(), Some("x\n\ny\n\n{\"k\":[1]}".as_bytes()));
        let few = lay_out(&info, json!({"a": "", "e": {}})).expect("laid out");
        assert_eq!(few.words, [""]);
        assert!(few.variables.is_empty());
    }

    #[test]
    fn nul_is_refused_where_no_program_could_get_it() {
        for mode in ["positional", "dashdashspace", "dashdashequal", "env"] {
            let refused = lay_out(&info(&[("a", "string", "single", mode)]), json!({"a": "x\u{0}y"}));
            assert!(refused.expect_err("refused").contains("\"a\" contains a NUL"));
        }
        let stdin = lay_out(&info(&[("a", "string", "single", "stdin")]), json!({"a": "x\u{0}y"}));
        assert_eq!(stdin.expect("laid out").stdin.as_deref(), Some(b"x\0y".as_slice()));
    }
}
