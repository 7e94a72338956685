//! Writes the archive that a kernel unpacks as its first file system: cpio in the "newc" format.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Modes of what is put in: type and permissions.
const FOLDER: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const LINK: u32 = 0o120_777;

/// The name that ends an archive.
const TRAILER: &str = "TRAILER!!!";

/// An archive in the making.
#[derive(Default)]
pub(super) struct Archive {
    bytes: Vec<u8>,
    folders: BTreeSet<PathBuf>,
    entries: u32,
}

impl Archive {
    /// A folder with those above it; one that is there already is left as it is.
    pub(super) fn folder(&mut self, path: &Path) {
        let Ok(path) = path.strip_prefix("/") else { return };
        let mut above: Vec<_> = path.ancestors().collect();
        above.reverse();
        for folder in above {
            if !folder.as_os_str().is_empty() && self.folders.insert(folder.to_owned()) {
                self.entry(&folder.to_string_lossy(), FOLDER, &[]);
            }
        }
    }

    /// A file that may be run; `path` is absolute.
    pub(super) fn file(&mut self, path: &Path, content: &[u8]) {
        self.within(path, PROGRAM, content);
    }

    /// A symbolic link at `path`.
    pub(super) fn link(&mut self, path: &Path, to: &str) {
        self.within(path, LINK, to.as_bytes());
    }

    /// The whole archive.
    pub(super) fn finish(mut self) -> Vec<u8> {
        self.entry(TRAILER, 0, &[]);
        self.bytes
    }

    fn within(&mut self, path: &Path, mode: u32, content: &[u8]) {
        if let Some(folder) = path.parent() {
            self.folder(folder);
        }
        self.entry(path.to_string_lossy().trim_start_matches('/'), mode, content);
    }

    fn entry(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.entries += 1;
        let size = u32::try_from(content.len()).unwrap_or(u32::MAX);
        let name_size = u32::try_from(name.len() + 1).unwrap_or(u32::MAX);
        // Inode, mode, uid, gid, links, mtime, size, four device numbers, size of the name, checksum.
        let fields = [self.entries, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, name_size, 0];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_laid_out_as_the_kernel_reads_it() {
        let mut archive = Archive::default();
        archive.file(Path::new("/init"), b"#!/bin/sh\n");
        let fields = [1, 0o100_755, 0, 0, 1, 0, 10, 0, 0, 0, 0, 5, 0];
        let header: String = fields.map(|field: u32| format!("{field:08x}")).concat();
        // Name and content each end at a multiple of four, the name counted with its header of 110 bytes.
        let want = format!("070701{header}init\0\0#!/bin/sh\n\0\0");
        assert_eq!(String::from_utf8(archive.bytes).unwrap(), want);
    }

    #[test]
    fn folders_come_once_and_before_what_is_in_them() {
        let mut archive = Archive::default();
        archive.file(Path::new("/a/b/one"), b"");
        archive.link(Path::new("/a/b/two"), "one");
        let text = String::from_utf8_lossy(&archive.finish()).into_owned();
        let names: Vec<_> = text
            .split("070701")
            .skip(1)
            .map(|entry| entry.split_at(104).1.split('\0').next().unwrap().to_owned())
            .collect();
        assert_eq!(names, ["a", "a/b", "a/b/one", "a/b/two", TRAILER]);
    }
}
