//! Where the system gives orphans to nobody in particular, what leaves a program's process group is lost sight of.

use rustix::process::Pid;

/// The variable that marks what a program has started.
pub(crate) const MARK: &str = "AGENT_TOOL_RUN";

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
