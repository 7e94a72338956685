//! Services: names and virtual addresses that stand for endpoints.
//! Which endpoint a connection gets is left to `route`.

use std::sync::Arc;

use ipnet::IpNet;
use serde::Deserialize;

use crate::{
    Identity,
    ports::Ports,
    workload::{Gateway, NetworkAddress, ServiceName},
};

/// A service of the mesh. Its endpoints are the workloads that say so: see
/// [`Snapshot::endpoints`](crate::Snapshot::endpoints).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// Its short name.
    pub name: Arc<str>,
    /// Its namespace and host name, by which records refer to it.
    pub key: ServiceName,
    /// Its virtual addresses.
    pub vips: Vec<NetworkAddress>,
    /// Whole ranges of virtual addresses.
    pub cidr_vips: Vec<NetworkCidr>,
    /// Service port to target port. Target 0: only the endpoints know.
    pub ports: Ports,
    /// Identities that its endpoints may have beside their own.
    pub subject_alt_names: Vec<Identity>,
    /// Where traffic addressed to this service has to pass.
    pub waypoint: Option<Gateway>,
    /// Waypoints among which each connection chooses; used instead of `waypoint` if any has weight.
    pub weighted_waypoints: Vec<WeightedGateway>,
    /// How an endpoint is chosen.
    pub load_balancer: LoadBalancer,
    /// The families of addresses its clients may use; `None` allows both.
    pub ip_families: Option<IpFamilies>,
    /// Whether it is preferred over others of its host name.
    pub canonical: bool,
    /// Who may see it.
    pub visibility: Visibility,
}

impl Service {
    /// Whether clients in `namespace` may see it.
    pub fn is_visible_to(&self, namespace: &str) -> bool {
        match self.visibility {
            Visibility::Public => true,
            Visibility::Namespace => *self.key.namespace == *namespace,
        }
    }
}

/// A range of addresses in one network.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct NetworkCidr {
    /// The network; empty is the default one.
    pub network: Arc<str>,
    /// The range.
    pub cidr: IpNet,
}

/// A waypoint with its share of the connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightedGateway {
    /// The waypoint.
    pub gateway: Gateway,
    /// Its share. 0: none.
    pub weight: u32,
}

/// How a service chooses among its endpoints.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadBalancer {
    /// What endpoints should share with the client, most important first.
    pub preferences: Vec<Scope>,
    /// What `preferences` do.
    pub mode: Mode,
    /// Which endpoints take part.
    pub health_policy: HealthPolicy,
}

/// Something that a client and an endpoint may have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum Scope {
    /// The region.
    Region,
    /// The zone.
    Zone,
    /// The part of the zone.
    Subzone,
    /// The node.
    Node,
    /// The cluster.
    Cluster,
    /// The network.
    Network,
}

/// What a load balancer's preferences do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum Mode {
    /// Nothing: all endpoints are equal.
    #[default]
    Standard,
    /// Only endpoints that match all of them are used.
    Strict,
    /// The endpoints that match the longest run of them are used.
    Failover,
    /// No endpoint is chosen at all: connections go to the address that was asked for.
    Passthrough,
}

/// Which endpoints take part in the choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum HealthPolicy {
    /// Those that are ready.
    #[default]
    OnlyHealthy,
    /// All.
    AllowAll,
}

/// The address families that a service's clients may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum IpFamilies {
    /// Both.
    Dual,
    /// IPv4.
    #[serde(rename = "IPv4")]
    Ipv4,
    /// IPv6.
    #[serde(rename = "IPv6")]
    Ipv6,
}

/// Who may see a service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum Visibility {
    /// Everyone.
    #[default]
    Public,
    /// Clients in its namespace.
    Namespace,
}
