//! Why a pod is not enrolled; what to do about it is the last clause of each message.

use std::{net::IpAddr, sync::Arc};

use culvert_capture::CaptureError;
use culvert_sys::netns::NetnsError;
use tokio::task::JoinError;

/// Why a pod is not enrolled.
#[derive(Debug, thiserror::Error)]
pub enum EnrollError {
    /// Its network namespace could not be opened.
    #[error("enrol pod {uid}")]
    Netns {
        /// The pod.
        uid: Arc<str>,
        /// What is wrong with the path.
        source: NetnsError,
    },
    /// It could not be captured.
    #[error("enrol pod {uid}")]
    Capture {
        /// The pod.
        uid: Arc<str>,
        /// Where capture failed.
        source: CaptureError,
    },
    /// Another enrolled pod has one of its addresses.
    #[error("enrol pod {uid}: pod {holder} has the same address {address}; remove one of the two")]
    AddressTaken {
        /// The pod.
        uid: Arc<str>,
        /// The other pod.
        holder: Arc<str>,
        /// The address.
        address: IpAddr,
    },
    /// Another pod has its network namespace.
    #[error("enrol pod {uid}: pod {holder} has the same network namespace; remove one of the two")]
    NetnsTaken {
        /// The pod.
        uid: Arc<str>,
        /// The other pod.
        holder: Arc<str>,
    },
    /// The thread that did it panicked, or the process is stopping.
    #[error("enrol pod {uid}")]
    Task {
        /// The pod.
        uid: Arc<str>,
        /// How it ended.
        source: JoinError,
    },
}
