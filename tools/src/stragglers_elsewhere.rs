//! Where the system gives orphans to nobody in particular, what leaves a program's process group is lost sight of.

use rustix::process::Pid;

/// The variable that marks what a program has started.
pub(crate) const MARK: &str = "AGENT_TOOL_RUN";

/// The variable by which a process that runs tools is given what all its marks begin with.
pub const MARKS_VARIABLE: &str = "HOLDFAST_TOOL_MARK";

/// What the marks of a process are to begin with that this one is about to start.
#[must_use]
pub fn marks_for_child() -> String {
    uuid::Uuid::new_v4().simple().to_string()
}

/// Nobody is found by a mark here: does nothing.
pub async fn end_marked(_prefix: &str) {}

/// A mark.
pub(crate) fn mark() -> String {
    std::process::id().to_string()
}

/// A program with this mark runs.
pub(crate) fn started(_mark: &str, _leader: Pid) {}

/// It doesn't after all.
pub(crate) fn unstarted(_mark: &str) {}

/// It has ended.
pub(crate) async fn ended(_mark: &str, _leader: Pid) {}

/// As [`ended`], for those who can't wait.
pub(crate) fn abandoned(_mark: String, _leader: Pid) {}
