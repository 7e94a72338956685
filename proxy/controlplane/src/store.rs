//! The resources as they are now, shared by all connections, and in which order they came to be so.
//!
//! Every change has a number. A connection remembers the number up to which it has told its client, so that what is left
//! to tell is a range of the log: as long as the changes are many, however many resources there are, and however far the
//! client lags; a name that changes twice meanwhile is told once.

mod table;

#[cfg(test)]
mod tests;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
};

use tokio::sync::watch;

pub(crate) use self::table::{Changed, Table};
use crate::{resource::Type, translate::Update};

/// Removals that are kept for connections which have not told them yet. More, and the slowest have to start over.
const MAX_REMOVED: usize = 1 << 20;

/// The resources.
#[derive(Debug)]
pub(crate) struct Store {
    tables: RwLock<Tables>,
    readers: Mutex<Readers>,
    changed: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Tables {
    /// The number of the last change.
    last: u64,
    address: Table,
    authorization: Table,
}

#[derive(Debug, Default)]
struct Readers {
    next: u64,
    /// What each connection has told, by type; `None` before it tells anything.
    told: HashMap<u64, [Option<u64>; 2]>,
}

/// A view of the resources between two changes.
pub(crate) struct View<'a>(RwLockReadGuard<'a, Tables>);

impl View<'_> {
    /// The number of the last change.
    pub(crate) fn last(&self) -> u64 {
        self.0.last
    }

    pub(crate) fn table(&self, kind: Type) -> &Table {
        match kind {
            Type::Address => &self.0.address,
            Type::Authorization => &self.0.authorization,
        }
    }
}

impl Store {
    pub(crate) fn new() -> Self {
        Self {
            tables: RwLock::default(),
            readers: Mutex::default(),
            changed: watch::Sender::new(0),
        }
    }

    pub(crate) fn read(&self) -> View<'_> {
        View(self.tables.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// The number of the last change, and news of the next ones.
    pub(crate) fn subscribe(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Takes an update in. Its changes become visible at once, together.
    pub(crate) fn apply(&self, update: Update) {
        if update.changed.is_empty() && update.removed.is_empty() {
            return;
        }
        let mut tables = self.write();
        // A connection claims its place while it reads, so that what it has yet to tell is not forgotten.
        let oldest = self.readers().oldest();
        for resource in update.changed {
            tables.last += 1;
            let number = tables.last;
            tables.of(resource.kind).set(number, resource);
        }
        for (kind, name) in update.removed {
            tables.last += 1;
            let number = tables.last;
            tables.of(kind).remove(number, name);
        }
        for (index, kind) in Type::ALL.into_iter().enumerate() {
            let until = oldest.get(index).copied().flatten().unwrap_or(tables.last);
            tables.of(kind).forget(until, MAX_REMOVED);
        }
        let last = tables.last;
        drop(tables);
        self.changed.send_replace(last);
    }

    /// Counts a connection in; removals are kept until it has told them.
    pub(crate) fn reader(self: &Arc<Self>) -> Reader {
        let mut readers = self.readers();
        let id = readers.next;
        readers.next += 1;
        readers.told.insert(id, [None; 2]);
        drop(readers);
        Reader { store: Arc::clone(self), id }
    }

    fn write(&self) -> RwLockWriteGuard<'_, Tables> {
        self.tables.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn readers(&self) -> MutexGuard<'_, Readers> {
        self.readers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Tables {
    fn of(&mut self, kind: Type) -> &mut Table {
        match kind {
            Type::Address => &mut self.address,
            Type::Authorization => &mut self.authorization,
        }
    }
}

impl Readers {
    /// What the slowest connection has told, by type.
    fn oldest(&self) -> [Option<u64>; 2] {
        let of = |index: usize| {
            self.told.values().filter_map(|told| told.get(index).copied().flatten()).min()
        };
        [of(0), of(1)]
    }
}

/// A connection's claim to removals.
#[derive(Debug)]
pub(crate) struct Reader {
    store: Arc<Store>,
    id: u64,
}

impl Reader {
    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    /// Notes that everything of `kind` up to `number` has been told.
    pub(crate) fn told(&self, kind: Type, number: u64) {
        let mut readers = self.store.readers();
        let index = match kind {
            Type::Address => 0,
            Type::Authorization => 1,
        };
        if let Some(told) = readers.told.get_mut(&self.id).and_then(|told| told.get_mut(index)) {
            *told = Some(number);
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.store.readers().told.remove(&self.id);
    }
}
