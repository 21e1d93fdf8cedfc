//! A program and its descendants as one process group that ends together.

use std::{io, os::fd::OwnedFd, process::ExitStatus, time::Duration};

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::{
    io::unix::AsyncFd,
    process::{Child, ChildStderr, ChildStdin, ChildStdout, Command},
    time::timeout,
};

use crate::stragglers;

/// How long a killed program may take to be gone; one that the kernel won't let go is left to the
/// runtime's reaper.
const REAP_LIMIT: Duration = Duration::from_secs(2);

/// A running process group. Dropping it kills every member, and whoever has left it.
///
/// The leader isn't reaped before the group was killed: until then its id, which is the group's,
/// can't be given to anybody else, so a signal never strikes a stranger. (Where the system has no
/// process descriptors, the leader is reaped first.)
pub(crate) struct Group {
    child: Child,
    leader: Pid,
    exit: Option<AsyncFd<OwnedFd>>,
    /// What everything that the leader starts is known by.
    mark: String,
    ended: bool,
}

impl Group {
    /// Starts `command` as the leader of a new group.
    ///
    /// # Errors
    /// Those of starting a program.
    pub(crate) fn spawn(command: &mut Command) -> io::Result<Self> {
        let mark = stragglers::mark();
        command.env(stragglers::MARK, &mark);
        let started = command.process_group(0).kill_on_drop(true).spawn().and_then(|child| {
            let leader = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
            Ok((child, leader.ok_or_else(|| io::Error::other("the new process has no id"))?))
        });
        let (child, leader) = started.inspect_err(|_| stragglers::unstarted(&mark))?;
        stragglers::started(&mark, leader);
        Ok(Self { child, leader, exit: exit_watch(leader), mark, ended: false })
    }

    /// The leader's pipes, once.
    pub(crate) fn pipes(&mut self) -> (Option<ChildStdin>, Option<ChildStdout>, Option<ChildStderr>) {
        (self.child.stdin.take(), self.child.stdout.take(), self.child.stderr.take())
    }

    /// Waits until the leader has exited. Cancel-safe.
    pub(crate) async fn exited(&mut self) {
        match &self.exit {
            Some(exit) if exit.readable().await.is_ok() => {}
            _ => drop(self.child.wait().await),
        }
    }

    /// Sends a signal to every member.
    pub(crate) fn signal(&self, signal: Signal) {
        // The only expected failure is that nobody is left.
        let _ = kill_process_group(self.leader, signal);
    }

    /// Kills what is left of the group, and what has left it, and says how the leader ended.
    ///
    /// # Errors
    /// When the leader doesn't go away.
    pub(crate) async fn end(mut self) -> io::Result<ExitStatus> {
        self.signal(Signal::KILL);
        self.ended = true;
        let status = timeout(REAP_LIMIT, self.child.wait()).await;
        stragglers::ended(&self.mark, self.leader).await;
        status.map_err(|_| io::ErrorKind::TimedOut)?
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if !self.ended {
            self.signal(Signal::KILL);
            stragglers::abandoned(std::mem::take(&mut self.mark), self.leader);
        }
    }
}

#[cfg(target_os = "linux")]
fn exit_watch(leader: Pid) -> Option<AsyncFd<OwnedFd>> {
    use rustix::process::{PidfdFlags, pidfd_open};
    use tokio::io::Interest;
    let descriptor = pidfd_open(leader, PidfdFlags::empty()).ok()?;
    // SAFETY: an `OwnedFd` always yields the same open descriptor, and the `AsyncFd`, which owns it,
    // deregisters it before it is closed; nothing here takes it out or replaces it.
    #[expect(unsafe_code, reason = "the runtime's registration of a process descriptor")]
    let watch = unsafe { AsyncFd::register_with_interest(descriptor, Interest::READABLE) };
    watch.ok()
}

#[cfg(not(target_os = "linux"))]
fn exit_watch(_leader: Pid) -> Option<AsyncFd<OwnedFd>> {
    None
}
