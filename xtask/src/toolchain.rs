//! Finds what can compile and link BPF programs on this machine. Installing it is `setup`'s job.

use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::{command, workspace};

/// The target triple of the programs.
pub(crate) const TARGET: &str = "bpfel-unknown-none";

/// The linker's version; another one may write other bytes for the same sources.
pub(crate) const LINKER_VERSION: Version = Version { major: 0, minor: 13, patch: 0 };

/// A compiler that has, or can build, `core` for [`TARGET`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Compiler {
    /// A distribution's compiler that comes with `core` for the target.
    Packaged(PathBuf),
    /// A rustup toolchain, by name, with the sources of `core`.
    Rustup(String),
}

/// A compiler and what it must not leave in the objects.
#[derive(Debug)]
pub(crate) struct Toolchain {
    compiler: Compiler,
    sysroot: PathBuf,
}

impl Toolchain {
    /// The first that is complete: the distribution's compiler, then the toolchain that runs us, then a nightly.
    pub(crate) fn find() -> Option<Self> {
        let active = std::env::var_os("RUSTUP_TOOLCHAIN").and_then(|name| name.into_string().ok());
        packaged()
            .or_else(|| active.as_deref().into_iter().chain(["nightly"]).find_map(from_rustup))
    }

    /// `cargo SUBCOMMAND` for the programs in the workspace at `root`, with all that decides what is built.
    pub(crate) fn cargo(&self, subcommand: &str, root: &Path, target_folder: &Path) -> Command {
        let mut command = match &self.compiler {
            Compiler::Packaged(rustc) => {
                // Lints must come with the compiler's own version, so not from the workspace's toolchain.
                let program = match subcommand {
                    "clippy" => rustc.with_file_name("cargo-clippy"),
                    _ => PathBuf::from("cargo"),
                };
                let mut command = Command::new(program);
                command.env("RUSTC", rustc).arg(subcommand);
                command
            }
            Compiler::Rustup(name) => {
                let mut command = Command::new("rustup");
                command.args(["run", name, "cargo", subcommand, "-Zbuild-std=core"]);
                command
            }
        };
        clear(&mut command);
        command
            .current_dir(root)
            .env("PATH", command::path_with(&command::cargo_bin()))
            // aya-ebpf and -Zbuild-std use features that a stable compiler refuses otherwise.
            .env("RUSTC_BOOTSTRAP", "1")
            .env("CARGO_ENCODED_RUSTFLAGS", self.flags(root))
            .arg("--target-dir")
            .arg(target_folder)
            .args(["--profile", "bpf", "--target", TARGET])
            .args(["--package", "culvert-ebpf", "--features", "programs", "--bins"]);
        command
    }

    /// Can this toolchain lint, too?
    pub(crate) fn has_clippy(&self) -> bool {
        match &self.compiler {
            Compiler::Packaged(rustc) => rustc.with_file_name("cargo-clippy").is_file(),
            Compiler::Rustup(name) => command::probe(Command::new("rustup").args([
                "run",
                name,
                "cargo",
                "clippy",
                "--version",
            ]))
            .is_some(),
        }
    }

    /// Everything that decides the objects' bytes beside the sources and `Cargo.lock`, a line each.
    pub(crate) fn describe(&self) -> Result<String> {
        let (mut rustc, mut cargo) = match &self.compiler {
            Compiler::Packaged(rustc) => (Command::new(rustc), Command::new("cargo")),
            Compiler::Rustup(name) => (rustup_run(name, "rustc"), rustup_run(name, "cargo")),
        };
        clear(&mut cargo);
        let rustc = command::read(rustc.arg("-vV"))?;
        let first = rustc.lines().next().unwrap_or_default();
        let llvm = rustc.lines().find(|line| line.starts_with("LLVM version")).unwrap_or_default();
        let cargo = command::read(cargo.arg("--version").current_dir(workspace::root()))?;
        let linker = linker_version().context("bpf-linker does not run")?;
        Ok(format!("{first}\n{llvm}\n{}\nbpf-linker {linker}\n", cargo.trim()))
    }

    fn flags(&self, root: &Path) -> OsString {
        let mut flags: Vec<OsString> = [
            "-Clinker=bpf-linker",
            "-Cdebuginfo=2",
            "-Clink-arg=--btf",
            // `v3` compares 32-bit halves; Linux 5.10 verifies it, and bpf-linker's own `--cpu` is overruled by rustc.
            "-Ctarget-cpu=v3",
            "--cfg",
            // No program reads registers, so one set of objects serves every little-endian machine.
            "bpf_target_arch=\"x86_64\"",
        ]
        .map(OsString::from)
        .into();
        // Without these the objects would depend on where they were built. The last that matches counts, and either of
        // the later two may lie in a sysroot like `/usr`.
        let home = command::cargo_home();
        let mut remap = |path: &Path, name: &str| {
            let mut flag = OsString::from("--remap-path-prefix=");
            flag.push(path);
            flag.push("=/");
            flag.push(name);
            flags.push(flag);
        };
        remap(&self.sysroot, "rust");
        remap(&home, "cargo");
        // Folders of downloaded crates are named after where they came from, which may be a mirror.
        for registry in fs::read_dir(home.join("registry/src")).into_iter().flatten().flatten() {
            remap(&registry.path(), "crates");
        }
        remap(root, "culvert");
        flags.join(&OsString::from("\x1f"))
    }
}

