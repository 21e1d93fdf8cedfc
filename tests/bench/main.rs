//! The bench programs: `bench PROGRAM [FLAGS]`. They print numbers and ratios of one run. A program that needs
//! processes starts this one again in another role.

mod api;
mod bloat;
mod clients;
mod copies;
mod engine;
mod fairness;
mod fanout;
mod flags;
mod growth;
mod memory;
mod model;
mod nodes;
mod parked;
mod processes;
mod raw;
mod resume;
mod rig;
mod samples;
mod storm;
mod takeover;
mod workers;

use std::process::ExitCode;

use anyhow::Result;

const USAGE: &str =
    "usage: bench engine|growth|resume|parked|fanout|fairness|bloat|memory|takeover|storm [FLAGS]";

fn main() -> Result<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (first, rest) = match arguments.split_first() {
        Some((first, rest)) => (first.as_str(), rest),
        None => anyhow::bail!(USAGE),
    };
    match first {
        nodes::ROLE => return Ok(nodes::main(rest)),
        workers::ROLE => workers::main(rest)?,
        api::ROLE => api::main(rest)?,
        program => {
            let runtime =
                tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
            runtime.block_on(measure(program, rest))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn measure(program: &str, flags: &[String]) -> Result<()> {
    match program {
        "engine" => Box::pin(engine::measure(flags)).await,
        "growth" => Box::pin(growth::measure(flags)).await,
        "resume" => Box::pin(resume::measure(flags)).await,
        "parked" => Box::pin(parked::measure(flags)).await,
        "fanout" => Box::pin(fanout::measure(flags)).await,
        "fairness" => Box::pin(fairness::measure(flags)).await,
        "takeover" => Box::pin(takeover::measure(flags)).await,
        "bloat" => Box::pin(bloat::measure(flags)).await,
        "storm" => Box::pin(storm::measure(flags)).await,
        "memory" => Box::pin(memory::measure(flags)).await,
        _ => anyhow::bail!(USAGE),
    }
}
