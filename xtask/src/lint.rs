//! `cargo xtask lint`: everything that can be checked without running culvert.

mod edges;
mod text;

use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Args;

use crate::tally::Tally;
use crate::toolchain::{TARGET, Toolchain};
use crate::{build_ebpf, command, workspace};

/// Formatting, clippy for the host and for BPF, dependency edges, file rules, docs, and cargo-deny where installed.
#[derive(Args)]
pub(crate) struct Options {}

pub(crate) fn run(Options {}: Options) -> ExitCode {
    let mut tally = Tally::default();
    check_all(&mut tally);
    tally.finish()
}

/// Runs every check, also after one failed, and counts them in `tally`.
pub(crate) fn check_all(tally: &mut Tally) {
    tally.step("format", || command::run(command::cargo("fmt").args(["--all", "--", "--check"])));
    tally.step("file rules", || told(text::problems(workspace::root())?));
    tally.step("dependency edges", || told(edges::problems(&workspace::metadata()?)));
    tally.step("clippy", || {
        let mut clippy = command::cargo("clippy");
        command::run(clippy.args([
            "--workspace",
            "--all-targets",
            "--keep-going",
            "--quiet",
            "--",
            "-D",
            "warnings",
        ]))
    });
    match Toolchain::find() {
        Some(toolchain) if toolchain.has_clippy() => {
            tally.step("clippy for BPF", || {
                let mut clippy =
                    toolchain.cargo("clippy", workspace::root(), &build_ebpf::target_folder());
                command::run(clippy.args(["--quiet", "--", "-D", "warnings"]))
            });
        }
        _ => tally
            .skip("clippy for BPF", &format!("no compiler here has core for {TARGET} and clippy")),
    }
    tally.step("docs", || {
        let mut doc = command::cargo("doc");
        command::run(
            doc.args(["--workspace", "--no-deps", "--keep-going", "--quiet"])
                .env("RUSTDOCFLAGS", "-D warnings"),
        )
    });
    if command::probe(command::cargo("deny").arg("--version")).is_some() {
        tally.step("cargo-deny", || {
            let mut deny = command::cargo("deny");
            command::run(deny.args([
                "check",
                "--config",
                ".deny.toml",
                "bans",
                "licenses",
                "sources",
            ]))
        });
    } else {
        tally.skip("cargo-deny", "it is not installed");
    }
}

fn told(problems: Vec<String>) -> Result<()> {
    for problem in &problems {
        println!("{problem}");
    }
    if !problems.is_empty() {
        bail!("{} found", problems.len());
    }
    Ok(())
}
