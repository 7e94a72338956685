//! A service's endpoints, shared between the versions of the mesh that differ in some of them.
//! Choosing among them is left to `route`.

use std::sync::Arc;

use crate::{
    blocks::{Blocks, Keyed},
    ports::{self, Ports},
    service::Service,
    workload::{Health, Membership, Workload},
};

/// A workload in its role as an endpoint of one of its services.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    workload: Arc<Workload>,
    /// Which of the workload's services: its place in `workload.services`.
    role: usize,
}

impl Endpoint {
    /// The endpoints that `workload` is: one for each of its services, by that service's place.
    pub(crate) fn new(workload: &Arc<Workload>, role: usize) -> Self {
        Self { workload: Arc::clone(workload), role }
    }

    /// The workload.
    pub fn workload(&self) -> &Arc<Workload> {
        &self.workload
    }

    /// Whether it is ready to serve this service.
    pub fn health(&self) -> Health {
        self.membership().and_then(|member| member.health).unwrap_or(self.workload.health)
    }

    /// The port that serves `port` of `service`. `None`: it does not serve it.
    pub fn target_port(&self, service: &Service, port: u16) -> Option<u16> {
        self.workload.target_port(self.ports(), service, port)
    }

    /// Its own target ports, which come before the service's.
    pub fn ports(&self) -> &Ports {
        self.membership().map_or(ports::NONE, |member| &member.ports)
    }

    fn membership(&self) -> Option<&Membership> {
        self.workload.services.get(self.role)
    }
}

impl Keyed for Endpoint {
    fn key(&self) -> &str {
        &self.workload.uid
    }
}

/// The endpoints of one service, ordered by uid. Cloning is cheap.
#[derive(Clone, Debug, Default)]
pub struct Endpoints {
    all: Blocks<Endpoint>,
    /// How many have a capacity of 1.
    plain: usize,
}

impl Endpoints {
    /// How many there are, healthy or not.
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &Endpoint> {
        self.all.iter()
    }

    /// The one that is the workload `uid`.
    pub fn find(&self, uid: &str) -> Option<&Endpoint> {
        self.all.find(uid)
    }

    /// The one at `index` of the order.
    pub(crate) fn get(&self, index: usize) -> Option<&Endpoint> {
        self.all.get(index)
    }

    /// Whether all have a capacity of 1, so that chance need not look at each.
    pub(crate) fn are_equal(&self) -> bool {
        self.plain == self.len()
    }

    /// Adds `endpoint`, or puts it in the place of the one with its uid.
    pub(crate) fn insert(&mut self, endpoint: Endpoint) {
        self.plain += usize::from(is_plain(&endpoint));
        let old = self.all.insert(endpoint);
        self.plain -= usize::from(old.is_some_and(|old| is_plain(&old)));
    }

    /// Removes the one that is the workload `uid`, if there is one.
    pub(crate) fn remove(&mut self, uid: &str) {
        let old = self.all.remove(uid);
        self.plain -= usize::from(old.is_some_and(|old| is_plain(&old)));
    }
}

impl FromIterator<Endpoint> for Endpoints {
    fn from_iter<I: IntoIterator<Item = Endpoint>>(endpoints: I) -> Self {
        let mut new = Self::default();
        for endpoint in endpoints {
            new.insert(endpoint);
        }
        new
    }
}

fn is_plain(endpoint: &Endpoint) -> bool {
    endpoint.workload.capacity == 1
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::file;

    #[test]
    fn endpoints_are_equal_while_all_have_a_capacity_of_one() {
        let text = "workloads: [{uid: w, name: w, namespace: n}]";
        let mesh = file::parse(Path::new("mesh.yaml"), text).unwrap();
        let workload = mesh.find_workload("w").unwrap();
        let endpoint = |uid: &str, capacity: u32| {
            let workload = Workload { uid: uid.into(), capacity, ..Workload::clone(workload) };
            Endpoint::new(&Arc::new(workload), 0)
        };
        let mut endpoints = Endpoints::default();
        assert!(endpoints.are_equal());
        for (uid, capacity, want) in
            [("a", 1, true), ("b", 2, false), ("b", 1, true), ("a", 0, false), ("c", 1, false)]
        {
            endpoints.insert(endpoint(uid, capacity));
            assert_eq!(endpoints.are_equal(), want, "{uid} {capacity}");
        }
        endpoints.remove("a");
        endpoints.remove("x");
        assert!(endpoints.are_equal() && endpoints.len() == 2);
    }
}
