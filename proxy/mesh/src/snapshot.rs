//! One immutable state of the mesh and its indexes: what the hot path reads without a lock.
//! Filling it is left to `file` (and other feeds), swapping it to the binary.

mod index;
mod update;

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use imbl::{OrdMap, OrdSet};
use ipnet::IpNet;

pub use self::update::{Origin, Update};
use self::{
    index::{
        ByAddress, ByHostname, ByPod, ByRange, ByVip, Edge, HostFirst, first, pod_key, range_key,
        run,
    },
    update::Slot,
};
use crate::{
    PodRef,
    endpoints::Endpoints,
    policy::{Policy, PolicyIndex},
    service::Service,
    workload::{Destination, ServiceName, Workload},
};

/// All workloads, services and policies that are known, found by every key that a connection has.
///
/// Records come in any order: a reference leads nowhere until what it names arrives. Cloning is
/// cheap, and so is [`apply`](Self::apply): versions share what they have in common.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    workloads: OrdMap<Arc<str>, Slot<Workload>>,
    services: OrdMap<HostFirst, Slot<Service>>,
    policies: OrdMap<Arc<str>, Slot<Policy>>,
    pods: OrdSet<ByPod>,
    hostnames: OrdSet<ByHostname>,
    addresses: OrdSet<ByAddress>,
    vips: OrdSet<ByVip>,
    ranges: OrdSet<ByRange>,
    /// By service, whether that is known or not. None is empty.
    endpoints: OrdMap<ServiceName, Endpoints>,
    /// Those of services that have none.
    no_endpoints: Endpoints,
    policy_index: PolicyIndex,
}

impl Snapshot {
    /// All workloads, ordered by uid.
    pub fn workloads(&self) -> impl ExactSizeIterator<Item = &Arc<Workload>> {
        self.workloads.values().map(Slot::record)
    }

    /// All services, ordered by host name, then namespace.
    pub fn services(&self) -> impl ExactSizeIterator<Item = &Arc<Service>> {
        self.services.values().map(Slot::record)
    }

    /// All policies, ordered by key.
    pub fn policies(&self) -> impl ExactSizeIterator<Item = &Arc<Policy>> {
        self.policies.values().map(Slot::record)
    }

    /// The workload of this uid.
    pub fn find_workload(&self, uid: &str) -> Option<&Arc<Workload>> {
        self.workloads.get(uid).map(Slot::record)
    }

    /// The workload that is `pod`. `None` if there is none, or pods of several clusters share the
    /// name: no guess is made about whose certificate to use.
    pub fn find_local(&self, pod: &PodRef) -> Option<&Arc<Workload>> {
        let mut found = run(&self.pods, pod_key(pod));
        found.next().filter(|_| found.next().is_none()).map(|ByPod(workload)| workload)
    }

    /// The workload that owns `ip` in `network`; of several a pod first, then one of the mesh.
    pub fn find_by_address(&self, network: &str, ip: &IpAddr) -> Option<&Arc<Workload>> {
        first(&self.addresses, (ip.to_canonical(), network)).map(|found| &found.workload)
    }

    /// The workload in `name`'s namespace whose own host name is `name`'s.
    pub fn find_by_hostname(&self, name: &ServiceName) -> Option<&Arc<Workload>> {
        let found = first(&self.hostnames, (&*name.hostname, &*name.namespace));
        found.map(|ByHostname(workload)| workload)
    }

    /// The service of this name.
    pub fn find_service(&self, name: &ServiceName) -> Option<&Arc<Service>> {
        self.services.get(name).map(Slot::record)
    }

    /// The services of this host name, at most one in a namespace.
    pub fn services_of_hostname(&self, hostname: &str) -> impl Iterator<Item = &Arc<Service>> {
        let prefix = (hostname,);
        let run = self.services.range(Edge::before(prefix)..Edge::after(prefix));
        run.map(|(_, slot)| slot.record())
    }

    /// The endpoints of the service `name`, healthy or not.
    pub fn endpoints(&self, name: &ServiceName) -> &Endpoints {
        self.endpoints.get(name).unwrap_or(&self.no_endpoints)
    }

