//! Which files there are, and whether one is at rest.

use std::{
    collections::BTreeMap,
    fs::Metadata,
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

/// What identifies a version of a file without reading it.
pub(super) type Version = Option<(u64, u64, u64, i64, i64)>;

/// Directories below it are not looked into.
const MAX_DEPTH: usize = 16;

/// Whether the files have been looked at before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    First,
    Again,
}

/// Whether a file can be read: one that is written in place is, once it has not changed from one look to the next. Its
/// first half may be a whole document that lacks, for instance, every policy. One that takes another's place by a rename
/// is whole.
pub(super) fn is_at_rest(look: Look, read: Version, before: Version, now: Version) -> bool {
    let file = |version: Version| version.map(|(device, inode, ..)| (device, inode));
    look == Look::First || before == now || (read.is_some() && file(read) != file(now))
}

/// The YAML and JSON files at or below `root`, without hidden ones: Kubernetes keeps those behind links beside them.
pub(super) fn files(root: &Path) -> io::Result<BTreeMap<PathBuf, Version>> {
    let mut found = BTreeMap::new();
    let metadata = std::fs::metadata(root)?;
    if metadata.is_file() {
        found.insert(root.to_owned(), Some(version(&metadata)));
        return Ok(found);
    }
    walk(root, 0, &mut found)?;
    Ok(found)
}

fn walk(dir: &Path, depth: usize, found: &mut BTreeMap<PathBuf, Version>) -> io::Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let path = entry.path();
        if entry.file_name().as_encoded_bytes().starts_with(b".") {
            continue;
        }
        if entry.file_type()?.is_dir() {
            if depth < MAX_DEPTH {
                walk(&path, depth + 1, found)?;
            }
        } else if is_yaml(&path)
            && let Ok(metadata) = std::fs::metadata(&path)
            && metadata.is_file()
        {
            found.insert(path, Some(version(&metadata)));
        }
    }
    Ok(())
}

fn is_yaml(path: &Path) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str());
    matches!(extension, Some("yaml" | "yml" | "json"))
}

fn version(metadata: &Metadata) -> (u64, u64, u64, i64, i64) {
    let m = metadata;
    (m.dev(), m.ino(), m.size(), m.mtime(), m.mtime_nsec())
}
