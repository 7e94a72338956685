//! A cgroup of this test process, with children to move between, removed at the end.
//!
//! The whole process moves, so tests that need a certain cgroup take turns.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use culvert_sys::cgroup::{self, Hierarchy};

/// Names of the trees start so, and end with the process.
const PREFIX: &str = "culvert-kernel-test-";

static TURN: Mutex<()> = Mutex::new(());

/// Keeps this process where it is, as long as the value lives.
pub(crate) fn stay() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The identifier of the cgroup that this process is in.
pub(crate) fn own_id() -> u64 {
    cgroup::id(&hierarchy().own().unwrap()).unwrap()
}

const CHILDREN: [&str; 3] = ["app", "proxy", "kubelet"];

/// A cgroup with the children `app`, `proxy` and `kubelet`, beneath the root.
pub(crate) struct Tree {
    top: PathBuf,
    home: PathBuf,
    _turn: MutexGuard<'static, ()>,
}

impl Tree {
    /// Makes the tree; the process stays where it is until [`Tree::enter`].
    pub(crate) fn new() -> Self {
        let turn = stay();
        let hierarchy = hierarchy();
        sweep(hierarchy.root());
        let home = hierarchy.own().unwrap();
        let top = hierarchy.root().join(format!("{PREFIX}{}", std::process::id()));
        for child in CHILDREN {
            fs::create_dir_all(top.join(child)).unwrap();
        }
        Self { top, home, _turn: turn }
    }

    /// The parent of all.
    pub(crate) fn top(&self) -> &Path {
        &self.top
    }

    /// The path of a child.
    pub(crate) fn child(&self, name: &str) -> PathBuf {
        self.top.join(name)
    }

    /// Moves this process into a child.
    pub(crate) fn enter(&self, name: &str) {
        enter(&self.child(name));
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        enter(&self.home);
        remove(&self.top);
    }
}

fn hierarchy() -> Hierarchy {
    Hierarchy::find(Path::new("/sys/fs/cgroup")).unwrap()
}

fn enter(cgroup: &Path) {
    fs::write(cgroup.join("cgroup.procs"), "0").unwrap();
}

/// Removes the trees of test processes that were killed.
fn sweep(root: &Path) {
    for entry in fs::read_dir(root).unwrap().flatten() {
        if let Some(pid) = entry.file_name().to_str().and_then(|name| name.strip_prefix(PREFIX))
            && !Path::new("/proc").join(pid).exists()
        {
            remove(&entry.path());
        }
    }
}

fn remove(top: &Path) {
    for path in CHILDREN.map(|child| top.join(child)).into_iter().chain([top.to_owned()]) {
        if let Err(error) = fs::remove_dir(&path) {
            println!("cgroup {} stays behind: {error}", path.display());
        }
    }
}
