//! Which mail starts a run.

use serde::{Deserialize, Serialize};

use crate::scope::Relation;

/// A class of mail, by where it comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum WakeClass {
    /// A client, on behalf of a person or a program.
    User,
    /// What a tool of the session asked for: events of sessions that it watches.
    Tool,
    /// A session above it.
    Parent,
    /// A session below it.
    Child,
    /// Any other session of its owner.
    Peer,
}

impl WakeClass {
    /// All classes.
    pub const ALL: [Self; 5] = [Self::User, Self::Tool, Self::Parent, Self::Child, Self::Peer];

    /// The word for it in JSON and columns.
    pub fn word(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Tool => "tool",
            Self::Parent => "parent",
            Self::Child => "child",
            Self::Peer => "peer",
        }
    }

    /// Reads the word back.
    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|class| class.word() == word)
    }

    /// The class of mail that a session sends to one that is `recipient` to it.
    pub fn from_session(recipient: Relation) -> Self {
        match recipient {
            Relation::Descendant => Self::Parent,
            Relation::Ancestor => Self::Child,
            Relation::Own | Relation::Peer => Self::Peer,
        }
    }
}

/// What an agent says of mail that reaches its sessions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waking {
    /// Classes of mail that start a run; other mail waits, and is told with what does.
    pub wake_on: Vec<WakeClass>,
    /// Whether mail of any class resumes a session that is paused.
    pub resume_on_any_mail: bool,
}

impl Default for Waking {
    fn default() -> Self {
        Self { wake_on: wake_on(), resume_on_any_mail: false }
    }
}

/// The classes that wake unless an agent says otherwise: all but peers.
pub fn wake_on() -> Vec<WakeClass> {
    vec![WakeClass::User, WakeClass::Tool, WakeClass::Parent, WakeClass::Child]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_what_json_has() {
        for class in WakeClass::ALL {
            assert_eq!(serde_json::to_value(class).ok(), Some(class.word().into()));
            assert_eq!(WakeClass::parse(class.word()), Some(class));
        }
        assert_eq!(WakeClass::parse("stranger"), None);
    }

    #[test]
    fn a_letters_class_is_what_its_sender_is_to_the_recipient() {
        let classes = [Relation::Own, Relation::Ancestor, Relation::Descendant, Relation::Peer]
            .map(WakeClass::from_session);
        assert_eq!(classes, [WakeClass::Peer, WakeClass::Child, WakeClass::Parent, WakeClass::Peer]);
    }
}
