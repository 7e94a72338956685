//! The `culvert` command: parse, run, exit code.

#![forbid(unsafe_code)]

use std::{io::Write as _, process::ExitCode};

use clap::Parser as _;
use culvert::{
    app,
    config::{
        Config,
        args::{Args, Command},
    },
    controlplane,
    error::chain,
};

#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    let result = match Args::parse().command {
        Command::Run(args) => Config::new(*args).map_err(app::RunError::from).and_then(app::run),
        Command::Agent(args) => app::agent(args),
        Command::Cleanup(args) => app::cleanup(&args),
        Command::Controlplane(args) => controlplane::run(*args),
        Command::RotateRoot(args) => controlplane::rotate_root(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let line = format!("culvert: {}\n", chain(&error));
            // With standard error gone there is nowhere left to say so.
            drop(std::io::stderr().write_all(line.as_bytes()));
            ExitCode::from(error.exit_code())
        }
    }
}
