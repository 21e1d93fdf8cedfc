//! The ids under which tool calls go out.
//!
//! Providers disagree about ids: some leave them empty or repeat them, some accept only their own
//! shape. Within a request every call of an assistant message gets one id that is unique there and
//! that its tool message repeats. What an id becomes depends only on the messages before it, so a
//! request that continues another one begins with the same bytes.

use std::collections::HashSet;

use holdfast_engine::model::{Flavor, RequestedCall};

/// The longest id that OpenAI takes, in characters.
const MAX_SHORT: usize = 40;

/// What a provider asks of ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    /// Any text, unique within a message.
    Any,
    /// Any text of at most [`MAX_SHORT`] characters, unique within a message.
    Short,
    /// Nine letters and digits, unique within a message.
    NineAlphanumeric,
    /// Letters, digits, `_` and `-`, unique within the request.
    Plain,
}

/// Gives out ids while a request is written from front to back.
#[derive(Debug)]
pub(super) struct CallIds {
    rule: Rule,
    /// Ids that may not be given again, from before the current message.
    spent: HashSet<String>,
    /// The current assistant message's calls: the engine's id, the id that went out, and whether a
    /// tool message has used it.
    current: Vec<(String, String, bool)>,
}

impl CallIds {
    /// For a request to a provider of a flavour.
    pub(super) fn new(flavor: Flavor) -> Self {
        let rule = match flavor {
            Flavor::MistralV1 => Rule::NineAlphanumeric,
            Flavor::Anthropic => Rule::Plain,
            Flavor::OpenAIv1 => Rule::Short,
            Flavor::OpenAI | Flavor::KimiV1 | Flavor::OpenRouter | Flavor::Ollama => Rule::Any,
        };
        Self { rule, spent: HashSet::new(), current: Vec::new() }
    }

    /// Begins an assistant message: the ids of its calls, in order.
    pub(super) fn begin(&mut self, calls: &[RequestedCall]) -> Vec<String> {
        let earlier = std::mem::take(&mut self.current);
        if self.rule == Rule::Plain {
            self.spent.extend(earlier.into_iter().map(|(_, id, _)| id));
        }
        let mut taken = self.spent.clone();
        let mut ids = Vec::with_capacity(calls.len());
        for (position, call) in calls.iter().enumerate() {
            let id = (0..)
                .map(|repeat| self.rule.shape(&call.provider_id, position, repeat))
                .find(|id| !taken.contains(id))
                .expect("every repeat has another shape and finitely many are taken");
            taken.insert(id.clone());
            self.current.push((call.provider_id.clone(), id.clone(), false));
            ids.push(id);
        }
        ids
    }

    /// The id of the next tool message that answers a call known to the engine as `provider_id`.
    pub(super) fn answer(&mut self, provider_id: &str) -> String {
        let open = self.current.iter_mut().find(|(given, _, answered)| given == provider_id && !answered);
        match open {
            Some((_, id, answered)) => {
                *answered = true;
                id.clone()
            }
            None => self.rule.shape(provider_id, 0, 0),
        }
    }
}

impl Rule {
    fn shape(self, id: &str, position: usize, repeat: u32) -> String {
        let base = match (self, id.is_empty()) {
            (_, true) => format!("call_{position}"),
            (Self::Plain, false) => id
                .chars()
                .map(|c| if c.is_ascii_alphanumeric() || c == '_' || c == '-' { c } else { '_' })
                .collect(),
            (Self::Any | Self::Short | Self::NineAlphanumeric, false) => id.to_owned(),
        };
        let fits = base.len() == 9 && base.bytes().all(|byte| byte.is_ascii_alphanumeric());
        match self {
            Self::NineAlphanumeric if fits && repeat == 0 => base,
            Self::NineAlphanumeric => nine_characters(&base, repeat),
            Self::Any | Self::Short | Self::Plain => {
                let id = if repeat == 0 { base.clone() } else { format!("{base}_{}", repeat + 1) };
                let long = self == Self::Short && id.chars().count() > MAX_SHORT;
                if long { format!("call_{}", nine_characters(&base, repeat)) } else { id }
            }
        }
    }
}

/// Nine letters and digits that stand for an id (FNV-1a, in base 62).
fn nine_characters(id: &str, repeat: u32) -> String {
    const DIGITS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
    let bytes = id.bytes().chain(repeat.to_le_bytes());
    let mut hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let mut text = String::with_capacity(9);
    for _ in 0..9 {
        let digit = usize::try_from(hash % 62).expect("less than 62");
        text.push(char::from(DIGITS[digit]));
        hash /= 62;
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn calls(ids: &[&str]) -> Vec<RequestedCall> {
        ids.iter()
            .map(|id| RequestedCall { provider_id: (*id).into(), name: "t".into(), arguments: "{}".into() })
            .collect()
    }

    #[test]
    fn fitting_ids_stay() {
        let mut ids = CallIds::new(Flavor::OpenAI);
        assert_eq!(ids.begin(&calls(&["functions.a:0", "b"])), ["functions.a:0", "b"]);
        assert_eq!(ids.answer("b"), "b");
    }

    #[test]
    fn repeated_and_empty_ids_become_unique_and_answers_follow() {
        let mut ids = CallIds::new(Flavor::Ollama);
        let out = ids.begin(&calls(&["", "x", "x", ""]));
        assert_eq!(out, ["call_0", "x", "x_2", "call_3"]);
        let answers: Vec<_> = ["", "x", "x", ""].iter().map(|id| ids.answer(id)).collect();
        assert_eq!(answers, out);
    }

    #[test]
    fn openai_gets_at_most_forty_characters() {
        let (fits, long) = ("x".repeat(40), "y".repeat(41));
        let mut ids = CallIds::new(Flavor::OpenAIv1);
        let out = ids.begin(&calls(&[&fits, &fits, &long, &long]));
        assert_eq!(out[0], fits);
        assert!(out.iter().all(|id| id.len() <= 40), "{out:?}");
        assert_eq!(HashSet::<&String>::from_iter(&out).len(), 4, "{out:?}");
        assert_eq!([ids.answer(&long), ids.answer(&long)], [out[2].clone(), out[3].clone()]);
        assert_eq!(CallIds::new(Flavor::OpenRouter).begin(&calls(&[&long])), [long]);
    }

    #[test]
    fn mistral_gets_nine_characters() {
        let mut ids = CallIds::new(Flavor::MistralV1);
        let out = ids.begin(&calls(&["D681PevKs", "call_very_long", "call_very_long"]));
        assert_eq!(out[0], "D681PevKs");
        assert!(
            out.iter().all(|id| id.len() == 9 && id.bytes().all(|b| b.is_ascii_alphanumeric())),
            "{out:?}"
        );
        assert_ne!(out[1], out[2]);
        assert_eq!(CallIds::new(Flavor::MistralV1).begin(&calls(&["a", "call_very_long"]))[1], out[1]);
    }

    #[test]
    fn anthropic_ids_are_plain_and_unique_in_the_request() {
        let mut ids = CallIds::new(Flavor::Anthropic);
        assert_eq!(ids.begin(&calls(&["functions.a:0"])), ["functions_a_0"]);
        assert_eq!(ids.answer("functions.a:0"), "functions_a_0");
        assert_eq!(ids.begin(&calls(&["functions.a:0"])), ["functions_a_0_2"]);
        assert_eq!(ids.answer("functions.a:0"), "functions_a_0_2");
    }
}
