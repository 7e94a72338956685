//! The table of connections: which are in rotation, which are being dialled.
//!
//! Each operation holds the lock of one shard for a few steps, and none waits.

use std::{
    collections::HashMap,
    fmt,
    hash::{BuildHasher as _, RandomState},
    net::IpAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use h2::client::SendRequest;
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};

use super::{
    Key, Outcome, PoolOptions,
    slots::{Slot, Slots},
};
use crate::hbone::client::ConnectError;

const SHARDS: usize = 16;

type Shard<K> = HashMap<K, Entry>;

/// What is there for one key; never empty.
#[derive(Default)]
struct Entry {
    connections: Vec<Arc<Pooled>>,
    dial: Option<Outcome>,
}

/// A connection in rotation.
pub(super) struct Pooled {
    pub(super) send: SendRequest<Bytes>,
    pub(super) slots: Arc<Slots>,
    /// The address that it was dialled from, unless it is not over TCP.
    pub(super) local: Option<IpAddr>,
}

/// Whether an address can still be used as the source of connections.
pub(super) type Owns = Box<dyn Fn(IpAddr) -> bool + Send + Sync>;

/// What a caller has to do.
pub(super) enum Checkout<K: Key> {
    /// Open a stream.
    Ready(Arc<Pooled>, Slot),
    /// Await the dial of someone else, then ask again.
    Wait(Outcome),
    /// Dial.
    Dial(Dialing<K>),
    /// Give up: there are that many connections, all in use.
    Full(usize),
}

pub(super) struct Table<K> {
    shards: [Mutex<Shard<K>>; SHARDS],
    hasher: RandomState,
    /// Connections and dials that the limit counts.
    count: AtomicUsize,
    options: PoolOptions,
    owns: Owns,
}

impl<K> fmt::Debug for Table<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Table").field("count", &self.count).finish_non_exhaustive()
    }
}

impl<K: Key> Table<K> {
    pub(super) fn new(options: PoolOptions, owns: Owns) -> Self {
        Self {
            shards: Default::default(),
            hasher: RandomState::new(),
            count: AtomicUsize::new(0),
            options,
            owns,
        }
    }

    pub(super) fn options(&self) -> &PoolOptions {
        &self.options
    }

    pub(super) fn connections(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    pub(super) fn checkout(self: &Arc<Self>, key: &K) -> Checkout<K> {
        let limit = self.options.connections;
        let mut shard = self.shard(key);
        if let Some(found) = self.find(&mut shard, key) {
            return found;
        }
        if self.connections() >= limit {
            // The idle one may be in any shard, and no two are locked at a time.
            drop(shard);
            self.release_an_idle_one();
            shard = self.shard(key);
            if let Some(found) = self.find(&mut shard, key) {
                return found;
            }
        }
        if self.connections() >= limit {
            return Checkout::Full(limit);
        }
        self.count.fetch_add(1, Ordering::AcqRel);
        let (outcome, waiting) = watch::channel(None);
        shard.entry(key.clone()).or_default().dial = Some(waiting);
        Checkout::Dial(Dialing { table: Arc::clone(self), key: key.clone(), outcome, done: false })
    }

    /// A connection with room for one more stream, or the dial that is to bring one.
    ///
    /// Connections that are stale leave rotation first; HTTP/2 closes each when its last stream has ended.
    fn find(&self, shard: &mut Shard<K>, key: &K) -> Option<Checkout<K>> {
        let entry = shard.get_mut(key)?;
        let before = entry.connections.len();
        entry.connections.retain(|pooled| !self.is_stale(pooled));
        self.count.fetch_sub(before - entry.connections.len(), Ordering::AcqRel);
        // The first with room: later ones become idle and are released when the load falls.
        for pooled in &entry.connections {
            let limit = self.options.streams.min(pooled.send.current_max_send_streams());
            if let Some(slot) = pooled.slots.take(limit) {
                return Some(Checkout::Ready(Arc::clone(pooled), slot));
            }
        }
        entry.dial.clone().map(Checkout::Wait)
    }

    /// Whether nothing that is sent on the connection is answered any more: its address has gone.
    pub(super) fn is_stale(&self, pooled: &Pooled) -> bool {
        pooled.local.is_some_and(|local| !(self.owns)(local))
    }

    /// Takes a connection out of rotation. Its streams go on.
    pub(super) fn evict(&self, key: &K, slots: &Arc<Slots>) {
        let mut shard = self.shard(key);
        self.remove(&mut shard, key, slots);
    }

    /// Takes a connection out of rotation if it has had no stream for `idle`; otherwise tells when to look again.
    fn evict_idle(&self, key: &K, slots: &Arc<Slots>, idle: Duration) -> Result<(), Instant> {
        let mut shard = self.shard(key);
        let due = slots.idle_since().unwrap_or_else(Instant::now) + idle;
        if slots.idle_since().is_none() || due > Instant::now() {
            return Err(due);
        }
        self.remove(&mut shard, key, slots);
        Ok(())
    }

    fn release_an_idle_one(&self) {
        for shard in &self.shards {
            let mut shard = lock(shard);
            let idle = shard.iter().find_map(|(key, entry)| {
                let mut connections = entry.connections.iter();
                let pooled = connections.find(|pooled| pooled.slots.idle_since().is_some())?;
                Some((key.clone(), Arc::clone(&pooled.slots)))
            });
            if let Some((key, slots)) = idle {
                self.remove(&mut shard, &key, &slots);
                return;
            }
        }
    }

    fn remove(&self, shard: &mut Shard<K>, key: &K, slots: &Arc<Slots>) {
        let Some(entry) = shard.get_mut(key) else { return };
        let before = entry.connections.len();
        entry.connections.retain(|pooled| !Arc::ptr_eq(&pooled.slots, slots));
        self.count.fetch_sub(before - entry.connections.len(), Ordering::AcqRel);
        if entry.connections.is_empty() && entry.dial.is_none() {
            shard.remove(key);
        }
    }

    fn shard(&self, key: &K) -> MutexGuard<'_, Shard<K>> {
        let index = self.hasher.hash_one(key) % SHARDS as u64;
        let shard = usize::try_from(index).ok().and_then(|index| self.shards.get(index));
        lock(shard.unwrap_or(&self.shards[0]))
    }
}

