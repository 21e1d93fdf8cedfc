//! What the tests of every model ask of it.
#![expect(clippy::print_stdout, reason = "sizes and traces are for reading, with --nocapture")]

use std::fmt::Debug;

use holdfast_models::check::{Model, check, check_one};

/// The protocol as it is keeps every promise in all of its `states`, and all that it can do is done.
pub(crate) fn keeps<M: Model>(model: &M, limit: usize, states: usize) {
    let report = check(model, limit);
    println!("{} states, {} actions, depth {}", report.states, report.actions, report.depth);
    println!("{:#?}", report.kinds);
    if let Some(broken) = &report.broken {
        panic!("{broken}");
    }
    assert_eq!(report.states, states, "another model than the one that docs/models.md tells of");
    assert_eq!(report.missing::<M::Action>(), Vec::<&str>::new(), "kinds of actions that never occurred");
}

/// The mistake in a model breaks the promise, and it takes few actions to show it.
pub(crate) fn breaks<M: Model>(model: &M, variant: impl Debug, limit: usize, promise: &str) {
    let report = check_one(model, limit, promise);
    println!("{variant:?}: {} states", report.states);
    let broken = report.broken.unwrap_or_else(|| panic!("{variant:?} keeps the promise that {promise}"));
    println!("{broken}");
    assert_eq!(broken.promise, promise);
    assert!(broken.trace.len() <= 16, "a shortest way of {} actions", broken.trace.len());
}
