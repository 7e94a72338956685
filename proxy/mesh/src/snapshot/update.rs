//! From one snapshot to the next: what is announced, by whom, and what follows for the indexes.

use std::sync::Arc;

use imbl::OrdMap;

use super::{
    Snapshot,
    index::{ByAddress, ByHostname, ByPod, ByRange, ByVip, HostFirst},
};
use crate::{
    endpoints::Endpoint,
    policy::Policy,
    service::Service,
    workload::{Membership, NetworkMode, ServiceName, Workload},
};

/// One change of the mesh, as a feed announces it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Update {
    /// This is the workload of its uid now.
    Workload(Workload),
    /// This is the service of its key now.
    Service(Service),
    /// This is the policy of its key now.
    Policy(Policy),
    /// There is no workload of this uid any more; or, if there was none, no service of this
    /// `namespace/hostname`.
    RemoveAddress(Arc<str>),
    /// There is no policy of this key any more.
    RemovePolicy(Arc<str>),
}

/// Who announces records. Each has its own say: what one removes, the other may still know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The node's own mesh file, which comes before the control plane.
    File,
    /// The control plane.
    ControlPlane,
}

/// What is known under one key, by origin.
#[derive(Clone, Debug)]
pub(super) enum Slot<T> {
    File(Arc<T>),
    ControlPlane(Arc<T>),
    Both(Box<Both<T>>),
}

#[derive(Clone, Debug)]
pub(super) struct Both<T> {
    file: Arc<T>,
    control_plane: Arc<T>,
}

impl<T> Slot<T> {
    /// The record that counts.
    pub(super) fn record(&self) -> &Arc<T> {
        match self {
            Self::File(record) | Self::ControlPlane(record) => record,
            Self::Both(both) => &both.file,
        }
    }

    /// The record that `origin` announced.
    fn of(&self, origin: Origin) -> Option<&Arc<T>> {
        match (self, origin) {
            (Self::File(record), Origin::File)
            | (Self::ControlPlane(record), Origin::ControlPlane) => Some(record),
            (Self::Both(both), Origin::File) => Some(&both.file),
            (Self::Both(both), Origin::ControlPlane) => Some(&both.control_plane),
            (Self::File(_), Origin::ControlPlane) | (Self::ControlPlane(_), Origin::File) => None,
        }
    }

    fn new(file: Option<Arc<T>>, control_plane: Option<Arc<T>>) -> Option<Self> {
        match (file, control_plane) {
            (Some(file), Some(control_plane)) => {
                Some(Self::Both(Box::new(Both { file, control_plane })))
            }
            (Some(record), None) => Some(Self::File(record)),
            (None, Some(record)) => Some(Self::ControlPlane(record)),
            (None, None) => None,
        }
    }
}

/// What a change of one slot means for the indexes: this record goes and that one comes.
struct Change<T> {
    gone: Option<Arc<T>>,
    come: Option<Arc<T>>,
}

/// Puts what `origin` says of `key` into `slots`. `None`: the record that counts stays.
fn put<K: Ord + Clone, T: Clone + PartialEq>(
    slots: &mut OrdMap<K, Slot<T>>,
    key: K,
    origin: Origin,
    record: Option<Arc<T>>,
) -> Option<Change<T>> {
    let old = slots.get(&key);
    let said = old.and_then(|slot| slot.of(origin));
    if said == record.as_ref() {
        return None;
    }
    let other = |origin| old.and_then(|slot| slot.of(origin)).cloned();
    let new = match origin {
        Origin::File => Slot::new(record, other(Origin::ControlPlane)),
        Origin::ControlPlane => Slot::new(other(Origin::File), record),
    };
    let gone = old.map(|slot| Arc::clone(slot.record()));
    let come = new.as_ref().map(|slot| Arc::clone(slot.record()));
    match new {
        Some(slot) => slots.insert(key, slot),
        None => slots.remove(&key),
    };
    (gone != come).then_some(Change { gone, come })
}

impl Snapshot {
    /// The mesh after `updates` of `origin`, in their order. The two snapshots share all that the
    /// updates leave as it is.
    #[must_use]
    pub fn apply(&self, origin: Origin, updates: impl IntoIterator<Item = Update>) -> Self {
        let mut next = self.clone();
        for update in updates {
            match update {
                Update::Workload(workload) => next.put_workload(origin, Arc::new(workload)),
                Update::Service(service) => next.put_service(origin, Arc::new(service)),
                Update::Policy(policy) => next.put_policy(origin, Arc::new(policy)),
                Update::RemoveAddress(name) => next.remove_address(origin, &name),
                Update::RemovePolicy(key) => next.set_policy(origin, key, None),
            }
        }
        next
    }

