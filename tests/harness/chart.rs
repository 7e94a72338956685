//! The Helm chart, rendered by Helm's library and checked against Kubernetes' schemas as `deploy/render.py` does it.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;
use serde_json::{Value, json};

/// What came out.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub enum Rendered {
    /// Manifests.
    Done {
        /// As `helm template` prints them.
        manifests: String,
        /// What Kubernetes would refuse.
        problems: Vec<String>,
    },
    /// The chart refuses the values.
    Refused {
        /// With these words.
        error: String,
    },
}

/// Whether the tools are there that `cargo xtask setup` installs.
#[must_use]
pub fn is_available() -> bool {
    crate::require::tool(&python().to_string_lossy(), &["-c", "import helm_python"])
}

/// Renders and checks the chart once for each job: `{NAME: {"values": ...}}`.
pub fn render(jobs: &Value, versions: &[&str]) -> Result<BTreeMap<String, Rendered>> {
    let input = json!({"chart": deploy().join("helm/culvert"), "versions": versions, "jobs": jobs});
    let mut child = Command::new(python())
        .arg(deploy().join("render.py"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("start render.py")?;
    serde_json::to_writer(child.stdin.take().context("piped")?, &input)?;
    let output = child.wait_with_output()?;
    ensure!(output.status.success(), "render.py: {}", output.status);
    serde_json::from_slice(&output.stdout).context("parse what render.py wrote")
}

/// The objects of a file of manifests.
pub fn objects(manifests: &str) -> Result<Vec<Value>> {
    let all: Vec<Value> = serde_saphyr::from_multiple(manifests).context("parse manifests")?;
    Ok(all.into_iter().filter(|object| !object.is_null()).collect())
}

/// The object of this kind and name.
pub fn object<'a>(objects: &'a [Value], kind: &str, name: &str) -> Result<&'a Value> {
    let is_it = |object: &&Value| {
        object.get("kind") == Some(&kind.into())
            && object.pointer("/metadata/name") == Some(&name.into())
    };
    objects.iter().find(is_it).with_context(|| format!("no {kind} {name}"))
}

/// The manifests of this name, as they are in the repository.
pub fn committed(name: &str) -> Result<String> {
    let path = deploy().join("manifests").join(format!("{name}.yaml"));
    fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))
}

/// The folder `deploy` of the repository.
pub fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy")
}

fn python() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/chart-tools/bin/python")
}
