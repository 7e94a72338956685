//! Builds what the tests run, and knows each test program from what cargo says about it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use crate::command;
use crate::workspace::{self, items, text};

/// Packages whose `tests/` folders need root, BPF and network namespaces.
const NETNS_PACKAGES: [&str; 2] = ["culvert-capture", "culvert-tests"];

/// The one among them that needs neither.
const OF_FILES: &str = "deploy";

/// How long a build may take; the first one on a machine compiles everything.
pub(super) const BUILD_LIMIT: Duration = Duration::from_mins(25);

/// A built test program.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Program {
    pub(super) package: String,
    /// Kind and name, as cargo calls it: "lib culvert".
    pub(super) target: String,
    pub(super) folder: PathBuf,
    pub(super) executable: PathBuf,
    pub(super) netns: bool,
}

impl Program {
    /// How summaries call it.
    pub(super) fn name(&self) -> String {
        format!("{}, {}", self.package, self.target)
    }
}

/// Built binaries: the proxy, and what drives it.
pub(crate) struct Binaries {
    /// The proxy.
    pub(crate) culvert: PathBuf,
    /// The asked for binary of `culvert-tests`.
    pub(crate) runner: PathBuf,
}

/// Builds the proxy and the binary `runner` of `culvert-tests` with `profile`.
pub(crate) fn build_binaries(runner: &str, profile: &str) -> Result<Binaries> {
    let built = build(&["--bin", "culvert", "--bin", runner, "--profile", profile])?;
    Ok(Binaries { culvert: executable(&built, "culvert")?, runner: executable(&built, runner)? })
}

/// Builds the proxy as the tests run it.
pub(super) fn build_culvert() -> Result<PathBuf> {
    executable(&build(&["--bin", "culvert"])?, "culvert")
}

/// Builds every test program.
pub(super) fn build_programs() -> Result<Vec<Program>> {
    let metadata = workspace::metadata()?;
    let built = artifacts(command::cargo("test").args(["--workspace", "--no-run"]))?;
    let mut programs: Vec<_> =
        built.iter().filter_map(|artifact| program(artifact, &metadata)).collect();
    // Quick ones first: what they find is likely the reason for what scenarios would.
    programs
        .sort_by(|a, b| (a.netns, &a.package, &a.target).cmp(&(b.netns, &b.package, &b.target)));
    Ok(programs)
}

/// `cargo build --workspace`, so that each call selects the same features of what the crates share.
fn build(args: &[&str]) -> Result<Vec<Value>> {
    artifacts(command::cargo("build").arg("--workspace").args(args))
}

/// Runs cargo with `build` and returns its messages about what it has built.
fn artifacts(build: &mut Command) -> Result<Vec<Value>> {
    let mut built = Vec::new();
    let status = command::follow(
        build.arg("--message-format=json-render-diagnostics"),
        BUILD_LIMIT,
        |line| {
            if !line.starts_with("{\"reason\"") {
                println!("{line}");
            } else if let Ok(message) = serde_json::from_str::<Value>(line)
                && text(&message, "reason") == Some("compiler-artifact")
            {
                built.push(message);
            }
        },
    )?;
    match status {
        Some(status) if status.success() => Ok(built),
        _ => bail!("the build failed, see above"),
    }
}

fn executable(built: &[Value], binary: &str) -> Result<PathBuf> {
    built
        .iter()
        .filter(|artifact| artifact.pointer("/target/name").and_then(Value::as_str) == Some(binary))
        .find_map(|artifact| text(artifact, "executable"))
        .map(PathBuf::from)
        .with_context(|| format!("cargo built no binary called {binary}"))
}

/// The test program that `artifact` tells of, if it is one.
fn program(artifact: &Value, metadata: &Value) -> Option<Program> {
    if artifact.pointer("/profile/test") != Some(&Value::Bool(true)) {
        return None;
    }
    let manifest = text(artifact, "manifest_path")?;
    let package = items(metadata, "packages")
        .find(|package| text(package, "manifest_path") == Some(manifest))?;
    let package = text(package, "name")?.to_owned();
    let target = artifact.get("target")?;
    let kind = items(target, "kind").next().and_then(Value::as_str)?;
    let name = text(target, "name")?;
    Some(Program {
        netns: kind == "test" && name != OF_FILES && NETNS_PACKAGES.contains(&package.as_str()),
        target: format!("{kind} {name}"),
        folder: Path::new(manifest).parent()?.to_owned(),
        executable: PathBuf::from(text(artifact, "executable")?),
        package,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn artifact(test: bool, kind: &str) -> Value {
        json!({
            "reason": "compiler-artifact",
            "manifest_path": "/r/tests/Cargo.toml",
            "target": { "name": "e2e", "kind": [kind] },
            "profile": { "test": test },
            "executable": "/r/target/debug/deps/e2e-1",
        })
    }

    fn metadata() -> Value {
        json!({ "packages": [{ "name": "culvert-tests", "manifest_path": "/r/tests/Cargo.toml" }] })
    }

    #[test]
    fn a_scenario_program_is_recognised() {
        let want = Program {
            package: "culvert-tests".into(),
            target: "test e2e".into(),
            folder: "/r/tests".into(),
            executable: "/r/target/debug/deps/e2e-1".into(),
            netns: true,
        };
        assert_eq!(program(&artifact(true, "test"), &metadata()), Some(want));
    }

    #[test]
    fn the_harness_own_tests_need_no_namespaces() {
        assert!(program(&artifact(true, "lib"), &metadata()).is_some_and(|program| !program.netns));
    }

    #[test]
    fn what_is_no_test_is_not_run() {
        assert_eq!(program(&artifact(false, "bin"), &metadata()), None);
    }
}
