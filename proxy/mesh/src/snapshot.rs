//! One immutable state of the mesh and its indexes: what the hot path reads without a lock.
//! Filling it is left to `file` (and other feeds), swapping it to the binary.

#[cfg(test)]
mod tests;

use std::{collections::HashMap, net::IpAddr, sync::Arc};

use ipnet::IpNet;

use crate::{
    PodRef,
    policy::{Policy, Scope},
    service::Service,
    workload::{Destination, NetworkMode, Protocol, ServiceName, Workload},
};

/// All workloads, services and policies that are known, found by every key that a connection has.
#[derive(Debug, Default)]
pub struct Snapshot {
    /// Ordered by uid.
    workloads: Vec<Arc<Workload>>,
    /// Ordered by host name, then namespace.
    services: Vec<Arc<Service>>,
    /// Ordered by key.
    policies: Vec<Arc<Policy>>,
    by_uid: HashMap<Arc<str>, Arc<Workload>>,
    by_pod: HashMap<PodRef, Pod>,
    by_address: HashMap<Arc<str>, HashMap<IpAddr, Arc<Workload>>>,
    by_workload_hostname: HashMap<ServiceName, Arc<Workload>>,
    by_hostname: HashMap<Arc<str>, Vec<Arc<Service>>>,
    by_vip: HashMap<Arc<str>, HashMap<IpAddr, Vec<Arc<Service>>>>,
    /// By network; the longest prefix first.
    by_cidr: HashMap<Arc<str>, Vec<(IpNet, Arc<Service>)>>,
    by_policy_key: HashMap<Arc<str>, Arc<Policy>>,
    global_policies: Vec<Arc<Policy>>,
    namespace_policies: HashMap<Arc<str>, Vec<Arc<Policy>>>,
}

/// What a pod's name leads to.
#[derive(Debug)]
enum Pod {
    One(Arc<Workload>),
    /// Pods of several clusters share the name.
    Ambiguous,
}

impl Snapshot {
    /// Indexes the given records. Of records with equal keys the last one counts.
    pub fn new(
        workloads: impl IntoIterator<Item = Arc<Workload>>,
        services: impl IntoIterator<Item = Arc<Service>>,
        policies: impl IntoIterator<Item = Arc<Policy>>,
    ) -> Self {
        let mut new = Self::default();
        for workload in workloads {
            new.by_uid.insert(Arc::clone(&workload.uid), workload);
        }
        for policy in policies {
            new.by_policy_key.insert(Arc::clone(&policy.key), policy);
        }
        let services: HashMap<_, _> = services.into_iter().map(|s| (s.key.clone(), s)).collect();
        new.workloads = new.by_uid.values().cloned().collect();
        new.workloads.sort_unstable_by(|a, b| a.uid.cmp(&b.uid));
        new.services = services.into_values().collect();
        new.services.sort_unstable_by(|a, b| {
            (&a.key.hostname, &a.key.namespace).cmp(&(&b.key.hostname, &b.key.namespace))
        });
        new.policies = new.by_policy_key.values().cloned().collect();
        new.policies.sort_unstable_by(|a, b| a.key.cmp(&b.key));
        new.index_workloads();
        new.index_services();
        new.index_policies();
        new
    }

    fn index_workloads(&mut self) {
        for workload in &self.workloads {
            let pod = PodRef {
                name: Arc::clone(&workload.name),
                namespace: workload.namespace().into(),
                service_account: workload.identity.service_account().into(),
            };
            self.by_pod
                .entry(pod)
                .and_modify(|p| *p = Pod::Ambiguous)
                .or_insert_with(|| Pod::One(Arc::clone(workload)));
            if !workload.hostname.is_empty() {
                let name = ServiceName {
                    namespace: workload.namespace().into(),
                    hostname: Arc::clone(&workload.hostname),
                };
                self.by_workload_hostname.entry(name).or_insert_with(|| Arc::clone(workload));
            }
            // A host network address belongs to the node; it does not tell its pods apart.
            if workload.network_mode == NetworkMode::HostNetwork {
                continue;
            }
            let network = self.by_address.entry(Arc::clone(&workload.network)).or_default();
            for ip in &workload.addresses {
                let best = network.entry(*ip).or_insert_with(|| Arc::clone(workload));
                if claim(workload) > claim(best) {
                    *best = Arc::clone(workload);
                }
            }
        }
    }

    fn index_services(&mut self) {
        for service in &self.services {
            let hostname = Arc::clone(&service.key.hostname);
            self.by_hostname.entry(hostname).or_default().push(Arc::clone(service));
            for vip in &service.vips {
                let network = self.by_vip.entry(Arc::clone(&vip.network)).or_default();
                network.entry(vip.ip).or_default().push(Arc::clone(service));
            }
            for vip in &service.cidr_vips {
                let network = self.by_cidr.entry(Arc::clone(&vip.network)).or_default();
                network.push((vip.cidr, Arc::clone(service)));
            }
        }
        for network in self.by_cidr.values_mut() {
            network.sort_by_key(|(cidr, _)| std::cmp::Reverse(cidr.prefix_len()));
        }
    }

