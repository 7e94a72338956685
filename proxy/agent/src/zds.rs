//! The protocol by which the agent of a node hands pods to the proxies of the node: package `istio.workload.zds`.
//!
//! A `SOCK_SEQPACKET` socket carries one message a packet. The proxy connects and says hello. The agent then tells each pod
//! that it knows, with the descriptor of its network namespace, and that this was all; and from then on what changes. The
//! proxy answers each request before the next is sent: nothing but the order tells which one an answer is to.

mod client;
mod server;
mod source;
mod wire;

#[cfg(test)]
mod tests;

use std::{os::fd::OwnedFd, sync::Arc, time::Duration};

use culvert_mesh::PodRef;

pub use self::{
    client::{Client, ClientError, Request},
    server::{AddError, BindError, Pods, Server},
    source::Agent,
    wire::WireError,
};

/// How long a message takes at most, and an answer.
const DEADLINE: Duration = Duration::from_secs(5);

/// A pod of this node with its network namespace.
#[derive(Clone, Debug)]
pub struct Pod {
    /// Kubernetes' UID of it.
    pub uid: Arc<str>,
    /// Whose identity its connections carry.
    pub pod: PodRef,
    /// Its network namespace; `None` when it is known to run, but not where. A proxy that has it keeps it.
    pub netns: Option<Arc<OwnedFd>>,
}
