//! The compiled BPF objects, fresh and reference: are they the ones that these sources make?

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use sha2::{Digest as _, Sha256};

use crate::hash_sources::{HASH_FILE, source_hash};
use crate::workspace;

/// The objects, one for each attach scope; each is a binary target of `culvert-ebpf`.
pub(crate) const OBJECTS: [&str; 3] = ["node", "exempt", "pod"];

/// Name of the file that lists the reference objects' digests, in the format of `sha256sum`.
pub(crate) const DIGESTS_FILE: &str = "SHA256SUMS";

/// Name of the file that tells what built the reference objects.
pub(crate) const TOOLCHAIN_FILE: &str = "TOOLCHAIN";

/// What a folder of objects is to the sources of now.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Built from these sources.
    Current,
    /// Built from other sources.
    Stale,
    /// A file that should be there is not.
    Missing(String),
    /// The digests disagree with the objects.
    Altered,
}

impl State {
    /// As a sentence's end: "the reference objects ...".
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::Current => "match the sources".into(),
            Self::Stale => "were built from other sources".into(),
            Self::Missing(file) => format!("are incomplete: there is no {file}"),
            Self::Altered => format!("differ from their {DIGESTS_FILE}"),
        }
    }
}

/// The file name of an object.
pub(crate) fn file_name(object: &str) -> String {
    format!("{object}.o")
}

/// The hash of the BPF sources as they are now.
pub(crate) fn current_hash() -> Result<String> {
    source_hash(workspace::root()).context("hash the BPF sources")
}

/// What the objects in `folder` are to the sources whose hash is `hash`.
pub(crate) fn state(folder: &Path, hash: &str) -> Result<State> {
    for file in OBJECTS.map(file_name).iter().map(String::as_str).chain([HASH_FILE]) {
        if !folder.join(file).is_file() {
            return Ok(State::Missing(file.into()));
        }
    }
    if read(&folder.join(HASH_FILE))?.trim() != hash {
        return Ok(State::Stale);
    }
    let digests_file = folder.join(DIGESTS_FILE);
    if digests_file.is_file() && read(&digests_file)? != digests(folder)? {
        return Ok(State::Altered);
    }
    Ok(State::Current)
}

/// The digests of the objects in `folder`, in the format of `sha256sum`.
pub(crate) fn digests(folder: &Path) -> Result<String> {
    let mut lines = Vec::new();
    for name in OBJECTS.map(file_name) {
        let path = folder.join(&name);
        let bytes = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
        lines.push(format!("{:x}  {name}\n", Sha256::digest(bytes)));
    }
    Ok(lines.concat())
}

/// Writes `bytes` to `path` unless they are there already: a new time stamp would rebuild what embeds the file.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    if fs::read(path).is_ok_and(|old| old == bytes) {
        return Ok(());
    }
    fs::write(path, bytes).with_context(|| format!("write {}", path.display()))
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("read {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(hash: &str) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for object in OBJECTS {
            write(&folder.path().join(file_name(object)), object.as_bytes()).unwrap();
        }
        write(&folder.path().join(HASH_FILE), hash.as_bytes()).unwrap();
        folder
    }

    #[test]
    fn objects_of_these_sources_are_current() {
        assert_eq!(state(folder("abc\n").path(), "abc").unwrap(), State::Current);
    }

    #[test]
    fn objects_of_other_sources_are_stale() {
        assert_eq!(state(folder("abc\n").path(), "def").unwrap(), State::Stale);
    }

    #[test]
    fn an_absent_object_is_named() {
        let folder = folder("abc");
        fs::remove_file(folder.path().join("exempt.o")).unwrap();
        assert_eq!(state(folder.path(), "abc").unwrap(), State::Missing("exempt.o".into()));
    }

    #[test]
    fn an_object_changed_after_its_digest_was_written_is_seen() {
        let folder = folder("abc");
        write(&folder.path().join(DIGESTS_FILE), digests(folder.path()).unwrap().as_bytes())
            .unwrap();
        write(&folder.path().join("pod.o"), b"other").unwrap();
        assert_eq!(state(folder.path(), "abc").unwrap(), State::Altered);
    }

    #[test]
    fn digests_are_what_sha256sum_prints() {
        let want = "425c89ed5bb78a7623fae60fd8a6f648488168740fe82cf6ad34caa4d07aa972  pod.o";
        assert_eq!(digests(folder("").path()).unwrap().lines().last(), Some(want));
    }
}
