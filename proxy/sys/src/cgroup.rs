//! The cgroup2 hierarchy: where it is mounted, which cgroup this process is in, and how to get one of its own.

use std::{
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

/// Why no cgroup of our own could be had.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// There is no cgroup2 mount, and none could be made.
    #[error(
        "find cgroup2: no mount of type cgroup2; mount one: mount -t cgroup2 none /sys/fs/cgroup"
    )]
    NotMounted {
        /// Why mounting it failed.
        source: io::Error,
    },
    /// A file of the hierarchy could not be read or written.
    #[error("{attempt} {}", path.display())]
    Io {
        /// What was tried, e.g. `create cgroup`.
        attempt: &'static str,
        /// On which file.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
}

/// The mounted cgroup2 hierarchy.
#[derive(Clone, Debug)]
pub struct Hierarchy {
    root: PathBuf,
    /// The root of this process's cgroup namespace is somewhere beneath it, and `/proc/self/cgroup` tells names from there.
    names_are_hidden: bool,
}

impl Hierarchy {
    /// Finds the mount, wherever it is; where there is none, mounts one at `fallback` in this process's mount namespace.
    pub fn find(fallback: &Path) -> Result<Self, CgroupError> {
        let path = Path::new("/proc/self/mountinfo");
        let io = |source| CgroupError::Io { attempt: "read", path: path.to_owned(), source };
        let mounts = fs::read_to_string(path).map_err(io)?;
        if let Some(found) = mounted(&mounts) {
            return Ok(found);
        }
        mount(fallback).map_err(|source| CgroupError::NotMounted { source })?;
        Ok(Self { root: fallback.to_owned(), names_are_hidden: false })
    }

    /// The root of the hierarchy as this process sees it.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The cgroup that this process is in.
    pub fn own(&self) -> Result<PathBuf, CgroupError> {
        let path = Path::new("/proc/self/cgroup");
        let io = |source| CgroupError::Io { attempt: "read", path: path.to_owned(), source };
        let membership = fs::read_to_string(path).map_err(io)?;
        let relative = own_path(&membership).unwrap_or("");
        if self.names_are_hidden {
            let source = || io::Error::new(io::ErrorKind::NotFound, "no cgroup has this process");
            return find(&self.root, holds_this_process).pop().ok_or_else(|| io(source()));
        }
        Ok(self.root.join(relative))
    }

    /// Moves this process into the cgroup `name` beneath the one it was started in, which is made when missing, unless
    /// the process has a cgroup other than the root to itself already.
    pub fn enter_own(&self, name: &str) -> Result<Own, CgroupError> {
        let own = self.own()?;
        if own != self.root && alone_in(&own)? {
            return Ok(Own { path: own, parent: None });
        }
        // Beneath the cgroup we were started in, so that its limits go on applying; that may be the root.
        let child = own.join(name);
        create(&child)?;
        enter(&child)?;
        Ok(Own { path: child, parent: Some(own) })
    }

    /// Removes the cgroup that [`Self::enter_own`] made for a process that is gone, in whichever cgroup that was started;
    /// one that still has processes stays.
    pub fn remove_own(&self, name: &str) -> Result<(), CgroupError> {
        let found = find(&self.root, |cgroup| cgroup.file_name().is_some_and(|own| own == name));
        found.iter().try_for_each(|cgroup| remove(cgroup))
    }
}

/// The cgroup that this process has to itself.
#[derive(Debug)]
pub struct Own {
    path: PathBuf,
    /// Where the process came from, if the cgroup was made for it.
    parent: Option<PathBuf>,
}

impl Own {
    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Moves the process back to where it came from and removes the cgroup that was made for it.
    pub fn leave(self) -> Result<(), CgroupError> {
        let Some(parent) = &self.parent else { return Ok(()) };
        enter(parent)?;
        remove(&self.path)
    }
}

/// The cgroups beneath `root` that are `wanted`; not what is beneath those. One that goes away meanwhile is passed over.
fn find(root: &Path, wanted: impl Fn(&Path) -> bool) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut unread = vec![root.to_owned()];
    while let Some(cgroup) = unread.pop() {
        for entry in fs::read_dir(cgroup).into_iter().flatten().filter_map(Result::ok) {
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            if wanted(&entry.path()) {
                found.push(entry.path());
            } else {
                unread.push(entry.path());
            }
        }
    }
    found
}

fn holds_this_process(cgroup: &Path) -> bool {
    let me = std::process::id().to_string();
    let procs = fs::read_to_string(cgroup.join("cgroup.procs"));
    procs.is_ok_and(|procs| procs.lines().any(|pid| pid == me))
}

fn enter(cgroup: &Path) -> Result<(), CgroupError> {
    let procs = cgroup.join("cgroup.procs");
    fs::write(&procs, "0").map_err(|source| CgroupError::Io {
        attempt: "move this process into",
        path: procs,
        source,
    })
}

