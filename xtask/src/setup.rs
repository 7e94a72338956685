//! `cargo xtask setup`: installs what the other tasks need and this machine lacks; run again, it finds all there.
//!
//! Only Debian and its relatives are installed on; elsewhere each missing thing is named with what brings it.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Result, bail};
use clap::Args;

use crate::objects::{self, State};
use crate::toolchain::{LINKER_VERSION, TARGET, Toolchain, linker_version};
use crate::{chart, command, workspace};

/// Install what is missing: BPF toolchain, test tools, rustfmt and clippy.
#[derive(Args)]
pub(crate) struct Options {
    /// Install nothing; tell what is there, and fail if something is missing.
    #[arg(long)]
    check: bool,
    /// Also what boots other kernels.
    #[arg(long)]
    kernels: bool,
    /// Only what building takes.
    #[arg(long, conflicts_with = "kernels")]
    build: bool,
}

/// What the machine is set up for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// A build alone.
    Build,
    /// Everything that runs on its own kernel.
    OwnKernel,
    /// Tests on other kernels as well.
    AllKernels,
}

impl Purpose {
    /// The programs it takes, with their packages.
    fn tools(self) -> impl Iterator<Item = &'static (&'static str, &'static str)> {
        let tools: &[_] = if self == Self::Build { &[] } else { &TOOLS };
        let more: &[_] = if self == Self::AllKernels { &GUEST_TOOLS } else { &[] };
        tools.iter().chain(more)
    }
}

/// Where bpf-linker's LLVM is; rustc must not be built with a newer one, or the linker cannot read its bitcode.
const LLVM_PREFIX: &str = "/usr/lib/llvm-22";

/// What the scenarios run: program, and the package that brings it.
const TOOLS: [(&str, &str); 12] = [
    ("ip", "iproute2"),
    ("iptables", "iptables"),
    ("tcpdump", "tcpdump"),
    ("curl", "curl"),
    ("nghttpx", "nghttp2-proxy"),
    ("nghttp", "nghttp2-client"),
    ("iperf3", "iperf3"),
    ("openssl", "openssl"),
    ("mount", "mount"),
    ("buildah", "buildah"),
    ("runc", "runc"),
    ("strip", "binutils"),
];

/// What boots another kernel and fills its first file system.
const GUEST_TOOLS: [(&str, &str); 2] =
    [("qemu-system-x86_64", "qemu-system-x86"), ("busybox", "busybox-static")];

/// A compiler with `core` for the BPF target, and its clippy.
const COMPILER_PACKAGES: [&str; 3] = ["rustc-web", "libstd-rust-web-dev-bpf", "rust-web-clippy"];

/// What bpf-linker is built with. `libllvm22`, which it runs with, comes along.
const LINKER_PACKAGES: [&str; 1] = ["llvm-22-dev"];

/// Components of the workspace's toolchain: the cargo subcommand that shows one, and its name.
const COMPONENTS: [(&str, &str); 2] = [("fmt", "rustfmt"), ("clippy", "clippy")];

/// One line of the report.
struct Finding {
    what: &'static str,
    state: Result<String, String>,
}

