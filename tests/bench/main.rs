//! `bench`: what culvert costs, measured in network namespaces of this machine, as one Markdown report.
//!
//! Four groups: across nodes against no mesh; across nodes against the same proxy behind iptables; the steering
//! alone; a large mesh against a small one. Run it through `cargo xtask bench`, which builds it and the proxy for release.

#![forbid(unsafe_code)]
#![expect(
    clippy::cast_precision_loss,
    clippy::disallowed_types,
    clippy::print_stderr,
    clippy::print_stdout,
    reason = "a bench reads the clock, talks to whoever started it, and counts far below 2^52"
)]

mod across;
mod cpu;
mod load;
mod machine;
mod pairs;
mod path;
mod redirect;
mod report;
mod scale;
mod serve;
mod sizes;
mod stats;
mod steering;

use std::{fs, path::PathBuf, process::ExitCode};

use anyhow::{Context as _, Result, ensure};
use clap::{Parser, Subcommand, ValueEnum};
use culvert_tests::require;

use crate::{report::Report, sizes::Sizes};

/// Measures culvert against direct connections, iptables REDIRECT and loopback.
#[derive(Debug, Parser)]
struct Options {
    /// Only see that everything runs: few pairs of small samples. The numbers mean nothing.
    #[arg(long)]
    quick: bool,
    /// Pairs of each comparison; fewer than 6 give no interval.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    pairs: Option<u16>,
    /// Workloads of the large mesh.
    #[arg(long)]
    workloads: Option<usize>,
    /// Measure one group only.
    #[arg(long, value_enum)]
    only: Option<Group>,
    /// Also write the report to this file.
    #[arg(long)]
    out: Option<PathBuf>,
    #[command(subcommand)]
    role: Option<Role>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Group {
    /// Across nodes, against no mesh.
    Direct,
    /// Across nodes, against the same proxy behind iptables REDIRECT.
    Redirect,
    /// The steering alone, within one pod, against loopback and REDIRECT.
    Steering,
    /// A mesh of 100,000 workloads, against one of 100.
    Scale,
}

#[derive(Debug, Subcommand)]
enum Role {
    /// The process that stands in for a proxy; started by the bench itself.
    #[command(hide = true)]
    Serve(steering::Serve),
}

fn main() -> ExitCode {
    let options = Options::parse();
    let done = match &options.role {
        Some(Role::Serve(serve)) => steering::serve(serve),
        None => measure(&options),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn measure(options: &Options) -> Result<()> {
    ensure!(require::mesh(), "nothing was measured");
    let mut sizes = if options.quick { Sizes::QUICK } else { Sizes::FULL };
    sizes.pairs = options.pairs.map_or(sizes.pairs, usize::from);
    sizes.workloads = options.workloads.unwrap_or(sizes.workloads);
    let mut report = Report::begin(&machine::facts()?, sizes.pairs);
    let wanted = |group| options.only.is_none_or(|only| only == group);
    if wanted(Group::Direct) {
        across::against_direct(&mut report, &sizes)?;
    }
    if wanted(Group::Redirect) {
        across::against_redirect(&mut report, &sizes)?;
    }
    if wanted(Group::Steering) {
        steering::measure(&mut report, &sizes)?;
    }
    if wanted(Group::Scale) {
        scale::measure(&mut report, &sizes)?;
    }
    let text = report.end();
    if let Some(path) = &options.out {
        fs::write(path, text).with_context(|| format!("write {}", path.display()))?;
    }
    Ok(())
}