/// A panic while a shard is locked leaves it whole: each step on it is one insertion or removal.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The right to dial for a key. Dropping it makes those who wait give up.
pub(super) struct Dialing<K: Key> {
    table: Arc<Table<K>>,
    key: K,
    outcome: watch::Sender<Option<Result<(), Arc<ConnectError>>>>,
    done: bool,
}

impl<K: Key> Dialing<K> {
    /// Tells those who wait that they can ask again, and gives the dialler the first stream.
    pub(super) fn succeeded(
        mut self,
        send: SendRequest<Bytes>,
        local: Option<IpAddr>,
    ) -> (Rotation<K>, Arc<Pooled>, Slot) {
        let (slots, slot) = Slots::with_one();
        let pooled = Arc::new(Pooled { send, slots: Arc::clone(&slots), local });
        let mut shard = self.table.shard(&self.key);
        let entry = shard.entry(self.key.clone()).or_default();
        entry.connections.push(Arc::clone(&pooled));
        entry.dial = None;
        drop(shard);
        self.done = true;
        self.outcome.send_replace(Some(Ok(())));
        let rotation = Rotation { table: Arc::clone(&self.table), key: self.key.clone(), slots };
        (rotation, pooled, slot)
    }

    /// Tells those who wait why there is no connection.
    pub(super) fn failed(mut self, error: &Arc<ConnectError>) {
        self.give_up();
        self.outcome.send_replace(Some(Err(Arc::clone(error))));
    }

    fn give_up(&mut self) {
        self.done = true;
        let mut shard = self.table.shard(&self.key);
        if let Some(entry) = shard.get_mut(&self.key) {
            entry.dial = None;
            self.table.count.fetch_sub(1, Ordering::AcqRel);
            if entry.connections.is_empty() {
                shard.remove(&self.key);
            }
        }
    }
}

impl<K: Key> Drop for Dialing<K> {
    fn drop(&mut self) {
        if !self.done {
            self.give_up();
        }
    }
}

/// The presence of a connection in the table, which ends when this is dropped.
pub(super) struct Rotation<K: Key> {
    table: Arc<Table<K>>,
    key: K,
    slots: Arc<Slots>,
}

impl<K: Key> Rotation<K> {
    /// Ends once the connection has had no stream for `idle`, and is out of rotation; `idle` later at most.
    pub(super) async fn idle(&self, idle: Duration) {
        while let Err(due) = self.table.evict_idle(&self.key, &self.slots, idle) {
            sleep_until(due).await;
        }
    }
}

impl<K: Key> Drop for Rotation<K> {
    fn drop(&mut self) {
        self.table.evict(&self.key, &self.slots);
    }
}
