//! JSON objects that keep their keys in order and their values as text.
//!
//! A provider's message must go back exactly as it came: numbers, escapes and fields that nobody here
//! knows included. So requests are put together from slices of JSON text, never from parsed values.

use std::fmt;

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{MapAccess, Visitor},
    ser::SerializeMap,
};
use serde_json::value::RawValue;

/// An object whose keys stay in the order in which they were set and whose values are JSON text.
#[derive(Debug, Default)]
pub(super) struct Object(Vec<(String, Box<RawValue>)>);

impl Object {
    /// Reads an object from JSON text; `None` when the text is something else.
    pub(super) fn parse(text: &RawValue) -> Option<Self> {
        serde_json::from_str(text.get()).ok()
    }

    /// The value of a key; the last one, should the text repeat the key.
    pub(super) fn get(&self, key: &str) -> Option<&RawValue> {
        self.0.iter().rev().find(|(name, _)| name == key).map(|(_, value)| &**value)
    }

    /// Whether a key is absent or null.
    pub(super) fn lacks(&self, key: &str) -> bool {
        self.get(key).is_none_or(|value| value.get() == "null")
    }

    /// Sets a key, in its old place if it has one.
    pub(super) fn set(&mut self, key: &str, value: &(impl Serialize + ?Sized)) {
        let value = raw(value);
        match self.0.iter_mut().rev().find(|(name, _)| name == key) {
            Some((_, old)) => *old = value,
            None => self.0.push((key.to_owned(), value)),
        }
    }

    /// Sets a key and returns the object, for building one in an expression.
    pub(super) fn with(mut self, key: &str, value: &(impl Serialize + ?Sized)) -> Self {
        self.set(key, value);
        self
    }

    /// Removes a key.
    pub(super) fn remove(&mut self, key: &str) {
        self.0.retain(|(name, _)| name != key);
    }
}

impl Serialize for Object {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (key, value) in &self.0 {
            map.serialize_entry(key, value)?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for Object {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Object;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Object, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Object(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// A value as JSON text.
pub(super) fn raw(value: &(impl Serialize + ?Sized)) -> Box<RawValue> {
    serde_json::value::to_raw_value(value)
        .expect("text, numbers and JSON values with string keys have a JSON form")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_numbers_and_escapes_survive() {
        let text = r#"{"z":1.0000000000000000001,"a":"\u00e9","m":{"y":1,"b":2}}"#;
        let object: Object = serde_json::from_str(text).expect("an object");
        assert_eq!(serde_json::to_string(&object).expect("JSON"), text);
    }

    #[test]
    fn a_key_keeps_its_place_when_set_again() {
        let mut object = Object::default().with("b", &1).with("a", &2);
        object.set("b", "new");
        object.remove("missing");
        assert_eq!(raw(&object).get(), r#"{"b":"new","a":2}"#);
    }
}
