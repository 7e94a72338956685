//! `cargo xtask demo`: a two-node mesh in network namespaces on this machine. The demo itself is `tests`' own.

use std::ffi::OsStr;
use std::os::unix::process::CommandExt as _;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::Args;

use crate::{build_ebpf, command, setup, test};

/// Show a two-node mesh at work in network namespaces on this machine.
#[derive(Args)]
pub(crate) struct Options {
    /// Leave the mesh running until interrupted.
    #[arg(long)]
    keep: bool,
    /// Install nothing.
    #[arg(long)]
    no_setup: bool,
    /// Passed to the demo.
    #[arg(last = true)]
    args: Vec<String>,
}

pub(crate) fn run(options: Options) -> Result<ExitCode> {
    if !options.no_setup {
        setup::ensure(setup::Purpose::OwnKernel)?;
    }
    build_ebpf::build_or_reference()?;
    let binaries = test::build_binaries("demo", "dev")?;
    test::mount_bpffs()?;
    let mut demo =
        command::as_root(&binaries.runner, &[("CULVERT_BIN", OsStr::new(&binaries.culvert))])?;
    demo.args(options.keep.then_some("--keep")).args(options.args);
    let line = command::announce(&demo);
    // In our place, so that it gets the terminal's signals and its exit code is ours.
    Err(demo.exec()).with_context(|| format!("start `{line}`"))
}
