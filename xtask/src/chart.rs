//! `cargo xtask chart`: the plain manifests of `deploy/manifests`, as the Helm chart renders them; and the tools that do,
//! which are Helm's own library and Kubernetes' schemas, as Python packages in a folder beneath `target`.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use serde_json::{Value, json};

use crate::workspace::{self, text};
use crate::{command, setup};

/// Render deploy/manifests from the Helm chart.
#[derive(Args)]
pub(crate) struct Options {}

/// Versions of Kubernetes that manifests must be valid for: the first with every field, and a late one.
const KUBERNETES: [&str; 2] = ["1.30", "1.37"];

pub(crate) fn run(Options {}: Options) -> Result<ExitCode> {
    setup::ensure_chart_tools()?;
    let deploy = workspace::root().join("deploy");
    let path = deploy.join("manifests.json");
    let jobs = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    let jobs: Value =
        serde_json::from_str(&jobs).with_context(|| format!("parse {}", path.display()))?;
    let rendered = render(&jobs)?;
    for (name, result) in rendered.as_object().into_iter().flatten() {
        let Some(manifests) = text(result, "manifests") else {
            bail!("{name}: {}", text(result, "error").unwrap_or("not rendered"));
        };
        let problems = result.get("problems").and_then(Value::as_array);
        if let Some(problems) = problems.filter(|problems| !problems.is_empty()) {
            bail!("{name}: {problems:?}");
        }
        let path = deploy.join("manifests").join(format!("{name}.yaml"));
        fs::write(&path, manifests).with_context(|| format!("write {}", path.display()))?;
        println!("wrote {}", path.display());
    }
    Ok(ExitCode::SUCCESS)
}

/// What `deploy/render.py` makes of `jobs`.
fn render(jobs: &Value) -> Result<Value> {
    let deploy = workspace::root().join("deploy");
    let input = json!({"chart": deploy.join("helm/culvert"), "versions": KUBERNETES, "jobs": jobs});
    let mut python = Command::new(python());
    python.arg(deploy.join("render.py")).stdin(Stdio::piped()).stdout(Stdio::piped());
    let line = command::announce(&python);
    let mut child = python.spawn().with_context(|| format!("start `{line}`"))?;
    let stdin = child.stdin.take().context("its standard input is piped")?;
    serde_json::to_writer(stdin, &input).with_context(|| format!("write to `{line}`"))?;
    let output = child.wait_with_output().with_context(|| format!("wait for `{line}`"))?;
    if !output.status.success() {
        bail!("`{line}` failed: {}", output.status);
    }
    serde_json::from_slice(&output.stdout).with_context(|| format!("parse what `{line}` wrote"))
}

/// Where the tools are.
pub(crate) fn folder() -> PathBuf {
    workspace::target().join("chart-tools")
}

/// The interpreter that has them.
fn python() -> PathBuf {
    folder().join("bin/python")
}

/// What the tools are to be.
pub(crate) fn requirements() -> PathBuf {
    workspace::root().join("deploy/requirements.txt")
}

/// A copy of the requirements that the folder was made for, written last.
fn stamp() -> PathBuf {
    folder().join("requirements.txt")
}

/// Whether they are there, as they are required.
pub(crate) fn are_installed() -> bool {
    let read = |path| fs::read(path).ok();
    read(stamp()).is_some_and(|stamp| Some(stamp) == read(requirements()))
}

/// Makes the folder anew.
pub(crate) fn install() -> Result<()> {
    command::run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(folder()))?;
    command::run(
        Command::new(python())
            .args(["-m", "pip", "install", "--quiet", "--only-binary", ":all:", "--requirement"])
            .arg(requirements()),
    )?;
    fs::copy(requirements(), stamp()).context("note what was installed")?;
    Ok(())
}
