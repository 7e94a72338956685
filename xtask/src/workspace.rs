//! Where things are in the repository, and what `cargo metadata` says about it.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde_json::Value;

use crate::command;

/// The repository's root.
pub(crate) fn root() -> &'static Path {
    // A missing parent would mean that this crate was built from the file system's root.
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or_else(|| Path::new("/"))
}

/// Cargo's target folder, whichever it was told to use: the ancestor of this program that cargo has marked.
pub(crate) fn target() -> PathBuf {
    let own = env::current_exe().unwrap_or_default();
    own.ancestors()
        .find(|folder| folder.join("CACHEDIR.TAG").is_file())
        .map_or_else(|| root().join("target"), Path::to_owned)
}

/// Where `build-ebpf` puts the objects it made; `culvert-capture` embeds them from here.
pub(crate) fn fresh_objects() -> PathBuf {
    target().join("culvert-bpf")
}

/// The objects that the repository carries.
pub(crate) fn reference_objects() -> PathBuf {
    root().join("bpf-fixtures/objects")
}

/// Output of `cargo metadata`, workspace members only.
pub(crate) fn metadata() -> Result<Value> {
    let text =
        command::read(command::cargo("metadata").args(["--format-version", "1", "--no-deps"]))?;
    serde_json::from_str(&text).context("the output of cargo metadata")
}

/// The elements of the array under `key`; none when there is no such array.
pub(crate) fn items<'a>(value: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> + use<'a> {
    value.get(key).and_then(Value::as_array).into_iter().flatten()
}

/// The string under `key`.
pub(crate) fn text<'a>(value: &'a Value, key: &str) -> Option<&'a str> {
    value.get(key).and_then(Value::as_str)
}
