//! Objects to resources, as istiod's ambient index translates them.
//!
//! Pure: a [`Translator`] holds the objects and what was made of them; [`Translator::apply`] takes changes in and tells
//! which resources differ from before. A change of one pod translates one pod; one of what pods depend on, its namespace;
//! one of what every namespace may depend on, everything. Sending is left to `store` and `xds`.

mod authentication;
mod endpoints;
mod mesh;
mod policy;
mod service;
mod view;
mod waypoint;
mod workload;

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use crate::{
    objects::{Fault, Kind},
    resource::{Resource, Type},
    world::{Change, Dirty, MeshConfig, World},
};
use view::View;

/// Resources by type and name.
type Resources = BTreeMap<(Type, Arc<str>), Arc<Resource>>;

/// What a part of the mesh was translated to, and what was wrong with it.
#[derive(Debug, Default)]
struct Output {
    resources: Resources,
    faults: Vec<Fault>,
}

impl Output {
    /// Adds a resource; `false` if there is one of that name.
    fn add(&mut self, resource: Resource) -> bool {
        let key = (resource.kind, Arc::clone(&resource.name));
        let is_new = !self.resources.contains_key(&key);
        if is_new {
            self.resources.insert(key, Arc::new(resource));
        }
        is_new
    }
}

/// How the resources changed.
#[derive(Debug, Default)]
pub(crate) struct Update {
    pub(crate) changed: Vec<Arc<Resource>>,
    pub(crate) removed: Vec<(Type, Arc<str>)>,
}

/// The objects, what was made of them, and how to go on.
#[derive(Debug, Default)]
pub(crate) struct Translator {
    config: MeshConfig,
    world: World,
    views: HashMap<String, View>,
    pods: HashMap<(String, String), Output>,
    spaces: HashMap<String, Output>,
    meshes: Output,
    /// Pods and namespaces with faults, so that listing them costs nothing where there are none.
    faulty_pods: BTreeSet<(String, String)>,
    faulty_spaces: BTreeSet<String>,
}

impl Translator {
    pub(crate) fn new(config: MeshConfig) -> Self {
        Self { config, ..Self::default() }
    }

    /// Takes `changes` in and translates what they touch.
    pub(crate) fn apply(&mut self, changes: impl IntoIterator<Item = Change>) -> Update {
        let mut dirty = Dirty::default();
        for change in changes {
            self.world.apply(change, &self.config.root_namespace, &mut dirty);
        }
        let mut diff = Diff::default();
        if dirty.is_empty() {
            return diff.finish();
        }
        if dirty.everything {
            dirty.spaces.extend(self.world.spaces.keys().cloned());
            dirty.spaces.extend(self.spaces.keys().cloned());
            // The root's own policy exists whether or not the namespace holds anything.
            dirty.spaces.insert(self.config.root_namespace.clone());
        }
        for name in &dirty.spaces {
            self.space(name, &mut dirty.pods, &mut diff);
        }
        for (namespace, name) in dirty.pods {
            self.pod(namespace, name, &mut diff);
        }
        // A mesh document's records yield to those of objects, so that a change of these may bring them back.
        if dirty.meshes || !self.world.meshes.is_empty() {
            self.meshes(&mut diff);
        }
        diff.finish()
    }

    /// Everything that is wrong with the objects as they are.
    pub(crate) fn faults(&self) -> impl Iterator<Item = &Fault> {
        let pods = self.faulty_pods.iter().filter_map(|pod| self.pods.get(pod));
        let spaces = self.faulty_spaces.iter().filter_map(|space| self.spaces.get(space));
        pods.chain(spaces).chain([&self.meshes]).flat_map(|output| &output.faults)
    }

    fn space(&mut self, name: &str, pods: &mut BTreeSet<(String, String)>, diff: &mut Diff) {
        let Some(space) = self.world.spaces.get(name) else {
            self.views.remove(name);
            let mut output = Output::default();
            if name == self.config.root_namespace {
                authentication::shared(&self.world, &self.config, &mut output);
            }
            diff.replace(self.spaces.remove(name).unwrap_or_default(), &output);
            self.faulty_spaces.remove(name);
            if !output.resources.is_empty() {
                self.spaces.insert(name.to_owned(), output);
            }
            return;
        };
        let view = View::new(name, space, &self.world, &self.config);
        pods.extend(space.pods.keys().map(|pod| (name.to_owned(), pod.clone())));
        let mut output = Output::default();
        service::all(name, space, &view, &self.config, &mut output);
        endpoints::all(name, space, &view, &self.config, &mut output);
        policy::all(name, space, &self.config, &mut output);
        authentication::all(name, space, &view, &mut output);
        if name == self.config.root_namespace {
            authentication::shared(&self.world, &self.config, &mut output);
        }
        output.faults.extend(view.faults.iter().cloned());
        set(&mut self.faulty_spaces, name.to_owned(), &output);
        diff.replace(self.spaces.remove(name).unwrap_or_default(), &output);
        self.spaces.insert(name.to_owned(), output);
        self.views.insert(name.to_owned(), view);
    }

