//! Two processes of one node name: the newer takes over from the elder without a connection lost.
//!
//! ```text
//! newer                           elder
//!   takes a seat ....................      (capture; a third is refused)
//!   hello ──────────────────────────▶
//!   ◀── sockets of 15000, 15020, 15021      answers on them no more
//!   take ───────────────────────────▶      waits for changes under way, makes no more
//!   ◀────────────────────────── done        still accepts, and puts its listeners into slots that turn empty
//!   programs, then pod by pod: slots
//!   ready ──────────────────────────▶
//!                         SIGTERM ──▶      or `drain`, by whoever upgrades: drains, ends, removes nothing
//!   ◀──────────────────── end of stream      sweeps what was the elder's alone
//! ```
//!
//! The end of the stream before the elder was told to drain means that the newer one is gone: the elder takes everything
//! back. A newer one that is told to stop says `leave` first. The words are `wire`'s, what the pods make of them is
//! [`crate::enroll`]'s.

mod control;
mod elder;
mod wire;

use std::{io, path::PathBuf};

use culvert_capture::CaptureError;

pub(crate) use self::{
    control::{Control, Host},
    elder::{Predecessor, Reports},
};

/// Where the control sockets are. In a container it must be the host's, as the bpffs is.
const FOLDER: &str = "/run/culvert";

/// The control socket of the process in a seat of the node.
pub(crate) fn socket(node: &str, seat: u8) -> PathBuf {
    folder(node).join(format!("control-{seat}.sock"))
}

/// Where the sockets of a node are.
fn folder(node: &str) -> PathBuf {
    PathBuf::from(FOLDER).join(node)
}

/// Removes the sockets that processes of the node have left; for who knows that none runs.
pub(crate) fn remove_sockets(node: &str) -> Result<(), HandoverError> {
    let path = folder(node);
    match std::fs::remove_dir_all(&path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(HandoverError::Remove { path, source })
        }
        _ => Ok(()),
    }
}

/// Why the node could not be taken over.
#[derive(Debug, thiserror::Error)]
pub enum HandoverError {
    /// No control socket.
    #[error("listen on the control socket {}", path.display())]
    Bind {
        /// The socket.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
    /// What a node has left could not be removed.
    #[error("remove {}", path.display())]
    Remove {
        /// The folder.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
    /// The control socket of the process before is not there, and that process is.
    #[error(
        "reach the culvert that runs{} at {}: share /run/culvert with it, or stop it",
        of(*pid), path.display()
    )]
    Unreachable {
        /// The socket.
        path: PathBuf,
        /// The process, where it is known.
        pid: Option<u32>,
        /// The operating system's reason.
        source: io::Error,
    },
    /// The process before does not answer.
    #[error("take over from the culvert that runs{}: it does not answer; stop it", of(*pid))]
    Silent {
        /// The process, where it is known.
        pid: Option<u32>,
    },
    /// The process before is not on this node.
    #[error(
        "take over from the culvert that runs{}: it is in another network namespace; choose another --node, or stop it",
        of(*pid)
    )]
    Elsewhere {
        /// The process, where it is known.
        pid: Option<u32>,
    },
    /// The process before says something that was not expected.
    #[error("take over from the culvert that runs{}: stop it, and start again", of(*pid))]
    Elder {
        /// The process, where it is known.
        pid: Option<u32>,
        /// What was said.
        source: io::Error,
    },
    /// Whether the process before is there could not be seen.
    #[error(transparent)]
    Seat(CaptureError),
}

fn of(pid: Option<u32>) -> String {
    pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default()
}
