//! What connections share: per node the state, certificates and records, per pod the dialer and the pool.

use std::{net::SocketAddr, sync::Arc};

use culvert_capture::Addresses;
use culvert_carry::{
    Timeouts,
    dial::Dialer,
    hbone::{
        Pool,
        headers::{Baggage, WorkloadKind},
        server::Phase,
    },
};
use culvert_dns::Zone;
use culvert_mesh::{
    Identity, PodRef,
    workload::{Workload, WorkloadType},
};
use culvert_observe::{Connections, Dns, Observe};
use culvert_sys::netns::Netns;
use culvert_tls::Certificates;
use http::uri::Authority;
use tokio::sync::{Semaphore, watch};

use crate::{names::Names, outlook::PodOutlook, state::State};

/// What all connections of the node share.
pub(crate) struct NodeContext {
    /// The network namespace of this process.
    pub(crate) home: Netns,
    pub(crate) state: State,
    pub(crate) certificates: Arc<Certificates>,
    pub(crate) observe: Observe,
    pub(crate) connections: Connections,
    pub(crate) timeouts: Timeouts,
    pub(crate) network: String,
    pub(crate) cluster_id: String,
    pub(crate) zone: Zone,
    pub(crate) dns: Dns,
    pub(crate) names: Names,
    /// Ports in a pod that belong to the proxy, beside HBONE's.
    pub(crate) proxy_ports: &'static [u16],
}

/// What all connections of a pod share.
pub(crate) struct PodContext {
    pub(crate) node: Arc<NodeContext>,
    pub(crate) pod: PodRef,
    pub(crate) addresses: Addresses,
    pub(crate) dialer: Dialer,
    pub(crate) pool: Pool<PeerKey>,
    pub(crate) outlook: Arc<PodOutlook>,
    /// One for each peer that has not proved who it is: they can use up descriptors, and cost a handshake each.
    pub(crate) handshakes: Arc<Semaphore>,
    /// How far the pod's HBONE servers are on their way to the end.
    pub(crate) phase: watch::Sender<Phase>,
}

/// What connections of the HBONE pool are told apart by. Those under a certificate that has been renewed are retired.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PeerKey {
    pub(crate) source: Identity,
    pub(crate) expected: Vec<Identity>,
    pub(crate) gateway: SocketAddr,
    /// For a connection within a tunnel of another, which is the one to `gateway`.
    pub(crate) within: Option<Within>,
}

/// The outer tunnel of a connection to another network.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Within {
    /// Who may answer for the gateway.
    pub(crate) gateway: Vec<Identity>,
    /// What the gateway is asked for.
    pub(crate) authority: Authority,
    /// Tells connections apart that lead to the same service.
    pub(crate) lane: u8,
}

impl NodeContext {
    /// What peers are told of one of our workloads.
    pub(crate) fn baggage(&self, workload: &Workload) -> Baggage {
        Baggage {
            cluster: self.cluster_id.clone(),
            namespace: workload.namespace().to_owned(),
            kind: match workload.workload_type {
                WorkloadType::Deployment => WorkloadKind::Deployment,
                WorkloadType::CronJob => WorkloadKind::CronJob,
                WorkloadType::Pod => WorkloadKind::Pod,
                WorkloadType::Job => WorkloadKind::Job,
            },
            workload: workload.workload_name.to_string(),
            service: workload.canonical_name.to_string(),
            version: workload.canonical_revision.to_string(),
            region: workload.locality.region.to_string(),
            zone: workload.locality.zone.to_string(),
        }
    }
}
