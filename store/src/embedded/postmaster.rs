//! One server process: started from a thread that lives as long as it, signalled, awaited.

use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};
use tokio::sync::{oneshot, watch};

/// A server that this process started. Dropping it stops the server at once.
#[derive(Debug)]
pub(super) struct Postmaster {
    pid: Pid,
    /// False from just before the process is reaped: a signal never goes to a pid used again.
    alive: Arc<Mutex<bool>>,
    exited: watch::Receiver<Option<ExitStatus>>,
}

impl Postmaster {
    /// Starts the command in a process group of its own, so that a terminal's interrupt reaches only
    /// this process, which then stops the server in its own order.
    pub(super) async fn spawn(mut command: Command) -> io::Result<Postmaster> {
        command.process_group(0);
        die_with_parent(&mut command);
        let alive = Arc::new(Mutex::new(true));
        let (exit_tx, exited) = watch::channel(None);
        let (pid_tx, pid_rx) = oneshot::channel();
        let reaper = Arc::clone(&alive);
        // The death signal follows the thread that forked, not the process: this thread waits for the
        // server, so it ends only after it, or with the whole process.
        std::thread::Builder::new().name("postgres".to_owned()).spawn(move || {
            let mut child = match command.spawn() {
                Ok(child) => child,
                Err(error) => {
                    let _ = pid_tx.send(Err(error));
                    return;
                }
            };
            let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) else { return };
            if pid_tx.send(Ok(pid)).is_err() {
                // Whoever asked for the server has given up waiting.
                let _ = rustix::process::kill_process(pid, Signal::QUIT);
            }
            let wait = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
            while let Err(rustix::io::Errno::INTR) = rustix::process::waitid(WaitId::Pid(pid), wait) {}
            *locked(&reaper) = false;
            exit_tx.send_replace(child.wait().ok());
        })?;
        let pid = pid_rx.await.map_err(|_| io::Error::other("the starting thread ended"))??;
        Ok(Postmaster { pid, alive, exited })
    }

    pub(super) fn pid(&self) -> u32 {
        self.pid.as_raw_pid().unsigned_abs()
    }

    pub(super) fn is_alive(&self) -> bool {
        *locked(&self.alive)
    }

    /// Sends the signal unless the server has ended.
    pub(super) fn signal(&self, signal: Signal) {
        let alive = locked(&self.alive);
        if *alive && let Err(error) = rustix::process::kill_process(self.pid, signal) {
            tracing::warn!(pid = self.pid(), %error, "can't signal the embedded Postgres");
        }
    }

    /// Resolves when the server has ended and been reaped.
    pub(super) async fn wait(&self) {
        let mut exited = self.exited.clone();
        // An error means that the reaping thread is gone, and with it the server.
        let _ = exited.wait_for(Option::is_some).await;
    }
}

impl Drop for Postmaster {
    fn drop(&mut self) {
        self.signal(Signal::QUIT);
    }
}

fn locked(alive: &Mutex<bool>) -> MutexGuard<'_, bool> {
    alive.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(target_os = "linux")]
fn die_with_parent(command: &mut Command) {
    let parent = rustix::process::getpid();
    let hook = move || {
        rustix::process::set_parent_process_death_signal(Some(Signal::QUIT))?;
        // A parent that died before the call above sends nothing any more.
        if rustix::process::getppid() == Some(parent) { Ok(()) } else { Err(rustix::io::Errno::SRCH.into()) }
    };
    #[expect(unsafe_code, reason = "only code between fork and exec can tie a child's life to its parent")]
    // SAFETY: the closure makes two system calls and allocates nothing, takes no lock and touches no
    // shared memory, so it is safe after a fork of a threaded process. The standard library runs it after
    // setuid, whose change of credentials would clear the setting.
    unsafe {
        command.pre_exec(hook);
    }
}

#[cfg(not(target_os = "linux"))]
fn die_with_parent(_command: &mut Command) {}

/// What a running server says about itself in `postmaster.pid`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PidFile {
    pub(super) pid: i32,
    pub(super) port: Option<u16>,
    pub(super) status: Status,
}

/// The eighth line of `postmaster.pid`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Status {
    /// Not written yet, or `starting`.
    Starting,
    Ready,
    Stopping,
}

impl PidFile {
    /// Reads the file of a data directory; none if there is none or if it is not whole yet.
    pub(super) fn read(data: &Path) -> Option<PidFile> {
        Self::parse(&fs::read_to_string(data.join("postmaster.pid")).ok()?)
    }

    fn parse(text: &str) -> Option<PidFile> {
        let mut lines = text.lines();
        // A negative number marks a single-user server, which serves nobody.
        let pid = lines.next()?.trim().parse().ok().filter(|pid| *pid > 0)?;
        let port = lines.nth(2).and_then(|line| line.trim().parse().ok());
        let status = match lines.nth(3).map(str::trim) {
            Some("ready") => Status::Ready,
            Some("stopping") => Status::Stopping,
            _ => Status::Starting,
        };
        Some(PidFile { pid, port, status })
    }

    /// Whether some process has this pid; it need not be a server.
    pub(super) fn process_exists(&self) -> bool {
        let Some(pid) = Pid::from_raw(self.pid) else { return false };
        !matches!(rustix::process::test_kill_process(pid), Err(rustix::io::Errno::SRCH))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pid_file_is_read_at_every_stage() {
        let whole = "4711\n/data\n1700000000\n5432\n/run\n127.0.0.1\n  123  456\nready   \n";
        let read = PidFile::parse(whole).expect("whole");
        assert_eq!(read, PidFile { pid: 4711, port: Some(5432), status: Status::Ready });
        let early = PidFile::parse("4711\n/data\n1700000000\n5432\n").expect("early");
        assert_eq!(early.status, Status::Starting);
        let stopping = PidFile::parse(&whole.replace("ready   ", "stopping")).expect("stopping");
        assert_eq!(stopping.status, Status::Stopping);
        assert_eq!(PidFile::parse(""), None);
        assert_eq!(PidFile::parse("-5\n"), None);
    }
}
