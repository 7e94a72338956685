//! `culvert cleanup`: takes away what a node left behind when no process of it runs.

use std::{
    fs,
    path::{Path, PathBuf},
};

use culvert_sys::netns::Netns;

use crate::{
    error::CaptureError,
    maps::Maps,
    node::SharedMaps,
    pins::{self, NodePins, PodPins},
    removal,
};

/// Ends all capture of the node `name` and removes its pins, of whichever ABI version; gives how many pods there were.
/// Refuses while a process holds the name. Blocks.
pub fn cleanup(bpffs: &Path, name: &str) -> Result<usize, CaptureError> {
    if !pins::is_bpffs(bpffs) {
        return Ok(0);
    }
    let pins = NodePins::take_alone(bpffs, name)?;
    let mut count = 0;
    for version in pins.versions()? {
        // Another version's maps may have another layout: what they say is left unread.
        let maps =
            if version.is_own() { Maps::open(&version).ok().map(SharedMaps::new) } else { None };
        // Nothing is marked any more, in no pod.
        removal::detach_node(&version)?;
        count += removal::remove_each(maps.as_ref(), version.pods()?)?;
        removal::remove_version(&version)?;
    }
    pins.remove_empty();
    Ok(count)
}

/// The namespace of a pinned pod: mounted somewhere, or some process's. `None` once it is gone: its inode number may by
/// now be another's, which must not be touched.
pub(crate) fn find_netns(pod: &PodPins) -> Option<Netns> {
    if pod.is_dead() {
        return None;
    }
    let mounted = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let processes = fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok);
    nsfs_mounts(&mounted)
        .chain(processes.map(|process| process.path().join("ns/net")))
        .filter_map(|path| Netns::open(&path).ok())
        .find(|netns| netns.inode() == pod.id())
}

/// Mount points of type nsfs in `mountinfo` (`proc_pid_mountinfo(5)`).
fn nsfs_mounts(mountinfo: &str) -> impl Iterator<Item = PathBuf> {
    mountinfo.lines().filter_map(|line| {
        let (mount, filesystem) = line.split_once(" - ")?;
        if filesystem.split(' ').next()? != "nsfs" {
            return None;
        }
        mount.split(' ').nth(4).map(PathBuf::from)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounted_namespaces_are_found() {
        let mountinfo = "36 35 0:33 / /sys/fs/bpf rw - bpf bpf rw\n\
                         99 24 0:4 net:[4026532288] /run/netns/a rw shared:1 - nsfs nsfs rw\n";
        let found: Vec<_> = nsfs_mounts(mountinfo).collect();
        assert_eq!(found, [PathBuf::from("/run/netns/a")]);
    }
}
