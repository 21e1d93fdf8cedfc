//! Named points in the store's transactions and around effects, where a test can hold or end the
//! process. Without a gate a point costs one branch.

use std::{fmt, pin::Pin, sync::Arc};

/// Every point, in the order in which a step passes them. A crash test loops over this list.
pub const POINTS: &[&str] = &[
    "claim.before",
    "claim.done",
    "load.before",
    "load.done",
    "decide.done",
    "commit.before",
    "commit.begun",
    "commit.written",
    "commit.done",
    "model.before",
    "model.done",
    "tools.before",
    "tool.before",
    "tool.done",
    "tools.done",
    "run.released",
];

type Passing = Pin<Box<dyn Future<Output = ()> + Send>>;

/// What happens at a point.
#[derive(Clone)]
pub struct Gate(Arc<dyn Fn(&'static str) -> Passing + Send + Sync>);

impl Gate {
    /// A gate that calls `pass` at every point and waits for it.
    pub fn new(pass: impl Fn(&'static str) -> Passing + Send + Sync + 'static) -> Self {
        Self(Arc::new(pass))
    }

    pub(crate) fn pass(&self, point: &'static str) -> Passing {
        debug_assert!(POINTS.contains(&point), "{point} is missing from the list of points");
        (self.0)(point)
    }
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Gate")
    }
}
