//! The pod that a process belongs to, by the path of its cgroup.
//!
//! The kubelet names the cgroup of a pod after its UID: `podUID` below `kubepods` with the cgroupfs driver, and
//! `…-podUID.slice` with `-` written as `_` with systemd's. What runtimes put beneath, and what a kubelet that runs in a
//! container has above, varies and does not matter.

/// The UIDs that the lines of `/proc/PID/cgroup` name, outermost first: where a pod has a kubelet of its own in it, the
/// node's pod comes before the inner one.
pub(super) fn pod_uids(cgroups: &str) -> impl Iterator<Item = String> {
    // `ID:CONTROLLERS:PATH`, of `cgroups(7)`; the path may hold colons.
    let paths = cgroups.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    paths.flat_map(|path| path.split('/')).filter_map(pod_uid)
}

fn pod_uid(segment: &str) -> Option<String> {
    let segment = segment.strip_suffix(".slice").unwrap_or(segment);
    let uid = match segment.strip_prefix("pod") {
        Some(uid) => uid,
        None => segment.rsplit_once("-pod")?.1,
    };
    let uid = uid.replace('_', "-");
    is_uid(&uid).then_some(uid)
}

/// A UUID, or the hash that the kubelet gives a pod that it has from a file.
fn is_uid(uid: &str) -> bool {
    let groups: Vec<usize> = uid.split('-').map(str::len).collect();
    let hexadecimal = |c: char| c.is_ascii_digit() || ('a'..='f').contains(&c) || c == '-';
    (groups == [8, 4, 4, 4, 12] || groups == [32]) && uid.chars().all(hexadecimal)
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "2c48913c-b29f-11e7-9350-020968147796";
    const OTHER: &str = "7f5d7a6e-0c62-4c1b-a9c0-5fd1f4f0a2b1";

    #[test]
    fn every_layout_of_cgroups_tells_the_pod() {
        let systemd = "2c48913c_b29f_11e7_9350_020968147796";
        for path in [
            format!("/kubepods/burstable/pod{UID}/9d2a"),
            format!("/kubepods/pod{UID}/9d2a"),
            format!("/kubepods.slice/kubepods-pod{systemd}.slice/cri-containerd-9d2a.scope"),
            format!(
                "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{systemd}.slice/crio-9d2a.scope/container"
            ),
            format!(
                "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{systemd}.slice:cri-containerd:9d2a"
            ),
            format!("/kubepods.slice/kubepods-pod{systemd}.slice/docker-9d2a.scope"),
            format!(
                "/system.slice/docker-77aa.scope/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{systemd}.slice/x"
            ),
            format!("/../../kubepods/besteffort/pod{UID}"),
        ] {
            let path = path.replace(".slice:cri", ".slice/cri");
            for line in [format!("0::{path}\n"), format!("5:cpu,cpuacct:{path}\n")] {
                assert_eq!(pod_uids(&line).next().as_deref(), Some(UID), "{line}");
            }
        }
        let hash = "0fcb5e4b5b5d1b05b8fb9b4d7a1e9dbf";
        let line = format!("0::/kubepods/burstable/pod{hash}/9d2a\n");
        assert_eq!(pod_uids(&line).next().as_deref(), Some(hash));
    }

    #[test]
    fn the_pod_of_the_node_comes_before_those_inside_of_it() {
        let line = format!("0::/kubepods/pod{UID}/9d2a/kubepods/pod{OTHER}/77aa\n");
        assert_eq!(pod_uids(&line).collect::<Vec<_>>(), [UID, OTHER]);
    }

    #[test]
    fn other_cgroups_name_no_pod() {
        for line in [
            "0::/\n",
            "0::/system.slice/kubelet.service\n",
            "0::/kubepods.slice/kubepods-burstable.slice\n",
            "0::/user.slice/podman-1000.slice\n",
            "0::/kubepods/pod../x\n",
            "0::/kubepods/pod2c48913c-b29f-11e7-9350-02096814779\n",
            "0::/kubepods/pod2C48913C-b29f-11e7-9350-020968147796\n",
            "nothing\n",
            "",
        ] {
            assert_eq!(pod_uids(line).next(), None, "{line}");
        }
    }
}
