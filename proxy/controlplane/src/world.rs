//! Every object that is known, by kind and name, and what a change of one of them touches.
//!
//! Knows which parts of the mesh have to be translated again; the translating is `translate`'s.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use culvert_mesh::Snapshot;

use crate::objects::{
    Authorization, EndpointSlice, Gateway, Key, Kind, Namespace, Node, Object, PeerAuthentication,
    Pod, Service, ServiceEntry, WorkloadEntry,
};

/// What is known of the mesh as a whole, beside its objects.
#[derive(Clone, Debug)]
pub struct MeshConfig {
    /// The cluster that the objects are of.
    pub cluster_id: String,
    /// The trust domain of all identities.
    pub trust_domain: String,
    /// The suffix of services' host names, after `svc.`.
    pub domain: String,
    /// The network that pods and services are in.
    pub network: String,
    /// The namespace whose policies are for the whole mesh.
    pub root_namespace: String,
}

impl Default for MeshConfig {
    fn default() -> Self {
        Self {
            cluster_id: "Kubernetes".to_owned(),
            trust_domain: "cluster.local".to_owned(),
            domain: "cluster.local".to_owned(),
            network: String::new(),
            root_namespace: "istio-system".to_owned(),
        }
    }
}

/// One namespace.
#[derive(Debug, Default)]
pub(crate) struct Space {
    pub(crate) meta: Option<Namespace>,
    pub(crate) pods: BTreeMap<String, Arc<Pod>>,
    pub(crate) services: BTreeMap<String, Service>,
    pub(crate) slices: BTreeMap<String, EndpointSlice>,
    pub(crate) service_entries: BTreeMap<String, ServiceEntry>,
    pub(crate) workload_entries: BTreeMap<String, WorkloadEntry>,
    pub(crate) gateways: BTreeMap<String, Gateway>,
    pub(crate) policies: BTreeMap<String, Authorization>,
    pub(crate) authentications: BTreeMap<String, PeerAuthentication>,
}

impl Space {
    fn is_empty(&self) -> bool {
        self.meta.is_none()
            && self.pods.is_empty()
            && self.services.is_empty()
            && self.slices.is_empty()
            && self.service_entries.is_empty()
            && self.workload_entries.is_empty()
            && self.gateways.is_empty()
            && self.policies.is_empty()
            && self.authentications.is_empty()
    }
}

/// All objects.
#[derive(Debug, Default)]
pub(crate) struct World {
    pub(crate) spaces: BTreeMap<String, Space>,
    pub(crate) nodes: BTreeMap<String, Node>,
    /// Mesh documents by where they stand.
    pub(crate) meshes: BTreeMap<String, Arc<Snapshot>>,
    /// How many peer authentications there are.
    pub(crate) authentications: usize,
}

/// What has to be translated again.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Dirty {
    pub(crate) everything: bool,
    /// Namespaces with all that is in them.
    pub(crate) spaces: BTreeSet<String>,
    /// Pods, by namespace and name.
    pub(crate) pods: BTreeSet<(String, String)>,
    /// The mesh documents.
    pub(crate) meshes: bool,
}

impl Dirty {
    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// One step of the world.
#[derive(Clone, Debug)]
pub(crate) enum Change {
    /// An object is new or different.
    Set(Key, Object),
    /// An object is gone.
    Remove(Key),
    /// A mesh document, by where it stands, is new, different, or gone.
    Mesh(String, Option<Arc<Snapshot>>),
}

impl World {
    /// Takes one change in and notes in `dirty` what it touches. A change that changes nothing touches nothing.
    pub(crate) fn apply(&mut self, change: Change, root: &str, dirty: &mut Dirty) {
        match change {
            Change::Mesh(origin, mesh) => {
                dirty.meshes = true;
                match mesh {
                    Some(mesh) => drop(self.meshes.insert(origin, mesh)),
                    None => drop(self.meshes.remove(&origin)),
                }
            }
            Change::Set(key, object) => self.set(key, Some(object), root, dirty),
            Change::Remove(key) => self.set(key, None, root, dirty),
        }
    }