    fn pod(&mut self, namespace: String, name: String, diff: &mut Diff) {
        let space = self.world.spaces.get(&namespace);
        let pod = space.and_then(|space| space.pods.get(&name)).cloned();
        let mut output = Output::default();
        if let (Some(pod), Some(space)) = (&pod, space) {
            if !self.views.contains_key(&namespace) {
                let view = View::new(&namespace, space, &self.world, &self.config);
                self.views.insert(namespace.clone(), view);
            }
            if let Some(view) = self.views.get(&namespace) {
                workload::pod(&namespace, &name, pod, view, &self.world, &self.config, &mut output);
            }
        }
        let key = (namespace, name);
        set(&mut self.faulty_pods, key.clone(), &output);
        diff.replace(self.pods.remove(&key).unwrap_or_default(), &output);
        if pod.is_some() {
            self.pods.insert(key, output);
        }
    }

    fn meshes(&mut self, diff: &mut Diff) {
        let mut output = Output::default();
        for (origin, mesh) in &self.world.meshes {
            for resource in mesh::resources(mesh) {
                let key = (resource.kind, Arc::clone(&resource.name));
                if self.is_object(&key) || !output.add(resource) {
                    let what = format!("{} is defined twice; remove one", key.1);
                    output.faults.push(Fault { key: None, field: origin.clone(), what });
                }
            }
        }
        diff.replace(std::mem::take(&mut self.meshes), &output);
        self.meshes = output;
    }

    /// Whether a resource of this name was made of objects.
    fn is_object(&self, key: &(Type, Arc<str>)) -> bool {
        let parts: Vec<_> = key.1.splitn(5, '/').collect();
        match parts.as_slice() {
            // A workload's uid is `cluster/group/kind/namespace/name`; a pod's group is empty.
            [_, "", "Pod", namespace, pod] => {
                let output = self.pods.get(&((*namespace).to_owned(), (*pod).to_owned()));
                output.is_some_and(|output| output.resources.contains_key(key))
            }
            // A service's name is `namespace/host`, a policy's `namespace/name`.
            [_, _, _, namespace, _] | [namespace, ..] => self.has(namespace, key),
            [] => false,
        }
    }

    fn has(&self, namespace: &str, key: &(Type, Arc<str>)) -> bool {
        self.spaces.get(namespace).is_some_and(|output| output.resources.contains_key(key))
    }
}

fn set<K: Ord>(faulty: &mut BTreeSet<K>, key: K, output: &Output) {
    if output.faults.is_empty() {
        faulty.remove(&key);
    } else {
        faulty.insert(key);
    }
}

/// Collects differences. A name that one part gives up and another takes over has changed, not gone.
#[derive(Debug, Default)]
struct Diff {
    changed: BTreeMap<(Type, Arc<str>), Arc<Resource>>,
    removed: BTreeSet<(Type, Arc<str>)>,
}

impl Diff {
    fn replace(&mut self, old: Output, new: &Output) {
        for (key, resource) in &new.resources {
            if old.resources.get(key).is_none_or(|was| was.version != resource.version) {
                self.changed.insert(key.clone(), Arc::clone(resource));
            }
        }
        let gone = old.resources.into_keys().filter(|key| !new.resources.contains_key(key));
        self.removed.extend(gone);
    }

    fn finish(self) -> Update {
        let removed =
            self.removed.into_iter().filter(|key| !self.changed.contains_key(key)).collect();
        Update { changed: self.changed.into_values().collect(), removed }
    }
}

/// A fault of one object.
fn fault(kind: Kind, namespace: &str, name: &str, field: &str, what: impl Into<String>) -> Fault {
    let key = crate::objects::Key { kind, namespace: namespace.to_owned(), name: name.to_owned() };
    Fault { key: Some(key), field: field.to_owned(), what: what.into() }
}
