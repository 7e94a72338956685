//! Which service accounts run on which node: what a node may ask certificates for.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, PoisonError, RwLock},
};

use culvert_mesh::Snapshot;

use crate::{
    objects::{Key, Kind, Object, Pod},
    world::Change,
};

/// Where everything runs, kept in step with the objects.
#[derive(Debug, Default)]
pub(crate) struct Placements {
    current: RwLock<Current>,
}

#[derive(Debug, Default)]
struct Current {
    pods: HashMap<(String, String), Arc<Pod>>,
    meshes: BTreeMap<String, Arc<Snapshot>>,
    /// How many pods and workloads run as an account, by node.
    running: HashMap<String, HashMap<Account, usize>>,
}

/// A namespace and the name of an account in it.
type Account = (String, String);

/// A pod, as far as a caller that claims to be it has to match.
#[derive(Debug)]
pub(crate) struct Caller {
    pub(crate) uid: String,
    pub(crate) account: String,
    pub(crate) node: String,
}

impl Placements {
    /// Takes changes in that the objects are about to take in, too.
    pub(crate) fn apply(&self, changes: &[Change]) {
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        for change in changes {
            match change {
                Change::Set(Key { kind: Kind::Pod, namespace, name }, Object::Pod(pod)) => {
                    current.set((namespace.clone(), name.clone()), Some(Arc::clone(pod)));
                }
                Change::Remove(Key { kind: Kind::Pod, namespace, name }) => {
                    current.set((namespace.clone(), name.clone()), None);
                }
                Change::Mesh(origin, mesh) => current.set_mesh(origin, mesh.as_ref()),
                Change::Set(..) | Change::Remove(_) => {}
            }
        }
    }

    /// Whether something that has not ended runs as this account on `node`.
    pub(crate) fn runs(&self, node: &str, namespace: &str, account: &str) -> bool {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        let key = (namespace.to_owned(), account.to_owned());
        current.running.get(node).is_some_and(|accounts| accounts.contains_key(&key))
    }

    /// The pod of this name.
    pub(crate) fn pod(&self, namespace: &str, name: &str) -> Option<Caller> {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        let pod = current.pods.get(&(namespace.to_owned(), name.to_owned()))?;
        Some(Caller {
            uid: pod.metadata.uid.clone(),
            account: pod.service_account().to_owned(),
            node: pod.spec.node_name.clone(),
        })
    }
}

impl Current {
    fn set(&mut self, key: (String, String), pod: Option<Arc<Pod>>) {
        let namespace = key.0.clone();
        let old = match &pod {
            Some(pod) => self.pods.insert(key, Arc::clone(pod)),
            None => self.pods.remove(&key),
        };
        for (pod, by) in old.iter().map(|pod| (pod, -1)).chain(pod.iter().map(|pod| (pod, 1))) {
            if !pod.is_over() {
                let account = (namespace.clone(), pod.service_account().to_owned());
                self.count(&pod.spec.node_name, account, by);
            }
        }
    }

    fn set_mesh(&mut self, origin: &str, mesh: Option<&Arc<Snapshot>>) {
        let old = match mesh {
            Some(mesh) => self.meshes.insert(origin.to_owned(), Arc::clone(mesh)),
            None => self.meshes.remove(origin),
        };
        let meshes = old.iter().map(|mesh| (mesh, -1)).chain(mesh.map(|mesh| (mesh, 1)));
        for (mesh, by) in meshes {
            for workload in mesh.workloads() {
                let account = (
                    workload.namespace().to_owned(),
                    workload.identity.service_account().to_owned(),
                );
                self.count(&workload.node, account, by);
            }
        }
    }

    fn count(&mut self, node: &str, account: Account, by: isize) {
        if node.is_empty() {
            return;
        }
        let accounts = self.running.entry(node.to_owned()).or_default();
        let count = accounts.entry(account.clone()).or_default();
        *count = count.saturating_add_signed(by);
        if *count == 0 {
            accounts.remove(&account);
        }
        if accounts.is_empty() {
            self.running.remove(node);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::objects;

    fn pod(name: &str, node: &str, phase: &str) -> Change {
        let value = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": { "name": name, "namespace": "shop", "uid": format!("uid-{name}") },
            "spec": { "nodeName": node, "serviceAccountName": "web" },
            "status": { "phase": phase, "podIP": "10.0.0.1" },
        });
        let (key, object) = objects::read(value).unwrap().unwrap();
        Change::Set(key, object)
    }

    fn gone(name: &str) -> Change {
        Change::Remove(Key { kind: Kind::Pod, namespace: "shop".to_owned(), name: name.to_owned() })
    }

    #[test]
    fn an_account_runs_on_a_node_as_long_as_one_of_its_pods_does() {
        let placements = Placements::default();
        placements.apply(&[pod("a", "n1", "Running"), pod("b", "n1", "Pending")]);
        assert!(placements.runs("n1", "shop", "web"));
        assert!(!placements.runs("n2", "shop", "web"));
        assert!(!placements.runs("n1", "shop", "cart"));
        assert!(!placements.runs("n1", "bank", "web"));
        placements.apply(&[gone("a")]);
        assert!(placements.runs("n1", "shop", "web"));
        placements.apply(&[pod("b", "n1", "Succeeded")]);
        assert!(!placements.runs("n1", "shop", "web"));
    }

    #[test]
    fn a_pod_that_moves_takes_its_account_along() {
        let placements = Placements::default();
        placements.apply(&[pod("a", "n1", "Running")]);
        placements.apply(&[pod("a", "n2", "Running")]);
        assert!(!placements.runs("n1", "shop", "web") && placements.runs("n2", "shop", "web"));
        assert_eq!(placements.pod("shop", "a").unwrap().uid, "uid-a");
        assert!(placements.pod("shop", "b").is_none());
    }

    #[test]
    fn a_pod_without_a_node_runs_nowhere() {
        let placements = Placements::default();
        placements.apply(&[pod("a", "", "Pending")]);
        assert!(!placements.runs("", "shop", "web"));
    }

    #[test]
    fn accounts_of_mesh_documents_come_and_go_with_them() {
        let placements = Placements::default();
        let text = "workloads: [{uid: u, name: a, namespace: shop, serviceAccount: web, node: n1}]";
        let mesh = Arc::new(culvert_mesh::file::parse("f".as_ref(), text).unwrap());
        placements.apply(&[Change::Mesh("f".to_owned(), Some(Arc::clone(&mesh)))]);
        placements.apply(&[Change::Mesh("f".to_owned(), Some(mesh))]);
        assert!(placements.runs("n1", "shop", "web"));
        placements.apply(&[Change::Mesh("f".to_owned(), None)]);
        assert!(!placements.runs("n1", "shop", "web"));
    }
}