fn remove(cgroup: &Path) -> Result<(), CgroupError> {
    match fs::remove_dir(cgroup) {
        Err(e) if !matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ResourceBusy) => {
            Err(CgroupError::Io { attempt: "remove cgroup", path: cgroup.to_owned(), source: e })
        }
        _ => Ok(()),
    }
}

/// The identifier that `bpf_skb_cgroup_id` gives for sockets of the cgroup at `path`: its inode number.
pub fn id(path: &Path) -> Result<u64, CgroupError> {
    let io = |source| CgroupError::Io { attempt: "read cgroup", path: path.to_owned(), source };
    Ok(fs::metadata(path).map_err(io)?.ino())
}

fn create(path: &Path) -> Result<(), CgroupError> {
    match fs::create_dir(path) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
            Err(CgroupError::Io { attempt: "create cgroup", path: path.to_owned(), source: e })
        }
        _ => Ok(()),
    }
}

fn alone_in(cgroup: &Path) -> Result<bool, CgroupError> {
    let path = cgroup.join("cgroup.procs");
    let procs = match fs::read_to_string(&path) {
        Ok(procs) => procs,
        Err(source) => return Err(CgroupError::Io { attempt: "read", path, source }),
    };
    let me = std::process::id().to_string();
    Ok(procs.lines().all(|pid| pid == me))
}

fn mount(at: &Path) -> io::Result<()> {
    use nix::mount::{MsFlags, mount};
    fs::create_dir_all(at)?;
    Ok(mount(Some("none"), at, Some("cgroup2"), MsFlags::empty(), None::<&str>)?)
}

/// The first mount of type cgroup2 in `mountinfo` (`proc_pid_mountinfo(5)`).
fn mounted(mountinfo: &str) -> Option<Hierarchy> {
    mountinfo.lines().find_map(|line| {
        let (mount, filesystem) = line.split_once(" - ")?;
        if filesystem.split(' ').next()? != "cgroup2" {
            return None;
        }
        let mut fields = mount.split(' ').skip(3);
        // Of a mount that shows more than the namespace, the root is told as `/..`, `/../..` and so on.
        let names_are_hidden = fields.next()?.starts_with("/..");
        Some(Hierarchy { root: fields.next()?.into(), names_are_hidden })
    })
}

/// The path of hierarchy 0 in a process's `/proc/PID/cgroup`, without its leading slash.
pub fn own_path(membership: &str) -> Option<&str> {
    let path = membership.lines().find_map(|line| line.strip_prefix("0::"))?;
    Some(path.trim_start_matches('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mount_is_found_in_hybrid_and_unified_layouts() {
        let hybrid = "30 24 0:26 / /sys/fs/cgroup ro - tmpfs tmpfs ro\n\
                      31 30 0:27 / /sys/fs/cgroup/unified rw,relatime shared:5 - cgroup2 cgroup2 rw\n";
        let found = |mounts| mounted(mounts).map(|found| (found.root, found.names_are_hidden));
        assert_eq!(found(hybrid), Some(("/sys/fs/cgroup/unified".into(), false)));
        let unified = "30 24 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
        assert_eq!(found(unified), Some(("/sys/fs/cgroup".into(), false)));
        assert_eq!(found("30 24 0:26 / /sys/fs/cgroup rw - cgroup cgroup rw,cpu\n"), None);
        let container = "86 76 0:38 /../../.. /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n";
        assert_eq!(found(container), Some(("/sys/fs/cgroup".into(), true)));
    }

    #[test]
    fn a_cgroup_is_found_wherever_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let wanted = dir.path().join("system.slice/session/culvert-a");
        for other in ["culvert-b", "culvert-aa", "system.slice/culvert-b"] {
            fs::create_dir_all(dir.path().join(other)).unwrap();
        }
        fs::create_dir_all(&wanted).unwrap();
        assert_eq!(find(dir.path(), |cgroup| cgroup.ends_with("culvert-a")), [wanted]);
    }

    #[test]
    fn where_names_are_hidden_the_own_cgroup_is_the_one_with_this_process() {
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().join("kubepods.slice/pod1/culvert");
        for (cgroup, pid) in
            [("system.slice", 1), ("kubepods.slice/pod1/culvert", std::process::id())]
        {
            let folder = dir.path().join(cgroup);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("cgroup.procs"), format!("0\n{pid}\n")).unwrap();
        }
        let hierarchy = Hierarchy { root: dir.path().to_owned(), names_are_hidden: true };
        assert_eq!(hierarchy.own().unwrap(), own);
        fs::remove_dir_all(own).unwrap();
        assert!(hierarchy.own().is_err());
    }

    #[test]
    fn the_own_cgroup_is_read_beside_v1_hierarchies() {
        assert_eq!(own_path("4:memory:/x\n0::/a/b\n"), Some("a/b"));
        assert_eq!(own_path("0::/\n"), Some(""));
        assert_eq!(own_path("4:memory:/x\n"), None);
    }
}