impl fmt::Display for Toolchain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.compiler {
            Compiler::Packaged(rustc) => write!(f, "{} with core for {TARGET}", rustc.display()),
            Compiler::Rustup(name) => write!(f, "rustup's {name} with the sources of core"),
        }
    }
}

/// The version of the `bpf-linker` that a build would use; `None` when there is none that runs.
pub(crate) fn linker_version() -> Option<Version> {
    let mut command = Command::new("bpf-linker");
    let output = command::probe(
        command.arg("--version").env("PATH", command::path_with(&command::cargo_bin())),
    )?;
    Version::in_text(&output)
}

/// A compiler of the distribution, which its `core` for the target shows to be whole.
fn packaged() -> Option<Toolchain> {
    let rustc = Path::new("/usr/bin/rustc");
    let sysroot = PathBuf::from(command::probe(Command::new(rustc).args(["--print", "sysroot"]))?);
    let libraries = sysroot.join("lib/rustlib").join(TARGET).join("lib");
    let core = fs::read_dir(libraries)
        .ok()?
        .flatten()
        .any(|file| file.file_name().to_str().is_some_and(|name| name.starts_with("libcore-")));
    core.then(|| Toolchain { compiler: Compiler::Packaged(rustc.to_owned()), sysroot })
}

/// The toolchain of that name, if rustup has it with the `rust-src` component.
fn from_rustup(name: &str) -> Option<Toolchain> {
    let sysroot =
        PathBuf::from(command::probe(rustup_run(name, "rustc").args(["--print", "sysroot"]))?);
    let sources = sysroot.join("lib/rustlib/src/rust/library/core/Cargo.toml");
    sources.is_file().then(|| Toolchain { compiler: Compiler::Rustup(name.to_owned()), sysroot })
}

fn rustup_run(toolchain: &str, program: &str) -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", toolchain, program]);
    clear(&mut command);
    command
}

/// Removes what the cargo above us, or the user for host builds, set: it would decide about the programs, too.
fn clear(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(decides_builds) {
            command.env_remove(name);
        }
    }
}

fn decides_builds(name: &str) -> bool {
    // Where crates come from, and what the terminal can show, stay the user's choice.
    const KEPT: [&str; 6] = [
        "CARGO_HOME",
        "CARGO_HTTP_",
        "CARGO_NET_",
        "CARGO_REGISTR",
        "CARGO_SOURCE_",
        "CARGO_TERM_",
    ];
    const DECIDING: [&str; 3] = ["CARGO", "RUSTC", "RUSTDOC"];
    let starts = |prefix: &&str| name.starts_with(prefix);
    ["RUSTFLAGS", "RUSTUP_TOOLCHAIN"].contains(&name)
        || (DECIDING.iter().any(starts) && !KEPT.iter().any(starts))
}

/// A version of three numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Version {
    major: u32,
    minor: u32,
    patch: u32,
}

impl Version {
    /// The first word of `text` that is a version, as in "rustc 1.96.0 (ac68faa20 2026-05-25)".
    pub(crate) fn in_text(text: &str) -> Option<Self> {
        text.split_whitespace().find_map(|word| {
            let word = word.split(['-', '+']).next()?;
            let mut numbers = word.split('.').map(|number| number.parse().ok());
            let version =
                Self { major: numbers.next()??, minor: numbers.next()??, patch: numbers.next()?? };
            numbers.next().is_none().then_some(version)
        })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, want: Option<&str>) {
        assert_eq!(Version::in_text(text).map(|version| version.to_string()).as_deref(), want);
    }

    #[test]
    fn a_version_is_found_in_what_programs_print() {
        check("bpf-linker 0.13.0", Some("0.13.0"));
        check("rustc 1.96.0 (ac68faa20 2026-05-25) (built from a source tarball)", Some("1.96.0"));
        check("rustc 1.98.0-nightly (abc 2026-06-01)", Some("1.98.0"));
        check("bpf-linker 0.13", None);
        check("tool 1.2.3.4", None);
        check("", None);
    }

    #[test]
    fn versions_order_by_number() {
        assert!(Version::in_text("0.9.0") < Version::in_text("0.13.0"));
    }

    #[test]
    fn a_bpf_build_inherits_only_where_crates_come_from() {
        for name in [
            "CARGO",
            "CARGO_BUILD_TARGET",
            "CARGO_PROFILE_BPF_LTO",
            "RUSTC_WRAPPER",
            "RUSTFLAGS",
            "RUSTUP_TOOLCHAIN",
        ] {
            assert!(decides_builds(name), "{name} is inherited");
        }
        for name in
            ["CARGO_HOME", "CARGO_NET_OFFLINE", "CARGO_REGISTRIES_X_INDEX", "RUSTUP_HOME", "PATH"]
        {
            assert!(!decides_builds(name), "{name} is removed");
        }
    }
}
