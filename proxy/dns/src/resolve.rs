//! Decides who answers a question: the mesh, or the name server that was asked.
//!
//! [`resolve`] is a function of a [`Snapshot`] and the question: no I/O, no clock, and no randomness but the caller's.
//! How a message looks is left to `wire`, asking name servers to `forward`.
//!
//! What the mesh says nothing about is always forwarded, never denied: a name that it does not know may be known to the
//! server, and so may records of other types of a name that it knows.

mod alias;
#[cfg(test)]
mod tests;

use std::{net::IpAddr, sync::Arc};

use culvert_mesh::{
    Snapshot,
    endpoints::Endpoint,
    service::{HealthPolicy, IpFamilies, Service},
    workload::{Health, Workload},
};
use rand::{Rng, seq::SliceRandom as _};

use self::alias::Alias;
pub use self::alias::SearchPath;

/// What holds for all questions of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Zone {
    /// The cluster's domain, in lower case and without dots at its ends: `cluster.local`.
    pub domain: Arc<str>,
    /// The namespace whose service is used where several have one host name, and none is the client's or canonical.
    pub preferred_namespace: Option<Arc<str>>,
    /// Whether IPv6 addresses are told.
    pub ipv6: bool,
}

impl Default for Zone {
    fn default() -> Self {
        Self { domain: "cluster.local".into(), preferred_namespace: None, ipv6: true }
    }
}

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// IPv4 addresses.
    A,
    /// IPv6 addresses.
    Aaaa,
    /// Records of another type, of which the mesh has none.
    Other,
}

/// A question, and who asks it.
#[derive(Clone, Copy, Debug)]
pub struct Question<'a> {
    /// The pod.
    pub client: &'a Workload,
    /// The domains that the pod's resolver tries names in.
    pub search: &'a SearchPath,
    /// The name in lower case, without a dot at its end.
    pub name: &'a str,
    /// What is asked for.
    pub kind: Kind,
}

/// Who answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resolution {
    /// The name server that was asked.
    Forward,
    /// The name server that was asked, but the name exists whatever it says: a denial of the name would deny the addresses
    /// that the mesh has, too (RFC 8020).
    ForwardExisting,
    /// The mesh.
    Local(Answer),
}

/// What the mesh answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The name that the question's is another one for, and which the addresses are of. `None`: the question's itself.
    pub canonical: Option<String>,
    /// Of the family that was asked for, in random order. None: the name has no such address (RFC 2308 §2.2).
    pub addresses: Vec<IpAddr>,
}

/// Decides on a question.
pub fn resolve(
    mesh: &Snapshot,
    zone: &Zone,
    question: &Question<'_>,
    rng: &mut impl Rng,
) -> Resolution {
    let namespace = question.client.namespace();
    let aliases = alias::expand(question.name, namespace, &zone.domain, question.search);
    let lookup = Lookup { mesh, zone, client: question.client };
    let found = aliases.into_iter().find_map(|alias| Some((lookup.find(&alias)?, alias)));
    let Some(((found, how), alias)) = found else { return Resolution::Forward };
    let usable = match &found {
        Found::Service(service) => lookup.addresses(service),
        Found::Pod(workload) => Some(workload.addresses.clone()),
    };
    // Whatever else has the name for good reason: an alias of another name, an endpoint told before it is ready.
    let Some(mut addresses) = usable else { return Resolution::ForwardExisting };
    let ipv4 = match question.kind {
        Kind::A => true,
        Kind::Aaaa => false,
        Kind::Other => return Resolution::ForwardExisting,
    };
    let families = match &found {
        Found::Service(service) => service.ip_families,
        Found::Pod(_) => None,
    };
    let allowed = match families {
        None | Some(IpFamilies::Dual) => ipv4 || zone.ipv6,
        Some(IpFamilies::Ipv4) => ipv4,
        Some(IpFamilies::Ipv6) => !ipv4 && zone.ipv6,
    };
    addresses.retain(|address| allowed && address.is_ipv4() == ipv4);
    addresses.sort_unstable();
    addresses.dedup();
    addresses.shuffle(rng);
    let canonical = alias.stripped.filter(|_| how == How::Exactly);
    Resolution::Local(Answer { canonical, addresses })
}

