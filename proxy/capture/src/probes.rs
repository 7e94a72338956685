//! kubelet's cgroup, whose connections to pods are probes and reach the application without capture.
//!
//! What is attached there speaks for every process beneath, so a cgroup is refused where a pod is, or may come to be:
//! probes are then captured like any other connection.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use culvert_sys::cgroup;
use nix::errno::Errno;

use crate::{
    attach,
    error::{CaptureError, chain},
};

/// Where kubelet is, relative to the root of cgroup2: by systemd on its own, in k3s and RKE2, on Bottlerocket and Talos;
/// as a cgroup driver of its own has it.
const KNOWN: [&str; 8] = [
    "system.slice/kubelet.service",
    "system.slice/k3s.service",
    "system.slice/k3s-agent.service",
    "system.slice/rke2-server.service",
    "system.slice/rke2-agent.service",
    "runtime.slice/kubelet.service",
    "podruntime/kubelet",
    "kubelet",
];

/// Which processes' connections to pods are probes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ProbeCgroup {
    /// No process's.
    Off,
    /// kubelet's, where its cgroup is one of those that are known.
    #[default]
    Auto,
    /// Those in this cgroup and beneath it: a path, or one relative to the root of cgroup2.
    At(PathBuf),
}

/// Why a cgroup is not taken for kubelet's.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unfit {
    #[error("it cannot be read")]
    Unreadable(#[from] io::Error),
    #[error("it is the root: every process is beneath")]
    Root,
    #[error("the proxy itself is beneath")]
    Proxy,
    #[error("pods are beneath, in {}", .0.display())]
    Pods(PathBuf),
    #[error("process {process} beneath is in the network namespace of pod {pod}")]
    Pod { process: u32, pod: u32 },
}

/// The cgroups that a search concerns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Surroundings<'a> {
    /// The root of cgroup2.
    pub(crate) root: &'a Path,
    /// The proxy's.
    pub(crate) own: &'a Path,
    /// Pods that are enrolled, by inode number of their network namespaces.
    pub(crate) pods: &'a [u32],
}

/// The cgroup to attach to, with its id; says why where there is none.
pub(crate) fn find(wanted: &ProbeCgroup, around: Surroundings<'_>) -> Option<(PathBuf, u64)> {
    let candidates = match wanted {
        ProbeCgroup::Off => return None,
        ProbeCgroup::Auto => {
            let known = KNOWN.iter().map(|path| around.root.join(path));
            known.filter(|path| path.is_dir()).collect()
        }
        ProbeCgroup::At(path) if path.starts_with(around.root) => vec![path.clone()],
        ProbeCgroup::At(path) => {
            vec![around.root.join(path.strip_prefix("/").unwrap_or(path))]
        }
    };
    if candidates.is_empty() {
        tracing::info!("kubelet has no cgroup of a known name here: probes are captured");
    }
    candidates.into_iter().find_map(|path| match judge(&path, around) {
        Ok(id) => Some((path, id)),
        Err(unfit) => {
            tracing::warn!(
                cgroup = %path.display(),
                reason = chain(&unfit),
                "not taken for kubelet's cgroup: probes from there are captured",
            );
            None
        }
    })
}

fn judge(path: &Path, around: Surroundings<'_>) -> Result<u64, Unfit> {
    let id = |path| cgroup::id(path).map_err(|e| Unfit::Unreadable(io::Error::other(e)));
    let found = id(path)?;
    if found == id(around.root)? {
        return Err(Unfit::Root);
    }
    if around.own.starts_with(path) {
        return Err(Unfit::Proxy);
    }
    for cgroup in beneath(path)? {
        if cgroup.file_name().is_some_and(|name| name.to_string_lossy().contains("kubepods")) {
            return Err(Unfit::Pods(cgroup));
        }
        for process in processes(&cgroup)? {
            if let Some(pod) = namespace(process).filter(|id| around.pods.contains(id)) {
                return Err(Unfit::Pod { process, pod });
            }
        }
    }
    Ok(found)
}

/// The cgroup that `mark_probe` is attached to.
#[derive(Debug)]
pub(crate) struct Probes {
    pub(crate) path: PathBuf,
    pub(crate) pin: PathBuf,
}

