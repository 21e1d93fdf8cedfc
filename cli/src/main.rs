//! The `holdfast` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    // Before anything can open a TLS connection. An error would mean that a provider is there already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    holdfast_cli::run(std::env::args_os())
}
