//! Installing a Postgres server with the system's package manager, when there is none.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;
use tokio::time::timeout;

use crate::embedded::{MIN_MAJOR, usable};

/// Bound on one step of an installation.
const STEP: Duration = Duration::from_secs(900);

/// Why there is still no server.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InstallError {
    /// No package manager that this knows.
    #[error(
        "no Postgres server {MIN_MAJOR} or newer is installed, and none of apt-get, dnf and apk was found: install one, or give --database-url"
    )]
    NoPackageManager,
    /// This user may not install packages.
    #[error(
        "no Postgres server {MIN_MAJOR} or newer is installed, and installing one needs root; run:\n  {command}\nor give --database-url"
    )]
    NeedsRoot {
        /// What to run, for a shell.
        command: String,
    },
    /// A step failed.
    #[error("installing Postgres failed at `{command}` ({why}):\n{output}")]
    Failed {
        /// The step, for a shell.
        command: String,
        /// How it ended.
        why: String,
        /// The end of what it printed.
        output: String,
    },
    /// The package manager's version is too old or lies where nobody looks.
    #[error(
        "the packages were installed, but no Postgres server {MIN_MAJOR} or newer was found afterwards: install one, or give --database-url"
    )]
    StillMissing,
}

/// Makes sure that a server of version [`MIN_MAJOR`] or newer is installed. If none is, runs the system's
/// package manager, as root or through `sudo` where that asks for no password; this takes a minute or so
/// and needs the network. The system's own cluster, which Debian's packages would create and start, is
/// not wanted and is switched off beforehand.
///
/// # Errors
/// See [`InstallError`]; [`InstallError::NeedsRoot`] says exactly what to run.
pub async fn ensure_installed() -> Result<(), InstallError> {
    if is_installed().await {
        return Ok(());
    }
    let manager = Manager::find().ok_or(InstallError::NoPackageManager)?;
    let steps = manager.steps();
    let sudo = !rustix::process::geteuid().is_root();
    if sudo && !sudo_works().await {
        return Err(InstallError::NeedsRoot { command: manager.manual().to_owned() });
    }
    tracing::info!(with = manager.program(), "installing Postgres");
    for step in &steps {
        run(step, sudo).await?;
    }
    if is_installed().await { Ok(()) } else { Err(InstallError::StillMissing) }
}

async fn is_installed() -> bool {
    // A panic there would say nothing about the system; then the package manager decides.
    tokio::task::spawn_blocking(|| usable().is_some()).await.unwrap_or(false)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Manager {
    Apt,
    Dnf,
    Apk,
}

/// One command of an installation.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Step {
    argv: Vec<&'static str>,
    /// A failure is passed over.
    optional: bool,
}

impl Step {
    fn new(argv: &[&'static str]) -> Step {
        Step { argv: argv.to_vec(), optional: false }
    }
}

const NO_SYSTEM_CLUSTER: &str = "test -e /etc/postgresql-common/createcluster.conf || \
     { mkdir -p /etc/postgresql-common && \
     echo 'create_main_cluster = false' > /etc/postgresql-common/createcluster.conf; }";

impl Manager {
    fn find() -> Option<Manager> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let dirs: Vec<_> = std::env::split_paths(&path).chain(["/usr/bin".into(), "/sbin".into()]).collect();
        [Manager::Apt, Manager::Dnf, Manager::Apk]
            .into_iter()
            .find(|manager| dirs.iter().any(|dir| Path::new(dir).join(manager.program()).is_file()))
    }

    fn program(self) -> &'static str {
        match self {
            Manager::Apt => "apt-get",
            Manager::Dnf => "dnf",
            Manager::Apk => "apk",
        }
    }

    /// What a person with root's rights types: without the care that this program takes to start no
    /// cluster of the system's.
    fn manual(self) -> &'static str {
        match self {
            Manager::Apt => {
                "sudo apt-get update && sudo apt-get install -y --no-install-recommends postgresql"
            }
            Manager::Dnf => "sudo dnf install -y postgresql-server",
            Manager::Apk => "sudo apk add --no-cache postgresql",
        }
    }

    fn steps(self) -> Vec<Step> {
        match self {
            Manager::Apt => vec![
                Step::new(&["apt-get", "update"]),
                Step::new(&["sh", "-c", NO_SYSTEM_CLUSTER]),
                // The environment keeps debconf, and ucf about the file above, from asking.
                Step::new(&[
                    "env",
                    "DEBIAN_FRONTEND=noninteractive",
                    "UCF_FORCE_CONFFOLD=1",
                    "apt-get",
                    "install",
                    "-y",
                    "--no-install-recommends",
                    "postgresql",
                ]),
            ],
            Manager::Dnf => vec![
                // Releases with module streams default to a version that is too old; others have none.
                Step { optional: true, ..Step::new(&["dnf", "-y", "module", "enable", "postgresql:16"]) },
                Step::new(&["dnf", "install", "-y", "postgresql-server"]),
            ],
            Manager::Apk => vec![Step::new(&["apk", "add", "--no-cache", "postgresql"])],
        }
    }
}

async fn sudo_works() -> bool {
    let mut command = Command::new("sudo");
    command.args(["-n", "true"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.kill_on_drop(true);
    matches!(timeout(Duration::from_secs(10), command.status()).await, Ok(Ok(status)) if status.success())
}

async fn run(step: &Step, sudo: bool) -> Result<(), InstallError> {
    let argv: Vec<&str> =
        if sudo { ["sudo", "-n"].iter().chain(&step.argv).copied().collect() } else { step.argv.clone() };
    let Some((program, arguments)) = argv.split_first() else { return Ok(()) };
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).kill_on_drop(true);
    let failed = |why: String, output: &str| {
        let command = step.argv.join(" ");
        Err(InstallError::Failed { command, why, output: last_lines(output) })
    };
    match timeout(STEP, command.output()).await {
        Err(_) => failed(format!("still running after {} s", STEP.as_secs()), ""),
        Ok(Err(error)) => failed(error.to_string(), ""),
        Ok(Ok(output)) if output.status.success() || step.optional => Ok(()),
        Ok(Ok(output)) => {
            let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
            text.push_str(&String::from_utf8_lossy(&output.stderr));
            failed(output.status.to_string(), &text)
        }
    }
}

fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(12)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_installed_server_is_enough() {
        ensure_installed().await.expect("this machine has a server, as every other test needs one");
    }

    #[tokio::test]
    async fn a_failing_step_says_what_it_printed() {
        let step = Step::new(&["sh", "-c", "echo one; echo two >&2; exit 3"]);
        let error = run(&step, false).await.expect_err("exit 3").to_string();
        assert!(
            error.contains("one") && error.contains("two") && error.contains("exit status: 3"),
            "{error}"
        );
        let optional = Step { optional: true, ..step };
        run(&optional, false).await.expect("passed over");
        let missing = run(&Step::new(&["/no/such/program"]), false).await.expect_err("no such program");
        assert!(matches!(missing, InstallError::Failed { .. }));
    }

    #[test]
    fn what_to_type_can_be_copied() {
        for manager in [Manager::Apt, Manager::Dnf, Manager::Apk] {
            let text = manager.manual();
            assert!(text.starts_with("sudo ") && text.contains(manager.program()), "{text}");
            assert!(text.contains("postgresql") && !text.contains(['\'', '"', '\n']), "{text}");
        }
    }
}
