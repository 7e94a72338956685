//! The orders in which a snapshot keeps its records, one for each question that is asked of it.
//! Each is a set of shared records; a question is a prefix of the order, and its answers a run.

use std::{cmp::Ordering, net::IpAddr, sync::Arc};

use equivalent::{Comparable, Equivalent};
use imbl::OrdSet;
use ipnet::IpNet;

use crate::{
    PodRef,
    service::Service,
    workload::{Protocol, ServiceName, Workload},
};

/// Workloads by pod: name, namespace and service account; then uid.
#[derive(Clone, Debug)]
pub(super) struct ByPod(pub(super) Arc<Workload>);

/// Workloads by host name and namespace; then uid.
#[derive(Clone, Debug)]
pub(super) struct ByHostname(pub(super) Arc<Workload>);

/// Workloads by address and network; then the best claim to it, then uid.
#[derive(Clone, Debug)]
pub(super) struct ByAddress {
    /// One of the workload's; here, so that most comparisons need no look at the record.
    pub(super) ip: IpAddr,
    pub(super) workload: Arc<Workload>,
}

/// Services by virtual address and network; then namespace and host name.
#[derive(Clone, Debug)]
pub(super) struct ByVip {
    pub(super) ip: IpAddr,
    pub(super) network: Arc<str>,
    pub(super) service: Arc<Service>,
}

/// Services by range of virtual addresses: network, family, length and address; then namespace and
/// host name.
#[derive(Clone, Debug)]
pub(super) struct ByRange {
    pub(super) network: Arc<str>,
    pub(super) cidr: IpNet,
    pub(super) service: Arc<Service>,
}

/// A service's name, ordered by host name, then namespace.
#[derive(Clone, Debug)]
pub(super) struct HostFirst(pub(super) ServiceName);

impl ByPod {
    fn prefix(&self) -> (&str, &str, &str) {
        let identity = &self.0.identity;
        (&self.0.name, identity.namespace(), identity.service_account())
    }

    fn rest(&self) -> &str {
        &self.0.uid
    }
}

impl ByHostname {
    fn prefix(&self) -> (&str, &str) {
        (&self.0.hostname, self.0.namespace())
    }

    fn rest(&self) -> &str {
        &self.0.uid
    }
}

impl ByAddress {
    fn prefix(&self) -> (IpAddr, &str) {
        (self.ip, &self.workload.network)
    }

    fn rest(&self) -> (std::cmp::Reverse<(bool, bool)>, &str) {
        let pod = self.workload.uid.contains("//Pod/");
        let meshed = self.workload.protocol == Protocol::Hbone;
        (std::cmp::Reverse((pod, meshed)), &self.workload.uid)
    }
}

impl ByVip {
    fn prefix(&self) -> (IpAddr, &str) {
        (self.ip, &self.network)
    }

    fn rest(&self) -> &ServiceName {
        &self.service.key
    }
}

impl ByRange {
    fn prefix(&self) -> (&str, bool, u8, IpAddr) {
        range_key(&self.network, &self.cidr)
    }

    fn rest(&self) -> &ServiceName {
        &self.service.key
    }
}

impl HostFirst {
    fn prefix(&self) -> (&str,) {
        (&self.0.hostname,)
    }

    fn rest(&self) -> &str {
        &self.0.namespace
    }
}

/// Where ranges of one network, family and length stand, and the range of `cidr` among them.
pub(super) fn range_key<'a>(network: &'a str, cidr: &IpNet) -> (&'a str, bool, u8, IpAddr) {
    (network, cidr.addr().is_ipv6(), cidr.prefix_len(), cidr.network())
}

/// A place in an order: just before, or just after, everything that has this prefix.
#[derive(Clone, Copy, Debug)]
pub(super) struct Edge<P> {
    prefix: P,
    side: Ordering,
}

impl<P> Edge<P> {
    pub(super) fn before(prefix: P) -> Self {
        Self { prefix, side: Ordering::Less }
    }

    pub(super) fn after(prefix: P) -> Self {
        Self { prefix, side: Ordering::Greater }
    }
}

macro_rules! ordered {
    ($($record:ty: $prefix:ty),* $(,)?) => {$(
        impl Ord for $record {
            fn cmp(&self, other: &Self) -> Ordering {
                self.prefix().cmp(&other.prefix()).then_with(|| self.rest().cmp(&other.rest()))
            }
        }

        impl PartialOrd for $record {
            fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
                Some(self.cmp(other))
            }
        }

        impl PartialEq for $record {
            fn eq(&self, other: &Self) -> bool {
                self.cmp(other) == Ordering::Equal
            }
        }

        impl Eq for $record {}

        impl Equivalent<$record> for Edge<$prefix> {
            fn equivalent(&self, _: &$record) -> bool {
                false
            }
        }

        impl Comparable<$record> for Edge<$prefix> {
            fn compare(&self, record: &$record) -> Ordering {
                self.prefix.cmp(&record.prefix()).then(self.side)
            }
        }
    )*};
}

ordered! {
    ByPod: (&str, &str, &str),
    ByHostname: (&str, &str),
    ByAddress: (IpAddr, &str),
    ByVip: (IpAddr, &str),
    ByRange: (&str, bool, u8, IpAddr),
    HostFirst: (&str,),
}

impl Equivalent<HostFirst> for ServiceName {
    fn equivalent(&self, key: &HostFirst) -> bool {
        *self == key.0
    }
}

impl Comparable<HostFirst> for ServiceName {
    fn compare(&self, key: &HostFirst) -> Ordering {
        (&self.hostname, &self.namespace).cmp(&(&key.0.hostname, &key.0.namespace))
    }
}

/// The records of `set` that have `prefix`, in order.
pub(super) fn run<T, P>(set: &OrdSet<T>, prefix: P) -> impl Iterator<Item = &T>
where
    T: Ord,
    P: Copy,
    Edge<P>: Comparable<T>,
{
    set.range(Edge::before(prefix)..Edge::after(prefix))
}

/// The first record of `set` that has `prefix`.
pub(super) fn first<T, P>(set: &OrdSet<T>, prefix: P) -> Option<&T>
where
    T: Ord,
    P: Copy,
    Edge<P>: Comparable<T>,
{
    set.get_next(&Edge::before(prefix))
        .filter(|found| Edge::after(prefix).compare(found) == Ordering::Greater)
}

/// What a pod's workload stands by.
pub(super) fn pod_key(pod: &PodRef) -> (&str, &str, &str) {
    (&pod.name, &pod.namespace, &pod.service_account)
}
