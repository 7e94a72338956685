//! `cargo xtask bench`: measures release builds in network namespaces. What is measured is `tests`' own.

use std::ffi::OsStr;
use std::os::unix::process::CommandExt as _;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::Args;

use crate::{build_ebpf, command, test};

/// Measure throughput, latency and cost of a release build.
#[derive(Args)]
pub(crate) struct Options {
    /// Passed to the benchmark.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

pub(crate) fn run(options: Options) -> Result<ExitCode> {
    build_ebpf::build_or_reference()?;
    let binaries = test::build_binaries("bench", "release")?;
    test::mount_bpffs()?;
    let mut bench =
        command::as_root(&binaries.runner, &[("CULVERT_BIN", OsStr::new(&binaries.culvert))])?;
    bench.args(options.args);
    let line = command::announce(&bench);
    Err(bench.exec()).with_context(|| format!("start `{line}`"))
}