struct Lookup<'a> {
    mesh: &'a Snapshot,
    zone: &'a Zone,
    client: &'a Workload,
}

enum Found<'a> {
    Service(&'a Arc<Service>),
    /// A pod behind a headless service, by its own name.
    Pod(&'a Arc<Workload>),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    Exactly,
    ByWildcard,
}

impl<'a> Lookup<'a> {
    fn find(&self, alias: &Alias) -> Option<(Found<'a>, How)> {
        if let Some(service) = self.service(&alias.name) {
            return Some((Found::Service(service), How::Exactly));
        }
        if let Some(pod) = self.pod(&alias.name) {
            return Some((Found::Pod(pod), How::Exactly));
        }
        let mut wildcards = alias::wildcards(&alias.name);
        let service = wildcards.find_map(|wildcard| self.service(&wildcard))?;
        Some((Found::Service(service), How::ByWildcard))
    }

    /// The best service of the host name that the client may see.
    fn service(&self, hostname: &str) -> Option<&'a Arc<Service>> {
        let namespace = self.client.namespace();
        let preferred = self.zone.preferred_namespace.as_deref();
        let services = self.mesh.services_of_hostname(hostname);
        let rank = |service: &Arc<Service>| {
            let own = *service.key.namespace == *namespace;
            (own, service.canonical, preferred == Some(&service.key.namespace))
        };
        services
            .filter(|service| service.is_visible_to(namespace))
            .filter(|service| !service.vips.is_empty() || self.is_of_cluster(hostname))
            .reduce(|best, service| if rank(service) > rank(best) { service } else { best })
    }

    /// Whether the name is that of a service of Kubernetes, which may have no address of its own.
    fn is_of_cluster(&self, hostname: &str) -> bool {
        self.service_part(hostname).is_some()
    }

    /// `a.b` of `a.b.svc.<domain>`.
    fn service_part<'n>(&self, name: &'n str) -> Option<&'n str> {
        name.strip_suffix(&*self.zone.domain)?.strip_suffix(".svc.")
    }

    /// The pod of a name such as a stateful set gives: `pod.service.namespace.svc.<domain>`.
    fn pod(&self, name: &str) -> Option<&'a Arc<Workload>> {
        let (pod, service) = name.split_once('.')?;
        if self.service_part(service)?.split('.').count() != 2 {
            return None;
        }
        let service = self.service(service).filter(|service| service.vips.is_empty())?;
        let mut endpoints = self.mesh.endpoints(&service.key).iter();
        let is_it = |endpoint: &&Endpoint| *endpoint.workload().name == *pod;
        let endpoint = endpoints.find(|e| is_it(e) && self.is_usable(service, e))?;
        Some(endpoint.workload())
    }

    /// All addresses under which the client can reach the service. `None`: it has neither an address of its own, nor an
    /// endpoint that it could be reached at.
    fn addresses(&self, service: &Service) -> Option<Vec<IpAddr>> {
        if !service.vips.is_empty() {
            let vips = service.vips.iter().filter(|vip| vip.network == self.client.network);
            return Some(vips.map(|vip| vip.ip).collect());
        }
        let usable: Vec<_> = self
            .mesh
            .endpoints(&service.key)
            .iter()
            .filter(|e| self.is_usable(service, e))
            .collect();
        let first = |ipv4: bool| {
            usable.iter().filter_map(move |endpoint| {
                endpoint.workload().addresses.iter().find(|a| a.is_ipv4() == ipv4).copied()
            })
        };
        (!usable.is_empty()).then(|| first(true).chain(first(false)).collect())
    }

    /// Whether the client may be sent to the endpoint's own address. In another network it would mean somebody else.
    fn is_usable(&self, service: &Service, endpoint: &Endpoint) -> bool {
        let ready = endpoint.health() == Health::Healthy
            || service.load_balancer.health_policy == HealthPolicy::AllowAll;
        ready
            && endpoint.workload().network == self.client.network
            && !endpoint.workload().addresses.is_empty()
    }
}
