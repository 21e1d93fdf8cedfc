//! What the `holdfast` command is made of, as a library for its own tests and for the scenario tests.

mod args;
mod check;
mod client;
mod demo;
mod failure;
mod logs;
mod migrate;
mod node;
mod otlp;
mod output;
mod scripted;
pub mod scripted_model;
mod session;
mod settings;
mod status;
mod tool;
mod webhooks;

use std::{ffi::OsString, io::IsTerminal as _, process::ExitCode};

use clap::{CommandFactory as _, FromArgMatches as _, error::ErrorKind};

use crate::{
    args::{Cli, Command},
    failure::Failure,
    settings::{SettingsFile, Sources},
};

/// Runs one command line, the program's name first, and says how it went.
pub fn run(line: impl IntoIterator<Item = OsString>) -> ExitCode {
    let cli = match parse(line.into_iter().collect()) {
        Ok(cli) => cli,
        Err(Ended::Parser(error)) => {
            // Help and version are answers; everything else that the parser says is wrong usage.
            let code = u8::try_from(error.exit_code()).unwrap_or(2);
            let _ = error.print();
            return ExitCode::from(code);
        }
        Err(Ended::Failure(failure)) => return tell(&failure),
    };
    let default = if cli.command.is_server() { logs::SERVER } else { logs::QUIET };
    let exports = match logs::start(cli.log_format, default, cli.command.otlp_endpoint(), cli.command.role())
    {
        Ok(exports) => exports,
        Err(failure) => return tell(&failure),
    };
    let is_server = cli.command.is_server();
    let mut runtime = match cli.command.threads() {
        // Nothing is passed between threads then, which costs more than it brings on a small machine.
        Some(1) => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    if let Some(threads) = cli.command.threads() {
        runtime.worker_threads(threads);
    }
    let done = runtime
        .enable_all()
        .build()
        .map_err(|error| Failure::Failed(format!("the runtime can't start: {error}")))
        .and_then(|runtime| {
            let done = runtime.block_on(perform(cli.command));
            // A read of standard input that nobody waits for any more must not hold the process.
            runtime.shutdown_background();
            done
        });
    let code = match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) if is_server => {
            tracing::error!(kind = "server.failed", error = %failure, exit_code = failure.code());
            // Escaped into a log line, what to do about it can't be copied.
            if std::io::stderr().is_terminal() {
                tell(&failure);
            }
            ExitCode::from(failure.code())
        }
        Err(failure) => tell(&failure),
    };
    exports.finish();
    code
}

/// Why no command was parsed.
enum Ended {
    Parser(clap::Error),
    Failure(Failure),
}

fn parse(line: Vec<OsString>) -> Result<Cli, Ended> {
    // Help must work beside a broken settings file.
    if let Err(error) = Cli::command().try_get_matches_from(&line)
        && matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion)
    {
        return Err(Ended::Parser(error));
    }
    let here = std::env::current_dir()
        .map_err(|error| Ended::Failure(Failure::Config(format!("the current directory: {error}"))))?;
    let sources = Sources {
        variable: &|name| std::env::var_os(name),
        file: SettingsFile::find(&here).map_err(Ended::Failure)?,
    };
    let command = settings::layered(Cli::command(), &sources).map_err(Ended::Failure)?;
    let matches = command.try_get_matches_from(line).map_err(Ended::Parser)?;
    Cli::from_arg_matches(&matches).map_err(Ended::Parser)
}

/// Says on standard error why a command failed.
fn tell(failure: &Failure) -> ExitCode {
    if *failure != Failure::Closed {
        output::note(format!("error: {failure}"));
    }
    ExitCode::from(failure.code())
}

async fn perform(command: Command) -> Result<(), Failure> {
    match command {
        Command::Serve(node) => Box::pin(node::serve(*node)).await,
        Command::Api(node) => Box::pin(node::api(*node)).await,
        Command::Worker(node) => Box::pin(node::worker(*node)).await,
        Command::Scheduler(node) => Box::pin(node::scheduler(*node)).await,
        Command::Migrate(args) => Box::pin(migrate::run(args)).await,
        Command::Demo(args) => Box::pin(demo::run(args)).await,
        Command::ScriptedModel(args) => scripted::run(args).await,
        Command::Check(args) => check::run(args).await,
        Command::Session(args) => Box::pin(session::run(*args)).await,
        Command::Status(args) => Box::pin(status::run(args)).await,
        Command::Webhooks(args) => Box::pin(webhooks::run(args)).await,
        Command::Tool(command) => tool::run(command).await,
    }
}
