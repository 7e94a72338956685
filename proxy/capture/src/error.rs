//! Why a node or a pod could not be captured; what to do about it is the last clause of each message.

use std::{fmt, io, net::IpAddr, path::PathBuf};

use aya::{EbpfError, maps::MapError, programs::ProgramError};
use culvert_sys::{cgroup::CgroupError, netns::NetnsError};

/// Why capture failed.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// Another process holds this node name, and shares it with nobody.
    #[error(
        "take node {node}: another culvert{} has it to itself; wait for its end, stop it, or choose another --node",
        holder.map(|pid| format!(" (pid {pid})")).unwrap_or_default()
    )]
    Busy {
        /// The node name.
        node: String,
        /// The process that holds the lock, where `/proc/locks` tells.
        holder: Option<u32>,
    },
    /// Two processes hold this node name: one that serves, one that takes over or drains.
    #[error(
        "take node {node}: two culverts run under this name already (pids {holders:?}); start a third once the elder has \
         drained, or choose another --node"
    )]
    Full {
        /// The node name.
        node: String,
        /// The processes, where `/proc/locks` tells.
        holders: Vec<u32>,
    },
    /// Pins of another ABI version are there.
    #[error(
        "adopt {}: pinned by ABI version {found}, this build has {want}; {remedy}run: culvert cleanup --node {node}",
        path.display()
    )]
    OtherVersion {
        /// The node name.
        node: String,
        /// The folder of the other version.
        path: PathBuf,
        /// The version found.
        found: String,
        /// The version of this build.
        want: u32,
        /// What is to be done before.
        remedy: Remedy,
    },
    /// The host lacks something that capture needs.
    #[error("prepare this host for capture")]
    Host(#[from] HostError),
    /// A pin or a folder of pins could not be used.
    #[error("{attempt} {}", path.display())]
    Pin {
        /// What was tried, e.g. `create`.
        attempt: &'static str,
        /// On which path.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
    /// An object could not be loaded: its maps do not fit the pinned ones, or the kernel lacks a map type.
    #[error("load BPF object {object}")]
    Object {
        /// The object.
        object: &'static str,
        /// aya's reason.
        source: EbpfError,
    },
    /// The kernel refused a program, or its attachment.
    #[error("{attempt} BPF program {program}")]
    Program {
        /// What was tried, e.g. `load`.
        attempt: &'static str,
        /// The program.
        program: &'static str,
        /// aya's reason, with the verifier's words.
        source: ProgramError,
    },
    /// A map could not be read or written.
    #[error("{attempt} BPF map {map}")]
    Map {
        /// What was tried, e.g. `insert into`.
        attempt: &'static str,
        /// The map.
        map: &'static str,
        /// aya's reason.
        source: MapError,
    },
    /// The programs are attached, and yet they do not run.
    #[error("check that programs see this process's connections: {reason}")]
    SelfCheck {
        /// What was seen instead.
        reason: String,
    },
    /// The namespace is one that a proxy must not capture.
    #[error("enrol network namespace {inode}: it is the host's own; give the pod's")]
    HostNetns {
        /// The namespace's inode number.
        inode: u32,
    },
    /// Two pods claim one address.
    #[error("enrol pod {pod}: pod {other} has the same address {address}; un-enrol one of them")]
    AddressTaken {
        /// The pod that was to be enrolled, by inode number of its namespace.
        pod: u32,
        /// The pod that has the address.
        other: u32,
        /// The address.
        address: IpAddr,
    },
    /// The pod belongs to a culvert of another node name.
    #[error("enrol pod {pod}: node {node} has enrolled it; run: culvert cleanup --node {node}")]
    EnrolledElsewhere {
        /// The pod, by inode number of its namespace.
        pod: u32,
        /// The other node name.
        node: String,
    },
    /// The pod's namespace exists, but nothing leads to it.
    #[error(
        "un-enrol pod {pod}: neither a mount nor a process leads to its network namespace, and what is in it must not \
         be forgotten; where the pod has processes, share the host's PID namespace (hostPID: true)"
    )]
    NoPath {
        /// The pod, by inode number of its namespace.
        pod: u32,
    },
    /// Something in the pod's network namespace could not be set up or read.
    #[error("{attempt} in network namespace {pod}")]
    Netns {
        /// What was tried, on what.
        attempt: String,
        /// The pod, by inode number of its namespace.
        pod: u32,
        /// The operating system's reason.
        source: io::Error,
    },
}

/// What pins of another ABI version need before they can be cleaned up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// Nothing.
    Cleanup,
    /// The end of the process that uses them.
    Stop {
        /// The process, where it is known.
        pid: Option<u32>,
    },
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cleanup => Ok(()),
            Self::Stop { pid: Some(pid) } => {
                write!(f, "stop the culvert that runs (pid {pid}), then ")
            }
            Self::Stop { pid: None } => f.write_str("stop the culvert that runs, then "),
        }
    }
}

/// What the host lacks.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// Capabilities that are not in the effective set.
    #[error(
        "missing capabilities {}; run as root, or add them to the container's securityContext",
        missing.join(", ")
    )]
    Capabilities {
        /// Their names.
        missing: Vec<&'static str>,
    },
    /// The process's own status could not be read.
    #[error("read the capabilities of this process")]
    Status(#[from] io::Error),
    /// The network namespace of this process could not be opened.
    #[error(transparent)]
    Netns(#[from] NetnsError),
    /// No bpffs is at the path, and none could be mounted there.
    #[error("mount a bpffs at {}; run: mount -t bpf bpf /sys/fs/bpf", path.display())]
    Bpffs {
        /// Where it should be.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
    /// A bpffs would end with the container, and let go of every pod.
    #[error(
        "mount a bpffs at {}: it would end with this container; mount it on the node, mount -t bpf bpf /sys/fs/bpf, or share it with mountPropagation: Bidirectional",
        path.display()
    )]
    OwnBpffs {
        /// Where it should be.
        path: PathBuf,
    },
    /// cgroup2 is not there or cannot be used.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// The hooks of `connect()` could not be listed.
    #[error("list the programs that run when processes connect")]
    ConnectHooks(#[source] io::Error),
    /// The cgroup given as the proxy's own is the root.
    #[error("use cgroup {} as the proxy's own: it is the root of cgroup2, and would exempt every pod", path.display())]
    RootCgroup {
        /// The cgroup.
        path: PathBuf,
    },
}

/// An error and its causes in one line, for the log.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    std::iter::successors(Some(error), |error| error.source())
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(": ")
}

/// Names the step that failed in a pod's namespace.
pub(crate) trait InNetns<T> {
    fn in_netns(self, pod: u32, attempt: impl Into<String>) -> Result<T, CaptureError>;
}

impl<T> InNetns<T> for io::Result<T> {
    fn in_netns(self, pod: u32, attempt: impl Into<String>) -> Result<T, CaptureError> {
        self.map_err(|source| CaptureError::Netns { attempt: attempt.into(), pod, source })
    }
}
