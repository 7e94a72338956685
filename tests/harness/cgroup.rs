//! The cgroups that culvert makes for itself below the one it is started in: ours. And those that scenarios make.

use std::{
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};

/// What their names start with; the node's name follows.
pub(crate) const PREFIX: &str = "culvert-";

/// The cgroups of a node's proxies: of the two that may run at one time.
pub(crate) fn of_node(node: &str) -> [String; 2] {
    [0, 1].map(|seat| format!("{PREFIX}{node}.{seat}"))
}

/// The cgroup2 that this process is in; `None` where there is no cgroup2.
pub(crate) fn own() -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
    let mount = mounts.lines().find(|line| line.split(' ').nth(2) == Some("cgroup2"))?;
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
    Some(Path::new(mount.split(' ').nth(1)?).join(path.trim_start_matches('/')))
}

/// A cgroup below ours, removed when dropped; its processes must have ended.
#[derive(Debug)]
pub struct Cgroup {
    path: PathBuf,
}

impl Cgroup {
    /// Makes `name` for a node, which must be unique among the node's.
    pub fn create(node: &str, name: &str) -> Result<Self> {
        let own = own().context("find cgroup2")?;
        Self::make(own.join(format!("{PREFIX}{node}-{name}")))
    }

    /// Makes `name` below this one.
    pub fn child(&self, name: &str) -> Result<Self> {
        Self::make(self.path.join(name))
    }

    fn make(path: PathBuf) -> Result<Self> {
        fs::create_dir(&path).with_context(|| format!("create cgroup {}", path.display()))?;
        Ok(Self { path })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir(&self.path) {
            eprintln!("remove {}: {error}", self.path.display());
        }
    }
}

/// Removes a cgroup below ours, if it is there; its processes must have ended.
pub(crate) fn remove(name: &str) {
    let Some(path) = own().map(|parent| parent.join(name)) else { return };
    if let Err(error) = fs::remove_dir(&path)
        && error.kind() != ErrorKind::NotFound
    {
        eprintln!("remove {}: {error}", path.display());
    }
}
