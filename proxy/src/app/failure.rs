//! Why the node stopped, and what its exit code says about it.

use std::io;

use culvert_capture::CaptureError;
use culvert_controlplane::ControlPlaneError;
use culvert_sys::cgroup::CgroupError;
use culvert_tls::AuthorityError;
use tokio::task::JoinError;

use crate::{
    HandoverError, MeshFileError, RevocationFileError, SourceError, admin::BindError,
    config::ConfigError, enroll::EnrollError, logging::FilterError,
};

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// An argument cannot be.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The log filter cannot be read.
    #[error(transparent)]
    Filter(#[from] FilterError),
    /// It cannot be told which pods to enrol.
    #[error(transparent)]
    Pods(#[from] SourceError),
    /// Proxies cannot be served.
    #[error(transparent)]
    Agent(#[from] culvert_agent::zds::BindError),
    /// There is no place for the agent's socket.
    #[error("create the folder of the agent's socket")]
    Folder(#[source] io::Error),
    /// The mesh file is at fault.
    #[error(transparent)]
    Mesh(#[from] MeshFileError),
    /// The certificate authority's files are at fault.
    #[error(transparent)]
    Authority(#[from] AuthorityError),
    /// The revocation lists are at fault.
    #[error(transparent)]
    Revocations(#[from] RevocationFileError),
    /// The control plane's files are at fault.
    #[error(transparent)]
    ControlPlane(#[from] ControlPlaneError),
    /// A port is taken.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The process before could not be taken over from.
    #[error(transparent)]
    Handover(#[from] HandoverError),
    /// No cgroup of our own.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// The host, or what is pinned on it, does not allow capture.
    #[error(transparent)]
    Capture(#[from] CaptureError),
    /// A pod could not be enrolled.
    #[error(transparent)]
    Enroll(#[from] EnrollError),
    /// Standard output is gone.
    #[error("write to standard output")]
    Output(#[source] io::Error),
    /// No threads.
    #[error("start the threads of the proxy")]
    Runtime(#[source] io::Error),
    /// What the node has in the kernel could not be removed.
    #[error("take the node down; run: culvert cleanup")]
    Dismantle(#[source] CaptureError),
    /// A thread of ours panicked.
    #[error("a thread of the proxy panicked")]
    Thread(#[source] JoinError),
    /// Something of the node outlived its drain.
    #[error("the node is still in use after its drain; run: culvert cleanup")]
    StillUsed,
}

impl RunError {
    /// 2 for what the operator can mend, 1 for what went wrong in the process.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Config(_)
            | Self::Filter(_)
            | Self::Pods(_)
            | Self::Agent(_)
            | Self::Folder(_)
            | Self::Mesh(_)
            | Self::Authority(_)
            | Self::Revocations(_)
            | Self::ControlPlane(_)
            | Self::Bind(_)
            | Self::Handover(_)
            | Self::Cgroup(_)
            | Self::Capture(_)
            | Self::Enroll(_) => 2,
            Self::Output(_)
            | Self::Runtime(_)
            | Self::Dismantle(_)
            | Self::Thread(_)
            | Self::StillUsed => 1,
        }
    }
}
