//! The agent's end: hands pods to every proxy that connects.
//!
//! What is to be told is worked out from what is wanted and what a proxy has acknowledged, not queued: however pods come
//! and go while proxies do, a connection needs no more memory than the pods that it was told of.

mod registry;
mod session;

use std::{
    fs, io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use culvert_sys::{handoff, seqpacket};
use tokio::{net::UnixListener, task::JoinSet, time::sleep};

use self::registry::Registry;
pub use self::registry::{AddError, Pods};

/// How long after one connection the next is taken: a proxy that fails at once and comes back must not keep the agent busy.
const BETWEEN_CONNECTIONS: Duration = Duration::from_millis(200);
/// Proxies at a time. Two are usual while one takes over from another.
const CONNECTIONS: usize = 8;

/// Why there is no socket for proxies.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Somebody answers there.
    #[error("another agent serves {}; stop it first", path.display())]
    Taken {
        /// The socket's path.
        path: PathBuf,
    },
    /// It cannot be made.
    #[error("listen for proxies at {}", path.display())]
    Socket {
        /// The socket's path.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
}

/// The socket that proxies connect to. It is removed when this is dropped.
#[derive(Debug)]
pub struct Server {
    listener: UnixListener,
    path: PathBuf,
    registry: Arc<Registry>,
}

impl Server {
    /// Listens at `path`, in place of an agent that is gone. Only root and this process's user may connect.
    pub fn bind(path: &Path) -> Result<Self, BindError> {
        let refused = |source| BindError::Socket { path: path.to_owned(), source };
        let listener = match seqpacket::listen(path) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                if !is_dead(path) {
                    return Err(BindError::Taken { path: path.to_owned() });
                }
                fs::remove_file(path).map_err(refused)?;
                seqpacket::listen(path)
            }
            listener => listener,
        };
        let listener = listener.map_err(refused)?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(refused)?;
        let listener = UnixListener::from_std(listener).map_err(refused)?;
        Ok(Self { listener, path: path.to_owned(), registry: Arc::default() })
    }

    /// By which pods are added and removed.
    pub fn pods(&self) -> Pods {
        Pods::new(Arc::clone(&self.registry))
    }

    /// Serves proxies for as long as it is polled.
    pub async fn run(self) {
        let mut sessions = JoinSet::new();
        loop {
            let accepted = self.listener.accept().await;
            while sessions.try_join_next().is_some() {}
            match accepted.and_then(|(socket, _)| Ok((socket.peer_cred()?, socket))) {
                Ok((peer, _)) if !handoff::is_trusted(peer.uid()) => {
                    tracing::warn!(?peer, "a process of another user asked for pods; refused");
                }
                Ok((peer, _)) if sessions.len() >= CONNECTIONS => {
                    tracing::warn!(?peer, limit = CONNECTIONS, "too many proxies; refused one");
                }
                Ok((peer, socket)) => {
                    tracing::info!(?peer, "a proxy connected");
                    sessions.spawn(session::run(Arc::clone(&self.registry), socket));
                }
                Err(error) => tracing::warn!(%error, "a proxy's connection was not accepted"),
            }
            sleep(BETWEEN_CONNECTIONS).await;
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(%error, path = %self.path.display(), "socket not removed");
        }
    }
}

/// Whether nobody serves the socket at `path` any longer.
fn is_dead(path: &Path) -> bool {
    seqpacket::connect(path).is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}