    fn index_policies(&mut self) {
        for policy in &self.policies {
            match policy.scope {
                Scope::Global => self.global_policies.push(Arc::clone(policy)),
                Scope::Namespace => self
                    .namespace_policies
                    .entry(Arc::clone(&policy.namespace))
                    .or_default()
                    .push(Arc::clone(policy)),
                Scope::WorkloadSelector => {}
            }
        }
    }

    /// All workloads, ordered by uid.
    pub fn workloads(&self) -> impl ExactSizeIterator<Item = &Arc<Workload>> {
        self.workloads.iter()
    }

    /// All services, ordered by host name, then namespace.
    pub fn services(&self) -> impl ExactSizeIterator<Item = &Arc<Service>> {
        self.services.iter()
    }

    /// All policies, ordered by key.
    pub fn policies(&self) -> impl ExactSizeIterator<Item = &Arc<Policy>> {
        self.policies.iter()
    }

    /// The workload of this uid.
    pub fn find_workload(&self, uid: &str) -> Option<&Arc<Workload>> {
        self.by_uid.get(uid)
    }

    /// The workload that is `pod`. `None` if there is none, or pods of several clusters share the
    /// name: no guess is made about whose certificate to use.
    pub fn find_local(&self, pod: &PodRef) -> Option<&Arc<Workload>> {
        match self.by_pod.get(pod)? {
            Pod::One(workload) => Some(workload),
            Pod::Ambiguous => None,
        }
    }

    /// The workload that owns `ip` in `network`; of several a pod first, then one of the mesh.
    pub fn find_by_address(&self, network: &str, ip: &IpAddr) -> Option<&Arc<Workload>> {
        self.by_address.get(network)?.get(&ip.to_canonical())
    }

    /// The workload in `name`'s namespace whose own host name is `name`'s.
    pub fn find_by_hostname(&self, name: &ServiceName) -> Option<&Arc<Workload>> {
        self.by_workload_hostname.get(name)
    }

    /// The service of this name.
    pub fn find_service(&self, name: &ServiceName) -> Option<&Arc<Service>> {
        self.services_of_hostname(&name.hostname).iter().find(|s| s.key == *name)
    }

    /// The services of this host name, at most one in a namespace.
    pub fn services_of_hostname(&self, hostname: &str) -> &[Arc<Service>] {
        self.by_hostname.get(hostname).map_or(&[], Vec::as_slice)
    }

    /// The best service that owns exactly `ip` in `network` and that `client`'s namespace may see.
    pub fn find_by_vip(&self, network: &str, ip: &IpAddr, client: &str) -> Option<&Arc<Service>> {
        best(self.services_of_vip(network, ip), client)
    }

    /// The services that own exactly `ip` in `network`, whoever may see them.
    pub fn services_of_vip(&self, network: &str, ip: &IpAddr) -> &[Arc<Service>] {
        let services = self.by_vip.get(network).and_then(|n| n.get(&ip.to_canonical()));
        services.map_or(&[], Vec::as_slice)
    }

    /// The best service whose ranges in `network` hold `ip` and that `client`'s namespace may see:
    /// first one of that namespace, then the longest prefix, then a canonical one.
    pub fn find_by_cidr(&self, network: &str, ip: &IpAddr, client: &str) -> Option<&Arc<Service>> {
        let ip = ip.to_canonical();
        let all = self.by_cidr.get(network)?.iter().filter(|(cidr, _)| cidr.contains(&ip));
        let rank = |(cidr, service): &&(IpNet, Arc<Service>)| {
            (*service.key.namespace == *client, cidr.prefix_len(), service.canonical)
        };
        let visible = all.filter(|(_, service)| service.is_visible_to(client));
        Some(&first_max_by_key(visible, rank)?.1)
    }

    /// The service or workload that a record's `destination` names.
    pub fn find_destination(&self, destination: &Destination) -> Option<Found<'_>> {
        match destination {
            Destination::Address(address) => {
                let services = self.services_of_vip(&address.network, &address.ip);
                let service = services.iter().find(|s| s.canonical).or_else(|| services.first());
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
        self.by_policy_key.get(key)
    }

    pub(crate) fn global_policies(&self) -> &[Arc<Policy>] {
        &self.global_policies
    }

    pub(crate) fn policies_of_namespace(&self, namespace: &str) -> &[Arc<Policy>] {
        self.namespace_policies.get(namespace).map_or(&[], Vec::as_slice)
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

/// How good a workload's claim to an address is that others claim too.
fn claim(workload: &Workload) -> (bool, bool) {
    (workload.uid.contains("//Pod/"), workload.protocol == Protocol::Hbone)
}

/// Like `max_by_key`, but the first of equals.
fn first_max_by_key<T, K: Ord>(items: impl Iterator<Item = T>, key: impl Fn(&T) -> K) -> Option<T> {
    items.reduce(|best, item| if key(&item) > key(&best) { item } else { best })
}
