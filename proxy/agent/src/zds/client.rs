//! The proxy's end: what the agent asks for, checked, and the answers to it.

use std::{io, os::fd::OwnedFd, path::Path, path::PathBuf, sync::Arc};

use culvert_mesh::PodRef;
use culvert_proto::istio::workload::zds::{
    Ack, AddWorkload, Version, WorkloadRequest, WorkloadResponse, ZdsHello,
    workload_request::Payload, workload_response,
};
use culvert_sys::seqpacket;
use tokio::{net::UnixStream, time::timeout};

use super::{
    DEADLINE,
    wire::{Connection, WireError, short},
};

/// Why the agent is not listened to any longer; to connect again is the remedy.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// There is no agent.
    #[error("connect to the agent at {}; is it running?", path.display())]
    Connect {
        /// Where its socket should be.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
    /// The connection cannot go on.
    #[error("talk to the agent")]
    Wire(#[from] WireError),
    /// The agent broke the protocol.
    #[error("the agent {0}")]
    Protocol(&'static str),
}

/// What the agent asks for. Each is to be answered before the next is taken.
#[derive(Debug)]
pub enum Request {
    /// Enrol this pod; if its UID is enrolled with this network namespace already, there is nothing to do.
    Add {
        /// Kubernetes' UID.
        uid: Arc<str>,
        /// Whose identity its connections carry.
        pod: PodRef,
        /// Its network namespace.
        netns: OwnedFd,
    },
    /// If this pod is enrolled, it stays.
    Keep {
        /// Kubernetes' UID.
        uid: Arc<str>,
    },
    /// Un-enrol this pod, which may be unknown.
    Remove {
        /// Kubernetes' UID.
        uid: Arc<str>,
    },
    /// That was every pod that there is.
    Snapshot,
}

/// A connection to the agent.
#[derive(Debug)]
pub struct Client {
    connection: Connection,
    snapshot_sent: bool,
}

impl Client {
    /// Connects to the agent's socket at `path` and says hello.
    pub async fn connect(path: &Path) -> Result<Self, ClientError> {
        let connect = |source| ClientError::Connect { path: path.to_owned(), source };
        let socket = seqpacket::connect(path).and_then(UnixStream::from_std).map_err(connect)?;
        let connection = Connection::new(socket);
        let hello = ZdsHello { version: Version::V1.into() };
        timeout(DEADLINE, connection.send(&hello, None))
            .await
            .map_err(|_late| WireError::Late)??;
        Ok(Self { connection, snapshot_sent: false })
    }

    /// The next request. Cancel-safe.
    ///
    /// After an error, of which the agent has been told, only a new connection helps.
    pub async fn next(&mut self) -> Result<Request, ClientError> {
        let received = self.connection.receive::<WorkloadRequest>().await;
        let request = match received {
            Ok((message, netns)) => self.check(message, netns).map_err(ClientError::Protocol),
            Err(WireError::Closed) => return Err(WireError::Closed.into()),
            Err(error) => Err(error.into()),
        };
        match request {
            Ok(request) => Ok(request),
            Err(error) => {
                // The connection ends whether the agent hears why or not.
                if let Err(unheard) = self.answer(Err(&error.to_string())).await {
                    tracing::debug!(error = %unheard, "the agent was not told of its mistake");
                }
                Err(error)
            }
        }
    }

    /// Answers the last request: done, or why not.
    pub async fn answer(&mut self, outcome: Result<(), &str>) -> Result<(), ClientError> {
        let error = outcome.err().map(short).unwrap_or_default();
        let payload = Some(workload_response::Payload::Ack(Ack { error }));
        let response = WorkloadResponse { payload };
        let sent = self.connection.send(&response, None);
        Ok(timeout(DEADLINE, sent).await.map_err(|_late| WireError::Late)??)
    }

    fn check(
        &mut self,
        message: WorkloadRequest,
        netns: Option<OwnedFd>,
    ) -> Result<Request, &'static str> {
        let payload = message.payload.ok_or("sent a request of an unknown kind")?;
        if netns.is_some() && !matches!(payload, Payload::Add(_)) {
            return Err("sent a descriptor with a request that takes none");
        }
        match payload {
            Payload::Add(AddWorkload { uid, workload_info }) => {
                let info = workload_info.ok_or("added a pod without its name")?;
                let netns = netns.ok_or("added a pod without its network namespace")?;
                let pod = PodRef {
                    name: info.name.into(),
                    namespace: info.namespace.into(),
                    service_account: info.service_account.into(),
                };
                Ok(Request::Add { uid: named(uid)?, pod, netns })
            }
            Payload::Keep(_) if self.snapshot_sent => Err("kept a pod after its snapshot"),
            Payload::Keep(keep) => Ok(Request::Keep { uid: named(keep.uid)? }),
            Payload::Del(del) => Ok(Request::Remove { uid: named(del.uid)? }),
            Payload::SnapshotSent(_) if self.snapshot_sent => Err("sent a second snapshot"),
            Payload::SnapshotSent(_) => {
                self.snapshot_sent = true;
                Ok(Request::Snapshot)
            }
        }
    }
}

fn named(uid: String) -> Result<Arc<str>, &'static str> {
    if uid.is_empty() { Err("named no pod") } else { Ok(uid.into()) }
}