    /// The best service that owns exactly `ip` in `network` and that `client`'s namespace may see.
    pub fn find_by_vip(&self, network: &str, ip: &IpAddr, client: &str) -> Option<&Arc<Service>> {
        best(self.services_of_vip(network, ip), client)
    }

    /// The services that own exactly `ip` in `network`, whoever may see them.
    pub fn services_of_vip(
        &self,
        network: &str,
        ip: &IpAddr,
    ) -> impl Iterator<Item = &Arc<Service>> {
        run(&self.vips, (ip.to_canonical(), network)).map(|found| &found.service)
    }

    /// The best service whose ranges in `network` hold `ip` and that `client`'s namespace may see:
    /// first one of that namespace, then the longest prefix, then a canonical one.
    pub fn find_by_cidr(&self, network: &str, ip: &IpAddr, client: &str) -> Option<&Arc<Service>> {
        let rank = |found: &&ByRange| {
            let ByRange { service, cidr, .. } = found;
            (*service.key.namespace == *client, cidr.prefix_len(), service.canonical)
        };
        let visible = self.ranges_of(network, ip.to_canonical());
        let visible = visible.filter(|found| found.service.is_visible_to(client));
        Some(&first_max_by_key(visible, rank)?.service)
    }

    /// The ranges in `network` that hold `ip`. Asks once for each length of prefix that is in use.
    fn ranges_of<'a, 'n>(
        &'a self,
        network: &'n str,
        ip: IpAddr,
    ) -> impl Iterator<Item = &'a ByRange> + use<'a, 'n> {
        let lowest =
            if ip.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let next = move |from: u8| {
            let found =
                self.ranges.get_next(&Edge::before((network, ip.is_ipv6(), from, lowest)))?;
            let same = *found.network == *network && found.cidr.addr().is_ipv4() == ip.is_ipv4();
            same.then(|| found.cidr.prefix_len())
        };
        let lengths = std::iter::successors(next(0), move |length| next(length + 1));
        let ranges = lengths.filter_map(move |length| IpNet::new(ip, length).ok());
        ranges.flat_map(move |range| run(&self.ranges, range_key(network, &range)))
    }

    /// The service or workload that a record's `destination` names.
    pub fn find_destination(&self, destination: &Destination) -> Option<Found<'_>> {
        match destination {
            Destination::Address(address) => {
                let services = self.services_of_vip(&address.network, &address.ip);
                let service = first_max_by_key(services, |service| service.canonical);
                service.map(Found::Service).or_else(|| {
                    self.find_by_address(&address.network, &address.ip).map(Found::Workload)
                })
            }
            Destination::Name(name) => self
                .find_service(name)
                .map(Found::Service)
                .or_else(|| self.find_by_hostname(name).map(Found::Workload)),
        }
    }

    /// The policy of this key (`namespace/name`).
    pub fn find_policy(&self, key: &str) -> Option<&Arc<Policy>> {
        self.policies.get(key).map(Slot::record)
    }

    /// A number that differs between a snapshot and those made from it whose policies are others.
    pub fn policy_revision(&self) -> u64 {
        self.policy_index.changes()
    }

    /// The policies that apply without being named.
    pub(crate) fn policy_index(&self) -> &PolicyIndex {
        &self.policy_index
    }
}

/// What a [`Destination`] leads to.
#[derive(Clone, Copy, Debug)]
pub enum Found<'a> {
    /// A service.
    Service(&'a Arc<Service>),
    /// A workload.
    Workload(&'a Arc<Workload>),
}

/// The best of services that share a host name or an address, for clients in namespace `client`:
/// one of that namespace, then a canonical one, then the first.
pub(crate) fn best<'a>(
    services: impl IntoIterator<Item = &'a Arc<Service>>,
    client: &str,
) -> Option<&'a Arc<Service>> {
    let visible = services.into_iter().filter(|s| s.is_visible_to(client));
    first_max_by_key(visible, |s| (*s.key.namespace == *client, s.canonical))
}

/// Like `max_by_key`, but the first of equals.
fn first_max_by_key<T, K: Ord>(items: impl Iterator<Item = T>, key: impl Fn(&T) -> K) -> Option<T> {
    items.reduce(|best, item| if key(&item) > key(&best) { item } else { best })
}

#[cfg(test)]
mod tests;