pub(crate) fn run(options: Options) -> Result<ExitCode> {
    let purpose = match (options.build, options.kernels) {
        (true, _) => Purpose::Build,
        (false, false) => Purpose::OwnKernel,
        (false, true) => Purpose::AllKernels,
    };
    if !options.check {
        return ensure(purpose).map(|()| ExitCode::SUCCESS);
    }
    let findings = findings(purpose);
    report(&findings);
    Ok(if findings.iter().all(|finding| finding.state.is_ok()) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Installs what is missing; fails when afterwards something that has no substitute is still missing.
///
/// The reference objects are the substitute for a BPF toolchain, as long as they match the sources.
pub(crate) fn ensure(purpose: Purpose) -> Result<()> {
    if findings(purpose).iter().any(|finding| finding.state.is_err()) {
        install(purpose);
    }
    let findings = findings(purpose);
    report(&findings);
    let missing: Vec<_> = findings
        .iter()
        .filter(|finding| finding.state.is_err())
        .map(|finding| finding.what)
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    let only_bpf =
        missing.iter().all(|what| ["bpf compiler", "bpf clippy", "bpf-linker"].contains(what));
    if only_bpf
        && objects::state(&workspace::reference_objects(), &objects::current_hash()?)?
            == State::Current
    {
        println!("without a BPF toolchain the reference objects serve: they match the sources");
        return Ok(());
    }
    bail!("still missing: {}", missing.join(", "));
}

/// Looks at everything this task knows how to install.
fn findings(purpose: Purpose) -> Vec<Finding> {
    let mut findings: Vec<Finding> = purpose
        .tools()
        .map(|(program, package)| Finding {
            what: program,
            state: command::find(program)
                .map(|path| path.display().to_string())
                .ok_or_else(|| format!("package {package} on Debian")),
        })
        .collect();
    let toolchain = Toolchain::find();
    if purpose != Purpose::Build {
        findings.extend(COMPONENTS.map(|(subcommand, component)| {
            Finding {
                what: component,
                state: command::probe(command::cargo(subcommand).arg("--version"))
                    .ok_or_else(|| format!("rustup component add {component}")),
            }
        }));
        findings.push(Finding {
            what: "bpf clippy",
            state: match &toolchain {
                Some(toolchain) if toolchain.has_clippy() => {
                    Ok("comes with the bpf compiler".into())
                }
                _ => {
                    Err("package rust-web-clippy on Debian, the clippy component elsewhere".into())
                }
            },
        });
        findings.push(Finding {
            what: "chart tools",
            state: if chart::are_installed() {
                Ok(chart::folder().display().to_string())
            } else {
                Err(format!("python3 -m venv, pip install -r {}", chart::requirements().display()))
            },
        });
    }
    findings.push(Finding {
        what: "bpf compiler",
        state: toolchain.map(|toolchain| toolchain.to_string()).ok_or_else(|| {
            format!(
                "core for {TARGET}: packages {} on Debian; elsewhere rustup component add rust-src",
                COMPILER_PACKAGES.join(", ")
            )
        }),
    });
    findings.push(Finding {
        what: "bpf-linker",
        state: match linker_version() {
            Some(version) if version == LINKER_VERSION => Ok(version.to_string()),
            Some(version) => Err(format!("{LINKER_VERSION}, found {version}")),
            None => Err(format!("{LINKER_VERSION}, built with LLVM 22")),
        },
    });
    findings
}

fn report(findings: &[Finding]) {
    for Finding { what, state } in findings {
        match state {
            Ok(found) => println!("ok       {what:<18} {found}"),
            Err(needed) => println!("missing  {what:<18} {needed}"),
        }
    }
}

/// Tries every step whose result is missing. What fails is told, and the report that follows shows what it cost.
fn install(purpose: Purpose) {
    let missing_tools: Vec<&str> = purpose
        .tools()
        .filter(|(program, _)| command::find(program).is_none())
        .map(|(_, package)| *package)
        .collect();
    let toolchain = Toolchain::find();
    let lacks_linker = || linker_version() != Some(LINKER_VERSION);
    let needs_llvm = lacks_linker() && !Path::new(LLVM_PREFIX).join("bin/llvm-config").is_file();

    if command::find("apt-get").is_none() {
        println!(
            "this is not Debian or a relative of it: install what is reported as missing by hand"
        );
    } else if !missing_tools.is_empty()
        || toolchain.as_ref().is_none_or(|it| !it.has_clippy())
        || needs_llvm
    {
        attempt(apt().map(|mut apt| {
            apt.args(["update", "-qq"]);
            apt
        }));
        // One by one the groups may fail: an older release has every tool, but no compiler for BPF.
        if !missing_tools.is_empty() {
            attempt(apt_install(&missing_tools));
        }
        if toolchain.is_none_or(|it| !it.has_clippy()) {
            attempt(apt_install(&COMPILER_PACKAGES));
        }
        if needs_llvm {
            attempt(apt_install(&LINKER_PACKAGES));
        }
    }

    if purpose != Purpose::Build
        && !chart::are_installed()
        && let Err(error) = ensure_chart_tools()
    {
        println!("xtask: {error:#}");
    }

    if command::find("rustup").is_some() {
        let wanted = if purpose == Purpose::Build { [].as_slice() } else { &COMPONENTS };
        for &(subcommand, component) in wanted {
            if command::probe(command::cargo(subcommand).arg("--version")).is_none() {
                attempt(Ok(rustup_add(component)));
            }
        }
        if Toolchain::find().is_none() {
            println!("no packaged compiler for {TARGET}: trying the sources of core from rustup");
            attempt(Ok(rustup_add("rust-src")));
        }
    }

    if lacks_linker() {
        let mut cargo = Command::new("cargo");
        cargo
            .args(["install", "bpf-linker", "--version", &LINKER_VERSION.to_string(), "--locked"])
            .args(["--no-default-features", "--features", "llvm-22"]);
        if Path::new(LLVM_PREFIX).is_dir() {
            cargo.env("LLVM_PREFIX", LLVM_PREFIX);
        }
        attempt(Ok(cargo));
    }
}

/// Installs what renders and checks the chart, unless it is there.
pub(crate) fn ensure_chart_tools() -> Result<()> {
    if chart::are_installed() {
        return Ok(());
    }
    let has_venv =
        command::probe(Command::new("python3").args(["-c", "import ensurepip, venv"])).is_some();
    if !has_venv && command::find("apt-get").is_some() {
        attempt(apt_install(&["python3-venv"]));
    }
    chart::install()
}

fn apt() -> Result<Command> {
    command::as_root("apt-get", &[("DEBIAN_FRONTEND", OsStr::new("noninteractive"))])
}

fn apt_install(packages: &[&str]) -> Result<Command> {
    let mut apt = apt()?;
    // `--no-remove`: these packages conflict with a distribution's own rustc, which is not ours to take away.
    apt.args([
        "install",
        "-qq",
        "--yes",
        "--no-install-recommends",
        "--no-remove",
        "-o",
        "Dpkg::Use-Pty=0",
    ])
    .args(packages);
    Ok(apt)
}

fn rustup_add(component: &str) -> Command {
    let mut rustup = Command::new("rustup");
    rustup.args(["component", "add", component]).current_dir(workspace::root());
    rustup
}

fn attempt(step: Result<Command>) {
    if let Err(error) = step.and_then(|mut command| command::run(&mut command)) {
        println!("xtask: {error:#}");
    }
}
