//! Finds the network namespaces of pods by the processes that run in them, where nobody has told them.
//!
//! A process names its pod by its cgroup and its network by `/proc/PID/ns/net`. Neither is proof: a process may pass
//! through another pod's network, as a debugger does. So the namespace must hold one of the pod's own addresses, and of
//! several the one that the pod's oldest process is in counts.

mod cgroup;

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::Arc,
};

use culvert_sys::{interfaces, netns::Netns};

/// Why nothing was found at all.
#[derive(Debug, thiserror::Error)]
pub enum DiscoveryError {
    /// There are no processes to look at.
    #[error("list the processes in {}; is the node's /proc mounted there?", path.display())]
    Processes {
        /// Where they were looked for.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
    /// The node's own network namespace, which is no pod's, cannot be told from others.
    #[error("find the network namespace of the node; run with access to the processes of others")]
    Node(#[source] culvert_sys::netns::NetnsError),
}

/// A pod's network namespace, and how long the process has run by which it was found.
struct Candidate {
    netns: Netns,
    /// Since boot, in clock ticks: field 22 of `proc_pid_stat(5)`.
    started: u64,
}

/// The network namespaces of the pods in `wanted`, which names the addresses of each by its UID.
///
/// `proc` is the node's `/proc`. Pods that have no process yet, or no address, are not found. Reads a few files a process,
/// and blocks while it does.
pub fn find(
    proc: &Path,
    wanted: &BTreeMap<Arc<str>, Vec<IpAddr>>,
) -> Result<BTreeMap<Arc<str>, Netns>, DiscoveryError> {
    let node = Node::at(proc)?;
    let list = |source| DiscoveryError::Processes { path: proc.to_owned(), source };
    let mut found: BTreeMap<Arc<str>, Candidate> = BTreeMap::new();
    let mut refused: BTreeSet<(Arc<str>, u32)> = BTreeSet::new();
    for entry in fs::read_dir(proc).map_err(list)? {
        let entry = entry.map_err(list)?;
        let is_process = entry.file_name().to_str().is_some_and(|name| name.parse::<u32>().is_ok());
        if !is_process {
            continue;
        }
        // A process may end at any moment; what cannot be read of one is no reason to stop.
        let Some((uid, candidate)) = examine(&entry.path(), &node, wanted) else { continue };
        let key = (Arc::clone(&uid), candidate.netns.inode());
        let before = found.get(&uid);
        if before.is_some_and(|before| before.started <= candidate.started)
            || refused.contains(&key)
        {
            continue;
        }
        let is_known = before.is_some_and(|before| before.netns.is(&candidate.netns));
        if is_known || holds_one_of(&candidate.netns, wanted.get(&uid)) {
            found.insert(uid, candidate);
        } else {
            tracing::debug!(pod = %uid, netns = key.1, "a process is in a network that is not its pod's");
            refused.insert(key);
        }
    }
    Ok(found.into_iter().map(|(uid, candidate)| (uid, candidate.netns)).collect())
}

/// What tells the node's own processes from those of its pods.
struct Node {
    netns: Netns,
    /// The pods that the node itself runs in, if it is a container of one.
    around: Vec<String>,
}

impl Node {
    fn at(proc: &Path) -> Result<Self, DiscoveryError> {
        let netns = Netns::open(&proc.join("1/ns/net")).map_err(DiscoveryError::Node)?;
        let path = proc.join("1/cgroup");
        let cgroups = fs::read_to_string(&path)
            .map_err(|source| DiscoveryError::Processes { path, source })?;
        Ok(Self { netns, around: cgroup::pod_uids(&cgroups).collect() })
    }
}

/// The wanted pod that the process in `folder` belongs to, and the network that it is in, unless that is the node's.
fn examine(
    folder: &Path,
    node: &Node,
    wanted: &BTreeMap<Arc<str>, Vec<IpAddr>>,
) -> Option<(Arc<str>, Candidate)> {
    let cgroups = fs::read_to_string(folder.join("cgroup")).ok()?;
    // Only the outermost is the kubelet's word: beneath its own cgroup a pod may call one what it likes.
    let uid = cgroup::pod_uids(&cgroups).find(|uid| !node.around.contains(uid))?;
    let (uid, _) = wanted.get_key_value(&*uid)?;
    let netns = Netns::open(&folder.join("ns/net")).ok()?;
    if netns.is(&node.netns) {
        return None;
    }
    let started = started(&fs::read_to_string(folder.join("stat")).ok()?)?;
    Some((Arc::clone(uid), Candidate { netns, started }))
}

/// When the process started, of the line of `proc_pid_stat(5)`. Its name may hold anything, parentheses included.
fn started(stat: &str) -> Option<u64> {
    let (_, after_name) = stat.rsplit_once(") ")?;
    after_name.split(' ').nth(19)?.parse().ok()
}

/// Whether an interface in `netns` has one of the pod's addresses.
fn holds_one_of(netns: &Netns, addresses: Option<&Vec<IpAddr>>) -> bool {
    let Some(addresses) = addresses else { return false };
    match netns.run(interfaces::addresses) {
        Ok(Ok(there)) => there.iter().any(|address| addresses.contains(address)),
        Ok(Err(error)) | Err(error) => {
            tracing::warn!(%error, netns = netns.inode(), "addresses of a network not read");
            false
        }
    }
}
