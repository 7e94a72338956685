//! Workloads: the endpoints of the mesh, each a pod or a machine with an identity.
//! How they are found is left to `snapshot`, which of them is chosen to `route`.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use serde::Deserialize;

use crate::{Identity, ports::Ports, service::Service};

/// The port on which every workload of the mesh accepts HBONE.
pub const HBONE_PORT: u16 = 15008;

/// One endpoint of the mesh. Texts that the control plane left unset are empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workload {
    /// Unique in the mesh: `<cluster>//<kind>/<namespace>/<name>` for pods.
    pub uid: Arc<str>,
    /// The pod's name.
    pub name: Arc<str>,
    /// Trust domain, namespace and service account; what its certificate must say.
    pub identity: Identity,
    /// Its addresses, canonical (no IPv4-mapped IPv6). Empty if only `hostname` says where it is.
    pub addresses: Vec<IpAddr>,
    /// What it accepts from other workloads.
    pub protocol: Protocol,
    /// The network in which `addresses` have a meaning.
    pub network: Arc<str>,
    /// Whether `addresses` are its own.
    pub network_mode: NetworkMode,
    /// The node it runs on.
    pub node: Arc<str>,
    /// A DNS name, for workloads without addresses.
    pub hostname: Arc<str>,
    /// Where traffic addressed to this workload, and not to a service, has to pass.
    pub waypoint: Option<Box<Gateway>>,
    /// Where other networks have to knock to reach it.
    pub network_gateway: Option<Box<Gateway>>,
    /// The name of what it is a replica of, such as its deployment's.
    pub workload_name: Arc<str>,
    /// The kind of what it is a replica of.
    pub workload_type: WorkloadType,
    /// The service name it goes by in telemetry.
    pub canonical_name: Arc<str>,
    /// The version it goes by in telemetry.
    pub canonical_revision: Arc<str>,
    /// Whether it speaks HBONE by itself, without a node proxy.
    pub native_tunnel: bool,
    /// How tunnelled connections are handed to the app, if not plainly.
    pub application_tunnel: Option<ApplicationTunnel>,
    /// Policies that select this workload, as `namespace/name`.
    pub policies: Vec<Arc<str>>,
    /// Whether it is ready.
    pub health: Health,
    /// The cluster it runs in.
    pub cluster_id: Arc<str>,
    /// Where it runs.
    pub locality: Locality,
    /// Its share of its services' connections. 0: none.
    pub capacity: u32,
    /// The services it is an endpoint of, each once.
    pub services: Vec<Membership>,
}

impl Workload {
    /// The namespace of its identity.
    pub fn namespace(&self) -> &str {
        self.identity.namespace()
    }

    /// What it says of itself as an endpoint of `service`. `None`: it is none.
    pub fn membership(&self, service: &ServiceName) -> Option<&Membership> {
        self.services.iter().find(|member| member.service == *service)
    }

    /// The port of this workload that serves `port` of `service`, given its `own` translations.
    pub(crate) fn target_port(&self, own: &Ports, service: &Service, port: u16) -> Option<u16> {
        let target = own.get(port).or_else(|| service.ports.get(port)).filter(|&p| p != 0);
        // A proxy that demultiplexes by itself takes connections of every port on its one port.
        let tunnelled = || self.application_tunnel.and_then(|t| t.port).map(|_| port);
        target.or_else(tunnelled)
    }
}

/// A workload's part in a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Membership {
    /// The service, known or not.
    pub service: ServiceName,
    /// Service port to this workload's own target port, before the service's.
    pub ports: Ports,
    /// Whether it is ready to serve this service; `None`: as ready as the workload is.
    pub health: Option<Health>,
}

/// What a workload accepts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum Protocol {
    /// Plain TCP: it is not in the mesh.
    #[default]
    #[serde(rename = "TCP")]
    Tcp,
    /// HTTP/2 CONNECT over mutual TLS, on [`HBONE_PORT`].
    #[serde(rename = "HBONE")]
    Hbone,
}

/// Whose addresses a workload uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum NetworkMode {
    /// Its own.
    #[default]
    Standard,
    /// Its node's, shared with others: the address does not tell the workload.
    HostNetwork,
}

/// Whether an endpoint is ready for connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum Health {
    /// Ready.
    #[default]
    Healthy,
    /// Not ready.
    Unhealthy,
}

/// What owns a workload's replicas. `Display` gives the lower-case name that HBONE's baggage uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum WorkloadType {
    /// A deployment.
    #[default]
    #[serde(rename = "deployment")]
    Deployment,
    /// A cron job.
    #[serde(rename = "cronjob")]
    CronJob,
    /// Nothing: a bare pod.
    #[serde(rename = "pod")]
    Pod,
    /// A job.
    #[serde(rename = "job")]
    Job,
}

impl fmt::Display for WorkloadType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Deployment => "deployment",
            Self::CronJob => "cronjob",
            Self::Pod => "pod",
            Self::Job => "job",
        })
    }
}

/// Where a workload runs, from wide to narrow. Empty texts are unset.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Locality {
    /// The region.
    pub region: Arc<str>,
    /// The zone within it.
    pub zone: Arc<str>,
    /// The part of the zone.
    pub subzone: Arc<str>,
}

/// How a workload that is itself a proxy receives what was tunnelled to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ApplicationTunnel {
    /// What precedes the bytes.
    pub protocol: TunnelProtocol,
    /// The port that receives them, instead of the one that was asked for.
    pub port: Option<u16>,
}

/// What precedes the bytes of a connection handed to an application tunnel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum TunnelProtocol {
    /// Nothing.
    #[default]
    #[serde(rename = "NONE")]
    None,
    /// A PROXY protocol version 2 header.
    #[serde(rename = "PROXY")]
    Proxy,
}

/// A waypoint or network gateway that another record names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gateway {
    /// The service or workload it is.
    pub destination: Destination,
    /// Its HBONE port (a service port if `destination` is a service).
    pub port: u16,
}

/// How a record names another: by address or by name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Destination {
    /// The workload or service at this address.
    Address(NetworkAddress),
    /// The service, or else the workload, of this name.
    Name(ServiceName),
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => address.fmt(f),
            Self::Name(name) => name.fmt(f),
        }
    }
}

/// An IP address in one network. `Display` gives `network/ip`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NetworkAddress {
    /// The network; empty is the default one.
    pub network: Arc<str>,
    /// The address, canonical.
    pub ip: IpAddr,
}

impl fmt::Display for NetworkAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.network, self.ip)
    }
}

/// A service's name in the mesh. `Display` gives `namespace/hostname`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServiceName {
    /// The namespace that declares it.
    pub namespace: Arc<str>,
    /// The DNS name its clients use.
    pub hostname: Arc<str>,
}

impl fmt::Display for ServiceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.hostname)
    }
}

/// `address` with IPv4-mapped IPv6 turned into IPv4, the form that all records use.
pub(crate) fn canonical(address: SocketAddr) -> SocketAddr {
    match address.ip().to_canonical() {
        ip @ IpAddr::V4(_) => SocketAddr::new(ip, address.port()),
        // Whole: a link-local address is nothing without its scope.
        IpAddr::V6(_) => address,
    }
}