    /// The mesh in which all that `origin` says is what `records` hold, and nothing else.
    #[must_use]
    pub fn replace(&self, origin: Origin, records: &Self) -> Self {
        let mut next = self.clone();
        for (uid, slot) in &self.workloads {
            if slot.of(origin).is_some() && !records.workloads.contains_key(uid) {
                next.set_workload(origin, Arc::clone(uid), None);
            }
        }
        for (name, slot) in &self.services {
            if slot.of(origin).is_some() && !records.services.contains_key(name) {
                next.set_service(origin, name.0.clone(), None);
            }
        }
        for (key, slot) in &self.policies {
            if slot.of(origin).is_some() && !records.policies.contains_key(key) {
                next.set_policy(origin, Arc::clone(key), None);
            }
        }
        for workload in records.workloads() {
            next.put_workload(origin, Arc::clone(workload));
        }
        for service in records.services() {
            next.put_service(origin, Arc::clone(service));
        }
        for policy in records.policies() {
            next.put_policy(origin, Arc::clone(policy));
        }
        next
    }

    fn put_workload(&mut self, origin: Origin, workload: Arc<Workload>) {
        self.set_workload(origin, Arc::clone(&workload.uid), Some(workload));
    }

    fn put_service(&mut self, origin: Origin, service: Arc<Service>) {
        self.set_service(origin, service.key.clone(), Some(service));
    }

    fn put_policy(&mut self, origin: Origin, policy: Arc<Policy>) {
        self.set_policy(origin, Arc::clone(&policy.key), Some(policy));
    }

    fn remove_address(&mut self, origin: Origin, name: &Arc<str>) {
        if self.workloads.get(name).is_some_and(|slot| slot.of(origin).is_some()) {
            return self.set_workload(origin, Arc::clone(name), None);
        }
        if let Some((namespace, hostname)) = name.split_once('/') {
            let name = ServiceName { namespace: namespace.into(), hostname: hostname.into() };
            self.set_service(origin, name, None);
        }
    }

    fn set_workload(&mut self, origin: Origin, uid: Arc<str>, workload: Option<Arc<Workload>>) {
        let Some(change) = put(&mut self.workloads, uid, origin, workload) else { return };
        if let Some(gone) = change.gone {
            self.forget_workload(&gone, change.come.as_deref());
        }
        if let Some(come) = change.come {
            self.index_workload(&come);
        }
    }

    fn index_workload(&mut self, workload: &Arc<Workload>) {
        self.pods.insert(ByPod(Arc::clone(workload)));
        if !workload.hostname.is_empty() {
            self.hostnames.insert(ByHostname(Arc::clone(workload)));
        }
        for ip in own_addresses(workload) {
            self.addresses.insert(ByAddress { ip, workload: Arc::clone(workload) });
        }
        for (role, member) in workload.services.iter().enumerate() {
            let endpoint = Endpoint::new(workload, role);
            if let Some(endpoints) = self.endpoints.get_mut(&member.service) {
                endpoints.insert(endpoint);
            } else {
                let endpoints = [endpoint].into_iter().collect();
                self.endpoints.insert(member.service.clone(), endpoints);
            }
        }
    }

    /// Takes `workload` out of the indexes; what `next` will fill again may stay as it is.
    fn forget_workload(&mut self, workload: &Arc<Workload>, next: Option<&Workload>) {
        self.pods.remove(&ByPod(Arc::clone(workload)));
        self.hostnames.remove(&ByHostname(Arc::clone(workload)));
        for ip in own_addresses(workload) {
            self.addresses.remove(&ByAddress { ip, workload: Arc::clone(workload) });
        }
        for Membership { service, .. } in &workload.services {
            if next.is_some_and(|next| next.membership(service).is_some()) {
                continue;
            }
            let Some(endpoints) = self.endpoints.get_mut(service) else { continue };
            endpoints.remove(&workload.uid);
            if endpoints.is_empty() {
                self.endpoints.remove(service);
            }
        }
    }

    fn set_service(&mut self, origin: Origin, key: ServiceName, service: Option<Arc<Service>>) {
        let Some(change) = put(&mut self.services, HostFirst(key), origin, service) else { return };
        if let Some(service) = change.gone {
            for vip in vips(&service) {
                self.vips.remove(&vip);
            }
            for range in ranges(&service) {
                self.ranges.remove(&range);
            }
        }
        if let Some(service) = change.come {
            self.vips.extend(vips(&service));
            self.ranges.extend(ranges(&service));
        }
    }

    fn set_policy(&mut self, origin: Origin, key: Arc<str>, policy: Option<Arc<Policy>>) {
        let Some(change) = put(&mut self.policies, key, origin, policy) else { return };
        if let Some(policy) = change.gone {
            self.policy_index.remove(&policy);
        }
        if let Some(policy) = change.come {
            self.policy_index.insert(&policy);
        }
    }
}

/// The addresses that tell the workload. One of a host network is the node's: it does not tell its
/// pods apart.
fn own_addresses(workload: &Workload) -> impl Iterator<Item = std::net::IpAddr> {
    let own = workload.network_mode == NetworkMode::Standard;
    workload.addresses.iter().filter(move |_| own).copied()
}

fn vips(service: &Arc<Service>) -> impl Iterator<Item = ByVip> {
    service.vips.iter().map(|vip| ByVip {
        ip: vip.ip,
        network: Arc::clone(&vip.network),
        service: Arc::clone(service),
    })
}

fn ranges(service: &Arc<Service>) -> impl Iterator<Item = ByRange> {
    service.cidr_vips.iter().map(|vip| ByRange {
        network: Arc::clone(&vip.network),
        cidr: vip.cidr.trunc(),
        service: Arc::clone(service),
    })
}
