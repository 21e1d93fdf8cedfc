//! Streamed answers of Anthropic's messages API, folded into the content that it would have sent whole.

use holdfast_engine::model::ModelAnswer;
use serde_json::{Map, Value, value::RawValue};

use super::{
    anthropic_answer::{answer, usage},
    error::Failure,
    fit,
    keys::ApiKey,
    sse::Event,
    wire::{Object, raw},
};

/// Collects the events of one answer.
#[derive(Debug, Default)]
pub(super) struct Fold {
    blocks: Vec<Block>,
    usage: Map<String, Value>,
    stop_reason: Option<String>,
    begun: bool,
    done: bool,
}

#[derive(Debug)]
struct Block {
    fields: Map<String, Value>,
    /// The input's JSON text as it comes in pieces.
    input: String,
}

impl Fold {
    /// Takes an event; gives text to `deltas`.
    pub(super) fn event(
        &mut self,
        event: &Event,
        key: Option<&ApiKey>,
        deltas: &(dyn Fn(&str) + Send + Sync),
    ) -> Result<(), Failure> {
        if event.data.trim().is_empty() {
            return Ok(());
        }
        let mut data: Value = serde_json::from_str(&event.data).map_err(|error| super::unreadable(&error))?;
        let kind = data["type"].as_str().unwrap_or(&event.name).to_owned();
        match kind.as_str() {
            "message_start" => {
                self.begun = true;
                self.count(data["message"]["usage"].take());
            }
            "content_block_start" => {
                let Value::Object(fields) = data["content_block"].take() else {
                    return Err(Failure::malformed("a block of its stream is not a JSON object"));
                };
                if index(&data) != Some(self.blocks.len()) {
                    return Err(Failure::malformed("the blocks of its stream are out of order"));
                }
                if let Some(text) = fields.get("text").and_then(Value::as_str).filter(|text| !text.is_empty())
                {
                    deltas(text);
                }
                self.blocks.push(Block { fields, input: String::new() });
            }
            "content_block_delta" => {
                let Some(block) = index(&data).and_then(|index| self.blocks.get_mut(index)) else {
                    return Err(Failure::malformed("its stream continues a block that never began"));
                };
                if let Value::Object(delta) = data["delta"].take() {
                    block.delta(delta, deltas);
                }
            }
            "message_delta" => {
                if let Some(reason) = data["delta"]["stop_reason"].as_str() {
                    self.stop_reason = Some(reason.to_owned());
                }
                self.count(data["usage"].take());
            }
            "message_stop" => self.done = true,
            "error" => return Err(Failure::reported(&data["error"], key)),
            _ => {}
        }
        Ok(())
    }

    /// Whether the answer is there.
    pub(super) fn complete(&self) -> bool {
        self.done || self.stop_reason.is_some()
    }

    /// Whether nothing can follow.
    pub(super) fn ended(&self) -> bool {
        self.done
    }

    /// The answer, once it is complete.
    pub(super) fn finish(self) -> Result<ModelAnswer, Failure> {
        if !self.begun {
            return Err(Failure::malformed("its stream has no message"));
        }
        let said: Vec<Option<String>> =
            self.blocks.iter().filter(|block| block.is_call()).map(Block::said).collect();
        let blocks: Vec<Box<RawValue>> = self.blocks.into_iter().map(Block::finish).collect();
        let mut answer = answer(raw(&blocks), self.stop_reason, usage(&Value::Object(self.usage)))?;
        // The arguments in the model's own spelling, which the blocks can't hold if it is no JSON object.
        for (call, said) in answer.calls.iter_mut().zip(said) {
            if let Some(said) = said {
                call.arguments = said;
            }
        }
        Ok(answer)
    }

    /// Later counts replace earlier ones; the API's are cumulative.
    fn count(&mut self, usage: Value) {
        if let Value::Object(usage) = usage {
            self.usage.extend(usage.into_iter().filter(|(_, value)| !value.is_null()));
        }
    }
}

impl Block {
    fn delta(&mut self, delta: Map<String, Value>, deltas: &(dyn Fn(&str) + Send + Sync)) {
        for (name, value) in delta {
            match (name.as_str(), value) {
                ("type", _) | (_, Value::Null) => {}
                ("partial_json", Value::String(piece)) => self.input.push_str(&piece),
                ("citation", citation) => {
                    let list = self.fields.entry("citations").or_insert(Value::Null);
                    match list {
                        Value::Array(citations) => citations.push(citation),
                        other => *other = Value::Array(vec![citation]),
                    }
                }
                (_, Value::String(piece)) => {
                    if name == "text" && !piece.is_empty() {
                        deltas(&piece);
                    }
                    match self.fields.entry(name).or_insert(Value::Null) {
                        Value::String(text) => text.push_str(&piece),
                        other => *other = Value::String(piece),
                    }
                }
                (_, value) => {
                    self.fields.insert(name, value);
                }
            }
        }
    }

    fn is_call(&self) -> bool {
        self.fields.get("type").is_some_and(|kind| kind == "tool_use")
    }

    fn said(&self) -> Option<String> {
        (!self.input.is_empty()).then(|| self.input.clone())
    }

    fn finish(self) -> Box<RawValue> {
        let mut block = Object::default();
        for (name, value) in &self.fields {
            block.set(name, value);
        }
        if !self.input.is_empty() {
            block.set("input", &fit::arguments(&self.input));
        }
        raw(&block)
    }
}

fn index(data: &Value) -> Option<usize> {
    usize::try_from(data["index"].as_u64()?).ok()
}
