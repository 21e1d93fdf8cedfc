//! How sessions of one owner are related, and how far an agent may reach among them.

use serde::{Deserialize, Serialize};

/// What another session is to this one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Relation {
    /// This session itself.
    Own,
    /// Its parent, its parent's parent and so on.
    Ancestor,
    /// A child of it, a child's child and so on.
    Descendant,
    /// Any other session of the same owner.
    Peer,
}

/// Which sessions an agent may write to, interrupt or watch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Scope {
    /// Its own session.
    Own,
    /// Its own and what is below it.
    Children,
    /// What is above it, its own and what is below it.
    #[default]
    Subtree,
    /// Every session of its owner.
    All,
}

impl Scope {
    /// Whether a session of this relation is in reach.
    pub fn allows(self, relation: Relation) -> bool {
        match relation {
            Relation::Own => true,
            Relation::Descendant => self != Self::Own,
            Relation::Ancestor => matches!(self, Self::Subtree | Self::All),
            Relation::Peer => self == Self::All,
        }
    }

    /// The word for it, as JSON has it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Own => "own",
            Self::Children => "children",
            Self::Subtree => "subtree",
            Self::All => "all",
        }
    }
}

/// Which sessions an agent may read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum IntrospectionScope {
    /// What is above its own session.
    ParentsOnly,
    /// What is below its own session.
    ChildrenOnly,
    /// What is above it, its own and what is below it.
    #[default]
    Subtree,
    /// Every session of its owner.
    All,
}

impl IntrospectionScope {
    /// Whether a session of this relation may be read.
    pub fn allows(self, relation: Relation) -> bool {
        match relation {
            Relation::Own => matches!(self, Self::Subtree | Self::All),
            Relation::Ancestor => self != Self::ChildrenOnly,
            Relation::Descendant => self != Self::ParentsOnly,
            Relation::Peer => self == Self::All,
        }
    }

    /// The word for it, as JSON has it.
    pub fn word(self) -> &'static str {
        match self {
            Self::ParentsOnly => "parents-only",
            Self::ChildrenOnly => "children-only",
            Self::Subtree => "subtree",
            Self::All => "all",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RELATIONS: [Relation; 4] =
        [Relation::Own, Relation::Ancestor, Relation::Descendant, Relation::Peer];

    #[test]
    fn scopes_reach_as_far_as_their_names_say() {
        let reach = |scope: Scope| RELATIONS.map(|relation| scope.allows(relation));
        assert_eq!(reach(Scope::Own), [true, false, false, false]);
        assert_eq!(reach(Scope::Children), [true, false, true, false]);
        assert_eq!(reach(Scope::Subtree), [true, true, true, false]);
        assert_eq!(reach(Scope::All), [true; 4]);
        let reads = |scope: IntrospectionScope| RELATIONS.map(|relation| scope.allows(relation));
        assert_eq!(reads(IntrospectionScope::ParentsOnly), [false, true, false, false]);
        assert_eq!(reads(IntrospectionScope::ChildrenOnly), [false, false, true, false]);
        assert_eq!(reads(IntrospectionScope::Subtree), [true, true, true, false]);
        assert_eq!(reads(IntrospectionScope::All), [true; 4]);
    }

    #[test]
    fn words_are_what_json_has() {
        for scope in [Scope::Own, Scope::Children, Scope::Subtree, Scope::All] {
            assert_eq!(serde_json::to_value(scope).ok(), Some(scope.word().into()));
        }
        use IntrospectionScope::{All, ChildrenOnly, ParentsOnly, Subtree};
        for scope in [ParentsOnly, ChildrenOnly, Subtree, All] {
            assert_eq!(serde_json::to_value(scope).ok(), Some(scope.word().into()));
        }
    }
}
