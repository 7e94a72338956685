//! Texts that many records share, kept once.

use std::{collections::HashSet, sync::Arc};

use crate::{
    Identity,
    policy::Policy,
    service::Service,
    snapshot::Update,
    workload::{Destination, Gateway, ServiceName, Workload},
};

/// The texts that records name again and again: nodes, networks, namespaces, identities, services,
/// policies. A feed's messages hold a copy of each in every record.
///
/// What no record uses any more is forgotten once there is as much of it as of the rest.
#[derive(Debug, Default)]
pub struct Pool {
    texts: HashSet<Arc<str>>,
    /// How many texts there were when the unused ones were last forgotten.
    used: usize,
}

impl Pool {
    /// Makes `update` share its texts with those before it.
    #[must_use]
    pub fn share(&mut self, mut update: Update) -> Update {
        match &mut update {
            Update::Workload(workload) => self.share_workload(workload),
            Update::Service(service) => self.share_service(service),
            Update::Policy(Policy { namespace, .. }) => self.share_text(namespace),
            Update::RemoveAddress(_) | Update::RemovePolicy(_) => {}
        }
        if self.texts.len() > 2 * self.used + FEW {
            self.texts.retain(|text| Arc::strong_count(text) > 1);
            self.used = self.texts.len();
        }
        update
    }

    fn share_workload(&mut self, workload: &mut Workload) {
        let locality = &mut workload.locality;
        for text in [
            &mut workload.network,
            &mut workload.node,
            &mut workload.workload_name,
            &mut workload.canonical_name,
            &mut workload.canonical_revision,
            &mut workload.cluster_id,
            &mut locality.region,
            &mut locality.zone,
            &mut locality.subzone,
        ] {
            self.share_text(text);
        }
        self.share_identity(&mut workload.identity);
        for gateway in [&mut workload.waypoint, &mut workload.network_gateway].into_iter().flatten()
        {
            self.share_gateway(gateway);
        }
        for policy in &mut workload.policies {
            self.share_text(policy);
        }
        for member in &mut workload.services {
            self.share_name(&mut member.service);
        }
    }

    fn share_service(&mut self, service: &mut Service) {
        self.share_name(&mut service.key);
        for vip in &mut service.vips {
            self.share_text(&mut vip.network);
        }
        for vip in &mut service.cidr_vips {
            self.share_text(&mut vip.network);
        }
        for identity in &mut service.subject_alt_names {
            self.share_identity(identity);
        }
        let weighted = service.weighted_waypoints.iter_mut().map(|w| &mut w.gateway);
        for gateway in weighted.chain(&mut service.waypoint) {
            self.share_gateway(gateway);
        }
    }

    fn share_gateway(&mut self, gateway: &mut Gateway) {
        match &mut gateway.destination {
            Destination::Address(address) => self.share_text(&mut address.network),
            Destination::Name(name) => self.share_name(name),
        }
    }

    fn share_name(&mut self, name: &mut ServiceName) {
        self.share_text(&mut name.namespace);
        self.share_text(&mut name.hostname);
    }

    fn share_identity(&mut self, identity: &mut Identity) {
        self.share_text(identity.shared_uri());
    }

    fn share_text(&mut self, text: &mut Arc<str>) {
        match self.texts.get(&**text) {
            Some(known) => *text = Arc::clone(known),
            None => drop(self.texts.insert(Arc::clone(text))),
        }
    }
}

/// So few texts are not worth forgetting.
const FEW: usize = 1024;

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::file;

    fn workload(node: &str) -> Workload {
        let text = format!(
            "workloads: [{{uid: w, name: w, namespace: n, node: {node}, services: {{n/s: {{}}}}}}]\n\
             services: [{{name: s, namespace: n, hostname: s}}]"
        );
        let mesh = file::parse(Path::new("mesh.yaml"), &text).unwrap();
        Workload::clone(mesh.find_workload("w").unwrap())
    }

    fn share(pool: &mut Pool, node: &str) -> Workload {
        let before = workload(node);
        let Update::Workload(after) = pool.share(Update::Workload(before.clone())) else {
            panic!("not a workload");
        };
        assert_eq!(after, before);
        after
    }

    #[test]
    fn equal_texts_are_one() {
        let mut pool = Pool::default();
        let (mut one, mut other) = (share(&mut pool, "a"), share(&mut pool, "a"));
        assert!(Arc::ptr_eq(&one.node, &other.node));
        assert!(Arc::ptr_eq(one.identity.shared_uri(), other.identity.shared_uri()));
        assert!(Arc::ptr_eq(
            &one.services[0].service.hostname,
            &other.services[0].service.hostname
        ));
        // A text of its own is no business of the pool.
        assert!(!Arc::ptr_eq(&one.uid, &other.uid));
    }

    #[test]
    fn texts_that_nobody_uses_are_forgotten() {
        let mut pool = Pool::default();
        let kept = share(&mut pool, "kept");
        for i in 0..5000 {
            let _gone = share(&mut pool, &format!("node-{i}"));
            assert!(pool.texts.len() <= 2 * pool.used + FEW);
        }
        assert!(pool.texts.len() < 2000 && pool.texts.contains(&kept.node));
    }
}
