//! One program from its start to its end, with everything bounded.

use std::{
    ffi::OsString,
    future::pending,
    io,
    path::{Path, PathBuf},
    pin::pin,
    process::{ExitStatus, Stdio},
    time::Duration,
};

use rustix::process::Signal;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWriteExt},
    process::{ChildStdin, Command},
    time::{sleep, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;

use crate::{
    capture::Capture,
    context::is_withheld,
    group::Group,
    progress::{LineWatch, ProgressFn, Stream},
};

/// How long a program that is told to stop (SIGTERM) has before it is killed (SIGKILL).
pub const STOP_TIME: Duration = Duration::from_millis(100);
/// How long output is still read after a program has exited, if a descendant holds its streams.
pub const DRAIN_GRACE: Duration = Duration::from_millis(200);
/// Pauses before a busy program file is tried again; somebody has it open for writing.
const BUSY_PAUSES: [u64; 6] = [5, 10, 20, 40, 80, 160];
const CHUNK: usize = 16 * 1024;

/// What to start.
pub(crate) struct Job<'a> {
    pub(crate) program: &'a Path,
    pub(crate) args: Vec<OsString>,
    pub(crate) env: Vec<(String, String)>,
    pub(crate) stdin: Option<Vec<u8>>,
}

/// How far it may go.
pub(crate) struct Bounds {
    /// Bytes kept of standard output.
    pub(crate) keep: usize,
    pub(crate) timeout: Option<Duration>,
    pub(crate) stop: Duration,
}

/// How it ended.
pub(crate) enum Ended {
    Exited(ExitStatus),
    TimedOut,
    Cancelled,
}

/// What is left of it.
pub(crate) struct Finished {
    pub(crate) ended: Ended,
    pub(crate) stdout: Capture,
    pub(crate) stderr: Capture,
}

/// Why a program didn't start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// No such file.
    #[error("{} does not exist", .0.display())]
    Missing(PathBuf),
    /// The file is there, what its first line names is not.
    #[error("{} can't start: the interpreter that its first line (#!) names does not exist", .0.display())]
    NoInterpreter(PathBuf),
    /// The file may not be executed.
    #[error("{} is not executable", .0.display())]
    NotExecutable(PathBuf),
    /// The system knows no way to run the file.
    #[error("{} is no program: a script's first line must name its interpreter (#!)", .0.display())]
    NotAProgram(PathBuf),
    /// The system's limit for arguments and environment is exceeded.
    #[error("the arguments are longer than the system passes to a program; shorten them")]
    TooLong,
    /// Anything else.
    #[error("{} can't start: {source}", path.display())]
    Other {
        /// The program.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
}

/// Runs a program to its end. When the future is dropped, its process group is killed.
///
/// # Errors
/// When the program can't be started.
pub(crate) async fn run(
    job: &Job<'_>,
    bounds: &Bounds,
    cancel: &CancellationToken,
    progress: Option<&ProgressFn<'_>>,
) -> Result<Finished, StartError> {
    let mut group = start(job).await?;
    let (stdin, stdout, stderr) = group.pipes();
    let mut out = Capture::new(bounds.keep);
    let mut err = Capture::new(0);
    let stopped = {
        let streams = async {
            tokio::join!(
                feed(stdin, job.stdin.as_deref()),
                pump(stdout, &mut out, LineWatch::new(Stream::Stdout, progress)),
                pump(stderr, &mut err, LineWatch::new(Stream::Stderr, progress)),
            );
        };
        attend(&mut group, streams, bounds, cancel).await
    };
    let status = group.end().await;
    let ended = match (stopped, status) {
        (Some(stopped), _) => stopped,
        (None, Ok(status)) => Ended::Exited(status),
        (None, Err(source)) => return Err(StartError::Other { path: job.program.to_owned(), source }),
    };
    Ok(Finished { ended, stdout: out, stderr: err })
}

/// Stays with a program until it has exited and its streams are read, or until it must be killed.
/// `None` when it ended by itself.
async fn attend(
    group: &mut Group,
    streams: impl Future<Output = ()>,
    bounds: &Bounds,
    cancel: &CancellationToken,
) -> Option<Ended> {
    let mut streams = pin!(streams);
    let mut streams_done = false;
    let mut deadline = pin!(async {
        match bounds.timeout {
            Some(limit) => sleep(limit).await,
            None => pending().await,
        }
    });
    let stopped = loop {
        tokio::select! {
            biased;
            () = group.exited() => break None,
            () = cancel.cancelled() => break Some(Ended::Cancelled),
            () = &mut deadline => break Some(Ended::TimedOut),
            () = &mut streams, if !streams_done => streams_done = true,
        }
    };
    let rest = async {
        if !streams_done {
            streams.await;
        }
    };
    // Elapsing is no failure: what comes next is the kill.
    if stopped.is_none() {
        let _ = timeout(DRAIN_GRACE, rest).await;
    } else {
        group.signal(Signal::TERM);
        let _ = timeout(bounds.stop, async { tokio::join!(group.exited(), rest) }).await;
    }
    stopped
}

async fn start(job: &Job<'_>) -> Result<Group, StartError> {
    let mut command = Command::new(job.program);
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(is_withheld) {
            command.env_remove(name);
        }
    }
    command.args(&job.args).envs(job.env.iter().map(|(name, value)| (name, value)));
    command.stdin(if job.stdin.is_some() { Stdio::piped() } else { Stdio::null() });
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut pauses = BUSY_PAUSES.iter();
    loop {
        match Group::spawn(&mut command) {
            Ok(group) => return Ok(group),
            Err(error) if error.kind() == io::ErrorKind::ExecutableFileBusy => match pauses.next() {
                Some(millis) => sleep(Duration::from_millis(*millis)).await,
                None => return Err(start_error(job, error)),
            },
            Err(error) => return Err(start_error(job, error)),
        }
    }
}

fn start_error(job: &Job<'_>, source: io::Error) -> StartError {
    let path = job.program.to_owned();
    let no_exec = rustix::io::Errno::NOEXEC.raw_os_error();
    match source.kind() {
        io::ErrorKind::NotFound if path.exists() => StartError::NoInterpreter(path),
        io::ErrorKind::NotFound => StartError::Missing(path),
        io::ErrorKind::PermissionDenied => StartError::NotExecutable(path),
        io::ErrorKind::ArgumentListTooLong => StartError::TooLong,
        _ if source.raw_os_error() == Some(no_exec) => StartError::NotAProgram(path),
        _ => StartError::Other { path, source },
    }
}

async fn feed(pipe: Option<ChildStdin>, bytes: Option<&[u8]>) {
    if let (Some(mut pipe), Some(bytes)) = (pipe, bytes) {
        // A program need not read what it is given.
        let _ = pipe.write_all(bytes).await;
        let _ = pipe.shutdown().await;
    }
}

async fn pump(pipe: Option<impl AsyncRead + Unpin>, kept: &mut Capture, mut lines: LineWatch<'_>) {
    let Some(mut pipe) = pipe else { return };
    let mut chunk = vec![0; CHUNK];
    loop {
        let read = match lines.pending() {
            None => pipe.read(&mut chunk).await,
            Some(due) => tokio::select! {
                read = pipe.read(&mut chunk) => read,
                () = sleep_until(due) => {
                    lines.flush();
                    continue;
                }
            },
        };
        match read {
            Ok(0) | Err(_) => break,
            Ok(count) => {
                kept.push(&chunk[..count]);
                lines.push(&chunk[..count]);
            }
        }
    }
    lines.flush();
}
