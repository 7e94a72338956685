//! `cargo xtask`: every task of this repository, one module each; `main` only dispatches.
//!
//! CI and developers run the same commands. A task prints each command before it runs it, and a failure names the
//! command line, so that any step can be repeated by hand.

#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "a task talks to whoever started it")]

mod bench;
mod build_ebpf;
mod chart;
mod command;
mod demo;
mod lint;
mod objects;
mod setup;
mod tally;
mod test;
mod toolchain;
mod vm;
mod workspace;

#[path = "../../ebpf/hash_sources.rs"]
mod hash_sources;

use std::process::ExitCode;

use clap::Parser;

/// Build, test and demo tasks of culvert.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
enum Task {
    Setup(setup::Options),
    BuildEbpf(build_ebpf::Options),
    Test(test::Options),
    Lint(lint::Options),
    Demo(demo::Options),
    Bench(bench::Options),
    Chart(chart::Options),
}

fn main() -> ExitCode {
    let done = match Task::parse() {
        Task::Setup(options) => setup::run(options),
        Task::BuildEbpf(options) => build_ebpf::run(options),
        Task::Test(options) => Ok(test::run(options)),
        Task::Lint(options) => Ok(lint::run(options)),
        Task::Demo(options) => demo::run(options),
        Task::Bench(options) => bench::run(options),
        Task::Chart(options) => chart::run(options),
    };
    match done {
        Ok(code) => code,
        Err(error) => {
            println!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}
