//! Streamed answers of chat completions APIs, folded into the message that the same API would have sent whole.

use holdfast_engine::{
    content::Usage,
    model::{Flavor, ModelAnswer},
};
use serde_json::{Map, Value};

use super::{
    error::Failure,
    keys::ApiKey,
    openai_answer::{answer, usage},
    sse::Event,
    wire::raw,
};

/// Collects the chunks of one answer.
#[derive(Debug, Default)]
pub(super) struct Fold {
    message: Map<String, Value>,
    calls: Vec<Value>,
    /// For each call the index that the provider gives it.
    indices: Vec<Option<u64>>,
    usage: Option<Usage>,
    stop_reason: Option<String>,
    done: bool,
    any_choice: bool,
}

impl Fold {
    /// Takes an event; gives text to `deltas`.
    pub(super) fn event(
        &mut self,
        event: &Event,
        key: Option<&ApiKey>,
        deltas: &(dyn Fn(&str) + Send + Sync),
    ) -> Result<(), Failure> {
        if event.data.trim() == "[DONE]" {
            self.done = true;
            return Ok(());
        }
        if event.data.trim().is_empty() {
            return Ok(());
        }
        let mut chunk: Value =
            serde_json::from_str(&event.data).map_err(|error| super::unreadable(&error))?;
        if let Some(error) = chunk.get("error").filter(|error| !error.is_null()) {
            return Err(Failure::reported(error, key));
        }
        if let Some(counted) = usage(&chunk["usage"]).or_else(|| usage(&chunk["choices"][0]["usage"])) {
            self.usage = Some(counted);
        }
        // Whoever ignores that one answer was asked for may send others beside it.
        let choices = chunk.get_mut("choices").and_then(Value::as_array_mut);
        let first =
            choices.into_iter().flatten().find(|choice| choice["index"].as_u64().unwrap_or_default() == 0);
        let Some(choice) = first else { return Ok(()) };
        self.any_choice = true;
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.stop_reason = Some(reason.to_owned());
        }
        match choice.get_mut("delta").map(Value::take) {
            Some(Value::Object(delta)) => self.delta(delta, deltas),
            _ => Ok(()),
        }
    }

    /// Whether the answer is there and only its usage may follow.
    pub(super) fn complete(&self) -> bool {
        self.done || self.stop_reason.is_some()
    }

    /// Whether nothing can follow.
    pub(super) fn ended(&self) -> bool {
        self.done
    }

    /// The answer, once it is complete.
    pub(super) fn finish(mut self, flavor: Flavor) -> Result<ModelAnswer, Failure> {
        if !self.any_choice {
            return Err(Failure::malformed("its stream has no choice"));
        }
        self.message.entry("role").or_insert_with(|| "assistant".into());
        self.message.entry("content").or_insert(Value::Null);
        if !self.calls.is_empty() {
            self.message.insert("tool_calls".to_owned(), Value::Array(self.calls));
        }
        answer(raw(&self.message), flavor, self.stop_reason, self.usage)
    }

    fn delta(
        &mut self,
        delta: Map<String, Value>,
        deltas: &(dyn Fn(&str) + Send + Sync),
    ) -> Result<(), Failure> {
        for (name, value) in delta {
            match value {
                Value::Null => {}
                Value::Array(pieces) if name == "tool_calls" => {
                    pieces.into_iter().try_for_each(|piece| self.call(piece))?;
                }
                value => {
                    if name == "content" {
                        text_pieces(&value, deltas);
                    }
                    join(self.message.entry(name.clone()).or_insert(Value::Null), &name, value);
                }
            }
        }
        Ok(())
    }

    /// Adds a piece to the call that it belongs to. Pieces name their call by index; some servers give
    /// every call the index 0 or none, and then a new id with a name begins another call.
    fn call(&mut self, piece: Value) -> Result<(), Failure> {
        let Value::Object(mut piece) = piece else {
            return Err(Failure::malformed("a piece of its tool calls is not a JSON object"));
        };
        let index = piece.remove("index").and_then(|index| index.as_u64());
        let id = piece.get("id").and_then(Value::as_str).unwrap_or_default();
        let named = piece
            .get("function")
            .and_then(|function| function["name"].as_str())
            .is_some_and(|name| !name.is_empty());
        let place = match index {
            Some(_) => self.indices.iter().rposition(|known| *known == index),
            None if named => None,
            None => self.calls.len().checked_sub(1),
        };
        let continues = place.filter(|place| {
            let known = self.calls[*place]["id"].as_str().unwrap_or_default();
            !named || id.is_empty() || known.is_empty() || known == id
        });
        let place = continues.unwrap_or_else(|| {
            self.calls.push(Value::Object(Map::new()));
            self.indices.push(index);
            self.calls.len() - 1
        });
        for (name, value) in piece {
            let call = self.calls[place].as_object_mut().expect("calls are made as objects");
            join(call.entry(name.clone()).or_insert(Value::Null), &name, value);
        }
        Ok(())
    }
}

fn text_pieces(content: &Value, deltas: &(dyn Fn(&str) + Send + Sync)) {
    match content {
        Value::String(text) if !text.is_empty() => deltas(text),
        Value::Array(parts) => {
            let texts =
                parts.iter().filter(|part| part["type"] == "text").filter_map(|part| part["text"].as_str());
            texts.filter(|text| !text.is_empty()).for_each(deltas);
        }
        _ => {}
    }
}

/// Adds a delta to what is there: text grows, objects are joined by key, list items by their `index` or
/// at the end, and what names or classifies is replaced.
fn join(old: &mut Value, field: &str, new: Value) {
    match (old, new) {
        (_, Value::Null) => {}
        (Value::String(old), Value::String(new)) => match field {
            "role" | "type" | "id" | "format" | "index" => {
                if old.is_empty() {
                    *old = new;
                }
            }
            // Some servers repeat the whole name in every piece.
            "name" if *old == new => {}
            _ => old.push_str(&new),
        },
        (Value::Object(old), Value::Object(new)) => {
            for (name, value) in new {
                join(old.entry(name.clone()).or_insert(Value::Null), &name, value);
            }
        }
        (Value::Array(old), Value::Array(new)) => new.into_iter().for_each(|item| join_item(old, item)),
        // A content that began as text and goes on as parts, or the other way round.
        (Value::Array(old), Value::String(text)) => {
            join_item(old, serde_json::json!({ "type": "text", "text": text }))
        }
        (old @ Value::String(_), Value::Array(new)) => {
            let text = old.take();
            let begun = text.as_str().is_some_and(|text| !text.is_empty());
            let mut parts =
                if begun { vec![serde_json::json!({ "type": "text", "text": text })] } else { Vec::new() };
            new.into_iter().for_each(|item| join_item(&mut parts, item));
            *old = Value::Array(parts);
        }
        (old, new) => *old = new,
    }
}

/// A piece with an index belongs to the item with that index and type; one without belongs to the last item
/// if both are text or thinking.
fn join_item(items: &mut Vec<Value>, piece: Value) {
    let same = |item: &Value| item["index"] == piece["index"] && item["type"] == piece["type"];
    let known = if piece["index"].is_null() {
        let grows = matches!(piece["type"].as_str(), Some("text" | "thinking"));
        items.len().checked_sub(1).filter(|last| grows && same(&items[*last]))
    } else {
        items.iter().position(same)
    };
    match known {
        Some(known) => join(&mut items[known], "", piece),
        None => items.push(piece),
    }
}
