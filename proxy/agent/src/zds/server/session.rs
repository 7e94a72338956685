//! One proxy's connection, from hello to its end.

use std::{
    os::fd::{AsFd as _, OwnedFd},
    sync::Arc,
};

use culvert_mesh::error::chain;
use culvert_proto::istio::workload::zds::{
    AddWorkload, DelWorkload, KeepWorkload, SnapshotSent, Version, WorkloadInfo, WorkloadRequest,
    WorkloadResponse, ZdsHello, workload_request::Payload, workload_response,
};
use tokio::{
    net::UnixStream,
    time::{Instant, sleep_until, timeout},
};

use super::registry::{Next, Registry, SessionId};
use crate::zds::{
    DEADLINE, Pod,
    wire::{Connection, WireError},
};

/// Why a proxy is given up; it may connect again.
#[derive(Debug, thiserror::Error)]
enum SessionError {
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error("the proxy speaks version {0} of the protocol; this agent speaks 1")]
    Version(i32),
    #[error("the proxy spoke without being asked")]
    Unasked,
    #[error("the proxy sent something that is no answer")]
    NoAnswer,
    #[error("the proxy sent a descriptor")]
    Descriptor,
}

/// Tells the proxy at `socket` of the pods for as long as it answers.
pub(super) async fn run(registry: Arc<Registry>, socket: UnixStream) {
    let ended = async {
        let connection = Connection::new(socket);
        hello(&connection).await?;
        let session = Session { id: registry.join(), registry };
        session.follow(&connection).await
    };
    match ended.await {
        Err(SessionError::Wire(WireError::Closed)) | Ok(()) => tracing::info!("a proxy is gone"),
        Err(error) => {
            tracing::warn!(error = chain(&error), "a proxy was disconnected");
        }
    }
}

async fn hello(connection: &Connection) -> Result<(), SessionError> {
    let hello = timeout(DEADLINE, connection.receive::<ZdsHello>()).await;
    let (hello, descriptor) = hello.map_err(|_late| WireError::Late)??;
    match hello.version {
        _ if descriptor.is_some() => Err(SessionError::Descriptor),
        version if version == i32::from(Version::V1) => Ok(()),
        version => Err(SessionError::Version(version)),
    }
}

/// A proxy that counts.
struct Session {
    id: SessionId,
    registry: Arc<Registry>,
}

impl Session {
    async fn follow(&self, connection: &Connection) -> Result<(), SessionError> {
        let mut changed = self.registry.subscribe();
        loop {
            changed.mark_unchanged();
            let next = self.registry.next(self.id, Instant::now());
            let Next::Wait(until) = next else {
                let answer = ask(connection, &next).await?;
                if let Err(reason) = &answer {
                    tracing::warn!(reason, request = ?next, "a proxy could not do as it was told");
                }
                self.registry.answered(self.id, &next, answer, Instant::now());
                continue;
            };
            let due = async {
                match until {
                    Some(due) => sleep_until(due).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                _ = changed.changed() => {}
                () = due => {}
                // A late answer would be taken for one to the next request.
                said = connection.receive::<WorkloadResponse>() => {
                    said?;
                    return Err(SessionError::Unasked);
                }
            }
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.registry.leave(self.id);
    }
}

/// Sends one request and waits for its answer. After a deadline the connection is of no more use: an answer that comes
/// late cannot be told from one to the next request.
async fn ask(connection: &Connection, next: &Next) -> Result<Result<(), String>, SessionError> {
    let (payload, netns) = match next {
        Next::Add(Pod { uid, pod, netns }, _) => {
            let info = WorkloadInfo {
                name: pod.name.to_string(),
                namespace: pod.namespace.to_string(),
                service_account: pod.service_account.to_string(),
            };
            let add = AddWorkload { uid: uid.to_string(), workload_info: Some(info) };
            (Payload::Add(add), netns.as_deref())
        }
        Next::Keep(uid, _) => (Payload::Keep(KeepWorkload { uid: uid.to_string() }), None),
        Next::Remove(uid) => (Payload::Del(DelWorkload { uid: uid.to_string() }), None),
        Next::Snapshot => (Payload::SnapshotSent(SnapshotSent {}), None),
        Next::Wait(_) => return Ok(Ok(())),
    };
    let request = WorkloadRequest { payload: Some(payload) };
    let netns = netns.map(OwnedFd::as_fd);
    let answered = async {
        connection.send(&request, netns).await?;
        connection.receive::<WorkloadResponse>().await
    };
    let (response, descriptor) =
        timeout(DEADLINE, answered).await.map_err(|_late| WireError::Late)??;
    if descriptor.is_some() {
        return Err(SessionError::Descriptor);
    }
    let Some(workload_response::Payload::Ack(ack)) = response.payload else {
        return Err(SessionError::NoAnswer);
    };
    Ok(if ack.error.is_empty() { Ok(()) } else { Err(ack.error) })
}
