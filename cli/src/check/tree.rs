//! Which agent calls which, as a tree.

use std::collections::{HashMap, HashSet};

use holdfast_tools::LoadedAgent;
use serde_json::{Value, json};

/// How deep the tree goes; what is deeper starts a tree of its own.
const DEEPEST: usize = 32;

/// An agent in the tree.
pub(super) struct Branch {
    slug: String,
    what: What,
}

/// What is below an agent in the tree.
enum What {
    /// The agents that it calls.
    Helpers(Vec<Branch>),
    /// Itself: it stands further up on the same branch.
    Cycle,
    /// Nothing here: it has a place of its own in the tree.
    Elsewhere,
}

/// The trees of all agents: those that nobody else calls are roots, and as many others as it takes. Each
/// agent's helpers are shown in one place.
pub(super) fn of(loaded: &[LoadedAgent]) -> Vec<Branch> {
    let of = |one: &LoadedAgent| one.agent.helpers.iter().map(|helper| helper.slug.clone()).collect();
    grow(&loaded.iter().map(|one| (one.agent.slug.clone(), of(one))).collect::<Vec<_>>())
}

fn grow(calls: &[(String, Vec<String>)]) -> Vec<Branch> {
    let others = |(slug, helpers): &'_ (String, Vec<String>)| -> Vec<String> {
        helpers.iter().filter(|helper| *helper != slug).cloned().collect()
    };
    let called: HashSet<String> = calls.iter().flat_map(others).collect();
    let mut growing = Growing {
        calls: calls.iter().map(|(slug, helpers)| (slug.as_str(), helpers.as_slice())).collect(),
        above: Vec::new(),
        shown: HashSet::new(),
    };
    let (callees, roots): (Vec<_>, Vec<_>) =
        calls.iter().map(|(slug, _)| slug.as_str()).partition(|slug| called.contains(*slug));
    let mut trees = Vec::new();
    for slug in roots.into_iter().chain(callees) {
        if !growing.shown.contains(slug) {
            trees.push(growing.branch(slug));
        }
    }
    trees
}

struct Growing<'a> {
    calls: HashMap<&'a str, &'a [String]>,
    above: Vec<&'a str>,
    shown: HashSet<&'a str>,
}

impl<'a> Growing<'a> {
    fn branch(&mut self, slug: &'a str) -> Branch {
        let what = if self.above.contains(&slug) {
            What::Cycle
        } else if self.above.len() >= DEEPEST || !self.shown.insert(slug) {
            What::Elsewhere
        } else {
            self.above.push(slug);
            let helpers = self.calls.get(slug).copied().unwrap_or_default();
            let helpers = helpers.iter().map(|helper| self.branch(helper)).collect();
            self.above.pop();
            What::Helpers(helpers)
        };
        Branch { slug: slug.to_owned(), what }
    }
}

/// A line for each agent, indented below those that call it.
pub(super) fn as_text(trees: &[Branch]) -> Vec<String> {
    fn add(branch: &Branch, depth: usize, lines: &mut Vec<String>) {
        let mark = match branch.what {
            What::Helpers(_) => "",
            What::Cycle => " (cycle)",
            What::Elsewhere => " (shown elsewhere)",
        };
        lines.push(format!("{}{}{mark}", "  ".repeat(depth), branch.slug));
        if let What::Helpers(helpers) = &branch.what {
            helpers.iter().for_each(|helper| add(helper, depth + 1, lines));
        }
    }
    let mut lines = Vec::new();
    trees.iter().for_each(|tree| add(tree, 0, &mut lines));
    lines
}

/// The same as JSON: `slug` with `helpers`, or with `cycle` or `elsewhere` true.
pub(super) fn as_json(trees: &[Branch]) -> Value {
    let one = |branch: &Branch| match &branch.what {
        What::Helpers(helpers) => json!({"slug": branch.slug, "helpers": as_json(helpers)}),
        What::Cycle => json!({"slug": branch.slug, "cycle": true}),
        What::Elsewhere => json!({"slug": branch.slug, "elsewhere": true}),
    };
    trees.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn calls(of: &[(&str, &[&str])]) -> Vec<(String, Vec<String>)> {
        let texts = |slugs: &[&str]| slugs.iter().map(|slug| (*slug).to_owned()).collect();
        of.iter().map(|(slug, helpers)| ((*slug).to_owned(), texts(helpers))).collect()
    }

    #[test]
    fn helpers_are_below_those_that_call_them_and_cycles_are_marked() {
        let trees = grow(&calls(&[
            ("executor", &["planner", "tester"]),
            ("boss", &["planner", "tester"]),
            ("planner", &["executor", "planner"]),
            ("tester", &[]),
            ("alone", &["alone"]),
        ]));
        let expected = [
            "boss",
            "  planner",
            "    executor",
            "      planner (cycle)",
            "      tester",
            "    planner (cycle)",
            "  tester (shown elsewhere)",
            "alone",
            "  alone (cycle)",
        ];
        assert_eq!(as_text(&trees), expected);
        let boss = &as_json(&trees)[0];
        assert_eq!(boss["slug"], "boss");
        assert_eq!(boss["helpers"][0]["helpers"][1], json!({"slug": "planner", "cycle": true}));
        assert_eq!(boss["helpers"][1], json!({"slug": "tester", "elsewhere": true}));
        assert_eq!(boss["helpers"][0]["helpers"][0]["helpers"][1], json!({"slug": "tester", "helpers": []}));
    }

    #[test]
    fn agents_that_only_call_each_other_are_shown_too() {
        let trees = grow(&calls(&[("a", &["b"]), ("b", &["a"])]));
        assert_eq!(as_text(&trees), ["a", "  b", "    a (cycle)"]);
    }

    #[test]
    fn a_long_chain_goes_on_in_a_tree_of_its_own() {
        let slugs: Vec<String> = (0..=DEEPEST).map(|n| n.to_string()).collect();
        let chain: Vec<_> = slugs
            .iter()
            .enumerate()
            .map(|(n, slug)| (slug.clone(), slugs.get(n + 1).cloned().into_iter().collect()))
            .collect();
        let lines = as_text(&grow(&chain));
        assert_eq!(lines.len(), DEEPEST + 2);
        assert_eq!(lines[DEEPEST].trim(), format!("{DEEPEST} (shown elsewhere)"));
        assert_eq!(lines[DEEPEST + 1], DEEPEST.to_string());
    }
}
