//! A set that many flows enter and leave at once; walking it is for scrapes and dumps.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// More than there are threads to carry flows, on most nodes.
const SHARDS: u64 = 16;

/// Values under keys that are given out in turn.
#[derive(Debug)]
pub(crate) struct Sharded<T> {
    shards: Vec<Mutex<HashMap<u64, T>>>,
    next: AtomicU64,
}

impl<T> Default for Sharded<T> {
    fn default() -> Self {
        Self { shards: (0..SHARDS).map(|_| Mutex::default()).collect(), next: AtomicU64::new(0) }
    }
}

impl<T> Sharded<T> {
    /// Adds `value` and returns its key.
    pub(crate) fn insert(&self, value: T) -> u64 {
        let key = self.next.fetch_add(1, Ordering::Relaxed);
        if let Some(mut shard) = self.shard(key) {
            shard.insert(key, value);
        }
        key
    }

    /// Takes out the value of `key`.
    pub(crate) fn remove(&self, key: u64) -> Option<T> {
        self.shard(key)?.remove(&key)
    }

    /// Shows every value to `visit`, holding one shard at a time; those that come and go meanwhile may be missed.
    pub(crate) fn for_each(&self, mut visit: impl FnMut(&T)) {
        for shard in &self.shards {
            shard.lock().unwrap_or_else(PoisonError::into_inner).values().for_each(&mut visit);
        }
    }

    fn shard(&self, key: u64) -> Option<MutexGuard<'_, HashMap<u64, T>>> {
        let index = usize::try_from(key % SHARDS).ok()?;
        Some(self.shards.get(index)?.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