impl Probes {
    /// Takes the program away where the pod has a process beneath: it would speak for the pod.
    pub(crate) fn distrust(&self, pod: u32) -> Result<(), CaptureError> {
        if !self.pin.exists() {
            return Ok(());
        }
        let found = beneath(&self.path).into_iter().flatten();
        let mut found = found.flat_map(|cgroup| processes(&cgroup).unwrap_or_default());
        let Some(process) = found.find(|process| namespace(*process) == Some(pod)) else {
            return Ok(());
        };
        let reason = chain(&Unfit::Pod { process, pod });
        let cgroup = self.path.display();
        tracing::warn!(%cgroup, reason, "taken for kubelet's cgroup no more: probes are captured");
        attach::remove(&self.pin)
    }
}

/// The cgroup and all beneath it.
fn beneath(path: &Path) -> io::Result<Vec<PathBuf>> {
    let mut all = vec![path.to_owned()];
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            match beneath(&entry.path()) {
                Ok(inside) => all.extend(inside),
                // It ended meanwhile.
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(e),
            }
        }
    }
    Ok(all)
}

/// The processes of this very cgroup, as far as they are of our PID namespace.
fn processes(cgroup: &Path) -> io::Result<Vec<u32>> {
    let listed = match fs::read_to_string(cgroup.join("cgroup.procs")) {
        // It ended meanwhile; or it is threaded, and its processes are listed above.
        Err(e)
            if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::Unsupported)
                || e.raw_os_error() == Some(Errno::ENODEV as i32) =>
        {
            return Ok(Vec::new());
        }
        listed => listed?,
    };
    Ok(listed.lines().filter_map(|pid| pid.parse().ok()).filter(|pid| *pid != 0).collect())
}

/// The inode number of a process's network namespace.
fn namespace(process: u32) -> Option<u32> {
    let link = fs::read_link(format!("/proc/{process}/ns/net")).ok()?;
    link.to_str()?.strip_prefix("net:[")?.strip_suffix(']')?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn around<'a>(root: &'a Path, pods: &'a [u32]) -> Surroundings<'a> {
        Surroundings { root, own: Path::new("/elsewhere"), pods }
    }

    /// A folder that is read like a cgroup.
    fn tree(cgroups: &[&str]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for cgroup in cgroups {
            fs::create_dir_all(root.path().join(cgroup)).unwrap();
        }
        root
    }

    #[test]
    fn a_known_layout_is_found_and_others_are_passed_over() {
        let root =
            tree(&["system.slice/other.service", "kubelet/kubepods", "system.slice/k3s.service"]);
        let (path, _) = find(&ProbeCgroup::Auto, around(root.path(), &[])).unwrap();
        assert_eq!(path, root.path().join("system.slice/k3s.service"));
        assert_eq!(find(&ProbeCgroup::Off, around(root.path(), &[])), None);
    }

    #[test]
    fn a_path_is_taken_as_it_is_or_from_the_root() {
        let root = tree(&["a/b"]);
        for path in [root.path().join("a/b"), "/a/b".into(), "a/b".into()] {
            let found = find(&ProbeCgroup::At(path), around(root.path(), &[]));
            assert_eq!(found.unwrap().0, root.path().join("a/b"));
        }
    }

    #[test]
    fn what_speaks_for_pods_or_for_the_proxy_is_refused() {
        let root = tree(&["a/kubepods.slice/pod1", "own/proxy", "pod"]);
        let me = namespace(std::process::id()).unwrap();
        let procs = root.path().join("pod/cgroup.procs");
        fs::write(procs, format!("0\n{}\n", std::process::id())).unwrap();
        let judged = |path: &str, pods: &[u32]| {
            let own = root.path().join("own/proxy");
            judge(&root.path().join(path), Surroundings { root: root.path(), own: &own, pods })
        };
        assert!(matches!(judged("", &[]), Err(Unfit::Root)));
        assert!(matches!(judged("own", &[]), Err(Unfit::Proxy)));
        assert!(matches!(judged("a", &[]), Err(Unfit::Pods(_))));
        assert!(matches!(judged("pod", &[me]), Err(Unfit::Pod { pod, .. }) if pod == me));
        assert!(matches!(judged("missing", &[]), Err(Unfit::Unreadable(_))));
        judged("pod", &[me + 1]).unwrap();
    }
}