    fn set(&mut self, key: Key, object: Option<Object>, root: &str, dirty: &mut Dirty) {
        let Key { kind, namespace, name } = key;
        if kind == Kind::Node {
            let node = object.and_then(|object| match object {
                Object::Node(node) => Some(node),
                _ => None,
            });
            if put(&mut self.nodes, name.clone(), node) {
                self.touch_node(&name, dirty);
            }
            return;
        }
        let space_name = if kind == Kind::Namespace { name.clone() } else { namespace };
        let space = self.spaces.entry(space_name.clone()).or_default();
        let changed = match (kind, object) {
            (_, Some(Object::Namespace(meta))) => space.meta.replace(meta) != space.meta,
            (_, Some(Object::Pod(pod))) => put(&mut space.pods, name.clone(), Some(pod)),
            (_, Some(Object::Service(o))) => put(&mut space.services, name.clone(), Some(*o)),
            (_, Some(Object::EndpointSlice(o))) => put(&mut space.slices, name.clone(), Some(*o)),
            (_, Some(Object::ServiceEntry(o))) => {
                put(&mut space.service_entries, name.clone(), Some(*o))
            }
            (_, Some(Object::WorkloadEntry(o))) => {
                put(&mut space.workload_entries, name.clone(), Some(*o))
            }
            (_, Some(Object::Gateway(o))) => put(&mut space.gateways, name.clone(), Some(*o)),
            (_, Some(Object::AuthorizationPolicy(o))) => {
                put(&mut space.policies, name.clone(), Some(*o))
            }
            (_, Some(Object::PeerAuthentication(o))) => {
                let before = space.authentications.len();
                let changed = put(&mut space.authentications, name.clone(), Some(*o));
                self.authentications += space.authentications.len() - before;
                changed
            }
            (_, Some(Object::Node(_))) | (Kind::Node, None) => false,
            (Kind::Namespace, None) => space.meta.take().is_some(),
            (Kind::Pod, None) => space.pods.remove(&name).is_some(),
            (Kind::Service, None) => space.services.remove(&name).is_some(),
            (Kind::EndpointSlice, None) => space.slices.remove(&name).is_some(),
            (Kind::ServiceEntry, None) => space.service_entries.remove(&name).is_some(),
            (Kind::WorkloadEntry, None) => space.workload_entries.remove(&name).is_some(),
            (Kind::Gateway, None) => space.gateways.remove(&name).is_some(),
            (Kind::AuthorizationPolicy, None) => space.policies.remove(&name).is_some(),
            (Kind::PeerAuthentication, None) => {
                let was = space.authentications.remove(&name).is_some();
                self.authentications -= usize::from(was);
                was
            }
        };
        if self.spaces.get(&space_name).is_some_and(Space::is_empty) {
            self.spaces.remove(&space_name);
        }
        if changed {
            touch(kind, space_name, name, root, dirty);
        }
    }

    /// Pods take their locality from their node.
    fn touch_node(&self, node: &str, dirty: &mut Dirty) {
        for (namespace, space) in &self.spaces {
            let on_node = space.pods.iter().filter(|(_, pod)| pod.spec.node_name == *node);
            dirty.pods.extend(on_node.map(|(name, _)| (namespace.clone(), name.clone())));
        }
    }
}

fn touch(kind: Kind, namespace: String, name: String, root: &str, dirty: &mut Dirty) {
    match kind {
        Kind::Pod => drop(dirty.pods.insert((namespace, name))),
        // Any namespace may use the waypoint.
        Kind::Gateway => dirty.everything = true,
        // The last or first one brings or takes a policy of the whole mesh; the root's are inherited by all.
        Kind::PeerAuthentication | Kind::AuthorizationPolicy if namespace == root => {
            dirty.everything = true;
        }
        Kind::PeerAuthentication => {
            dirty.spaces.insert(root.to_owned());
            dirty.spaces.insert(namespace);
        }
        Kind::Namespace
        | Kind::Service
        | Kind::EndpointSlice
        | Kind::ServiceEntry
        | Kind::WorkloadEntry
        | Kind::AuthorizationPolicy
        | Kind::Node => drop(dirty.spaces.insert(namespace)),
    }
}

/// Sets or removes an entry, and tells whether that made a difference.
fn put<T: PartialEq>(map: &mut BTreeMap<String, T>, name: String, value: Option<T>) -> bool {
    match value {
        Some(value) if map.get(&name) == Some(&value) => false,
        Some(value) => {
            map.insert(name, value);
            true
        }
        None => map.remove(&name).is_some(),
    }
}
