//! The resources of one type: by name, by what else they may be asked for, and in the order of their last change.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    ops::Bound,
    sync::Arc,
};

use crate::resource::Resource;

type Names = BTreeSet<Arc<str>>;

/// One type's resources.
#[derive(Debug, Default)]
pub(crate) struct Table {
    entries: HashMap<Arc<str>, Entry>,
    /// The last change of each name.
    log: BTreeMap<u64, Arc<str>>,
    /// The changes that are removals.
    removals: BTreeSet<u64>,
    /// Removals up to this one have been forgotten.
    forgotten: u64,
    aliases: HashMap<Arc<str>, Names>,
    /// The workloads of each service.
    endpoints: HashMap<Arc<str>, Names>,
    nodes: HashMap<Arc<str>, Names>,
}

#[derive(Debug)]
struct Entry {
    number: u64,
    /// `None`: it is gone.
    resource: Option<Arc<Resource>>,
}

/// One change of the log.
#[derive(Debug)]
pub(crate) enum Changed<'a> {
    /// The resource is new or different.
    Set(&'a Arc<Resource>),
    /// The one of this name is gone.
    Removed(&'a Arc<str>),
}

impl Table {
    /// The resource of this name.
    pub(crate) fn get(&self, name: &str) -> Option<&Arc<Resource>> {
        self.entries.get(name)?.resource.as_ref()
    }

    /// All resources.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<Resource>> {
        self.entries.values().filter_map(|entry| entry.resource.as_ref())
    }

    /// What changed after `number`. `None`: removals since have been forgotten.
    pub(crate) fn since(&self, number: u64) -> Option<impl Iterator<Item = Changed<'_>>> {
        (number >= self.forgotten).then(|| {
            let range = self.log.range((Bound::Excluded(number), Bound::Unbounded));
            range.filter_map(|(_, name)| {
                let entry = self.entries.get(name)?;
                Some(entry.resource.as_ref().map_or(Changed::Removed(name), Changed::Set))
            })
        })
    }

    /// The names that a client may mean by `key`: the resource of that name, or those that have it as an alias.
    pub(crate) fn resolve<'a>(&'a self, key: &'a str) -> impl Iterator<Item = &'a Arc<Resource>> {
        let own = self.get(key);
        let aliased = self.aliases.get(key).into_iter().flatten();
        own.into_iter().chain(aliased.filter_map(|name| self.get(name)))
    }

    /// The workloads of the service of this name.
    pub(crate) fn endpoints(&self, service: &str) -> impl Iterator<Item = &Arc<Resource>> {
        self.endpoints.get(service).into_iter().flatten().filter_map(|name| self.get(name))
    }

    /// The workloads of the node of this name.
    pub(crate) fn of_node(&self, node: &str) -> impl Iterator<Item = &Arc<Resource>> {
        self.nodes.get(node).into_iter().flatten().filter_map(|name| self.get(name))
    }

    pub(super) fn set(&mut self, number: u64, resource: Arc<Resource>) {
        let name = Arc::clone(&resource.name);
        self.unlist(&name);
        let add = |map: &mut HashMap<Arc<str>, Names>, key: &Arc<str>| {
            map.entry(Arc::clone(key)).or_default().insert(Arc::clone(&name));
        };
        for alias in &resource.aliases {
            add(&mut self.aliases, alias);
        }
        for service in &resource.services {
            add(&mut self.endpoints, service);
        }
        if !resource.node.is_empty() {
            add(&mut self.nodes, &resource.node);
        }
        self.log.insert(number, Arc::clone(&name));
        self.entries.insert(name, Entry { number, resource: Some(resource) });
    }

    pub(super) fn remove(&mut self, number: u64, name: Arc<str>) {
        if self.get(&name).is_none() {
            return;
        }
        self.unlist(&name);
        self.log.insert(number, Arc::clone(&name));
        self.removals.insert(number);
        self.entries.insert(name, Entry { number, resource: None });
    }

    /// Forgets removals up to `until`, which everybody was told; and older ones beyond `most`, which somebody was not.
    pub(super) fn forget(&mut self, until: u64, most: usize) {
        while let Some(&number) = self.removals.first() {
            if number > until && self.removals.len() <= most {
                return;
            }
            self.removals.pop_first();
            self.forgotten = number;
            if let Some(name) = self.log.remove(&number) {
                self.entries.remove(&name);
            }
        }
    }

    /// Takes the last version of `name` out of every index and of the log.
    fn unlist(&mut self, name: &Arc<str>) {
        let Some(Entry { number, resource }) = self.entries.remove(name) else { return };
        self.log.remove(&number);
        self.removals.remove(&number);
        let Some(resource) = resource else { return };
        let take = |map: &mut HashMap<Arc<str>, Names>, key: &Arc<str>| {
            if let Some(names) = map.get_mut(key) {
                names.remove(name);
                if names.is_empty() {
                    map.remove(key);
                }
            }
        };
        for alias in &resource.aliases {
            take(&mut self.aliases, alias);
        }
        for service in &resource.services {
            take(&mut self.endpoints, service);
        }
        if !resource.node.is_empty() {
            take(&mut self.nodes, &resource.node);
        }
    }
}
