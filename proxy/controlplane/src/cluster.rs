//! Objects from a Kubernetes API: what the watches tell, as changes of the mesh.
//!
//! A mistake takes nothing away: what was read last of an object stays. Neither does a watch that breaks: what is gone is
//! known from a deletion, or from a whole list.

pub(crate) mod watches;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use kube::{
    api::{DynamicObject, TypeMeta},
    runtime::watcher::Event,
};

use self::watches::Told;
use crate::{
    documents::Problem,
    objects::{self, Fault, Key, Kind, Object},
    world::Change,
};

/// Which objects there are, and what is wrong with them.
#[derive(Debug)]
pub(crate) struct Cluster {
    kinds: BTreeMap<Kind, Known>,
    problems: BTreeMap<Key, Fault>,
}

/// Objects of one kind; what they say is the world's to know.
#[derive(Debug, Default)]
struct Known {
    keys: BTreeSet<Key>,
    /// Seen since a list began: what it does not name is gone.
    listed: Option<BTreeSet<Key>>,
    complete: bool,
}

impl Cluster {
    pub(crate) fn new() -> Self {
        let kinds = Kind::ALL.into_iter().map(|kind| (kind, Known::default())).collect();
        Self { kinds, problems: BTreeMap::new() }
    }

    /// Whether all kinds have been listed once.
    pub(crate) fn is_complete(&self) -> bool {
        self.missing().next().is_none()
    }

    /// The kinds that have never been listed.
    pub(crate) fn missing(&self) -> impl Iterator<Item = Kind> + '_ {
        self.kinds.iter().filter(|(_, known)| !known.complete).map(|(kind, _)| *kind)
    }

    /// Everything that is wrong with the objects as they are, in their order.
    pub(crate) fn problems(&self) -> Vec<Problem> {
        self.problems.values().cloned().map(Problem::in_cluster).collect()
    }

    /// Takes in what a watch of `kind` told, and adds what that changes.
    pub(crate) fn apply(&mut self, kind: Kind, told: Told, changes: &mut Vec<Change>) {
        let known = self.kinds.entry(kind).or_default();
        let event = match told {
            Told::Event(event) => *event,
            // At first there is nothing of it. Later, what there was stays: an API that is about to start may not know it
            // for a moment, and whoever removes a kind removes its objects first.
            Told::Absent => {
                known.listed = None;
                known.complete = true;
                return;
            }
        };
        match event {
            Event::Init => known.listed = Some(BTreeSet::new()),
            Event::InitApply(object) | Event::Apply(object) => {
                let key = key(kind, &object);
                if let Some(listed) = &mut known.listed {
                    listed.insert(key.clone());
                }
                let object = match read(&key, object) {
                    Ok(object) => {
                        self.problems.remove(&key);
                        Some(object)
                    }
                    Err(fault) => {
                        self.problems.insert(key.clone(), fault);
                        // What it said before this process began is not known, so that nothing less will do.
                        let first = !known.complete && !known.keys.contains(&key);
                        Object::closed(kind).filter(|_| first)
                    }
                };
                if let Some(object) = object {
                    known.keys.insert(key.clone());
                    changes.push(Change::Set(key, object));
                }
            }
            Event::Delete(object) => {
                let key = key(kind, &object);
                self.problems.remove(&key);
                if known.keys.remove(&key) {
                    changes.push(Change::Remove(key));
                }
            }
            Event::InitDone => {
                known.complete = true;
                let Some(listed) = known.listed.take() else { return };
                self.problems.retain(|key, _| key.kind != kind || listed.contains(key));
                let gone = known.keys.extract_if(.., |key| !listed.contains(key));
                changes.extend(gone.map(Change::Remove));
            }
        }
    }
}

fn key(kind: Kind, object: &DynamicObject) -> Key {
    let metadata = &object.metadata;
    let namespace = metadata.namespace.clone().filter(|_| kind.is_namespaced());
    Key {
        kind,
        namespace: namespace.unwrap_or_default(),
        name: metadata.name.clone().unwrap_or_default(),
    }
}

fn read(key: &Key, mut object: DynamicObject) -> Result<Object, Fault> {
    // Items of a list do not say what kind they are of. Its version is no matter once it was asked for.
    let group = key.kind.group();
    let api_version = if group.is_empty() { "v1".to_owned() } else { format!("{group}/v1") };
    object.types = Some(TypeMeta { api_version, kind: key.kind.name().to_owned() });
    object.metadata.managed_fields = None;
    let fault = |what: String| Fault { key: Some(key.clone()), field: String::new(), what };
    let value = serde_json::to_value(object)
        .map_err(|error| fault(format!("{error}; report what the API sent")))?;
    match objects::read(value) {
        Ok(Some((_, object))) => Ok(object),
        Ok(None) => Err(fault("of no kind that is known; report what the API sent".to_owned())),
        Err(error) => Err(Fault { key: Some(key.clone()), ..error }),
    }
}
