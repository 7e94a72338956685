//! Programs of others that run inside a pod's `connect()` and may rewrite where it goes, as a CNI that stands in for
//! kube-proxy does: then the proxy is told the backend that such a program has chosen, and not the service.
//!
//! They are found and reported, never touched.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use aya::programs::loaded_programs;
use culvert_sys::{
    cgroup,
    chain::{self, ConnectHook},
};

use crate::counts::{Counts, Failure};

/// What was found so far.
#[derive(Debug)]
pub(crate) struct Rewriters {
    root: PathBuf,
    /// Ids of programs, which are used again only after a very long time.
    reported: Mutex<BTreeSet<u32>>,
}

impl Rewriters {
    /// None yet, beneath the cgroup2 that is mounted at `root`.
    pub(crate) fn new(root: &Path) -> Self {
        Self { root: root.to_owned(), reported: Mutex::default() }
    }

    /// Reports what runs in `connect()` of processes in the namespaces `pods`, and has not been reported.
    pub(crate) fn look(&self, pods: &BTreeSet<u32>, counts: &Counts) -> io::Result<()> {
        let mut found = BTreeSet::new();
        for cgroup in cgroups_of(pods)? {
            // It may have ended meanwhile.
            let Ok(cgroup) = File::open(self.root.join(cgroup)) else { continue };
            for hook in [ConnectHook::V4, ConnectHook::V6] {
                found.extend(chain::effective(cgroup.as_fd(), hook)?);
            }
        }
        let mut reported = self.reported.lock().unwrap_or_else(PoisonError::into_inner);
        let fresh: BTreeSet<u32> = found.difference(&reported).copied().collect();
        for program in loaded_programs().filter_map(Result::ok) {
            if fresh.contains(&program.id()) {
                tracing::warn!(
                    program = program.name_as_str().unwrap_or_default(),
                    id = program.id(),
                    "a program of somebody else runs when pods connect: where it rewrites a service's address, the \
                     connection is taken for one to the backend that it has chosen, without the service's routes and \
                     policies; let it leave enrolled pods alone (Cilium: socketLB.hostNamespaceOnly)",
                );
                counts.failed(Failure::Rewriter, 1);
                reported.insert(program.id());
            }
        }
        Ok(())
    }
}

/// Cgroups that processes in these namespaces are in, relative to the root, which is always one of them.
fn cgroups_of(pods: &BTreeSet<u32>) -> io::Result<BTreeSet<PathBuf>> {
    let mut cgroups = BTreeSet::from([PathBuf::new()]);
    for process in fs::read_dir("/proc")?.filter_map(Result::ok) {
        let process = process.path();
        // It may have ended meanwhile, or be no process.
        let Ok(namespace) = fs::read_link(process.join("ns/net")) else { continue };
        if inode(&namespace).is_some_and(|inode| pods.contains(&inode))
            && let Ok(membership) = fs::read_to_string(process.join("cgroup"))
            && let Some(path) = cgroup::own_path(&membership)
        {
            cgroups.insert(path.into());
        }
    }
    Ok(cgroups)
}

/// The number in `net:[NUMBER]`.
fn inode(namespace: &Path) -> Option<u32> {
    namespace.to_str()?.strip_prefix("net:[")?.strip_suffix(']')?.parse().ok()
}
