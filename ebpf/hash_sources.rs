// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The hash that ties BPF objects to the sources they were built from.
//!
//! Included with `#[path]` by what builds the objects and by what embeds them, so that both compute the same.

use std::collections::BTreeMap;
use std::path::Path;
use std::{fs, io};

use sha2::{Digest as _, Sha256};

/// Name of the file beside the objects that holds the hash, in one line.
pub(crate) const HASH_FILE: &str = "sources.sha256";

/// What the hash covers, relative to the workspace: folders with all below them, and single files.
pub(crate) const SOURCES: [&str; 4] =
    ["ebpf/Cargo.toml", "ebpf/abi/Cargo.toml", "ebpf/abi/src", "ebpf/src"];

/// SHA-256 in lower-case hex over every file of [`SOURCES`], in byte order of their paths relative to the workspace
/// (`/` between parts); for each: path, NUL, length in decimal, NUL, bytes.
pub(crate) fn source_hash(workspace_root: &Path) -> io::Result<String> {
    let mut files = BTreeMap::new();
    for source in SOURCES {
        collect(workspace_root, source, &mut files)?;
    }
    let mut hash = Sha256::new();
    for (path, bytes) in files {
        hash.update(format!("{path}\0{}\0", bytes.len()));
        hash.update(bytes);
    }
    Ok(format!("{:x}", hash.finalize()))
}

fn collect(root: &Path, relative: &str, files: &mut BTreeMap<String, Vec<u8>>) -> io::Result<()> {
    let path = root.join(relative);
    if !path.is_dir() {
        files.insert(relative.to_owned(), fs::read(path)?);
        return Ok(());
    }
    for entry in fs::read_dir(path)? {
        let name = entry?.file_name();
        let name =
            name.to_str().ok_or_else(|| io::Error::other("a source file name is not UTF-8"))?;
        collect(root, &format!("{relative}/{name}"), files)?;
    }
    Ok(())
}
